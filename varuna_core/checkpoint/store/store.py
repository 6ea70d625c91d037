"""Manage a folder of checkpoints: which are complete, which job owns them, which are removed.

    <store>/
      owner.json                               the job that saves here now
      varuna_ckpt_100/                         complete
      varuna_ckpt_200.<job>.<n>.partial/       being written, or left by a job that died
      varuna_ckpt_50.<job>.<n>.removed/        about to be deleted
      varuna_ckpt_150.<job>.<n>.damaged/       could not be loaded, and was set aside (aside.py)

A checkpoint is complete once it has a manifest; the rename to its short name only makes it easy to
find. Ranks exchange no messages: each writes its marker, and one of the ranks that then see all
markers claims the commit (`committer.json`), writes the manifest and renames the folder. A rank
that fails before it writes its marker removes the folder, which then cannot become complete; once
its marker is written, the rank removes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from varuna_core.checkpoint.format.document import (
    crc_text,
    read_document,
    sync_folder,
    write_document,
    write_part,
)
from varuna_core.checkpoint.format.errors import (
    CheckpointError,
    DamagedCheckpoint,
    FolderTaken,
    ForeignCheckpoint,
    NoCheckpoint,
    NotSaved,
)
from varuna_core.checkpoint.format.manifest import (
    HeldFile,
    Manifest,
    Marker,
    Save,
    add_up,
    find_faults,
    parse_marker,
    read_manifest,
    render_manifest,
    render_marker,
)
from varuna_core.checkpoint.format.tensorfile import read_head
from varuna_core.records.checkpoints import MANIFEST, NAME, Complete, list_complete, name_of
from varuna_core.records.files import PRIVATE_FOLDER, list_names, write_first

log = logging.getLogger(__name__)

COMMITTER = "committer.json"
"""File in an unfinished save: the claim of the rank that completes the save."""


def find_complete(store: Path, iteration: int | None = None) -> Complete:
    """Return the checkpoint of this iteration, or the newest; an error lists those available."""
    complete = list_complete(store)
    if iteration is None and complete:
        return complete[-1]
    for found in complete:
        if found.iteration == iteration:
            return found
    there = ", ".join(str(found.iteration) for found in complete) or "none"
    if iteration is None:
        named = [name for name in list_names(store) if NAME.fullmatch(name)]
        raise NoCheckpoint(f"{store} holds no complete checkpoint" + _describe_rest(store, named))
    named = [name for name in list_names(store) if name.split(".")[0] == name_of(iteration)]
    raise NoCheckpoint(
        f"{store} holds no complete checkpoint of iteration {iteration} (complete: {there})"
        + _describe_rest(store, named)
    )


def _describe_rest(store: Path, names: list[str]) -> str:
    for name in sorted(names):
        if any(inside.startswith("opt-") for inside in list_names(store / name)):
            return (
                f"; {name} is a checkpoint of the original Varuna, which cannot be read: save the "
                "model's state dict there with torch.save, and import that file"
            )
    aside = sorted(name for name in names if name.endswith(".damaged"))
    rest = sorted(set(names) - set(aside))
    text = f"; incomplete: {', '.join(rest)}" if rest else ""
    return text + (f"; set aside as damaged: {', '.join(aside)}" if aside else "")


def find_good(store: Path, but_not: Path | None = None) -> Complete | None:
    """Return the newest complete checkpoint whose files all exist and have their recorded sizes."""
    for found in reversed(list_complete(store)):
        if found.path != but_not and not list_wrong_sizes(found.path):
            return found
    return None


def offer_good(folder: Path) -> str:
    """Name the checkpoint to load instead of this one, as the end of an error message."""
    good = find_good(folder.parent, folder)
    if good is None:
        return ""
    return f"; load iteration {good.iteration} instead ({good.path}, which has all its files)"


def list_wrong_sizes(folder: Path) -> list[str]:
    """Return faults of missing files and wrong sizes, or the manifest's fault; read no data."""
    try:
        return list(compare_sizes(folder, read_manifest(folder)).values())
    except CheckpointError as error:
        return [str(error)]


def compare_sizes(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return the faults of files that are missing or of another size, by the file's name."""
    wrong = {}
    for name, held in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            wrong[name] = f"{path} is missing"
            continue
        if size != held.size:
            wrong[name] = f"{path} has {size} bytes, but {held.size} were written"
    return wrong


def make_store(path: Path) -> None:
    """Create the folder of checkpoints if it is missing, accessible only to its owner: weights and
    data stay private unless the owner changes the mode."""
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)


