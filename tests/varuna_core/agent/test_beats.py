"""What beats and samples tell of the ranks' processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import (
    TIMING,
    Stage,
    make_container,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from tests.varuna_core.agent.test_wrapped import CLIENT
from varuna_core.agent.meeting import watch
from varuna_core.agent.meeting.watch import AttemptWatch
from varuna_core.agent.processes.proc import Stat, list_below, list_stats, read_stat
from varuna_core.agent.setup.ranks import find_devices
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

MakeStage = Callable[..., Stage]

SLEEPER = "echo ready $$; exec sleep 60"
BUSY_CHILD = """
import os, subprocess, sys
code = f"import os\\nprint('busy', flush=True)\\nwhile os.getppid() == {os.getpid()}: pass"
child = subprocess.Popen([sys.executable, "-c", code])
print("ready", os.getpid(), flush=True)
child.wait()
"""


def open_stage(stage: Stage) -> Stage:
    stage.open()
    stage.start_all()
    return stage


def find_pid(stage: Stage, rank: int) -> int:
    line = wait_until(
        lambda: [line for line in stage.log("n0", "out").splitlines() if f"{rank}: ready" in line],
        f"rank {rank}",
    )[0]
    return int(line.split()[2])


def wait_for_rank(stage: Stage, rank: int, accept: Callable[[Any], bool]) -> dict[str, Any]:
    def look() -> Any:
        told = (read_json(stage.attempt.beat(0)) or {}).get("ranks", {}).get(str(rank))
        return told if told and accept(told) else None

    found: dict[str, Any] = wait_until(look, f"a beat about rank {rank}")
    return found


def test_beats_name_the_pid_and_state_of_each_rank(make_stage: MakeStage) -> None:
    stage = open_stage(make_stage(make_plan(make_group("a", 1, 2), command=shell(SLEEPER))))
    pids = [find_pid(stage, rank) for rank in (0, 1)]
    for rank, pid in enumerate(pids):
        assert wait_for_rank(stage, rank, lambda told: told["state"] == "S")["pid"] == pid
    os.kill(pids[1], signal.SIGSTOP)
    assert wait_for_rank(stage, 1, lambda told: told["state"] == "T")["pid"] == pids[1]
    beat = read_json(stage.attempt.beat(0))
    assert beat["ranks_halted"] == [1]
    assert beat["ranks"]["0"]["state"] == "S"
    os.kill(pids[0], signal.SIGKILL)
    stage.wait()
    beat = read_json(stage.attempt.beat(0))
    assert (beat["state"], beat["ranks"], beat["ranks_halted"]) == ("done", {}, [])


def test_a_stopped_rank_is_told_long_before_the_next_beat(make_stage: MakeStage) -> None:
    timing = replace(TIMING, beat_s=600.0)
    plan = make_plan(make_group("a", 1, 1), command=shell(SLEEPER), timing=timing)
    stage = open_stage(make_stage(plan))
    pid = find_pid(stage, 0)
    os.kill(pid, signal.SIGSTOP)
    wait_for_rank(stage, 0, lambda told: told["state"] == "T")


def test_the_time_of_living_children_counts(make_stage: MakeStage) -> None:
    plan = make_plan(make_group("a", 1, 1), command=(sys.executable, "-c", BUSY_CHILD))
    stage = open_stage(make_stage(plan))
    pid = find_pid(stage, 0)
    told = wait_for_rank(stage, 0, lambda told: told["cpu_s"] >= 0.5)
    assert told["pid"] == pid
    own = read_stat(pid)
    assert own is not None and own.ticks / os.sysconf("SC_CLK_TCK") < told["cpu_s"]


def test_behind_a_client_the_pid_is_the_programs_own(make_stage: MakeStage) -> None:
    container = replace(make_container(sys.executable, "-c", CLIENT), wraps=True)
    plan = make_plan(make_group("a", 1, 1), command=shell(SLEEPER), containers=(container,))
    stage = open_stage(make_stage(plan))
    pid = find_pid(stage, 0)
    assert wait_for_rank(stage, 0, lambda told: True)["pid"] == pid


def test_what_changes_all_the_time_makes_no_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.001)
    plan = make_plan(timing=replace(TIMING, beat_s=600.0))
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    halted: list[int] = []
    looks = iter(range(10**9))
    count = 0

    def describe() -> dict[str, Any]:
        nonlocal count
        count = next(looks)
        return {"ranks_halted": list(halted)}

    def measure() -> dict[str, Any]:
        return {"ranks": {"0": {"cpu_s": count}}}

    thread = AttemptWatch(
        plan, plan.node(0), attempt, "n0", 0.0, describe, measure, lambda: None, lambda _: None
    )
    thread.start()
    try:
        wait_until(lambda: count > 50, "many looks")
        beat = read_json(attempt.beat(0))
        assert (beat["count"], beat["ranks_halted"]) == (1, [])
        halted.append(0)
        beat = wait_until(
            lambda: (found := read_json(attempt.beat(0)))["count"] == 2 and found, "a beat at once"
        )
        assert beat["ranks_halted"] == [0]
    finally:
        thread.end()


TREES = st.dictionaries(st.integers(1, 30), st.integers(0, 30), max_size=30)


@given(parents=TREES, tops=st.sets(st.integers(1, 30), max_size=3))
def test_all_below_are_found_whatever_the_parents(
    parents: Mapping[int, int], tops: set[int]
) -> None:
    """Even where a pid was used anew between two readings, and a process is its own ancestor."""
    stats = {pid: Stat("x", "S", parent, 1, 0, 0) for pid, parent in parents.items()}

    def is_below(pid: int) -> bool:
        seen = set()
        while pid in parents and pid not in seen:
            seen.add(pid)
            pid = parents[pid]
            if pid in tops:
                return True
        return False

    assert list_below(tops, stats) == {pid for pid in parents if is_below(pid)}


def test_this_process_is_found_below_its_parent() -> None:
    own = read_stat(os.getpid())
    assert own is not None and own.is_alive
    assert os.getpid() in list_below([os.getppid()], list_stats())
    assert read_stat(2**31 - 1) is None


SMI = """#!/bin/sh
# As nvidia-smi 470, which knows throttle reasons and no event reasons.
case "$1" in
*event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
--query-compute-apps*) echo "GPU-1, $(cat pids)"; echo "GPU-1, 999999999"; echo "GPU-2, 77";;
*) echo "0, NVIDIA A10, 49, 99, 100, 22731, 15.61, GPU-1, 2, 0x0000000000000048"
   echo "1, NVIDIA A10, 49, 0, 0, 22731, 15.61, GPU-2, [N/A], 0x0000000000000001";;
