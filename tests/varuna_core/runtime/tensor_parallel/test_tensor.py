"""Layers shared by two ranks train as the plain model does, in any layout around them."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.start import collect, start_ranks
from tests.ranks.tensor_rank import Case, build_model, build_optimizer, make_batch, write_cases
from tests.ranks.train_rank import SEED, cut_batch, read_loss
from tests.segments import announce_segments
from varuna_core.runtime.split.random_streams import build_seeder

pytestmark = pytest.mark.slow

UNEVEN = [6, 5, 1, 3]
"""Of two replicas one has no sample in the third step. A micro-batch takes a quarter of a second of
each rank, so there are as few as show it all."""

SELECTIVE: dict[str, Any] = {"schedule": "gpipe", "recompute": "selective"}
OFFLOAD: dict[str, Any] = {"schedule": "gpipe", "recompute": "offload"}

ALONE: list[Case] = [
    Case(name="gpt", stage_map="0;", batches=UNEVEN, clip=0.3),
    Case(name="apart", stage_map="0;", model="Apart", dropout=0.2, recompute="full"),
    Case(name="dropping", stage_map="0;", model="Dropping", dropout=0.2, recompute="full"),
    Case(name="gpt dropout", stage_map="0;", dropout=0.2, batches=[6, 5, 1], clip=0.3),
    Case(name="sequence dropout", stage_map="0;", sequence_parallel=True, dropout=0.2),
    Case(name="offload", stage_map="0;", batches=[8, 5, 1], **OFFLOAD),
    Case(name="sequence offload", stage_map="0;", sequence_parallel=True, **OFFLOAD),
    Case(name="selective", stage_map="0;", schedule="gpipe", recompute="selective", dropout=0.2),
    Case(name="sequence selective", stage_map="0;", sequence_parallel=True, **SELECTIVE),
    Case(name="bare", stage_map="0;", model="Bare", schedule="zero_bubble"),
    Case(name="two stages", stage_map="0;", schedule="interleaved", stages_per_rank=2, clip=0.3),
    Case(name="forgetful", stage_map="0;", model="Forgetful", fails=True),
    Case(
        name="crossing",
        stage_map="0;",
        model="Crossing",
        stages_per_rank=2,
        schedule="interleaved",
        partition="0-4",
        fails=True,
    ),
    Case(name="failing", stage_map="0;", model="Failing", fails=True),
]
PAIRED: list[Case] = [
    Case(name="2x1", stage_map="0;1;", batches=UNEVEN, clip=0.3),
    Case(name="2x1 sequence", stage_map="1;0;", sequence_parallel=True, clip=0.3),
    Case(name="2x1 bert", stage_map="0;1;", model="bert", schedule="varuna"),
    Case(name="2x1 apart", stage_map="0;1;", model="Apart", dropout=0.2, schedule="zero_bubble"),
    Case(name="2x1 dropping", stage_map="0;1;", model="Dropping", dropout=0.2, schedule="varuna"),
    Case(name="2x1 words", stage_map="0;1;", model="Words", recompute="auto", memory_limit=2e5),
    Case(name="2x1 bare", stage_map="0;1;", model="Bare", schedule="zbv"),
    Case(name="2x1 padded", stage_map="0;1;", model="Padded", batches=[8, 5], clip=0.3),
    Case(name="1x2 padded", stage_map="0,1;", model="Padded", zero=1, recompute="full"),
    Case(name="2x1 half", stage_map="0;1;", precision="fp16", clip=0.3),
    Case(name="1x2", stage_map="0,1;", batches=UNEVEN, clip=0.3),
    Case(name="1x2 zero", stage_map="0,1;", zero=1, batches=UNEVEN, clip=0.3),
    Case(name="1x2 zero 2 sequence", stage_map="0,1;", zero=2, sequence_parallel=True, clip=0.3),
    Case(name="1x2 zero half", stage_map="1,0;", zero=1, precision="bf16"),
    Case(name="1x2 sequence", stage_map="1,0;", sequence_parallel=True, batches=UNEVEN),
    Case(name="four ranks", stage_map="0;", tensor=4, sequence_parallel=True),
]
EIGHT = [
    Case(name="2x2", stage_map="0,2;1,3;", sequence_parallel=True, batches=UNEVEN, clip=0.3),
    Case(name="2x2 zero", stage_map="0,2;1,3;", zero=1, batches=UNEVEN, clip=0.3),
]
CASES = {2: ALONE, 4: PAIRED, 8: EIGHT}
ALL = [(world, case) for world, cases in CASES.items() for case in cases if not case.fails]


@cache
def _train(folder: Path, world_size: int) -> str:
    """All cases of a world size in one start of its ranks; what went wrong, if anything."""
    write_cases(folder, CASES[world_size])
    with start_ranks("tests.ranks.tensor_rank", world_size, str(folder)) as ranks:
        done = collect(ranks)
    return "\n".join(f"rank {r} exit {code}\n{out}" for r, (code, out) in enumerate(done) if code)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {size: tmp_path_factory.mktemp(f"world{size}") for size in CASES}


def train_plain(case: Case) -> dict[str, Any]:
    """By one plain process: on whole batches, or with dropout on the same micro-batches."""
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step, size in enumerate(case.batches):
        batch, chunk = make_batch(case, step), 2 if case.dropout else size
        total = torch.zeros(())
        for begin in range(0, size, chunk):
            held = range(begin, min(begin + chunk, size))
            with announce_segments(build_seeder(SEED, step, begin)):
                loss = read_loss(model(**cut_batch(batch, size, held))) * (len(held) / size)
            loss.backward()
            total += loss.detach()
        result["losses"].append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        result["norms"].append(norm)
        if step == 0:
            named = model.named_parameters(remove_duplicate=False)
            result["gradients"] = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        result["evaluated"] = read_loss(model(**make_batch(case, 0)))
        if case.model in ("Apart", "Words"):
            result["logits"] = model(make_batch(case, 0)["ids"])
    result["state"] = model.state_dict()
    return result


def join(ranks: list[dict[str, Any]], word: str, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, of the ranks' shares; what several ranks have is the same to the bit."""
    joined: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (tensor, pieces) in rank[word].items():
            shape = shapes[name].shape
            whole = joined.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            if pieces is None:
                pieces = [((0,) * len(shape), shape, (0,) * len(shape))]
            assert sum(prod(extent) for _, extent, _ in pieces) == tensor.numel(), name
            for offset, extent, inner in pieces:
                there = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
                here = tuple(slice(o, o + e) for o, e in zip(inner, extent, strict=True))
                held, part = whole[there], tensor[here]
                assert held.isnan().all() or torch.equal(held, part), name
                whole[there] = part
    return joined


