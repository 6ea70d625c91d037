"""The groups of a layout: few store operations, and communicators made in an order that cannot lock
up."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake"

from tests.varuna_core.runtime.comm.counting import Counting
from tests.varuna_core.runtime.comm.fake_nccl import Comm, FakeGroup, FakeNccl, Gpu, Stream
from varuna_core.records.rank_map import StageMap, build_stages, encode_stage_map, parse_stage_map
from varuna_core.runtime.comm import links as links_module
from varuna_core.runtime.comm.devices import BOTH, GLOO
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.links import (
    Links,
    PlannedGroup,
    SharedGloo,
    connect,
    our_groups,
    plan_groups,
)
from varuna_core.runtime.comm.transport import Transport
from varuna_core.runtime.comm.wire import NcclWire

CPU = torch.device("cpu")


def make_map(depth: int, replicas: int) -> StageMap:
    text = encode_stage_map(build_stages(depth, replicas, "pipeline"))
    return parse_stage_map(text, depth * replicas, 1)


def run_all(works: list[Callable[[], Any]]) -> list[Any]:
    """What each gave, or its error; each in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            found[place] = works[place]()
        except BaseException as error:
            found[place] = error

    places = range(len(works))
    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def count_for_gloo(num_ranks: int) -> int:
    """Store operations of a rank that makes a gloo group of so many."""
    shared = dist.HashStore()
    stores = [Counting(shared) for _ in range(num_ranks)]

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(stores[rank], rank, num_ranks, timedelta(minutes=1))

    groups = run_all([lambda rank=rank: make(rank) for rank in range(num_ranks)])
    assert all(isinstance(group, dist.ProcessGroupGloo) for group in groups), groups
    return max(len(store.calls) for store in stores)


@pytest.fixture
def big_world() -> Iterator[Counting]:
    """Rank 37 of 512, with a store in which no other rank writes."""
    store = Counting(FakeStore())
    dist.init_process_group("fake", store=store, rank=37, world_size=512)
    store.calls.clear()
    yield store
    dist.destroy_process_group()


def test_store_operations_grow_with_a_ranks_groups_and_not_with_the_world(
    big_world: Counting,
) -> None:
    planned = list(plan_groups(make_map(16, 32), [(0, 15)], has_mesh=True, has_watch=True))
    assert len(planned) > 1000
    mine = [group for group in planned if 37 in group.ranks]
    for group in planned:
        if 37 not in group.ranks:
            dist.new_group(list(group.ranks), backend="gloo")
    assert not big_world.calls, "what a rank is no part of costs it nothing"

    first, second, third = (count_for_gloo(num) for num in (2, 4, 6))
    assert third - second == second - first, "a group's cost grows with its ranks"
    cost = {num: first + (num - 2) * (second - first) // 2 for num in (2, 16, 32)}
    two = ("channels", "watch")
    total = sum(cost[len(group.ranks)] * (1 + (group.kind in two)) for group in mine)
    assert sorted(len(group.ranks) for group in mine) == [2, 2, 2, 2, 16, 32, 32]
    assert total < 512 / 2, f"{total} for 512 ranks"


def test_a_rank_has_as_many_groups_in_any_world() -> None:
    most = {}
    for depth, replicas in ((4, 3), (16, 32)):
        counts = [0] * depth * replicas
        for group in plan_groups(make_map(depth, replicas), [], True, True):
            for rank in group.ranks:
                counts[rank] += 1
        most[depth * replicas] = max(counts)
    assert most[12] == most[512]


def find_stuck(own: dict[int, deque[PlannedGroup]]) -> set[int]:
    """Ranks that wait for ever: each proceeds once all ranks of its next group have reached it."""
    waiting = set(own)
    while waiting:
        ready = [
            group
            for group in {own[rank][0] for rank in waiting if own[rank]}
            if all(own[rank] and own[rank][0] is group for rank in group.ranks)
        ]
        for group in ready:
            for rank in group.ranks:
                own[rank].popleft()
        done = {rank for rank in waiting if not own[rank]}
        if not ready and not done:
            return waiting
        waiting -= done
    return waiting


def list_own(planned: list[PlannedGroup], world: int) -> dict[int, deque[PlannedGroup]]:
    return {rank: deque(g for g in planned if rank in g.ranks) for rank in range(world)}


def test_no_rank_waits_for_ever_for_a_communicator() -> None:
    planned = list(plan_groups(make_map(16, 32), [(0, 15), (1, 3)], True, True))
    assert not find_stuck(list_own(planned, 512))
    crossed = list_own(planned, 512)
    crossed[1].rotate(1)
    assert find_stuck(crossed), "another order on one rank would do"


def test_groups_are_no_splits_of_the_users_communicator(big_world: Counting) -> None:
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    with our_groups():
        assert world.bound_device_id is None
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None


def test_all_is_as_it_was_whichever_thread_leaves_last(big_world: Counting) -> None:
    torchs = dist.distributed_c10d.ProcessGroupGloo
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id = torch.device("cuda", 0)
    first, second = our_groups(), our_groups()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dist.distributed_c10d.ProcessGroupGloo is not torchs
    assert world.bound_device_id is None
    second.__exit__(None, None, None)
    assert dist.distributed_c10d.ProcessGroupGloo is torchs
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None


def test_our_groups_are_on_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group(GLOO, store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(SharedGloo, "_devices", {})
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
        with our_groups(), pytest.raises(RuntimeError, match="none0"):
            dist.new_group([0], backend=GLOO)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        with our_groups():
            dist.new_group([0], backend=GLOO)
        with our_groups(channels=True):
            dist.new_group([0], backend=GLOO)
        assert len(SharedGloo._devices) == 2, "those of channels are apart"
    finally:
        dist.destroy_process_group()


def test_our_groups_bring_no_thread_for_sockets_of_their_own() -> None:
    def count_new_threads() -> int:
        before = len(os.listdir("/proc/self/task"))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0], backend=GLOO))
        return len(os.listdir("/proc/self/task")) - before

    dist.init_process_group(GLOO, store=dist.HashStore(), rank=0, world_size=1)
    try:
        usual = count_new_threads()
        with our_groups():
            count_new_threads()
            assert [count_new_threads() for _ in range(3)] == [usual - 1] * 3
        assert count_new_threads() == usual
    finally:
        dist.destroy_process_group()


