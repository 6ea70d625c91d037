"""How far the clocks of ranks are apart from rank 0's, by messages there and back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from varuna_core.records.logs.times import Exchange
from varuna_core.records.logs.trace import TraceWriter

Read = Callable[[], int]
NUM_EXCHANGES = 8
"""The quickest one counts."""


def exchange_clocks(trace: TraceWriter | None) -> None:
    """Every rank calls it, those without a trace too."""
    read = time.time_ns if trace is None else trace.read_clock
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for other in range(1, world):
            for _ in range(NUM_EXCHANGES):
                _answer(other, read)
        return
    exchanges = [_ask(read) for _ in range(NUM_EXCHANGES)]
    if trace is not None:
        trace.add_exchanges(exchanges)


def _answer(other: int, read: Read) -> None:
    dist.recv(torch.empty(1, dtype=torch.int64), other)
    heard = read()
    dist.send(torch.tensor([heard, read()]), other)


def _ask(read: Read) -> Exchange:
    times = torch.empty(2, dtype=torch.int64)
    asked = read()
    dist.send(torch.tensor([0]), 0)
    dist.recv(times, 0)
    answered = read()
    heard, replied = times.tolist()
    return Exchange(asked=asked, heard=heard, replied=replied, answered=answered)
