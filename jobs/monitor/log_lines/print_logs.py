"""`vjob logs`: print or follow the lines of nodes and ranks in order of time."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records import record as records
from varuna_core.records.files import list_files
from varuna_core.records.logs.rank_output import RankOutput, locate_output
from varuna_core.records.logs.tail import READ_BYTES, Follower, clean, clean_name
from varuna_core.records.nodes import read_reports
from varuna_core.records.plan import Plan, read_attempt_plan, read_plan
from varuna_core.records.runfolder import MOST_NODES, AttemptFolder, RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.log_lines.stream import (
    Collapser,
    EqualLines,
    Log,
    LogLine,
    Paint,
    collapse,
    keep_plain,
    merge_lines,
)
from vjob.jobs.runs.find import RunView, view_run
from vjob.jobs.runs.outcome import read_node_names
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.schedulers.reasons import is_permanent

POLL_S = 0.5
FILES_PER_S = 500
"""Most files that a follower polls per second."""
MANY = 16
"""Most names that a message lists."""
LARGEST_PIECES = 256 * 1024 * 1024
SMALLEST_PIECE = 32 * 1024
"""Least number of bytes that are read at a time from each file, even if all files together then
exceed LARGEST_PIECES."""
LOOK_S = 3.0
"""Seconds between two polls of the scheduler while following."""
POLL_HERE_S, LOOK_HERE_S = 0.1, 0.5
"""Seconds between polls of the files and of the scheduler for a run without a queue."""
Say = Callable[[str], object]
Show = Callable[[str, bool], object]
"""Function that prints a rank's line; its second argument is True for standard error."""


@dataclass(frozen=True, kw_only=True)
class LineFilter:
    """Selection and format of the lines that the user requested."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pattern: str | None = None
    """Regular expression that a line contains."""
    only_err: bool = False
    raw: bool = False
    """Print file after file, without merging equal lines of ranks."""
    paint: Paint = keep_plain
    with_times: bool = False
    since: float | None = None
    until: float | None = None
    as_json: bool = False
    """Print each line of each rank as a JSON object."""
    bare: bool = False
    """Print only the text, as the rank wrote it."""

    def __post_init__(self) -> None:
        if self.since is not None and self.until is not None and self.since > self.until:
            raise InputError("--since is later than --until")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise InputError(f"--grep {self.pattern!r} is not a valid pattern: {error}") from None

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("err",) if self.only_err else ("out", "err")

    def takes(self, text: str) -> bool:
        return not self.pattern or re.search(self.pattern, text) is not None

    def choose(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the requested lines of one file; a line without a time takes that of the line
        before."""
        latest: float | None = None
        for line in lines:
            latest = line.at if line.at is not None else latest
            if self._is_in_time(latest) and self.takes(line.text):
                yield line

    def _is_in_time(self, at: float | None) -> bool:
        if self.since is None and self.until is None:
            return True
        return at is not None and (self.since or at) <= at <= (self.until or at)

    def render(self, line: LogLine) -> str:
        """Render one line of one rank in the requested format."""
        if self.bare:
            return line.text
        if not self.as_json:
            return self._render_time(line) + line.render(self.paint)
        value = {
            "format": 1,
            "time": None if line.at is None else round(line.at, 3),
            "node": line.label,
            "rank": line.rank,
            "is_err": line.is_err,
            "text": line.text,
        }
        return json.dumps(value, ensure_ascii=False)

    def render_group(self, group: EqualLines, world: int | None) -> str:
        """Render equal lines of several ranks, with the time of the first line."""
        return self._render_time(group.first) + group.render(world, self.paint)

    def _render_time(self, line: LogLine) -> str:
        if not self.with_times:
            return ""
        if line.at is None:
            return " " * 20
        return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(line.at))


