"""Classify log lines: the kind of error that a line reports, and the root error among several.

Most lines are not errors, and most differ from other lines only by numbers. So literals are
searched for before patterns, and lines that differ only by numbers are classified once
(`Classifier`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from varuna_core.facts.catalogue.known_line import KnownLine, Proof, Scope, Stream
from varuna_core.facts.catalogue.patterns import MOST_CHARS
from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, PYTHON_EXCEPTION
from varuna_core.facts.catalogue.tables import compile_pattern
from varuna_core.facts.remedy import Action, Remedy
from varuna_core.records.exits import RankExit
from varuna_core.records.logs.literals import find_literals
from varuna_core.records.logs.progress import MARKS, split_tag
from varuna_core.records.logs.training_log import PHASE_MARKS
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.monitor.log_lines.tails import show
from vjob.jobs.monitor.model.snapshot import Line

_TAGS = re.compile(
    r"(?:\s*(?:"
    r"\d{1,7}: "  # ours, and srun --label
    r"|\[(?!\w*(?:ERROR|CRITICAL|FATAL|WARN))[^\]\n]{1,80}\](?:<\w+>)?:? ?"  # torchrun, glog
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? ?:?"
    r")){1,5}\s*"
)
_QUIET_EXIT = re.compile(r": rank (\d+) on \S+ exited (\d+)\s*$")
"""Rank and exit code in the line of a rank that ended without an error message."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FLAGS = re.compile(r"\(\?([aimsx]+)\)")


def _scope(pattern: str) -> str:
    """Return a pattern with its global flags scoped to a group, so that patterns can be joined."""
    match = _FLAGS.match(pattern)
    return f"(?{match.group(1)}:{pattern[match.end() :]})" if match else pattern


_NO_DIGITS = str.maketrans("", "", "0123456789")


class Table:
    """The table's rows for log lines, indexed by literals that each matching line contains."""

    def __init__(self, rows: Sequence[KnownLine]) -> None:
        self.rows = rows
        self.by_name = {name_kind(row): row for row in reversed(rows)}
        self._rows_of: dict[str, list[int]] = {}
        """Indices of the rows that may match a text with this literal."""
        for number, row in enumerate(rows):
            for literal in find_literals(_scope(row.pattern)):
                self._rows_of.setdefault(literal, []).append(number)
        self.find_candidates = lru_cache(maxsize=4096)(self._find_candidates)

    def _find_candidates(self, low: str) -> tuple[int, ...]:
        """Return the rows that may match a text, which is given in lower case without digits, so
        that lines that differ only by numbers share a cache entry."""
        found = {row for literal, rows in self._rows_of.items() if literal in low for row in rows}
        return tuple(sorted(found))

    def search(self, number: int, text: str) -> bool:
        """Return True if `text`, a log line without its tags, matches the pattern of the row with
        this index. The pattern is compiled on first use."""
        return compile_pattern(self.rows[number].pattern).search(text) is not None


@cache
def load_table() -> Table:
    """Load the built-in rows and those of plug-ins."""
    return Table(load_catalogue().log_rows())


def name_kind(row: KnownLine) -> str:
    """Return the `Line.kind` of a row; container rows get a prefix, since names may be equal."""
    return f"container: {row.name}" if row.scope is Scope.CONTAINER else row.name


def find_row(name: str) -> KnownLine | None:
    """Return the table's row for a `Line.kind`; None if there is none."""
    return load_table().by_name.get(name)


def explain_parts(line: Line | None) -> tuple[str, tuple[Remedy, ...]]:
    """Return the meaning of a line and its remedies; both are empty for an unknown kind of line."""
    row = find_row(line.kind) if line is not None else None
    if line is None or row is None:
        return "", ()
    quiet = _QUIET_EXIT.search(line.text) if row.name == ATTEMPT_ENDED else None
    if quiet is None:
        return row.meaning, row.remedies
    return explain_quiet(int(quiet.group(1)), int(quiet.group(2)))


