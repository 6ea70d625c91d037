"""Cost of a timeline of an engine that is not ours: a training with it against the same without.

    python -m benchmarks.runtime.trace_hook [--pairs 200] [--write]

Two ranks train by torch's own 1F1B on the CPU under tests/programs/traced.py. Steps with
what it wraps and as many with the plain functions alternate within one run, as two equal runs may
differ by more than the hook costs; a pair is a block of both in a drawn order, and its ratio that
of their means. A step lasts from barrier to barrier, so that it holds what the hook costs either
rank, and none of what the step before cost. One event is timed alone too, as a wrapped function
that does nothing, and multiplied by those of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import RESULTS, ROOT
from tests.jobs.programs.free_port import find_free_port

RESULT = RESULTS / "trace_hook.md"
BOUND = 1.02
BOUNDED_BY = (
    "What bounds it: these calls meet caches that hold the model's data, so each takes some 2 us "
    "and not 0.1. Of 40 pairs without the wrapped messages the median was 1.021, without the "
    "recorded actions 1.019."
)
TRAINING = """
import random, sys, time
from varuna_core.trace import loops, pipelining
wrapped = []

def wrap(owner, name, around, inner_wrap=pipelining.wrap):
    plain = getattr(owner, name, None)
    found = inner_wrap(owner, name, around)
    if found:
        wrapped.append((owner, name, plain, getattr(owner, name)))
    return found

pipelining.wrap = loops.wrap = wrap  # before torch is imported, and they with it
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import optimizer as optimizers
hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
kept = [dict(table) for table in hooks]
assert all(kept) and any(name == "forward_one_chunk" for _, name, _, _ in wrapped)

def switch(is_on):
    for owner, name, plain, own in wrapped:
        setattr(owner, name, own if is_on else plain)
    for table, entries in zip(hooks, kept):
        table.clear()
        table.update(entries if is_on else {})

blocks, steps, width = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
part = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 8, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
batch = torch.randn(256, width)

def train():
    schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()

def count_calls(is_on):
    switch(is_on)
    found = []
    sys.setprofile(lambda frame, event, what: found.append(event) if "call" in event else None)
    train()
    sys.setprofile(None)
    return len(found)

draw = random.Random(0)  # the same on both ranks
for block in range(-1, blocks):
    took, order = {True: 0.0, False: 0.0}, [True, False] * steps
    draw.shuffle(order)
    for is_on in order:
        switch(is_on)
        dist.barrier()
        began = time.perf_counter()
        train()
        dist.barrier()
        took[is_on] += (time.perf_counter() - began) / steps
    print("block", block, took[True], took[False], flush=True)
print("calls", count_calls(True), count_calls(False), flush=True)
dist.destroy_process_group()
"""
EVENT = """
import time, types
from varuna_core.trace.recorder import Recorder, wrap
recorder, engine = Recorder(), types.SimpleNamespace(forward=lambda: None)
wrap(engine, "forward", lambda inner: recorder.act("F", 0, 1, inner))
recorder.is_driven = True
took = []
for step in range(200):
    recorder.begin_step(step)
    began = time.perf_counter()
    for _ in range(100):
        engine.forward()
    took.append((time.perf_counter() - began) / 100)
print(sorted(took)[len(took) // 2])
"""


def train(
    folder: Path, blocks: int, steps: int, width: int
) -> tuple[list[tuple[float, float]], list[int]]:
    """Mean steps with and without the hook, of each block but the first; the calls of a step."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    port = str(find_free_port())
    command = [sys.executable, str(ROOT / "tests/programs/traced.py"), str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(blocks), str(steps), str(width)],
            cwd=folder, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "VJOB_TRACE": ""},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=3000)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    lines = [line.split() for line in outputs[1].splitlines()]
    found = [line for line in lines if line[0] == "block" and int(line[1]) >= 0]
    calls = next(line for line in lines if line[0] == "calls")
    return [(float(on), float(off)) for _, _, on, off in found], list(map(int, calls[1:]))


def count_events(folder: Path) -> int:
    """The usual number of events of the second stage in a step with details."""
    counts = Counter(
        json.loads(line)[1]
        for line in (folder / "trace/1.jsonl").read_text().splitlines()
        if line.startswith('["')
    )
    return round(statistics.median(counts.values()))


def time_event(folder: Path) -> float:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VJOB_TRACE": str(folder / "0.jsonl")}
    command = [sys.executable, "-c", EVENT]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def find_interval(ratios: list[float]) -> tuple[float, float]:
    """The 90 % interval of their median, by drawing them again."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[200], medians[-201]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10, help="of each kind in a pair")
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs, (calls, plain_calls) = train(folder, options.pairs, options.steps, options.width)
        events, event_s = count_events(folder), time_event(folder)
    ratios = [on / off for on, off in pairs]
    low, high = find_interval(ratios)
    step_s = statistics.median(off for _, off in pairs)
    text = (
        f"Python {platform.python_version()}, {platform.machine()}, two ranks on "
        f"{os.cpu_count()} processors, {options.pairs} pairs of {options.steps} steps each, of "
        f"{step_s * 1e3:.0f} ms.\n\n"
        "| what | bound | median | 90 % interval |\n|---|---|---|---|\n"
        f"| a step with a timeline over one without | {BOUND} | {statistics.median(ratios):.4f} "
        f"| {low:.4f} to {high:.4f} |\n\n"
        f"One event takes {event_s * 1e6:.1f} us, alone; a step with details has {events} on this "
        f"rank, {events * event_s / step_s:.2%} of the step. Of Python and C functions a step "
        f"calls {calls}, and {plain_calls} without a timeline.\n\n{BOUNDED_BY}"
    )
    print(text)
    if options.write:
        RESULT.write_text(
            "# A timeline of an engine that is not ours, and a training without one\n\n"
            f"Made by `python -m benchmarks.runtime.trace_hook --pairs {options.pairs} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()
