"""Asks every node of a job what its ranks are at.

On Slurm a step beside the job's own runs the agent once on each node; on this machine the agent
runs directly. What nodes say travels as parcels; who says nothing in time is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from jobs import process, slurm
from jobs.errors import InputError, VjobError
from jobs.local_executor import state_file
from jobs.monitor.stacks import RankStack, Stacks, group_stacks, parse_rank
from jobs.runs import RunView
from jobs.slurm import JobInfo, JobState
from varuna_core.records.files import read_json
from varuna_core.records.machine import clean_environment, identify_machine
from varuna_core.records.parcels import Unpacker
from varuna_core.records.plan import Plan, read_attempt_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder

PICK_PYTHON = 'p=$(command -v "$1") || p=python3; shift; exec "$p" "$@"'
"""The plan's python where the node has it, as in node.sh."""


def collect_stacks(
    view: RunView,
    *,
    native: bool = False,
    whole: bool = False,
    timeout_s: float = 60.0,
    tell: Callable[[int, int], None] = lambda done, all_: None,
) -> Stacks:
    """What all ranks are at; `tell` hears how many nodes of how many have answered."""
    plan, attempt = _find_running(view)
    hosts = _list_hosts(plan, attempt)
    answers = _Answers(plan, hosts, tell)
    words = _build_agent_words(view.run, plan, attempt, native)
    commands = _build_commands(view, plan, words, set(hosts.values()))
    env = clean_environment(os.environ)
    codes = process.run_together(commands, answers.hear, env=env, timeout_s=timeout_s)
    answers.close(codes, timeout_s)
    return Stacks(
        run=view.run.name,
        world=plan.world,
        groups=tuple(group_stacks(answers.seen, whole=whole)),
        failed=tuple(sorted(answers.failed, key=lambda stack: stack.rank)),
        silent=answers.silent,
    )


def _find_running(view: RunView) -> tuple[Plan, AttemptFolder]:
    attempts = view.run.attempts()
    plan = read_attempt_plan(view.run, attempts[-1].number if attempts else 0)
    if plan is None:
        raise VjobError(f"{view.run.plan} cannot be read: who runs where is not known")
    if not any(info.state in (JobState.RUNNING, JobState.COMPLETING) for info in view.infos):
        raise InputError(
            f"{view.run.name} does not run now: {view.state}; only what runs has stacks"
        )
    if not attempts:
        raise InputError(f"{view.run.name} has not started its ranks yet")
    return plan, attempts[-1]


def _list_hosts(plan: Plan, attempt: AttemptFolder) -> dict[int, str]:
    """Names of nodes, as their beats have them."""
    found = {}
    for index in range(plan.num_nodes):
        beat = read_json(attempt.beat(index))
        found[index] = str(beat["host"]) if isinstance(beat, dict) and "host" in beat else ""
    return {index: host or f"node {index}" for index, host in found.items()}


def _build_agent_words(
    run: RunFolder, plan: Plan, attempt: AttemptFolder, native: bool
) -> list[str]:
    spy = Path(sys.executable).with_name("py-spy")
    words = [plan.python, str(run.agent), "stacks", "--run", str(run.path)]
    words += ["--attempt", str(attempt.number), "--spy", str(spy)]
    return [*words, "--native"] if native else words


def _build_commands(
    view: RunView, plan: Plan, words: Sequence[str], hosts: Set[str]
) -> list[list[str]]:
    if plan.scheduler == "local":
        _expect_here(view)
        nodes = [word for index in range(plan.num_nodes) for word in ("--node", str(index))]
        return [["sh", "-c", PICK_PYTHON, "sh", *words, *nodes]]
    if plan.scheduler != "slurm":
        raise InputError(f"{view.run.name} was started over ssh; run py-spy on its machines")
    command = ["sh", "-c", PICK_PYTHON, "sh", *words]
    if plan.morph:  # jobs and nodes come and go
        return list(build_for_jobs((*view.infos, *view.joined), command, hosts))
    first = plan.groups[0].name
    if plan.layout == "split":
        return [
            slurm.build_beside_command(
                job.id, [(None, plan.group(job.group or first).count)], job.group or first, command
            )
            for job in view.record.jobs
        ]
    parts: list[tuple[int | None, int]] = [(None, plan.num_nodes)]
    if plan.layout == "hetjob":
        parts = [(number, group.count) for number, group in enumerate(plan.groups)]
    return [slurm.build_beside_command(view.record.jobs[0].id, parts, first, command)]


def build_for_jobs(
    infos: Sequence[JobInfo], command: Sequence[str], hosts: Set[str]
) -> Iterator[list[str]]:
    """A step in each job, on those of its nodes that take part; each knows itself by its name."""
    for info in infos:
        names = [name for name in slurm.expand_nodes(info.nodes) if name in hosts]
        component = info.component if "+" in info.id else None
        if names:
            part = [(component, len(names))]
            yield slurm.build_beside_command(info.leader, part, "", command, names)


def _expect_here(view: RunView) -> None:
    for job in view.record.jobs:
        state = read_json(state_file(view.run, job.group))
        machine = state.get("machine") if isinstance(state, dict) else None
        if machine is not None and machine != identify_machine():
            raise InputError(f"{view.run.name} runs on {str(machine).partition(' ')[0]}; ask there")


class _Answers:
    """What nodes said so far."""

    def __init__(self, plan: Plan, hosts: dict[int, str], tell: Callable[[int, int], None]) -> None:
        self.seen: list[RankStack] = []
        self.failed: list[RankStack] = []
        self.silent: dict[str, str] = {}
        self._plan, self._hosts, self._tell = plan, hosts, tell
        self._waiting = dict(hosts)
        self._unpacker = Unpacker()
        self._said: list[str] = []
        """Lines that are no parcels: srun's own, and errors."""
        tell(0, len(hosts))

    def hear(self, number: int, line: str) -> None:
        is_parcel, value = self._unpacker.add(line)
        if isinstance(value, dict):
            self._take(value)
        elif not is_parcel and line.strip():
            self._said = [*self._said[-20:], line.strip()]

    def _take(self, value: dict[str, Any]) -> None:
        if "rank" in value:
            stack = parse_rank(value)
            (self.failed if stack.problem else self.seen).append(stack)
            return
        host = self._waiting.pop(int(value["index"]), None)
        if host is not None and value.get("problem"):
            self.silent[host] = str(value["problem"])
        self._tell(len(self._hosts) - len(self._waiting), len(self._hosts))

    def close(self, codes: Sequence[int | None], timeout_s: float) -> None:
        """Name who has not answered, in the words of whoever was to ask him."""
        if not self.seen and not self.failed and not self.silent and self._said:
            raise VjobError(f"no node could be asked: {explain(self._said)}")
        why = f"nothing came within {timeout_s:g} s" if None in codes else "it ended early"
        for host in self._waiting.values():
            own = [line for line in self._said if host in line.split() or f"{host}:" in line]
            self.silent[host] = explain(own) if own else why


def explain(lines: Sequence[str]) -> str:
    """What was said last, and what to do where that is known."""
    if "invalid choice: 'stacks'" in "\n".join(lines):
        return "the run was submitted by an older vjob, whose agent cannot do this"
    return lines[-1]
