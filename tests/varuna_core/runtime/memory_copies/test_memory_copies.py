"""Copies in memory, taken up in other layouts with nodes lost: exactly what the checkpoint has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.ranks.memory_rank import SHARED, STEPS, Case, write_cases
from tests.ranks.start import collect, start_ranks

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2": {"stage_map": "0,2;1,3;", "schedule": "zbv"},
    "4x1": {"stage_map": "0;1;3;2;"},
    "1x4": {"stage_map": "0,1,2,3;"},
    "2x2 zero": {"stage_map": "0,1;2,3;", "zero": 1},
    "2x2 sliced zero": {"stage_map": "3,2;1,0;", "zero": 3, "offload": "optimizer"},
    "1x2x2": {"stage_map": "0,1;", "tensor": 2},
    "2x1x2": {"stage_map": "1;0;", "tensor": 2},
}
NUM_SHARES = dict(zip(LAYOUTS, (2, 4, 1, 4, 4, 2, 4), strict=True))


def build(kind: str, source: str, target: str, **options: Any) -> Case:
    words = [kind, source, "in", target, *map(str, options.values())]
    name = " ".join(words).replace("(", "").replace(")", "").replace(",", "")
    layouts = {"source": dict(LAYOUTS[source]), "target": dict(LAYOUTS[target])}
    if kind == SHARED:
        for layout in layouts.values():
            layout.setdefault("tensor", 1)
            layout.pop("schedule", None)
    return Case(name=name, kind=kind, **layouts, **options)


WHOLE = [
    build("groups", "2x2", "2x2"),
    build("groups", "4x1", "1x4"),
    build("groups", "1x4", "2x2 zero"),
    build("groups", "2x2 zero", "2x2 sliced zero"),
    build("groups", "2x2 sliced zero", "2x2"),
    build("norm", "2x2", "4x1"),
    build("half", "2x2", "1x4", neighbours=2, lost=(1,)),
    build("groups", "2x2", "4x1", lost=(2, 1)),
    build("groups", "1x4", "2x2", lost=(0, 1, 3)),
    build(SHARED, "1x2x2", "2x1x2", lost=(0,)),
    build(SHARED, "2x1x2", "2x2"),
]
TORN = [
    build("groups", "2x2", "4x1", lost=(1, 3)),
    build("groups", "2x2 zero", "2x2", lost=(2,)),
    build("groups", "2x2", "4x1", damage="flip"),
    build("groups", "2x2", "1x4", damage="no marker"),
    build(SHARED, "1x2x2", "1x2x2", lost=(1, 3)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("memory")
    write_cases(folder, WHOLE + TORN)
    with start_ranks("tests.ranks.memory_rank", 4, str(folder)) as ranks:
        done = collect(ranks)
    assert [code for code, _ in done] == [0] * 4, "\n".join(said for _, said in done)
    return {
        case.name: [torch.load(folder / f"{case.name}.{rank}.pt") for rank in range(4)]
        for case in WHOLE + TORN
    }


def expect_equal(first: Any, second: Any, where: str) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            expect_equal(value, second[key], f"{where} {key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for number, value in enumerate(first):
            expect_equal(value, second[number], f"{where} {number}")
    else:
        assert first == second, where


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_what_the_nodes_hold_is_what_was_saved(
    case: Case, results: dict[str, list[dict[str, Any]]]
) -> None:
    for rank, result in enumerate(results[case.name]):
        assert result["found"], rank
        expect_equal(result["saved"], result["loaded"], f"rank {rank}")
        assert result["loaded"]["progress"] == (STEPS, (STEPS - 1) * 8, {"at": (STEPS - 1,)})
        if not case.lost and case.source == case.target:  # others may lack a replica of theirs
            expect_equal(*result["random"], f"random numbers of rank {rank}")


@pytest.mark.parametrize("case", TORN, ids=lambda case: case.name)
def test_what_is_not_whole_is_not_taken_up(
    case: Case, results: dict[str, list[dict[str, Any]]]
) -> None:
    for result in results[case.name]:
        assert not result["found"] and not result["left"]


def test_two_copies_take_turns_and_ranks_of_a_node_share_them(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for case in WHOLE + TORN:
        layout = next(name for name, known in LAYOUTS.items() if known == case.source)
        for result in results[case.name]:
            assert result["copies"] == [f"varuna_ckpt_{n}.0.{n}.partial" for n in (2, 3)]
            assert result["shares"] == [NUM_SHARES[layout]] * case.neighbours
        if case in WHOLE:
            lefts = [name for result in results[case.name] for name in result["left"]]
            assert set(lefts) == {"varuna_ckpt_3.0.3.partial"}, json.dumps(lefts)
