"""Compare the arguments of all ranks through the store, and report a rank that cannot start.

    each rank    its arguments, or the reason why it cannot start ─► the store
    the last     compares them ─► the answer, the same for all ranks

Each rank needs six store operations, regardless of the number of ranks. The answer names at most a
few of the ranks whose values differ from the first rank's.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from varuna_core.runtime.comm.failure import RankFailed, describe_error, is_connection_error

log = logging.getLogger(__name__)

Given = Mapping[str, str]
"""Descriptions of the values that a rank was given, keyed by name."""

MOST = 3
"""Maximum number of ranks and of differences named in an answer."""

LONGEST = 120
"""Maximum length of a value in an answer, in characters."""

LOOK_S = 1.0
LATE_S = 5.0
"""Seconds after which a warning names the ranks that have not joined the meeting."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Difference:
    """A difference between the values given to the ranks."""

    text: str
    """Description of the ranks and their values."""

    names: list[str]


class Meeting:
    """One meeting of ranks. Each rank calls `compare` once, or fails inside `refusing`."""

    def __init__(self, store: Any, key: str, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.key, self.rank, self.ranks = store, key, rank, ranks
        self.size = len(ranks)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Report an exception raised in this context to the other ranks, unless they caused it."""
        try:
            yield
        except Exception as error:
            is_theirs = isinstance(error, RankFailed) or is_connection_error(error)
            if self.size > 1 and not is_theirs:
                self._answer({"refusal": f"rank {self.rank}: {describe_error(error)}"})
            raise

    def compare(
        self,
        given: Given,
        look: Callable[[float], None] | None = None,
        purpose: str = "begin",
    ) -> Difference | None:
        """Wait for all ranks, and return the differences of their values, equal on all ranks. Raise
        RankFailed if a rank cannot start.

        `look` is called every second with the seconds waited and may raise an error; without it,
        the store's timeout limits the wait. `purpose` completes the warning about late ranks.
        """
        if self.size == 1:
            return None
        mine = {"rank": self.rank, "given": dict(given)}
        first = json.loads(self._set_first("first", mine))
        if first["given"] != given:
            number = self.store.add(f"{self.key}/others", 1)
            self.store.set(f"{self.key}/other/{number}", json.dumps(mine))
        self.store.set(f"{self.key}/here/{self.rank}", "")
        if self.store.add(f"{self.key}/arrived", 1) == self.size:
            self._answer(asdict(self._compare_all(first)))
        answer = json.loads(self._wait(look, purpose))
        if "refusal" in answer:
            raise RankFailed(f"rank {self.rank} cannot begin: {answer['refusal']}")
        return Difference(**answer) if answer["names"] else None

    def require_same(self, given: Given, warned: Collection[str] = ()) -> None:
        """Wait for all ranks. If their values differ, raise ValueError on all ranks, or only warn
        if all the differing names are in `warned`."""
        difference = self.compare(given)
        if difference is None:
            return
        text = f"the ranks have different arguments: {difference.text}"
        if not {*difference.names} <= {*warned}:
            raise ValueError(text)
        log.warning("%s", text)

    def _set_first(self, name: str, value: Any) -> str:
        text: str = self.store.compare_set(f"{self.key}/{name}", "", json.dumps(value)).decode()
        return text

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._set_first("answer", answer)

    def _wait(self, look: Callable[[float], None] | None, purpose: str) -> str:
        key = f"{self.key}/answer"
        look = look or self._look
        began_s, is_told = time.monotonic(), False
        while True:
            try:
                self.store.wait([key], timedelta(seconds=LOOK_S))
                return bytes(self.store.get(key)).decode()
            except RuntimeError:  # not yet: each store has an error of its own for it
                waited_s = time.monotonic() - began_s
                look(waited_s)
                if waited_s >= LATE_S and not is_told:
                    is_told = True
                    late = self._name_late(waited_s)
                    log.warning("rank %d waits to %s: %s", self.rank, purpose, late)

    def _look(self, waited_s: float) -> None:
        if waited_s > self.store.timeout.total_seconds():
            raise RankFailed(f"rank {self.rank} cannot begin: {self._name_late(waited_s)}")

    def _name_late(self, waited_s: float) -> str:
        late = [r for r in self.ranks if not self.store.check([f"{self.key}/here/{r}"])]
        more = f" and {len(late) - MOST} more" if len(late) > MOST else ""
        named = ", ".join(map(str, late[:MOST]))
        return f"rank {named}{more} has not joined within {waited_s:.0f} s"

    def _compare_all(self, first: Mapping[str, Any]) -> Difference:
        """Find the ranks whose values differ; the result has no names if all values are equal."""
        count = self.store.add(f"{self.key}/others", 0)
        if not count:
            return Difference("", [])
        others = sorted(
            (
                json.loads(self.store.get(f"{self.key}/other/{number + 1}"))
                for number in range(min(count, MOST))
            ),
            key=lambda other: int(other["rank"]),
        )
        usual, odd = first, others
        # The first to come is the odd one among many; of two halves the lower rank is usual.
        if (2 * count, first["rank"]) > (self.size, others[0]["rank"]):
            usual, odd = others[0], [first]
        said = "; ".join(f"rank {o['rank']}: {describe_difference(usual, o)}" for o in odd)
        more = f"; and {count - MOST} ranks more" if odd is others and count > MOST else ""
        return Difference(said + more, sorted({n for o in odd for n in list_names(usual, o)}))


def list_names(usual: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that differ between two ranks."""
    ours, theirs = usual["given"], other["given"]
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def describe_difference(usual: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe how one rank's values differ from another's."""
    ours, theirs = usual["given"], other["given"]
    names = list_names(usual, other)
    said = [
        f"{name} {_shorten(theirs.get(name, 'none'))}, on rank {usual['rank']} "
        f"{_shorten(ours.get(name, 'none'))}"
        for name in names[:MOST]
    ]
    return ", ".join(said) + (f", and {len(names) - MOST} more" if len(names) > MOST else "")


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def refuse_batches(batches: Mapping[int, str]) -> NoReturn:
    """Raise ValueError because ranks of one replica were given different batches. `batches` maps
    ranks to descriptions of their batches, such as the shapes."""
    given = ", ".join(f"rank {rank} has {batch}" for rank, batch in batches.items())
    raise ValueError(f"all ranks of a replica must get the same batch in each step: {given}")


def open_meeting(rank: int, ranks: Sequence[int], part: str = "all") -> Meeting:
    """Open a meeting of all ranks of the default group, or of `ranks`; every rank must open the
    same meetings in the same order."""
    store = dist.distributed_c10d._get_default_store() if len(ranks) > 1 else None
    return Meeting(store, f"varuna/meeting/{next(_numbers)}/{part}", rank, ranks)
