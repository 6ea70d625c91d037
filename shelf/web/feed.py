"""Contents of a live page: read by one thread for all tabs, and only while a tab asks.

tab ──┐
tab ──┼─ look() ─► the last version      thread ─► make() ─► next version
tab ──┘  at once   (parts by hash)       no sooner than every_s, and at most SHARE of the time;
                                         stops IDLE_S after the last look, and when all is over
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from vjob.jobs.errors import VjobError

SHARE = 0.2
"""Greatest share of time spent on reading: what takes 10 s is read every 50 s."""
IDLE_S = 30.0
"""Seconds after the last request until reading stops; a suspended tab asks again when it wakes."""
MOST_LINES = 4000
KEPT_VERSIONS = 3
"""Versions whose parts stay available, since a tab may still ask for the previous one's."""
READING = "Reading ..."


@dataclass(frozen=True, kw_only=True)
class JobReading:
    """The result of reading a job once."""

    parts: Mapping[str, bytes] | None = None
    """Parts by name; None if unchanged."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Data that parts refer to, by a name derived from the bytes."""
    lines: Sequence[Any] = ()
    """New log lines, appended to the earlier ones."""
    note: str = ""
    """A sentence for the top of the page."""
    is_over: bool = False
    """True if nothing more will come."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The state of a page as sent to a browser tab."""

    version: int = 0
    """Number of the reading; 0 before the first."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The key of each part."""
    note: str = READING
    is_trouble: bool = False
    """True if the last reading failed: the note says how, and the parts are the former ones."""
    is_over: bool = False


class Feed:
    """The last version of a page, renewed by a thread while a tab asks for it."""

    def __init__(
        self,
        make: Callable[[], JobReading],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s = every_s
        self._make, self._clock = make, clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._wanted = 0.0
        self._shown = Shown()
        self._good: str = ""
        """Time of the last successful reading."""
        self._blobs: deque[Mapping[str, bytes]] = deque(maxlen=KEPT_VERSIONS)
        self._lines: deque[Any] = deque(maxlen=MOST_LINES)
        self._num_lines = 0

    def look(self) -> Shown:
        """Return the last version at once, and start reading the next unless all is over."""
        with self._lock:
            self._wanted = self._clock()
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_idle and not self._shown.is_over and not self._is_closed:
                self._wake.clear()
                # A daemon: a file server that hangs holds up no end.
                self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
                self._thread.start()
            return self._shown

    def list_lines(self, after: int) -> tuple[list[Any], int]:
        """Return the lines after the first `after` that are kept, and the number of all lines."""
        with self._lock:
            first = self._num_lines - len(self._lines)
            skip = max(0, after - first) if after <= self._num_lines else 0
            return list(islice(self._lines, skip, None)), self._num_lines

    def find_part(self, key: str) -> bytes | None:
        """Return the bytes of a part or blob in the last few versions; None if unknown."""
        with self._lock:
            return next((blobs[key] for blobs in reversed(self._blobs) if key in blobs), None)

    def close(self) -> None:
        """Stop reading, without waiting for a reading in progress."""
        self._is_closed = True
        self._wake.set()

    def renew(self) -> Shown:
        """Read once; after a failure, keep the former parts and add a note."""
        try:
            made = self._make()
        except Exception as error:  # whatever it is: said on the page, and tried again
            said = str(error) if isinstance(error, VjobError | OSError) else ""
            self._fail(said or f"{type(error).__name__}: {error}")
        else:
            self._take(made)
        return self._shown

    def _run(self) -> None:
        while not self._is_closed:
            begun = self._clock()
            self.renew()
            took = self._clock() - begun
            with self._lock:
                is_alone = self._clock() - self._wanted > IDLE_S + took
                if self._shown.is_over or is_alone:
                    self._thread = None
                    return
            self._wake.wait(max(self.every_s, took / SHARE - took))

    def _take(self, made: JobReading) -> None:
        names, blobs = self._shown.names, None
        if made.parts is not None:
            keys = {name: name_part(data) for name, data in made.parts.items()}
            blobs = {**made.blobs, **{keys[name]: data for name, data in made.parts.items()}}
            names = keys
        with self._lock:
            is_new = names != self._shown.names
            if blobs is not None and is_new:
                self._blobs.append(blobs)
            self._lines += made.lines
            self._num_lines += len(made.lines)
            self._good = time.strftime("%H:%M:%S")
            version = self._shown.version + is_new
            self._shown = Shown(version=version, names=names, note=made.note, is_over=made.is_over)

    def _fail(self, problem: str) -> None:
        shown = f"What is shown is as of {self._good}. " if self._good else ""
        with self._lock:
            self._shown = replace(self._shown, note=f"{shown}{problem}"[:1000], is_trouble=True)


def name_part(data: bytes) -> str:
    """Return a name that is unique for the content."""
    return hashlib.sha256(data).hexdigest()[:20]
