"""Prints settings as a training does, with the WORLD_SIZE of its argument, and keeps running."""

import os
import sys
import time

if os.environ["LOCAL_RANK"] == "0":
    print(f"NODE_RANK: {os.environ.get('GROUP_RANK', 0)}")
    print(f"WORLD_SIZE: {sys.argv[1]}", flush=True)
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    time.sleep(0.1)
