"""The kernel's log, read from where it stood when the attempt began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List

KERNEL_LOG = Path("/dev/kmsg")
MOST_LINES = 500
"""Read at once; a driver in trouble may write thousands."""
RECORD_BYTES = 8192
"""More than one record of the kernel's has."""


class KernelLog:
    """New lines of the log; `problem` says why there are none where it may not be read."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self.problem = ""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"{path}: {error.strerror}"

    def read_lines(self) -> List[str]:
        """Return the texts of the lines since the last call, without their times."""
        lines: List[str] = []
        while self._fd >= 0 and len(lines) < MOST_LINES:
            try:
                records = os.read(self._fd, RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:  # overwritten meanwhile: the next one is whole
                continue
            except OSError:  # none is new
                break
            if not records:
                break
            heads = (line.partition(";") for line in records.splitlines())
            lines += [text for head, mark, text in heads if mark and head[:1].isdecimal()]
        return lines

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
