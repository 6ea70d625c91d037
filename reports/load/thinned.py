"""A list that never grows beyond a bound: it keeps every row, then every second, every fourth..."""

from __future__ import annotations

from typing import Any

MOST_ROWS = 100_000


class Thinned:
    """Rows evenly spread over all that were given."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stride = 1
        """One row in so many was kept."""
        self._most, self._seen = most, 0

    def append(self, row: dict[str, Any]) -> None:
        if self._seen % self.stride == 0:
            self.rows.append(row)
            if len(self.rows) > self._most:
                del self.rows[1::2]
                self.stride *= 2
        self._seen += 1
