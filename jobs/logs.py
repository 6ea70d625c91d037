"""`vjob logs`: the lines of nodes and ranks, once or as they come."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import InputError
from jobs.runs import RunView, view_run
from jobs.slurm import JobState
from jobs.verdict import read_node_names
from varuna_core.records import record as records
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.tail import Follower, clean

POLL_S = 0.5
FILES_PER_S = 500
"""How many files a follower looks at in a second, at most."""
MANY = 16
"""How many names a message lists."""
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
    """(label, file) of every log that is asked for; standard error says so: `n060 err`."""
    for kind in wanted.kinds:
        mark = " err" if kind == "err" else ""
        for rank in wanted.ranks:
            yield f"rank {rank}{mark}", attempt.rank_log(rank, kind)
        if wanted.ranks:
            continue
        for path in sorted(attempt.path.glob(f"*.{kind}")):
            if not wanted.nodes or path.stem in wanted.nodes:
                yield path.stem + mark, path


def check_ranks(run: RunFolder, wanted: Wanted) -> None:
    """InputError for a rank that the run does not have."""
    plan = read_plan(run.plan)
    unknown = [rank for rank in wanted.ranks if plan and not 0 <= rank < plan.world]
    if plan and unknown:
        raise InputError(f"{run.name} has no rank {_list(unknown)}; it has 0 to {plan.world - 1}")


def check_nodes(
    run: RunFolder, attempts: Sequence[AttemptFolder], wanted: Wanted, *, wait: bool
) -> bool:
    """Whether every wanted node is known; InputError where one is not.

    With `wait` only once all nodes have reported: until then a name may still come.
    """
    plan = read_plan(run.plan)
    if not wanted.nodes or plan is None:
        return True
    found = [read_node_names(attempt, plan) for attempt in attempts]
    names = {name for names in found for name in names.values()}
    unknown = [name for name in wanted.nodes if name not in names]
    is_complete = bool(found) and len(found[-1]) == plan.num_nodes
    if not unknown or not names or (wait and not is_complete):
        return not unknown
    has = "it has" if is_complete else "so far it has"
    raise InputError(f"{run.name} has no node {_list(unknown)}; {has} {_list(sorted(names))}")


def _list(items: Sequence[object]) -> str:
    more = f" and {len(items) - MANY} more" if len(items) > MANY else ""
    return ", ".join(map(str, items[:MANY])) + more


def print_logs(
    run: RunFolder, say: Say, wanted: Wanted, *, attempt: int | None, num_lines: int | None
) -> None:
    """Every line there is now."""
    check_ranks(run, wanted)
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
    check_nodes(run, attempts[-1:], wanted, wait=False)
    for label, path in find_files(attempts[-1], wanted):
        _print(Follower(path, start_lines=num_lines), label, say, wanted, final=True)


def follow_run(
    run: RunFolder, say: Say, wanted: Wanted | None = None, *, num_lines: int | None = None
) -> int:
    """Lines as they come, to the run's end; returns the exit code for that end.

    `num_lines` bounds what is shown of files that are there at the start.
    """
    wanted = wanted or Wanted.make()
    check_ranks(run, wanted)
    is_known = not wanted.nodes
    followers: dict[Path, tuple[str, Follower]] = {}
    state, looked = "", -math.inf
    while True:
        if time.monotonic() - looked > LOOK_S:
            view = view_run(run)
            looked = time.monotonic()
            reasons = {info.reason for info in view.infos if info.state is JobState.PENDING} - {""}
            why = f" ({', '.join(sorted(reasons))})" if reasons else ""
            if view.state + why != state:
                state = view.state + why
                say(f"-- {run.name} is {state}")
            over = view.record.state in (records.ENDED, records.REFUSED)
            is_known = is_known or check_nodes(run, run.attempts(), wanted, wait=not over)
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
