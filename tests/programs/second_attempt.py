"""A rank that trains nothing and needs no torch: it waits in the first attempt, and ends well in
the next one."""

import os
import sys
import time

attempt = int(os.environ["VJOB_ATTEMPT"])
print(f"step {attempt + 1}/2 loss 1.5", flush=True)
if attempt:
    sys.exit(0)
time.sleep(120)
