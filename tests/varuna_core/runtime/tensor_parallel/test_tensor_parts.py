"""Plans, shares and slices of the stage map, without a second rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.models import small as models
from tests.models.tensor import Dropping, DroppingAgain
from varuna_core import CutPoint
from varuna_core.checkpoint.format.entries import make_entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.programs.gpt import Gpt
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.tensor_parallel.draws import ShardedDraws
from varuna_core.runtime.tensor_parallel.plan import (
    PackedColwise,
    choose_plan,
    deal_rows,
    match_modules,
    place_parameters,
    resolve_ties,
)
from varuna_core.runtime.tensor_parallel.sharding import Sharding
from varuna_core.runtime.tensor_parallel.shares import Shares, compute_share

TIED = {"wte": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """The first of two ranks; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def small_gpt() -> Gpt:
    return Gpt(layers=2, hidden=8, heads=2, sequence=4, vocab=9, dropout=0.0)


# The stage map.


def test_an_entry_stands_for_neighbouring_ranks() -> None:
    whole = parse_stage_map("0,2;1,3;", 8, 2)
    assert whole.slice(1).ranks == ((1, 5), (3, 7))
    assert whole.slice(1).slice(0) == whole
    assert str(whole.slice(1)) == "0,2;1,3;"
    assert [whole.find(rank) for rank in range(8)] == [
        (0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1),
    ]  # fmt: skip
    assert whole.slice(1).find(6) == whole.find(6) == (1, 1)
    assert whole.slice(1).sharing(1, 0) == [2, 3]
    assert whole.world_size == 8
    assert whole.name(7) == "rank 7 (stage 1, replica 1, tensor rank 1)"


