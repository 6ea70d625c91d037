"""Classification of log lines: the kind of error that a line is, and the root among several.

Most lines are no errors, and most are like others but for their numbers. So literals are searched
for before patterns, and lines that differ by numbers alone are classified once (`Classifier`).
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
from varuna_core.facts.remedy import Action, Context, Remedy, explain
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
"""Of such a line: an exit code and no error."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FLAGS = re.compile(r"\(\?([aimsx]+)\)")


def _scope(pattern: str) -> str:
    """Flags that hold for the whole pattern, as a group: so that patterns can be joined."""
    match = _FLAGS.match(pattern)
    return f"(?{match.group(1)}:{pattern[match.end() :]})" if match else pattern


_NO_DIGITS = str.maketrans("", "", "0123456789")


class Table:
    """The rows for lines of logs, found by the literals that they need."""

    def __init__(self, rows: Sequence[KnownLine]) -> None:
        self.rows = rows
        self.by_name = {name_kind(row): row for row in reversed(rows)}
        self._rows_of: dict[str, list[int]] = {}
        """Literal to the rows that may fit where it stands."""
        for number, row in enumerate(rows):
            for literal in find_literals(_scope(row.pattern)):
                self._rows_of.setdefault(literal, []).append(number)
        self.find_candidates = lru_cache(maxsize=4096)(self._find_candidates)

    def _find_candidates(self, low: str) -> tuple[int, ...]:
        """Rows that may fit a text, given without digits: lines that differ by numbers are one."""
        found = {row for literal, rows in self._rows_of.items() if literal in low for row in rows}
        return tuple(sorted(found))

    def search(self, number: int, text: str) -> bool:
        """True if a line, without its tags, matches a row; a row is compiled when it is met."""
        return compile_pattern(self.rows[number].pattern).search(text) is not None


@cache
def load_table() -> Table:
    """Our rows and those of plug-ins."""
    return Table(load_catalogue().log_rows())


def name_kind(row: KnownLine) -> str:
    """The `Line.kind` of a row: names of container rows are those of rank rows at times."""
    return f"container: {row.name}" if row.scope is Scope.CONTAINER else row.name


def find_row(name: str) -> KnownLine | None:
    """The table's row of a `Line.kind`."""
    return load_table().by_name.get(name)


def explain_parts(line: Line | None) -> tuple[str, tuple[Remedy, ...]]:
    """Return the meaning of a line and its remedies; both are empty where nothing is known."""
    row = find_row(line.kind) if line is not None else None
    if line is None or row is None:
        return "", ()
    quiet = _QUIET_EXIT.search(line.text) if row.name == ATTEMPT_ENDED else None
    if quiet is None:
        return row.meaning, row.remedies
    meaning = f"rank {quiet.group(1)} ended with {quiet.group(2)} and printed no error"
    look = Remedy(Action.INSPECT, detail="look for sys.exit or os._exit in the program")
    return meaning, (look,)


def describe_remedy(line: Line | None, context: Context = Context.CONF, job: str = "") -> str:
    """Return the meaning of a line and its remedies as one text in the words of a context."""
    return explain(*explain_parts(line), context, job)


def strip_tags(text: str) -> str:
    """The line without the rank, level and time that loggers put before it."""
    match = _TAGS.match(text)
    return text[match.end() :] if match else text


def classify_line(text: str) -> str | None:
    """Name of the first row of the table that fits; None for a line like any other."""
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
    """True if a line proves so much; one that cannot be the cause proves no more than a warning.

    An exception on standard output is such a line: the program caught it and printed it.
    """
    row = find_row(line.kind)
    if row is None:
        return False
    is_printed = row.stream is Stream.STDERR and line.stream == "stdout"
    weighed = Proof.WARNING if line.doubt or is_printed else row.proof
    return weighed is proof


def is_warning(name: str) -> bool:
    """True for a `Line.kind` that is a warning by itself, and no error that proves nothing here."""
    row = find_row(name)
    return row is not None and row.proof is Proof.WARNING


def is_end(name: str) -> bool:
    """True for a `Line.kind` that says by itself why a process ended."""
    row = find_row(name)
    return row is not None and row.fatal and row.proof is Proof.CAUSE


def first_root(lines: Sequence[Line]) -> Line | None:
    """The line that the failure likely began with; lines alike of several ranks count as one.

    Roots before fallout: a fallout is the answer only where nothing else is there. Times decide
    where lines have them; a line without one counts as written with its neighbour in its file.
    """
    for proof in (Proof.CAUSE, Proof.FALLOUT):
        found = merge_same([line for line in sort_by_time(lines) if is_proof(line, proof)])
        if found:
            return found[0]
    return None


def sort_by_time(lines: Sequence[Line]) -> list[Line]:
    """Earliest first; lines that no time orders stay as they came, after those that have one."""
    near = _find_times(lines)
    order = sorted(range(len(lines)), key=lambda i: (math.inf if near[i] is None else near[i], i))
    return [lines[i] for i in order]


def merge_same(lines: Iterable[Line]) -> list[Line]:
    """Merge the same message of several ranks into the first one, with their number."""
    merged: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = line.kind, _NUMBERS.sub("#", strip_tags(line.text)).strip()
        first = merged.get(key)
        merged[key] = (
            line if first is None else replace(first, num_same=first.num_same + line.num_same)
        )
    return list(merged.values())


def list_exceptions(exits: Iterable[RankExit], known: Sequence[Line]) -> list[Line]:
    """A line for each exception that a rank left in its error file and did not print."""
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
    """Time of each line: its own, else that of the line before it in its file, else after it."""
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
"""New distinct lines that are judged in one look at one file; a flood has nothing new to say."""
INFO_MARK = b"_SIZE: "
"""Is in the block of settings that a run prints: WORLD_SIZE, GLOBAL_BATCH_SIZE, ..."""
_OTHER_MARKS = (*PHASE_MARKS, INFO_MARK)
STEP_MARKS = (*MARKS, b"poch")
"""Words of lines about steps, and of lines that name their epoch."""
DIGITS = b"0123456789"
_ROW = b" \t.,:|%+-/eE\x1b[];mskKMG"
"""Characters between the digits of a row of a table, with units, lists and colours."""
_NUMBERS_MATTER = re.compile(
    rb"errno|error|exit|code|xid|fail|signal|status|ecc|abort|kill", re.IGNORECASE
)


@dataclass(frozen=True)
class Sifted:
    """The lines among some that need more work."""

    known: list[tuple[int, str]]
    """Index and kind of the known ones."""
    telling: list[int]
    """Indices of lines that may be about steps, checkpoints or settings."""


class Classifier:
    """Classifies each distinct line once; shared by all files of a job."""

    MOST = 200_000

    def __init__(self, marks: Sequence[bytes] = STEP_MARKS) -> None:
        """Each line about a step has one of `marks`; without marks any line may be about one."""
        self._marks = (*marks, *_OTHER_MARKS) if marks else (b"",)
        self._plain: set[bytes] = set()
        """Lines of no known kind, without their digits: those say nothing."""
        self._plain_texts: set[str] = set()
        """The same where they do."""
        self._telling: set[bytes] = set()
        """Lines without their digits; those of `_dull` are not."""
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
