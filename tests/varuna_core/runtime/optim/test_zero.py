"""ZeRO in any layout trains as one process does, and each replica holds a share of the state."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import CutInBlockGpt, Gpt, SharedBlockGpt, TiedGpt, make_inputs
from tests.ranks.precision_rank import Case, build_model
from tests.ranks.start import find_problems, start_ranks
from tests.ranks.train_rank import write_cases
from tests.varuna_core.test_varuna_precision import ByHand, differs
from varuna_core import Varuna
from varuna_core.runtime.optim.zero import deal_owners, pack
from varuna_core.runtime.optim.zero_weights import find_units, refuse_uneven
from varuna_core.runtime.split.split import split_model

pytestmark = pytest.mark.slow

UNEVEN = [8, 7, 8, 5, 8, 6]
LAYOUTS = {"1x2": (2, "0,1;"), "2x2": (4, "0,2;1,3;"), "1x3": (3, "0,1,2;")}
PLACES = {"stages_per_rank": 2}
GRAPHS = {"schedule": "gpipe", "recompute": "offload", "batches": [16, 16, 15]}
PRECISIONS = ["fp32", "bf16", "fp16"]


def grid(name: str, layout: str, *precisions: str, **options: Any) -> list[Case]:
    """In each of these precisions; by default in all of them in 1x2, else in one."""
    if not precisions:
        one = PRECISIONS[sum(map(ord, name)) % len(PRECISIONS)]
        precisions = tuple(PRECISIONS) if layout == "1x2" else (one,)
    options = {"zero": 1, "batches": [8, 7, 8, 5], "clip": 0.3, **options}
    return [
        Case(
            name=f"{layout} {name} {precision}",
            stage_map=LAYOUTS[layout][1],
            precision=precision,
            **options,
        )
        for precision in precisions
    ]


def list_cases(layout: str) -> list[Case]:
    cases = [
        *grid("adamw", layout, optimizer="groups", schedule_rate="after", batches=UNEVEN),
        *grid("sgd", layout, batches=UNEVEN),
        *grid("lamb", layout, optimizer="lamb", clip=None, batches=UNEVEN),
        *grid("offload", layout, "fp32", "fp16", optimizer="groups", offload="optimizer"),
        *grid("padded", layout, "fp32", model="PaddedGpt", batches=[8, 8, 5]),
        *grid("at once padded", layout, "bf16", model="PaddedGpt", zero=2, every=2, batches=[8, 8]),
        *grid("at once", layout, "fp32", "bf16", optimizer="groups", zero=2),
    ]
    if layout == "1x2":
        cases += [
            *grid("accumulate", layout, "bf16", every=2),
            *grid("recorded", layout, "fp32", "bf16", cuda_graphs=True, batches=[8] * 5),
            *grid("recorded offload", layout, "fp16", cuda_graphs=True, offload="optimizer"),
            *grid("at once offload", layout, "fp16", every=2, zero=2, offload="optimizer"),
            *grid("frozen", layout, "fp32", "bf16", frozen=[0, 2]),
            *grid("graphs offload", layout, "fp32", "bf16", zero=2, **GRAPHS),
            *grid("foreign", layout, "bf16", optimizer="foreign"),
            *grid("offload alone", layout, "fp32", zero=0, offload="optimizer", frozen=[0, 2]),
            *grid("norm", layout, "bf16", model="NormNet", batches=[8] * 3, clip=None),
            *grid("sliced norm", layout, "fp16", model="NormNet", batches=[8] * 3, zero=3),
            *grid("sliced shared", layout, "fp32", model="SharedBlockGpt", batches=[8] * 4, zero=3),
        ]
    if layout == "2x2":
        even: dict[str, Any] = {"zero": 3, "batches": [8, 7, 8, 8]}
        poison = {"model": "PoisonGpt", "poison": {"1": ["backward", float("inf")]}}
        cases += [
            *grid("tied", layout, model="TiedGpt", batches=UNEVEN),
            *grid("tied lamb", layout, "fp32", model="TiedGpt", optimizer="lamb", clip=None),
            *grid("at once tied", layout, "bf16", model="TiedGpt", zero=2, schedule="zero_bubble"),
            *grid("places", layout, "fp16", model="TiedGpt", schedule="interleaved", **PLACES),
            *grid("zbv", layout, "fp32", schedule="zbv", zero=2),
            *grid("overflow", layout, "fp16", **poison),
            *grid("overflow sliced", layout, "fp16", **even, **poison),
            *grid("sliced", layout, *PRECISIONS, optimizer="groups", zero=3, batches=[8] * 6),
            *grid("sliced padded", layout, "fp32", "fp16", **even | {"model": "PaddedGpt"}),
            *grid("sliced varuna", layout, "fp32", "bf16", schedule="varuna", **even),
            *grid("sliced put off", layout, "bf16", schedule="zero_bubble", **even),
            *grid("sliced tied", layout, "fp32", model="TiedGpt", recompute="full", **even),
            *grid("sliced selective", layout, "fp32", recompute="selective", **even),
            *grid("sliced offload", layout, "fp32", "fp16", offload="optimizer", every=2, **even),
            *grid("sliced frozen", layout, "bf16", frozen=[0, 2], **even),
            *grid("sliced places", layout, "bf16", schedule="interleaved", **PLACES, **even),
        ]
    return cases


CASES = {layout: list_cases(layout) for layout in LAYOUTS}
ALL = [(layout, case) for layout, cases in CASES.items() for case in cases]
NAMES = [case.name for _, case in ALL]
Folders = dict[str, Path]


@cache
def _train(folder: Path, layout: str) -> str:
    """All cases of a layout in one start of its ranks; what went wrong, if anything."""
    write_cases(folder, list(CASES[layout]))
    size = LAYOUTS[layout][0]
    with start_ranks("tests.ranks.precision_rank", size, str(folder)) as ranks:
        return find_problems(ranks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}


def load(folders: Folders, layout: str, case: Case) -> list[dict[str, Any]]:
    problem = _train(folders[layout], layout)
    assert not problem, problem
    size = LAYOUTS[layout][0]
    return [torch.load(folders[layout] / f"{case.name}.{rank}.pt") for rank in range(size)]


@cache
def by_hand(name: str) -> tuple[dict[str, Any], ByHand]:
    plain = ByHand(next(case for _, case in ALL if case.name == name))
    return plain.run(), plain


@pytest.mark.parametrize(("layout", "case"), ALL, ids=NAMES)
def test_it_trains_as_one_process_does(folders: Folders, layout: str, case: Case) -> None:
    assert_sliced_trained(case, load(folders, layout, case), *by_hand(case.name))


def assert_sliced_trained(
    case: Case, ranks: list[dict[str, Any]], plain: dict[str, Any], hand: ByHand
) -> None:
    """The ranks' results are those of one process."""
    exact = case.precision == "fp32"
    buffers = dict(hand.model.named_buffers())
    tied = dict(hand.model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in hand.model.named_parameters()}
    seen: set[str] = set()
    for ours in ranks:
        assert bool(ours["recorded"]) == case.cuda_graphs
        assert ours["overflows"] == plain["overflows"]
        if case.precision == "fp16":
            assert ours["scales"] == plain["scales"]
        for word, rounding in (("losses", 1e-2), ("norms", 2e-2)):
            pair = torch.stack(ours[word]), torch.stack(plain[word])
            close = 1e-4 if exact else rounding
            torch.testing.assert_close(*pair, rtol=close, atol=0, equal_nan=True)
        if not plain["overflows"][0]:
            for name, gradient in ours["gradients"].items():
                name = first[id(tied[name])]
                close = 1e-5 if exact else 2e-2
                first_row = ours["first rows"].get(name, 0)
                wanted = plain["gradients"][name]
                if name in ours["first rows"]:
                    wanted = wanted[first_row : first_row + len(gradient)]
                assert differs(gradient, wanted) <= close, name
        for name, tensor in ours["state"].items():
            seen.add(name)
            if name in buffers:  # each replica's batch norm has averages of its own
                continue
            name = first[id(tied[name])]
            start, end = hand.start[name], hand.masters[name].detach()
            if float((end - start).abs().max()) > 1e-5:  # a bias before a batch norm has only noise
                assert differs(tensor - start, end - start) <= (1e-3 if exact else 5e-2), name
    assert seen == hand.model.state_dict().keys()


