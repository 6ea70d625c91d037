"""Computes on its device, says so, and waits for a file where one is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from tests.ranks.device import choose_device, synchronize


def main() -> None:
    device = choose_device()
    held = torch.ones(512, 512, device=device)
    print(f"sum {float((held @ held).sum()):.0f} on {device.type}", flush=True)
    synchronize(device)
    for name in sys.argv[1:]:
        while not Path(name).exists():
            time.sleep(0.1)


if __name__ == "__main__":
    main()
