"""Carries the ranks' output from their pipes into files, in one thread.

    rank 3 stdout ─► ranks/3.out (the bytes as they are)
                  └► <node>.out  (whole lines, each with "3: " before it)
                     <node>.times (when they were written)

Only this thread writes the node's logs, so lines never interleave; and a slow disk holds up the
ranks at worst, not the agent's watch over them.
"""

from __future__ import annotations

import os
import selectors
import threading
import time

from varuna_core.agent.processes.lines import LineSplitter
from varuna_core.agent.processes.sink import Sink
from varuna_core.records.logs.times import MARK_S, format_mark
from varuna_core.records.runfolder import AttemptFolder

LAST_ERROR_CHARS = 500
_READ = 256 * 1024
_TICK_S = 0.25


class _Stream:
    """One pipe of one rank."""

    def __init__(self, rank: int, kind: str, raw: Sink) -> None:
        self.rank = rank
        self.kind = kind
        self.raw = raw
        self.splitter = LineSplitter()
        self.last = b""
        """Last line with something in it."""
        self.ended = threading.Event()


class Pump(threading.Thread):
    """The thread; `add` all pipes before `start`."""

    def __init__(self, attempt: AttemptFolder, host: str) -> None:
        super().__init__(name="pump", daemon=True)
        self._attempt = attempt
        self._merged = {
            kind: Sink(attempt.node_log(host, kind), says_loss=True) for kind in ("out", "err")
        }
        self._times = Sink(attempt.node_log(host, "times"))
        self._marked = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, list[_Stream]] = {}
        self._closing = False

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        for kind, pipe in (("out", stdout), ("err", stderr)):
            os.set_blocking(pipe, False)
            stream = _Stream(rank, kind, Sink(self._attempt.rank_log(rank, kind)))
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
        """The rank's last line on stderr, once its pipes are read to their end."""
        deadline = time.monotonic() + timeout_s
        for stream in self._streams[rank]:
            # A process that the rank left in another session may hold the pipe for ever.
            stream.ended.wait(max(deadline - time.monotonic(), 0))
        last = next(item.last for item in self._streams[rank] if item.kind == "err")
        text = last.decode("utf-8", "replace").strip()[:LAST_ERROR_CHARS]
        dropped = sum(stream.raw.dropped for stream in self._streams[rank])
        if dropped:
            trouble = next(item.raw.trouble for item in self._streams[rank] if item.raw.dropped)
            text += f" (vjob could not write {dropped} bytes of its logs: {trouble})"
        return text.strip()

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
            stream.raw.write(data)
            self._write_lines(stream, stream.splitter.feed(data, time.monotonic()))

    def _end(self, pipe: int, stream: _Stream) -> None:
        self._selector.unregister(pipe)
        line = stream.splitter.flush()
        if line is not None:
            self._write_lines(stream, [line])
        stream.raw.close()
        stream.ended.set()

    def _write_lines(self, stream: _Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        for line in reversed(lines):
            if line.strip():
                stream.last = line
                break
        now = time.monotonic()
        if now - self._marked >= MARK_S:
            self._marked = now
            out, err = self._merged["out"].size, self._merged["err"].size
            self._times.write(format_mark(time.time(), out, err))
        tag = b"%d: " % stream.rank
        self._merged[stream.kind].write(tag + (b"\n" + tag).join(lines) + b"\n")
