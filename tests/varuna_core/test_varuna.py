"""A model in any layout trains as the plain one does: loss, gradients, norm and weights."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.device import CPU, bring
from tests.ranks.start import collect, start_ranks
from tests.ranks.train_rank import (
    FILE_LIMITS,
    MOMENTUM,
    RATE,
    SEED,
    Case,
    build_model,
    cut_batch,
    make_batch,
    read_loss,
    write_cases,
)
from tests.segments import announce_segments
from varuna_core import Varuna
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.split.random_streams import build_seeder

SCHEDULES = ["gpipe", "1f1b", "varuna", "zero_bubble"]
UNEVEN = [8, 7, 5, 1, 8, 3]
"""Ten batches, few of which divide by two micro-batches of two; for two replicas one is too small
to give both a sample."""
DROPOUT = {"dropout": 0.2}
FITFUL: dict[str, Any] = {"schedule": "varuna", "options": DROPOUT, "batches": [16, 15, 16]}
SOME = 50_000
"""Bytes: more than one graph of half a model, less than two."""

AUTO: dict[str, Any] = {"recompute": "auto", "options": DROPOUT}


SHORT = [8, 7, 1, 5]


def each_schedule(name: str, stage_map: str, **options: Any) -> list[Case]:
    return [
        Case(name=f"{name} {schedule}", stage_map=stage_map, schedule=schedule, **options)
        for schedule in SCHEDULES
    ]


def several(name: str, stage_map: str, **options: Any) -> list[Case]:
    """Two stages a rank, both ways."""
    return [
        Case(
            name=f"{name} {schedule}",
            stage_map=stage_map,
            schedule=schedule,
            stages_per_rank=2,
            **options,
        )
        for schedule in ("interleaved", "zbv")
    ]


PADDED: dict[str, Any] = {"batches": [8, 8, 7, 5, 8], "clip": 0.3}
"""Of the second batch the second half has no label: a replica then has nothing to count."""


def means(stage_map: str, schedules: list[str], **options: Any) -> list[Case]:
    """Losses that are means over tokens, counted after the forwards and before them."""
    name = "x".join(
        str(len(part)) for part in (stage_map.split(";")[:-1], stage_map.split(";")[0].split(","))
    )
    return [
        Case(
            name=f"{name} {model} {schedule}",
            stage_map=stage_map,
            model=model,
            schedule=schedule,
            **PADDED | options,
        )
        for model in ("TiedPaddedGpt", "TwoMeansGpt")
        for schedule in schedules
    ]


TOLD: dict[str, Any] = {
    "model": "ToldGpt",
    "outputs": ["height", "hits", "accuracy", "several"],
    "batches": [8, 7, 5, 1],
}
"""Of a batch of one sample one of two replicas gets none."""

PLACES: dict[str, Any] = {"model": "LogitsFirstGpt", "outputs": [0, 2], "batches": [8, 7, 5]}


def compiled(name: str, stage_map: str, schedule: str, **options: Any) -> Case:
    """torch.compile takes the blocks; of batches that do not divide, two sizes of micro-batches."""
    uneven: dict[str, Any] = {"batches": [8, 7, 5], "compile": "aot_eager"}
    return Case(
        name=f"{name} compiled {schedule}", stage_map=stage_map, schedule=schedule,
        **{**uneven, **options},
    )  # fmt: skip


def recorded(name: str, stage_map: str, schedule: str, **options: Any) -> Case:
    """Forwards and backwards are recorded in the second step: of batches that do not divide, of
    two sizes of micro-batches."""
    uneven: dict[str, Any] = {"batches": [8, 8, 7, 7, 8, 5, 5], "cuda_graphs": True, "clip": 0.3}
    return Case(
        name=f"{name} recorded {schedule}", stage_map=stage_map, schedule=schedule,
        **{**uneven, **options},
    )  # fmt: skip


def offloaded(name: str, stage_map: str, schedule: str = "gpipe", **options: Any) -> Case:
    """Graphs leave memory and come back, where a rank holds more than two at once."""
    return Case(
        name=f"{name} offload {schedule}", stage_map=stage_map, schedule=schedule,
        recompute="offload", **options,
    )  # fmt: skip


def selective(name: str, stage_map: str, schedule: str, **options: Any) -> Case:
    """Forwards are recomputed between their matrix products."""
    return Case(
        name=f"{name} selective {schedule}", stage_map=stage_map, schedule=schedule,
        recompute="selective", **options,
    )  # fmt: skip


ALIKE = [
    (1, "1x1 gpipe", "1x1 selective gpipe"),
    (2, "2x1 varuna", "2x1 selective varuna"),
    (2, "2x1 tied gpipe", "2x1 tied selective gpipe"),
    (2, "2x1 two zbv", "2x1 two selective zbv"),
    (1, "1x1 gpipe", "1x1 offload gpipe"),
    (2, "2x1 gpipe", "2x1 offload gpipe"),
    (2, "2x1 tied gpipe", "2x1 tied offload gpipe"),
    (2, "2x1 two interleaved", "2x1 two offload interleaved"),
    (2, "2x1 two zbv", "2x1 two offload zbv"),
    (3, "3x1 uneven 1f1b", "3x1 uneven offload 1f1b"),
    (4, "2x2 gpipe", "2x2 offload gpipe"),
    (4, "4x1 empty zero_bubble", "4x1 empty offload zero_bubble"),
]
"""Cases that are alike but for what becomes of a graph that waits."""
FULL: dict[str, Any] = {"stages_per_rank": 2, "recompute": "full", "model": "TiedGpt"}


def adapting(name: str, stage_map: str, hops: list[float], **options: Any) -> Case:
    """Twelve steps: the sixth is the first one with slow links, the tenth the first without."""
    return Case(
        name=f"{name} adapting", stage_map=stage_map, schedule="auto",
        told=[hops, [0.0] * len(hops)], batches=[16] * 8 + [7] + [16] * 3, **options,
    )  # fmt: skip


ADAPTING = [
    adapting("4x1", "0;1;2;3;", [3.0, 0.0, 0.0], clip=0.3),
    adapting("2x2", "0,1;2,3;", [4.0], model="TiedGpt", clip=0.3),
    adapting("2x1 two", "0;1;", [3.0, 0.0, 3.0], stages_per_rank=2, model="TiedGpt"),
]
"""The order changes in training, where the model is shared by replicas and by stages too."""

CASES: dict[int, list[Case]] = {
    1: [
        *each_schedule("1x1 told", "0;", **TOLD),
        *means("0;", ["gpipe", "zero_bubble"]),
        *means("0;", ["zbv"], stages_per_rank=2),
        *each_schedule("1x1", "0;", batches=UNEVEN, clip=0.3),
        Case(name="1x1 dropout", stage_map="0;", options=DROPOUT),
        *several("1x1 two", "0;", model="TiedGpt", clip=0.3, recompute="full"),
        *several("1x1 two dict", "0;", model="DictGpt"),
        *several("1x1 two in place", "0;", model="InPlaceGpt"),
        compiled("1x1", "0;", "gpipe"),
        compiled("1x1", "0;", "zero_bubble", clip=0.3),
        recorded("1x1", "0;", "gpipe"),
        recorded("1x1 told", "0;", "1f1b", **TOLD | {"batches": [8, 8, 7, 7], "outputs": []}),
        offloaded("1x1", "0;", batches=UNEVEN, clip=0.3),
        offloaded("1x1 told", "0;", **TOLD),
        offloaded("1x1 dropout", "0;", options=DROPOUT),
        selective("1x1", "0;", "gpipe", batches=UNEVEN, clip=0.3),
    ],
    2: [
        *each_schedule("2x1 skipping", "0;1;", model="SkippingGpt", **PADDED),
        Case(name="1x2 skipping", stage_map="0,1;", model="SkippingGpt", **PADDED),
        *each_schedule("2x1 told", "0;1;", **TOLD),
        *several("2x1 told", "0;1;", recompute="full", **TOLD),
        Case(name="1x2 told", stage_map="0,1;", **TOLD),
        Case(name="2x1 told by place", stage_map="0;1;", schedule="varuna", **PLACES),
        Case(name="1x2 told by place", stage_map="0,1;", **PLACES),
        *means("0;1;", ["1f1b", "varuna", "zero_bubble"]),
        *means("0,1;", ["gpipe"], batches=[8, 8, 7, 1, 5]),
        *means("0;1;", ["interleaved", "zbv"], stages_per_rank=2, recompute="full"),
        *each_schedule("2x1", "0;1;", batches=UNEVEN, clip=0.3),
        Case(name="2x1 auto", stage_map="0;1;", schedule="auto", batches=[8] * 8),
        ADAPTING[2],
        Case(name="2x1 other order", stage_map="1;0;"),
        Case(name="1x2", stage_map="0,1;", batches=UNEVEN, clip=0.3),
        Case(name="1x2 tied", stage_map="0,1;", model="TiedGpt"),
        Case(name="2x1 dropout", stage_map="0;1;", options=DROPOUT, batches=UNEVEN),
        Case(name="2x1 dropout zero_bubble", stage_map="0;1;", options=DROPOUT),
        Case(name="2x1 dropout varuna", stage_map="0;1;", options=DROPOUT, schedule="varuna"),
        Case(name="1x2 dropout", stage_map="0,1;", options=DROPOUT, batches=UNEVEN),
        *each_schedule("2x1 tied", "0;1;", model="TiedGpt", clip=0.3),
        Case(
            name="2x1 named pair",
            stage_map="0;1;",
            model="NamedPairGpt",
            shared_weights=[["wte.weight", "lm_head_weight"]],
            clip=0.3,
        ),
        Case(name="2x1 lengths", stage_map="0;1;", model="DictGpt", lengths=[8, 5, 8]),
        Case(name="2x1 logits first", stage_map="0;1;", model="LogitsFirstGpt"),
        Case(
            name="1x2 logits first",
            stage_map="0,1;",
            model="LogitsFirstGpt",
            schedule="varuna",
            batches=UNEVEN,
        ),
        Case(name="2x1 dict", stage_map="0;1;", model="DictGpt", schedule="varuna"),
        Case(name="2x1 bert", stage_map="0;1;", model="Bert"),
        Case(name="2x1 encoder-decoder", stage_map="0;1;", model="EncoderDecoder"),
        Case(name="2x1 frozen", stage_map="0;1;", model="FrozenGpt"),
        Case(name="2x1 in place", stage_map="0;1;", model="InPlaceGpt", schedule="varuna"),
        *each_schedule("1x2 hooks", "0,1;", hooked=True, batches=UNEVEN, clip=0.3),
        Case(name="2x1 inputs", stage_map="0;1;", model="ChangedInputsGpt", schedule="varuna"),
        Case(name="2x1 shared block", stage_map="0;1;", model="SharedBlockGpt"),
        Case(name="2x1 batch norm", stage_map="0;1;", model="ConvNet"),
        Case(name="1x2 batch norm", stage_map="0,1;", model="ConvNet"),
        Case(name="2x1 batch norm varuna", stage_map="0;1;", model="ConvNet", schedule="varuna"),
        Case(name="2x1 root", stage_map="0;1;", model="RootGpt", recompute="full"),
        Case(name="2x1 auto none", stage_map="0;1;", memory_limit=1e9, **AUTO),
        Case(name="2x1 auto some", stage_map="0;1;", memory_limit=SOME, **AUTO),
        *several("2x1 two auto", "0;1;", memory_limit=SOME, **AUTO),
        *several("2x1 two", "0;1;", batches=UNEVEN, clip=0.3),
        compiled("2x1", "0;1;", "1f1b", clip=0.3),
        compiled("2x1", "0;1;", "varuna", model="InPlaceGpt"),
        compiled("2x1", "0;1;", "zero_bubble"),
        compiled("2x1 two", "0;1;", "interleaved", stages_per_rank=2, options=DROPOUT),
        compiled("2x1 two", "0;1;", "zbv", **FULL),
        compiled("2x1 norm", "0;1;", "varuna", model="ConvNet", batches=[8, 8, 8]),
        compiled("2x1 some", "0;1;", "1f1b", recompute="auto", memory_limit=SOME),
        compiled("1x2", "0,1;", "1f1b"),
        recorded("2x1", "0;1;", "gpipe"),
        recorded("2x1", "0;1;", "1f1b"),
        recorded("2x1 full", "0;1;", "varuna", recompute="full"),
        recorded("2x1 tied", "0;1;", "1f1b", model="TiedGpt"),
        recorded("2x1 split", "0;1;", "zero_bubble"),
        recorded("2x1 frozen", "0;1;", "1f1b", model="FrozenGpt"),
        recorded("2x1 three-way", "0;1;", "1f1b", model="ThreeWayGpt"),
        recorded("2x1 norm", "0;1;", "1f1b", model="ConvNet", batches=[8, 8, 8]),
        recorded("2x1 compiled", "0;1;", "1f1b", compile="aot_eager"),
        recorded("2x1 two", "0;1;", "interleaved", stages_per_rank=2),
        recorded("2x1 lengths", "0;1;", "1f1b", batches=[8] * 5, lengths=[8, 5, 8, 5, 8]),
        recorded("1x2", "0,1;", "1f1b"),
        recorded("1x2 hooks", "0,1;", "1f1b", hooked=True),
        offloaded("2x1", "0;1;", batches=UNEVEN, clip=0.3),
        offloaded("2x1 tied", "0;1;", model="TiedGpt", clip=0.3),
        offloaded("2x1 dropout", "0;1;", options=DROPOUT, batches=UNEVEN),
        offloaded("2x1 means", "0;1;", model="TiedPaddedGpt", **PADDED),
        offloaded("2x1 lengths", "0;1;", model="DictGpt", lengths=[8, 5, 8]),
        offloaded("2x1 encoder-decoder", "0;1;", model="EncoderDecoder"),
        offloaded("2x1 frozen", "0;1;", model="FrozenGpt"),
        offloaded("2x1 in place", "0;1;", model="InPlaceGpt"),
        offloaded("2x1 inputs", "0;1;", model="ChangedInputsGpt"),
        offloaded("2x1 shared block", "0;1;", model="SharedBlockGpt"),
        offloaded("2x1 batch norm", "0;1;", model="ConvNet"),
        offloaded("2x1 root", "0;1;", model="RootGpt"),
        offloaded("2x1 compiled", "0;1;", compile="aot_eager"),
        offloaded("2x1 adapting", "0;1;", "auto", batches=[16] * 8),
        offloaded("1x2 hooks", "0,1;", hooked=True, batches=UNEVEN, clip=0.3),
        offloaded("2x1 two", "0;1;", "interleaved", stages_per_rank=2, batches=UNEVEN, clip=0.3),
        offloaded("2x1 two", "0;1;", "zbv", stages_per_rank=2, batches=UNEVEN, clip=0.3),
        selective("2x1", "0;1;", "varuna", batches=UNEVEN, clip=0.3),
        selective("2x1 tied", "0;1;", "gpipe", model="TiedGpt", clip=0.3),
        selective("2x1 dropout", "0;1;", "varuna", options=DROPOUT, batches=UNEVEN),
        selective("2x1 in place", "0;1;", "varuna", model="InPlaceGpt"),
        selective("2x1 inputs", "0;1;", "gpipe", model="ChangedInputsGpt"),
        selective("2x1 encoder-decoder", "0;1;", "varuna", model="EncoderDecoder"),
        selective("2x1 lengths", "0;1;", "varuna", model="DictGpt", lengths=[8, 5, 8]),
        selective("2x1 batch norm", "0;1;", "varuna", model="ConvNet"),
        selective("2x1 root", "0;1;", "gpipe", model="RootGpt"),
        selective("2x1 two", "0;1;", "zbv", stages_per_rank=2, batches=UNEVEN, clip=0.3),
        recorded("1x2 means", "0,1;", "1f1b", model="TwoMeansGpt", batches=[8, 8, 7, 7]),
        *several("2x1 two dropout", "0;1;", options=DROPOUT, batches=SHORT, recompute="full"),
        *several("2x1 two three-way", "0;1;", model="ThreeWayGpt", clip=0.3, batches=SHORT),
        *several("2x1 two norm", "1;0;", model="ConvNet", recompute="full"),
        *several("2x1 two dict", "0;1;", model="DictGpt", lengths=[8, 5, 8]),
        *several("2x1 two empty", "0;1;", model="DictGpt", partition="0-0-4-0"),
        *several("2x1 two frozen", "0;1;", model="FrozenGpt", partition="1-0-3-0"),
        Case(name="2x1 two auto", stage_map="0;1;", schedule="auto", stages_per_rank=2),
        Case(
            name="2x1 three interleaved",
            stage_map="0;1;",
            model="TiedGpt",
            schedule="interleaved",
            stages_per_rank=3,
            clip=0.3,
        ),
    ],
    3: [
        *each_schedule("3x1 uneven", "0;1;2;", partition="0-3-1", batches=UNEVEN),
        Case(name="3x1 fitful", stage_map="0;1;2;", model="FitfulGpt", **FITFUL),
        Case(
            name="3x1 fitful in turn",
            stage_map="0;1;2;",
            model="FitfulGpt",
            opportunistic=False,
            **FITFUL,
        ),
        Case(name="3x1 three-way", stage_map="0;1;2;", model="ThreeWayGpt", clip=0.3),
        Case(name="1x3", stage_map="0,1,2;", batches=[7, 7, 3]),
        offloaded("3x1 uneven", "0;1;2;", "1f1b", partition="0-3-1", batches=UNEVEN),
        offloaded("3x1 fitful", "0;1;2;", "1f1b", model="FitfulGpt", options=DROPOUT),
        offloaded("3x1 recorded", "0;1;2;", "1f1b", batches=[8, 8, 7, 7], cuda_graphs=True),
        Case(name="3x1 dropout", stage_map="0;1;2;", options=DROPOUT, recompute="full"),
    ],
    4: [
        *ADAPTING[:2],
        Case(name="2x2 told", stage_map="0,2;1,3;", schedule="varuna", **TOLD),
        *means("0,2;1,3;", ["1f1b", "zero_bubble"], batches=[8, 8, 7, 1, 5]),
        *each_schedule("2x2", "0,2;1,3;", batches=UNEVEN, clip=0.3),
        *each_schedule("4x1 empty", "0;1;2;3;", partition="0-2-0-2", model="DictGpt"),
        Case(name="4x1 ends", stage_map="0;1;2;3;", partition="0-4-0-0", model="TiedGpt"),
        *several("2x2 two", "0,1;2,3;", model="TiedGpt", clip=0.3, batches=SHORT),
        *several("4x1 two", "0;1;2;3;", options={"blocks": 8}, partition="1-1-0-2-1-0-2-1"),
        offloaded("2x2", "0,2;1,3;", batches=UNEVEN, clip=0.3),
        offloaded("4x1 empty", "0;1;2;3;", "zero_bubble", partition="0-2-0-2", model="DictGpt"),
        Case(name="2x2 hooks", stage_map="0,1;2,3;", model="TiedGpt", hooked=True, clip=0.3),
        Case(name="2x2 tied", stage_map="0,1;2,3;", model="TiedGpt", clip=0.3, batches=UNEVEN),
        Case(name="2x2 dropout", stage_map="0,1;2,3;", options=DROPOUT, schedule="varuna"),
    ],
}
ALL = [(world_size, case) for world_size, cases in CASES.items() for case in cases]


@cache
def _train(folder: Path, world_size: int) -> str:
    """All cases of a world size in one start of its ranks; what went wrong, if anything."""
    write_cases(folder, CASES[world_size])
    with start_ranks("tests.ranks.train_rank", world_size, str(folder)) as ranks:
        done = collect(ranks)
    return "\n".join(f"rank {r} exit {code}\n{out}" for r, (code, out) in enumerate(done) if code)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {size: tmp_path_factory.mktemp(f"world{size}") for size in CASES}


def train_plain(case: Case, device: torch.device = CPU) -> dict[str, Any]:
    """The same training by one plain process on the device; its tensors are brought here.

    On whole batches, or with dropout or buffers that change on the same micro-batches; running
    averages are those of the first replica."""
    model = build_model(case).to(device)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    num_replicas = len(case.stage_map.split(";")[0].split(","))
    if case.shared_weights:
        ((first, second),) = case.shared_weights
        model.lm_head_weight = model.get_parameter(first)
        assert second == "lm_head_weight"
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}, "outputs": []}
    whole = not ("dropout" in case.options or case.model in ("ConvNet", "RootGpt"))
    for step, size in enumerate(case.batches):
        batch = bring(make_batch(case, step), device)
        chunk = size if whole else case.chunk_size
        total = torch.zeros((), device=device)
        for begin in range(0, size, chunk):
            held = range(begin, min(begin + chunk, size))
            is_first = begin < size / num_replicas
            for norm in norms:
                norm.momentum = 0.1 if is_first else 0.0
                norm.num_batches_tracked -= 0 if is_first else 1
            with announce_segments(build_seeder(SEED, step, begin, device)):
                output = model(**cut_batch(batch, size, held))
            loss = read_loss(output) * (len(held) / size)
            result["outputs"] += [output] if case.outputs else []
            loss.backward()
            total += loss.detach()
        result["losses"].append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        result["norms"].append(norm)
        if step == 0:
            result["gradients"] = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if parameter.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        batch, size = bring(make_batch(case, 0), device), case.batches[0]
        chunk = size if whole else case.chunk_size
        result["evaluated"] = sum(
            read_loss(model(**cut_batch(batch, size, range(begin, begin + chunk)))) * (chunk / size)
            for begin in range(0, size, chunk)
        )
    result["state"] = model.state_dict()
    return dict(bring(result))


def test_varunas_own_arguments_come_first_and_in_its_order() -> None:
    """`from_cache` too, which has no effect: scripts give it by place or by name."""
    assert list(inspect.signature(Varuna).parameters)[:10] == [
        "model", "stage_to_rank_map", "dummy_inputs", "batch_size", "chunk_size", "fp16",
        "local_rank", "device", "shared_weights", "from_cache",
    ]  # fmt: skip


def assert_close(ours: Tensor, plain: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=2e-5, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case.name for _, case in ALL])
def test_any_layout_trains_as_the_plain_model(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    problem = _train(folders[world_size], world_size)
    assert not problem, problem
    folder = folders[world_size]
    ranks = [torch.load(folder / f"{case.name}.{rank}.pt") for rank in range(world_size)]
    assert_trained(case, ranks, train_plain(case))


BY_GLOO = ["2x1 1f1b", "2x1 varuna", "2x1 lengths", "2x1 two zbv"]


@pytest.mark.parametrize(
    ("world_size", "names", "limited", "expected"),
    [
        (2, BY_GLOO, [0, 1], [["Wire"], ["Wire"]]),
        # The middle one has neighbours of both kinds, and waits for either: it may map the memory
        # that it is given, and has none to give.
        (3, ["3x1 fitful"], [1], [["MemorySender"], ["MemorySender", "Wire"], ["Wire"]]),
    ],
)
def test_ranks_that_may_not_share_memory_train_the_same_by_gloo(
    folders: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    names: list[str],
    limited: list[int],
    expected: list[list[str]],
) -> None:
    assert not _train(folders[world_size], world_size)
    monkeypatch.setenv(FILE_LIMITS, json.dumps({str(rank): 1 << 30 for rank in limited}))
    cases = [case for case in CASES[world_size] if case.name in names]
    assert len(cases) == len(names)
    write_cases(tmp_path, cases)
    with start_ranks("tests.ranks.train_rank", world_size, str(tmp_path)) as ranks:
        done = collect(ranks)
    assert not any(code for code, _ in done), done
    said = [
        output.count("by gloo, not shared memory: [Errno 27] File too large") for _, output in done
    ]
    assert sum(said) and max(said) == 1, "once a rank"
    for case in cases:
        for rank in range(world_size):
            file = f"{case.name}.{rank}.pt"
            ours, theirs = torch.load(tmp_path / file), torch.load(folders[world_size] / file)
            assert ours["wires"] == expected[rank]
            assert theirs["wires"] == ["MemorySender"]
            assert torch.equal(torch.stack(ours["losses"]), torch.stack(theirs["losses"]))
            for weight, tensor in ours["state"].items():
                assert torch.equal(tensor, theirs["state"][weight]), weight


def assert_trained(case: Case, ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    """The ranks' results are the plain training's."""
    seen: set[str] = set()
    for rank, ours in enumerate(ranks):
        for word in ("losses", "norms"):
            assert_close(torch.stack(ours[word]), torch.stack(plain[word]), word)
        assert_close(ours["evaluated"], plain["evaluated"], "evaluated")
        assert bool(ours["recorded"]) == case.cuda_graphs or case.recompute != "none"
        for name, gradient in ours["gradients"].items():
            assert_close(gradient, plain["gradients"][name], f"gradient of {name}")
        is_first = parse_stage_map(case.stage_map, len(ranks)).find(rank)[1] == 0
        for name, tensor in ours["state"].items():
            if not is_first and re.search("running|tracked", name):
                continue  # a replica's own
            if tensor.is_floating_point():
                assert_close(tensor, plain["state"][name], name)
            else:
                assert torch.equal(tensor, plain["state"][name]), name
        seen |= ours["state"].keys()
    assert seen == plain["state"].keys()


def list_outputs(case: Case, output: Any) -> dict[str, Any]:
    """The numbers and rows that are asked for, of the whole batch."""
    if isinstance(output, tuple):
        return {"logits": output[0], "accuracy": output[2]}
    logits, others = output["several"]
    accuracy = output["accuracy"]
    if not isinstance(accuracy, Tensor):
        accuracy = accuracy.mean()
    numbers = {"height": output["height"], "hits": output["hits"], "accuracy": accuracy}
    return {**numbers, "logits": logits, "rows": others["rows"]}


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(size, case) for size, case in ALL if case.outputs],
    ids=[case.name for _, case in ALL if case.outputs],
)
def test_a_step_gives_the_outputs_that_it_is_asked_for(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    problem = _train(folders[world_size], world_size)
    assert not problem, problem
    plain = train_plain(case)
    for rank in range(world_size):
        ours = torch.load(folders[world_size] / f"{case.name}.{rank}.pt")
        for step, (told, output) in enumerate(zip(ours["outputs"], plain["outputs"], strict=True)):
            assert [*told] == case.outputs
            given = told if case.model == "ToldGpt" else (told[0], None, told[2])
            begin, end = (min(bound, case.batches[step]) for bound in ours["samples"])
            found, wanted = (list_outputs(case, one) for one in (given, output))
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                mine = tensor[begin:end] if tensor.dim() else tensor
                if begin == end and tensor.dim():
                    assert found[name] is None
                    continue
                assert not found[name].requires_grad and found[name].dtype == tensor.dtype
                assert_close(found[name], mine.detach(), f"{name} of step {step}")


def test_running_ahead_changes_no_bit(folders: dict[int, Path]) -> None:
    assert not _train(folders[3], 3)
    for rank in range(3):
        ahead, in_turn = (
            torch.load(folders[3] / f"3x1 fitful{which}.{rank}.pt") for which in ("", " in turn")
        )
        assert torch.equal(torch.stack(ahead["losses"]), torch.stack(in_turn["losses"]))
        for name, tensor in ahead["state"].items():
            assert torch.equal(tensor, in_turn["state"][name]), name


@pytest.mark.parametrize(("size", "kept", "other"), ALIKE, ids=[name for _, _, name in ALIKE])
def test_offloading_and_recomputing_change_no_bit(
    folders: dict[int, Path], size: int, kept: str, other: str
) -> None:
    assert not _train(folders[size], size)
    num_copied = num_recomputed = 0
    for rank in range(size):
        before, after = (torch.load(folders[size] / f"{name}.{rank}.pt") for name in (kept, other))
        num_copied += sum("O" in action for action in after["schedule"])
        num_recomputed += sum("R" in action for action in after["schedule"])
        for word in ("losses", "norms"):
            assert torch.equal(torch.stack(after[word]), torch.stack(before[word]))
        for name, tensor in after["state"].items():
            assert torch.equal(tensor, before["state"][name]), name
    assert num_copied if "offload" in other else num_recomputed


@pytest.mark.parametrize("case", ADAPTING, ids=[case.name for case in ADAPTING])
def test_a_schedule_that_adapts_changes_when_it_is_told(
    folders: dict[int, Path], case: Case
) -> None:
    """At the same step on all ranks; what it trains is compared with the plain model above."""
    size = 2 if case.stage_map == "0;1;" else 4
    assert not _train(folders[size], size)
    ranks = [torch.load(folders[size] / f"{case.name}.{rank}.pt") for rank in range(size)]
    orders = ranks[0]["orders"]
    changed = [step for step in range(1, 12) if orders[step] != orders[step - 1]]
    assert changed == ([5] if size == 2 else [5, 9]), "zbv's order is good for both"
    assert all(rank["orders"] == orders for rank in ranks)


def test_ranks_measure_the_same_costs(folders: dict[int, Path]) -> None:
    assert not _train(folders[2], 2)
    measured = [torch.load(folders[2] / f"2x1 auto.{rank}.pt")["costs"] for rank in range(2)]
    assert measured[0] == measured[1]
    assert all(seconds > 0 for figures in measured[0].values() for seconds in figures)
    assert max(measured[0]["forward"]) < 100, "seconds, and no clock's reading"


def test_auto_recomputes_what_memory_requires(folders: dict[int, Path]) -> None:
    assert not _train(folders[2], 2)
    counts = {}
    for name in ("2x1 auto none", "2x1 auto some"):
        schedule = torch.load(folders[2] / f"{name}.0.pt")["schedule"]
        counts[name] = sum("R" in action for action in schedule)
    assert counts["2x1 auto none"] == 0 < counts["2x1 auto some"]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case.name for _, case in ALL])
def test_ranks_agree_to_the_bit(folders: dict[int, Path], world_size: int, case: Case) -> None:
    """On the loss and the norm, and on a weight that several of them hold."""
    assert not _train(folders[world_size], world_size)
    ranks = [torch.load(folders[world_size] / f"{case.name}.{r}.pt") for r in range(world_size)]
    groups = [("wte.weight", "head.weight", "lm_head_weight")] if "ied" in case.model else []
    for other in ranks[1:]:
        assert torch.equal(torch.stack(other["losses"]), torch.stack(ranks[0]["losses"]))
        assert torch.equal(torch.stack(other["norms"]), torch.stack(ranks[0]["norms"]))
    values: dict[str, Tensor] = {}
    parameters = dict(build_model(case).named_parameters(remove_duplicate=False))
    for rank in ranks:
        for name in rank["state"].keys() & parameters.keys():
            key = next((group[0] for group in groups if name in group), name)
            assert torch.equal(rank["state"][name], values.setdefault(key, rank["state"][name]))
