"""Cost of an action with its message, over a bare send and receive of the same bytes by gloo.

    python -m benchmarks.runtime.message [--rounds 9] [--write]

    stage 0   pause, forward ──┐                       ┌──► backward
                               └─ cost ─►              └─ cost ─┐
    stage 1                     pause, forward ... pause, backward

Two stages, two processes of one host. A step of one micro-batch has two messages. The cost of one
is what lies between the end of a stage's own work and the beginning of the next one's on it: the
rest of the sender's action, the message, and the receiver's action up to the model. The pauses let
the receiver wait first, as it does for the bare message. Steps and bare messages take turns, and
both have the time from one process to the other by one clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import RESULTS
from benchmarks.pipeline.ranks import gather, pin, run_ranks, serve
from varuna_core import CutPoint, Options, Varuna

RESULT = RESULTS / "message.md"
MODULE = "benchmarks.runtime.message"
SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
"""Bytes of a message."""
BOUND = 1.5
PAUSE_S = 0.002
WARMUP, EXCHANGES = 3, {4 << 20: 15, 16 << 20: 9}
MOST_EXCHANGES = 40


class Passing(nn.Module):
    """As little work as there can be around a message."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cuts = [CutPoint()]
        self.before = nn.Parameter(torch.ones(size))
        self.after = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        (x,) = self.cuts[0](x * self.before)
        return (x * self.after).mean()


class Spans:
    """A function whose calls are noted, and begin with a pause."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.begun: list[float] = []
        self.ended: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.append(time.perf_counter())
        time.sleep(PAUSE_S)
        result = self.real(*args, **kwargs)
        self.ended.append(time.perf_counter())
        return result


class Bare:
    """A message there and one back, with nothing of ours."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.group = rank, dist.new_group(backend="gloo")
        self.message = torch.ones(size // 4)
        self.begun: list[float] = []
        self.ended: list[float] = []

    def exchange(self) -> None:
        for sender in (0, 1):
            if self.rank == sender:
                time.sleep(PAUSE_S)
                self.begun.append(time.perf_counter())
                dist.send(self.message, 1 - sender, group=self.group)
            else:
                dist.recv(self.message, sender, group=self.group)
                self.ended.append(time.perf_counter())


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, list[list[float]]]:
    """In a rank: each round's times of a message, the engine's and the bare one's, in seconds."""
    size = options["size"]
    batch = [torch.ones(1, size // 4)]
    varuna = Varuna(
        Passing(size // 4), "0;1;", batch, 1, 1, device="cpu", options=Options(schedule="1f1b")
    )
    bare = Bare(rank, size)
    bare.exchange()
    pin(rank)
    (stage,) = varuna.part.stages
    forward, backward = Spans(stage.forward), Spans(torch.autograd.backward)
    stage.forward = forward
    torch.autograd.backward = backward
    found: dict[str, list[list[float]]] = {"ours": [], "bare": []}
    for _ in range(options["rounds"]):
        for times in (forward, backward, bare):
            times.begun.clear()
            times.ended.clear()
        for _ in range(WARMUP + EXCHANGES.get(size, MOST_EXCHANGES)):
            dist.barrier()
            varuna.step(batch)
            varuna.zero_grad()
            dist.barrier()
            bare.exchange()
        mine = {
            "ours": [forward.begun, forward.ended, backward.begun, backward.ended],
            "bare": [bare.begun, bare.ended],
        }
        first, last = gather(mine, world)
        activations = zip(first["ours"][1], last["ours"][0], strict=True)
        gradients = zip(last["ours"][3], first["ours"][2], strict=True)
        found["ours"].append(find_costs(activations) + find_costs(gradients))
        there = zip(first["bare"][0], last["bare"][1], strict=True)
        back = zip(last["bare"][0], first["bare"][1], strict=True)
        found["bare"].append(find_costs(there) + find_costs(back))
    varuna.close()
    return found


def find_costs(ends: Any) -> list[float]:
    return [came - left for left, came in ends][WARMUP:]


def render(size: int, found: dict[str, list[list[float]]]) -> str:
    ours, bare = ([statistics.median(one) for one in found[who]] for who in ("ours", "bare"))
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    return (
        f"| {size >> 10} KiB | {BOUND} | {statistics.median(ratios):.2f} | {min(ratios):.2f} "
        f"| {max(ratios):.2f} | {1e6 * statistics.median(ours):.0f} "
        f"| {1e6 * statistics.median(bare):.0f} |"
    )


def main() -> None:
    """Compare, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    lines = [
        "| an action with its message, over a bare message | bound | median | smallest | largest "
        "| ours, us | bare, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        found = run_ranks(MODULE, 2, {"size": size, "rounds": given.rounds})
        lines.append(render(size, found))
    text = "\n".join(lines)
    print(text)
    if given.write:
        RESULT.write_text(
            "# An action and its message\n\n"
            f"Made by `python -m {MODULE} --rounds {given.rounds} --write`. torch "
            f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one "
            f"thread a process, with {os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores. "
            "Two stages of one\nhost; from the end of a stage's own work to the beginning of the "
            "next one's, over a bare send and receive of the\nsame bytes by gloo in the same "
            f"round:\n\n{text}\n"
        )


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        serve(work)
    else:
        main()
