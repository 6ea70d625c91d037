"""Which lines of a log are worth a look: each distinct one is judged once, whatever its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vjob.jobs.monitor.log_lines.errors import classify_line
from vjob.jobs.monitor.log_lines.parse import MARKS, PHASE_MARKS, split_tag
from vjob.jobs.monitor.log_lines.tails import show

MOST_CLASSIFIED = 20_000
"""New distinct lines that are judged in one look at one file; a flood has nothing new to say."""
INFO_MARK = b"_SIZE: "
"""Is in the block of settings that a run prints: WORLD_SIZE, GLOBAL_BATCH_SIZE, ..."""
_ALL_MARKS = (*MARKS, *PHASE_MARKS, INFO_MARK)
DIGITS = b"0123456789"
_NUMBERS_MATTER = re.compile(
    rb"errno|error|exit|code|xid|fail|signal|status|ecc|abort|kill", re.IGNORECASE
)


@dataclass(frozen=True)
class Sifted:
    """What is worth a look among some lines."""

    known: list[tuple[int, str]]
    """Index and kind of those of a known kind."""
    telling: list[bytes]
    """Those that may tell of steps, checkpoints or settings."""


class Classifier:
    """Judges each distinct line once; shared by all files of a job."""

    MOST = 200_000

    def __init__(self) -> None:
        self._plain: set[bytes] = set()
        """Lines of no known kind, without their digits: those say nothing."""
        self._plain_texts: set[str] = set()
        """The same where they do."""
        self._telling: set[bytes] = set()
        """Lines without their digits; those of `_dull` are not."""
        self._dull: set[bytes] = set()

    def sift(self, data: bytes, lines: list[bytes]) -> Sifted:
        """Look through lines of one file; `data` is the same lines in one."""
        if not lines:
            return Sifted([], [])
        keys = data.translate(None, DIGITS).split(b"\n")
        keys.pop()
        distinct = set(keys)
        telling = self._find_telling(distinct)
        return Sifted(
            self._find_known(lines, keys, distinct - self._plain),
            [line for line, key in zip(lines, keys, strict=True) if key in telling]
            if telling
            else [],
        )

    def _find_telling(self, distinct: set[bytes]) -> set[bytes]:
        if len(self._dull) + len(self._telling) > self.MOST:
            self._dull.clear()
            self._telling.clear()
        for key in distinct - self._dull - self._telling:
            held = self._telling if any(mark in key for mark in _ALL_MARKS) else self._dull
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
