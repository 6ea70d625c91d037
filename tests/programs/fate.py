"""Ranks that wait for a signal, or meet their fate: `fate.py RANK exit:9 | kill | hang`.

Each prints `ready`, and the signals that reach it. SIGUSR1 ends it with 0 where `catch` is given,
with 3 where `catch:3` is.
With `child` each has a child, as a data loader is one, and says on SIGUSR1 whether it lives.
"""

import os
import signal
import subprocess
import sys
import time

rank = int(os.environ["RANK"])
doomed, fate = int(sys.argv[1]), sys.argv[2]


catches = [word for word in sys.argv[3:] if word.startswith("catch")]
code = int(catches[0].partition(":")[2] or 0) if catches else None
child = subprocess.Popen(["sleep", "120"]) if "child" in sys.argv[3:] else None


def tell(number, frame):
    print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
    if child is not None:
        time.sleep(1)
        print(f"rank {rank} child {'lives' if child.poll() is None else 'died'}", flush=True)
    if code is not None:
        sys.exit(code)


if "deaf" in sys.argv[3:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "signals" in sys.argv[3:] or catches:
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
