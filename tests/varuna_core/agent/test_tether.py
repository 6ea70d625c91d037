"""The agent's tether: when the launcher is gone, so are the ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    is_running,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from varuna_core.agent.processes.signals import GONE, SILENT
from varuna_core.records.files import read_json

MakeStage = Callable[..., Stage]
HOLD_S = 30.0


class Tethered:
    """An agent whose standard input we hold, with one rank."""

    def __init__(self, make_stage: MakeStage, lost_s: float) -> None:
        timing = replace(TIMING, lost_s=lost_s)
        plan = make_plan(
            make_group("a", 1, 1),
            scheduler="ssh",
            command=shell("echo $$; exec sleep 60"),
            timing=timing,
        )
        self.stage = make_stage(plan)
        self.stage.open("--address", "127.0.0.1")
        words = ["node", "--run", str(self.stage.run.path), "--attempt", "0", "--node", "0"]
        self.agent = subprocess.Popen(
            [self.stage.python, str(self.stage.run.agent), *words, "--tether"],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.rank = int(self.stage.wait_for_log("ssh0", "out", "\n").split(": ")[1])

    def beat(self) -> None:
        assert self.agent.stdin is not None
        self.agent.stdin.write(b"\n")

    def end(self) -> None:
        if self.agent.poll() is None:
            self.agent.kill()
        with self.agent:  # closes its pipes
            pass


@pytest.fixture
def tether(make_stage: MakeStage) -> Iterator[Callable[[float], Tethered]]:
    made: list[Tethered] = []

    def build(lost_s: float) -> Tethered:
        made.append(Tethered(make_stage, lost_s))
        return made[-1]

    yield build
    for item in made:
        item.end()


def test_the_end_of_the_input_ends_the_ranks(tether: Callable[[float], Tethered]) -> None:
    held = tether(HOLD_S)
    held.beat()
    assert held.agent.stdin is not None
    held.agent.stdin.close()
    assert held.agent.wait(timeout=20) == 143
    assert not is_running(held.rank)
    outcome = held.stage.close(143)
    assert (outcome.code, outcome.reason) == (113, f"{GONE}, seen first on ssh0")


def test_silence_ends_the_ranks_and_beats_put_it_off(
    tether: Callable[[float], Tethered],
) -> None:
    held = tether(0.6)

    def beat_for_long() -> bool:
        held.beat()
        told = read_json(held.stage.attempt.beat(0))
        return bool(told["count"] * TIMING.beat_s > 1.2)

    wait_until(beat_for_long, "the agent's own beats of twice the time")
    assert held.agent.poll() is None
    assert held.agent.wait(timeout=20) == 143
    assert not is_running(held.rank)
    assert held.stage.close(143).reason == f"{SILENT}, seen first on ssh0"
