"""Steps as Megatron prints them, by rank 0; `fail` ends rank 1 with an error that is long."""

from __future__ import annotations

import os
import sys
import time

from varuna_core import trace

rank = int(os.environ["RANK"])
for number in range(1, 9):
    with trace.step(number):
        for micro_batch in range(2):
            with trace.span("forward", micro_batch=micro_batch):
                time.sleep(0.005)
            with trace.span("backward", micro_batch=micro_batch):
                time.sleep(0.01 * (1 + rank))
    if rank == 0:
        print(
            f" iteration {number:8d}/       8 | consumed samples: {number * 64:12d} | elapsed time "
            f"per iteration (ms): {40.0 + number:.1f} | learning rate: 1.500E-04 | lm loss: "
            f"{2.5 / number:.6E} | grad norm: 1.25 |",
            flush=True,
        )
    if rank == 1 and "fail" in sys.argv and number == 4:
        raise ValueError(
            "the tokenizer of the first stage has no word for this line of the corpus, in "
            "/data/corpora/german/wikipedia/2026-11/articles/part-00017-of-04096.jsonl.gz, 123456"
        )
