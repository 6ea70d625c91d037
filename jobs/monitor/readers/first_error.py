"""`vjob logs --errors`: the verdict on a job, and the line with which its failure began.

The verdict is that of `vjob status`. The rules that make it also weigh the lines: only the line
that the verdict quotes is marked as the cause.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from varuna_core.facts.catalogue.known_line import Proof, Scope
from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, PYTHON_EXCEPTION
from varuna_core.facts.cause import EndCause
from varuna_core.facts.finding import dump_value
from varuna_core.facts.remedy import Target
from varuna_core.facts.sentences import find_last_line
from varuna_core.records.exits import read_exception, read_reason
from varuna_core.records.logs.tail import clean, clean_name
from varuna_core.records.logs.traceback import MARK, PREFIX
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import ENDED
from varuna_core.records.runfolder import OPENED, AttemptFolder, RunFolder
from vjob.jobs.monitor.log_lines.errors import (
    classify_line,
    find_row,
    first_root,
    is_proof,
    list_exceptions,
    merge_same,
    name_message,
)
from vjob.jobs.monitor.log_lines.job_logs import find_job_logs
from vjob.jobs.monitor.log_lines.print_logs import (
    LineFilter,
    Say,
    check_nodes,
    check_ranks,
    choose_attempts,
    find_logs,
    tell_once,
)
from vjob.jobs.monitor.log_lines.raised import RaisedLines
from vjob.jobs.monitor.log_lines.stream import Log, LogLine
from vjob.jobs.monitor.model.snapshot import Health, Line, Scheduler, Snapshot, Verdict
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.readers.slurm_job import SlurmJobReader
from vjob.jobs.monitor.rules.doubts import Doubt, weigh_lines
from vjob.jobs.monitor.rules.ended import choose_first_failed
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.monitor.rules.words import render_advice
from vjob.jobs.schedulers.foreign_job import ForeignJob

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
NOT_THE_CAUSE: Mapping[str, str] = {
    Doubt.CAUGHT.value: "caught: this error did not end its process",
    Doubt.OTHER_RANK.value: "not the cause: the line's rank did not fail, or failed after another",
    Doubt.OLD.value: "not the cause: the line was written long before the end",
    Doubt.WENT_ON.value: "not the cause: steps were done after this line",
}
"""Why a line is shown without the mark of the cause, keyed by its doubt."""


@dataclass(frozen=True, kw_only=True)
class FirstError:
    """The line with which a failure began, or else the first error, with its context."""

    line: Line
    is_cause: bool
    """True if the verdict quotes the line as the cause of the end."""
    context: tuple[str, ...]
    """Lines of the same rank around the error, including the error's own line."""
    others: tuple[Line, ...]
    """Other errors in order of time, each once."""


def print_errors(run: RunFolder, say: Say, wanted: LineFilter, *, attempt: int | None) -> None:
    """Print the verdict on a run, and its first error with its context."""
    attempts = choose_attempts(run, attempt)
    last = attempts[-1] if attempts else None
    check_ranks(run, wanted)
    if last is not None:
        check_nodes(run, attempts[-1:], wanted, wait=False)
    snapshot, verdict = judge_attempt(run, last)

    def find() -> list[Log]:
        is_whole = last is None or last.number == run.attempts()[-1].number
        batch = run.batch_logs() if is_whole and not (wanted.nodes or wanted.ranks) else ()
        found = [] if last is None else find_logs(last, wanted)
        return [*found, *(Log(path, path.name) for path in batch)]

    found = find_first_error(snapshot, verdict, find, wanted=wanted, attempt=last)
    _print(found, verdict, say, wanted)


def print_job_errors(job: ForeignJob, say: Say, wanted: LineFilter) -> None:
    """Print the verdict on a job that vjob did not submit, and its first error."""
    snapshot, verdict = JudgedReader(SlurmJobReader(job, num_lines=0)).read()
    first = choose_first_failed(snapshot)
    if verdict.health is Health.DEAD and first is not snapshot and not wanted.nodes:
        wanted = replace(wanted, nodes=(first.scheduler.jobs[0].id,))
    found = find_first_error(snapshot, verdict, partial(find_job_logs, job, wanted), wanted=wanted)
    _print(found, verdict, say, wanted)


