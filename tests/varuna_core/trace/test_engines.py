"""Engines that are not ours, on two ranks: the right events, and results bit for bit as without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Forked
from tests.jobs.programs.free_port import find_free_port
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job

ENGINES = PROGRAMS / "engines"
NUM_MICRO_BATCHES = 4


def run(folder: Path, program: str, *words: str, world: int = 2) -> list[str]:
    """Run all ranks beside each other, traced; return what each printed."""
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                str(PROGRAMS / "traced.py"),
                str(ENGINES / f"{program}.py"),
                *words,
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for env in build_environments(world)
    ]
    try:
        done = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, err) in zip(started, done, strict=True):
        assert process.returncode == 0 and "varuna_core.trace:" not in err, err[-3000:]
    return [out for out, _ in done]


def run_plainly(folder: Path, program: str, *words: str, world: int = 2) -> list[str]:
    """The same without the trace, which need not be there before torch."""
    module = f"tests.programs.engines.{program}"
    environments = build_environments(world)
    started = [Forked("ranks", module, words, folder, env) for env in environments]
    done = [process.finish(240) for process in started]
    assert not any(each.returncode for each in done), done
    return [each.stdout for each in done]


def build_environments(world: int) -> list[dict[str, str]]:
    """Of each rank."""
    port = find_free_port()
    return [
        {
            **os.environ,
            **{"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "RANK": str(rank)},
            **{"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)},
            **{"MASTER_ADDR": "127.0.0.1", "VJOB_TRACE": ""},
        }
        for rank in range(world)
    ]


def read(folder: Path, rank: int) -> tuple[dict[str, Any], list[list[Any]], list[dict[str, Any]]]:
    """The header, the events and the steps."""
    lines = (folder / f"trace/{rank}.jsonl").read_text().splitlines()
    header, *found = map(json.loads, lines)
    steps = [line for line in found if isinstance(line, dict) and "step" in line]
    return header, [line for line in found if isinstance(line, list)], steps


def list_actions(folder: Path, rank: int, step: int) -> list[str]:
    """`1F3`: stage, kind and micro-batch of each action, in their order."""
    _, events, _ = read(folder, rank)
    whole = [event for event in events if event[8] != "goes on"]
    return [
        f"{stage}{kind}{micro}" for kind, number, stage, micro, *_ in whole
        if number == step and kind in "FBIW"
    ]  # fmt: skip


def order_1f1b(stage: int, stages: int = 2, count: int = NUM_MICRO_BATCHES) -> list[str]:
    """One forward, one backward, as the books have it."""
    first = min(stages - stage - 1, count)
    order = [f"{stage}F{number}" for number in range(first)]
    for number in range(count - first):
        order += [f"{stage}F{number + first}", f"{stage}B{number}"]
    return order + [f"{stage}B{number}" for number in range(count - first, count)]


def losses(texts: Sequence[str]) -> list[str]:
    return re.findall(r"(?<=loss )\S+|-?0x\S+", "\n".join(texts))


def check_pipeline(folder: Path, steps: Sequence[int]) -> None:
    """1F1B on two stages, counted as the report counts it."""
    for stage in (0, 1):
        header, _, found = read(folder, stage)
        assert header["stages"] == [stage]
        assert [line["step"] for line in found] == list(steps)
        assert list_actions(folder, stage, steps[0]) == order_1f1b(stage)
        for line in found:
            assert (line["sums"]["F"][0], line["sums"]["B"][0]) == (4, 4)
            assert sum(sum(sums[1:]) for sums in line["sums"].values()) <= line["took"] * 1.01
    assert read(folder, 1)[2][0]["sums"]["F"][1] > 0, "stage 1 waits for its first message"
    measures = analyse(load_job(folder))
    assert measures is not None


def test_megatron_core_has_its_schedule_and_trains_as_without(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    traced = losses(run(tmp_path, "megatron_core", "3", "Ettt|tL"))
    check_pipeline(tmp_path, [0, 1, 2])
    whole = losses(run_plainly(tmp_path, "megatron_core", "3", world=1))
    plain = losses(run_plainly(tmp_path, "megatron_core", "3", "Ettt|tL"))
    assert traced == plain and len(traced) == 3
    assert list(map(float, traced)) == pytest.approx(list(map(float, whole)), rel=1e-5)


def test_deepspeeds_pipeline_has_its_instructions_and_trains_as_without(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    traced = losses(run(tmp_path, "deepspeed_pipeline", "3"))
    check_pipeline(tmp_path, [1, 2, 3])
    assert read(tmp_path, 0)[2][0]["sums"]["optimizer"][0] == 1
    assert traced == losses(run_plainly(tmp_path, "deepspeed_pipeline", "3"))
    assert len(traced) == 6


def test_torchs_pipelining_has_its_schedules_and_trains_as_without(tmp_path: Path) -> None:
    words = ["3", "order", "Interleaved1F1B", "1F1B", "InterleavedZeroBubble"]
    traced = losses(run(tmp_path, "pipelining", *words))
    for rank in (0, 1):
        header, _, steps = read(tmp_path, rank)
        assert header["stages"] == [rank, rank + 2] and len(steps) == 9
        first, _, last = json.loads((tmp_path / f"order.{rank}").read_text())
        assert list_actions(tmp_path, rank, 1) == first
        assert [line["sums"]["W"][0] for line in steps[6:]] == [8, 8, 8], last
    assert list_actions(tmp_path, 0, 1)[0] == "0F0"
    assert traced == losses(run_plainly(tmp_path, "pipelining", *words))
    assert len(traced) == 9 * 4


@pytest.mark.parametrize(
    ("kind", "world", "num_steps", "sums"),
    [
        ("plain", 2, 12, {"data": 1, "F": 1, "B": 1, "optimizer": 1}),
        ("accumulate", 1, 6, {"data": 2, "compute": 2, "B": 2, "optimizer": 1}),
        ("two", 1, 12, {"data": 1, "compute": 1, "B": 1, "optimizer": 2}),
    ],
)
def test_a_loop_of_ones_own_has_steps(
    tmp_path: Path, kind: str, world: int, num_steps: int, sums: dict[str, int]
) -> None:
    traced = run(tmp_path, "loop", kind, world=world)
    steps = read(tmp_path, 0)[2]
    assert [line["step"] for line in steps] == list(range(num_steps))
    found = Counter({key: value[0] for key, value in steps[2]["sums"].items()})
    assert found == sums
    if kind != "accumulate":
        assert traced == run_plainly(tmp_path, "loop", kind, world=world)


def test_fsdp2_has_its_forwards_and_waits_and_trains_as_without(tmp_path: Path) -> None:
    """Four steps of two micro-batches, of which the second is summed, then four of one."""
    traced = run(tmp_path, "loop", "sharded")
    for rank in (0, 1):
        header, events, steps = read(tmp_path, rank)
        assert (header["rank"], header["replica"]) == (rank, rank)
        assert [line["step"] for line in steps] == list(range(8))
        for line in steps:
            counts = {kind: sums[0] for kind, sums in line["sums"].items()}
            num_pieces = 2 if line["step"] < 4 else 1
            assert counts.pop("communication") > 0
            expected = {"data": num_pieces, "F": num_pieces, "B": num_pieces, "optimizer": 1}
            assert counts == expected
            assert sum(sum(sums[1:]) for sums in line["sums"].values()) <= line["took"] * 1.01
        assert list_actions(tmp_path, rank, 0) == ["0F0", "0B0", "0F1", "0B1"]
        waits = Counter((event[1], event[8]) for event in events if event[0] == "communication")
        # Of four layers, begin and end, in two forwards and backwards; each layer's gradients once,
        # in the second backward, and the end of each backward, which waits for all of them.
        assert (waits[1, "all-gather"], waits[1, "reduce-scatter"]) == (4 * 2 * 4, 4 + 2)
    assert traced == run_plainly(tmp_path, "loop", "sharded")
    assert len(re.findall("0x", "".join(traced))) == 2 * 12


def test_steps_and_spans_that_the_script_names_are_its_own(tmp_path: Path) -> None:
    run(tmp_path, "loop", "spans", world=1)
    steps = read(tmp_path, 0)[2]
    assert [line["step"] for line in steps] == list(range(100, 112))
    assert set(steps[3]["sums"]) == {"F"}
