"""Ranks that wait for a signal, or fail as told: `fail_as_told.py RANK exit:9 | kill | hang`.

Each prints `ready` and the signals that reach it. SIGUSR1 ends it with 0 if `catch` is given, with
3 if `catch:3` is; `leave FILE` with 0 once the file is there. With `child` each has a child, as a
data loader would be, and prints on SIGUSR1 if it lives. `deaf` ignores SIGTERM. `steps` prints
those of a training that is not over.
"""

import os
import signal
import subprocess
import sys
import time

rank = int(os.environ.get("RANK", 0))  # one rank alone has none
failing, how = int(sys.argv[1]), sys.argv[2]


catches = [word for word in sys.argv[3:] if word.startswith("catch")]
code = int(catches[0].partition(":")[2] or 0) if catches else None
child = subprocess.Popen(["sleep", "120"]) if "child" in sys.argv[3:] else None


def handle(number, frame):
    print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
    if child is not None:
        time.sleep(1)
        print(f"rank {rank} child {'lives' if child.poll() is None else 'died'}", flush=True)
    if code is not None:
        sys.exit(code)


if "deaf" in sys.argv[3:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "signals" in sys.argv[3:] or catches:
    signal.signal(signal.SIGUSR1, handle)
print(f"rank {rank} ready, attempt {os.environ['VJOB_ATTEMPT']}", flush=True)
if "steps" in sys.argv[3:]:
    print("step 110/400 loss 2.5", "step 120/400 loss 2.4", sep="\n", flush=True)
if rank == failing:
    if how.startswith("exit:"):
        print("ValueError: this is the end", file=sys.stderr, flush=True)
        sys.exit(int(how[5:]))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 120
until = sys.argv[sys.argv.index("leave") + 1] if "leave" in sys.argv else ""
while time.monotonic() < deadline and not os.path.exists(until):
    time.sleep(0.1)
