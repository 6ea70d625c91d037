"""One look at a job: its snapshot, and the verdict in the light of the looks before."""

from __future__ import annotations

from collections import deque

from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.model.verdict import Verdict
from vjob.jobs.monitor.readers.open import Reader
from vjob.jobs.monitor.rules.judge import LOOKS, judge


class JudgedReader:
    """Reads and judges; remembers as much as the judge takes into account."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._history: deque[Snapshot] = deque(maxlen=LOOKS)

    def read(self) -> tuple[Snapshot, Verdict]:
        snapshot = self._reader.read()
        verdict = judge(snapshot, list(self._history))
        self._history.append(snapshot)
        return snapshot, verdict
