"""Graphs leave memory for their time, whole and once, and come back as they were."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor

from tests.varuna_core.runtime.comm.fake_nccl import Gpu
from varuna_core import CutPoint, Varuna
from varuna_core.runtime.engine.graph_memory import measure_storages
from varuna_core.runtime.engine.graph_offload import Copies, Files, HostMemory, SavedGraph

CPU = torch.device("cpu")
WIDTH, ROWS = 64, 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.second(self.cut(F.gelu(self.first(x))))).square().mean()


def make(rows: int = ROWS, **options: Any) -> tuple[Varuna, Any]:
    """Eight micro-batches."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8 * rows, WIDTH)}
    options = {"device": "cpu", "schedule": "gpipe", **options}
    return Varuna(Net(), "0;", inputs, 8 * rows, rows, **options), inputs


def measure_peak(recompute: str) -> int:
    """The most that torch has allocated at once in a step, in bytes."""
    varuna, inputs = make(recompute=recompute)
    varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), lr=0.1))
    varuna.step(inputs)
    with profile(profile_memory=True) as recorded:
        varuna.step(inputs)
    now = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_two_graphs_of_eight_are_in_memory_at_once() -> None:
    graph = ROWS * 4 * (2 * 4 * WIDTH + WIDTH)  # what the gelus and the second layer save
    kept, offloaded = measure_peak("none"), measure_peak("offload")
    assert 7.5 * graph < kept
    assert 2 * graph < offloaded < 3 * graph, "two, the gradients, and what runs"


class Counting(Files):
    """Counts what it is given."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def copy_out(self, memories: Sequence[Tensor]) -> Copies:
        self.sizes.append([len(memory) for memory in memories])
        return super().copy_out(memories)


def save(
    compute: Callable[..., Tensor], x: Tensor, *parameters: Tensor
) -> tuple[SavedGraph, Tensor]:
    graph = SavedGraph(device=CPU, staying=measure_storages([x, *parameters]).keys())
    with graph.saving():
        return graph, compute(x, *parameters)


def test_what_is_saved_twice_or_as_views_is_copied_once() -> None:
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        both = x @ weight
        first, second = both.chunk(2, dim=-1)
        return (first * second).sum() + both.square().sum()

    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    graph, out = save(compute, x, weight)
    out.backward(retain_graph=True)
    expected = [t.grad.clone() for t in (x, weight) if t.grad is not None]
    place = Counting()
    graph.offload(place)
    assert place.sizes == [[4 * 6 * 4]], "not x, and not the view of the weight that is saved"
    graph.load()
    graph.wait()
    x.grad = weight.grad = None
    out.backward()
    assert all(map(torch.equal, (x.grad, weight.grad), expected))  # type: ignore[arg-type]


def test_what_no_backward_needs_any_more_is_not_copied() -> None:
    def compute(x: Tensor) -> Tensor:
        x.exp().sin()  # dropped
        return x.cos().sum()

    x = torch.randn(4, requires_grad=True)
    graph, _ = save(compute, x)
    place = Counting()
    graph.offload(place)
    assert place.sizes == [[]]


def test_a_backward_that_frees_what_it_used_frees_what_was_loaded() -> None:
    x = torch.randn(4, requires_grad=True)
    graph, out = save(lambda x: x.exp().sin().sum(), x)
    graph.offload(Files())
    graph.load()
    out.backward()
    assert not graph._storages and not graph._saved
    assert torch.equal(x.grad, x.exp().cos() * x.exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_what_was_changed_in_place_is_refused_where_it_is_used(leaves: bool, is_used: bool) -> None:
    """As plain PyTorch does; its own count of changes does not reach what hooks have saved."""
    x = torch.randn(4, requires_grad=True)

    def compute(x: Tensor) -> Tensor:
        made = x.exp()
        used = made.sin()
        made.mul_(2.0)
        return used if is_used else made.detach() + x.sin()

    graph, out = save(compute, x)
    if leaves:
        graph.offload(Files())
        graph.load()
    if not is_used:
        out.sum().backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_changed_after_it_left_is_as_it_was_saved() -> None:
    x = torch.randn(4, requires_grad=True)
    made: list[Tensor] = []

    def compute(x: Tensor) -> Tensor:
        made.append(x.exp())
        return made[0].sin().sum()

    graph, out = save(compute, x)
    expected = (x.exp().cos() * x.exp()).detach()
    graph.offload(Files())
    made[0].data.zero_()
    graph.load()
    out.backward()
    assert x.grad is not None and torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_any_type_and_layout_comes_back(dtype: torch.dtype) -> None:
    saved = torch.randn(6, 5).to(dtype)
    views = [saved, saved.t(), saved[1::2, 1:], saved[:0], saved[2].expand(3, 5), saved[0, 0]]
    before = [view.clone() for view in views]
    graph = SavedGraph(device=CPU, staying=())
    held = [graph._save(view) for view in views]
    place = Counting()
    graph.offload(place)
    assert [len(sizes) for sizes in place.sizes] == [1]
    saved.zero_()
    graph.load()
    for handle, view, expected in zip(held, views, before, strict=True):
        back = handle.find()
        assert torch.equal(back, expected) and back.stride() == view.stride()


def test_the_parts_of_a_tensor_made_of_others_leave() -> None:
    """As a DTensor's do: whatever else it has stays with it."""
    saved = TwoTensor(torch.randn(3, 2), torch.randn(3, 2))
    expected = [saved.a.clone(), saved.b.clone()]
    graph = SavedGraph(device=CPU, staying=measure_storages([saved.b]).keys())
    held = graph._save(saved)
    place = Counting()
    graph.offload(place)
    assert place.sizes == [[3 * 2 * 4]] and held.tensor is None
    graph.load()
    back = held.find()
    assert isinstance(back, TwoTensor)
    assert all(map(torch.equal, (back.a, back.b), expected))


