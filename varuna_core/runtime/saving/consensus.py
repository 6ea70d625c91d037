"""Make all ranks agree on rare decisions outside of steps, through their process group's store.

This works on any hardware, since no collectives are needed. Rank 0 collects and decides; an error
of any rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from varuna_core.checkpoint.format import errors
from varuna_core.checkpoint.format.errors import CheckpointError, build_error
from varuna_core.runtime.comm.failure import FailureBoard, RankFailed

GLANCE = timedelta(seconds=2)
"""Time between checks for a failed rank."""

PARTING = timedelta(minutes=10)


class Consensus:
    """One rank's side of the decisions. Every rank must make the same calls in the same order."""

    def __init__(self, board: FailureBoard, name: str, find_lost_peer: Callable[[], str]) -> None:
        """`find_lost_peer` returns which rank is gone, or an empty string."""
        self._board, self._name, self._find_lost_peer = board, name, find_lost_peer
        self._store: Any = board.store
        alone = self._store is None
        self.rank, self.world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._count = 0

    def decide(self, make: Callable[[], str]) -> str:
        """Return on every rank the text that rank 0 makes."""
        return self._exchange("", lambda words: make(), listen=False)

    def settle(self, word: str, decide: Callable[[list[str]], str]) -> str:
        """Return on every rank the text that `decide` computes on rank 0 from the `word` of each
        rank."""
        return self._exchange(word, decide)

    def any_rank(self, wanted: bool) -> bool:
        """Return True on all ranks if `wanted` is true on any rank."""
        return self._exchange("yes" if wanted else "", lambda words: max(words)) == "yes"

    def run_on_all(self, work: Callable[[], Any], last: Callable[[], Any] = lambda: None) -> None:
        """Run `work` on every rank, then `last` on rank 0; raise the first error on all ranks."""
        mine = None
        try:
            work()
        except Exception as error:
            mine = error
        word = "" if mine is None else _format_error(mine, f"{self._name}: ")

        def decide(words: list[str]) -> str:
            for said in filter(None, words):
                raise _parse_error(said)
            last()
            return ""

        try:
            self._exchange(word, decide)
        except CheckpointError as error:
            raise error from mine

    def leave(self) -> None:
        """Make the last call; rank 0, whose process may host the store, leaves last."""
        self._count += 1
        if self.rank:
            self._store.set(self._key(str(self.rank)), "")
        elif self.world_size > 1:
            keys = [self._key(str(rank)) for rank in range(1, self.world_size)]
            with contextlib.suppress(RuntimeError):  # whoever has not come by then has gone
                self._store.wait(keys, PARTING)

    def _exchange(self, word: str, decide: Callable[[list[str]], str], listen: bool = True) -> str:
        self._count += 1
        if self.rank:
            if listen:
                self._store.set(self._key(str(self.rank)), word)
            answer = self._read(self._key("answer"))
        else:
            others = range(1, self.world_size if listen else 1)
            try:
                answer = "=" + decide([word, *(self._read(self._key(str(r))) for r in others)])
            except RankFailed:
                raise  # the others hear of it from the board
            except Exception as error:
                answer = _format_error(error)
            if self._store is not None:
                self._store.set(self._key("answer"), answer)
        if answer.startswith("="):
            return answer[1:]
        raise _parse_error(answer)

    def _key(self, what: str) -> str:
        return f"{self._board.key}/words/{self._count}/{what}"

    def _read(self, key: str) -> str:
        first = ""
        while True:
            try:
                self._store.wait([key], GLANCE)
                return bytes(self._store.get(key)).decode()
            except RuntimeError:  # each kind of store has its own (torch 2.13)
                if self._store.check([key]):
                    continue
                if first:  # and the word had not come before it
                    raise RankFailed(f"{self._name} stops: {first}") from None
                lost = self._find_lost_peer()
                first = self._board.write(f"{self._name} misses {lost}") if lost else ""
                first = first or self._board.read()


def _format_error(error: Exception, who: str = "") -> str:
    if isinstance(error, CheckpointError):
        return json.dumps([type(error).__name__, f"{who}{error}"])
    made = build_error(error, f"{who}{type(error).__name__}: {error}")
    return json.dumps([type(made).__name__, str(made)])


def _parse_error(said: str) -> CheckpointError:
    kind, text = json.loads(said)
    made: CheckpointError = getattr(errors, kind, CheckpointError)(text)
    return made