def find_logs(
    attempt: AttemptFolder, wanted: LineFilter, num_lines: int | None = None
) -> list[Log]:
    """Return the requested logs of an attempt that exist."""
    reports = read_reports(attempt).values() if not wanted.raw else ()
    offsets = {report.host: report.clock_offset_s or 0.0 for report in reports}
    found: list[tuple[str, RankOutput | None, Path]] = []
    run = RunFolder(attempt.path.parent)
    plan = read_attempt_plan(run, attempt.number) if wanted.ranks else None
    for kind in wanted.kinds:
        outputs = [locate_output(attempt, plan, rank, kind) for rank in wanted.ranks]
        found += [(f"rank {output.rank}", output, output.path) for output in outputs]
        if not wanted.ranks:
            paths = [
                path
                for path in list_files(attempt.path, f"*.{kind}")
                if not wanted.nodes or path.stem in wanted.nodes
            ]
            if len(paths) > MOST_NODES:
                tell_once(
                    f"only {MOST_NODES:,} logs of {attempt.path.name} are read; choose with --node"
                )
            found += [(path.stem, None, path) for path in paths[:MOST_NODES]]
    piece = max(SMALLEST_PIECE, min(READ_BYTES, LARGEST_PIECES // max(1, len(found))))
    return [
        Log(
            path,
            clean_name(label),
            rank=output.rank if output is not None and output.is_own else None,
            only=output.rank if output is not None and not output.is_own else None,
            num_lines=num_lines,
            clock_offset_s=offsets.get(path.stem, 0.0),
            read_bytes=piece,
        )
        for label, output, path in found
    ]


@functools.lru_cache(maxsize=64)
def tell_once(what: str) -> None:
    """Print a note, only once, that something is skipped: `what` is the text."""
    print(clean(what), file=sys.stderr, flush=True)


def check_ranks(run: RunFolder, wanted: LineFilter) -> None:
    """Raise InputError for a rank that the run does not have."""
    plan = read_plan(run.plan) if wanted.ranks else None
    unknown = [rank for rank in wanted.ranks if plan and not 0 <= rank < plan.world]
    if plan and unknown:
        raise InputError(f"{run.name} has no rank {_list(unknown)}, only 0 to {plan.world - 1}")


def check_nodes(
    run: RunFolder, attempts: Sequence[AttemptFolder], wanted: LineFilter, *, wait: bool
) -> bool:
    """Return True if every requested node is known; raise InputError for an unknown node.

    With `wait`, raise only once all nodes have reported, since until then a node may still appear.
    """
    plan = read_plan(run.plan) if wanted.nodes else None
    if plan is None:
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


def choose_attempts(run: RunFolder, number: int | None) -> list[AttemptFolder]:
    """Return all attempts, or only the requested one."""
    attempts = run.attempts()
    if number is None:
        return attempts
    found = [attempt for attempt in attempts if attempt.number == number]
    if not found:
        raise InputError(f"{run.name} has no attempt {number}")
    return found


def print_logs(
    run: RunFolder, say: Say, wanted: LineFilter, *, attempt: int | None, num_lines: int | None
) -> None:
    """Print all present lines of the run."""
    check_ranks(run, wanted)
    attempts = choose_attempts(run, attempt)
    if not attempts:
        say(f"{run.name} has not started any rank yet")
        for path in run.batch_logs():
            _print_file(path, "", say, num_lines)
        return
    check_nodes(run, attempts[-1:], wanted, wait=False)
    logs = find_logs(attempts[-1], wanted, num_lines)
    lines = [_choose(log, wanted, final=True) for log in logs]
    if wanted.raw or wanted.as_json:
        found = itertools.chain.from_iterable(lines) if wanted.raw else merge_lines(lines)
        for line in found:
            say(wanted.render(line))
        return
    plan = _read_attempt_plan(run)
    world = None if plan is None else plan.world
    for group in collapse(merge_lines(lines)):
        say(wanted.render_group(group, world))


def _choose(log: Log, wanted: LineFilter, *, final: bool) -> Iterator[LogLine]:
    return wanted.choose(log.read(final=final))


def _read_attempt_plan(run: RunFolder) -> Plan | None:
    """Read the plan of the newest attempt; None before the first attempt."""
    attempts = run.attempts()
    return read_attempt_plan(run, attempts[-1].number) if attempts else None


class RunLines:
    """Follows the logs of a run while it is running: `show` prints lines of ranks, and `say` prints
    everything else, such as the begin of another attempt."""

    def __init__(
        self,
        run: RunFolder,
        say: Say,
        wanted: LineFilter,
        *,
        num_lines: int | None = None,
        show: Show | None = None,
    ) -> None:
        """`num_lines` limits what is shown of files that exist at the start."""
        self.run, self.say, self.wanted = run, say, wanted
        self.logs: dict[tuple[Path, str], Log] = {}
        self._show: Show = show or (lambda text, is_err: say(text))
        self._num_lines = num_lines
        self._collapser = Collapser()
        self._plan: Plan | None = None

    def print_new(self, *, final: bool) -> None:
        """Print what was written since the last call; with `final` also an unfinished last line."""
        wanted, run = self.wanted, self.run
        for attempt in run.attempts():
            for log in find_logs(attempt, wanted, self._num_lines):
                self.logs.setdefault((log.path, log.label), log)
        self._num_lines = None
        if self._plan is None or self._plan.morph:  # attempts may come, of fewer ranks
            self._plan = _read_attempt_plan(run)
        world = None if self._plan is None else self._plan.world
        num_new = 0
        for line in merge_lines(_choose(log, wanted, final=final) for log in self.logs.values()):
            num_new += 1
            if wanted.raw or wanted.as_json or wanted.bare:
                self._show(wanted.render(line), line.is_err)
                continue
            self._print_groups(self._collapser.take(line.at), world)
            self._collapser.add(line)
        if final or not num_new:  # nobody prints: nothing comes that a held line could wait for
            self._print_groups(self._collapser.take_all(), world)

    def _print_groups(self, groups: Iterable[EqualLines], world: int | None) -> None:
        for group in groups:
            self._show(self.wanted.render_group(group, world), group.first.is_err)


def follow_run(
    run: RunFolder, say: Say, wanted: LineFilter | None = None, *, num_lines: int | None = None
) -> int:
    """Print new lines until the run ends; return the exit code for that end."""
    return follow_lines(RunLines(run, say, wanted or LineFilter(), num_lines=num_lines))


def follow_lines(lines: RunLines, *, with_states: bool = True) -> int:
    """Print new lines until the run ends, like `follow_run`; `with_states` also prints each change
    of the job's state."""
    run, say, wanted = lines.run, lines.say, lines.wanted
    check_ranks(run, wanted)
    is_known = not wanted.nodes
    state, looked = "", -math.inf
    look_s, poll_s = LOOK_S, POLL_S
    while True:
        if time.monotonic() - looked > look_s:
            view = view_run(run)
            if not schedulers.has_queue(view.record.scheduler):  # a question costs nothing
                look_s, poll_s = LOOK_HERE_S, POLL_HERE_S
            looked = time.monotonic()
            reasons = {
                info.reason_text for info in view.infos if info.state is JobState.PENDING
            } - {""}
            why = f" ({', '.join(sorted(reasons))})" if reasons else ""
            if view.state + why != state:
                state = view.state + why
                if with_states:
                    never = any(map(is_permanent, view.infos))
                    waits = (
                        ", but the job cannot start; waiting for the run to end" if never else ""
                    )
                    say(f"-- {run.name} is {state}{waits}")
            over = view.record.state in (records.ENDED, records.REFUSED)
            is_known = is_known or check_nodes(run, run.attempts(), wanted, wait=not over)
        lines.print_new(final=over)
        if over:
            return finish(view, say)
        time.sleep(max(poll_s, len(lines.logs) / FILES_PER_S))


def finish(view: RunView, say: Say) -> int:
    """Print how a run ended; return 0 if it completed, else 1."""
    outcome, message = view.record.outcome, clean(view.record.message)
    if view.record.verdict == "COMPLETED":
        say(f"-- done: {message}")
        return 0
    say(f"-- {view.state}: {message}")
    if outcome is None or outcome.culprit_rank is None:
        for path in view.run.batch_logs():
            _print_file(path, path.name, say)
    say(f"-- all files: {view.run.path}")
    return 1


def _print_file(path: Path, label: str, say: Say, num_lines: int | None = None) -> None:
    for line in Follower(path, start_lines=num_lines).read(final=True):
        say(f"{label} | {line}" if label else line)
