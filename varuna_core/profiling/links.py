"""Time messages and all-reduces over the runtime's channels and groups, one pair or group at once.

    a ──message of n bytes──► b        time(n) = round trip - half of the fastest round trip
    a ◄──one number────────── b        then with a and b exchanged

One pair of ranks represents all pairs of its class (the GPUs of sender and receiver; same node or
not); other ranks wait meanwhile. For an all-reduce, the time of the slowest rank is used.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.planner.profile.profile import HALVES, Half, LinkKey, LinkTime, Network, Where
from varuna_core.profiling.ranks import Crew, ProfiledRank
from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, ReceivingEnd, SendingEnd
from varuna_core.runtime.comm.links import JOIN_TIMEOUT_S, NO_TIMEOUT, our_groups
from varuna_core.runtime.comm.transport import Transport, choose_transport

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Message sizes in bytes: 1 KiB to 64 MiB."""
SMALL = 4
LEAST, MOST = 3, 30
"""The least and the most messages of a size, after one warm-up."""
SIZE_S = 0.5
"""Seconds for which messages of one size are repeated, as long as their number stays between LEAST
and MOST."""
SLOW_S = 5.0
"""If a message takes this many seconds, larger sizes are not tried."""

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two ranks that are measured for a class of pairs."""

    a: int
    b: int
    where: Where


def choose_pairs(places: Sequence[ProfiledRank]) -> list[Pair]:
    """Return the first pair of each class: GPUs of sender and receiver, and same node or not."""
    pairs: dict[Any, Pair] = {}
    for a, b in itertools.combinations(places, 2):
        where: Where = "intra" if a.node == b.node else "inter"
        key = frozenset((a.kind, b.kind)), where
        pairs.setdefault(key, Pair(a=a.rank, b=b.rank, where=where))
    return list(pairs.values())


def choose_groups(
    places: Sequence[ProfiledRank], used: Sequence[Sequence[int]] = ()
) -> dict[tuple[str, int, int], list[int]]:
    """Return the groups of ranks to measure, keyed by (kind, number, number on each node).

    They are those `used` groups that have one kind and equally many ranks on each node; for each
    kind, 2, 4, 8 .. all ranks of a node; and one or all ranks on each of 2, 4, 8 .. all nodes.
    """
    found: dict[tuple[str, int, int], list[int]] = {}
    for ranks in used:
        by_node = _by_node([places[rank] for rank in ranks])
        counts = {len(held) for held in by_node.values()}
        kinds = {places[rank].kind for rank in ranks}
        if len(kinds) == len(counts) == 1 and len(ranks) > 1:
            found.setdefault((kinds.pop(), len(ranks), counts.pop()), list(ranks))
    for kind in dict.fromkeys(place.kind for place in places):
        nodes = list(_by_node([place for place in places if place.kind == kind]).values())
        most = max(map(len, nodes))
        largest = next(held for held in nodes if len(held) == most)
        for count in _double(most):
            found.setdefault((kind, count, count), largest[:count])
        for on_a_node in {1, most}:
            able = [held[:on_a_node] for held in nodes if len(held) >= on_a_node]
            for count in _double(len(able)):
                ranks = [rank for held in able[:count] for rank in held]
                found.setdefault((kind, len(ranks), on_a_node), ranks)
    return found


def _by_node(places: Sequence[ProfiledRank]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place.rank)
    return nodes


def _double(most: int) -> list[int]:
    """Return the powers of two from 2 to `most`, and `most` itself if it is at least 2."""
    sizes = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*sizes, most] if most > 1 else []


def measure_network(
    crew: Crew,
    *,
    sizes: Sequence[int] = SIZES,
    used: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Network:
    """Return the times of all classes of pairs and groups, on every rank; all must call this."""
    if crew.world_size == 1:
        return Network(links={}, all_reduces={})
    store = dist.distributed_c10d._get_default_store()
    key = f"varuna/profile/{next(_numbers)}"
    transport = choose_transport(
        crew.device, store, key, crew.rank, crew.world_size, may_share=crew.may_share
    )
    links: dict[LinkKey, LinkTime] = {}
    for pair in choose_pairs(crew.places):
        kinds = crew.places[pair.a].kind, crew.places[pair.b].kind
        say(f"messages {kinds[0]} - {kinds[1]}, {pair.where}-node (ranks {pair.a} and {pair.b})")
        there, back = _measure_pair(crew, transport, pair, sizes)
        if kinds[0] == kinds[1]:
            shared = {size: (there[size] + back[size]) / 2 for size in there if size in back}
            links[kinds[0], kinds[1], pair.where] = make_link(shared)
        else:
            links[kinds[0], kinds[1], pair.where] = make_link(there)
            links[kinds[1], kinds[0], pair.where] = make_link(back)
    sums: dict[tuple[str, int, int], LinkTime] = {}
    halves: dict[tuple[Half, str, int, int], LinkTime] = {}
    for group_key, ranks in choose_groups(crew.places, used).items():
        kind, count, on_a_node = group_key
        say(f"all-reduces over {count} {kind}, {on_a_node} per node")
        whole, *others = _measure_sum(crew, transport, ranks, sizes)
        sums[group_key] = make_link(whole)
        for half, times in zip(HALVES, others, strict=True):
            halves[half, kind, count, on_a_node] = make_link(times)
    return Network(links=links, all_reduces=sums, halves=halves)


def make_link(times: dict[int, float]) -> LinkTime:
    """Build a link from times by size, corrected so that no larger message is faster."""
    sizes = sorted(times)
    grown = itertools.accumulate((max(times[size], 1e-9) for size in sizes), max)
    return LinkTime(points=tuple(zip(map(float, sizes), grown, strict=True)))


def _measure_pair(
    crew: Crew, transport: Transport, pair: Pair, sizes: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the times from a to b and from b to a, on all ranks."""
    with our_groups(channels=True):  # as in training
        groups = [
            dist.new_group([pair.a, pair.b], backend=transport.backend, timeout=NO_TIMEOUT)
            for _ in range(2)
        ]
    there: dict[int, float] = {}
    back: dict[int, float] = {}
    error: BaseException | None = None
    end = None
    if crew.rank in (pair.a, pair.b):
        is_first = crew.rank == pair.a
        peer = pair.b if is_first else pair.a
        out, into = groups if is_first else reversed(groups)
        arrivals = Arrivals()
        wires = transport.make_wire(out, peer), transport.make_wire(into, peer)
        end = _End(*transport.join(*wires, peer, is_first, arrivals), crew.device)
        try:
            there = end.ask(sizes) if is_first else end.answer(sizes)
            back = end.answer(sizes) if is_first else end.ask(sizes)
        except Exception as caught:
            error = caught
            end.leave(POISON)
    crew.agree(error)  # both have taken all messages: a leave may overtake the last one
    if end is not None:
        end.leave(BYE)
    every = crew.gather((there, back))
    return every[pair.a][0], every[pair.b][1]


