"""`vjob logs`: print or follow the lines of nodes and ranks in order of time."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.facts.catalogue.rank_output import PYTHON_EXCEPTION
from varuna_core.records import record as records
from varuna_core.records.exits import RankExit, read_exception, read_exits
from varuna_core.records.files import list_files
from varuna_core.records.logs.rank_output import RankOutput, locate_output
from varuna_core.records.logs.tail import READ_BYTES, Follower, clean, clean_name
from varuna_core.records.logs.traceback import MARK, PREFIX
from varuna_core.records.nodes import read_reports
from varuna_core.records.plan import Plan, read_attempt_plan, read_plan
from varuna_core.records.runfolder import MOST_NODES, AttemptFolder, RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.log_lines.errors import (
    classify_line,
    describe_remedy,
    first_root,
    is_proof,
    list_exceptions,
    merge_same,
)
from vjob.jobs.monitor.log_lines.raised import RaisedLines, may_have_ended
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
from vjob.jobs.monitor.model.snapshot import Line
from vjob.jobs.runs.find import RunView, view_run
from vjob.jobs.runs.outcome import read_node_names
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState

LINES_BEFORE = 12
LINES_AFTER = 5
LONGEST_TRACEBACK = 200
MOST_OF_A_KIND = 100
"""Most lines of one kind that are kept per file: the first ones."""
MOST_OTHERS = 10
MOST_CPU_S = 6.0
"""Most processor time in seconds for the search of an error; a line takes some microseconds."""
CHARS_AT_ONCE = 200_000
CHARS_OF_LINE = 50
"""Fixed cost of reading a line, expressed in characters."""


@dataclass(frozen=True, kw_only=True)
class FirstError:
    """The root error of a failure, with its context."""

    line: Line
    remedy: str
    context: tuple[str, ...]
    """Lines of the same rank around the error, including the error's own line."""
    others: tuple[Line, ...]
    """Other errors in order of time, each once."""
    went_on: str = ""
    """If the error was caught, how its rank continued: `rank 0 continued after it and exited 0`."""


def find_first_error(
    logs: Sequence[Log],
    again: Sequence[Log],
    *,
    exits: Iterable[RankExit] = (),
    attempt: AttemptFolder | None = None,
) -> FirstError | None:
    """Return the root error; None if no line is an error. `again` are the same logs, not read yet.

    `exits` of the attempt's ranks contain exceptions that were not printed.
    """
    left = {one.rank: one for one in exits}
    until = time.process_time() + MOST_CPU_S
    lines = [_doubt(line, left) for log in logs for line in _scan(log, until)]
    lines += list_exceptions(left.values(), lines)
    root = first_root(lines)
    remedy = describe_remedy(root)
    went_on = ""
    if root is None:  # lines that a program printed of errors that it caught: shown, not explained
        root = first_root([replace(line, stream="", doubt="") for line in lines])
        own = left.get(root.rank) if root is not None and root.rank is not None else None
        if own is not None and (own.stopped or own.code == 0):
            how = "was stopped with others" if own.stopped else "exited 0"
            went_on = f"rank {own.rank} continued after it and {how}"
    if root is None:
        return None
    place = [log for log in again if (log.path.name, log.label) == (root.file, root.node)]
    plain = (replace(line, doubt="") for line in lines)
    others = merge_same(line for line in plain if is_proof(line, Proof.CAUSE))
    return FirstError(
        line=root,
        remedy=remedy,
        context=tuple(
            _read_context(place[0].read(final=True), root) if place else _read_stack(attempt, root)
        ),
        others=tuple(line for line in others if line.text != root.text)[:MOST_OTHERS],
        went_on=went_on,
    )


def _doubt(line: Line, exits: Mapping[int, RankExit]) -> Line:
    """Return the line, marked with a doubt if its exception did not end the rank."""
    own = exits.get(line.rank) if line.rank is not None else None
    is_fine = own is not None and (own.stopped or own.code == 0)
    is_cause = not is_fine and may_have_ended(line, own, None)
    return line if is_cause else replace(line, doubt="caught")


