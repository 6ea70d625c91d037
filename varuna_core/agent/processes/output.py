"""Output of the ranks, carried from their pipes into files by one thread.

    rank 3 stdout ─► <node>.out    (whole lines, each with "3: " before it)
                     <node>.times  (when they were written)

Only this thread writes the node's logs, so lines never interleave; and a slow disk holds up the
ranks at worst, not the agent's watch over them. A log that outgrows `cluster.log_limit_mb` is cut
in its middle. Lines out of the pieces that a pipe delivers:

    pieces   "lo" "ss 1\\nlos" "s 2\\n"     ->  "loss 1", "loss 2"
    no end   "Password: " ...1 s...       ->  "Password: "
    bar      "\\r 10%" "\\r 20%" ...        ->  " 20%" every few seconds, and the last
    endless  70000 bytes without an end   ->  65536 and 4464
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from pathlib import Path

from varuna_core.agent.processes.last_words import LastWords
from varuna_core.records.files import PRIVATE_FILE, write_atomic
from varuna_core.records.logs.times import CUT_NOTE, MARK_S, Cut, format_mark, move_marks
from varuna_core.records.runfolder import AttemptFolder

RETRY_S = 5.0


class Sink:
    """Log file of one writer that never holds up what it logs.

    On a full disk, lines are dropped and counted, and writing is tried again. With `says_loss`, a
    line in the file says how much is missing.
    """

    def __init__(self, path: Path, *, says_loss: bool = False) -> None:
        self._path = path
        self._says_loss = says_loss
        self._unsaid = 0
        self._fd: int | None = None
        self._retry = 0.0
        self.dropped = 0
        """Number of bytes that could not be written."""
        self.trouble = ""
        """The last error of a write."""
        self.size = 0
        """Size of the file, which has one writer at a time."""
        with contextlib.suppress(OSError):
            self.size = os.stat(path).st_size

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        if time.monotonic() >= self._retry:
            try:
                if self._fd is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                    self._fd = os.open(self._path, flags, PRIVATE_FILE)
                if self._says_loss and self._unsaid:
                    said = f"\nvjob: {self._unsaid} bytes are missing here: {self.trouble}\n"
                    self.size += os.write(self._fd, said.encode())
                    self._unsaid = 0
                while left:
                    written = os.write(self._fd, left)
                    self.size += written
                    left = left[written:]
            except OSError as error:
                self.trouble = error.strerror or str(error)
                self._retry = time.monotonic() + RETRY_S
        self.dropped += len(left)
        self._unsaid += len(left)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


LONGEST = 64 * 1024
LINE_BYTES = 2 * LONGEST
"""Bytes that are searched for the end of a line; a line with its tag is shorter."""
_COPY_BYTES = 1024 * 1024


def cut_middle(path: Path, size: int, most: int, before: Cut | None) -> Cut | None:
    """Cut the middle out of a log, in place: the first half of the allowed size stays, and the
    newest lines.

    Return None if nothing can be cut. If the agent is killed meanwhile, the file has some of the
    newest lines twice.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        place = _locate_line(fd, most // 2) if before is None else before.place
        begin = _locate_line(fd, size - most // 4)
        note_bytes = len(CUT_NOTE % 0)
        end = place + note_bytes
        lost = begin - place if before is None else begin - end + before.num_bytes
        if begin <= end:
            return None
        os.pwrite(fd, CUT_NOTE % lost, place)
        for at in range(begin, size, _COPY_BYTES):  # forward: what is copied over is copied already
            os.pwrite(fd, os.pread(fd, min(_COPY_BYTES, size - at), at), at - begin + end)
        os.ftruncate(fd, size - begin + end)
        return Cut(place, begin, end, lost)
    finally:
        os.close(fd)


def _locate_line(fd: int, at: int) -> int:
    """Return the position at which the next line begins."""
    return at + os.pread(fd, LINE_BYTES, at).find(b"\n") + 1


IDLE_S = 1.0
"""Seconds of silence after which a line without an end is written."""
BAR_S = 5.0
"""Seconds between two writes of a progress bar that is updated all the time."""


class LineSplitter:
    """Splits the output of one stream into lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._fed = 0.0
        self._shown = 0.0
        self._cut = False
        """True if a part of the present line was written before the end of the line came."""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take data from the pipe; return the lines that it completes, without their line ends."""
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
        """Return the last line, which has no end, if it has waited long enough to be written."""
        if not self._rest:
            return None
        is_idle = now - self._fed >= IDLE_S
        return self.flush() if is_idle or now - self._shown >= BAR_S else None

    def flush(self) -> bytes | None:
        """Return the last line, which has no end, when the stream has ended."""
        line, self._rest = _last_state(self._rest), b""
        self._cut = self._cut or bool(line)
        return line or None


def _last_state(line: bytes) -> bytes:
    """Return the last state of a line with carriage returns, as a terminal would show it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line


def _cut_long(line: bytes) -> list[bytes]:
    if len(line) <= LONGEST:
        return [line]
    return [line[start : start + LONGEST] for start in range(0, len(line), LONGEST)]


_READ = 256 * 1024
_TICK_S = 0.25


class _Stream:
    """One pipe of one rank."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank = rank
        self.kind = kind
        self.splitter = LineSplitter()
        self.ended = threading.Event()


class Pump(threading.Thread):
    """Thread that copies the output of all ranks from their pipes to the node's logs; call `add`
    for all pipes before `start`."""

    def __init__(self, attempt: AttemptFolder, host: str, limit_mb: int | None = None) -> None:
        """`limit_mb` is the limit of the two logs, .out and .err, together."""
        super().__init__(name="pump", daemon=True)
        self._merged = {
            kind: Sink(attempt.node_log(host, kind), says_loss=True) for kind in ("out", "err")
        }
        self._attempt, self._host = attempt, host
        self._most = None if limit_mb is None else (limit_mb << 20) // 2
        self._cuts: dict[str, Cut] = {}
        self._cut_at = dict.fromkeys(self._merged, self._most)
        self._times = Sink(attempt.node_log(host, "times"))
        self._marked = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, list[_Stream]] = {}
        self._words: dict[int, LastWords] = {}
        self._closing = False

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        self._words[rank] = LastWords()
        for kind, pipe in (("out", stdout), ("err", stderr)):
            os.set_blocking(pipe, False)
            stream = _Stream(rank, kind)
            self._streams.setdefault(rank, []).append(stream)
            self._selector.register(pipe, selectors.EVENT_READ, stream)

    def run(self) -> None:
        while self._selector.get_map() and not self._closing:
            self._read_ready(_TICK_S)
            now = time.monotonic()
            for streams in self._streams.values():
                for stream in streams:
                    line = stream.splitter.due(now)
                    if line is not None:
                        self._write_lines(stream, [line])
        self._read_ready(0)
        for key in list(self._selector.get_map().values()):
            self._end(key.fd, key.data)

    def last_error(self, rank: int, timeout_s: float) -> str:
        """Return the rank's last line on stderr, once its pipes are read to their end."""
        deadline = time.monotonic() + timeout_s
        for stream in self._streams[rank]:
            # A process that the rank left in another session may hold the pipe for ever.
            stream.ended.wait(max(deadline - time.monotonic(), 0))
        return self._words[rank].error.strip()

    def count_unwritten(self) -> int:
        """Return the number of bytes that the ranks of this node printed and that could not be
        written to its logs."""
        return sum(sink.dropped for sink in self._merged.values())

    def last_output_at(self, rank: int) -> float:
        """Return the time, by the monotonic clock, of a rank's last line; if the rank was started
        by a launcher, so that its lines are not told apart, that of the last line of any rank."""
        held = self._words.get(rank)
        words = [held] if held is not None else list(self._words.values())
        return max((one.last_at for one in words), default=float("-inf"))

    def find_exception(self, rank: int) -> str:
        """Return the exception of the rank's last traceback; call this after `last_error`."""
        return self._words[rank].exception

    def close(self, timeout_s: float) -> None:
        self._closing = True
        if self.is_alive():
            self.join(timeout_s)

    def _read_ready(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            stream: _Stream = key.data
            try:
                data = os.read(key.fd, _READ)
            except BlockingIOError:
                continue
            if not data:
                self._end(key.fd, stream)
                continue
            self._write_lines(stream, stream.splitter.feed(data, time.monotonic()))

    def _end(self, pipe: int, stream: _Stream) -> None:
        self._selector.unregister(pipe)
        line = stream.splitter.flush()
        if line is not None:
            self._write_lines(stream, [line])
        stream.ended.set()

    def _write_lines(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        now = time.monotonic()
        if stream.kind == "err":
            self._words[stream.rank].note_err(lines, now)
        else:
            self._words[stream.rank].note_out(now)
        if now - self._marked >= MARK_S:
            self._marked = now
            out, err = self._merged["out"].size, self._merged["err"].size
            self._times.write(format_mark(time.time(), out, err))
        tag = b"%d: " % stream.rank
        self._merged[stream.kind].write(tag + (b"\n" + tag).join(lines) + b"\n")
        self._bound(stream.kind)

    def _bound(self, kind: str) -> None:
        """Cut the middle out of a log that has outgrown its limit; adjust the positions in it."""
        sink, most, cut_at = self._merged[kind], self._most, self._cut_at[kind]
        if most is None or cut_at is None or sink.size <= cut_at:
            return
        path = self._attempt.node_log(self._host, kind)
        self._cut_at[kind] = sink.size + most // 8  # where it cannot be cut now
        with contextlib.suppress(OSError):
            cut = cut_middle(path, sink.size, most, self._cuts.get(kind))
            if cut is None:
                return
            self._cuts[kind], self._cut_at[kind] = cut, most
            sink.size = cut.move(sink.size)
            self._move_marks(("out", "err").index(kind), cut)

    def _move_marks(self, column: int, cut: Cut) -> None:
        path = self._attempt.node_log(self._host, "times")
        data = move_marks(path.read_bytes(), column, cut)
        write_atomic(path, data.decode("ascii", "replace"))
        self._times.close()
        self._times = Sink(path)
