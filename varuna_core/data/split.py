"""Split documents into parts, and check the order of samples stored in a checkpoint.

The split string assigns documents to training, validation and test by the rule that Megatron used
with these index map names (until May 2023): each share is rounded by itself, and the rounding error
moves every border. Megatron Core rounds cumulative shares, which may differ by a document. A run
that is resumed with settings that change the order of samples is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from varuna_core.data.errors import DataError

NAMES = ("train", "valid", "test")


def parse_split(text: str) -> list[float]:
    """Parse up to three shares and scale them to sum 1; missing shares are zero."""
    try:
        shares = [float(word) for word in text.split("," if "," in text else "/")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(NAMES) or not all(0 <= x < math.inf for x in shares):
        raise DataError(
            f'split "{text}" must be one to three numbers for {", ".join(NAMES)}: "969,30,1"'
        )
    total = sum(shares)
    if not total > 0:
        raise DataError(f'split "{text}" must have a sum above 0')
    return [share / total for share in shares] + [0.0] * (len(NAMES) - len(shares))


def split_documents(text: str, num_documents: int) -> dict[str, range]:
    """Return the range of documents of each part; a part may be empty."""
    borders = [0]
    for share in parse_split(text):
        borders.append(borders[-1] + round(share * float(num_documents)))
    excess = borders[-1] - num_documents
    borders = [0] + [max(border - excess, 0) for border in borders[1:]]
    return {
        name: range(begin, max(begin, end))
        for name, begin, end in zip(NAMES, borders, borders[1:], strict=False)
    }


def check_order(where: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an error that names the settings by which the order of samples changed."""
    changed = [key for key in now if saved.get(key) != now[key]]
    if changed:
        listed = ", ".join(f"{key} was {saved.get(key)}, is {now[key]}" for key in changed)
        raise DataError(
            f"{where}: the order of samples would change, so some would be read twice and some "
            f"never: {listed}. Continue with the old values"
        )