@pytest.mark.parametrize(("layout", "case"), ALL, ids=NAMES)
def test_ranks_agree_to_the_bit(folders: Folders, layout: str, case: Case) -> None:
    ranks = load(folders, layout, case)
    tied = dict(build_model(case).named_parameters(remove_duplicate=False))
    values: dict[int, Tensor] = {}
    for rank in ranks:
        for word in ("losses", "norms"):
            pair = torch.stack(rank[word]), torch.stack(ranks[0][word])
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(rank["evaluated"], ranks[0]["evaluated"])
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, values.setdefault(id(tied[name]), weight)), name
        for name in rank["state"].keys() & rank["weights"].keys():
            weight = rank["weights"][name]
            assert torch.equal(rank["state"][name].to(weight.dtype), weight), name


@pytest.mark.parametrize(("layout", "case"), ALL, ids=NAMES)
def test_each_replica_holds_its_share(folders: Folders, layout: str, case: Case) -> None:
    ranks = load(folders, layout, case)
    moments = {"groups": 2, "lamb": 2, "foreign": 0, "sgd": 1}[case.optimizer]
    for stage in case.stage_map.strip(";").split(";"):
        held = [ranks[int(rank)]["held"] for rank in stage.split(",")]
        weights, replicas = held[0]["weights"], len(held)
        for one in held:
            held_state = moments * one["masters"]
            # What no batch used has no state.
            assert one["state"] == held_state or case.model == "SharedBlockGpt"
            assert one["gradients"] <= one["masters"]
            share = weights / replicas if case.zero else weights
            assert abs(one["masters"] - share) <= (one["largest"] if case.zero else 0)
        if case.zero:
            assert sum(one["masters"] for one in held) == weights
            if layout == "1x2" and case.model == "Gpt":
                assert max(one["masters"] for one in held) <= 0.52 * weights
            if case.zero == 3 and case.model != "NormNet":
                assert held[0]["sliced"] >= 0.5 * weights


