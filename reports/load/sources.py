"""Find the files that a report can read, in a run folder or in a bare folder of per-node logs.

Attempts are the `attempt-<n>` folders and the `earlier-<n>` tries in them; nodes are named by their
files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.records.files import is_foreign_link, list_files, walk_files
from varuna_core.records.plan import read_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.reports.load.kineto import ENDINGS, is_profile

LOGS = (".out", ".log", ".txt")
_LOG_NAME = re.compile(r"\.(out|log|txt|err|[oe]?\d+)$|^[^.]+$")
"""Names of logs, including `train.o4711` and names without an extension."""
MOST_ATTEMPTS = 200
"""The most attempts of a run that are read, newest first; each costs time, even an empty one."""
_OF_BATCH = re.compile(r"scheduler(\.[\w-]+)?\.out")
"""Output of the batch script, which is not the log of a node."""


class SourceError(ValueError):
    """Raised if there is nothing to read; the message says what was looked for."""


@dataclass(frozen=True, kw_only=True)
class AttemptSources:
    """The files of one start of the ranks."""

    label: str
    """`0`, or `0.earlier-1`; empty in a bare folder."""
    folder: Path
    logs: tuple[tuple[str, Path], ...]
    """(node, file of its standard output)."""
    errors: tuple[tuple[str, Path], ...]
    """(node, file of its standard error)."""
    traces: tuple[Path, ...]
    profiles: tuple[Path, ...] = ()
    """torch.profiler's files."""
    gpus: tuple[tuple[str, Path], ...]
    """(node, file of its samples): JSON lines if there are any, else text."""
    exits: tuple[Path, ...]
    counts: tuple[tuple[int, Path], ...] = ()
    """(rank, file of its counted optimizer steps)."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All files of a job."""

    name: str
    run: RunFolder | None
    """The run folder; None for a bare folder."""
    attempts: tuple[AttemptSources, ...]
    num_left_out: int = 0
    """The number of older attempts beyond MOST_ATTEMPTS, which are not read."""


def locate_sources(path: Path) -> Sources:
    """Find the files of a job. `path` is a run folder, a folder of logs, or one log."""
    if path.is_file():
        if not _LOG_NAME.search(path.name):
            raise SourceError(
                f"{path.name} is no log: give a job, a run folder, a folder of logs, or one log, "
                f"*{', *'.join(LOGS)}"
            )
        attempt = AttemptSources(
            label="",
            folder=path.parent,
            logs=((path.stem, path),),
            errors=(),
            traces=(),
            gpus=(),
            exits=(),
        )
        return Sources(name=path.name, run=None, attempts=(attempt,))
    if not path.is_dir():
        raise SourceError(f"{path} is neither a folder nor a file")
    run = RunFolder(path)
    started = run.attempts()
    attempts = [
        found
        for attempt in started[-MOST_ATTEMPTS:]
        for found in (*_find_earlier(attempt), _collect_attempt(str(attempt.number), attempt.path))
    ]
    attempts = _add_outer_profiles(run, attempts)
    if not attempts and not run.record.exists() and not run.plan.exists():
        bare = _collect_attempt("", path)
        if not bare.logs and not bare.traces and not bare.gpus and not bare.profiles:
            raise SourceError(
                f"{path} holds nothing to report: no attempt-<n> of a run, no <node>{LOGS[0]}, "
                "no trace/node-<index>.jsonl, no *.pt.trace.json"
            )
        return Sources(name=path.name, run=None, attempts=(bare,))
    left_out = max(0, len(started) - MOST_ATTEMPTS)
    return Sources(name=path.name, run=run, attempts=tuple(attempts), num_left_out=left_out)


