"""Find the complete checkpoints in a folder by their names and manifests.

`varuna_core.checkpoint` writes and loads checkpoints; this module does not import torch, so tools
that only monitor a run can use it, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, List, Optional

from varuna_core.facts.cause import End
from varuna_core.records.files import (
    NO_ROOM,
    list_files,
    list_names,
    open_file,
    read_json,
    write_atomic,
    write_json,
)

NAME = re.compile(r"varuna_ckpt_(\d+)(?:\.(.+\.\d+|x)\.(partial|removed|damaged))?")
MANIFEST = "manifest.json"
MOST_FOLDERS = 1000
"""Most folders below a folder that are searched for new files."""
DAMAGE = "damage.json"
"""File in a damaged checkpoint that says why it could not be loaded."""
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""Files that Megatron-LM and DeepSpeed write once a checkpoint is complete."""


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint."""

    iteration: int
    path: Path

    @property
    def written_at(self) -> float:
        """Return the time of the checkpoint in seconds since 1970, by the file system's clock."""
        return (self.path / MANIFEST).stat().st_mtime


def name_of(iteration: int) -> str:
    return f"varuna_ckpt_{iteration}"


def list_complete(store: Path) -> list[Complete]:
    """List the complete checkpoints, the oldest iteration first."""
    found: dict[int, Path] = {}
    # A short name sorts before a partial one of the same iteration, and wins.
    for name in sorted(list_names(store)):
        match = NAME.fullmatch(name)
        if match and match[3] in (None, "partial") and (store / name / MANIFEST).is_file():
            found.setdefault(int(match[1]), store / name)
    return [Complete(iteration=i, path=found[i]) for i in sorted(found)]


def find_fit(store: Path, known: Optional[set[Path]] = None) -> Optional[Complete]:
    """Return the newest complete checkpoint whose files have the sizes in its manifest.

    This check is for monitoring; a load verifies everything that it reads. Checkpoints in `known`
    passed an earlier check and are not read again, because a manifest has a line for each shard of
    each tensor.
    """
    known = set() if known is None else known
    for found in reversed(list_complete(store)):
        if found.path in known or _is_fit(found.path):
            known.add(found.path)
            return found
    return None


