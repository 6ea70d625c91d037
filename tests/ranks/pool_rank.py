"""A rank that ends in some way: `pool_rank.py <how> <rank> <world size>`."""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys

import torch


def main() -> None:
    how, rank, world = sys.argv[1:]
    print(f"rank {rank} of {world}", flush=True)
    if how == "raises":
        raise KeyError(f"of rank {rank}")
    if how.startswith("exits"):
        sys.exit(int(how.split()[1]))
    if how == "ends":
        atexit.register(print, "at exit")
    if how == "tells":
        print(random.random(), os.getpid(), os.environ.get("CHANGED"), torch.rand(()), sep="\n")
        os.environ["CHANGED"] = "by one"
    if how == "env":
        print(dict(os.environ))
    if how == "waits":
        signal.pause()


if __name__ == "__main__":
    main()
