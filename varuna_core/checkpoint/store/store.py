"""A folder of checkpoints: which are complete, whose they are, which are cleared away.

    <store>/
      owner.json                               the job that saves here now
      varuna_ckpt_100/                         complete
      varuna_ckpt_200.<job>.<n>.partial/       being written, or left by a job that died
      varuna_ckpt_50.<job>.<n>.removed/        about to go
      varuna_ckpt_150.<job>.<n>.damaged/       could not be loaded, and was set aside (aside.py)

A checkpoint is complete once it has a manifest; the rename to its short name only makes it easy to
find. Ranks do not talk: each lands its marker, and whoever then sees all markers writes the
manifest. Two may; they write the same.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from varuna_core.checkpoint.format.document import read_document, sync_folder, write_document
from varuna_core.checkpoint.format.errors import (
    CheckpointError,
    DamagedCheckpoint,
    FolderTaken,
    ForeignCheckpoint,
    NoCheckpoint,
)
from varuna_core.checkpoint.format.manifest import (
    Manifest,
    Marker,
    Save,
    add_up,
    parse_marker,
    read_manifest,
    render_manifest,
    render_marker,
)
from varuna_core.records.checkpoints import MANIFEST, NAME, Complete, list_complete, name_of
from varuna_core.records.files import list_names

log = logging.getLogger(__name__)


def find_complete(store: Path, iteration: int | None = None) -> Complete:
    """The checkpoint of this iteration, or the newest; an error offers what there is."""
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
            return f"; {name} holds pickles of the Varuna of old, which are not read"
    aside = sorted(name for name in names if name.endswith(".damaged"))
    rest = sorted(set(names) - set(aside))
    text = f"; incomplete: {', '.join(rest)}" if rest else ""
    return text + (f"; set aside as damaged: {', '.join(aside)}" if aside else "")


def find_good(store: Path, but_not: Path | None = None) -> Complete | None:
    """The newest complete checkpoint whose files are all there with their sizes."""
    for found in reversed(list_complete(store)):
        if found.path != but_not and not list_wrong_sizes(found.path):
            return found
    return None


def offer_good(folder: Path) -> str:
    """What to load in place of this checkpoint, as the end of a message."""
    good = find_good(folder.parent, folder)
    if good is None:
        return ""
    return f"; load iteration {good.iteration} instead ({good.path}: all files there)"


def list_wrong_sizes(folder: Path) -> list[str]:
    """Files that are missing or of another size, without reading them; or the manifest's fault."""
    try:
        return compare_sizes(folder, read_manifest(folder))
    except CheckpointError as error:
        return [str(error)]


def compare_sizes(folder: Path, manifest: Manifest) -> list[str]:
    wrong = []
    for name, held in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            wrong.append(f"{path} is missing")
            continue
        if size != held.size:
            wrong.append(f"{path} has {size} bytes, was written with {held.size}")
    return wrong


class SaveFolder:
    """One save on its way: the same folder for all ranks, under its partial name."""

    def __init__(self, store: Path, save: Save) -> None:
        self.store, self.save = store, save
        self.path = store / f"{name_of(save.iteration)}.{save.save}.partial"
        self.final = store / name_of(save.iteration)

    @property
    def markers(self) -> Path:
        return self.path / "markers"

    def make(self) -> None:
        """Fine if another rank was first."""
        self.markers.mkdir(parents=True, exist_ok=True)
        if not (self.path / "save.json").exists():
            write_document(self.path / "save.json", "save", vars(self.save), durable=False)

    def mark(self, marker: Marker) -> None:
        """All that this rank writes is on the disk.

        The marker itself need not be: it is for the other ranks to see, and after a power cut they
        are gone. What outlives one is the manifest.
        """
        sync_folder(self.path)
        path = self.markers / f"rank-{marker.rank:04d}.json"
        write_document(path, "marker", render_marker(marker), durable=False)

    def complete(self) -> bool:
        """Write the manifest if all markers are there; whether they are."""
        names = [name for name in list_names(self.markers) if name.startswith("rank-")]
        try:
            first = self._read_marker(names[0]) if names else None
            if first is None or len(names) < first.world_size:
                return self._is_gone()
            manifest = add_up([first, *(self._read_marker(name) for name in names[1:])])
            write_document(self.path / MANIFEST, "manifest", render_manifest(manifest))
        except (FileNotFoundError, DamagedCheckpoint):
            if not self._is_gone():
                raise
        return True

    def _is_gone(self) -> bool:
        """Whether another rank, which saw all markers too, has renamed the folder."""
        if self.is_published():
            return True
        if not self.path.exists():
            raise CheckpointError(
                f"{self.path} was removed before it was complete: another rank failed to write, "
                f"or another job saves into {self.store}"
            )
        return False

    def _read_marker(self, name: str) -> Marker:
        path = self.markers / name
        marker = parse_marker(read_document(path, "marker"), path)
        if marker.save != self.save:
            raise DamagedCheckpoint(f"{path} is of another save, {marker.save.save}")
        return marker

    def is_published(self) -> bool:
        """Whether it is complete, and has its short name."""
        found = read_save(self.final)
        return found is not None and found.save == self.save.save

    def publish(self, may_replace: Callable[[Save | None], bool]) -> None:
        """Give it the short name; what has it goes if `may_replace` says so."""
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
        whose = f"of job {there.job}" if there else "of which nobody knows whose it is"
        return (
            f"{self.final} is there already, {whose}, which this training (job {self.save.job}) "
            "does not continue: save into another folder, or move it away"
        )


def read_save(folder: Path) -> Save | None:
    """Whose a folder is; None where that is not written or not readable."""
    try:
        return Save(**read_document(folder / "save.json", "save"))
    except (CheckpointError, TypeError):
        pass
    try:  # a power cut may take the small file and leave the manifest
        return read_manifest(folder).save
    except CheckpointError:
        return None


def remove(folder: Path, save: Save | None) -> None:
    """Take it out of the list in one step, then delete it."""
    match = NAME.fullmatch(folder.name)
    assert match, folder
    aside = folder.with_name(f"{name_of(int(match[1]))}.{save.save if save else 'x'}.removed")
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    except OSError:  # one that an earlier removal did not finish
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def expect_ours(folder: Path) -> None:
    """An error that says what a folder is, if it has no manifest."""
    if (folder / MANIFEST).exists():
        return
    if not folder.is_dir():
        raise NoCheckpoint(f"there is no folder {folder}" + offer_good(folder))
    if (folder / "save.json").exists():
        raise NoCheckpoint(f"{folder} was never finished" + offer_good(folder))
    raise ForeignCheckpoint(f"{folder} is not a checkpoint of vjob" + offer_good(folder))
