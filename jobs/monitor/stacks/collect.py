"""Collect the Python stacks of all ranks from the nodes of a job.

On Slurm, a step beside the job's own runs the agent once on each node; on this machine the agent
runs directly, on the machines of a list over ssh. Answers arrive as packed lines; nodes that do not
answer in time are named.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.agent.processes.evidence import describe_queues
from varuna_core.agent.stacks import Unpacker
from varuna_core.facts.sentences import describe_hang
from varuna_core.hang.judge import judge_hang
from varuna_core.hang.signs import read_hang, read_signs
from varuna_core.launch.machines import Machine, parse_machine
from varuna_core.launch.ssh import (
    FAILED,
    build_ssh_command,
    explain_failure,
    keep_ssh_agent,
    render_script,
)
from varuna_core.records.files import read_json
from varuna_core.records.machine import clean_environment
from varuna_core.records.plan import Plan, read_attempt_plan, read_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.stacks.group import RankStack, Stacks, group_stacks, parse_rank
from vjob.jobs.runs.find import RunView
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.base import Scheduler
from vjob.jobs.schedulers.job import JobState, SchedulerJob

PICK_PYTHON = 'p=$(command -v "$1") || p=python3; shift; exec "$p" "$@"'
"""Shell text that runs the plan's Python if the node has it, else python3, as node.sh does."""


@dataclass(frozen=True, kw_only=True)
class StackQuery:
    """A command that makes one or more nodes print their stacks."""

    command: Sequence[str]
    script: str | None = None
    """Text for the command's standard input."""
    host: str = ""
    """The node that is asked, if it is a single node."""
    machine: Machine | None = None
    """The machine that is asked over ssh."""


MOST_QUEUES = 4


def collect_stacks(
    view: RunView,
    *,
    native: bool = False,
    whole: bool = False,
    timeout_s: float = 60.0,
    tell: Callable[[int, int], None] = lambda done, all_: None,
) -> Stacks:
    """Collect the stacks of all ranks; `tell` is called with the number of nodes that have answered
    and the number of all nodes."""
    expect_ours(view.run, "vjob runs a program from the run's folder to take stacks")
    plan, attempt = find_running(view, "a look at stacks")
    hosts = list_hosts(plan, attempt)
    words = _build_agent_words(view.run, plan, attempt, native)
    questions = _build_questions(view, plan, words, hosts)
    answers = Answers(questions, hosts, tell, schedulers.get_scheduler(plan.scheduler))
    answers.ask(timeout_s)
    found = answers.build_stacks(view.run.name, plan.world, whole=whole)
    return replace(found, hang=explain_hang(plan, attempt), queues=list_queues(plan, attempt))


def explain_hang(plan: Plan, attempt: AttemptFolder) -> str:
    """Describe the hang that the agents found, or else one that the ranks' present files show;
    empty if there is none."""
    hang = read_hang(attempt)
    if hang is None or hang.until is not None:
        signs = read_signs(attempt, plan.num_nodes)
        found = judge_hang(plan.world, plan.num_nodes, signs, time.time(), plan.hang_after_s)
        hang = None if found is None else found.hang
    return "" if hang is None else describe_hang(hang)


def list_queues(plan: Plan, attempt: AttemptFolder) -> tuple[str, ...]:
    """Return lines that describe the bytes in sockets that ranks had not read when the agents saved
    the evidence of a hang."""
    lines: list[str] = []
    for index in range(plan.num_nodes):
        found = read_json(attempt.hang_evidence(index))
        lines += describe_queues(found.get("sockets")) if isinstance(found, dict) else []
    return tuple(lines[:MOST_QUEUES])


def find_running(view: RunView, what: str) -> tuple[Plan, AttemptFolder]:
    """Return plan and running attempt; raise an error that `what` needs a running job."""
    attempts = view.run.attempts()
    plan = read_attempt_plan(view.run, attempts[-1].number if attempts else 0)
    if view.problem:
        raise VjobError(
            f"{view.record.scheduler} does not answer, and {what} needs a step of the job: "
            f"try again once it does ({view.problem})"
        )
    if not any(info.state in (JobState.RUNNING, JobState.COMPLETING) for info in view.infos):
        raise InputError(
            f"{view.run.name} is not running: {view.state}; {what} needs a running job"
        )
    if not attempts:
        raise InputError(f"{view.run.name} has not started its ranks yet")
    if plan is None:
        raise VjobError(
            f"it is not known which rank runs where: {view.run.plan} cannot be read, or the "
            "attempt is starting; try again in a moment"
        )
    return plan, attempts[-1]


def list_hosts(plan: Plan, attempt: AttemptFolder) -> dict[int, str]:
    """Return the host names of nodes by index, from their heartbeats."""
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


def _build_questions(
    view: RunView, plan: Plan, words: Sequence[str], hosts: Mapping[int, str]
) -> list[StackQuery]:
    command = ["sh", "-c", PICK_PYTHON, "sh", *words]
    scheduler = schedulers.get_scheduler(plan.scheduler)
    if scheduler.can.starts_steps:
        beside = _build_beside(view, plan, command, set(hosts.values()))
        return [StackQuery(command=command) for command in beside]
    expect_here(view)
    if scheduler.can.remote_shell:
        return list(_build_over_ssh(view.run, command, hosts))
    nodes = [word for index in range(plan.num_nodes) for word in ("--node", str(index))]
    return [StackQuery(command=[*command, *nodes])]


