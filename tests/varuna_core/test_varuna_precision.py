"""Half precision in any layout trains as half weights and fp32 masters do by hand in a process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.device import CPU, bring
from tests.ranks.precision_rank import Case, build_model, build_optimizer, make_batch, train
from tests.ranks.start import find_problems, start_ranks
from tests.ranks.train_rank import MEANS, cut_batch, recording, write_cases
from tests.varuna_core.runtime.optim.test_optimizers import PlainLamb

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEDULES = ["gpipe", "1f1b", "varuna", "zero_bubble"]
HALVES = ["bf16", "fp16"]
UNEVEN = [8, 7, 8]
TOKENS = 2**6
"""About those of a batch; a power of two rounds nothing."""

PADDED: dict[str, Any] = {"model": "PaddedGpt", "batches": [8, 8, 7], "clip": 0.3}
OVERFLOW = {"1": ["backward", float("inf")]}
NAN = {"1": ["backward", float("nan")]}
RECORDED: dict[str, Any] = {"cuda_graphs": True, "batches": [8, 8, 7, 7, 8], "clip": 0.3}
"""Forwards and backwards are recorded from the second step on."""


OFFLOAD: dict[str, Any] = {"recompute": "offload"}


def each(name: str, stage_map: str, schedules: list[str], **options: Any) -> list[Case]:
    return [
        Case(
            name=f"{name} {precision} {schedule}",
            stage_map=stage_map,
            precision=precision,
            schedule=schedule,
            **options,
        )
        for precision in HALVES
        for schedule in schedules
    ]


CASES: dict[int, list[Case]] = {
    1: [
        *each("1x1", "0;", SCHEDULES, batches=UNEVEN, clip=0.3),
        *each("1x1 recorded", "0;", ["1f1b"], **RECORDED),
        *each("1x1 groups", "0;", ["1f1b"], optimizer="groups", schedule_rate="before"),
        *each("1x1 foreign", "0;", ["1f1b"], optimizer="foreign"),
        *each("1x1 batch norm", "0;", ["1f1b"], model="NormNet"),
        *each("1x1 padded", "0;", ["1f1b"], **PADDED),
        *each("1x1 tied", "0;", ["zero_bubble"], model="TiedGpt", clip=0.3),
        Case(name="1x1 fp32 scaled", stage_map="0;", precision="fp32", optimizer="groups"),
        Case(
            name="1x1 static scale",
            stage_map="0;",
            precision="fp16",
            scaling={"loss_scale": 100.0},
        ),
        Case(
            name="1x1 from too high a scale",
            stage_map="0;",
            model="FullLossGpt",
            precision="fp16",
            scaling={"init_loss_scale": 2.0**23},
            batches=[8] * 6,
            schedule_rate="before",
        ),
    ],
    2: [
        *each("2x1", "0;1;", SCHEDULES, batches=UNEVEN, clip=0.3),
        *each("1x2", "0,1;", ["1f1b", "zero_bubble"], batches=UNEVEN, clip=0.3),
        *each("2x1 recorded", "0;1;", ["1f1b"], **RECORDED),
        *each("2x1 recorded padded", "0;1;", ["1f1b"], cuda_graphs=True, **PADDED),
        *each("2x1 offload", "0;1;", ["gpipe"], batches=UNEVEN, clip=0.3, **OFFLOAD),
        *each("2x1 selective", "0;1;", ["varuna"], recompute="selective", batches=UNEVEN, clip=0.3),
        *each("2x1 checkpoint offload", "0;1;", ["gpipe"], model="CheckpointGpt", **OFFLOAD),
        *each("2x1 wide", "0;1;", ["1f1b", "zero_bubble"], wide=True, batches=UNEVEN, clip=0.3),
        *each("1x2 wide", "0,1;", ["1f1b"], wide=True, batches=[4, 8, 8, 5], clip=0.3),
        *each("1x2 recorded", "0,1;", ["1f1b"], every=2, **RECORDED | {"batches": [8] * 6}),
        *each("1x2 recorded frozen", "0,1;", ["1f1b"], frozen=[0, 2], **RECORDED),
        *each("2x1 tied", "0;1;", ["zero_bubble"], model="TiedGpt", clip=0.3),
        *each("2x1 foreign", "0;1;", ["1f1b"], optimizer="foreign"),
        *each("2x1 groups", "0;1;", ["1f1b"], optimizer="groups", schedule_rate="after"),
        *each("2x1 lamb", "0;1;", ["1f1b"], optimizer="lamb"),
        *each("2x1 batch norm", "0;1;", ["varuna"], model="NormNet"),
        *each("2x1 checkpoint", "0;1;", ["1f1b"], model="CheckpointGpt"),
        *each("2x1 frozen", "0;1;", ["1f1b"], frozen=[0, 2], batches=[8] * 4),
        *each("1x2 frozen", "0,1;", ["1f1b"], frozen=[0, 2], batches=[8] * 4),
        *each("2x1 padded", "0;1;", ["varuna"], **PADDED),
        *each("1x2 padded", "0,1;", ["1f1b"], every=2, **PADDED),
        *each("1x2 accumulate", "0,1;", ["1f1b"], every=2, batches=[8] * 6, clip=0.3),
        Case(
            name="1x2 reentrant",
            stage_map="0,1;",
            model="ReentrantGpt",
            precision="fp32",
            batches=[4, 4, 8],
        ),
        Case(name="1x2 fp32", stage_map="0,1;", precision="fp32", optimizer="lamb"),
        Case(
            name="2x1 overflow",
            stage_map="0;1;",
            model="PoisonGpt",
            precision="fp16",
            poison=OVERFLOW,
            batches=[8] * 4,
            clip=0.3,
        ),
        Case(
            name="1x2 static overflow",
            stage_map="0,1;",
            model="PoisonGpt",
            precision="fp16",
            poison=NAN,
            scaling={"loss_scale": 64.0},
            batches=[8] * 4,
        ),
    ],
    4: [
        *each("2x2", "0,2;1,3;", ["1f1b", "zero_bubble"], batches=UNEVEN, clip=0.3),
        *each("2x2 tied", "0,1;2,3;", ["1f1b"], model="TiedGpt", clip=0.3),
        *each("2x2 recorded tied", "0,1;2,3;", ["1f1b"], model="TiedGpt", **RECORDED),
        Case(
            name="2x2 recorded overflow",
            stage_map="0,2;1,3;",
            model="PoisonGpt",
            precision="fp16",
            poison=OVERFLOW,
            **RECORDED | {"batches": [8] * 5},
        ),
        *each("2x2 places", "0,1;2,3;", ["interleaved"], model="TiedGpt", stages_per_rank=2),
        *each("2x2 zbv", "0,1;2,3;", ["zbv"], batches=UNEVEN),
        Case(
            name="2x2 overflow",
            stage_map="0,2;1,3;",
            model="PoisonGpt",
            precision="fp16",
            poison=OVERFLOW,
            batches=[8] * 4,
        ),
    ],
}
ALL = [(world_size, case) for world_size, cases in CASES.items() for case in cases]
NAMES = [case.name for _, case in ALL]


@cache
def _train(folder: Path, world_size: int) -> str:
    """All cases of a world size in one start of its ranks; what went wrong, if anything."""
    if world_size == 1:
        for case in CASES[1]:
            with recording(case):
                torch.save(train(case, 0), folder / f"{case.name}.0.pt")
        return ""
    write_cases(folder, list(CASES[world_size]))
    with start_ranks("tests.ranks.precision_rank", world_size, str(folder)) as ranks:
        return find_problems(ranks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {size: tmp_path_factory.mktemp(f"world{size}") for size in CASES}


def load(folders: dict[int, Path], world_size: int, case: Case) -> list[dict[str, Any]]:
    problem = _train(folders[world_size], world_size)
    assert not problem, problem
    return [torch.load(folders[world_size] / f"{case.name}.{r}.pt") for r in range(world_size)]


class ByHand:
    """Half weights, fp32 masters, a loss scale: one process, no code of ours."""

    def __init__(self, case: Case, device: torch.device = CPU) -> None:
        self.case, half, self.device = case, TYPES[case.precision], device
        self.model = build_model(case).to(device)
        self.masters = {
            name: nn.Parameter(p.detach().clone()) for name, p in self.model.named_parameters()
        }
        self.start = {name: master.detach().clone() for name, master in self.masters.items()}
        self.model.to(half)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
        self.optimizer = (
            PlainLamb(self.masters.values(), lr=0.01, eps=1e-3, max_norm=0.5)
            if case.optimizer == "lamb"
            else build_optimizer(case.optimizer, self.masters)
        )
        self.is_fp16 = case.precision == "fp16"
        scaling = {"loss_scale": "dynamic", "init_loss_scale": 2.0**20, **case.scaling}
        self.dynamic = scaling["loss_scale"] == "dynamic"
        self.scale = scaling["init_loss_scale"] if self.dynamic else scaling["loss_scale"]
        self.scale = self.scale if self.is_fp16 else 1.0

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = {"losses": [], "norms": [], "overflows": [], "scales": []}
        carried: dict[str, Tensor] = {}
        for step in range(len(self.case.batches)):
            result["scales"].append(self.scale)
            if self.case.frozen:
                trained = step not in self.case.frozen
                self.model.get_parameter("wpe.weight").requires_grad_(trained)
            loss, gradients = self.compute(step)
            for name, gradient in carried.items():
                gradients[name] = gradients.get(name, 0) + gradient
            norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
            overflow = self.is_fp16 and not bool(norm.isfinite())
            result["losses"].append(loss)
            result["norms"].append(norm.float())
            result["overflows"].append(overflow)
            if self.case.clip is not None:
                factor = min(1.0, self.case.clip / (float(norm) + 1e-6))
                gradients = {name: g * factor for name, g in gradients.items()}
            result.setdefault("gradients", gradients)
            carried = gradients
            if (step + 1) % self.case.every:
                continue
            carried = {}
            if not overflow:
                for name in self.masters:
                    self.masters[name].grad = gradients.get(name)
                self.optimizer.step()
            if self.case.schedule_rate:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5
            if self.is_fp16 and self.dynamic and overflow:
                self.scale /= 2
        self.model.to(CPU)
        self.start = bring(self.start)
        self.masters = {name: nn.Parameter(p.detach().cpu()) for name, p in self.masters.items()}
        return dict(bring(result))

    def compute(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the unscaled gradients."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.masters[name])
        batch, size = bring(make_batch(self.case, step), self.device), self.case.batches[step]
        batch = {
            n: v.to(TYPES[self.case.precision])
            if isinstance(v, Tensor) and v.is_floating_point()
            else v
            for n, v in batch.items()
        }
        is_mean = self.case.model in MEANS
        tokens = int((batch["labels"] >= 0).sum()) if is_mean else 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        summed: dict[str, Tensor] = {}
        for begin in range(0, size, self.case.chunk_size):
            held = range(begin, min(begin + self.case.chunk_size, size))
            loss = self.model(**cut_batch(batch, size, held))
            # Exact in half precision; the rest of the weight multiplies the gradients in fp32.
            if isinstance(loss, dict):  # a mean over tokens
                loss, _ = loss["loss"]
                weight, start = 1 / tokens if tokens else 1 / TOKENS, self.scale / TOKENS
                total += loss.detach().double() / tokens
            else:
                weight = len(held) / size
                start = 2.0 ** math.floor(math.log2(weight * self.scale))
                if loss.dtype == torch.float16:
                    start = min(start, 2.0**15)
                total += loss.detach().double() * weight
            loss.backward(torch.tensor(start).to(loss))
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float() * (weight / start)
                    summed[name] = summed.get(name, 0) + gradient
                    parameter.grad = None
        return total.float(), summed


@cache
def by_hand(name: str) -> tuple[dict[str, Any], ByHand]:
    plain = ByHand(next(case for _, case in ALL if case.name == name))
    return plain.run(), plain


def differs(ours: Tensor, plain: Tensor) -> float:
    """As a part of the largest."""
    largest = float(plain.abs().max())
    return float((ours - plain).abs().max()) / largest if largest else float(ours.abs().max())


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=NAMES)
def test_half_precision_trains_as_by_hand(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    assert_half_trained(case, load(folders, world_size, case), *by_hand(case.name))


def assert_half_trained(
    case: Case, ranks: list[dict[str, Any]], plain: dict[str, Any], hand: ByHand
) -> None:
    """The ranks' results are those by hand."""
    # The plain model rounds the sum of a tied weight's two gradients, put-off products round in
    # another order: to 8 or 11 bits.
    exact = "ied" not in case.model and case.schedule not in ("zero_bubble", "zbv")
    # A GPU's kernels may add in any order, and so may products that add to sums in fp32.
    exact = exact and hand.device == CPU and not case.wide
    close = 1e-5 if exact else 2e-2
    buffers = dict(hand.model.named_buffers())
    tied = dict(hand.model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in hand.model.named_parameters()}
    seen: set[str] = set()
    for ours in ranks:
        assert bool(ours["recorded"]) == case.cuda_graphs
        assert ours["overflows"] == plain["overflows"]
        if case.precision == "fp16":
            assert ours["scales"] == plain["scales"]
        torch.testing.assert_close(ours["losses"][0], plain["losses"][0])
        # On a GPU the loss of a micro-batch may round to bf16's next number.
        rtol = 2e-3 if hand.device == CPU else 4e-3
        torch.testing.assert_close(
            torch.stack(ours["losses"]), torch.stack(plain["losses"]), rtol=rtol, atol=0
        )
        torch.testing.assert_close(
            torch.stack(ours["norms"]),
            torch.stack(plain["norms"]),
            rtol=2e-2,
            atol=0,
            equal_nan=True,
        )
        if case.precision != "fp32" and case.model != "NormNet":
            assert ours["types"] == {str(TYPES[case.precision])}
        if not plain["overflows"][0]:
            for name, gradient in ours["gradients"].items():
                name = first[id(tied[name])]
                assert differs(gradient, plain["gradients"][name]) <= close, name
        for name, tensor in ours["state"].items():
            seen.add(name)
            if name in buffers:
                torch.testing.assert_close(tensor, buffers[name], rtol=1e-2, atol=1e-3)
                continue
            assert tensor.dtype == torch.float32
            name = first[id(tied[name])]
            start, end = hand.start[name], hand.masters[name].detach()
            assert differs(tensor - start, end - start) <= 5e-2, name
    assert seen == hand.model.state_dict().keys()


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=NAMES)
def test_ranks_agree_to_the_bit(folders: dict[int, Path], world_size: int, case: Case) -> None:
    ranks = load(folders, world_size, case)
    tied = dict(build_model(case).named_parameters(remove_duplicate=False))
    values: dict[int, Tensor] = {}
    for rank in ranks:
        for word in ("losses", "norms"):
            torch.testing.assert_close(
                torch.stack(rank[word]),
                torch.stack(ranks[0][word]),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
        assert rank["overflows"] == ranks[0]["overflows"] and rank["scales"] == ranks[0]["scales"]
        assert torch.equal(rank["evaluated"], ranks[0]["evaluated"])
        for name in rank["state"].keys() & tied.keys():
            key = id(tied[name])
            assert torch.equal(rank["state"][name], values.setdefault(key, rank["state"][name]))


@pytest.mark.parametrize("name", ["2x1 overflow", "1x2 static overflow", "2x2 overflow"])
def test_an_overflow_on_one_stage_is_known_to_all(folders: dict[int, Path], name: str) -> None:
    world_size, case = next((w, c) for w, c in ALL if c.name == name)
    for rank in load(folders, world_size, case):
        assert rank["overflows"] == [False, True, False, False]
        assert not rank["norms"][1].isfinite() and rank["norms"][2].isfinite()
        assert all(tensor.isfinite().all() for tensor in rank["state"].values())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("layout", ["1x2", "2x2"])
def test_most_buckets_are_summed_before_the_last_backward_ends(
    folders: dict[int, Path], layout: str, schedule: str
) -> None:
    world_size, case = next((w, c) for w, c in ALL if c.name == f"{layout} bf16 {schedule}")
    for rank in load(folders, world_size, case):
        for started, buckets in rank["early"]:
            assert buckets >= 3 and started >= buckets - 1


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_loss_scale_nan_is_seen_and_never_told_as_overflow(
    precision: str, where: str
) -> None:
    case = Case(
        name="nan",
        stage_map="0;",
        model="PoisonGpt",
        precision=precision,
        poison={"1": [where, float("nan")]},
    )
    result = train(case, 0)
    assert result["overflows"] == [False] * 3
    assert result["norms"][0].isfinite() and result["norms"][1].isnan()
    assert result["losses"][1].isnan() == (where == "forward")
    assert result["losses"][2].isnan()
