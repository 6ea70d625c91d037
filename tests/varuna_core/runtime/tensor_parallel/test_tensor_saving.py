"""Checkpoints do not know how many ranks shared a layer: saved with any number, loaded with any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.start import collect, start_ranks
from tests.ranks.tensor_rank import AFTER, Case, build_model, train, write_cases
from tests.varuna_core.runtime.tensor_parallel.test_tensor import join, read
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import find_damage, list_complete

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2x1": (2, {"stage_map": "0;1;", "tensor": 1}),
    "1x2": (2, {"stage_map": "0,1;", "tensor": 1, "shard": True}),
    "1x1x2": (2, {"stage_map": "0;", "schedule": "interleaved", "stages_per_rank": 2}),
    "2x2": (4, {"stage_map": "0,2;1,3;", "tensor": 1}),
    "4x1": (4, {"stage_map": "0;1;2;3;", "tensor": 1}),
    "2x1x2": (4, {"stage_map": "1;0;", "sequence_parallel": True}),
    "1x2x2": (4, {"stage_map": "0,1;", "shard": True}),
    "1x2x2 zero": (4, {"stage_map": "0,1;", "zero": 1}),
}
STEPS, BATCH = 5, 4
"""A batch is one micro-batch for each of two replicas: what a step does is tested elsewhere."""


def is_shared(name: str) -> bool:
    return bool(LAYOUTS[name][1].get("tensor", 2) > 1)


SHARED = [name for name in LAYOUTS if is_shared(name)]
NEXT = dict(zip(SHARED, [*SHARED[1:], SHARED[0]], strict=True))
PAIRS = [(a, b) for a in SHARED for b in (a, NEXT[a])]
PAIRS += [(SHARED[0], "2x2"), (SHARED[-1], "2x1"), ("1x2", SHARED[1]), ("4x1", SHARED[0])]
"""Each in its own layout and in the next one, and to and from layouts that share no layers."""


def build_case(name: str, store: str, layout: str, load: bool) -> Case:
    return Case(
        name=name, store=store, load=load, optimizer="adamw", batches=[BATCH] * STEPS, clip=0.5,
        **LAYOUTS[layout][1],
    )  # fmt: skip


def saves(world_size: int) -> list[Case]:
    return [build_case(n, n, n, False) for n, (size, _) in LAYOUTS.items() if size == world_size]


def loads(world_size: int) -> list[Case]:
    return [
        build_case(f"{source} in {target}", source, target, True)
        for source, target in PAIRS
        if LAYOUTS[target][0] == world_size
    ]


def start(folder: Path, world_size: int, cases: list[Case]) -> None:
    write_cases(folder, cases)
    with start_ranks("tests.ranks.tensor_rank", world_size, str(folder)) as ranks:
        done = collect(ranks)
    assert not any(code for code, _ in done), "\n".join(out for _, out in done)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saving")
    start(made, 2, saves(2))
    start(made, 4, [*saves(4), *loads(4)])
    start(made, 2, loads(2))
    return made


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a} in {b}" for a, b in PAIRS])
def test_it_goes_on_as_the_uninterrupted_run(folder: Path, source: str, target: str) -> None:
    saved = read(folder, source, LAYOUTS[source][0])
    loaded = read(folder, f"{source} in {target}", LAYOUTS[target][0])
    close = {"rtol": 0.0, "atol": 0.0} if source == target else {"rtol": 2e-5, "atol": 2e-5}
    shapes = build_model(build_case("", "", "2x1", False)).state_dict()
    expected = join(saved, "state", shapes)
    for rank in loaded:
        assert rank["first"] == STEPS - AFTER
        torch.testing.assert_close(
            torch.stack(rank["losses"]), torch.stack(saved[0]["losses"][-AFTER:]), **close
        )
    found = join(loaded, "state", shapes)
    assert found.keys() == expected.keys() == shapes.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], **close)


@pytest.mark.parametrize("source", SHARED)
def test_one_process_takes_it_up_too(folder: Path, source: str) -> None:
    case = build_case("", source, "2x1", True)
    case.stage_map = "0;"
    losses = train(case, folder, 0)["losses"]
    saved = read(folder, source, LAYOUTS[source][0])[0]
    torch.testing.assert_close(
        torch.stack(losses), torch.stack(saved["losses"][-AFTER:]), rtol=2e-5, atol=5e-6
    )


@pytest.mark.parametrize("source", SHARED)
def test_the_files_hold_whole_tensors_in_plain_names(folder: Path, source: str) -> None:
    (found,) = list_complete(folder / "stores" / source)
    assert list(find_damage(found.path)) == []
    plain = build_model(build_case("", "", "2x1", False)).state_dict()
    with CheckpointReader(found.path) as reader:
        for name, tensor in plain.items():
            assert reader.shape(name) == tensor.shape
            state = reader.read_optimizer(name)["state"]
            assert state["exp_avg"].shape == tensor.shape
            assert state["step"].item() == STEPS - AFTER
