"""A log file that never holds up what it logs: on a full disk it drops, counts, and tries again."""

from __future__ import annotations

import os
import time
from pathlib import Path

from varuna_core.records.files import PRIVATE_FILE

RETRY_S = 5.0


class Sink:
    """An appending file of one writer. With `says_loss` the file itself tells what it lacks."""

    def __init__(self, path: Path, *, says_loss: bool = False) -> None:
        self._path = path
        self._says_loss = says_loss
        self._unsaid = 0
        self._fd: int | None = None
        self._retry = 0.0
        self.dropped = 0
        """Bytes that could not be written."""
        self.trouble = ""
        """Why not."""
        self.size = 0
        """Bytes that we wrote."""

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        if time.monotonic() >= self._retry:
            try:
                if self._fd is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                    self._fd = os.open(self._path, flags, PRIVATE_FILE)
                if self._says_loss and self._unsaid:
                    said = f"\nvjob: {self._unsaid} bytes are missing here: {self.trouble}\n"
                    self.size += os.write(self._fd, said.encode())
                    self._unsaid = 0
                while left:
                    written = os.write(self._fd, left)
                    self.size += written
                    left = left[written:]
            except OSError as error:
                self.trouble = error.strerror or str(error)
                self._retry = time.monotonic() + RETRY_S
        self.dropped += len(left)
        self._unsaid += len(left)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
