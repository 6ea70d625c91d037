"""A file system call of one rank fails while the others stand still at theirs: nothing is lost.

Three ranks save as threads, and a turn is one call that changes or lists the folder. Which rank
has the next turn, and which call fails with which error, is the test's choice.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.checkpoint_world import IN_MEMORY, Job, expect_state, make_part
from varuna_core.checkpoint.format.errors import NotSaved
from varuna_core.checkpoint.store import writer as writer_module
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import list_complete, list_wrong_sizes
from varuna_core.checkpoint.store.writer import CheckpointWriter

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.listdir")
FAULTS = 3
"""Draws for each call; VJOB_FAULTS in the environment says more."""


class Inline:
    """An executor whose work is done at once, by the thread that asks for it."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given))
        except BaseException as error:
            done.set_exception(error)
        return done


@dataclass
class Rank:
    """One rank's thread, which runs for as many calls as it is given."""

    number: int
    work: Callable[[], None]
    fails_at: int = -1
    code: int = 0
    lost_answer: bool = False
    """A rename or link that fails has done its work, as where a server's answer is lost."""

    is_late: bool = False
    calls: int = 0
    ended: bool = False
    error: Exception | None = None
    _left: float = 0
    _go: threading.Event = field(default_factory=threading.Event)
    _stands: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._stands.wait(60)

    def _run(self) -> None:
        RANK.one = self
        self._pause()
        try:
            self.work()
        except Exception as error:
            self.error = error
        self.ended = True
        self._stands.set()

    def _pause(self) -> None:
        self._go.clear()
        self._stands.set()
        assert self._go.wait(60)

    def advance(self, calls: float) -> None:
        """Let it make so many calls, or come to its end."""
        if self.ended or not calls:
            return
        self._left = calls
        self._stands.clear()
        self._go.set()
        assert self._stands.wait(60), "a rank hangs"

    def enter(self, what: str) -> None:
        """One call comes."""
        if self._left <= 0:
            self._pause()
        self._left -= 1
        self.calls += 1
        self.is_late = self.calls == self.fails_at and self.lost_answer
        if self.calls == self.fails_at and not (self.is_late and what in ("os.rename", "os.link")):
            raise OSError(self.code, os.strerror(self.code), what)


RANK = threading.local()


def hear(event: str, given: tuple[Any, ...]) -> None:
    rank = getattr(RANK, "one", None)
    if rank is not None and event in EVENTS:
        rank.enter(event)


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(hear)  # for good; without a rank in the thread it does nothing


@contextmanager
def watched() -> Iterator[None]:
    """Writes and syncs too, which raise no event."""
    kept = os.write, os.fsync, writer_module.ThreadPoolExecutor

    def write(fd: int, data: Any) -> int:
        hear("open", ())
        return kept[0](fd, data)

    def fsync(fd: Any) -> None:
        hear("open", ())
        kept[1](fd)

    def lose_answer(call: Callable[..., None]) -> Callable[..., None]:
        def made(*given: Any, **named: Any) -> None:
            call(*given, **named)
            rank = getattr(RANK, "one", None)
            if rank is not None and rank.is_late:
                rank.is_late = False
                raise OSError(rank.code, os.strerror(rank.code), given[0])

        return made

    moves = os.rename, os.replace, os.link
    os.rename, os.replace, os.link = map(lose_answer, moves)  # type: ignore[assignment]
    os.write, os.fsync = write, fsync
    writer_module.ThreadPoolExecutor = Inline  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        os.write, os.fsync, writer_module.ThreadPoolExecutor = kept
        os.rename, os.replace, os.link = moves


@pytest.fixture
def store() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
    yield folder
    shutil.rmtree(folder)


JOB = Job(store="", job="a", iterations=[], stages=3)


def open_writers(store: Path) -> list[CheckpointWriter]:
    shutil.rmtree(store)
    writers = [CheckpointWriter(store, job="a", rank=r, world_size=3, keep=1) for r in range(3)]
    for rank, writer in enumerate(writers):
        writer.save(make_part(JOB, rank, 1))
    return writers


def expect_loadable(store: Path, told: str) -> None:
    found = list_complete(store)
    assert found, f"{told}: nothing complete is left"
    assert not list_wrong_sizes(found[-1].path), told


@dataclass(frozen=True)
class Outcome:
    """What came of one save with a fault."""

    hit: bool
    newest: int
    """The newest complete checkpoint after it: 1 was there before, 2 is the save's own."""
    errors: tuple[str, ...]
    """Of the ranks whose save raised one."""


def run(
    store: Path,
    faulty: int,
    fails_at: int,
    code: int,
    pauses: tuple[int, int],
    turns: list[int],
    *,
    lost_answer: bool = False,
) -> Outcome:
    """One save with a fault. `turns` are calls of each rank in a circle,
    after the others were brought to their `pauses`."""
    told = f"rank {faulty} call {fails_at} {errno.errorcode[code]}, {pauses}, {turns}"
    writers = open_writers(store)
    ranks = [
        Rank(r, lambda r=r: writers[r].save(make_part(JOB, r, 2)) and None)  # type: ignore[misc]
        for r in range(3)
    ]
    ranks[faulty].fails_at, ranks[faulty].code = fails_at, code
    ranks[faulty].lost_answer = lost_answer
    others = [ranks[r] for r in range(3) if r != faulty]
    with watched():
        for rank in ranks:
            rank.start()
        for rank, calls in zip(others, pauses, strict=True):
            rank.advance(calls)
        ranks[faulty].advance(fails_at)
        for rank, calls in zip(itertools.cycle([*others, ranks[faulty]]), turns):
            rank.advance(calls)
            expect_loadable(store, told)
        for rank in [*others, ranks[faulty]]:
            rank.advance(float("inf"))
            expect_loadable(store, told)
        for rank in ranks:
            rank.thread.join(60)
            assert rank.ended, told
            # Training goes on: a save is skipped for these alone.
            assert rank.error is None or isinstance(rank.error, NotSaved), (told, rank.error)
    newest = list_complete(store)[-1].iteration
    for writer in writers:
        writer.save(make_part(JOB, writer.rank, 3))
    for writer in writers:
        writer.close()
    with CheckpointReader.open(store) as reader:
        assert reader.iteration == 3, told
        expect_state(reader)
    assert sorted(p.name for p in store.iterdir()) == ["owner.json", "varuna_ckpt_3"], told
    errors = tuple(type(rank.error).__name__ for rank in ranks if rank.error is not None)
    return Outcome(ranks[faulty].calls >= fails_at, newest, errors)


@pytest.mark.parametrize("faulty", range(3))
def test_a_call_that_fails_costs_nothing_that_was_complete(store: Path, faulty: int) -> None:
    """At every call, with drawn pauses of the others and drawn turns after it."""
    draw = random.Random(faulty)
    for number in itertools.count(1):
        hit = False
        for _ in range(int(os.environ.get("VJOB_FAULTS", FAULTS))):
            pauses = draw.randrange(60), draw.randrange(60)
            turns = [draw.choice((1, 2, 3, 5, 8, 30)) for _ in range(draw.randrange(12))]
            code, lost = draw.choice(ERRORS), draw.random() < 0.3
            hit |= run(store, faulty, number, code, pauses, turns, lost_answer=lost).hit
        if not hit:
            assert number > 10
            return