def judge_attempt(run: RunFolder, attempt: AttemptFolder | None) -> tuple[Snapshot, Verdict]:
    """Judge the run; with an earlier attempt, judge that one by its own files."""
    snapshot, verdict = JudgedReader(RunReader(run, num_lines=0)).read()
    if attempt is None or attempt.number == snapshot.attempt:
        return snapshot, verdict
    view = AttemptReader(attempt, read_attempt_plan(run, attempt.number), 0).read()
    earlier = replace(
        snapshot,
        **vars(view),
        attempt=attempt.number,
        scheduler=Scheduler(name=snapshot.scheduler.name),
        record_state=ENDED,
        record_verdict="",
        end=None,
        message=read_reason(attempt) or "",
    )
    return earlier, judge(earlier)


def find_first_error(
    snapshot: Snapshot,
    verdict: Verdict,
    find: Callable[[], Sequence[Log]],
    *,
    wanted: LineFilter,
    attempt: AttemptFolder | None = None,
) -> FirstError | None:
    """Return the line that the verdict quotes, or else the first error; None if no line is an
    error. `find` returns the logs, which have not been read yet."""
    until = time.process_time() + MOST_CPU_S
    cause = _find_cause(verdict)
    lines = [line for log in find() for line in _scan(log, until, cause)]
    exits = (
        one.exit
        for one in snapshot.ranks
        if one.exit is not None
        and wanted.ranks in ((), (one.rank,))
        and (not wanted.nodes or one.node in wanted.nodes)
    )
    lines += list_exceptions(exits, lines)
    lines = list(weigh_lines(replace(snapshot, errors=tuple(lines))).errors)
    quoted = [line for line in lines if cause is not None and _is_same(line, cause)]
    root = merge_same(quoted)[0] if quoted else first_root(lines)
    plain = {replace(line, stream="", doubt=""): line for line in lines}
    if root is None and (seen := first_root(list(plain))) is not None:
        root = replace(plain[replace(seen, num_same=1)], num_same=seen.num_same)
    if root is None:
        return None
    place = [log for log in find() if (log.path.name, log.label) == (root.file, root.node)]
    others = merge_same(line for one, line in plain.items() if is_proof(one, Proof.CAUSE))
    return FirstError(
        line=root,
        is_cause=bool(quoted),
        context=tuple(
            _read_context(place[0].read(final=True), root) if place else _read_stack(attempt, root)
        ),
        others=tuple(line for line in others if line.text != root.text)[:MOST_OTHERS],
    )


def _find_cause(verdict: Verdict) -> Line | None:
    """Return the line that the verdict quotes as the cause: a line of a log, or else the last line
    of the rank that exited with an error."""
    first, end = next(iter(verdict.evidence), None), verdict.end
    is_of_end = first is not None and (bool(first.kind) or end is not None)  # else a step or a save
    is_of_setup = end is not None and end.cause is EndCause.SETUP_FAILED
    if first is not None and is_of_end and (is_of_setup or not is_proof(first, Proof.FALLOUT)):
        return first
    if end is None or end.cause not in (EndCause.RANK_EXIT, EndCause.RANK_EXCEPTION):
        return None
    said = find_last_line(end)
    return Line(text=said, node=end.node, rank=end.rank) if said else None


def _is_same(line: Line, cause: Line) -> bool:
    """Return True if a line is the cause, or the same message of another rank that failed."""
    if not cause.kind:
        return not line.kind
    return not line.doubt and name_message(line) == name_message(cause)


def _is_echo(kind: str) -> bool:
    """Return True for a line that vjob or srun prints when it ends the other ranks: the verdict has
    the reason for their end."""
    row = find_row(kind)
    is_of_srun = row is not None and row.scope is Scope.SCHEDULER and row.proof is Proof.FALLOUT
    return kind == ATTEMPT_ENDED or is_of_srun


def _scan(log: Log, until: float, cause: Line | None) -> list[Line]:
    """Return the log's lines of known kinds, its exceptions and, if `cause` is not of a known kind,
    the last line with the text of `cause`. Stop once the process has used `until` seconds of
    processor time."""
    counts: dict[str, int] = {}
    is_apart, raised = log.path.with_suffix(".times").exists(), RaisedLines()
    found: list[Line] = []
    word: Line | None = None
    text, who = (cause.text.strip()[:80], cause.rank) if cause and not cause.kind else ("", None)
    num_chars = 0
    for order, line in enumerate(log.read(final=True)):
        num_chars += CHARS_OF_LINE + len(line.text)
        if num_chars > CHARS_AT_ONCE:
            num_chars = 0
            if time.process_time() > until:
                tell_once(f"only {order:,} lines of {log.path.name} are read; -n 99 shows its end")
                break
        is_raised = raised.feed(line.rank, line.text, order)
        kind = classify_line(line.text) or (PYTHON_EXCEPTION if is_raised else "")
        is_word = bool(text) and who == line.rank and line.text.strip().startswith(text)
        if OPENED in line.text and line.rank is None:  # the batch script's log of a later attempt
            found, word, counts = [], None, {}
        if not (is_word or (kind and not _is_echo(kind))):
            continue
        seen = Line(
            text=line.text,
            node=line.label,
            rank=line.rank,
            file=log.path.name,
            kind="" if is_word else kind,
            at=line.at,
            last_at=line.at,
            order=order,
            stream=("stderr" if line.is_err else "stdout") if is_apart else "",
        )
        if is_word:
            word = seen
            continue
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= MOST_OF_A_KIND:
            found.append(seen)
    found = [replace(line, raised=raised.name(line, line.order)) for line in found]
    return found if word is None else [*found, word]