def explain_quiet(rank: int, code: int) -> tuple[str, tuple[Remedy, ...]]:
    """Return the meaning and the remedies for a rank that exited without an error message."""
    look = Remedy(Action.INSPECT, detail="look for sys.exit or os._exit in the program")
    return f"rank {rank} ended with {code} and printed no error", (look,)


def strip_tags(text: str) -> str:
    """Return the line without the rank, level and time that loggers prefix."""
    match = _TAGS.match(text)
    return text[match.end() :] if match else text


def classify_line(text: str) -> str | None:
    """Return the kind that the first matching row gives; None for an ordinary line."""
    text = text[:MOST_CHARS]
    table = load_table()
    candidates = table.find_candidates(text.translate(_NO_DIGITS).lower())
    if not candidates:
        return None
    bare = strip_tags(text.rstrip())
    for number in candidates:
        if table.search(number, bare):
            row = table.rows[number]
            return None if row.proof is Proof.IGNORE else name_kind(row)
    return None


def is_proof(line: Line, proof: Proof) -> bool:
    """Return True if a line of this kind proves what `proof` says, such as the cause of an end; a
    line that cannot be the cause counts as a warning.

    An exception on standard output cannot be the cause: the program caught and printed it.
    """
    row = find_row(line.kind)
    if row is None:
        return False
    is_printed = row.stream is Stream.STDERR and line.stream == "stdout"
    weighed = Proof.WARNING if line.doubt or is_printed else row.proof
    return weighed is proof


def is_warning(name: str) -> bool:
    """Return True for a `Line.kind` whose row is a warning, not an error counted as one."""
    row = find_row(name)
    return row is not None and row.proof is Proof.WARNING


def is_end(name: str) -> bool:
    """Return True for a `Line.kind` that by itself explains why a process ended."""
    row = find_row(name)
    return row is not None and row.fatal and row.proof is Proof.CAUSE


def first_root(lines: Sequence[Line]) -> Line | None:
    """Return the line with which the failure likely began, counting equal lines of several ranks
    once.

    A line that only follows from another failure is returned only if there is no other line. The
    earliest line wins; a line without a time takes that of its neighbour in the same file.
    """
    for proof in (Proof.CAUSE, Proof.FALLOUT):
        found = merge_same([line for line in sort_by_time(lines) if is_proof(line, proof)])
        if found:
            return found[0]
    return None


def sort_by_time(lines: Sequence[Line]) -> list[Line]:
    """Sort lines of several logs by time, earliest first; lines without a known time come last, in
    the order in which they were given."""
    near = _find_times(lines)
    order = sorted(range(len(lines)), key=lambda i: (math.inf if near[i] is None else near[i], i))
    return [lines[i] for i in order]


def merge_same(lines: Iterable[Line]) -> list[Line]:
    """Merge equal messages of several ranks into the first of them, with their number."""
    merged: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = name_message(line)
        first = merged.get(key)
        merged[key] = (
            line if first is None else replace(first, num_same=first.num_same + line.num_same)
        )
    return list(merged.values())


def name_message(line: Line) -> tuple[str, str]:
    """Return the key that equal messages of several ranks share: kind, and text without numbers."""
    return line.kind, _NUMBERS.sub("#", strip_tags(line.text)).strip()


def list_exceptions(exits: Iterable[RankExit], known: Sequence[Line]) -> list[Line]:
    """Return a line for each exception that a rank recorded in its error file but did not print."""
    found: list[Line] = []
    for one in exits:
        text = show(one.exception.encode())
        printed = (line for line in (*known, *found) if line.rank in (None, one.rank))
        if one.exception and not any(text in line.text for line in printed):
            kind = classify_line(text) or PYTHON_EXCEPTION
            file = f"ranks/{one.rank}.error.json"
            line = Line(text=text, node=one.node, rank=one.rank, file=file, kind=kind,
                        at=one.ended, last_at=one.ended, stream="stderr")  # fmt: skip
            found.append(line)
    return found


