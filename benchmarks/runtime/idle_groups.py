"""What gloo's groups cost: torch's own, and those of a layout, which share threads.

    python -m benchmarks.runtime.idle_groups [--rounds 7] [--write]

Two ranks make so many groups of two, send a number through each, and sleep: processor time over
wall clock, and threads, of the first one. Then messages of 4 kB go to and fro while sums of 64 MB
run through another group. torch's groups and ours take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import RESULTS
from benchmarks.pipeline.ranks import run_ranks, serve
from varuna_core.runtime.comm.links import our_groups

RESULT = RESULTS / "idle_groups.md"
MODULE = "benchmarks.runtime.idle_groups"
GROUPS = (4, 20, 60)
SLEEP_S = 2.0
SMALL, LARGE, NUM_SMALL = 1_000, 16_000_000, 150
"""Numbers of four bytes, and how many messages there are."""


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, float]:
    """In a rank."""
    with our_groups() if options["ours"] else nullcontext():
        groups = [dist.new_group([0, 1], backend="gloo") for _ in range(options["groups"])]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    threads = len(os.listdir("/proc/self/task"))
    began, taken = time.monotonic(), time.process_time()
    time.sleep(SLEEP_S)
    share = (time.process_time() - taken) / (time.monotonic() - began)
    dist.barrier()
    return {"share": share, "threads": threads, "message_s": time_messages(options["ours"], rank)}


def time_messages(ours: bool, rank: int) -> float:
    """The median of a small message's way there and back, beside large sums."""

    def make(channels: bool) -> Any:
        with our_groups(channels=channels) if ours else nullcontext():
            return dist.new_group([0, 1], backend="gloo")

    there, sums = make(True), make(False)
    is_over = threading.Event()

    def sum_up() -> None:
        held = torch.ones(LARGE)
        held[0] = 1.0
        while held[0] > 0:  # zero once either is done, so that both leave
            held.fill_(0.0 if is_over.is_set() else 1.0)
            dist.all_reduce(held, dist.ReduceOp.MIN, group=sums)

    stream = threading.Thread(target=sum_up)
    stream.start()
    took, word = [], torch.ones(SMALL)
    for _ in range(NUM_SMALL):
        began = time.perf_counter()
        for sender in (0, 1):
            work = there.send if sender == rank else there.recv
            work([word], 1 - rank, 0).wait()
        took.append(time.perf_counter() - began)
    is_over.set()
    stream.join()
    return statistics.median(took)


def main() -> None:
    """Compare, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    lines = [
        "| groups | torch's: processor, threads | ours: processor, threads | ours over torch's, "
        "median | spread |",
        "|---|---|---|---|---|",
    ]
    messages: dict[bool, list[float]] = {True: [], False: []}
    for count in GROUPS:
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(given.rounds):
            for ours in (True, False) if number % 2 else (False, True):
                found[ours].append(run_ranks(MODULE, 2, {"groups": count, "ours": ours}))
        shares = {ours: [one["share"] for one in rows] for ours, rows in found.items()}
        ratios = [a / b for a, b in zip(shares[True], shares[False], strict=True)]
        for ours, rows in found.items():
            messages[ours] += [one["message_s"] for one in rows]
        cells = {
            ours: f"{statistics.median(shares[ours]):.2%}, {found[ours][0]['threads']:.0f}"
            for ours in found
        }
        lines.append(
            f"| {count} | {cells[False]} | {cells[True]} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |"
        )
    ratios = [a / b for a, b in zip(messages[True], messages[False], strict=True)]
    ours_s, torchs_s = (statistics.median(messages[ours]) for ours in (True, False))
    lines += [
        "",
        f"A message of {SMALL * 4 // 1000} kB there and back beside sums of {LARGE * 4 // 10**6} "
        f"MB: {1e3 * ours_s:.2f} ms, torch's {1e3 * torchs_s:.2f} ms; ours over torch's "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}).",
    ]
    text = "\n".join(lines)
    print(text)
    if given.write:
        RESULT.write_text(
            "# Idle groups of gloo\n\n"
            f"Made by `python -m {MODULE} --rounds {given.rounds} --write`. torch "
            f"{torch.__version__}, two ranks, {given.rounds} rounds. Of one rank that sleeps.\n\n"
            f"{text}\n"
        )


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        serve(work)
    else:
        main()
