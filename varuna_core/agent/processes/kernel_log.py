"""Read the kernel's log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, Tuple

KERNEL_LOG = Path("/dev/kmsg")
MOST_RECORDS = 500
"""Most records that are read at once; a driver in trouble may write thousands."""
RECORD_BYTES = 8192
"""Size of the read buffer in bytes, which is larger than any record of the kernel."""


class KernelLog:
    """Reader of the kernel's log, from this moment on, or of the whole log if `is_whole`.

    If this user may not read the log, there are no records, and `problem` says why.
    """

    def __init__(self, path: Path = KERNEL_LOG, *, is_whole: bool = False) -> None:
        self.problem = ""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_SET if is_whole else os.SEEK_END)
        except OSError as error:
            self.problem = f"{path}: {error.strerror}"

    def read_records(self) -> List[Tuple[float, str]]:
        """Return the next records: when each was written, in seconds since the machine started, and
        its text. The list is empty if there are no new records."""
        found: List[Tuple[float, str]] = []
        while self._fd >= 0 and len(found) < MOST_RECORDS:
            try:
                records = os.read(self._fd, RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:  # overwritten meanwhile: the next one is whole
                continue
            except OSError:  # none is new
                break
            if not records:
                break
            found += parse_records(records)
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_records(text: str) -> List[Tuple[float, str]]:
    """Parse records, each `priority,number,microseconds,flags;text`; skip the lines of further
    values that may follow a record."""
    found = []
    for line in text.splitlines():
        head, mark, said = line.partition(";")
        words = head.split(",")
        if mark and head[:1].isdecimal() and len(words) > 2 and words[2].isdecimal():
            found.append((int(words[2]) / 1e6, said))
    return found
