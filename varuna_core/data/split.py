"""The split string, and the order of samples that a checkpoint keeps.

The split says which documents are for training, validation and test by Megatron's rule of the time
of the index map names (until May 2023): each share is rounded by itself, and what the rounding is
off by moves every border. Megatron Core rounds cumulative shares, which may differ by a document.
A run that goes on with other settings would bring samples in another order, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from varuna_core.data.errors import DataError

NAMES = ("train", "valid", "test")


def parse_split(text: str) -> list[float]:
    """Three shares with sum 1; missing ones are zero."""
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
    """The documents of each part, in order; a part may get none."""
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
    """Name what would bring samples in another order than before."""
    changed = [key for key in now if saved.get(key) != now[key]]
    if changed:
        listed = ", ".join(f"{key} was {saved.get(key)}, is {now[key]}" for key in changed)
        raise DataError(
            f"{where}: the samples would come in another order than before, some twice and some "
            f"never: {listed}. Continue with the old values"
        )