def _read_context(lines: Iterable[LogLine], root: Line) -> Iterator[str]:
    """Yield the error's line with lines of the same rank around it, and the whole traceback."""
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
    """Yield the lines of the traceback from the rank's error file, ending with the root's line."""
    found = None
    if attempt is not None and root.rank is not None:
        found = read_exception(attempt.error_file(root.rank))
    lines = [clean(line) for line in found.stack[-LONGEST_TRACEBACK:]] if found is not None else []
    return iter(lines if root.text in lines else [*lines, root.text])


def _cut_before(lines: list[str]) -> list[str]:
    """Return the lines from the start of a traceback open at their end, else the last few."""
    for at in range(len(lines) - 1, -1, -1):
        if MARK in lines[at]:
            inner = (PREFIX.sub("", line, count=1) for line in lines[at + 1 :])
            is_open = all(line[:1].isspace() or not line for line in inner)
            if is_open:
                return lines[at:]
            break
    return lines[-LINES_BEFORE:]


def _print(found: FirstError | None, verdict: Verdict, say: Say, wanted: LineFilter) -> None:
    if wanted.as_json:
        say(json.dumps(describe_error(found, verdict), indent=1))
        return
    for text in render(found, verdict):
        say(text)


def render(found: FirstError | None, verdict: Verdict) -> Iterator[str]:
    """Render the verdict, what to do next, and the error with its context."""
    yield clean(f"{verdict.health.value}: {verdict.reason}")
    if advice := _render_advice(verdict):
        yield clean(f"next: {advice}")
    if found is None:
        yield "no line is known as an error"
        return
    line = found.line
    who = f"rank {line.rank} on {line.node}" if line.rank is not None else line.node
    more = f", and {line.num_same - 1} more like it" if line.num_same > 1 else ""
    place = ", ".join(dict.fromkeys((who, clean_name(line.file))))  # a batch script is its file
    yield f"{place}{more}"
    for text in found.context:
        yield f"{'>' if found.is_cause and text == line.text else ' '} {text}"
    if not found.is_cause:
        yield _say_why_not(line)
    if found.others:
        yield "other errors:"
    for other in found.others:
        where = f"rank {other.rank} on {other.node}" if other.rank is not None else other.node
        many = f"x{other.num_same} " if other.num_same > 1 else ""
        why_not = f" ({NOT_THE_CAUSE[other.doubt]})" if other.doubt else ""
        yield f"  {where}: {many}{other.text}{why_not}"


def _render_advice(verdict: Verdict) -> str:
    """Render the verdict's advice without the command `vjob logs --errors` itself."""
    remedies = tuple(one for one in verdict.main.remedies if one.target is not Target.ERRORS)
    return render_advice(replace(verdict.main, remedies=remedies), verdict.context, verdict.job)


def _say_why_not(line: Line) -> str:
    if line.doubt:
        return NOT_THE_CAUSE[line.doubt]
    if is_proof(line, Proof.FALLOUT):
        return "not the cause: such a line follows from another failure"
    return "not known as the cause"


def describe_error(found: FirstError | None, verdict: Verdict) -> dict[str, Any]:
    """Return the verdict and the error in JSON form; `error` is None if there is none."""

    def place(line: Line) -> dict[str, Any]:
        return {"node": line.node, "rank": line.rank, "file": line.file, "text": line.text}

    told = {
        "format": 1,
        "health": verdict.health.value,
        "reason": verdict.reason,
        "end": None if verdict.end is None else dump_value(asdict(verdict.end)),
    }
    if found is None:
        return {**told, "error": None}
    error = {
        **place(found.line),
        "num_same": found.line.num_same,
        "is_cause": found.is_cause,
        "doubt": found.line.doubt,
        "remedy": _render_advice(verdict) if found.is_cause else "",
        "went_on": "" if found.is_cause else _say_why_not(found.line),
        "context": list(found.context),
        "others": [place(line) for line in found.others],
    }
    return {**told, "error": error}