def test_a_conjugate_stays() -> None:
    saved = torch.randn(3, dtype=torch.complex64).conj()
    graph = SavedGraph(device=CPU, staying=())
    held = graph._save(saved)
    graph.offload(Files())
    graph.load()
    assert held.tensor is not None and torch.equal(held.find(), saved)


def test_a_place_that_cannot_be_written_says_what_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb", 0))  # noqa: SIM115  # closed by who asked
    varuna, inputs = make(recompute="offload")
    with pytest.raises(
        OSError, match=r"recompute='offload' writes graphs .*No space left"
    ) as found:
        varuna.step(inputs)
    assert found.value.filename == str(tmp_path)


def test_a_step_asked_for_outputs_and_an_evaluation_are_as_without() -> None:
    results = []
    for recompute in ("none", "offload"):
        varuna, inputs = make(recompute=recompute)
        loss, _ = varuna.step(inputs)
        results.append([loss, varuna.evaluate(inputs), *(p.grad for p in varuna.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "varuna"}, "schedule 'varuna' recomputes, so recompute='offload' is not"),
        ({"schedule": "1f1b", "zero": 3}, "recompute='offload' would treat the weights"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Varuna(Net(), "0;", {"x": torch.randn(4, WIDTH)}, 4, 2, recompute="offload", **options)


class LateHostMemory(HostMemory):
    """Copies when the GPU gets to it."""

    def __init__(self, gpu: Gpu, turns: int) -> None:
        super().__init__(CPU)
        self.gpu, self.turns = gpu, turns

    def make_room(self, memory: Tensor) -> Tensor:
        return torch.empty_like(memory)

    def copy(self, source: Tensor, into: Tensor) -> Tensor:
        self.gpu.launch(lambda: into.copy_(source), self.turns)
        return into


@pytest.mark.parametrize("seed", range(12))
def test_copies_keep_the_order_of_the_gpus_work(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Memory is copied once it was computed, overwritten once it was copied, read once it is back;
    the host waits for nothing. What takes over its memory comes after the next copy begins."""
    gpu = Gpu(seed)
    gpu.install(monkeypatch)
    place = LateHostMemory(gpu, turns=seed % 4)
    memory = torch.zeros(8, dtype=torch.uint8)
    copies: list[Copies] = []
    for number in range(4):
        gpu.launch(lambda number=number: memory.fill_(number + 1), seed % 3)
        copies.append(place.copy_out([memory]))
        place.free_copied()
    gpu.launch(lambda: memory.fill_(99))
    seen: list[list[int]] = []
    for copy in copies:
        (back,) = copy.bring_back()
        copy.wait()
        gpu.launch(lambda back=back: seen.append(back.tolist()))
    done = torch.cuda.Event()
    done.record(gpu.main)  # type: ignore[arg-type]  # the fake's
    while not done.query():
        pass
    gpu.stop()
    assert seen == [[number + 1] * 8 for number in range(4)]
