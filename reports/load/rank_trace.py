"""What is known of one rank's trace beside its tables, and its clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vjob.reports.load.trace_lines import Column


@dataclass(kw_only=True)
class RankTrace:
    """One file: who wrote it, and where its steps are."""

    path: Path
    attempt: str
    rank: int
    stages: tuple[int, ...] = (0,)
    replica: int = 0
    host: str = ""
    device: str = ""
    partition: str = ""
    origin: int = 0
    """Nanoseconds since 1970 where the file's times begin."""
    offsets: list[tuple[int, int, int]] = field(default_factory=list)
    """(at, offset, residual) in the file's order."""
    spans: list[tuple[Column, int, int]] = field(default_factory=list)
    """(steps, place, length) of every piece with events."""
    shifted_ns: int = 0
    """What was added to a clock that was plainly wrong (reports/load/clocks.py)."""
    has_header: bool = False
    num_events: int = 0
    num_rows: int = 0
    """Lines of whole steps."""
    skipped: int = 0
    trouble: str = ""

    @property
    def is_blank(self) -> bool:
        """Whether nothing was read of it yet."""
        return not self.has_header and not self.spans

    @property
    def residual_ns(self) -> int | None:
        """The largest doubt about the clock; None where it was never held against rank 0's."""
        return max((residual for _, _, residual in self.offsets), default=None)

    def align(self, times: Column) -> Column:
        """The file's own times as nanoseconds since 1970 on rank 0's clock."""
        if not self.offsets:
            return times + self.origin
        at, offset, _ = np.array(sorted(self.offsets), dtype=np.int64).T
        drift = np.interp(times, at, (offset - offset[0]).astype(float))
        aligned: Column = times + np.rint(drift).astype(np.int64)
        return aligned + (self.origin + int(offset[0]))
