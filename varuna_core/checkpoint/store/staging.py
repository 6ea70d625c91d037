"""A copy of the state to write from while training goes on: one buffer, used again each time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import DTYPES, Entry

ALIGN = 64


class Staging:
    """The copy lies in memory, or in a local folder: a RAM disk, or a disk that is fast enough.

    In a folder it is a mapped file without a name, so that nothing is left behind by a kill.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, segments: Mapping[int, Sequence[Entry]]) -> dict[int, list[Entry]]:
        """The same entries, from the copy. What an earlier one gave is overwritten."""
        size = sum(_padded(entry.num_bytes) for held in segments.values() for entry in held)
        if size > len(self._buffer):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is made
            self._buffer = self._allocate(size)
        staged: dict[int, list[Entry]] = {}
        devices = set()
        at = 0
        for number, held in segments.items():
            staged[number] = []
            for entry in held:
                tensor, copy = entry.load().detach(), self._view(at, entry)
                copy.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
                at += _padded(entry.num_bytes)
                staged[number].append(replace(entry, load=_give(copy)))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _view(self, at: int, entry: Entry) -> Tensor:
        run = self._buffer[at : at + entry.num_bytes]
        return run.view(DTYPES[entry.dtype]).view(entry.box.extent)

    def _allocate(self, size: int) -> Tensor:
        if self.folder is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".varuna-staging-", dir=self.folder)
        try:
            # A full disk is an error here; later it would be a SIGBUS in the copy.
            os.posix_fallocate(fd, 0, size)
            return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(fd)
            os.unlink(name)


def _give(copy: Tensor) -> Callable[[], Tensor]:
    return lambda: copy


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
