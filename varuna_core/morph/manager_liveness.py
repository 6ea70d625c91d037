"""Whether the manager still lives, as a node hears it.

Slurm may take the batch script's node out of a job and let the job go on (`--no-kill`), with nobody
to own the run.
"""

from __future__ import annotations

from typing import Optional

RETURN_S = 30.0
"""For a manager that was killed to be started again, beyond what silence is allowed to a node."""
GAP_S = 5.0
"""We ourselves stood still if a look comes so late: then nobody was silent."""


class Hearing:
    """Counts the time in which orders could be read and stayed the same."""

    def __init__(self, lost_s: float) -> None:
        self.limit_s = lost_s + RETURN_S
        self._beat: Optional[float] = None
        self._looked: Optional[float] = None
        self._silent_s = 0.0

    def is_lost(self, beat: Optional[float], now: float) -> bool:
        """`beat` is the manager's sign of life; None where it cannot be told."""
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if beat is None or gap > GAP_S:
            return False
        self._silent_s = 0.0 if beat != self._beat else self._silent_s + gap
        self._beat = beat
        return self._silent_s > self.limit_s