@pytest.mark.parametrize(
    ("text", "world", "tensor", "said"),
    [
        ("0;1;", 4, 3, "tensor 3 must divide the 4 ranks"),
        ("0;1;", 4, 0, "tensor 0 must divide"),
        ("0;1;2;3;", 4, 2, r"each of the entries 0 to 1 \(of 2 ranks each, of 4\) once"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(text: str, world: int, tensor: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_stage_map(text, world, tensor)


# Shares.


@st.composite
def shared_tensors(draw: st.DrawFn) -> tuple[Tensor, int, int, int]:
    """A tensor, the dimension that is shared, parts, ranks; uneven where there is one part."""
    ranks, parts = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = 0 if parts > 1 else draw(st.integers(0, len(shape) - 1))
    if parts > 1:
        shape[0] = parts * ranks * draw(st.integers(1, 3))
    return torch.arange(float(torch.Size(shape).numel())).view(shape), dim, parts, ranks


@given(shared_tensors())
def test_the_shares_of_all_ranks_are_the_tensor(made: tuple[Tensor, int, int, int]) -> None:
    tensor, dim, parts, ranks = made
    found = torch.full_like(tensor, torch.nan)
    dealt, index = (
        deal_rows(tensor, parts, ranks),
        deal_rows(torch.arange(tensor.shape[dim]), parts, ranks),
    )
    held = zip(dealt.chunk(ranks, dim), index.chunk(ranks), strict=True)
    for rank, (local, places) in enumerate(held):
        share = compute_share(tensor.shape, dim, places.tolist())
        assert share.extent == local.shape
        shares = Shares({"w": share}, {}, rank)
        placed = shares.place({3: [make_entry("weight", "w", local)]}).get(3, [])
        for entry in placed:
            assert entry.shape == tensor.shape
            assert found[entry.box.slices].isnan().all()
            found[entry.box.slices] = entry.load()
        # And back.
        out = torch.full_like(local, torch.nan)
        for wanted in shares.list_wanted("w", out):
            box = wanted.box
            wanted.out.copy_(tensor if box is None else tensor[box.slices])
        assert torch.equal(out, local)
    assert torch.equal(found, tensor)


def test_what_is_whole_is_given_by_the_first_rank() -> None:
    share = compute_share((4, 2), 0, [0, 1])
    entries = {
        0: [make_entry("weight", "w", torch.ones(2, 2)), make_entry("weight", "b", torch.ones(2))],
        1: [make_entry("optimizer.step", "w", torch.ones(()))],
    }
    first, second = (Shares({"w": share}, {"v": "w"}, rank).place(entries) for rank in range(2))
    assert {s: [e.name for e in held] for s, held in first.items()} == {0: ["w", "b"], 1: ["w"]}
    assert {s: [e.name for e in held] for s, held in second.items()} == {0: ["w"]}
    odd = {0: [make_entry("optimizer.row", "w", torch.ones(2))]}
    with pytest.raises(CheckpointError, match=r"optimizer\.row of 'w' has shape \[2\], not a "):
        Shares({"w": share}).place(odd)


def test_packed_rows_are_dealt_by_part() -> None:
    rows = torch.tensor([1, 1, 2, 2, 3, 3])
    assert deal_rows(rows, 3, 2).tolist() == [1, 2, 3, 1, 2, 3]
    with pytest.raises(ValueError, match="6 rows of 2 parts cannot be sharded evenly over 2 ranks"):
        deal_rows(rows, 2, 2)


# Plans.


def test_paths_match_a_word_at_a_time() -> None:
    model = small_gpt()
    found = match_modules(model, choose_plan(model, None))
    assert [path for path in found if path.startswith("blocks.1")] == [
        "blocks.1.attention.qkv",
        "blocks.1.attention.output",
        "blocks.1.mlp.inner",
        "blocks.1.mlp.output",
    ]
    assert {"tokens", "head"} < found.keys() and "norm" not in found


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"blocks.*.qvk": ColwiseParallel()},
            r"names 'blocks\.\*\.qvk', which is not a module; there",
        ),
        ({"blocks.*": ColwiseParallel(), "blocks.1": ColwiseParallel()}, "'blocks.1' twice, by"),
        ({"head": "colwise"}, "gives 'head' a str; expected a style"),
        ({"blocks.*.norm": SequenceParallel()}, "'blocks.0.norm', which holds the buffer 'mean'"),
        ({"blocks.1": ColwiseParallel()}, "names 'blocks.1', which holds a CutPoint"),
        ({"": ColwiseParallel()}, "names '', which is not a module"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(plan: Any, said: str) -> None:
    class Block(nn.Module):
        def __init__(self, cut: bool) -> None:
            super().__init__()
            self.qkv, self.norm = nn.Linear(2, 6), nn.Module()
            if cut:
                self.cut = CutPoint()
            else:
                self.norm.register_buffer("mean", torch.zeros(2))

    model = nn.Module()
    model.blocks, model.head = nn.ModuleList([Block(False), Block(True)]), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=said):
        match_modules(model, plan)


def test_a_model_without_a_plan_is_told_how_to_have_one() -> None:
    with pytest.raises(ValueError, match="Gpt has no tensor_parallel_plan; give it one, or"):
        choose_plan(models.Gpt(), None)


def test_placements_are_what_torch_makes_of_the_plan(mesh: DeviceMesh) -> None:
    model = small_gpt()
    plan = match_modules(model, model.tensor_parallel_plan(sequence_parallel=True))
    placed = place_parameters(model, plan, mesh)
    found = {name: (sharing.placement, sharing.parts) for name, sharing in placed.items()}
    assert found["tokens.weight"] == found["head.weight"] == (Shard(0), 1)
    assert found["blocks.1.attention.qkv.bias"] == (Shard(0), 3)
    assert found["blocks.0.attention.output.weight"] == (Shard(1), 1)
    assert found["blocks.0.attention.output.bias"] == (Replicate(), 1)
    assert found["norm.weight"] == (Replicate(), 1)
    assert all(not parameter.is_meta for parameter in model.parameters())


def test_a_style_that_does_not_go_onto_a_module_is_refused_with_both_names(
    mesh: DeviceMesh,
) -> None:
    plan = match_modules(small_gpt(), {"norm": ColwiseParallel()})
    with pytest.raises(SplitError, match="ColwiseParallel cannot be applied to 'norm', a Layer"):
        place_parameters(small_gpt(), plan, mesh)
    plan = match_modules(small_gpt(), {"tokens": PackedColwise(parts=3)})
    with pytest.raises(SplitError, match="PackedColwise cannot be applied to 'tokens', a Emb"):
        place_parameters(small_gpt(), plan, mesh)


def test_tied_names_are_shared_alike(mesh: DeviceMesh) -> None:
    split = split_model(models.TiedGpt(), models.make_inputs(), 2)
    for plan in ({"head": ColwiseParallel()}, {**TIED, "head": RowwiseParallel()}):
        placed = place_parameters(split.model, match_modules(split.model, plan), mesh)
        with pytest.raises(SplitError, match=r"one tied weight differently: 'wte\.weight'"):
            resolve_ties(split.groups, placed)
    placed = place_parameters(split.model, match_modules(split.model, TIED), mesh)
    assert resolve_ties(split.groups, placed).keys() == {"wte.weight"}


def test_a_shared_weight_that_code_before_the_stage_reads_is_refused(group: Any) -> None:
    class Reading(models.TiedGpt):
        def embed(self, ids: Tensor) -> Tensor:
            return super().embed(ids) + self.wte.weight.mean()

    split = split_model(Reading(), models.make_inputs(), 2)
    sharding = Sharding(split, TIED, group, torch.device("cpu"))
    split.make_stage(0, sharding=sharding)
    with pytest.raises(SplitError, match=r"shards 'wte\.weight', which is read by code before"):
        split.make_stage(1, sharding=sharding)


def test_the_parameters_of_a_stage_are_shares_in_the_memory_of_what_it_computes_with(
    group: Any,
) -> None:
    split = split_model(models.TiedGpt(), models.make_inputs(), 1)
    sharding = Sharding(split, TIED, group, torch.device("cpu"))
    stage = split.make_stage(0, sharding=sharding)
    local = stage.parameters()
    assert local["wte.weight"] is local["head.weight"]
    assert local["wte.weight"].shape == (models.VOCAB // 2, models.WIDTH)
    held: Any = stage.module.get_parameter("head.weight")
    assert held is stage.module.get_parameter("wte.weight")
    assert held.to_local().data_ptr() == local["wte.weight"].data_ptr()


def test_draws_within_torchs_checkpoint_are_refused() -> None:
    inputs = models.make_inputs()
    dropping = split_model(DroppingAgain(dropout=0.2), inputs, 1).record
    with pytest.raises(SplitError, match=r"checkpoint .*bernoulli_.*recompute='full'"):
        ShardedDraws(dropping, 2, 0)
    assert ShardedDraws(split_model(Dropping(dropout=0.2), inputs, 1).record, 2, 0).is_needed
    assert not ShardedDraws(split_model(models.Gpt(), inputs, 1).record, 2, 0).is_needed
