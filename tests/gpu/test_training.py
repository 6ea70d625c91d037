"""Ranks on GPUs train as the plain model does there; several share one where there are few.

The cases and what is asked of them are those of the CPU tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import precision_rank
from tests.ranks.device import CPU, GPU_MEMORY, choose_device
from tests.ranks.start import collect, find_problems, start_ranks
from tests.ranks.train_rank import Case, write_cases
from tests.varuna_core import test_varuna as full
from tests.varuna_core import test_varuna_precision as half
from tests.varuna_core.runtime.engine import test_graph_offload as offload
from tests.varuna_core.runtime.optim import test_zero as zero

pytestmark = pytest.mark.gpu

FULL = [
    "1x1 1f1b", "1x1 zero_bubble", "1x1 two zbv", "2x1 gpipe", "2x1 1f1b", "2x1 varuna",
    "2x1 zero_bubble", "1x2", "1x2 tied", "2x1 tied 1f1b", "2x1 dropout", "1x2 dropout",
    "2x1 two dropout interleaved", "2x1 root", "2x1 auto some", "2x1 batch norm", "2x1 bert",
    "2x1 TiedPaddedGpt 1f1b", "2x1 compiled 1f1b", "2x2 1f1b", "2x2 zero_bubble", "2x2 tied",
    "2x2 dropout", "1x1 recorded gpipe", "2x1 recorded gpipe", "2x1 recorded 1f1b",
    "2x1 tied recorded 1f1b", "2x1 norm recorded 1f1b", "2x1 compiled recorded 1f1b",
    "2x1 lengths recorded 1f1b", "1x2 means recorded 1f1b", "2x1 full recorded varuna",
    "1x1 offload gpipe", "2x1 offload gpipe", "2x1 tied offload gpipe", "2x1 dropout offload gpipe",
    "2x1 batch norm offload gpipe", "2x1 compiled offload gpipe", "2x1 two offload zbv",
    "3x1 recorded offload 1f1b", "4x1 empty offload zero_bubble", "1x1 selective gpipe",
    "2x1 selective varuna", "2x1 dropout selective varuna", "2x1 two selective zbv",
]  # fmt: skip
"""fp32: shapes, schedules, recompute, offload, tied weights; by the names of tests/varuna_core."""
HALF = [
    *(f"{one} {word} 1f1b" for one in ("1x1", "2x1", "1x2", "2x2") for word in ("bf16", "fp16")),
    *(f"2x2 tied {word} 1f1b" for word in ("bf16", "fp16")),
    "2x1 bf16 zero_bubble", "2x1 fp16 varuna", "2x1 lamb bf16 1f1b", "2x1 checkpoint fp16 1f1b",
    "1x2 accumulate bf16 1f1b", "2x1 overflow", "2x2 overflow", "1x1 recorded fp16 1f1b",
    "2x1 wide bf16 zero_bubble", "1x2 wide fp16 1f1b", "2x1 offload bf16 gpipe",
    "2x1 selective bf16 varuna",
    "2x1 recorded bf16 1f1b", "1x2 recorded bf16 1f1b", "2x2 recorded tied fp16 1f1b",
]  # fmt: skip
ZERO = [
    *(f"1x2 adamw {word}" for word in ("fp32", "bf16", "fp16")),
    *(f"1x2 offload {word}" for word in ("fp32", "fp16")),
    "1x2 at once fp32", "1x2 at once bf16", "1x2 at once offload fp16", "1x2 offload alone fp32",
    "2x2 tied fp16", "2x2 tied lamb fp32", "2x2 overflow fp16", "1x2 recorded fp32",
    "1x2 recorded bf16", "1x2 recorded offload fp16", "1x2 graphs offload bf16",
]  # fmt: skip
"""ZeRO 1 and 2, and optimizers on the host. ZeRO 3 needs NCCL, and so a GPU for each rank."""
SLICED = ["1x2 sliced shared fp32", "2x2 sliced bf16", "2x2 sliced fp32"]


def choose(names: Sequence[str], every: Sequence[tuple[Any, Any]]) -> list[Any]:
    by_name = {case.name: (where, case) for where, case in every}
    return [by_name[name] for name in names]


ALL: dict[str, list[tuple[Any, Any]]] = {
    "train_rank": choose(FULL, full.ALL),
    "precision_rank": choose(HALF, half.ALL),
}
WORLDS = {layout: size for layout, (size, _) in zero.LAYOUTS.items()}
ALL["precision_rank"] += [(WORLDS[at], case) for at, case in choose(ZERO + SLICED, zero.ALL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@cache
def train(folder: Path, program: str, world_size: int) -> str:
    """All cases of a world size in one start of its ranks; what went wrong, if anything."""
    inside = folder / f"{program}{world_size}"
    inside.mkdir()
    own = [case for size, case in ALL[program] if size == world_size and can_run(case, size)]
    write_cases(inside, own)
    with start_ranks(f"tests.ranks.{program}", world_size, str(inside)) as ranks:
        done = collect(ranks)
    return "\n".join(f"rank {r} exit {code}\n{out}" for r, (code, out) in enumerate(done) if code)


def can_run(case: Case, world_size: int) -> bool:
    return choose_device() == CPU or not is_sliced(case) or torch.cuda.device_count() >= world_size


def is_sliced(case: Case) -> bool:
    return getattr(case, "zero", 0) == 3


def load(folder: Path, program: str, world_size: int, case: Case) -> list[dict[str, Any]]:
    if not can_run(case, world_size):
        pytest.skip(f"ZeRO 3 needs a GPU for each of {world_size} ranks")
    problem = train(folder, program, world_size)
    assert not problem, problem
    inside = folder / f"{program}{world_size}"
    names = [inside / f"{case.name}.{rank}.pt" for rank in range(world_size)]
    return [torch.load(name, map_location=CPU) for name in names]


def list_cases(program: str) -> Any:
    """Those of a world size in one process of pytest-xdist: it starts their ranks once."""
    every = [
        pytest.param(size, case, id=case.name, marks=pytest.mark.xdist_group(f"{program} {size}"))
        for size, case in ALL[program]
    ]
    return pytest.mark.parametrize(("world_size", "case"), every)


@list_cases("train_rank")
def test_any_layout_trains_as_the_plain_model(folder: Path, world_size: int, case: Case) -> None:
    ranks = load(folder, "train_rank", world_size, case)
    full.assert_trained(case, ranks, full.train_plain(case, choose_device()))


BY_IPC = [
    "2x1 gpipe", "2x1 varuna", "2x1 zero_bubble", "2x1 dropout", "2x1 batch norm", "2x1 bert",
    "2x1 two dropout interleaved", "2x1 tied recorded 1f1b", "2x2 1f1b", "2x2 tied",
]  # fmt: skip


@pytest.mark.usefixtures("only_gpu")
def test_layouts_train_through_the_memory_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between GPUs of their own no host waits for the GPU before it sends."""
    monkeypatch.setenv(GPU_MEMORY, "1")
    chosen = choose(BY_IPC, full.ALL)
    for world_size in (2, 4):
        inside = tmp_path / str(world_size)
        inside.mkdir()
        own = [case for size, case in chosen if size == world_size]
        write_cases(inside, own)
        with start_ranks("tests.ranks.train_rank", world_size, str(inside)) as ranks:
            assert not find_problems(ranks)
        for case in own:
            names = [inside / f"{case.name}.{rank}.pt" for rank in range(world_size)]
            results = [torch.load(name, map_location=CPU) for name in names]
            assert {wire for one in results for wire in one["wires"]} == {"IpcWire"}
            full.assert_trained(case, results, full.train_plain(case, choose_device()))