class World:
    """Ranks in threads, whose groups have gloo and the fake NCCL."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.gpu = gpu
        self.size, self.store, self.comms = size, dist.HashStore(), dict[int, Comm]()
        self.lock, self.local = threading.Lock(), threading.local()
        self.summed: list[tuple[int, tuple[int, ...]]] = []
        core = dist.distributed_c10d
        monkeypatch.setattr(core, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(core, "_get_default_group", lambda: SimpleNamespace(bound_device_id=1))
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: group.ranks.index(rank))
        monkeypatch.setattr(links_module, "warm", self.warm)
        transport = Transport(device=CPU, backend=BOTH)
        monkeypatch.setattr(links_module, "choose_transport", lambda *_, **__: transport)
        monkeypatch.setattr(
            Transport,
            "make_wire",
            lambda _, group, peer: NcclWire(group, group.ranks.index(peer), CPU),
        )

    def new_group(self, ranks: list[int], backend: str, timeout: timedelta) -> Any:
        number = self.local.num_groups = self.local.num_groups + 1
        rank = self.local.rank
        if rank not in ranks:
            return None
        with self.lock:
            comm = self.comms.setdefault(number, Comm()) if backend != GLOO else None
        own = dist.PrefixStore(f"group {number}", self.store)
        gloo = dist.ProcessGroupGloo(own, ranks.index(rank), len(ranks), timeout)
        return FakeGroup(gloo, None if comm is None else FakeNccl(comm), tuple(ranks))

    def warm(self, group: FakeGroup, device: torch.device) -> None:
        assert group.nccl is not None
        self.summed.append((self.local.rank, group.ranks))
        group.nccl.sum(len(group.ranks)).wait()

    def connect(self, rank: int, text: str) -> Links:
        self.local.rank, self.local.num_groups = rank, 0
        with self.gpu.stream(Stream()):  # each has a GPU of its own
            return connect(parse_stage_map(text, self.size, 1), rank, [(0, 1)], CPU)


def test_each_communicator_has_moved_something_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu()
    gpu.install(monkeypatch)
    world = World(gpu, monkeypatch, 4)
    every = run_all([lambda rank=rank: world.connect(rank, "0,1;2,3;") for rank in range(4)])
    assert all(isinstance(links, Links) for links in every), every
    try:
        check(world, every)
    finally:
        for links in every:
            links.close()
        gpu.stop()


def check(world: World, every: list[Links]) -> None:
    for comm in world.comms.values():
        assert comm.taken == 1 or comm.num_summed == 2
    assert len(world.comms) == 2 * 2 + 2 + 2 + 2, "channels, shared weights, pipelines, replicas"
    for links in every:
        assert len(links.watching) == 2 and not links.find_lost_peer()
        assert len(links.on_gpu) == 5, "two of a channel, and three groups"
    order = [ranks for rank, ranks in world.summed if rank == 0]
    assert order == [(0, 2), (0, 2), (0, 1)]

    aborted = every[0].on_gpu[:]
    every[0].abort()
    assert all("abort" in nccl.calls for nccl in aborted) and not every[0].on_gpu
    assert wait_for(every[2], lambda: "rank 0: " in every[2].find_lost_peer()), "its next stage"
    for place in (1, 3):  # without a channel to it, but in the ring beside it
        links = every[place]
        told = [receiver.find_lost_peer for receiver in links.watching if not receiver.peer]
        assert wait_for(links, lambda told=told: "it has failed" in told[0]())
        assert not links.find_lost_peer()
        with pytest.raises(ChannelClosed, match="rank 0: "):
            links.look(0.0, asks_board=False)


def wait_for(links: Links, condition: Callable[[], bool]) -> bool:
    with links.arrivals.changed:
        return links.arrivals.changed.wait_for(condition, 60)
