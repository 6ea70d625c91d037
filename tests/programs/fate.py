"""Ranks that wait for a signal, or meet their fate: `fate.py RANK exit:9 | kill | hang`.

Each prints `ready`, and the signals that reach it. SIGUSR1 ends it with 0 where `catch` is given.
"""

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
doomed, fate = int(sys.argv[1]), sys.argv[2]


def tell(number, frame):
    print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
    if "catch" in sys.argv[3:]:
        sys.exit(0)


if "deaf" in sys.argv[3:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "signals" in sys.argv[3:] or "catch" in sys.argv[3:]:
    signal.signal(signal.SIGUSR1, tell)
print(f"rank {rank} ready, attempt {os.environ['VJOB_ATTEMPT']}", flush=True)
if rank == doomed:
    if fate.startswith("exit:"):
        print("ValueError: this is the end", file=sys.stderr, flush=True)
        sys.exit(int(fate[5:]))
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    time.sleep(0.1)
