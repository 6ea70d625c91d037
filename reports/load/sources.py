"""Find the files that a report can read, in a run folder or in a bare folder of per-node logs.

Attempts are the `attempt-<n>` folders and the `earlier-<n>` tries in them; nodes are named by their
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.records.files import is_foreign_link, list_names
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import MOST_NODES, AttemptFolder, RunFolder

LOGS = (".out", ".log", ".txt")
_LOG_NAME = re.compile(r"\.(out|log|txt|err|[oe]?\d+)$|^[^.]+$")
"""Names of logs, including `train.o4711` and names without an extension."""
MOST_ATTEMPTS = 200
"""The most attempts and earlier tries of a run that are read, newest first; each costs time, even
an empty one. The oldest that is read is the one that reaches MOST_NODES files, or a file a rank."""
_OF_BATCH = re.compile(r"scheduler(\.[\w-]+)?\.out")
"""Output of the batch script, which is not the log of a node."""
_OF_RANK = re.compile(r"[0-9]{1,9}\.steps")


class SourceError(ValueError):
    """Raised if there is nothing to read; the message says what was looked for."""


@dataclass(frozen=True, kw_only=True)
class AttemptSources:
    """The files of one start of the ranks."""

    label: str
    """Name of the attempt, such as `0` or `0.earlier-1`; empty in a bare folder."""
    folder: Path
    logs: tuple[tuple[str, Path], ...]
    """(node, file of its standard output)."""
    errors: tuple[tuple[str, Path], ...]
    """(node, file of its standard error)."""
    traces: tuple[Path, ...]
    gpus: tuple[tuple[str, Path], ...]
    """(node, file of its samples): JSON lines if there are any, else text."""
    exits: tuple[Path, ...]
    counts: tuple[tuple[int, Path], ...] = ()
    """(rank, file of its counted optimizer steps)."""
    num_left_out: int = 0
    """Number of files beyond the limit of their kind, which are not read."""

    @property
    def num_files(self) -> int:
        kinds = (self.logs, self.errors, self.traces, self.gpus, self.exits, self.counts)
        return sum(map(len, kinds))


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All files of a job."""

    name: str
    run: RunFolder | None
    """The run folder; None for a bare folder."""
    attempts: tuple[AttemptSources, ...]
    num_left_out: int = 0
    """The number of older attempts that are not read, since attempts or files are too many."""


def show_text(text: str) -> str:
    """Replace lone surrogates in text, which no table or page can store."""
    return text.encode("utf-8", "replace").decode()


def locate_sources(path: Path) -> Sources:
    """Find the files of a job. `path` is a run folder, a folder of logs, or one log."""
    if path.is_file():
        if not _LOG_NAME.search(path.name):
            raise SourceError(
                f"{path.name} is not a log: give a job, a run folder, a folder of logs, or one "
                f"log, *{', *'.join(LOGS)}"
            )
        attempt = AttemptSources(
            label="",
            folder=path.parent,
            logs=((show_text(path.stem), path),),
            errors=(),
            traces=(),
            gpus=(),
            exits=(),
        )
        return Sources(name=show_text(path.name), run=None, attempts=(attempt,))
    if not path.is_dir():
        raise SourceError(f"{path} is neither a folder nor a file")
    run = RunFolder(path)
    plan = read_plan(run.plan)
    most = max(MOST_NODES, plan.world if plan is not None else 0)
    folders = [found for attempt in run.attempts() for found in _list_tries(attempt)]
    attempts: list[AttemptSources] = []
    num_files = 0
    for label, folder in reversed(folders[-MOST_ATTEMPTS:]):
        attempts.insert(0, _collect_attempt(label, folder, most))
        num_files += attempts[0].num_files
        if num_files > most:
            break
    left_out = len(folders) - len(attempts)
    if not attempts and not run.record.exists() and not run.plan.exists():
        bare = _collect_attempt("", path, most)
        if not bare.logs and not bare.traces and not bare.gpus:
            raise SourceError(
                f"{path} contains nothing to report: no attempt-<n> of a run, no "
                f"<node>{LOGS[0]}, no trace/node-<index>.jsonl"
            )
        return Sources(name=path.name, run=None, attempts=(bare,))
    return Sources(name=path.name, run=run, attempts=tuple(attempts), num_left_out=left_out)


def _list_tries(attempt: AttemptFolder) -> list[tuple[str, Path]]:
    """Return the label and the folder of each try of an attempt, the oldest first."""
    matches = (re.fullmatch(r"earlier-(\d{1,9})", name) for name in list_names(attempt.path))
    numbers = sorted(int(match[1]) for match in matches if match is not None)
    label, folder = str(attempt.number), attempt.path
    return [
        *((f"{label}.earlier-{number}", folder / f"earlier-{number}") for number in numbers),
        (label, folder),
    ]


def _collect_attempt(label: str, folder: Path, most: int) -> AttemptSources:
    """Find the files of an attempt, at most `most` of each kind."""
    own, ranks = _Names(folder, most), _Names(folder / "ranks", most)
    table = AttemptFolder(folder, 0).preflight.name  # the nodes' table, no log of one
    logs = own.find(LOGS, lambda name: name != table and not _OF_BATCH.fullmatch(name))
    if not logs:
        logs = [(f"rank {stem}", path) for stem, path in ranks.find((".out",))]
    samples = dict(own.find((".gpu",)))
    samples |= {name.removesuffix(".gpu"): path for name, path in own.find((".gpu.jsonl",))}
    traces, exits = _Names(folder / "trace", most), _Names(folder / "exit", most)
    found = AttemptSources(
        label=label,
        folder=folder,
        logs=tuple(logs),
        errors=tuple(own.find((".err",))),
        traces=tuple(path for _, path in traces.find((".jsonl",))),
        gpus=tuple(samples.items()),
        exits=tuple(path for _, path in exits.find((".json",))),
        counts=tuple(
            (int(stem), path) for stem, path in ranks.find((".steps",), _OF_RANK.fullmatch)
        ),
    )
    left_out = sum(names.num_left_out for names in (own, ranks, traces, exits))
    return replace(found, num_left_out=left_out)


class _Names:
    """The names in a folder, listed once; at most `most` of each kind are used."""

    def __init__(self, folder: Path, most: int) -> None:
        self.num_left_out = 0
        self._folder, self._most = folder, most
        self._names = [] if is_foreign_link(folder) else list_names(folder)

    def find(
        self, endings: tuple[str, ...], keeps: Callable[[str], object] = lambda name: True
    ) -> list[tuple[str, Path]]:
        """Return (name without extension, file) in numeric order."""
        found = [
            (name[: -len(ending)], name)
            for name in self._names
            for ending in endings
            if name.endswith(ending) and name != ending and keeps(name)
        ]
        found.sort(key=lambda pair: [part.zfill(12) for part in re.split(r"(\d+)", pair[0])])
        self.num_left_out += len(found[self._most :])
        paths = ((show_text(stem), self._folder / name) for stem, name in found[: self._most])
        return [
            (stem, path) for stem, path in paths if path.is_file() and not is_foreign_link(path)
        ]
