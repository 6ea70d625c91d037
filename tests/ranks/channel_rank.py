"""One of two ranks that are joined by memory, for tests: `channel_rank.py <folder> <how> <rank> 2`.

Rank 0 fills the channel, or waits where nothing is sent, and prints the error that ends it; rank 1
waits to be killed.
"""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.runtime.comm.channel import Arrivals
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.memory_channel import meet
from varuna_core.runtime.comm.wire import Wire

CAPACITY = 3
ELEMENTS = 1 << 18


def main() -> None:
    folder, how, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = dist.FileStore(f"{folder}/store", 2)
    groups: list[Any] = [
        dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, timedelta(minutes=10))
        for name in "fb"
    ]
    out, into = (Wire(group, 1 - rank) for group in (groups if rank == 0 else groups[::-1]))
    ends = meet(out, into, 1 - rank, rank == 0, Arrivals())
    assert ends is not None
    sender, receiver = ends
    if rank == 1:
        print("waits", flush=True)
        signal.pause()
    sender.hold(CAPACITY)
    message = [torch.ones(ELEMENTS)]
    try:
        if how == "full":
            for _ in range(CAPACITY):
                sender.send(message)
            print("full", flush=True)
            sender.send(message)
        else:
            print("empty", flush=True)
            receiver.take()
    except ChannelClosed as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