def test_one_owner_for_the_copies_of_a_shared_weight() -> None:
    def make(**sizes: int) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(torch.empty(size)) for name, size in sizes.items()}

    def deal(parameters: dict[str, nn.Parameter]) -> dict[str, int]:
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        return deal_owners(parameters, sizes, {"wte": 50, "bias": 20, "far": 90}, 3)

    first = deal(make(a=30, wte=50, b=30, bias=20))
    last = make(wte=50, bias=20, c=5)
    last["head"] = last["wte"]
    held = deal(last)
    assert held["wte"] == held["head"] == first["wte"] and held["bias"] == first["bias"]
    assert sorted([first["a"], first["b"], first["wte"]]) == [0, 1, 2] or first["a"] != first["b"]


def test_messages_hold_one_owner_and_are_sent_as_they_fill() -> None:
    made = [nn.Parameter(torch.empty(4)) for _ in range(6)]
    owners = {id(parameter): number % 2 for number, parameter in enumerate(made)}
    number_of = {id(parameter): number for number, parameter in enumerate(made)}
    packed = pack(made, owners, 32)
    assert [(owner, [number_of[id(p)] for p in held]) for owner, held in packed] == [
        (0, [0, 2]),
        (1, [1, 3]),
        (0, [4]),
        (1, [5]),
    ]


def test_offloaded_masters_have_memory_of_their_own() -> None:
    varuna = Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", offload="optimizer")
    weights = varuna.part.parameters()
    before = varuna.evaluate(make_inputs())
    for name, master in varuna.masters().items():
        assert master.device.type == "cpu" and master.data_ptr() != weights[name].data_ptr()
        assert torch.equal(master, weights[name])
        master.data.zero_()
    assert varuna.evaluate(make_inputs()) != before
    assert not any(weight.any() for weight in weights.values())
    varuna.step(make_inputs())
    assert all(weight.grad is None for weight in weights.values())
    assert varuna.masters()["head.weight"].grad is not None
    varuna.zero_grad()
    assert varuna.masters()["head.weight"].grad is None


def test_what_is_sharded_runs_in_one_piece_and_is_used_by_nothing_else() -> None:
    def find(model: nn.Module, partition: str = "1-3", **options: bool) -> list[list[str]]:
        split = split_model(model, make_inputs(), 2, partition)
        stages = [split.make_stage(index) for index in range(2)]
        return [list(find_units(split, stage, options.get("is_half", False))) for stage in stages]

    blocks = [f"blocks.{number}" for number in range(4)]
    assert find(Gpt()) == [["wte", "wpe", blocks[0]], [*blocks[1:], "norm", "head"]]
    assert find(TiedGpt()) == [["wpe", blocks[0]], [*blocks[1:], "norm"]]
    # Block 0 is used in three segments, 1 and 3 in none.
    assert find(SharedBlockGpt(), "2-2") == [["wte", "wpe"], [blocks[2], "norm", "head"]]
    inside = find(CutInBlockGpt())
    assert inside[0] == ["wte", "wpe", "blocks.0.block"]
    frozen = Gpt()
    frozen.blocks[2].down.bias.requires_grad_(False)
    assert "blocks.2" not in find(frozen)[1] and "blocks.2.up" in find(frozen)[1]


def test_slices_want_even_batches() -> None:
    refuse_uneven([range(4), range(4, 7)], 2)
    with pytest.raises(ValueError, match=r"give 2, 1$"):
        refuse_uneven([range(4), range(4, 6)], 2)


def test_what_there_is_not_is_refused() -> None:
    for options, words in (({"zero": 4}, "zero 4"), ({"offload": "disk"}, "offload 'disk'")):
        with pytest.raises(ValueError, match=words):
            Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", **options)  # type: ignore[arg-type]
