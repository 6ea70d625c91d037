"""Whole lines out of the pieces that a pipe delivers. Pure, bytes only.

pieces   "lo" "ss 1\nlos" "s 2\n"     ->  "loss 1", "loss 2"
no end   "Password: " ...1 s...       ->  "Password: "
bar      "\r 10%" "\r 20%" ...        ->  " 20%" every few seconds, and the last
endless  70000 bytes without an end   ->  65536 and 4464
"""

from __future__ import annotations

LONGEST = 64 * 1024
IDLE_S = 1.0
"""A line without an end is shown after so long a silence."""
BAR_S = 5.0
"""A progress bar that never falls silent is shown this often."""


class LineSplitter:
    """The state of one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._fed = 0.0
        self._shown = 0.0
        self._cut = False
        """Whether the line so far was shown before its end came."""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that became whole, without their ends."""
        if not self._rest:
            self._shown = now
        self._fed = now
        pieces = (self._rest + data).split(b"\n")
        self._rest = pieces.pop()
        if pieces:
            if self._cut and not pieces[0].strip(b"\r"):
                del pieces[0]  # only the end of what was shown already
            self._cut = False
            self._shown = now
        lines = [part for piece in pieces for part in _cut_long(_last_state(piece))]
        # What a carriage return overwrote is not kept; a last one may be half of a line's end.
        self._rest = self._rest[self._rest.rfind(b"\r", 0, max(len(self._rest) - 1, 0)) + 1 :]
        while len(self._rest) >= LONGEST:
            lines.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
            self._cut = True
        return lines

    def due(self, now: float) -> bytes | None:
        """A line without an end that has waited long enough."""
        if not self._rest:
            return None
        is_idle = now - self._fed >= IDLE_S
        return self.flush() if is_idle or now - self._shown >= BAR_S else None

    def flush(self) -> bytes | None:
        """What is left at the end of the stream."""
        line, self._rest = _last_state(self._rest), b""
        self._cut = self._cut or bool(line)
        return line or None


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line


def _cut_long(line: bytes) -> list[bytes]:
    if len(line) <= LONGEST:
        return [line]
    return [line[start : start + LONGEST] for start in range(0, len(line), LONGEST)]
