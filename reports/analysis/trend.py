"""Distinguish a change of a curve from its noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Both ends of a curve, smoothed."""

    first: float
    last: float
    width: int
    """The number of values of which each end is the median."""
    is_clear: bool | None
    """True if the ends differ by more than the noise; None if values are too few to tell."""


LEAST_VALUES = 8
BEYOND = 3.0
"""Minimum number of deviations by which the ends of a changed curve differ, or by which the rank
correlation of its values with their order differs from that of noise."""
STEADY = 0.75
"""Minimum rank correlation of a curve that changes all along, whatever single values stand out."""


def measure_trend(values: Sequence[float]) -> Trend:
    """Compare the ends of a curve, each the median of a tenth of it. Their noise is taken from
    second differences of values and of medians, in which a steady change does not count."""
    numbers = np.array(values, dtype=float)
    if len(numbers) < LEAST_VALUES:
        return Trend(first=float(numbers[0]), last=float(numbers[-1]), width=1, is_clear=None)
    width = max(len(numbers) // 10, min(len(numbers) // 5, 5))
    first, last = float(np.median(numbers[:width])), float(np.median(numbers[-width:]))
    medians = [float(np.median(part)) for part in np.array_split(numbers, len(numbers) // width)]
    noise = max(1.25 * _measure_noise(numbers) / np.sqrt(width), _measure_noise(medians))
    is_clear = abs(last - first) > BEYOND * np.sqrt(2) * noise
    ranks = pd.Series(numbers).rank()
    order = ranks.corr(pd.Series(range(len(ranks))))  # not a number if all values are equal
    is_clear |= abs(order) > max(STEADY, BEYOND / np.sqrt(len(numbers) - 1))
    return Trend(first=first, last=last, width=width, is_clear=bool(is_clear))


def _measure_noise(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(1.4826 / np.sqrt(6) * np.median(np.abs(np.diff(values, 2))))