class SaveFolder:
    """One unfinished save: all ranks write to the same folder, under its partial name."""

    def __init__(self, store: Path, save: Save) -> None:
        self.store, self.save = store, save
        self.path = store / f"{name_of(save.iteration)}.{save.save}.partial"
        self.final = store / name_of(save.iteration)
        self.marked: Marker | None = None
        """This rank's marker, once it may be in the folder."""

        self._is_ours = False
        """True if this rank has claimed the commit of this save."""

    @property
    def markers(self) -> Path:
        return self.path / "markers"

    def make(self) -> None:
        """Create the folder; another rank may have created it already."""
        make_store(self.path.parent)
        self.markers.mkdir(parents=True, exist_ok=True)
        if not (self.path / "save.json").exists():
            write_document(self.path / "save.json", "save", vars(self.save), durable=False)

    def mark(self, marker: Marker) -> None:
        """Write the marker, after everything else that this rank writes is on the disk.

        The marker itself need not be synced: it is for the other ranks, which do not outlive a
        power failure. The manifest is synced.
        """
        sync_folder(self.path)
        path = self.markers / _name_marker(marker.rank)
        part = write_part(path, "marker", render_marker(marker))
        self.marked = marker  # even if this fails: a file server may have done it all the same
        os.replace(part, path)

    def take_back(self) -> None:
        """Remove the folder after a failure of this rank, to free the space and to tell the other
        ranks.

        Once this rank's marker may be in the folder, the checkpoint may be complete: then nothing
        is removed.
        """
        if self.marked is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def commit(self, may_replace: Callable[[Save | None], bool]) -> bool:
        """Complete the save if all markers exist and no other rank does; return True if this rank
        did.

        After a failure all files stay, and the claim is released for the next rank that tries.
        """
        if not self._are_all_marked() or not self._claim():
            return False
        try:
            self._write_manifest()
            self.publish(may_replace)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path / COMMITTER)
                self._is_ours = False
            raise
        return True

    def _are_all_marked(self) -> bool:
        names = self._list_markers()
        try:
            first = self._read_marker(names[0]) if names else None
        except (FileNotFoundError, DamagedCheckpoint):
            if not self._is_gone():
                raise
            return False
        if first is None:
            self._is_gone()
            return False
        return len(names) >= first.world_size

    def _list_markers(self) -> list[str]:
        return [name for name in list_names(self.markers) if name.startswith("rank-")]

    def _claim(self) -> bool:
        """Return True if this rank holds the claim, which one rank at a time can hold; a rank that
        could not release its claim still holds it."""
        if not self._is_ours:
            try:
                self._is_ours = write_first(self.path / COMMITTER, {"pid": os.getpid()})
            except FileNotFoundError:
                if not self._is_gone():
                    raise
        return self._is_ours

    def _write_manifest(self) -> None:
        markers = [self._read_marker(name) for name in self._list_markers()]
        if not markers or len(markers) < markers[0].world_size:  # all were there a moment ago
            raise NotSaved(f"{self.markers} cannot be listed")
        try:
            manifest = add_up(markers)
        except CheckpointError:  # the parts make no whole, whoever adds them up
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        write_document(self.path / MANIFEST, "manifest", render_manifest(manifest))

    def _is_gone(self) -> bool:
        """Return True if another rank, which saw all markers too, has renamed the folder."""
        if self.is_published():
            return True
        if not self.path.exists():
            raise NotSaved(
                f"{self.path} was removed before it was complete: another rank failed to write, "
                f"or another job saves into {self.store}"
            )
        return False

    def _read_marker(self, name: str) -> Marker:
        if self.marked is not None and name == _name_marker(self.marked.rank):
            return self.marked
        path = self.markers / name
        marker = parse_marker(read_document(path, "marker"), path)
        if marker.save != self.save:
            raise DamagedCheckpoint(f"{path} belongs to another save, {marker.save.save}")
        return marker

    def is_published(self) -> bool:
        """Return True if the save is complete and has its short name."""
        found = read_save(self.final)
        return found is not None and found.save == self.save.save

    def publish(self, may_replace: Callable[[Save | None], bool]) -> None:
        """Rename the save to its short name; replace a checkpoint of that name if `may_replace`
        allows it."""
        while True:
            try:
                os.rename(self.path, self.final)
                break
            except FileNotFoundError:
                if self._is_gone():
                    return
                raise
            except OSError:
                there = read_save(self.final)
                if there is not None and there.save == self.save.save:
                    return
                if not self.final.exists():
                    raise
                if not may_replace(there):
                    raise FolderTaken(self.describe_taken(there)) from None
                remove(self.final, there)
        sync_folder(self.store)

    def describe_taken(self, there: Save | None) -> str:
        whose = f"of job {there.job}" if there else "whose owner is not known"
        return (
            f"{self.final} already exists, {whose}, which this training (job {self.save.job}) "
            "does not continue: save into another folder, or move it away"
        )


