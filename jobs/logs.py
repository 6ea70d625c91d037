"""`vjob logs`: the lines of nodes and ranks, once or as they come."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import InputError
from jobs.runs import RunView, view_run
from jobs.slurm import JobState
from jobs.tail import Follower, clean
from varuna_core.records import record as records
from varuna_core.records.runfolder import AttemptFolder, RunFolder

POLL_S = 0.5
FILES_PER_S = 500
"""How many files a follower looks at in a second, at most."""
LOOK_S = 3.0
"""Between two questions to the scheduler while following."""

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which lines the user asked for."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    pattern: re.Pattern[str] | None
    kinds: tuple[str, ...]

    @classmethod
    def make(
        cls,
        *,
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        pattern: str | None = None,
        only_err: bool = False,
    ) -> Wanted:
        try:
            compiled = re.compile(pattern) if pattern else None
        except re.error as error:
            raise InputError(f"--grep {pattern!r} is no regular expression: {error}") from None
        kinds = ("err",) if only_err else ("out", "err")
        return cls(nodes=nodes, ranks=ranks, pattern=compiled, kinds=kinds)


def find_files(attempt: AttemptFolder, wanted: Wanted) -> Iterator[tuple[str, Path]]:
    """(label, file) of every log that is asked for."""
    if wanted.ranks:
        for rank in wanted.ranks:
            for kind in wanted.kinds:
                yield f"rank {rank}", attempt.rank_log(rank, kind)
        return
    for kind in wanted.kinds:
        for path in sorted(attempt.path.glob(f"*.{kind}")):
            if not wanted.nodes or path.stem in wanted.nodes:
                yield path.stem, path


def print_logs(
    run: RunFolder, say: Say, wanted: Wanted, *, attempt: int | None, num_lines: int | None
) -> None:
    """Every line there is now."""
    attempts = run.attempts()
    if attempt is not None:
        attempts = [found for found in attempts if found.number == attempt]
        if not attempts:
            raise InputError(f"{run.name} has no attempt {attempt}")
    if not attempts:
        say(f"{run.name} has not started any rank yet")
        for path in sorted(run.path.glob("scheduler*.out")):
            _print(Follower(path, start_lines=num_lines), "", say, wanted, final=True)
        return
    for label, path in find_files(attempts[-1], wanted):
        _print(Follower(path, start_lines=num_lines), label, say, wanted, final=True)


def follow_run(
    run: RunFolder, say: Say, wanted: Wanted | None = None, *, num_lines: int | None = None
) -> int:
    """Lines as they come, to the run's end; returns the exit code for that end.

    `num_lines` bounds what is shown of files that are there at the start.
    """
    wanted = wanted or Wanted.make()
    followers: dict[Path, tuple[str, Follower]] = {}
    state, looked = "", -math.inf
    while True:
        if time.monotonic() - looked > LOOK_S:
            view = view_run(run)
            looked = time.monotonic()
            reasons = [info.reason for info in view.infos if info.state is JobState.PENDING]
            why = f" ({', '.join(filter(None, reasons))})" if any(reasons) else ""
            if view.state + why != state:
                state = view.state + why
                say(f"-- {run.name} is {state}")
        over = view.record.state in (records.ENDED, records.REFUSED)
        for attempt in run.attempts():
            for label, path in find_files(attempt, wanted):
                if path not in followers:
                    followers[path] = (label, Follower(path, start_lines=num_lines))
        num_lines = None
        for label, follower in followers.values():
            _print(follower, label, say, wanted, final=over)
        if over:
            return finish(view, say)
        time.sleep(max(POLL_S, len(followers) / FILES_PER_S))


def finish(view: RunView, say: Say) -> int:
    """The last word on an ended run."""
    if view.record.verdict == "COMPLETED":
        say(f"-- done: {clean(view.record.message)}")
        return 0
    say(f"-- {view.state}: {clean(view.record.message)}")
    outcome = view.record.outcome
    if outcome is None or outcome.culprit_rank is None:
        for path in sorted(view.run.path.glob("scheduler*.out")):
            _print(Follower(path), path.name, say, Wanted.make(), final=True)
    say(f"-- all files: {view.run.path}")
    return 1


def _print(follower: Follower, label: str, say: Say, wanted: Wanted, *, final: bool) -> None:
    for line in follower.read(final=final):
        if wanted.pattern is None or wanted.pattern.search(line):
            say(f"{label} | {line}" if label else line)
