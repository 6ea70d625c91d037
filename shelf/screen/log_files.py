"""Read the lines for the log pane, from the files of a run's attempt or of a bare folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from varuna_core.records.files import list_names
from varuna_core.records.nodes import read_reports
from varuna_core.records.runfolder import AttemptFolder
from vjob.jobs.monitor.log_lines.stream import Log, LogLine, merge_lines
from vjob.jobs.monitor.model.snapshot import Line

ENDINGS = ("out", "err", "log")
FIRST_LINES = 400
"""Lines read at first of a node, or of all nodes together."""
FIRST_BYTES, LEAST_BYTES, ALL_BYTES = 64 * 1024, 4 * 1024, 8 * 1024 * 1024
"""Bytes read for the first lines: the most and the least of a file, and about all together."""
MOST_LINES = 4000
"""The most lines returned by one read; the pane keeps little more."""
FILES_A_LOOK = 1000
"""Files read at a time; with thousands of nodes, files are read in turns."""
LIST_S = 30.0
"""Seconds between listings of the folder, for nodes that appear later."""


class LogFiles:
    """Follows only the files of the node or nodes in the log pane."""

    def __init__(
        self,
        find_folder: Callable[[], Path | None],
        classify: Callable[[str], str] = lambda text: "",
        find_files: Callable[[], Mapping[str, Mapping[str, str]]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_folder = find_folder
        """Function that returns the present attempt's folder; None before there are any files."""
        self._classify = classify
        """Function that returns the kind of an error line; empty for other lines."""
        self._find_files = find_files
        """Function that returns logs by node and kind, if they are not in a run folder."""
        self._clock = clock
        self._folder: Path | None = None
        self._node: str | None = None
        self._is_first = True
        self._offsets: dict[str, float] = {}
        """Offsets of the nodes' clocks."""
        self._logs: dict[str, Log | None] = {}
        """Logs by file name, in the order of their turns; None for one not opened yet."""
        self._listed = 0.0

    def read_new(self, node: str | None) -> list[Line]:
        folder = self._find_folder()
        if folder is None:
            return self._read_files(node)
        if (folder, node) != (self._folder, self._node) or self._is_first:
            self._folder, self._node = folder, node
            self._logs, self._is_first = {}, False
            self._open(folder, node)
        elif self._clock() - self._listed > LIST_S:
            self._open(folder, node)
        logs: list[Log] = []
        for name in list(self._logs)[:FILES_A_LOOK]:
            logs.append(self._logs.pop(name) or self._follow(folder / name))
            self._logs[name] = logs[-1]
        lines = deque(merge_lines(log.read() for log in logs), maxlen=MOST_LINES)
        return [self._make_line(line) for line in lines]

    def _read_files(self, node: str | None) -> list[Line]:
        if node != self._node or self._is_first:
            self._node, self._logs, self._is_first = node, {}, False
        for name, files in self._find_files().items():
            for kind, path in files.items():
                if node in (None, name) and path not in self._logs:
                    is_err = kind == "err"
                    self._logs[path] = Log(Path(path), name, num_lines=FIRST_LINES, is_err=is_err)
        lines = merge_lines(log.read() for log in self._logs.values() if log is not None)
        return [self._make_line(line) for line in deque(lines, maxlen=MOST_LINES)]

    def _open(self, folder: Path, node: str | None) -> None:
        """Begin to follow files that are not followed yet."""
        self._listed = self._clock()
        if node is None:
            names = sorted(name for name in list_names(folder) if _split(name)[1] in ENDINGS)
        else:
            names = [f"{node}.{ending}" for ending in ENDINGS]
        if not self._logs.keys() >= set(names):
            reports = read_reports(AttemptFolder(folder, 0)).values()
            self._offsets = {report.host: report.clock_offset_s or 0.0 for report in reports}
        for name in names:
            self._logs.setdefault(name)

    def _follow(self, path: Path) -> Log:
        """Follow a file from its last lines, fewer of them if there are many files."""
        num_files = len(self._logs) + 1
        node = _split(path.name)[0]
        return Log(
            path,
            node,
            num_lines=max(1, FIRST_LINES // num_files),
            within_bytes=max(LEAST_BYTES, min(FIRST_BYTES, ALL_BYTES // num_files)),
            clock_offset_s=self._offsets.get(node, 0.0),
        )

    def _make_line(self, line: LogLine) -> Line:
        return Line(
            text=line.text,
            node=line.label,
            rank=line.rank,
            file=f"{line.label}.{'err' if line.is_err else 'out'}",
            kind=self._classify(line.text),
            at=line.at,
        )


def _split(name: str) -> tuple[str, str]:
    """Split a file name into node and extension."""
    node, _, ending = name.rpartition(".")
    return node, ending