def _name_marker(rank: int) -> str:
    return f"rank-{rank:04d}.json"


def read_save(folder: Path) -> Save | None:
    """Return the origin of a checkpoint; None if it is missing or cannot be read."""
    try:
        return Save(**read_document(folder / "save.json", "save"))
    except (CheckpointError, TypeError):
        pass
    try:  # a power cut may take the small file and leave the manifest
        return read_manifest(folder).save
    except CheckpointError:
        return None


def remove(folder: Path, save: Save | None) -> None:
    """Rename a checkpoint so that it is no longer listed, then delete it. If another save than
    `save` has meanwhile taken its place, keep the checkpoint; None means any save."""
    aside = take_out(folder, save)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def take_out(folder: Path, save: Save | None) -> Path | None:
    """Rename a checkpoint so that no reader finds it, and return the folder to delete; None if the
    checkpoint is missing or no longer the one meant."""
    match = NAME.fullmatch(folder.name)
    assert match, folder
    aside = folder.with_name(f"{name_of(int(match[1]))}.{save.save if save else 'x'}.removed")
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return None
    except OSError:  # one that an earlier removal did not finish
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    found = read_save(aside)
    if found is not None and save is not None and found.save != save.save:
        os.rename(aside, folder)  # another job has put its own there meanwhile
        return None
    return aside


def expect_ours(folder: Path) -> None:
    """Raise an error that describes the folder if it has no manifest."""
    if (folder / MANIFEST).exists():
        return
    if not folder.is_dir():
        raise NoCheckpoint(f"there is no folder {folder}" + offer_good(folder))
    if (folder / "save.json").exists():
        raise NoCheckpoint(f"{folder} is incomplete: its save never finished" + offer_good(folder))
    raise ForeignCheckpoint(f"{folder} is not a checkpoint of vjob" + offer_good(folder))


IDLE_S = 3600.0
"""Seconds without changes after which another training's partial checkpoint counts as abandoned."""
_JOB = re.compile(r"[A-Za-z0-9_.-]{1,120}")


