"""The `vjob prune` command: list old runs, or remove them.

A run is removed if it has ended, nothing in it was written for the given number of days, and it
holds no files that the training left for its user. Other runs are kept, with the reason. A folder
is first renamed to a hidden name and then emptied: if interrupted, each run is whole or gone, and
the next `vjob prune --delete` removes the rest. Nothing outside the run folder is touched, and no
link is followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from varuna_core.records import record as records
from varuna_core.records.checkpoints import NAME, TRACKERS
from varuna_core.records.files import list_files, read_json
from varuna_core.records.formatting import (
    align_columns,
    format_duration,
    format_size,
    wrap_columns,
    wrap_text,
)
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.runs.find import RunView, is_over, view_runs
from vjob.jobs.runs.owner import is_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.job import JobState

log = logging.getLogger(__name__)
DAY_S = 86400.0
HIDDEN = ".pruned-"
"""Prefix of the name of a folder that is being removed."""
_WEIGHTS = (".ckpt", ".pt", ".pth", ".safetensors")
_MAKINGS = ("__pycache__", ".git")
"""Folders in a copy of the code that contain no results of the training."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Criteria for the runs to remove."""

    days: float
    keep: int = 0
    """Number of the newest runs of each name to keep, however old."""
    checkpoints: bool = False
    """Also remove runs with checkpoints or other files of the ranks."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run, and the decision about it."""

    run: str
    state: str
    written: float
    """Time of the last write in the run folder, by the file system's clock."""
    size_bytes: int = 0
    num_files: int = 0
    folder: str
    kept: str
    """The reason to keep the run; empty if the run is to be removed."""
    left: str = ""
    """A file of the ranks in the folder, because of which the run is kept."""


def choose_runs(wanted: Wanted, folder: Path | None = None) -> list[Candidate]:
    """Return all known runs, or those in a folder of logs, oldest first, each with the decision.

    Each scheduler is queried once for runs that have not ended.
    """
    runs = index.list_runs() if folder is None else _list_folder(folder)
    views = view_runs(runs)
    waiting = [view.record for view in views if not is_over(view)]
    awaited = {path for record in waiting for path in (*record.after, *record.after_any)}
    newest = _find_newest(views, wanted.keep)
    living = _ask_living(views)
    found = []
    for view in views:
        kept = _explain_state(view, living)
        if not kept and str(view.run.path) in awaited:
            kept = "another run, which has not ended, waits for this run"
        if not kept and view.run.path in newest:
            kept = f"one of the newest {wanted.keep} runs of its name"
        if not kept and time.time() - view.record.submitted < wanted.days * DAY_S:
            kept = _explain_age(wanted)
        one = Candidate(
            run=view.record.run,
            state=view.state,
            written=view.record.submitted,
            folder=str(view.run.path),
            kept=kept,
        )
        found.append(one if kept else _measure(one, view.run, wanted))
    return sorted(found, key=lambda one: one.written)


def _list_folder(folder: Path) -> list[RunFolder]:
    """Return the runs in a folder of logs, except links."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; give a folder of logs") from None
    root = folder.resolve()
    runs = [RunFolder(root / name) for name in names if not name.startswith(".")]
    found = [run for run in runs if is_ours(run) and run.record.is_file()]
    if not found and (root / "record.json").is_file():
        raise InputError(f"{folder} is a run, not a folder of logs; `rm -r` removes a single run")
    return found


def _find_newest(views: Sequence[RunView], keep: int) -> set[Path]:
    """Return the folders of the newest runs of each name."""
    by_name: dict[str, list[RunView]] = {}
    for view in views:
        by_name.setdefault(view.record.name, []).append(view)
    return {
        view.run.path
        for same in by_name.values()
        for view in sorted(same, key=lambda view: view.record.submitted, reverse=True)[:keep]
    }


def _ask_living(views: Sequence[RunView]) -> Mapping[str, Collection[str] | None]:
    """Return the names of runs with a live job, by scheduler: an ended run may have been requeued.

    The value is None if the scheduler does not answer.
    """
    found: dict[str, Collection[str] | None] = {}
    for name in {view.record.scheduler for view in views if is_over(view)}:
        try:
            found[name] = set(schedulers.get_scheduler(name).find_orphans())
        except UncertainError as error:
            log.warning("%s", error)
            found[name] = None
    return found


def _explain_state(view: RunView, living: Mapping[str, Collection[str] | None]) -> str:
    """Return the reason to keep a run whatever its age; empty if there is none."""
    if not is_ours(view.run):
        return "the run belongs to another user"
    if view.run.path.is_symlink():
        return "its folder is a link"
    if not is_over(view):
        return "it has not ended"
    if view.state == JobState.UNKNOWN.value:
        return "it is not known whether or how the run ended"
    named = living.get(view.record.scheduler)
    if named is None:
        return "the scheduler does not answer"
    place = view.record.array
    if view.run.name in named or (place is not None and place.name in named):
        return "the run has a job in the queue"
    return ""


def _explain_age(wanted: Wanted) -> str:
    return f"newer than {wanted.days:g} days"


def _measure(one: Candidate, run: RunFolder, wanted: Wanted) -> Candidate:
    """Measure a run by all of its files, one of which may be a reason to keep it. The record's age
    is ignored, since other commands write there."""
    root = run.path
    device = os.lstat(root).st_dev
    code = _list_code(run)
    written, size, num_files, kept, left = one.written, 0, 0, "", ""
    for path, facts in _walk(root):
        is_folder = stat.S_ISDIR(facts.st_mode)
        if facts.st_dev != device:
            kept = f"another file system is mounted at {path}"
            break
        if not is_folder:
            num_files += 1
            size += facts.st_blocks * 512
        if not is_folder and path != run.record:
            written = max(written, facts.st_mtime)
        if not kept and not wanted.checkpoints and _is_of_training(path, run, code):
            left = os.path.relpath(path, root)
            kept = f"its ranks left {left} in the folder (--checkpoints also removes it)"
    if not kept and time.time() - written < wanted.days * DAY_S:
        kept = _explain_age(wanted)
    return replace(one, written=written, size_bytes=size, num_files=num_files, kept=kept, left=left)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all paths below a folder except unreadable folders, which cannot be removed either."""
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            try:
                yield path, os.lstat(path)
            except FileNotFoundError:
                continue


