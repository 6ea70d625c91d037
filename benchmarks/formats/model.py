"""Types of the corpus: a program's format, its source, and the truth of one generated log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.formats.log import Log


@dataclass(frozen=True, kw_only=True)
class Source:
    """The place where the lines are printed."""

    repository: str
    """On GitHub; `owner/name`."""
    file: str
    where: str
    """The function that prints, or a few characters of the statement."""


@dataclass(frozen=True)
class Count:
    """One way to count the training: the last step, and how many there will be."""

    steps: tuple[int, ...]
    """All that are right: a program that counts from 0 has printed step 40 and done 41."""
    totals: tuple[int | None, ...] = (None,)
    """None where no line tells it."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Everything that the log says of the training, in all readings that are right.

    Where only epochs are printed, an epoch is the step; where not even those are, `steps` is empty.
    A reader may say that it does not know a figure, which is neither right nor wrong.
    """

    steps: tuple[int, ...]
    totals: tuple[int | None, ...] = (None,)
    also: tuple[Count, ...] = ()
    """Other ways to count, such as epochs, updates or images."""
    epochs: tuple[int, ...] = ()
    """The epoch, where lines name it beside steps: a reader that names it alone says no step."""
    losses: tuple[float, ...] = ()
    """Loss of the last training step that has one; empty where the program prints none."""
    val_losses: tuple[float, ...] = ()
    """Loss of the last evaluation."""
    num_epochs: int | None = None
    """Epochs that the training will take, if any line tells."""

    @property
    def counts(self) -> tuple[Count, ...]:
        return (Count(self.steps, self.totals), *self.also)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One program, and a generator of its log in numbers of our own."""

    name: str
    source: Source
    write: Callable[[Log], Truth]

    def make(self, seed: int = 0) -> tuple[Log, Truth]:
        log = Log(f"{self.name} {seed}")
        truth = self.write(log)
        log.close()
        return log, truth


@dataclass(frozen=True, kw_only=True)
class Negative:
    """A program that trains nothing: no line of its log is a step."""

    name: str
    write: Callable[[Log], None]

    def make(self, seed: int = 0) -> Log:
        log = Log(f"{self.name} {seed}")
        self.write(log)
        log.close()
        return log


def program(repository: str, file: str, where: str) -> Callable[[Callable[[Log], Truth]], Format]:
    """Make a Format of the decorated generator, which gives it its name."""

    def make_format(write: Callable[[Log], Truth]) -> Format:
        source = Source(repository=repository, file=file, where=where)
        return Format(name=write.__name__, source=source, write=write)

    return make_format


def no_training(write: Callable[[Log], None]) -> Negative:
    """Make a Negative of the decorated generator, which gives it its name."""
    return Negative(name=write.__name__, write=write)
