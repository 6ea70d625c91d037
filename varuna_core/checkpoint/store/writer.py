"""Write this rank's part of each checkpoint, in the training loop or in the background.

    writer = CheckpointWriter(store, job=job, rank=rank, world_size=world_size, keep=3)
    writer.save(part)           # raises the error of an earlier save in the background
    writer.close()              # raises it too

No rank waits for another. The last rank to finish completes the checkpoint; if a rank fails or
dies, the checkpoint stays incomplete, is never loaded, and is removed after the next success.

A save in the background writes from a copy of the state (`Staging`) in one buffer, which is reused.
Only the optimizer's step changes weights and optimizer state: if the caller waits for `wait_copied`
before that step, the writing thread can make the copy during the next forward and backward.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import DTYPES, CheckpointPart, Entry, write_file
from varuna_core.checkpoint.format.errors import (
    CheckpointError,
    FolderTaken,
    NotSaved,
    build_error,
)
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT, Marker, Save
from varuna_core.checkpoint.format.plain import to_plain
from varuna_core.checkpoint.store.store import Owner, SaveFolder, read_save
from varuna_core.records.files import find_errno, list_names

ALIGN = 64
POLL_S = 0.5
"""Seconds between checks that the copying thread is still alive."""
PORTABLE = 1
"""Pin for all GPUs (CU_MEMHOSTREGISTER_PORTABLE)."""
NUM_SAMPLES = 64
"""Number of a weight's elements that are compared with its copy."""


class _Pending(NamedTuple):
    """A tensor still to be copied, its destination, and torch's count of its in-place changes."""

    entry: Entry
    tensor: Tensor
    copy: Tensor
    version: int


class _Samples(NamedTuple):
    """Sampled elements of all weights of one type on one device, in one tensor."""

    owners: Sequence[_Pending]
    values: Tensor

    @staticmethod
    def draw(pending: Sequence[_Pending]) -> list[_Samples]:
        """Sample all weights, a kernel for each group: one for each weight would be too slow."""
        groups: dict[tuple[torch.device, torch.dtype], list[_Pending]] = {}
        for one in pending:
            tensor = one.tensor
            if one.entry.kind == WEIGHT and tensor.is_contiguous() and tensor.numel():
                groups.setdefault((tensor.device, tensor.dtype), []).append(one)
        return [
            _Samples(owners, torch.cat([_pick(one.tensor) for one in owners]))
            for owners in groups.values()
        ]

    def find_changed(self) -> str | None:
        """Return the name of a weight whose copy has other elements, or None."""
        found = [_pick(one.copy) for one in self.owners]
        before = self.values.cpu()
        if _is_same(torch.cat(found), before):
            return None
        each = torch.split(before, [len(one) for one in found])
        pairs = zip(self.owners, found, each, strict=True)
        return next(one.entry.name for one, a, b in pairs if not _is_same(a.clone(), b))


