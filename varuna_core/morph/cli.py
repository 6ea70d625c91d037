"""Commands `agent.pyz morph ...`, which the scripts of a run that may morph call."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Iterator

from varuna_core.agent.cli import run_command
from varuna_core.agent.meeting.link import call_hub
from varuna_core.agent.restarts import choose_code
from varuna_core.agent.setup.site import WRONG_INPUT, Refusal, group_of, open_run
from varuna_core.morph.headless import build_lines
from varuna_core.morph.manager import Manager
from varuna_core.morph.node_daemon import run_node_daemon, run_standby_agent
from varuna_core.records.exits import NOT_READY
from varuna_core.records.files import PRIVATE_FILE, write_json
from varuna_core.records.morphing import (
    ENDED,
    Replaced,
    add_joins,
    is_outdated,
    read_join_job,
    read_joins,
    read_newest_epoch,
    read_state,
)
from varuna_core.records.plan import Plan, read_facts, read_plan
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import MorphFolder, RunFolder

_DESCRIPTION = """\
Commands of a run whose nodes may come and go: one manager, beside the batch script, and one `stay`
on each node.

  agent.pyz morph stay   --run DIR --session S    on every node, under srun; S is empty in a job
                                                  without a manager, whose nodes follow the run's
  agent.pyz morph manage --run DIR --session S    once, on the first node; run again if it is killed
  agent.pyz morph answer --run DIR --session S    prints `requeue`, the exit code, or `replaced`
                                                  if the run continues in another job
  agent.pyz morph leave  --run DIR --node INDEX   asks a node to leave at the next checkpoint
  agent.pyz morph leave  --run DIR --group NAME   asks all nodes of a group to leave
  agent.pyz morph others --run DIR --session S    prints the ids of the run's other jobs
"""

REPLACED = "replaced"
LOCK_S = 5.0
"""Seconds to wait for the previous manager, which was asked to end."""
POLL_S = 0.1


def main(words: list[str] | None = None) -> int:
    return run_command(build_parser().parse_args(sys.argv[2:] if words is None else words))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent morph",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run folder")
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument(
        "--session", required=True, metavar="S", help="job id and restart number of the script"
    )
    add = commands.add_parser(
        "stay", parents=[shared, job], help="start and stop the ranks of this node"
    )
    add.add_argument("--node", type=int, metavar="INDEX", help="index in the plan (SLURM_NODEID)")
    add.add_argument(
        "--orphaned",
        metavar="SHELL",
        help="shell command that requeues the job if the manager does not come back",
    )
    add.add_argument(
        "--at-last", metavar="SHELL", help="shell command that ends the job if it was not requeued"
    )
    add.add_argument(
        "--tether",
        action="store_true",
        help="the parent process holds standard input open; this process exits when it closes or "
        "falls silent",
    )
    add.set_defaults(run_command=_run_node_daemon)
    add = commands.add_parser("manage", parents=[shared, job], help="decide what the run does next")
    add.add_argument(
        "--heard", default="", metavar="NAMES", help="signals that came before, such as `TERM USR1`"
    )
    add.add_argument(
        "--expected",
        type=int,
        metavar="N",
        help="number of nodes that the job was given; default: that of the plan",
    )
    add.set_defaults(run_command=_run_manage)
    add = commands.add_parser("answer", parents=[shared, job], help="what the batch script does")
    add.set_defaults(run_command=_run_answer)
    add = commands.add_parser("others", parents=[shared, job], help="the run's other jobs")
    add.set_defaults(run_command=_run_others)
    add = commands.add_parser(
        "standby",
        parents=[shared],
        help="wait to be the next attempt's agent; `stay` starts it",
        description="Start ranks as for this node and attempt. They wait until standard input "
        "names the attempt to run, and end if it is closed.",
    )
    add.add_argument("--attempt", required=True, type=int, metavar="N")
    add.add_argument("--node", required=True, type=int, metavar="INDEX", help="in that attempt")
    add.set_defaults(run_command=_run_standby)
    add = commands.add_parser("leave", parents=[shared], help="send nodes home")
    who = add.add_mutually_exclusive_group(required=True)
    who.add_argument("--node", type=int, metavar="INDEX")
    who.add_argument("--group", metavar="NAME")
    add.set_defaults(run_command=_run_leave)
    return parser


def _load(path: Path) -> tuple[RunFolder, Plan]:
    run = open_run(path)
    plan = read_plan(run.plan)
    if plan is None or plan.morphing is None:
        raise Refusal(WRONG_INPUT, f"{run.plan}: missing, or not of a run that may morph")
    return run, plan


def _run_node_daemon(args: argparse.Namespace) -> int:
    run, plan = _load(args.run)
    plan = add_joins(plan, read_joins(run.morph))
    tether = sys.stdin.fileno() if args.tether else None
    lines = build_lines(args.orphaned, args.at_last or "false") if args.orphaned else ()
    return run_node_daemon(run, plan, args.session, args.node, lines, tether)


def _run_standby(args: argparse.Namespace) -> int:
    return run_standby_agent(open_run(args.run), args.attempt, args.node)


def _run_manage(args: argparse.Namespace) -> int:
    run, plan = _load(args.run)
    try:
        facts = read_facts(run, plan)
    except ValueError as error:
        raise Refusal(WRONG_INPUT, str(error)) from None
    if run.morph.unclaimed.exists():
        text = (
            f"{run.morph.unclaimed} is of an earlier vjob: submit again, from the last checkpoint"
        )
        raise Refusal(WRONG_INPUT, text)
    run.morph.make()
    with hold_alone(run.morph.lock):
        words = args.heard.split()
        try:
            return Manager(run, plan, facts, args.session, words, args.expected).run()
        except Replaced:
            print("manager: the run goes on in another job", file=sys.stderr)
            return 0


@contextlib.contextmanager
def hold_alone(path: Path) -> Iterator[None]:
    """Allow one manager on this host; without file locks, this is left to the batch script."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    continue
                raise Refusal(NOT_READY, f"another manager of this run holds {path}") from None
            except OSError:
                pass
            break
        yield
    finally:
        os.close(fd)