esac
"""


def test_samples_count_the_processes_that_are_not_ours(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI.replace("cat pids", f"cat {tmp_path}/pids"))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    group = make_group("a", 1, 1, gpus=1, devices=(0,))
    command = shell(f"echo $$ > {tmp_path}/pids; {SLEEPER}")
    stage = make_stage(make_plan(group, command=command))
    stage.open()
    stage.start(0, CUDA_VISIBLE_DEVICES="0,1")
    pid = find_pid(stage, 0)

    def look() -> Any:
        lines = stage.log("n0", "gpu.jsonl").splitlines()
        gpus = json.loads(lines[-1])["gpus"] if lines else []
        return gpus if gpus and pid in gpus[0]["processes"] else None

    (first,) = wait_until(look, "a sample with the rank in it, and of its GPU alone")
    assert first["processes"] == [pid, 999999999]
    assert (first["ecc_errors"], first["throttle"]) == (2, "hw_slowdown, hw_thermal")
    sees_machine = os.stat("/proc/self/ns/pid").st_ino == 4026531836
    assert first["foreign"] == (1 if sees_machine else None)
    assert first["ranks"] == [0]


def test_our_gpus_are_those_that_the_ranks_are_given() -> None:
    all_of_them = make_group("a", 1, 1, gpus=2)
    some = make_group("a", 1, 1, gpus=2, devices=(1, 2))
    assert find_devices(all_of_them, None) is None
    assert find_devices(all_of_them, "2,3") == ["2", "3"]
    assert find_devices(some, None) == ["1", "2"]
    assert find_devices(some, "4,5,6") == ["5", "6"]
    assert find_devices(some, "GPU-1,GPU-2,GPU-3") == ["GPU-2", "GPU-3"]
