"""`vjob logs --errors`: the line that a failure began with, what stands around it, what to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vjob.jobs.monitor.log_lines.errors import (
    classify_line,
    find_row,
    first_root,
    is_kind,
    merge_same,
)
from vjob.jobs.monitor.log_lines.stream import Log, LogLine
from vjob.jobs.monitor.model.snapshot import Line

LINES_BEFORE = 12
LINES_AFTER = 5
LONGEST_TRACEBACK = 200
MOST_OF_A_KIND = 100
"""Lines of a kind that are kept of one file: the first ones tell the story."""
MOST_OTHERS = 10
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, kw_only=True)
class FirstError:
    """What a failure began with."""

    line: Line
    remedy: str
    context: tuple[str, ...]
    """Lines of the same rank around it, itself included."""
    others: tuple[Line, ...]
    """Other errors, each once, in time."""


def find_first_error(logs: Sequence[Log], again: Sequence[Log]) -> FirstError | None:
    """None where no line is known as an error; `again` are the same logs, not read yet."""
    lines = [line for log in logs for line in _scan(log)]
    root = first_root(lines)
    if root is None:
        return None
    row = find_row(root.kind)
    place = next(log for log in again if log.path.name == root.file)
    others = merge_same(line for line in lines if is_kind(line, "root"))
    return FirstError(
        line=root,
        remedy=row.remedy if row else "",
        context=tuple(_read_context(place.read(final=True), root)),
        others=tuple(line for line in others if line.text != root.text)[:MOST_OTHERS],
    )


def _scan(log: Log) -> Iterator[Line]:
    """Lines of known kinds."""
    counts: dict[str, int] = {}
    for order, line in enumerate(log.read(final=True)):
        kind = classify_line(line.text)
        if kind is None:
            continue
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= MOST_OF_A_KIND:
            yield Line(
                text=line.text,
                node=line.label,
                rank=line.rank,
                file=log.path.name,
                kind=kind,
                at=line.at,
                order=order,
            )


def _read_context(lines: Iterable[LogLine], root: Line) -> Iterator[str]:
    """The same rank's lines before and after; of a traceback all."""
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


def _cut_before(lines: list[str]) -> list[str]:
    """From the traceback on that ends here, else the last few."""
    for at in range(len(lines) - 1, -1, -1):
        if TRACEBACK in lines[at]:
            is_open = all(line[:1].isspace() or not line for line in lines[at + 1 :])
            if is_open:
                return lines[at:]
            break
    return lines[-LINES_BEFORE:]


def render(found: FirstError) -> Iterator[str]:
    line = found.line
    who = f"rank {line.rank} on {line.node}" if line.rank is not None else line.node
    more = f", and {line.num_same - 1} more like it" if line.num_same > 1 else ""
    yield f"{who}, {line.file}{more}"
    for text in found.context:
        yield f"{'>' if text == line.text else ' '} {text}"
    if found.remedy and "--errors" not in found.remedy:  # that is what this is
        yield f"what to do: {found.remedy}"
    if found.others:
        yield "later, or elsewhere:"
    for other in found.others:
        where = f"rank {other.rank} on {other.node}" if other.rank is not None else other.node
        yield f"  {where}: {f'x{other.num_same} ' if other.num_same > 1 else ''}{other.text}"