def _run_answer(args: argparse.Namespace) -> int:
    run, _ = _load(args.run)
    answer = choose_answer(run.morph, args.session)
    if args.session and answer == "0":
        answer = str(choose_code(run, 0))
    print(answer, flush=True)
    return 0


def choose_answer(folder: MorphFolder, session: str) -> str:
    """Return the answer to this session's batch script: `requeue`, `replaced`, or an exit code."""
    state = read_state(folder)
    if session and is_outdated(folder, session, read_newest_epoch(folder)):
        return REPLACED
    if state is None or state.phase != ENDED or (session and state.session != session):
        return str(NOT_READY if session else 0)  # the manager gave up without a verdict
    # A guest comes back with the run, and its end is none of its own.
    return "requeue" if state.requeue else str(state.code if session else 0)


def _run_others(args: argparse.Namespace) -> int:
    run, _ = _load(args.run)
    record = read_record(run)
    ids = [job.id for job in record.jobs] if record is not None else []
    jobs = [read_join_job(run.morph, join) for join in read_joins(run.morph)]
    ids += [item.job for item in jobs if item is not None and item.job is not None]
    own = args.session.rpartition(".")[0]
    print("\n".join(job for job in ids if job != own), flush=True)
    return 0


def _run_leave(args: argparse.Namespace) -> int:
    run, plan = _load(args.run)
    plan = add_joins(plan, read_joins(run.morph))
    if args.group is not None:
        group_of(plan, args.group)
        group = plan.group(args.group)
        seats = range(group.first_node, group.first_node + group.count)
    elif 0 <= args.node < plan.num_nodes:
        seats = range(args.node, args.node + 1)
    else:
        raise Refusal(WRONG_INPUT, f"node {args.node}: the run has 0 to {plan.num_nodes - 1}")
    for seat in seats:
        write_json(run.morph.leave(seat), {"node": seat})
    call_hub(run.morph.link)
    return 0
