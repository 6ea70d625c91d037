"""A run without a scheduler: a plan, its folder, and agents as real processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from varuna_core.agent.bundle import write_bundle
from varuna_core.records.exits import Outcome, RankExit, read_exits, read_outcome
from varuna_core.records.plan import ContainerPlan, GroupPlan, Plan, Timing, write_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder

DEADLINE_S = 60.0

TIMING = Timing(grace_s=1.0, join_s=10.0, prepare_s=5.0, beat_s=0.2, lost_s=1.5, sample_s=0.2)


def make_group(name: str, count: int, ranks: int, **changes: Any) -> GroupPlan:
    group = GroupPlan(
        name=name,
        count=count,
        queue=None,
        gpu_type=None,
        gpus=0,
        devices=None,
        cpus=None,
        memory_gb=None,
        interface=None,
        ranks=ranks,
        env={},
        first_node=0,
        first_rank=0,
    )
    return replace(group, **changes)


def make_plan(*groups: GroupPlan, command: Sequence[str] = ("true",), **changes: Any) -> Plan:
    """A plan of stages as deep as the world; groups are numbered here."""
    placed, node, rank = [], 0, 0
    for group in groups or (make_group("only", 1, 1),):
        placed.append(replace(group, first_node=node, first_rank=rank))
        node, rank = node + group.count, rank + group.count * group.ranks
    plan = Plan(
        run="demo-1",
        name="demo",
        scheduler="local",
        layout="single",
        morph=False,
        groups=tuple(placed),
        pipeline=rank,
        data=1,
        tensor=1,
        order="pipeline",
        partition=None,
        stage_map="".join(f"{stage};" for stage in range(rank)),
        command=tuple(command),
        python=sys.executable,
        workdir="/",
        env={},
        containers=(),
        must_exist=(),
        port=None,
        timing=TIMING,
    )
    return replace(plan, **changes)


def make_container(*start: str, probe: Sequence[str] = ("true",)) -> ContainerPlan:
    """A runtime that passes everything on to its argument."""
    return ContainerPlan(
        runtime="stand-in",
        image="/image",
        workdir="/",
        probe=tuple(probe),
        prepare=(),
        start=start or ("env",),
        enter_as="VJOB_ENTER",
        reads_image=False,
        wraps=False,
        env={},
        defaults={},
        lease=None,
        clean=(),
        step=(),
    )


def shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll for a true value; the test fails with `what` at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


class Stage:
    """One run: its folder and the agents that play it."""

    def __init__(self, folder: Path, plan: Plan, python: str = sys.executable) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run = RunFolder(folder)
        self.plan = plan
        self.python = python
        self.nodes: list[subprocess.Popen[str]] = []
        write_plan(self.run.plan, plan)
        write_bundle(self.run.agent, plan=plan)

    @property
    def attempt(self) -> AttemptFolder:
        return self.run.attempt(0)

    def open(self, *words: str, attempt: int = 0) -> subprocess.CompletedProcess[str]:
        return self.call("open", *words, attempt=attempt)

    def call(self, command: str, *words: str, attempt: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(command, attempt, words),
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=DEADLINE_S,
        )

    def start(self, index: int, attempt: int = 0, **env: str) -> subprocess.Popen[str]:
        """The agent of one node."""
        agent = subprocess.Popen(
            self._argv("node", attempt, ("--node", str(index))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(VJOB_NODE_NAME=f"n{index}", **env),
        )
        self.nodes.append(agent)
        return agent

    def start_all(self) -> None:
        for index in range(self.plan.num_nodes):
            self.start(index)

    def wait(self) -> list[int]:
        """The exit codes of all agents."""
        return [agent.wait(timeout=DEADLINE_S) for agent in self.nodes]

    def close(self, status: int = 0, *words: str) -> Outcome:
        result = self.call("close", "--status", str(status), *words)
        assert result.returncode == 0, result.stderr
        outcome = read_outcome(self.attempt)
        assert outcome is not None, result.stderr
        assert result.stdout.splitlines()[-1] == str(outcome.code)
        return outcome

    def play(self) -> tuple[list[int], Outcome]:
        """A whole attempt, with the highest code as srun's; the codes and the outcome."""
        opened = self.open()
        assert opened.returncode == 0, opened.stderr
        self.start_all()
        codes = self.wait()
        return codes, self.close(max(codes))

    def exits(self) -> dict[int, RankExit]:
        return read_exits(self.attempt, self.plan.world)

    def log(self, node: str, kind: str) -> str:
        path = self.attempt.node_log(node, kind)
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, node: str, kind: str, text: str) -> str:
        return str(wait_until(lambda: self._found(node, kind, text), f"{text!r} in {node}.{kind}"))

    def end(self) -> None:
        """End and forget all agents."""
        for agent in self.nodes:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.communicate()
        self.nodes.clear()

    def _found(self, node: str, kind: str, text: str) -> str | None:
        log = self.log(node, kind)
        return log if text in log else None

    def _argv(self, command: str, attempt: int, words: Sequence[str]) -> list[str]:
        options = ["--run", str(self.run.path), "--attempt", str(attempt)]
        return [self.python, str(self.run.agent), command, *options, *words]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    return {**kept, **more}