def _find_earlier(attempt: AttemptFolder) -> list[AttemptSources]:
    """Return the earlier tries of an attempt, oldest first."""
    numbers = sorted(
        int(match.group(1))
        for path in list_files(attempt.path, "earlier-*")
        if (match := re.fullmatch(r"earlier-(\d{1,9})", path.name))
    )
    return [
        _collect_attempt(f"{attempt.number}.earlier-{number}", attempt.path / f"earlier-{number}")
        for number in numbers
    ]


def _collect_attempt(label: str, folder: Path) -> AttemptSources:
    own = AttemptFolder(folder, 0).preflight  # the nodes' table, no log of one
    found = [(name, path) for name, path in _list(folder, LOGS) if path != own]
    logs = [(name, path) for name, path in found if not _OF_BATCH.fullmatch(path.name)]
    if not logs:
        logs = [(f"rank {path.stem}", path) for _, path in _list(folder / "ranks", (".out",))]
    samples = dict(_list(folder, (".gpu",)))
    samples |= {name.removesuffix(".gpu"): path for name, path in _list(folder, (".gpu.jsonl",))}
    return AttemptSources(
        label=label,
        folder=folder,
        logs=tuple(logs),
        errors=tuple(_list(folder, (".err",))),
        traces=tuple(path for _, path in _list(folder / "trace", (".jsonl",))),
        profiles=tuple(find_profiles(folder)),
        gpus=tuple(samples.items()),
        exits=tuple(path for _, path in _list(folder / "exit", (".json",))),
        counts=tuple(sorted(AttemptFolder(folder, 0).list_steps().items())),
    )


MOST_FILES = 10_000
"""The most files searched for profiles in each of an attempt's two folders, or elsewhere."""
LATE_S = 10.0
"""Seconds by which a file system's clock may be ahead of the one that wrote the end."""


def find_profiles(folder: Path) -> list[Path]:
    """Return torch.profiler's files at any depth of `trace/` and `ranks/`, and those with its
    handler's extension in the folder itself."""
    found = [path for _, path in _list(folder, (".pt.trace.json", ".pt.trace.json.gz"))]
    for name in ("trace", "ranks"):
        deep = walk_files(folder / name, MOST_FILES)
        found += sorted(path for path in deep if path.name.endswith(ENDINGS) and path.is_file())
    return [path for path in found if is_profile(path)]


def _add_outer_profiles(run: RunFolder, attempts: list[AttemptSources]) -> list[AttemptSources]:
    """Add the profiles in the folder that the conf names, each to the attempt that began last
    before it was written. Files from before or after the run are left out: they may be others'."""
    plan = read_plan(run.plan)
    if plan is None or plan.traces is None or not attempts:
        return attempts
    times = {
        (event.get("kind"), str(event.get("attempt"))): float(event["time"])
        for event in read_events(run)
    }
    begins = [times.get(("started", attempt.label), float("inf")) for attempt in attempts]
    until = times.get(("ended", attempts[-1].label), float("inf")) + LATE_S
    found: list[list[Path]] = [[] for _ in attempts]
    for path in walk_files(Path(plan.traces), MOST_FILES):
        if not path.name.endswith(ENDINGS) or not path.is_file():
            continue
        written = path.stat().st_mtime
        begun = [at for at, began in enumerate(begins) if began <= written]
        if begun and written <= until and is_profile(path):
            found[begun[-1]].append(path)
    return [
        replace(attempt, profiles=(*attempt.profiles, *sorted(paths)))
        for attempt, paths in zip(attempts, found, strict=True)
    ]


def _list(folder: Path, endings: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return (name without extension, file) in numeric order."""
    paths = [] if is_foreign_link(folder) else list_files(folder)
    children = [
        path
        for path in paths
        if path.name.endswith(endings) and path.is_file() and not is_foreign_link(path)
    ]
    found = [
        (path.name[: -len(ending)], path)
        for path in children
        for ending in endings
        if path.name.endswith(ending) and path.name != ending
    ]
    return sorted(found, key=lambda pair: [part.zfill(12) for part in re.split(r"(\d+)", pair[0])])
