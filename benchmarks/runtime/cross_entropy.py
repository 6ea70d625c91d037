"""`varuna_core.cross_entropy` beside torch's: time and peak memory of forward and backward.

    python -m benchmarks.runtime.cross_entropy [--rounds 7] [--write]

Rows of GPT-2's 50,257 words, logits in fp32, bf16 and fp16, one thread; torch's of `logits.float()`
where they are in half, as a training in half does. Time is the processor's, in rounds of both one
after the other. Memory is what a fresh process has at its peak above what the logits take.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS
from benchmarks.machine import read_processor
from varuna_core import cross_entropy

RESULT = RESULTS / "cross_entropy.md"
WORDS, ROWS = 50_257, 512
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_torchs(logits: Tensor, labels: Tensor) -> None:
    F.cross_entropy(logits.float(), labels).backward()


def run_ours(logits: Tensor, labels: Tensor) -> None:
    cross_entropy(logits, labels).backward()


WAYS: dict[str, Callable[[Tensor, Tensor], None]] = {"torch": run_torchs, "ours": run_ours}


def make(precision: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.empty(ROWS, WORDS, dtype=TYPES[precision])
    for row in logits:  # no larger copy, which would be the peak
        row.copy_(torch.randn(WORDS))
    return logits.requires_grad_(), torch.randint(WORDS, (ROWS,))


def compare_times(precision: str, rounds: int) -> list[float]:
    """Ours over torch's, of each round."""
    logits, labels = make(precision)
    found = []
    for number in range(rounds + 1):
        taken = {}
        for name in ("torch", "ours") if number % 2 else ("ours", "torch"):
            logits.grad = None
            begin = time.process_time()
            WAYS[name](logits, labels)
            taken[name] = time.process_time() - begin
        found.append(taken["ours"] / taken["torch"])
    return found[1:]


def begin_peak() -> int:
    """Resident bytes now, from which on the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def read_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure_memory(precision: str, way: str) -> float:
    """In a process of its own: bytes above the logits at the peak, in units of the logits."""
    small = torch.zeros(2, WORDS, dtype=TYPES[precision], requires_grad=True)
    WAYS[way](small, torch.zeros(2, dtype=torch.long))  # what libraries need
    logits, labels = make(precision)
    before = begin_peak()
    WAYS[way](logits, labels)
    return (read_status("VmHWM") - before) / (logits.numel() * logits.itemsize)


def ask_memory(precision: str, way: str) -> float:
    command = [sys.executable, "-m", "benchmarks.runtime.cross_entropy", "--alone", precision, way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Compare, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.alone:
        print(measure_memory(*given.alone))
        return
    lines = [
        "| logits | time over torch's, median | spread | memory above the logits, in their size | "
        "torch's |",
        "|---|---|---|---|---|",
    ]
    for precision in TYPES:
        ratios = compare_times(precision, given.rounds)
        ours, torchs = (ask_memory(precision, way) for way in ("ours", "torch"))
        lines.append(
            f"| {precision} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to "
            f"{max(ratios):.2f} | {ours:.2f} | {torchs:.2f} |"
        )
    text = "\n".join(lines)
    print(text)
    if given.write:
        RESULT.write_text(
            "# Cross-entropy of many words\n\n"
            f"Made by `python -m benchmarks.runtime.cross_entropy {' '.join(sys.argv[1:])}`: "
            f"{ROWS} rows of {WORDS:,} words, one thread, torch {torch.__version__}, "
            f"{read_processor()}. Forward and backward; processor time, {given.rounds} rounds.\n\n"
            f"{text}\n\nThe gradient of the logits is one of their size in either column.\n"
        )


if __name__ == "__main__":
    main()