def _scan(log: Log, until: float) -> list[Line]:
    """Return lines of known kinds and of exceptions, reading until the process has used `until`
    seconds of processor time."""
    counts: dict[str, int] = {}
    stream, raised = _name_stream(log.path), RaisedLines()
    found: list[Line] = []
    num_chars = 0
    for order, line in enumerate(log.read(final=True)):
        num_chars += CHARS_OF_LINE + len(line.text)
        if num_chars > CHARS_AT_ONCE:
            num_chars = 0
            if time.process_time() > until:
                _tell(f"only {order:,} lines of {log.path.name} are read; -n 99 shows its end")
                break
        is_raised = raised.feed(line.rank, line.text, order)
        kind = classify_line(line.text) or (PYTHON_EXCEPTION if is_raised else None)
        if kind is None:
            continue
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= MOST_OF_A_KIND:
            found.append(
                Line(
                    text=line.text,
                    node=line.label,
                    rank=line.rank,
                    file=log.path.name,
                    kind=kind,
                    at=line.at,
                    order=order,
                    stream=stream,
                )
            )
    return [replace(line, raised=raised.name(line, line.order)) for line in found]


def _name_stream(path: Path) -> str:
    """Return the stream of a node's log; empty if no agent separated the streams."""
    streams = {".out": "stdout", ".err": "stderr"}
    return streams.get(path.suffix, "") if path.with_suffix(".times").exists() else ""


def _read_context(lines: Iterable[LogLine], root: Line) -> Iterator[str]:
    """Yield the error's line with lines of the same rank around it, including the whole
    traceback."""
    before: deque[str] = deque(maxlen=LONGEST_TRACEBACK)
    after = 0
    for order, line in enumerate(lines):
        if line.rank != root.rank:
            continue
        if order < root.order:
            before.append(line.text)
        elif order == root.order:
            yield from _cut_before(list(before))
            yield line.text
        else:
            after += 1
            if after > LINES_AFTER:
                return
            yield line.text


def _read_stack(attempt: AttemptFolder | None, root: Line) -> Iterator[str]:
    """Return the traceback from the rank's error file, ending with the root's line."""
    found = None
    if attempt is not None and root.rank is not None:
        found = read_exception(attempt.error_file(root.rank))
    lines = [clean(line) for line in found.stack[-LONGEST_TRACEBACK:]] if found is not None else []
    return iter(lines if root.text in lines else [*lines, root.text])


def _cut_before(lines: list[str]) -> list[str]:
    """Return the lines from the start of a traceback that is still open at their end; else the last
    few."""
    for at in range(len(lines) - 1, -1, -1):
        if MARK in lines[at]:
            inner = (PREFIX.sub("", line, count=1) for line in lines[at + 1 :])
            is_open = all(line[:1].isspace() or not line for line in inner)
            if is_open:
                return lines[at:]
            break
    return lines[-LINES_BEFORE:]


def render(found: FirstError) -> Iterator[str]:
    line = found.line
    who = f"rank {line.rank} on {line.node}" if line.rank is not None else line.node
    more = f", and {line.num_same - 1} more like it" if line.num_same > 1 else ""
    place = ", ".join(dict.fromkeys((who, clean_name(line.file))))  # a batch script is its file
    yield f"{place}{more}"
    for text in found.context:
        yield f"{'>' if text == line.text else ' '} {text}"
    if found.went_on:
        yield f"caught: {found.went_on}"
    if found.remedy and "--errors" not in found.remedy:  # that is what this is
        yield f"what to do: {found.remedy}"
    if found.others:
        yield "later, or elsewhere:"
    for other in found.others:
        where = f"rank {other.rank} on {other.node}" if other.rank is not None else other.node
        yield f"  {where}: {f'x{other.num_same} ' if other.num_same > 1 else ''}{other.text}"