def _list_code(run: RunFolder) -> frozenset[str]:
    listed = read_json(run.code_files)
    if not isinstance(listed, dict):
        return frozenset()
    parts = (listed.get(key) for key in ("files", "links"))
    return frozenset(str(name) for part in parts if isinstance(part, list) for name in part)


def _is_of_training(path: Path, run: RunFolder, code: Collection[str]) -> bool:
    """Return True for a checkpoint, and for a file that ranks wrote into the copy of their code."""
    inside = path.relative_to(run.path)
    if inside.parts[0] == run.code.name:
        within = str(path.relative_to(run.code)) if len(inside.parts) > 1 else ""
        if within in code or any(part in _MAKINGS for part in inside.parts):
            return False
        if not path.is_dir():
            return True
    if NAME.fullmatch(path.name) or path.name in TRACKERS or path.suffix in _WEIGHTS:
        return True
    return path.parent == run.result_pickle(0).parent and path.name.endswith(".result.pkl")


def remove_run(candidate: Candidate) -> str:
    """Remove a chosen run; return the reason if it cannot be removed, else an empty text."""
    run = RunFolder(Path(candidate.folder))
    record = read_record(run)
    has_ended = record is not None and record.state in (records.ENDED, records.REFUSED)
    if not has_ended or not is_ours(run) or run.path.is_symlink():
        return "the run has changed since it was listed"
    hidden = run.path.with_name(f"{HIDDEN}{run.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(run.path, hidden)
        return remove_hidden(hidden)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def remove_hidden(hidden: Path) -> str:
    """Remove a folder with a hidden name; return the first error, else an empty text."""
    problems: list[str] = []

    def note(function: Any, path: Any, info: Any) -> None:
        error = info[1]
        problems.append(f"{os.fsdecode(path)}: {getattr(error, 'strerror', None) or error}")

    shutil.rmtree(hidden, onerror=note)  # follows no link, at its top neither
    return problems[0] if problems else ""


def list_hidden(candidates: Sequence[Candidate], folder: Path | None) -> list[Path]:
    """Return folders beside these runs that an interrupted removal has left."""
    places = {Path(one.folder).parent for one in candidates}
    found = []
    for place in sorted(places if folder is None else {folder.resolve()}):
        paths = [path for path in list_files(place) if path.name.startswith(HIDDEN)]
        found += [path for path in paths if is_ours(RunFolder(path)) and not path.is_symlink()]
    return found


def as_row(candidate: Candidate, removed: bool, problem: str = "") -> dict[str, Any]:
    """Return a run as an object for `--json`."""
    action = "keep" if candidate.kept else "removed" if removed else "remove"
    return {**asdict(candidate), "action": "failed" if problem else action, "problem": problem}


def render(candidates: Sequence[Candidate], width: int | None = None, *, show_kept: bool) -> str:
    """Render the runs to remove as a table, and count kept runs by reason; lines fit `width`."""
    going = [one for one in candidates if not one.kept]
    kept = [one for one in candidates if one.kept]
    lines = []
    shown = candidates if show_kept else going
    if shown:
        cells = [("STATE", "LAST WRITTEN", "SIZE", "FILES", "RUN", "")]
        for one in shown:
            age = f"{format_duration(max(time.time() - one.written, 0))} ago"
            size = format_size(one.size_bytes) if not one.kept or one.num_files else "-"
            files = str(one.num_files) if not one.kept or one.num_files else "-"
            note = f"stays: {one.kept}" if one.kept else ""
            cells.append((one.state, age, size, files, one.run, note))
        lines += align_columns(cells) if width is None else wrap_columns(cells, width)
    if kept and not show_kept:
        reasons: dict[str, int] = {}
        for one in kept:
            left = "its ranks left files in the folder (with --checkpoints it goes too)"
            reason = left if one.left else one.kept
            reasons[reason] = reasons.get(reason, 0) + 1
        counted = ", ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        stay = f"{count_runs(len(kept))} stay{'s' * (len(kept) == 1)}, as --all shows: {counted}"
        lines += wrap_text(stay, width).split("\n")
    return "\n".join(lines)


def conclude(candidates: Sequence[Candidate], num_removed: int, *, delete: bool) -> str:
    """Return the last line: what was removed, or would be."""
    going = [one for one in candidates if not one.kept]
    if not going:
        return "nothing to remove"
    if delete:
        return f"{count_runs(num_removed)} removed"
    size = format_size(sum(one.size_bytes for one in going))
    return f"{count_runs(len(going))}, {size}: --delete removes them"


def count_runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
