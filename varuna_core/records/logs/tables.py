# ruff: noqa: B905 - Python 3.8 has no `strict`
"""Read tables whose header names the numbers below it.

      epoch    train_loss    valid_loss      dur          header: a name for each column
    -------  ------------  ------------  -------          a rule
          1        6.4971        6.5846  11.8608          epoch 1 | train_loss 6.4971 | ...

A row is rewritten so that each number follows its name; then it is read like any other line. A row
with fewer or more cells than the header is left unchanged, so no number gets a wrong name. No line
makes the reader raise.
"""

from __future__ import annotations

import re
from typing import List, Optional

MOST_CELLS = 24
LONGEST = 400
_GAP = re.compile(r"\s{2,}|\t|\s*[|│┃]\s*")
_COUNT = re.compile(
    r"[^\w(%]*(?:epochs?|ep|e|it|iter(?:ation)?s?|(?:global[_ ]?)?steps?|batch|updates?"
    r"|episodes?|#)\W*",
    re.IGNORECASE,
)
_MEASURE = re.compile(r"loss|acc|error|reward|rmse|nll|ppl|perplexity|score|lr\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![A-Za-z])\d|=")
_WHOLE = re.compile(r"\d{1,12}(?:/\d{1,12})?")
_VALUE = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?[%sGMk]?|nan|inf", re.IGNORECASE)


class Tables:
    """Reader of tables, with the header that was read last."""

    def __init__(self) -> None:
        self.names: List[str] = []
        """Names of its columns; empty before the first header."""

    def name_row(self, text: str) -> Optional[str]:
        """Return a table's row with each number after its column's name, or None."""
        cells = _split(text) if self.names and text[:LONGEST].strip() else []
        if len(cells) != len(self.names):
            cells = text[:LONGEST].split()
        if not cells or len(cells) != len(self.names):
            return None
        for name, cell in zip(self.names, cells):
            if _COUNT.fullmatch(name) and not _WHOLE.fullmatch(cell):
                return None
        if sum(_VALUE.fullmatch(cell) is not None or cell[0] == "[" for cell in cells) < 2:
            return None
        pairs = zip(self.names, cells)
        named = (f"{_spell(name)} {cell}" for name, cell in pairs if cell[0] != "[")  # no lists
        return " | ".join(named)

    def read_header(self, text: str) -> bool:
        """Keep the names of a line that is a header; return False for any other line."""
        if len(text) > LONGEST:
            return False
        for cells in (_split(text), text.split()):
            if _is_header(cells):
                self.names = cells
                return True
        return False


def _split(text: str) -> List[str]:
    text = text[:LONGEST].strip(" |│┃\t")
    return [cell for cell in (_GAP.split(text) if " " in text else text.split(",")) if cell]


def _is_header(cells: List[str]) -> bool:
    if not 3 <= len(cells) <= MOST_CELLS or any(_NUMBER.search(cell) for cell in cells):
        return False
    is_counted = any(_COUNT.fullmatch(cell) for cell in cells)
    return is_counted and any(_MEASURE.search(cell) for cell in cells)


def _spell(name: str) -> str:
    """Replace `#` and `E` by the words that they stand for."""
    return {"#": "step", "E": "epoch"}.get(name, name)
