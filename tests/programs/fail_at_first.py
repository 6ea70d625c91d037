"""Ranks that fail in their first attempts: `fail_at_first.py RANK FATE[,FATE...]`.

The N-th fate is that of attempt N; once there are no more, all ranks exit with 0. `9` is the code
that RANK exits with, `9@4` the same after four lines about steps; the others wait for their end.
"""

import os
import sys
import time

rank, attempt = int(os.environ["RANK"]), int(os.environ["VJOB_ATTEMPT"])
failing, fates = int(sys.argv[1]), sys.argv[2].split(",")
again = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}"
print(f"rank {rank} ready, attempt {attempt}, restart {again}", flush=True)
if attempt >= len(fates):
    sys.exit(0)
if rank == failing:
    code, _, steps = fates[attempt].partition("@")
    for step in range(1, int(steps or 0) + 1):
        print(f"step {step}/100 loss {1 / step:.4f}", flush=True)
    print(f"ValueError: no sample at 0x{id(sys):x} of pid {os.getpid()}", file=sys.stderr)
    sys.exit(int(code))
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    time.sleep(0.1)
