"""A rank takes its own GPU; two take one only where that was asked for, and then without NCCL."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.varuna_core.runtime.comm.counting import Counting
from varuna_core.runtime.comm.devices import (
    BOTH,
    GLOO,
    RankGpu,
    choose_backend,
    describe_gpu,
    may_share,
    take_device,
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Four GPUs; the devices that were made current."""
    current = [torch.device("cuda", 2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("device", "local_rank", "environ", "index"),
    [
        (-1, 3, {}, 3),
        (-1, -1, {"LOCAL_RANK": "3"}, 3),
        (-1, 1, {"LOCAL_RANK": "3"}, 1),
        ("cuda", -1, {"LOCAL_RANK": "3"}, 3),
        (torch.device("cuda"), 1, {}, 1),
        (-1, -1, {"LOCAL_RANK": "5"}, 1),  # each rank may see others
        (-1, -1, {}, 2),  # the user's own set_device
        (0, 3, {"LOCAL_RANK": "3"}, 0),
        ("cuda:0", 3, {"LOCAL_RANK": "3"}, 0),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(
    gpus: list[torch.device], device: Any, local_rank: int, environ: Any, index: int
) -> None:
    assert take_device(device, local_rank, environ) == torch.device("cuda", index)
    assert gpus[-1] == torch.device("cuda", index), "it is the thread's current one"


def test_the_cpu_is_taken_where_it_is_named_or_all_there_is(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert take_device("cpu", 3, {"LOCAL_RANK": "3"}).type == "cpu" and len(gpus) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert take_device(-1, -1, {"LOCAL_RANK": "3"}).type == "cpu"
    for device, local_rank in ((1, -1), (-1, 1), ("cuda", -1)):
        with pytest.raises(ValueError, match="this node has no GPU"):
            take_device(device, local_rank, {})


@pytest.mark.usefixtures("gpus")
def test_a_gpu_may_be_shared_where_it_is_named_or_the_conf_has_more_ranks() -> None:
    assert may_share(0, {}) and may_share("cuda:1", {}) and may_share(torch.device("cuda:1"), {})
    assert not may_share(-1, {"LOCAL_RANK": "0"}) and not may_share("cuda", {})
    assert may_share(-1, {"VJOB_RUN": "/run", "LOCAL_WORLD_SIZE": "8"})
    assert not may_share(-1, {"VJOB_RUN": "/run", "LOCAL_WORLD_SIZE": "4"})
    assert not may_share(-1, {"LOCAL_WORLD_SIZE": "8"}), "torchrun's may be a mistake"


def agree(gpus: Sequence[RankGpu], stores: Sequence[Any]) -> list[Any]:
    """Each rank's answer, or the words of its refusal."""
    answers: list[Any] = [None] * len(gpus)

    def run(rank: int) -> None:
        try:
            answers[rank] = choose_backend(stores[rank], "key", rank, len(gpus), gpus[rank])
        except ValueError as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def make_gpus(uuids: Sequence[str], asked: Sequence[bool] | None = None) -> list[RankGpu]:
    asked = asked or [False] * len(uuids)
    return [
        RankGpu(uuid=uuid, name="cuda:0", host="n1", may_share=ask)
        for uuid, ask in zip(uuids, asked, strict=True)
    ]


@pytest.mark.parametrize(
    ("uuids", "backend", "shared"),
    [
        (["a", "b", "c"], BOTH, ""),
        (["a", "b", "a"], GLOO, "ranks 0, 2 of n1 share cuda:0"),
        (["a", "", "c"], GLOO, ""),
        (["", "", ""], GLOO, ""),
    ],
)
def test_every_rank_chooses_the_same(uuids: list[str], backend: str, shared: str) -> None:
    store = dist.HashStore()
    answers = agree(make_gpus(uuids, [True] * 3), [store] * 3)
    assert answers == [[backend, shared]] * 3 or answers == [(backend, shared)] * 3


def test_all_ranks_refuse_where_some_share_a_gpu_unasked() -> None:
    store = dist.HashStore()
    answers = agree(make_gpus(["a", "a", "b", "a"], [True, True, False, False]), [store] * 4)
    assert len(set(answers)) == 1
    assert answers[0].startswith("ranks 0, 1, 3 of n1 would all take cuda:0: start one rank a GPU")
    assert 'device="cuda:0"' in answers[0] and "LOCAL_RANK" in answers[0]


def test_nccl_is_not_chosen_where_torch_has_none() -> None:
    store = dist.HashStore()
    gpus = [RankGpu(uuid=uuid, has_nccl=False) for uuid in "ab"]
    assert {answer[0] for answer in agree(gpus, [store] * 2)} == {GLOO}


def test_the_choice_takes_as_many_store_operations_in_any_world() -> None:
    most = {}
    for world in (4, 32):
        shared = dist.HashStore()
        stores = [Counting(shared) for _ in range(world)]
        answers = agree(make_gpus([f"gpu {rank}" for rank in range(world)]), stores)
        assert {answer[0] for answer in answers} == {BOTH}
        most[world] = max(sum(Counter(store.calls).values()) for store in stores)
    assert most[4] == most[32] <= 8


def test_the_host_has_no_gpus_name() -> None:
    assert describe_gpu(torch.device("cpu"), True).uuid == ""
