"""Render the head of the screen: run, verdict with its evidence, and progress. Pure text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from vjob.jobs.monitor.model.snapshot import Line, Point, Progress, Scheduler, Snapshot, Verdict
from vjob.jobs.monitor.model.text import format_queue_age
from vjob.jobs.monitor.rules.pace import find_left_s
from vjob.shelf.screen import theme
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.formats import (
    format_age,
    format_ago,
    format_coarse_duration,
    format_loss,
    format_seconds,
)

BAR_WIDTH = 12
BAR_FROM = 60
"""Least columns of the screen for a progress bar."""
MOST_IDS = 4
INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class HeadingLine:
    """A line of the head; lines with the greatest `place` are dropped first."""

    line: Text
    place: float


def render_heading(
    snapshot: Snapshot, verdict: Verdict, marks: Marks, width: int, most: int, notice: str = ""
) -> list[Text]:
    """Render the lines above the nodes, `most` at most; `notice` says how old the data is."""
    parts = [HeadingLine(line=_render_run(snapshot, marks, width), place=3)]
    if notice:
        parts.append(HeadingLine(line=Text(marks.plain(notice), style=theme.WARM), place=0.5))
    if snapshot.scheduler.problem:
        parts.append(HeadingLine(line=_render_silence(snapshot.scheduler, marks), place=4))
    parts += _render_verdict(verdict, marks, width)
    parts += _render_progress(snapshot, verdict, marks, width)
    kept = sorted(range(len(parts)), key=lambda index: parts[index].place)[:most]
    return [parts[index].line for index in sorted(kept)]


def _render_run(snapshot: Snapshot, marks: Marks, width: int) -> Text:
    line = Text(style=theme.PLAIN).append(marks.plain(snapshot.run), theme.STRONG)
    words = [
        format_jobs(snapshot.scheduler) or snapshot.record_state.upper(),
        _format_elapsed(snapshot),
        _format_attempt(snapshot),
        f"morphs {snapshot.morph}" if snapshot.morph else "",
        format_queue_age(snapshot),
    ]
    return _append_fitting(line, [marks.plain(word) for word in words if word], width)


def _append_fitting(line: Text, words: Sequence[str], width: int) -> Text:
    """Append the words that fit as a whole, since half a number misleads; the first word is always
    appended."""
    for number, word in enumerate(words):
        if number == 0 or cell_len(line.plain) + cell_len(word) + 2 <= width:
            line.append(f"  {word}", theme.PLAIN)
    return line


def format_jobs(scheduler: Scheduler) -> str:
    """Format `jobs 4711+0 4711+1 RUNNING`, or the number of jobs in each state."""
    jobs = (*scheduler.jobs, *scheduler.joined)
    if not jobs:
        return ""
    ids = " ".join(job.id for job in jobs[:MOST_IDS])
    ids += f" and {len(jobs) - MOST_IDS} more" if len(jobs) > MOST_IDS else ""
    counts = Counter(_format_state(job.state, job.word) for job in jobs)
    if len(counts) == 1:
        states = next(iter(counts))
    else:
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
    reasons = sorted({job.reason for job in jobs if job.reason and job.state == "PENDING"})
    starts = sorted({job.start for job in jobs if job.start and job.state == "PENDING"})
    more = reasons + [f"starts {start}" for start in starts[:1]]
    return f"job{'s' * (len(jobs) > 1)} {ids} {states}" + (f" ({', '.join(more)})" if more else "")


def _format_state(state: str, word: str) -> str:
    return word if state == "UNKNOWN" and word else state


def _format_attempt(snapshot: Snapshot) -> str:
    if snapshot.attempt is None:
        return ""
    earlier = len(snapshot.earlier)
    return f"attempt {snapshot.attempt}" + (f" ({earlier} before)" if earlier else "")


def _format_elapsed(snapshot: Snapshot) -> str:
    if snapshot.record_state == "ended" and snapshot.outcome is not None:
        if snapshot.attempt_started is None:
            return ""
        words = f"took {format_coarse_duration(snapshot.outcome.ended - snapshot.attempt_started)}"
        return f"last attempt {words}" if snapshot.morphs or snapshot.restarts else words
    if snapshot.attempt_started is not None:
        words = format_coarse_duration(snapshot.now - snapshot.attempt_started)
        if snapshot.morphs or snapshot.restarts:  # the job's limit counts from before this attempt
            return f"{words} since the {'morph' if snapshot.morphs else 'restart'}"
        limit = snapshot.walltime_s
        return f"{words} of {format_coarse_duration(limit)}" if limit else words
    if snapshot.submitted is not None:
        return f"submitted {format_coarse_duration(snapshot.now - snapshot.submitted)} ago"
    return ""


def _render_silence(scheduler: Scheduler, marks: Marks) -> Text:
    age = f"; its last answer is {format_age(scheduler.age_s)} old" if scheduler.age_s >= 10 else ""
    return Text(marks.plain(f"{scheduler.problem}{age}"), style=theme.WARM)


def _render_verdict(verdict: Verdict, marks: Marks, width: int) -> list[HeadingLine]:
    """Render the lines of reason, evidence and advice, so that the first line of each is kept
    before a second line of any."""
    word = verdict.health.value + (f" {verdict.phase}" if verdict.phase else "")
    head = f" {marks.plain(word)} "
    first, *more = _fold(verdict.reason, marks, width - len(head) - 1, width - len(INDENT), 3)
    line = Text(style=theme.PLAIN).append(head, theme.badge(verdict.health))
    parts = [HeadingLine(line=line.append(f" {first}", theme.STRONG), place=0)]
    parts += [
        HeadingLine(line=Text(INDENT + text, style=theme.STRONG), place=2 + 5 * number)
        for number, text in enumerate(more)
    ]
    if verdict.evidence:
        parts.append(HeadingLine(line=_render_evidence(verdict.evidence, marks, width), place=4))
    if verdict.facts:
        text = marks.fit(marks.plain("; ".join(verdict.facts)), width - len(INDENT))
        parts.append(HeadingLine(line=Text(INDENT + text, style=theme.PLAIN), place=7.5))
    arrow = f"{INDENT}{marks.advice} "
    room = width - len(arrow)
    for number, text in enumerate(_fold(verdict.advice, marks, room, room, 3)):
        start = " " * len(arrow) if number else arrow
        if text:
            parts.append(HeadingLine(line=Text(start + text, style=theme.WARM), place=5 + number))
    for number, remark in enumerate(verdict.remarks[:2]):
        text = marks.fit(marks.plain(f"also: {remark}"), width - len(INDENT))
        parts.append(HeadingLine(line=Text(INDENT + text, style=theme.DIM), place=8 + number))
    return parts


def _render_evidence(evidence: Sequence[Line], marks: Marks, width: int) -> Text:
    first = evidence[0]
    where = f"{INDENT}{marks.plain(format_place(first))} | "
    more = f"  (and {len(evidence) - 1} more: v)" if len(evidence) > 1 else ""
    line = Text(where, style=theme.DIM)
    line.append(marks.fit(marks.plain(first.text), width - len(where) - len(more)), theme.BAD)
    return line.append(more, theme.DIM)


def format_place(line: Line) -> str:
    """Format the origin of a line, such as `b3.err rank 5`, as far as known."""
    rank = "" if line.rank is None else f" rank {line.rank}"
    return (line.file or line.node or "log") + rank


def _render_progress(
    snapshot: Snapshot, verdict: Verdict, marks: Marks, width: int
) -> list[HeadingLine]:
    progress = snapshot.progress
    if progress is None:
        phase = snapshot.phase
        none = f"no step yet; in {phase.name}" if phase else "no step yet"
        is_told = bool(snapshot.nodes) and snapshot.record_state != "ended"
        return [HeadingLine(line=Text(none, style=theme.DIM), place=2)] if is_told else []
    step_s = progress.pace_s if verdict.makes_steps else None
    total = progress.num_steps
    line = Text(f"{progress.unit} ", style=theme.PLAIN)
    line.append(f"{progress.step:,}" + (f"/{total:,}" if total else ""), theme.STRONG)
    if total:
        percent = 100 * progress.step / total
        if width >= BAR_FROM:
            line.append(f" {marks.bar(percent, BAR_WIDTH)}", theme.GOOD)
        line.append(f" {int(min(percent, 100))}%")
    words = [] if step_s is None else [f"{format_seconds(step_s)} s/{progress.unit}"]
    loss = next((p.loss for p in reversed(progress.points) if p.loss is not None), None)
    if loss is not None:
        words.append(f"loss {format_loss(loss)}")
    left_s = None if step_s is None or "left_s" in verdict.main.values else find_left_s(snapshot)
    words += _format_times(snapshot, progress, left_s)
    parts = [
        HeadingLine(
            line=_append_fitting(line, [marks.plain(word) for word in words], width), place=1
        )
    ]
    sparks = _render_sparks(progress.points, marks, width)
    return [*parts, HeadingLine(line=sparks, place=6.5)] if sparks is not None else parts


def _format_times(snapshot: Snapshot, progress: Progress, left_s: float | None) -> list[str]:
    words = []
    is_over = snapshot.record_state == "ended"
    if left_s is not None and not is_over:  # the verdict does not say it
        words.append(f"{format_coarse_duration(left_s)} to go")
    if progress.at is not None and not is_over:
        words.append(f"last step {format_ago(snapshot.now - progress.at)}")
    if snapshot.phase is not None and not is_over:
        words.append(f"in {snapshot.phase.name}")
    if snapshot.checkpoint_step is not None:
        at = snapshot.checkpoint_at
        age = "" if at is None or is_over else f", {format_ago(snapshot.now - at)}"
        words.append(f"checkpoint {snapshot.checkpoint_step:,}{age}")
    return words


def _render_sparks(points: Sequence[Point], marks: Marks, width: int) -> Text | None:
    """Render step times and losses side by side, with their least and greatest."""
    series = [
        ("s/step", [point.step_s for point in points], format_seconds, 0.05),
        ("loss", [point.loss for point in points], format_loss, 0.005),
    ]
    told = [item for item in series if _count(item[1]) > 1]
    if not told:
        return None
    line = Text(style=theme.PLAIN)
    room = width // len(told)
    for name, values, show, flat in told:
        known = [value for value in values if value is not None]
        ends = f"{show(min(known))} to {show(max(known))}"
        head = f"{name} "
        drawn = marks.curve(values, room - len(head) - len(ends) - 4, flat=flat)
        line.append(head, theme.DIM)
        line.append(drawn, theme.KEY)
        line.append(f" {ends}   ", theme.DIM)
    return line


def _count(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def _fold(text: str, marks: Marks, first: int, width: int, most: int) -> list[str]:
    """Wrap text by words into at most `most` lines, with a mark if it is cut."""
    text = marks.plain(text)
    lines = textwrap.wrap(text, max(10, first)) or [""]
    rest = text[len(lines[0]) :].strip()
    if most == 1 or not rest:
        return [marks.fit(text, max(10, first))]
    return [lines[0], *_fold(rest, marks, width, width, most - 1)]
