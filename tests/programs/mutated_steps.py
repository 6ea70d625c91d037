"""A script without torch that traces and prints steps; rank 1 fails in the attempts it is given."""

from __future__ import annotations

import os
import sys
import time

from varuna_core import trace

rank, attempt = int(os.environ["RANK"]), int(os.environ.get("VJOB_ATTEMPT", "0"))
failing = [int(word) for word in sys.argv[1].split(",") if word]
for number in range(1, 9):
    with trace.step(number):
        for micro_batch in range(2):
            with trace.span("forward", micro_batch=micro_batch):
                time.sleep(0.005)
            with trace.span("backward", micro_batch=micro_batch):
                time.sleep(0.01 * (1 + rank))
    print(f"step {number}/8 loss {2.5 / number:.4f} lr 0.001 grad norm 1.25", flush=True)
    if rank == 1 and attempt in failing and number == 4:
        print("WARNING: no sample left", file=sys.stderr)
        raise ValueError("no sample 17")