class Staging:
    """A copy of the state in memory or in a local folder, on a RAM disk or another fast disk.

    In a folder, the copy is a mapped file without a name, so that a kill leaves nothing behind.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.copied = threading.Event()
        """Set once no tensor is still to be copied."""

        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copies: Sequence[Tensor] = ()
        """Parts of the buffer, one for each entry."""

        self._laid_out: Sequence[tuple[str, Sequence[int]]] = ()
        """Types and shapes of `_copies`."""

        self._segments: Mapping[int, Sequence[Entry]] = {}
        self._pending: list[_Pending] = []
        self._samples: Sequence[_Samples] = ()
        """Samples that show changes that torch does not count, such as those through `.data`."""

        self._ready: dict[torch.device, Any] = {}
        """For each GPU, the event after which the tensors that are still to be copied have their
        values."""

    def take(self, segments: Mapping[int, Sequence[Entry]], *, later: bool = False) -> None:
        """Copy the entries to the buffer, overwriting the previous copy.

        With `later`, copy only buffers now, since a forward may change them; `finish` copies the
        rest.
        """
        entries = [entry for held in segments.values() for entry in held]
        self._lay_out(entries)
        self._segments, self._pending = segments, []
        now: set[torch.device] = set()
        rest: set[torch.device] = set()
        for entry, copy in zip(entries, self._copies, strict=True):
            tensor = entry.load().detach()
            waits = later and entry.kind != BUFFER
            if waits:
                self._pending.append(_Pending(entry, tensor, copy, tensor._version))
            else:
                copy.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                (rest if waits else now).add(tensor.device)
        self._samples = _Samples.draw(self._pending)
        for device in now:
            torch.cuda.current_stream(device).synchronize()
        self._ready = {one: torch.cuda.current_stream(one).record_event() for one in rest}
        self.copied.clear()

    def finish(self) -> dict[int, list[Entry]]:
        """Copy the rest, in a thread beside training and on a GPU in a stream of its own; return
        the entries given to `take`, with the copies as their data.

        Raise NotSaved if something other than the optimizer changed a weight too early.
        """
        try:
            with contextlib.ExitStack() as stack:
                make: Any = torch.cuda.Stream
                streams = [make(device) for device in self._ready]
                for stream, ready in zip(streams, self._ready.values(), strict=True):
                    stream.wait_event(ready)
                    stack.enter_context(torch.cuda.stream(stream))
                # One call: after each one this thread may wait for Python's lock, which the
                # training's thread has.
                if self._pending:
                    _, tensors, copies, _ = zip(*self._pending, strict=True)
                    torch._foreach_copy_(copies, tensors, non_blocking=True)
                for stream in streams:
                    stream.synchronize()
                changed = self._find_changed()
        finally:
            self._pending, self._samples, self._ready = [], (), {}
            self.copied.set()
        if changed is not None:
            raise NotSaved(
                f"{changed!r} was changed before it was copied: only the optimizer may change "
                "weights between a save and the next step"
            )
        copied = iter(self._copies)
        staged = {
            number: [entry._replace(load=_give(next(copied))) for entry in held]
            for number, held in self._segments.items()
        }
        self._segments = {}
        return staged

    def _find_changed(self) -> str | None:
        """Return the name of a tensor that was changed before it was copied, or None."""
        for one in self._pending:
            if one.tensor._version != one.version:
                return one.entry.name
        found = (samples.find_changed() for samples in self._samples)
        return next((name for name in found if name is not None), None)

    def wait(self, thread: threading.Thread | None) -> None:
        """Wait until the tensors given to `take` may be changed; `thread` is the one that calls
        `finish`."""
        while thread is not None and thread.is_alive() and not self.copied.wait(POLL_S):
            pass

    def _lay_out(self, entries: Sequence[Entry]) -> None:
        """Make room for copies of these entries; later entries of the same shapes use it again."""
        wanted = [(entry.dtype, entry.box.extent) for entry in entries]
        if wanted == self._laid_out:
            return
        self._laid_out, self._copies = (), ()
        size = sum(_padded(entry.num_bytes) for entry in entries)
        if size > len(self._buffer):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is made
            self._buffer = self._allocate(size)
        at, copies = 0, []
        for entry in entries:
            run = self._buffer[at : at + entry.num_bytes]
            copies.append(run.view(DTYPES[entry.dtype]).view(entry.box.extent))
            at += _padded(entry.num_bytes)
        self._laid_out, self._copies = wanted, copies

    def _allocate(self, size: int) -> Tensor:
        if self.folder is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".varuna-staging-", dir=self.folder)
        try:
            # A full disk is an error here; later it would be a SIGBUS in the copy.
            os.posix_fallocate(fd, 0, size)
            mapped = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(fd)
            os.unlink(name)
        if torch.cuda.is_available():
            _pin(mapped)
        return mapped


def _pin(mapped: Tensor) -> None:
    """Let the GPUs write directly to mapped memory, for as long as the tensor lives.

    Linux refuses this for files on most disks; copies are then correct but slower. The driver is
    called directly, because torch would report a refusal by CUDA as the error of its next kernel.
    """
    address = ctypes.c_void_p(mapped.data_ptr())
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        refusal = driver.cuMemHostRegister_v2(address, ctypes.c_size_t(mapped.numel()), PORTABLE)
    except (OSError, AttributeError):  # another maker's GPU
        return
    if refusal:
        log.info(
            "GPUs cannot write directly to the copy of a save (error %d): a tempdir in memory "
            "with enough room, such as in /dev/shm, shortens the step after a save",
            refusal,
        )
    else:
        weakref.finalize(mapped, driver.cuMemHostUnregister, address).atexit = False


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _give(copy: Tensor) -> Callable[[], Tensor]:
    return lambda: copy


def _pick(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, evenly spaced."""
    return tensor.view(-1)[:: -(-tensor.numel() // NUM_SAMPLES)]


def _is_same(some: Tensor, others: Tensor) -> bool:
    """Return True if the tensors are equal bit by bit."""
    return torch.equal(some.view(torch.uint8), others.view(torch.uint8))


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


log = logging.getLogger(__name__)


def write_rank(folder: SaveFolder, part: CheckpointPart, rank: int, world_size: int) -> None:
    """Write this rank's files, then its marker."""
    folder.make()
    landing = {}
    ending = f".rank-{rank:04d}" if part.shared else ""
    with ThreadPoolExecutor(2) as beside:  # one for checksums while the other waits for the disk
        for number, entries in part.segments.items():
            if entries:
                name = f"segment-{number:04d}{ending}.safetensors"
                notes = {"iteration": str(part.iteration), "segment": str(number)}
                landing[name] = write_file(folder.path / name, entries, notes, beside)
    folder.mark(
        Marker(
            save=folder.save,
            rank=rank,
            world_size=world_size,
            files={name: landed.result() for name, landed in landing.items()},
            optimizer=part.optimizer,
            own=part.own,
            state=part.state,
        )
    )


class CheckpointWriter:
    """Writes one rank's checkpoints during a whole job."""

    def __init__(
        self,
        store: Path | str,
        *,
        job: str,
        rank: int = 0,
        world_size: int = 1,
        line: str | None = None,
        keep: int | None = None,
        background: bool = False,
        tempdir: Path | str | None = None,
    ) -> None:
        """`job` names this start, and is equal on all ranks; `line` is that of the loaded
        checkpoint (`reader.line`), if one was loaded. In the background, a copy of the state is
        held in memory, or in the local folder `tempdir`."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: must be 1 or more")
        self.store, self.job, self.line = Path(store), job, line or job
        self.rank, self.world_size, self.keep = rank, world_size, keep
        self._owner = Owner(self.store, job, self.line)
        self._count = 0
        self._claimed = False
        self._last: SaveFolder | None = None
        self._given_up: list[SaveFolder] = []
        """Saves to which this rank could not add its part: they never become complete."""

        self._background = background or tempdir is not None
        self._staging = Staging(Path(tempdir) if tempdir is not None else None)
        self._copies_at_once = False
        """True once a weight was changed too early."""

        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._deleting: threading.Thread | None = None
        """Thread that deletes checkpoints that are no longer listed."""

        _OPEN.add(self)

    def set_background(self, tempdir: Path | str | None) -> None:
        """Write the next saves in the background from a copy in this folder; if None, at once."""
        if tempdir is not None and Path(tempdir) != self._staging.folder:
            self._staging = Staging(Path(tempdir))
        self._background = tempdir is not None

    def save(self, part: CheckpointPart, *, later: bool = False) -> SaveFolder:
        """Write this rank's part of a checkpoint, in the background if set, once the last save is
        written.

        The returned folder is that of all ranks and shows when the checkpoint is complete. With
        `later`, a save in the background copies weights and optimizer state during training: call
        `wait_copied` before the optimizer's step.
        """
        # Of calls, not of successes: this rank's next save is the next of the others too.
        self._count += 1
        self.wait()
        self._end_deleting()  # there is to be room for this one
        save = Save(
            iteration=part.iteration,
            save=f"{self.job}.{self._count}",
            job=self.job,
            line=self.line,
            run=Path(os.environ.get("VJOB_RUN", "")).name,
        )
        folder = SaveFolder(self.store, save)
        part = encode_part(part)
        if not self._background:
            self._write(folder, part)
            return folder
        try:
            self._staging.take(part.segments, later=later and not self._copies_at_once)
        except OSError as error:
            self._give_up(folder)
            text = f"iteration {part.iteration} was not saved by rank {self.rank}"
            raise build_error(error, f"{text}: {self._staging.folder}: {error}") from error
        self._thread = threading.Thread(
            target=self._write_beside, args=(folder, part), name="checkpoint"
        )
        self._thread.start()
        return folder

    @property
    def num_saves(self) -> int:
        """Number of saves begun so far."""
        return self._count

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the last save, and complete it if no rank has."""
        self.wait()
        self._settle()

    def wait(self) -> bool:
        """Wait for this rank's last save; raise its error. Return False if there is no save."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return thread is not None

    def wait_copied(self) -> None:
        """Wait until training may change the tensors in the last save."""
        self._staging.wait(self._thread)

    def close(self) -> None:
        """Call `finish`; no more saves may follow."""
        _OPEN.discard(self)
        self.finish()
        self._end_deleting()

    def _write_beside(self, folder: SaveFolder, part: CheckpointPart) -> None:
        try:
            try:
                part = replace(part, segments=self._staging.finish())
            except NotSaved as error:
                self._copies_at_once = True
                self._give_up(folder)
                text = f"iteration {part.iteration} was not saved by rank {self.rank}"
                raise NotSaved(f"{text}: {error}. Later saves are copied immediately") from error
            self._write(folder, part)
        except Exception as error:  # comes out at the next call
            self._error = error

    def _write(self, folder: SaveFolder, part: CheckpointPart) -> None:
        try:
            self._settle()
        except FolderTaken:
            raise
        except CheckpointError as error:
            log.warning("%s", error)  # this one will take its place
        while self._given_up:  # other ranks may have written into it since
            self._given_up.pop().take_back()
        is_begun = False
        try:
            if self.rank == 0:
                self._look_around(folder)
            is_begun = True
            write_rank(folder, part, self.rank, self.world_size)
        except FolderTaken:
            raise
        except (OSError, CheckpointError) as error:
            if folder.marked is not None:
                self._last = folder
            # A third rank that has yet to see it may have made the folder again.
            is_taken_back = is_begun and find_errno(error) == errno.ENOENT
            self._give_up(folder)
            text = f"iteration {part.iteration} was not saved by rank {self.rank}"
            if is_taken_back:
                why = "another rank could not save its part and removed the whole save"
                raise NotSaved(f"{text}, for {why}") from error
            raise build_error(error, f"{text}: {error}") from error
        self._last = folder
        self._complete(folder)

    def _give_up(self, folder: SaveFolder) -> None:
        folder.take_back()
        if folder.marked is None:
            self._given_up.append(folder)

    def _look_around(self, folder: SaveFolder) -> None:
        if self._claimed:
            self._owner.check()
        else:
            self._owner.claim()
            self._claimed = True
        there = read_save(folder.final)
        if list_names(folder.final) and not self._owner.may_replace(there):
            raise FolderTaken(folder.describe_taken(there))

    def _complete(self, folder: SaveFolder) -> None:
        """Complete the save if all markers are visible, then remove old checkpoints."""
        try:
            if not folder.commit(self._owner.may_replace):
                return
        except FolderTaken:
            raise
        except (OSError, CheckpointError) as error:
            stay = "; its parts are kept, and the next save tries again" * folder.path.exists()
            iteration = folder.save.iteration
            text = f"rank {self.rank} could not complete iteration {iteration}: {error}{stay}"
            if find_errno(error) == errno.ENOENT:  # taken back, and begun again by a third rank
                raise NotSaved(text) from error
            raise build_error(error, text) from error
        # In this order: the first may give one its name, which then counts among those to keep.
        for clear in (self._owner.clean, self._keep_some):
            try:
                clear(folder.save)
            except (OSError, CheckpointError) as error:
                log.warning("%s: old checkpoints were not removed: %s", self.store, error)

    def _keep_some(self, done: Save) -> None:
        """Rename old checkpoints at once, and delete them during the next steps."""
        if self.keep is None:
            return
        spare = self._owner.keep(self.keep, done)
        if self._background:  # this is beside training already
            _delete(spare)
        elif spare:
            self._end_deleting()
            self._deleting = threading.Thread(target=_delete, args=(spare,), name="deletes")
            self._deleting.start()

    def _end_deleting(self) -> None:
        if self._deleting is not None:
            self._deleting.join()
            self._deleting = None

    def _settle(self) -> None:
        """Complete this job's last save if no rank could, because of a stale listing of the markers
        or another failure."""
        if self._last is not None and self._last.path.exists():
            self._complete(self._last)


def encode_part(part: CheckpointPart) -> CheckpointPart:
    """Convert everything that is stored as JSON, which copies it before training continues."""
    state = part.state
    if state is not None:
        state = replace(
            state,
            loss_scale=to_plain(state.loss_scale, "loss_scale"),
            lr_schedule=to_plain(state.lr_schedule, "lr_schedule"),
            data_position=to_plain(state.data_position, "data_position"),
            user=to_plain(state.user, "user"),
        )
    return replace(part, state=state, own=to_plain(part.own, "own"))


_OPEN: weakref.WeakSet[CheckpointWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)  # a child has not the threads that write


@atexit.register
def _report() -> None:
    """Log the error of a last save for which nobody waited."""
    for writer in list(_OPEN):
        try:
            writer.wait()
        except Exception:
            with contextlib.suppress(ValueError):  # a closed stream
                log.exception("the last checkpoint could not be written")
