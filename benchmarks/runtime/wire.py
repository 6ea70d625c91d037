"""Time of a message between two ranks, beside the same bytes sent with torch.distributed by hand.

    python -m benchmarks.runtime.wire [--rounds 5]

On GPUs where there are any: by NCCL with a GPU for each rank, through pinned memory and gloo where
they share one, and then through its own memory (tests/ranks/ipc_wire.py) too. TESTS_DEVICE=cpu
measures on processors, between which messages go through memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.ranks import run_ranks, serve
from tests.ranks.device import GPU_MEMORY, VARIABLE, choose_device, find_kind, synchronize
from varuna_core import Profiler
from varuna_core.profiling.links import measure_network

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Bytes."""
AT_MOST = 1.3
BOUNDED = SIZES[2:]
"""Smaller ones cost as much as waking a thread: shown without a bound."""
REPEATS = 10


class ByHand:
    """A message there, a number back, with nothing of ours."""

    def __init__(self, backend: str, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.through_host = device.type == "cuda" and backend == "gloo"
        self.group = dist.new_group(backend=backend)

    def time(self, size: int) -> float:
        """Seconds there and back, the median; the first is not counted."""
        message = torch.ones(size // 4, device=self.device)
        place = message
        if self.through_host:
            place = torch.empty(message.shape, pin_memory=True)
        word = torch.ones(1) if self.through_host else torch.ones(1, device=self.device)
        taken = [self._exchange(message, place, word) for _ in range(REPEATS + 1)]
        return statistics.median(taken[1:])

    def _exchange(self, message: Tensor, place: Tensor, word: Tensor) -> float:
        synchronize(self.device)
        begin = time.perf_counter()
        if self.rank == 0:
            if place is not message:
                place.copy_(message)
            dist.send(place, 1, group=self.group)
            dist.recv(word, 1, group=self.group)
        else:
            dist.recv(place, 0, group=self.group)
            if place is not message:
                message.copy_(place)
            synchronize(self.device)
            dist.send(word, 0, group=self.group)
        synchronize(self.device)
        return time.perf_counter() - begin


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank: each round's seconds of each size, ours and by hand."""
    device = choose_device()
    crew = Profiler(nn.Identity(), device, kind="device").crew
    has_own = device.type == "cuda" and torch.cuda.device_count() >= world
    backend = "nccl" if has_own else "gloo"
    hand = ByHand(backend, device, rank)
    found: dict[str, Any] = {"backend": backend, "ours": [], "by hand": []}
    for _ in range(options["rounds"]):
        network = measure_network(crew, sizes=SIZES)
        (link,) = network.links.values()
        found["ours"].append([link.compute_time(size) for size in SIZES])
        there = [hand.time(size) for size in (4, *SIZES)]
        found["by hand"].append([took - min(there) / 2 for took in there[1:]])
    return found


def render(found: dict[str, Any], way: str) -> str:
    lines = [
        f"Two ranks, {way}; by hand {found['backend']}. Times without the answer's part.",
        "",
        "| message, ours over by hand | bound | median | smallest | largest |",
        "|---|---|---|---|---|",
    ]
    for place, size in enumerate(SIZES):
        ratios = [a[place] / b[place] for a, b in zip(found["ours"], found["by hand"], strict=True)]
        bound = f"{AT_MOST}" if size in BOUNDED else ""
        middle = statistics.median(ratios)
        lines.append(
            f"| {size >> 10} KiB | {bound} | {middle:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )
    lines += ["", "| message | ours, us | by hand, us | ours, GB/s |", "|---|---|---|---|"]
    for place, size in enumerate(SIZES):
        ours, hand = (
            statistics.median(one[place] for one in found[who]) for who in ("ours", "by hand")
        )
        rate = size / ours / 1e9
        lines.append(f"| {size >> 10} KiB | {ours * 1e6:.0f} | {hand * 1e6:.0f} | {rate:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    kind = find_kind()
    if kind is None:
        sys.exit("Not run: no GPU here.")
    os.environ[VARIABLE] = kind
    given = {"rounds": options.rounds}
    found = run_ranks("benchmarks.runtime.wire", 2, given)
    way = "through memory that both map" if kind == "cpu" else f"by {found['backend']}"
    print(render(found, f"tensors {way}"))
    if kind == "cuda" and found["backend"] == "gloo":
        found = run_ranks("benchmarks.runtime.wire", 2, given, environment={GPU_MEMORY: "1"})
        print("\n" + render(found, "tensors through the memory of the GPU that they share"))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        serve(work)
    else:
        main()