def describe_error(found: FirstError | None) -> dict[str, Any]:
    """Return the root error in JSON form; `error` is None if there is none."""

    def place(line: Line) -> dict[str, Any]:
        return {"node": line.node, "rank": line.rank, "file": line.file, "text": line.text}

    if found is None:
        return {"format": 1, "error": None}
    error = {
        **place(found.line),
        "num_same": found.line.num_same,
        "remedy": found.remedy,
        "went_on": found.went_on,
        "context": list(found.context),
        "others": [place(line) for line in found.others],
    }
    return {"format": 1, "error": error}


POLL_S = 0.5
FILES_PER_S = 500
"""Most files that a follower polls per second."""
MANY = 16
"""Most names that a message lists."""
LARGEST_PIECES = 256 * 1024 * 1024
SMALLEST_PIECE = 32 * 1024
"""LARGEST_PIECES bytes are read at a time from all files together, at least this many from each."""
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

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    pattern: re.Pattern[str] | None
    kinds: tuple[str, ...]
    raw: bool
    """Print file after file, without merging equal lines of ranks."""
    paint: Paint
    with_times: bool = False
    since: float | None = None
    until: float | None = None
    as_json: bool = False
    """Print each line of each rank as a JSON object."""
    bare: bool = False
    """Print only the text, as the rank wrote it."""

    @classmethod
    def make(
        cls,
        *,
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        pattern: str | None = None,
        only_err: bool = False,
        raw: bool = False,
        paint: Paint = keep_plain,
        with_times: bool = False,
        since: float | None = None,
        until: float | None = None,
        as_json: bool = False,
        bare: bool = False,
    ) -> LineFilter:
        if since is not None and until is not None and since > until:
            raise InputError("--since is later than --until")
        try:
            compiled = re.compile(pattern) if pattern else None
        except re.error as error:
            raise InputError(f"--grep {pattern!r} is no regular expression: {error}") from None
        kinds = ("err",) if only_err else ("out", "err")
        return cls(
            nodes=nodes,
            ranks=ranks,
            pattern=compiled,
            kinds=kinds,
            raw=raw,
            paint=paint,
            with_times=with_times,
            since=since,
            until=until,
            as_json=as_json,
            bare=bare,
        )

    def takes(self, text: str) -> bool:
        return self.pattern is None or self.pattern.search(text) is not None

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
                _tell(
                    f"only {MOST_NODES:,} logs of {attempt.path.name} are read; --node names others"
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
def _tell(what: str) -> None:
    """Print once a note on what is skipped."""
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


def print_errors(run: RunFolder, say: Say, wanted: LineFilter, *, attempt: int | None) -> bool:
    """Print the first root error with its context; return True if there was one."""
    attempts = choose_attempts(run, attempt)
    check_ranks(run, wanted)
    found = None
    if attempts:
        check_nodes(run, attempts[-1:], wanted, wait=False)
        last = attempts[-1]
        exits = (
            one
            for one in read_exits(last, sys.maxsize).values()
            if (not wanted.ranks or one.rank in wanted.ranks)
            and (not wanted.nodes or one.node in wanted.nodes)
        )
        logs, again = (find_logs(last, wanted) for _ in range(2))
        found = find_first_error(logs, again, exits=exits, attempt=last)
    if found is None and not wanted.nodes and not wanted.ranks:
        batch = run.batch_logs()
        found = find_first_error(*([Log(path, path.name) for path in batch] for _ in range(2)))
    if wanted.as_json:
        say(json.dumps(describe_error(found), indent=1))
        return found is not None
    if found is None:
        say(f"no line of {run.name} is known as an error; `vjob status` shows its state")
        return False
    for text in render(found):
        say(text)
    return True


def _choose(log: Log, wanted: LineFilter, *, final: bool) -> Iterator[LogLine]:
    return wanted.choose(log.read(final=final))


def _read_attempt_plan(run: RunFolder) -> Plan | None:
    """Read the plan of the newest attempt; None before the first attempt."""
    attempts = run.attempts()
    return read_attempt_plan(run, attempts[-1].number) if attempts else None


class RunLines:
    """Follower of a run: lines of ranks go to `show`, everything else to `say`."""

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
    return follow_lines(RunLines(run, say, wanted or LineFilter.make(), num_lines=num_lines))


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
                    say(f"-- {run.name} is {state}")
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