class Owner:
    """A job's claim on a folder: the latest job writes; an earlier one gets an error at its next
    save.

    The claim also lists the checkpoints that existed when the job began and belong to the training
    that it continues: of other jobs' checkpoints, the job may replace and remove only these.
    """

    def __init__(self, store: Path, job: str, line: str) -> None:
        if not _JOB.fullmatch(job):
            raise ValueError(f"job {job!r}: must be 1 to 120 letters, digits, - _ and .")
        self.store, self.job, self.line = store, job, line
        self.path = store / "owner.json"

    def claim(self) -> None:
        """Claim the folder; called by rank 0 before its first save."""
        make_store(self.store)
        found = [read_save(complete.path) for complete in list_complete(self.store)]
        others = sorted({save.job for save in found if save and save.line != self.line})
        if others:
            log.warning("%s also holds checkpoints of another training: %s", self.store, others)
        content = {
            "job": self.job,
            "line": self.line,
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "found": [save.save for save in found if save and save.line == self.line],
        }
        write_document(self.path, "owner", content)

    def check(self) -> None:
        """Raise FolderTaken if another job claimed it; called by rank 0 before each later save."""
        owner = self._read()
        if owner["job"] != self.job:
            raise FolderTaken(
                f"job {owner['job']} on {owner['host']} has saved into {self.store} since "
                f"{owner['since']}, so this job, {self.job}, stops saving there: end one of the "
                "jobs, or give each its own folder"
            )

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = read_document(self.path, "owner")
        return found

    def may_replace(self, there: Save | None) -> bool:
        """Return True for saves of this job, and earlier ones of the training that it continues."""
        if there is None or there.line != self.line:
            return False
        if there.job == self.job:
            return True
        owner = self._read()
        return owner["job"] == self.job and there.save in owner["found"]

    def keep(self, count: int, done: Save) -> list[Path]:
        """Rename old checkpoints of this training so that `count` stay, `done` among them; return
        the folders to delete.

        Those of earlier jobs are removed first, whatever their iteration: they may be later
        iterations that were abandoned when training went back.
        """
        mine = []
        for complete in list_complete(self.store):
            save = read_save(complete.path)
            if save is None or save.save == done.save or complete.path != self._path_of(save):
                continue
            if self.may_replace(save):
                order = _number(save) if save.job == self.job else -1
                mine.append((order, save.iteration, complete.path, save))
        mine.sort(key=lambda one: one[:2])
        spare = mine[: max(0, len(mine) - count + 1)]
        taken = [take_out(path, save) for _, _, path, save in spare]
        return [aside for aside in taken if aside is not None]

    def _path_of(self, save: Save) -> Path:
        return self.store / name_of(save.iteration)

    def clean(self, done: Save) -> None:
        """Remove abandoned partial and removed checkpoints, now that `done` is complete."""
        now = (self._path_of(done) / MANIFEST).stat().st_mtime
        for name in sorted(list_names(self.store)):
            path = self.store / name
            if name.startswith(f".{self.path.name}.") and now - _last_change(path) > IDLE_S:
                path.unlink(missing_ok=True)  # of a claim that was cut off
            match = NAME.fullmatch(name)
            if not match or match[3] not in ("partial", "removed"):
                continue
            if match[3] == "removed":
                shutil.rmtree(path, ignore_errors=True)
            elif self._is_abandoned(path, match[2], done, now):
                self._name_or_remove(path)

    def _name_or_remove(self, path: Path) -> None:
        """Give a checkpoint its short name if it is complete and the name free, else remove it."""
        save = read_save(path)
        if save is not None and (path / MANIFEST).exists():
            with contextlib.suppress(OSError):
                os.rename(path, self._path_of(save))
                return
        log.info("removing %s, whose save never finished", path)
        remove(path, save)

    def _is_abandoned(self, path: Path, word: str, done: Save, now: float) -> bool:
        job, _, number = word.rpartition(".")
        if job == self.job:
            # Ranks save in order: who has finished `done` has no part in an earlier one.
            return int(number) < _number(done)
        save = read_save(path)
        if save and save.line == self.line:
            return bool(self._read()["job"] == self.job)
        return now - _last_change(path) > IDLE_S


def _number(save: Save) -> int:
    return int(save.save.rpartition(".")[2])


def _last_change(folder: Path) -> float:
    latest = 0.0
    for path in (folder, folder / "markers", *folder.glob("*")):
        try:
            latest = max(latest, path.stat().st_mtime)
        except OSError:
            continue
    return latest


def find_damage(folder: Path) -> Iterator[str]:
    """Yield every fault found, each with its file's name; nothing if the checkpoint is intact."""
    try:
        expect_ours(folder)
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield str(error)
        return
    wrong = compare_sizes(folder, manifest)
    yield from wrong.values()
    yield from (f"{folder}: {fault}" for fault in find_faults(manifest))
    for name, held in manifest.files.items():
        path = folder / name
        if name in wrong:
            continue
        try:
            yield from _check_file(path, held)
        except (CheckpointError, OSError) as error:
            yield str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"


def _check_file(path: Path, held: HeldFile) -> Iterator[str]:
    head, laid = read_head(path)
    places = {(one.dtype, one.extent, one.start) for one in laid}
    if crc_text(head) != held.head or places != {
        (piece.dtype, piece.box.extent, piece.start) for piece in held.pieces
    }:
        yield f"{path} was changed: its header is not the one that was written"
    with open(path, "rb") as handle:
        for piece in held.pieces:
            for box, start, check in piece.blocks():
                size = (box.extent[0] if box.extent else 1) * piece.row_bytes
                if crc_text(os.pread(handle.fileno(), size, start)) != check:
                    yield (
                        f"{path} was changed: the checksum of {piece.kind} {piece.name!r} differs"
                    )
                    break