def _build_over_ssh(
    run: RunFolder, command: Sequence[str], hosts: Mapping[int, str]
) -> Iterator[StackQuery]:
    """Yield a query for each machine of the list that takes part."""
    plan, spelled = read_plan(run.plan), read_json(run.machines)
    if plan is None or not isinstance(spelled, dict):
        raise InputError(f"{run.machines} cannot be read; run py-spy on the run's machines")
    for index, host in hosts.items():
        machine = parse_machine(str(spelled.get(host, "")))
        if isinstance(machine, str):
            continue  # it has not begun: named with those that say nothing
        words = [*command, "--node", str(index)]
        if machine.is_local:
            yield StackQuery(command=words, host=host)
            continue
        ssh = build_ssh_command(machine, plan.ssh_config)
        yield StackQuery(command=ssh, script=render_script(words, {}), host=host, machine=machine)


def _build_beside(
    view: RunView, plan: Plan, command: Sequence[str], hosts: Set[str]
) -> list[list[str]]:
    build = schedulers.get_scheduler(plan.scheduler).build_beside
    if plan.morph:  # jobs and nodes come and go
        return list(build_for_jobs(build, (*view.infos, *view.joined), command, hosts))
    first = plan.groups[0].name
    if plan.layout == "split":
        return [
            build(
                job.id, [(None, plan.group(job.group or first).count)], job.group or first, command
            )
            for job in view.record.jobs
        ]
    parts: list[tuple[int | None, int]] = [(None, plan.num_nodes)]
    if plan.layout == "hetjob":
        parts = [(number, group.count) for number, group in enumerate(plan.groups)]
    return [build(view.record.jobs[0].id, parts, first, command)]


def build_for_jobs(
    build: Callable[..., list[str]],
    infos: Sequence[SchedulerJob],
    command: Sequence[str],
    hosts: Set[str],
) -> Iterator[list[str]]:
    """Yield the command of a step for each job, on those of its nodes that are in `hosts`.

    Each node finds its index by its own name.
    """
    for info in infos:
        names = [name for name in info.nodes if name in hosts]
        component = info.component if "+" in info.id else None
        if names:
            part = [(component, len(names))]
            yield build(info.leader, part, "", command, names)


def expect_here(view: RunView) -> None:
    """Raise InputError if the run's nodes cannot be reached from here: the run is on another
    machine, or its scheduler cannot start a step beside a job."""
    scheduler = schedulers.get_scheduler(view.record.scheduler)
    for job in view.record.jobs:
        host = scheduler.find_other_machine(view.run, job.group)
        if host:
            raise InputError(f"{view.run.name} runs on {host}; run this command there")
    if not scheduler.can.one_host and not scheduler.can.remote_shell:
        raise InputError(f"{scheduler.title} cannot start a program on the nodes of a running job")


class Answers:
    """Asks the nodes, and collects their answers."""

    def __init__(
        self,
        questions: Sequence[StackQuery],
        hosts: dict[int, str],
        tell: Callable[[int, int], None],
        scheduler: Scheduler,
    ) -> None:
        self.seen: list[RankStack] = []
        self.failed: list[RankStack] = []
        self.silent: dict[str, str] = {}
        self._questions, self._hosts, self._tell = questions, hosts, tell
        self._scheduler = scheduler
        self._waiting = dict(hosts)
        self._unpackers = [Unpacker() for _ in questions]
        self._said: dict[int, list[str]] = {}
        """Lines of each query that are not packed answers: messages of srun and ssh, and errors."""
        tell(0, len(hosts))

    def ask(self, timeout_s: float) -> None:
        """Run the queries at once, and wait for their answers."""
        scripts = {n: x.script for n, x in enumerate(self._questions) if x.script is not None}
        codes = process.run_together(
            [question.command for question in self._questions],
            self.hear,
            env={**clean_environment(os.environ), **keep_ssh_agent(os.environ)},
            timeout_s=timeout_s,
            scripts=scripts,
        )
        self.close(codes, timeout_s)

    def build_stacks(self, run: str, world: int, *, whole: bool) -> Stacks:
        """Return what was answered, with ranks of equal stacks as groups."""
        return Stacks(
            run=run,
            world=world,
            groups=tuple(group_stacks(self.seen, whole=whole)),
            failed=tuple(sorted(self.failed, key=lambda stack: stack.rank)),
            silent=self.silent,
        )

    def hear(self, number: int, line: str) -> None:
        is_parcel, value = self._unpackers[number].add(line)
        if isinstance(value, dict):
            self._take(value)
        elif not is_parcel and line.strip():
            self._said[number] = [*self._said.get(number, [])[-20:], line.strip()]

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
        """Record why each remaining node has not answered, from the messages of srun or ssh."""
        for number, question in enumerate(self._questions):
            if question.machine is not None and codes[number] == FAILED:
                lines = self._said.get(number, [])
                self._said[number] = [explain_failure(question.machine, "\n".join(lines))]
        said = [line for lines in self._said.values() for line in lines]
        if not self.seen and not self.failed and not self.silent and said:
            why = self._scheduler.explain_step("\n".join(said)) or explain(said)
            raise VjobError(f"no node could be asked: {why}")
        asked = {one.host: number for number, one in enumerate(self._questions) if one.host}
        for host in self._waiting.values():
            if host in asked:
                own, is_late = self._said.get(asked[host], []), codes[asked[host]] is None
            else:
                own = [line for line in said if host in line.split() or f"{host}:" in line]
                is_late = None in codes
            why = f"nothing came within {timeout_s:g} s" if is_late else "it ended early"
            self.silent[host] = explain(own) if own else why


def explain(lines: Sequence[str]) -> str:
    """Explain an error by its last line, or by a known cause."""
    if "invalid choice: 'stacks'" in "\n".join(lines):
        return "the run was submitted by an older vjob, whose agent cannot do this"
    return lines[-1]