def _find_times(lines: Sequence[Line]) -> list[float | None]:
    """Return the time of each line: its own, else that of the nearest earlier line of its file with
    a time, else of the nearest later one."""
    times = [line.at for line in lines]
    files: dict[tuple[str, str], list[int]] = {}
    for i, line in enumerate(lines):
        files.setdefault((line.node, line.file), []).append(i)
    for members in files.values():
        members.sort(key=lambda i: lines[i].order)
        for walk in (members, members[::-1]):
            last = None
            for i in walk:
                last = times[i] if times[i] is not None else last
                times[i] = last
    return times


MOST_CLASSIFIED = 20_000
"""Most new distinct lines that are classified in one poll of one file."""
INFO_MARK = b"_SIZE: "
"""Text that occurs in the block of settings that a run prints: WORLD_SIZE, GLOBAL_BATCH_SIZE,
..."""
_OTHER_MARKS = (*PHASE_MARKS, INFO_MARK)
STEP_MARKS = (*MARKS, b"poch")
"""Words that occur in lines about steps or epochs."""
DIGITS = b"0123456789"
_ROW = b" \t.,:|%+-/eE\x1b[];mskKMG"
"""Characters other than digits in a table row of numbers, with units, lists and colours."""
_NUMBERS_MATTER = re.compile(
    rb"errno|error|exit|code|xid|fail|signal|status|ecc|abort|kill", re.IGNORECASE
)


@dataclass(frozen=True)
class Sifted:
    """The lines of a file that need further processing."""

    known: list[tuple[int, str]]
    """Index and kind of each line of a known kind."""
    telling: list[int]
    """Indices of lines that may be about steps, checkpoints or settings of the run."""


class Classifier:
    """Classifier that examines each distinct line once; all files of a job share one."""

    MOST = 200_000

    def __init__(self, marks: Sequence[bytes] = STEP_MARKS) -> None:
        """`marks` are words of which every line about a step contains at least one; if `marks` is
        empty, any line may be about a step."""
        self._marks = (*marks, *_OTHER_MARKS) if marks else (b"",)
        self._plain: set[bytes] = set()
        """Lines of no known kind whose digits do not matter, without these digits."""
        self._plain_texts: set[str] = set()
        """Lines of no known kind whose digits matter, in full."""
        self._telling: set[bytes] = set()
        """Lines that may be about steps, checkpoints or settings, without digits; `_dull` has the
        others."""
        self._dull: set[bytes] = set()

    def sift(self, data: bytes, lines: list[bytes]) -> Sifted:
        """Classify lines of one file; `data` is the same lines joined."""
        if not lines:
            return Sifted([], [])
        keys = data.translate(None, DIGITS).split(b"\n")
        keys.pop()
        distinct = set(keys)
        telling = self._find_telling(distinct)
        return Sifted(
            self._find_known(lines, keys, distinct - self._plain),
            [at for at, key in enumerate(keys) if key in telling] if telling else [],
        )

    def _find_telling(self, distinct: set[bytes]) -> set[bytes]:
        if len(self._dull) + len(self._telling) > self.MOST:
            self._dull.clear()
            self._telling.clear()
        for key in distinct - self._dull - self._telling:
            is_row = b"." in key and not key.strip(_ROW)
            is_telling = is_row or any(mark in key for mark in self._marks)
            held = self._telling if is_telling else self._dull
            held.add(key)
        return distinct & self._telling

    def _find_known(
        self, lines: list[bytes], keys: list[bytes], fresh: set[bytes]
    ) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        if not fresh:
            return found
        judged = 0
        for at, key in enumerate(keys):
            if key not in fresh:
                continue
            judged += 1
            if judged > MOST_CLASSIFIED:
                break
            text = split_tag(show(lines[at]))[1].strip()
            if text in self._plain_texts:
                continue
            kind = classify_line(text)
            if kind:
                found.append((at, kind))
                continue
            if len(self._plain) + len(self._plain_texts) > self.MOST:
                self._plain.clear()
                self._plain_texts.clear()
            if _NUMBERS_MATTER.search(key):
                self._plain_texts.add(text)
            else:
                self._plain.add(key)
                fresh.discard(key)
        return found
