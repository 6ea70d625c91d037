"""Mix several data sets by weight into one.

Each sample comes from the data set that is furthest below its share so far (Megatron's rule), so
the mixture is even at every position, and position k is the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError
from varuna_core.data.gpt import GptSamples, open_gpt
from varuna_core.data.split import NAMES

Array = npt.NDArray[Any]
SURPLUS = 1.005
"""As in Megatron, each data set provides this many times its share of samples."""


def parse_blend(text: str) -> list[tuple[float, str]]:
    """Parse `data/a`, or `0.7 data/a 0.3 data/b`, into weights with sum 1 and prefixes."""
    words = text.split()
    if len(words) == 1:
        return [(1.0, words[0])]
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        weights = []
    prefixes = words[1::2]
    is_paired = words and len(weights) == len(prefixes)
    if not is_paired or not all(0 < weight < math.inf for weight in weights):
        raise DataError(
            f'data "{text}" must be one prefix, or weights above 0 and prefixes in turn: '
            '"0.7 data/a 0.3 data/b"'
        )
    return list(zip(weigh(weights), prefixes, strict=True))


def weigh(weights: Sequence[float]) -> list[float]:
    """Scale weights to sum 1."""
    normal: list[float] = (np.array(weights) / np.sum(weights)).tolist()
    return normal


def build_blend(weights: Sequence[float], num_samples: int) -> tuple[Array, Array]:
    """Return for each sample its data set (int16) and its number in that set (int64)."""
    which = np.empty(num_samples, np.int16)
    number = np.empty(num_samples, np.int64)
    taken = [0] * len(weights)
    sets = range(len(weights))
    for k in range(num_samples):
        place = max(k, 1)
        behind = [weights[d] * place - taken[d] for d in sets]
        chosen = behind.index(max(behind))
        which[k], number[k] = chosen, taken[chosen]
        taken[chosen] += 1
    return which, number


class BlendedSamples:
    """The samples of several data sets in one order."""

    def __init__(self, sets: Sequence[GptSamples], which: Array, number: Array) -> None:
        self.sets = tuple(sets)
        self.which = which
        self.number = number

    def __len__(self) -> int:
        return len(self.which)

    def read(self, number: int) -> Array:
        if not 0 <= number < len(self):
            raise DataError(
                f"sample {number:,} does not exist: the blend has {len(self):,} samples"
            )
        return self.sets[int(self.which[number])].read(int(self.number[number]))

    def read_batch(self, numbers: Iterable[int]) -> Array:
        """Return samples, one in each row."""
        rows = [self.read(number) for number in numbers]
        return np.stack(rows) if rows else np.empty((0, self.sets[0].sequence + 1), np.int64)

    def state(self) -> dict[str, Any]:
        counts = np.bincount(self.which, minlength=len(self.sets)).tolist()
        return {"taken": counts, "sets": [one.state() for one in self.sets]}

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise an error if a checkpoint was made with another mixture or order."""
        now, states = self.state(), saved.get("sets", [])
        if saved.get("taken") != now["taken"] or len(states) != len(self.sets):
            raise DataError(
                f"the blend has changed: its data sets had {saved.get('taken')} samples and now "
                f"have {now['taken']}. Continue with the old weights and number of samples"
            )
        for one, state in zip(self.sets, states, strict=True):
            one.check_state(state)


def open_samples(
    data: str | Sequence[tuple[float, str]],
    *,
    split: str,
    num_samples: Mapping[str, int],
    sequence: int,
    seed: int,
    may_write: bool = True,
) -> dict[str, GptSamples | BlendedSamples]:
    """Open the wanted parts of a data set, or of a blend as spelled in a conf's `data.prefix`."""
    if isinstance(data, str):
        blend = parse_blend(data)
    else:
        weights = weigh([weight for weight, _ in data])
        blend = [(w, prefix) for w, (_, prefix) in zip(weights, data, strict=True)]
    if len(blend) == 1:
        ((_, prefix),) = blend
        return dict(
            open_gpt(
                prefix, split=split, num_samples=num_samples, sequence=sequence, seed=seed,
                may_write=may_write,
            )
        )  # fmt: skip
    found: dict[str, GptSamples | BlendedSamples] = {}
    weights = [weight for weight, _ in blend]
    for part in NAMES:
        count = num_samples.get(part, 0)
        if count < 1:
            continue
        which, number = build_blend(weights, count)
        taken = np.bincount(which, minlength=len(blend)).tolist()
        sets = []
        for (weight, prefix), used in zip(blend, taken, strict=True):
            asked = max(math.ceil(math.ceil(count * weight) * SURPLUS), used)
            opened = open_gpt(
                prefix, split=split, num_samples={part: asked}, sequence=sequence, seed=seed,
                may_write=may_write,
            )  # fmt: skip
            sets.append(opened[part])
        found[part] = BlendedSamples(sets, which, number)
    return found
