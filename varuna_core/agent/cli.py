"""Commands of the agent, which batch and node scripts call, or a person who examines a problem."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from varuna_core.agent.setup.site import STOPPED, Refusal, load_plan, open_run
from varuna_core.facts.cause import EndCause
from varuna_core.records.exits import NOT_READY
from varuna_core.records.record import is_cancel_asked
from varuna_core.records.requests import SIGNAL_NAMES, STOP_KINDS, write_signal, write_stop
from varuna_core.records.runfolder import RunFolder

# A job starts the agent three times on its first node, and each command needs a third of it: a
# command imports what it calls.

SCONTROL_S = 60.0
LONGEST_LINE = 160
"""Most characters of a setup line that a reason quotes."""
_DESCRIPTION = """\
The node agent of vjob: what runs between the scheduler and the ranks of a training run.
It needs a run folder with a plan.json in it, as `vjob submit` makes one.

A batch script uses it in this order:
  agent.pyz open  --run DIR --attempt N            once, on the first node
  agent.pyz node  --run DIR --attempt N            on every node, under srun
  agent.pyz close --run DIR --attempt N --status $?  once; its last line is the exit code
Further commands end the attempt, send the ranks a signal, print the stacks of a node's ranks, and
open a shell in the ranks' container:
  agent.pyz stop   --run DIR --attempt N --reason TEXT
  agent.pyz signal --run DIR --attempt N --name USR1
  agent.pyz stacks --run DIR --attempt N           on each node
  agent.pyz shell  --run DIR --attempt N [COMMAND ...]
