"""Position up to which a tool has received a run: each point is sent once, over all attempts.

    attempt 0   step 10 20 30 40 |            killed; the newest checkpoint is that of step 20
    attempt 1              30 40 50           30 and 40 are repeated/..., 50 goes on

Pure but for the file that it is kept in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Optional

from varuna_core.agent.track.points import Point
from varuna_core.records.files import make, read_json, write_json

REPEATED = "repeated/"


@dataclass
class Cursor:
    """The position up to which one tool has received the run's points, and the tool's own data."""

    attempt: int = -1
    opened: float = 0.0
    """Time at which the last attempt that the tool received was opened."""
    places: Dict[str, float] = field(default_factory=dict)
    """Place of the last point that was sent in each stream; in streams ordered by step, in the last
    attempt only."""
    lasts: Dict[str, float] = field(default_factory=dict)
    """Highest place that was sent in each stream ordered by step, in any attempt."""
    own: Dict[str, Any] = field(default_factory=dict)
    """Data of the tool itself, such as its id of the run."""
    read: Dict[str, Any] = field(default_factory=dict)
    """Position in the run's files, as `AttemptPoints.save` returns it, from which reading
    continues."""

    def take(self, point: Point) -> Optional[Point]:
        """Return the point in the form to send; None if it has been sent before."""
        if point.is_by_step and (point.attempt, point.opened) != (self.attempt, self.opened):
            if point.attempt < self.attempt:
                return None
            self.attempt, self.opened = point.attempt, point.opened
            self.places = {
                stream: place for stream, place in self.places.items() if stream not in self.lasts
            }
        if point.place <= self.places.get(point.stream, float("-inf")):
            return None
        self.places[point.stream] = point.place
        if not point.is_by_step:
            return point
        last = self.lasts.get(point.stream, float("-inf"))
        if point.place > last:
            self.lasts[point.stream] = point.place
            return point
        values = {f"{REPEATED}{name}": value for name, value in point.values.items()}
        return replace(point, values=values)

    def copy(self) -> Cursor:
        return replace(self, places=dict(self.places), lasts=dict(self.lasts), own=dict(self.own))


def read_cursor(path: Path) -> Cursor:
    """Read a cursor; return a new one if the file is missing, damaged or of another version."""
    return make(Cursor, read_json(path)) or Cursor()


def write_cursor(path: Path, cursor: Cursor) -> None:
    write_json(path, asdict(cursor), lasts=False)