def read(folder: Path, name: str, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(world_size)]


def expect_close(ours: Tensor, plain: Tensor, what: str, half: bool = False) -> None:
    bounds = {"atol": 3e-2, "rtol": 3e-2} if half else {"atol": 2e-6, "rtol": 2e-5}
    torch.testing.assert_close(ours, plain, **bounds, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case.name for _, case in ALL])
def test_shared_layers_train_as_the_plain_model(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    problem = _train(folders[world_size], world_size)
    assert not problem, problem
    plain, half = train_plain(case), case.precision != "fp32"
    ranks = read(folders[world_size], case.name, world_size)
    for rank in ranks:
        for word in ("losses", "norms"):
            expect_close(torch.stack(rank[word]), torch.stack(plain[word]), word, half)
            assert torch.equal(torch.stack(rank[word]), torch.stack(ranks[0][word]))
        for word in ("evaluated", "logits"):
            assert (word in rank) == (word in plain)
            if word in plain:
                expect_close(rank[word], plain[word], word, half)
    for word in ("gradients", "state"):
        joined = join(ranks, word, plain["state"])
        assert joined.keys() == plain[word].keys()
        for name, tensor in joined.items():
            expect_close(tensor, plain[word][name], f"{word} of {name}", half)


def test_a_layer_that_the_plan_forgets_is_named_in_the_first_step(
    folders: dict[int, Path],
) -> None:
    assert not _train(folders[2], 2)
    said = [rank["error"] for rank in read(folders[2], "forgetful", 2)]
    assert all("the gradient of 'gain' differs between the 2 ranks" in word for word in said)


def test_what_is_shared_does_not_cross_a_cut(folders: dict[int, Path]) -> None:
    assert not _train(folders[2], 2)
    for rank in read(folders[2], "crossing", 2):
        assert "reaches a cut, which only plain tensors can cross" in rank["error"]


def test_a_rank_that_fails_is_named_by_those_that_share_its_layers(
    folders: dict[int, Path],
) -> None:
    assert not _train(folders[2], 2)
    first, second = (rank["error"] for rank in read(folders[2], "failing", 2))
    assert second == "KeyError: 'no such block'"
    assert first == (
        "RankFailed: rank 0 (stage 0, replica 0, tensor rank 0) stops: rank 1 (stage 0, replica 0, "
        "tensor rank 1): KeyError: 'no such block'"
    )