"""

_EPILOG = """\
exit codes: 0 all ranks exited 0; 2 wrong input; 112 preflight refused; 113 a node was lost;
114 a hang; 143 stopped from outside; anything else is the code of the rank that failed first.
"""


def main(words: list[str] | None = None) -> int:
    return run_command(build_parser().parse_args(words))


def run_command(args: argparse.Namespace) -> int:
    """Run a parsed command; return its exit code, also if the command is refused or a disk is full
    or lost."""
    try:
        return int(args.run_command(args))
    except Refusal as refusal:
        print(f"vjob agent: {refusal.reason}", file=sys.stderr)
        return refusal.code
    except OSError as error:  # a full or vanished disk
        name = f" {error.filename}" if error.filename else ""
        print(f"vjob agent: cannot go on:{name}: {error.strerror}", file=sys.stderr)
        return NOT_READY


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agent",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run folder")
    shared = argparse.ArgumentParser(add_help=False, parents=[folder])
    shared.add_argument(
        "--attempt", required=True, type=int, metavar="N", help="number of the attempt, from 0"
    )
    group = argparse.ArgumentParser(add_help=False)
    group.add_argument("--group", metavar="G", help="group of this job, in split runs")

    add = commands.add_parser(
        "attempt",
        parents=[folder],
        help="print the number of the attempt that a batch script begins with",
        description="Print how often ranks of this run were started before: by Slurm, as its "
        "options say, and by `cluster.restarts`, as the run's events say.",
    )
    add.add_argument(
        "--requeues", required=True, type=int, metavar="N", help="SLURM_RESTART_COUNT, or 0"
    )
    add.set_defaults(run_command=_run_attempt)

    add = commands.add_parser(
        "open",
        parents=[shared, group],
        help="make attempt-N and publish the master's address and port",
        description="Make attempt-N. For the first group also choose a free port, write "
        "master.json for all nodes, and set aside what an older try of this attempt left.",
    )
    add.add_argument("--job-id", metavar="ID", help="the scheduler's job id (SLURM_JOB_ID)")
    add.add_argument(
        "--address",
        metavar="ADDRESS",
        help="address of this host for the other nodes (default: that of the plan, else found "
        "by name and routes)",
    )
    add.set_defaults(run_command=_run_open)

    add = commands.add_parser(
        "node",
        parents=[shared],
        help="check this node, wait for the other nodes, run this node's ranks",
        description="Wait for master.json, check the node, prepare the container, wait until all "
        "nodes are ready, start the ranks and watch over them. Exits with the code of the rank "
        "that failed here, 143 when asked to stop, 112 when a node is not ready. "
        "SIGUSR1 and SIGUSR2 go to every rank; SIGTERM ends them.",
    )
    add.add_argument(
        "--node",
        type=int,
        metavar="INDEX",
        help="index in the plan (SLURM_NODEID, counted from the first node of VJOB_GROUP)",
    )
    add.add_argument(
        "--tether",
        action="store_true",
        help="also end when standard input, which the starting process keeps open, closes or goes "
        "silent",
    )
    add.set_defaults(run_command=_run_node)

    add = commands.add_parser(
        "close",
        parents=[shared, group],
        help="judge how the attempt ended and print its exit code",
        description="Read the ranks' exits, write outcome.json, say on stderr in one line who "
        "failed, and print the exit code as the last line of stdout, or `requeue` if the job is to "
        "be requeued. If the attempt is to be restarted (cluster.restarts), two words follow: the "
        "next attempt's number, and the seconds to wait before it. Exits 0 itself.",
    )
    add.add_argument("--status", required=True, type=int, metavar="RC", help="srun's exit code")
    add.add_argument(
        "--called", default="", metavar="NAMES", help="signals that told the batch script to end"
    )
    add.add_argument(
        "--left",
        type=float,
        metavar="SECONDS",
        help="time until the job's time limit (default: no limit)",
    )
    add.set_defaults(run_command=_run_close)

    add = commands.add_parser(
        "way",
        help="print whether the job is requeued after its batch script has ended",
        description="Print go-on, requeue, leave or ended: what the batch script does next. "
        "Asks scontrol if the answer depends on the job's state.",
    )
    add.add_argument("--said", required=True, metavar="CODE", help="what `close` printed")
    add.add_argument("--ended", default="", metavar="NAME", help="signal that ended the script")
    add.add_argument("--warned", default="", metavar="1", help="1 after the scheduler's warning")
    add.add_argument("--job-id", required=True, metavar="ID", help="SLURM_JOB_ID")
    add.add_argument("--restarts", required=True, type=int, metavar="N", help="as the script began")
    add.add_argument(
        "--run", default="", metavar="DIR", help="the run folder, in which the requeue is recorded"
    )
    add.set_defaults(run_command=_run_way)

    add = commands.add_parser(
        "stop",
        parents=[shared],
        help="end the attempt on all its nodes",
        description="Write stop.json; every agent sees it within a second or two. The first stop "
        "of an attempt is the one that counts.",
    )
    add.add_argument("--reason", required=True, metavar="TEXT", help="shown as the outcome")
    add.add_argument("--kind", default="cancel", choices=STOP_KINDS, help="default: cancel")
    add.add_argument("--node", metavar="NAME", help="host that is at fault, if any")
    add.add_argument("--code", type=int, default=STOPPED, help="exit code (default: 143)")
    add.set_defaults(run_command=_run_stop)

    add = commands.add_parser(
        "setup-failed",
        help="name the line of `setup` that failed on this node",
        description="With an attempt, end it on all its nodes for this reason. A run that may "
        "morph has none yet: print the reason, and that the run goes on without this node.",
    )
    add.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run folder")
    add.add_argument("--attempt", type=int, metavar="N", help="number of the attempt, if any")
    add.add_argument("--node", required=True, metavar="NAME", help="host of the script")
    add.add_argument("--script", required=True, type=Path, metavar="FILE", help="the node script")
    add.add_argument("--line", required=True, metavar="N", help="line of the script, if known")
    add.add_argument("--status", required=True, type=int, help="exit status of the line")
    add.set_defaults(run_command=_run_setup_failed)

    add = commands.add_parser(
        "signal",
        parents=[shared],
        help="send a signal to every rank on all nodes",
        description="Write signal.json; every agent sees it within a second or two and signals "
        "each rank's own process once, and no child of a rank.",
    )
    add.add_argument("--name", default="USR1", choices=SIGNAL_NAMES, help="default: USR1")
    add.add_argument("--key", default="", help="no signal is sent if its key was used before")
    add.set_defaults(run_command=_run_signal)

    add = commands.add_parser(
        "track",
        parents=[shared],
        help="show the run in the tools of `track`; the first node's agent starts it",
        description="Read the attempt's logs as they grow and send their values to W&B, MLflow, "
        "TensorBoard and Prometheus, until the ranks of the first node have ended.",
    )
    add.set_defaults(run_command=_run_track)

    add = commands.add_parser(
        "stacks",
        parents=[shared],
        help="print the stacks of this node's ranks, in parcels for `vjob stacks`",
        description="Run py-spy on each rank of this node, and print the stacks.",
    )
    add.add_argument(
        "--node",
        type=int,
        action="append",
        metavar="INDEX",
        help="index in the plan, repeatable (default: this node)",
    )
    add.add_argument("--native", action="store_true", help="also show frames of C, C++ and Cython")
    add.add_argument("--spy", action="append", default=[], metavar="PATH", help="path of py-spy")
    add.set_defaults(run_command=_run_stacks)

    add = commands.add_parser(
        "shell",
        parents=[shared],
        help="run a shell, or COMMAND, in the container of this node's ranks, for `vjob shell`",
        description="Replace this process by a shell, or by COMMAND, with the environment, mounts "
        "and working directory of the ranks of this node.",
    )
    add.add_argument("--node", type=int, metavar="INDEX", help="index in the plan")
    add.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    add.set_defaults(run_command=_run_shell)
    return parser


def _run_stacks(args: argparse.Namespace) -> int:
    from varuna_core.agent.stacks import dump_nodes

    run = open_run(args.run)
    attempt = run.attempt(args.attempt)
    dump_nodes(load_plan(run, args.attempt), attempt, args.node, native=args.native, spies=args.spy)
    return 0


def _run_shell(args: argparse.Namespace) -> NoReturn:
    from varuna_core.agent.shell import enter_node

    run = open_run(args.run)
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    enter_node(run, load_plan(run, args.attempt), args.attempt, args.node, words)


def _run_track(args: argparse.Namespace) -> int:
    from varuna_core.agent.track.tracker import run_tracker

    return run_tracker(args.run, args.attempt)


def _run_open(args: argparse.Namespace) -> int:
    from varuna_core.agent.meeting.opening import open_attempt

    run = open_run(args.run)
    plan = load_plan(run, args.attempt)
    job_id = args.job_id or os.environ.get("SLURM_JOB_ID")
    address = args.address or plan.address
    open_attempt(run, plan, args.attempt, args.group, job_id, address)
    return 0


def _run_node(args: argparse.Namespace) -> int:
    from varuna_core.agent.node import run_node

    run = open_run(args.run)
    tether = sys.stdin.fileno() if args.tether else None
    return run_node(run, load_plan(run, args.attempt), args.attempt, args.node, tether)


def _run_close(args: argparse.Namespace) -> int:
    from varuna_core.agent.closing import close_attempt

    run = open_run(args.run)
    closed = close_attempt(
        run,
        load_plan(run, args.attempt),
        args.attempt,
        args.group,
        args.status,
        called=bool(args.called.strip()),
        left_s=args.left,
    )
    again = closed.again
    code = "requeue" if closed.is_requeue else closed.code
    print(*([code] if again is None else [code, again.number, f"{again.wait_s:g}"]), flush=True)
    return 0


def _run_way(args: argparse.Namespace) -> int:
    from varuna_core.agent.processes import process
    from varuna_core.agent.restarts import Way, choose_way, may_return, note_requeue, parse_job

    way = Way.GO_ON
    run = RunFolder(Path(args.run)) if args.run else None
    is_cancelled = run is not None and is_cancel_asked(run)
    if may_return(args.said, warned=bool(args.warned)) and not is_cancelled:
        command = ["scontrol", "--oneliner", "show", "job", args.job_id]
        shown = process.run(command, timeout_s=SCONTROL_S)
        job = parse_job(shown.out if shown.code == 0 else "")
        way = choose_way(args.said, args.ended, job, args.restarts)
        if way is Way.REQUEUE and run is not None:
            note_requeue(run, args.job_id, args.restarts, job)
    print(way.value, flush=True)
    return 0


def _run_attempt(args: argparse.Namespace) -> int:
    from varuna_core.agent.restarts import number_attempt

    print(number_attempt(open_run(args.run), args.requeues), flush=True)
    return 0


def _run_setup_failed(args: argparse.Namespace) -> int:
    """Say which line of the node script failed. Its text is read here, since words of a command
    line are visible to all users of the host and the line may hold a secret."""
    from varuna_core.agent.meeting.link import call_hub
    from varuna_core.records.secrets import redact_string

    lines = args.script.read_text(errors="replace").splitlines()
    number = int(args.line) if args.line.isdecimal() else 0
    line = redact_string(lines[number - 1].strip()) if 0 < number <= len(lines) else ""
    line = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
    reason = f"a setup line failed on {args.node} with exit status {args.status}"
    reason += f": {line}" if line else "; it is not known which"
    if args.attempt is None:
        print(f"vjob: {reason}; the run goes without this node", file=sys.stderr)
        return 0
    attempt = open_run(args.run).attempt(args.attempt)
    attempt.make()
    cause = EndCause.SETUP_FAILED
    write_stop(attempt, "not-ready", NOT_READY, reason, node=args.node, cause=cause)
    call_hub(attempt.link)
    return 0


def _run_signal(args: argparse.Namespace) -> int:
    from varuna_core.agent.meeting.link import call_hub

    attempt = open_run(args.run).attempt(args.attempt)
    attempt.make()  # over ssh the batch script does not open it
    write_signal(attempt, args.name, args.key or os.urandom(16).hex())
    call_hub(attempt.link)
    return 0


def _run_stop(args: argparse.Namespace) -> int:
    from varuna_core.agent.meeting.link import call_hub

    attempt = open_run(args.run).attempt(args.attempt)
    attempt.make()
    if not write_stop(attempt, args.kind, args.code, args.reason, node=args.node):
        print("vjob agent: the attempt was asked to stop before", file=sys.stderr)
    call_hub(attempt.link)
    return 0
