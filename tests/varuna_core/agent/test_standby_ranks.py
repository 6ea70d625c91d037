"""Ranks that wait: what they become, when they are not used, and how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import is_running, make_group, make_plan, wait_until
from varuna_core.agent.processes.process import RankProcess
from varuna_core.agent.setup.ranks import Meeting, RankStart, build_rank
from varuna_core.agent.setup.standby_ranks import StandbyRanks, fits
from varuna_core.records.plan import Plan

PROGRAM = """
import json, os, sys
print("waits", sys.argv[1:], flush=True)
task = json.loads(sys.stdin.readline())
print(json.dumps(task), flush=True)
sys.exit(7)
"""


def make(settings: str, **changes: object) -> Plan:
    command = (sys.executable, "-c", PROGRAM, settings)
    return replace(make_plan(make_group("a", 1, 2), command=command), **changes)  # type: ignore[arg-type]


def start_of(plan: Plan, local_rank: int, attempt: int, **own: str) -> RankStart:
    meeting = Meeting(
        run=Path("/run"),
        attempt=attempt,
        trace=Path("/run/trace"),
        address="10.0.0.1" if attempt else "",
        port=6000 + attempt,
        interface="eth0" if attempt else None,
        host="n0",
    )
    own = {"PATH": os.environ["PATH"], **own}
    return build_rank(plan, plan.node(0), local_rank, meeting, own, None)


@pytest.fixture
def waiting() -> Iterator[StandbyRanks]:
    found = StandbyRanks()
    plan = make("0.json")
    meeting = Meeting(Path("/run"), 0, Path("/run/trace"), "", 0, None, "n0")
    found.start(plan, plan.node(0), meeting, {"PATH": os.environ["PATH"]})
    yield found
    found.end()


def read_all(process: RankProcess) -> str:
    wait_until(lambda: process.poll() is not None, "the end of the rank")
    text = os.read(process.stdout, 65536).decode()
    process.close()
    return text


def test_it_becomes_the_rank_with_its_environment_and_its_arguments(waiting: StandbyRanks) -> None:
    start = start_of(make("1.json"), 1, 1)
    process = waiting.take(1, start)
    assert process is not None
    first, task = read_all(process).splitlines()
    assert first == "waits ['0.json', '--standby']"
    assert json.loads(task) == {"env": start.env, "arguments": ["1.json"]}
    assert process.poll() == 7
    assert waiting.take(1, start) is None, "nobody is used twice"
    other = waiting.take(0, start_of(make("1.json"), 0, 1))
    assert other is not None and '"RANK": "0"' in read_all(other)


def test_it_runs_in_a_session_of_its_own_and_dies_of_signals_as_ranks_do(
    waiting: StandbyRanks,
) -> None:
    (_, process) = waiting._ranks[0]
    assert os.getsid(process.pid) == process.pid
    process.signal_group(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None, "the end")
    assert process.poll() == -signal.SIGTERM
    assert waiting.take(0, start_of(make("1.json"), 0, 1)) is None, "it is dead"


def test_who_is_not_taken_ends(waiting: StandbyRanks) -> None:
    pids = [process.pid for _, process in waiting._ranks.values()]
    assert len(pids) == 2
    waiting.end()
    assert not any(is_running(pid) for pid in pids)
    assert waiting.take(0, start_of(make("1.json"), 0, 1)) is None


@pytest.mark.parametrize(
    ("plan", "own"),
    [
        (make("1.json", env={"OMP_NUM_THREADS": "2"}), {}),
        (make("1.json", workdir="/elsewhere"), {}),
        (make("1.json"), {"LD_PRELOAD": "x.so"}),
        (make("1.json", command=(sys.executable, "-u", "other.pyz", "1.json")), {}),
        (make("1.json", command=(sys.executable, "-c", PROGRAM, "1.json", "--more")), {}),
    ],
)
def test_what_was_read_at_import_must_be_the_same(plan: Plan, own: dict[str, str]) -> None:
    model = start_of(make("0.json"), 0, 0)
    assert fits(model, start_of(make("1.json"), 0, 1))
    assert not fits(model, start_of(plan, 0, 1, **own))


def test_a_device_of_its_own_is_no_place() -> None:
    group = replace(make_group("a", 1, 2), devices=(1, 3))
    plan = replace(make("1.json"), groups=(group,))
    assert not fits(start_of(make("0.json"), 0, 0), start_of(plan, 0, 1))