class _End:
    """One of the two ranks of a pair: one asks, and says with each message if another follows."""

    def __init__(self, sender: SendingEnd, receiver: ReceivingEnd, device: torch.device) -> None:
        self.sender, self.receiver, self.device = sender, receiver, device

    def leave(self, word: int) -> None:
        self.sender.close(word)
        self.receiver.end(JOIN_TIMEOUT_S)

    def _make(self, num_bytes: int, value: int = 1) -> Tensor:
        count = max(1, num_bytes // 4)
        return torch.full((count,), value, dtype=torch.float32, device=self.device)

    def ask(self, sizes: Sequence[int]) -> dict[int, float]:
        """Return the seconds of a message of each size, until one is slow."""
        taken = {SMALL: self._time(SMALL)}
        for size in sizes:
            taken[size] = self._time(size)
            if taken[size] > SLOW_S:
                break
        self._exchange(self._make(SMALL, 0))
        answer_s = min(taken.values()) / 2
        return {size: took - answer_s for size, took in taken.items() if size in sizes}

    def _time(self, size: int) -> float:
        message = self._make(size)
        self._exchange(message)
        taken: list[float] = []
        while len(taken) < LEAST or (sum(taken) < SIZE_S and len(taken) < MOST):
            taken.append(self._exchange(message))
            if taken[-1] > SLOW_S:
                break
        return median(taken)

    def _exchange(self, message: Tensor) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self.sender.send((message,))
        self.receiver.take()
        took = time.perf_counter() - begin
        self.sender.flush()
        return took

    def answer(self, sizes: Sequence[int]) -> dict[int, float]:
        """Answer messages until the other rank sends a zero, its last message."""
        word = self._make(SMALL)
        while True:
            (message,) = self.receiver.take().tensors
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.sender.send((word,))
            self.sender.flush()
            if message.numel() == word.numel() and not float(message[0]):
                return {}


def _measure_sum(
    crew: Crew,
    transport: Transport,
    ranks: Sequence[int],
    sizes: Sequence[int],
) -> list[dict[int, float]]:
    """Return the slowest rank's median time of an all-reduce, and of its halves, by size."""
    with our_groups():
        group = dist.new_group(list(ranks), backend=transport.backend, timeout=NO_TIMEOUT)
    times: list[dict[int, float]] = []
    error: BaseException | None = None
    if crew.rank in ranks:
        try:
            times.append(_time_sums(group, crew.device, ranks, sizes, None))
            large = sizes[len(sizes) // 2 :: 2]
            times += [_time_sums(group, crew.device, ranks, large, half) for half in HALVES]
        except Exception as caught:
            error = caught
    crew.agree(error)
    if crew.rank in ranks:
        dist.destroy_process_group(group)
    every = crew.gather(times)
    first = every[ranks[0]]
    return [
        {size: max(every[rank][number][size] for rank in ranks) for size in first[number]}
        for number in range(len(first))
    ]


def _time_sums(
    group: Any, device: torch.device, ranks: Sequence[int], sizes: Sequence[int], half: Half | None
) -> dict[int, float]:
    """Time all-reduces of each size; the ranks first agree on a number of repetitions."""
    times: dict[int, float] = {}
    for size in sizes:
        run = _make_sum(group, device, ranks, size, half)

        def sum_once(run: Callable[[], None] = run) -> float:
            dist.all_reduce(torch.zeros(1), group=group)  # all are there
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begin

        sum_once()
        first = torch.tensor(sum_once(), dtype=torch.float64)
        dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
        count = min(MOST, max(LEAST, int(SIZE_S / max(float(first), 1e-6))))
        times[size] = median(sum_once() for _ in range(count))
        if float(first) > SLOW_S:
            break
    return times


def _make_sum(
    group: Any, device: torch.device, ranks: Sequence[int], size: int, half: Half | None
) -> Callable[[], None]:
    """Return a function that all-reduces `size` bytes as the runtime does, or runs one `half`."""
    count = 1 if half is None else len(ranks)
    parts = torch.zeros(count, max(1, size // 4 // count), device=device)
    whole, own = parts.view(-1), torch.zeros_like(parts[0])

    def run() -> None:
        if half is None:
            dist.all_reduce(whole, group=group)
        elif half == "reduce_scatter":
            dist.reduce_scatter_tensor(own, whole, group=group)
        elif half == "all_gather":
            dist.all_gather_into_tensor(whole, own, group=group)
        else:
            send = dist.reduce if half == "reduce" else dist.broadcast
            works = [
                send(part, rank, group=group, async_op=True)
                for part, rank in zip(parts, ranks, strict=True)
            ]
            for work in works:
                work.wait()

    return run
