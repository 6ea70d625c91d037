"""A patched Megatron-LM's stand-in: takes its arguments and prints its log, without a model.

A layer's forward takes 10 ms and its backward 20; stages work by 1F1B. The last rank prints when
each call of all ranks began and ended, in the patched timers' form.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron.arguments import parse_args

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.01, 0.02, 0.005


def order_1f1b(stage, num_stages, num_microbatches):
    """The calls of a stage: kind and micro-batch."""
    first = min(num_stages - 1 - stage, num_microbatches)
    forwards, backwards = iter(range(num_microbatches)), iter(range(num_microbatches))
    calls = [("F", next(forwards)) for _ in range(first)]
    for number in forwards:
        calls += [("F", number), ("B", next(backwards))]
    return calls + [("B", number) for number in backwards]


def time_calls(layers, num_microbatches):
    """When each call of each stage begins and ends, from 0 on; and when all of it has ended."""
    orders = [order_1f1b(stage, len(layers), num_microbatches) for stage in range(len(layers))]
    spans = [[] for _ in layers]
    ended = {}
    while any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        for stage, (done, order) in enumerate(zip(spans, orders, strict=True)):
            if len(done) == len(order):
                continue
            kind, number = order[len(done)]
            before = stage - 1 if kind == "F" else stage + 1
            is_end = not 0 <= before < len(layers)
            if not is_end and (kind, number, before) not in ended:
                continue
            begin = max(done[-1][3] if done else 0.0, ended.get((kind, number, before), 0.0))
            end = begin + layers[stage] * (FORWARD_S if kind == "F" else BACKWARD_S)
            ended[kind, number, stage] = end
            done.append((kind, number, begin, end))
    return spans, max(ended.values())


def print_timers(begins, layers, num_microbatches, replicas):
    """Of the iterations that began at these times."""
    spans, whole = time_calls(layers, num_microbatches)
    calls = {
        "forward-compute": [[span[2:] for span in own if span[0] == "F"] for own in spans],
        "backward-compute": [[span[2:] for span in own if span[0] == "B"] for own in spans],
        "optimizer": [[(whole, whole + OPTIMIZER_S)] for _ in spans],
    }
    print("times across ranks (ms):")
    for name, of_stages in calls.items():
        print(f"  {name}:")
        for stage, own in enumerate(of_stages):
            total = sum(end - begin for begin, end in own)
            for replica in range(replicas):
                print(f"     rank {stage * replicas + replica:2d}: {1000 * total:.2f}")
                for word, place in (("start", 0), ("end", 1)):
                    times = [at + call[place] for at in begins for call in own]
                    print(f" {name} {word} time lst:  {' '.join(map(repr, times))} ")


def main():
    args = parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stages = args.pipeline_model_parallel_size
    replicas = world // (stages * args.tensor_model_parallel_size)
    layers = [int(count) for count in args.balance.split("-")]
    if len(layers) != stages or sum(layers) != args.num_layers:
        sys.exit(f"balance {args.balance}: {stages} stages of {args.num_layers} layers")
    (prefix,) = args.data_path
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            sys.exit(f"{prefix}{end} is not there")
    num_microbatches = args.global_batch_size // (args.micro_batch_size * replicas)
    if rank == 0:
        print(f"[before the start of training step] datetime: {time.strftime('%F %T')} ")
    whole_s = time_calls(layers, num_microbatches)[1] + OPTIMIZER_S
    begins = []
    for iteration in range(1, args.train_iters + 1):
        begins.append(time.time())
        time.sleep(whole_s)
        if iteration % args.log_interval:
            continue
        if iteration == args.log_interval and rank % replicas == 0:
            sizes = (("allocated", 1570.5), ("reserved", 2100.0 + rank))
            words = (f"{name}: {size} | max {name}: {size + 100}" for name, size in sizes)
            print(f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(words)}")
        if rank == world - 1:
            words = (
                f"iteration {iteration:8d}/{args.train_iters:8d}",
                f"consumed samples: {iteration * args.global_batch_size:12d}",
                f"elapsed time per iteration (ms): {1000 * whole_s:.1f}",
                f"learning rate: {args.lr:.3E}",
                f"global batch size: {args.global_batch_size:5d}",
                f"lm loss: {10 / iteration:.6E}",
                "loss scale: 262144.0",
                "grad norm: 5.335",
                "number of skipped iterations:   0",
                "number of nan iterations:   0",
            )
            print(f" {' | '.join(words)} |")
            if args.timing_log_option == "all":
                print_timers(begins, layers, num_microbatches, replicas)
        begins = []
        sys.stdout.flush()


main()
