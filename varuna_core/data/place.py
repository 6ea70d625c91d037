"""Track a script's position in its data: the samples of each global step, for any number of ranks.

    from varuna_core import DataPlace

    place = DataPlace(len(dataset), batch_size=64, seed=0)
    if resumed:
        place.load_state_dict(state["place"])
    while place.step < steps:
        batch = [dataset[i] for i in place.list_samples()]       # of this rank
        ...
        place.advance()                                          # the step is done

    samples 0 .. n-1, put in an order by seed and epoch, epoch after epoch:

      epoch 0                        epoch 1
      7 2 9 0 | 4 1 8 3 | 6 5 - 1 3 | 0 8 ...        batches of 4: steps 0, 1, 2, ...
      ^ ^ ^ ^
      A B A B     two ranks;  with four: A B C D

The batch of a step depends only on the step, so a run that continues with other ranks trains on the
same samples, each exactly once per epoch. The state is a few numbers. No list of all samples is
kept: a position in the order is computed (with a cipher of four rounds over the numbers below n).

Standard library only: it is imported in any container, and by programs without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

ROUNDS = 4
_MASK = (1 << 64) - 1


class DataPlace:
    """Counts steps, and lists the samples of each step."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """`batch_size` counts the samples of all ranks together.

        `rank` of `world` takes its share of each batch: by default the replica in vjob's layout,
        whose stages all take the same samples, else RANK of WORLD_SIZE.
        """
        place = _read_rank(os.environ) if rank is None or world is None else (rank, world)
        self.rank, self.world = place
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"{num_samples} samples, batch size {batch_size}: both must be >= 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}: expected 0 to {self.world - 1}")
        if self.world > batch_size:
            raise ValueError(
                f"a batch of {batch_size} has no sample for some of {self.world} ranks: use a "
                "larger batch_size, or fewer ranks (morph.max_nodes)"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.step = 0
        """Number of steps done, which is the next step's number."""
        self._from = (0, 0)
        """Step at which the state was loaded, where the batch size may have changed, and the number
        of samples taken before that step."""

    @property
    def consumed(self) -> int:
        """Samples taken so far by all ranks."""
        return self._count_before(self.step)

    @property
    def epoch(self) -> int:
        """Number of times that all samples have been taken."""
        return self.consumed // self.num_samples

    @property
    def weight(self) -> float:
        """The weight of this rank's mean in a mean over ranks: 1 if all ranks have equally many
        samples. `(loss * place.weight).backward()` gives DDP the gradient of the whole batch."""
        share = len(range(self.rank, self.batch_size, self.world))
        return share * self.world / self.batch_size

    def list_samples(self, step: int | None = None) -> list[int]:
        """Return this rank's samples in a step, by default the next one."""
        first = self._count_before(self.step if step is None else step)
        last = first + self.batch_size
        return [self._find(at) for at in range(first + self.rank, last, self.world)]

    def advance(self) -> None:
        """Count the current step as done."""
        self.step += 1

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of the next and all later steps, without end: for the
        `batch_sampler` of a torch DataLoader, which reads ahead. Only `advance` counts steps as
        done."""
        step = self.step
        while True:
            yield self.list_samples(step)
            step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the script's checkpoint; it is equal on all ranks."""
        return {
            "step": self.step,
            "consumed": self.consumed,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks; raise ValueError if the samples differ.
        The batch size may have changed."""
        for name in ("num_samples", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's {name} is {state[name]}, but now it is "
                    f"{getattr(self, name)}: the order of samples would differ"
                )
        self.step = state["step"]
        self._from = (state["step"], state["consumed"])

    def _count_before(self, step: int) -> int:
        """Return the number of samples taken before a step."""
        known, consumed = self._from
        return max(consumed + (step - known) * self.batch_size, 0)

    def _find(self, at: int) -> int:
        """Return the number of the sample at position `at`, counted through all epochs."""
        epoch, index = divmod(at, self.num_samples)
        if not self.shuffle:
            return index
        return permute(index, self.num_samples, mix(self.seed, epoch))


def permute(index: int, size: int, key: int) -> int:
    """Permute the numbers below `size`: return the image of `index`.

    This is a Feistel network over the next power of 4; a result out of range is permuted again, so
    a number takes about four rounds.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(key + number, right) & mask)
        index = left << half | right
        if index < size:
            return index


def mix(key: int, value: int) -> int:
    """Return 64 bits that look random (the finalizer of splitmix64)."""
    word = ((value + 1) * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03) & _MASK
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
    return word ^ word >> 31


def _read_rank(environ: Mapping[str, str]) -> tuple[int, int]:
    if "VJOB_REPLICA" in environ and "VJOB_DATA" in environ:
        return int(environ["VJOB_REPLICA"]), int(environ["VJOB_DATA"])
    return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
