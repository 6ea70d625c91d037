"""Format numbers, durations and tables for people."""

from __future__ import annotations

import math
import re
import textwrap
from typing import Iterable, List, Optional, Sequence


def format_duration(seconds: float) -> str:
    """Format a duration: `42 s`, `12 min`, `2 h 5 min`, `3 d 4 h`; `ever` if it is not finite."""
    if not math.isfinite(seconds):
        return "ever"
    if seconds < 1:
        return "less than 1 s" if seconds > 0 else "0 s"
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def format_seconds(seconds: float) -> str:
    """Format a time that may be short: `85 µs`, `134.2 ms`, `5.888 s`, `12 min`."""
    if 0 < abs(seconds) < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if not seconds:
        return "0 s"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds:.4g} s" if seconds < 120 else format_duration(seconds)


def format_pace(seconds: float) -> str:
    """Format the time of a step: `8.52 ms`, `0.305 s`, `12.4 s`, `12 min`."""
    return f"{seconds:.3g} s" if 0.01 <= seconds < 120 else format_seconds(seconds)


def format_share(share: float) -> str:
    """Format a fraction: `0.5 %`, `42 %`."""
    return f"{100 * share:.2g} %" if abs(share) < 0.0995 else f"{100 * share:.0f} %"


def format_size(count: int) -> str:
    """Format a number of bytes: `812 B`, `36 KiB`, `1.4 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def join_numbers(numbers: Iterable[int], between: str = ",") -> str:
    """Join numbers as ranges: 0, 1, 2, 5 becomes `0-2,5`."""
    parts: List[List[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def align_columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """Format the rows of a table as lines: each column is as wide as its widest cell, with two
    spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]  # noqa: B905 - Python 3.8
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


LEAST_BESIDE = 40
"""Minimum width of the last cell of a wrapped table; if there is less room, the cell is placed
below its row."""


def wrap_columns(rows: Sequence[Sequence[str]], width: int) -> List[str]:
    """Format the rows of a table as lines of this width without truncation: the last cell wraps.

    The last cell wraps beside the others, or is placed below its row if there is too little room
    beside them. A line is longer than `width` only if a single word is.
    """
    heads = align_columns([row[:-1] for row in rows])
    start = 2 + max(map(len, heads))
    longest = max((len(word) for row in rows for word in row[-1].split()), default=0)
    if width - start >= max(LEAST_BESIDE, longest):
        lines = []
        for head, row in zip(heads, rows):  # noqa: B905 - Python 3.8
            first, *others = textwrap.wrap(row[-1], width - start, break_on_hyphens=False) or [""]
            lines += [f"{head.ljust(start)}{first}".rstrip()]
            lines += [" " * start + text for text in others]
        return lines
    last = len(rows[0]) - 1
    while last > 1 and max(map(len, align_columns([row[:last] for row in rows]))) > width:
        last -= 1
    lines = []
    for head, row in zip(align_columns([row[:last] for row in rows]), rows):  # noqa: B905
        lines.append(head)
        for cell in row[last:]:
            lines += textwrap.wrap(
                cell, width, initial_indent="    ", subsequent_indent="    ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return lines


_PIECE = re.compile(
    r"""\s* (?: [^\s`]*`[^`]+`[^\s`]*
           | vjob\ [a-z]+ (?:\ [^\s;,:]+){1,6} (?= [;,:.)] | $ ) \S*
           | \S+ )""",
    re.VERBOSE,
)
"""A word with the space before it. A command counts as one word, so that it can be copied from its
line."""
_NUMBER = re.compile(r"\s*\d+\. ")
_GAP = re.compile(r"\S(\s{2,})(?=\S)")


def wrap_text(text: str, width: Optional[int]) -> str:
    """Wrap text at this width between words; if `width` is None, return it unchanged.

    A line is longer than `width` only if a single word or command is. Continuation lines are
    indented to the last cell of a row, to the text of a numbered item, or by two more spaces.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _wrap_line(line, width))


def _wrap_line(line: str, width: int) -> List[str]:
    if len(line) <= width:
        return [line]
    indent = _measure_indent(line, width)
    lines = [""]
    for piece in _PIECE.findall(line):
        if lines[-1].strip() and len(lines[-1]) + len(piece) > width:
            word = piece.lstrip()  # a long path gets the whole line
            lines.append(" " * min(indent, max(0, width - len(word))) + word)
        else:
            lines[-1] += piece
    return lines


def _measure_indent(line: str, width: int) -> int:
    number = _NUMBER.match(line)
    if number:
        return number.end()
    gaps = [found.end() for found in _GAP.finditer(line) if found.end() <= width // 3]
    return gaps[-1] if gaps else len(line) - len(line.lstrip()) + 2


_NUMBERED = re.compile(r"(.*?)(\d{0,9})\Z", re.DOTALL)


def fold_names(names: Iterable[str]) -> str:
    """Join names of nodes in their order, with numbers at their ends as ranges: `a[1-2,4],b`."""
    groups: list[tuple[str, list[list[str]]]] = []
    """Adjacent names with a common beginning: the beginning, and the ranges of what follows."""
    for name in names:
        stem, number = _NUMBERED.match(name).groups()  # type: ignore[union-attr]
        if not (number and groups and groups[-1][0] == stem and groups[-1][1][0][0]):
            groups.append((stem, [[number]]))
            continue
        ranges = groups[-1][1]
        first, last = ranges[-1][0], ranges[-1][-1]
        if number == f"{int(last) + 1:0{len(first)}}":
            ranges[-1] = [first, number]
        else:
            ranges.append([number])
    texts = ((stem, ",".join(map("-".join, ranges))) for stem, ranges in groups)
    return ",".join(
        f"{stem}[{text}]" if "-" in text or "," in text else stem + text for stem, text in texts
    )