def _is_fit(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST)
    try:
        files = manifest.get("content", {}).get("files", {})
        sizes = {name: held["size"] for name, held in files.items()}
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (AttributeError, KeyError, TypeError, OSError):
        return False


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that could not be loaded and was renamed."""

    iteration: int
    path: str
    reason: str


def list_damaged(store: Path) -> list[Damaged]:
    """List the damaged checkpoints, the oldest iteration first."""
    found = []
    for name in sorted(list_names(store)):
        match = NAME.fullmatch(name)
        if match and match[3] == "damaged":
            told = read_json(store / name / DAMAGE)
            reason = told.get("reason") if isinstance(told, dict) else None
            reason = str(reason or "nobody wrote why")
            found.append(Damaged(int(match[1]), str(store / name), reason))
    return sorted(found, key=lambda item: item.iteration)


@dataclass(frozen=True)
class Skipped:
    """Consecutive saves that failed because the checkpoint folder could not store them."""

    iteration: int
    """Iteration of the last of these saves."""
    count: int
    since: float
    folder: str
    reason: str
    no_room: bool
    """False if the disk or the file server failed, instead of being full."""
    waits: bool = False
    """True if the last save is retried until it succeeds; the training waits meanwhile."""


def note_skipped(path: Path, store: Path, one: Skipped) -> None:
    """Add a save to the consecutive skipped saves, if the file can be written; several ranks may
    note the same save."""
    before = parse_skipped(read_json(path))
    if before is not None:
        newest = find_newest(store)
        is_same = before.iteration == one.iteration
        if before.iteration > one.iteration or (is_same and before.waits == one.waits):
            return
        if is_same or newest is None or newest.step <= before.iteration:
            one = replace(one, count=before.count + (not is_same), since=before.since)
    with contextlib.suppress(OSError):
        write_json(path, asdict(one))


def parse_skipped(value: Any) -> Optional[Skipped]:
    """Parse the content that `note_skipped` writes; None for anything else."""
    if not isinstance(value, dict):
        return None
    iteration, count, since = (value.get(name) for name in ("iteration", "count", "since"))
    folder, reason = value.get("folder"), value.get("reason")
    if not (isinstance(iteration, int) and isinstance(count, int) and isinstance(folder, str)):
        return None
    if not (isinstance(since, (int, float)) and isinstance(reason, str)):
        return None
    no_room, waits = (value.get(name) is True for name in ("no_room", "waits"))
    return Skipped(iteration, count, float(since), folder, reason, no_room, waits)


_LACKS_ROOM = re.compile(
    r"No space left on device|[Dd]isk quota exceeded|\[Errno (28|122)\]|\bNoRoom\b"
)
_PROBE_BYTES = 1 << 20


def list_full(end: End) -> List[str]:
    """Return the lines among the evidence of an end that say that a disk or a quota is full."""
    return [one.text for one in end.evidence if _LACKS_ROOM.search(one.text)]


def find_full(run: Path, store: Optional[Path]) -> Optional[Path]:
    """Return the run folder, or the checkpoint folder, if it has too little room to continue; the
    checkpoint folder needs room for one more checkpoint as large as the newest."""
    if not _has_room(run, _PROBE_BYTES):
        return run
    if store is None or _has_room(store, _PROBE_BYTES + _measure_newest(store)):
        return None
    return store


def _measure_newest(store: Path) -> int:
    newest = list_complete(store)[-1:]
    try:
        return sum(one.stat().st_size for found in newest for one in list_files(found.path))
    except OSError:
        return 0


def _has_room(folder: Path, num_bytes: int) -> bool:
    """Return True if the disk reports this much free space and a test file can be written there:
    only a write reveals a full quota."""
    place = next((one for one in (folder, *folder.parents) if one.is_dir()), None)
    if place is None:
        return True
    path = place / f".room.{os.uname().nodename}.{os.getpid()}"
    try:
        facts = os.statvfs(place)
        if facts.f_bavail * facts.f_frsize < num_bytes:
            return False
        write_atomic(path, " " * _PROBE_BYTES)
        path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return error.errno not in NO_ROOM  # of anything else nobody need wait for the end
    return True


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint of a folder."""

    step: int
    written: float
    """Time of the checkpoint, by the file system's clock."""
    run: str = ""
    """The name of vjob's run that wrote it; empty if not known."""

    def is_of_other(self, run: str, since: float) -> bool:
        """Return True if another run wrote the checkpoint since the time at which `run` was
        submitted; an older one may be that which `run` resumed from."""
        return self.run not in ("", run) and self.written >= since


def find_newest(store: Path) -> Optional[Newest]:
    """Return the newest complete checkpoint; None if there is none or the folder cannot be read."""
    found = [_read_manifest(complete) for complete in list_complete(store)[-1:]]
    found += [_read_tracker(store / name) for name in TRACKERS]
    return max(filter(None, found), key=lambda newest: newest.step, default=None)


def count_written(store: Path, since: float) -> int:
    """Count the files, of any format, that were written below a folder since a time by the file
    server's clock."""
    count = 0
    for folder, _, names in itertools.islice(os.walk(store), MOST_FOLDERS):
        for name in names:
            with contextlib.suppress(OSError):
                count += os.stat(os.path.join(folder, name)).st_mtime >= since
    return count


def _read_manifest(complete: Complete) -> Optional[Newest]:
    try:
        saved = read_json(complete.path / "save.json")
        content = saved.get("content") if isinstance(saved, dict) else None
        run = content.get("run") if isinstance(content, dict) else None
        return Newest(complete.iteration, complete.written_at, str(run or ""))
    except OSError:  # removed meanwhile
        return None


def _read_tracker(path: Path) -> Optional[Newest]:
    try:
        with open_file(path) as handle:
            match = re.fullmatch(rb"(?:global_step)?(\d{1,18})", handle.read(100).strip())
            written = os.fstat(handle.fileno()).st_mtime
            return None if match is None else Newest(int(match[1]), written)
    except OSError:
        return None
