"""A script without torch that traces its steps: rank 1 is slower than rank 0."""

from __future__ import annotations

import os
import sys
import time

from varuna_core import trace

WORK_S = 0.002


@trace.span("load")
def load() -> None:
    time.sleep(WORK_S)


for number in range(1, int(sys.argv[1]) + 1):
    with trace.step(number):
        load()
        for micro_batch in range(2):
            with trace.span("forward", micro_batch=micro_batch):
                with trace.span("attention"):
                    time.sleep(WORK_S)
                with trace.span("communication", num_bytes=1024):
                    time.sleep(WORK_S)
                time.sleep(WORK_S)
            with trace.span("backward", micro_batch=micro_batch):
                time.sleep(WORK_S * (1 + 7 * int(os.environ.get("RANK", "0"))))
        with trace.span("optimizer"):
            pass
