"""A script without torch that writes half a MB with its checkpoints, and fails where it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for number in range(1, 4):
    print(f"step {number}/3 loss {1 / number}", flush=True)
path = Path(sys.argv[1]) / f"part-{os.environ['RANK']}"
with path.open("wb") as handle:
    handle.write(bytes(1 << 19))