@pytest.mark.usefixtures("only_gpu")
def test_offloaded_graphs_leave_the_memory_of_the_gpu() -> None:
    """Two of eight are there at once, and every bit of the training is as without."""
    most, losses, weights = [], [], []
    for recompute in ("none", "offload"):
        varuna, inputs = offload.make(2**16, recompute=recompute, device=choose_device())
        optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
        varuna.set_optimizer(optimizer)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            losses.append(varuna.step(inputs)[0].item())
            optimizer.step()
            varuna.zero_grad()
        most.append(torch.cuda.max_memory_allocated())
        weights.append([parameter.detach().clone() for parameter in varuna.parameters()])
    assert losses[:4] == losses[4:]
    assert all(map(torch.equal, *weights))
    graph = 2**16 * 4 * 9 * offload.WIDTH
    assert most[0] - most[1] > 5 * graph, [size / graph for size in most]


@list_cases("precision_rank")
def test_half_precision_and_zero_train_as_by_hand(
    folder: Path, world_size: int, case: precision_rank.Case
) -> None:
    ranks = load(folder, "precision_rank", world_size, case)
    hand = half.ByHand(case, choose_device())
    plain = hand.run()
    is_zero = case.zero or case.offload
    (zero.assert_sliced_trained if is_zero else half.assert_half_trained)(case, ranks, plain, hand)
