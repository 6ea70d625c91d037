"""Reads what a rank owns, of a checkpoint of any layout: those files, those blocks, checked.

with CheckpointReader.open(store) as reader:
    weight = reader.read("h.0.attn.weight")
    rows = reader.read("h.0.mlp.weight", box=Box((256, 0), (256, 512)))
    state = reader.read_optimizer("h.0.attn.weight")
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import Box, TensorShare, whole
from varuna_core.checkpoint.format.document import crc_text
from varuna_core.checkpoint.format.entries import DTYPES, view_bytes
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint
from varuna_core.checkpoint.format.manifest import (
    BUFFER,
    WEIGHT,
    Piece,
    TrainingState,
    find_leads,
    group_pieces,
    read_manifest,
)
from varuna_core.checkpoint.format.plain import from_plain
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES
from varuna_core.checkpoint.store.store import compare_sizes, expect_ours, find_complete, offer_good

T = TypeVar("T")
OPTIMIZER = "optimizer."
WHOLE_THREADS, PART_THREADS = 2, 4
"""Each reads a block, then checks it. Two keep a fast disk busy with whole tensors, which the
kernel reads ahead. For parts of tensors its readahead is off, as it would read what is not wanted;
more threads make up for it.
"""


@dataclass(frozen=True, kw_only=True)
class WantedTensor:
    """A tensor to fill: the elements `box` of the stored one, cast to the type of `out`."""

    name: str
    out: Tensor
    kind: str = WEIGHT
    box: Box | None = None


TASKS_TOGETHER = 64
"""Blocks that a thread reads in one task, at most: handing over many small ones takes longer."""


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


class CheckpointReader:
    """One complete checkpoint; opens a tensor file when something in it is first asked for."""

    def __init__(self, folder: Path | str, check_complete: bool = True) -> None:
        """`check_complete` looks at every file's size; what is read is always checked."""
        self.folder = Path(folder)
        expect_ours(self.folder)
        self.manifest = self._named(lambda: read_manifest(self.folder))
        if check_complete:
            wrong = compare_sizes(self.folder, self.manifest)
            if wrong:
                more = f", and {len(wrong) - 1} other files" if len(wrong) > 1 else ""
                raise DamagedCheckpoint(wrong[0] + more + offer_good(self.folder))
        self._pieces = group_pieces(self.manifest)
        self._leads = find_leads(self.manifest.state.ties)
        self._handles: dict[tuple[str, bool], int] = {}
        self._scratch = threading.local()
        self._pools = {
            False: ThreadPoolExecutor(WHOLE_THREADS),
            True: ThreadPoolExecutor(PART_THREADS),
        }
        """By whether parts are read."""

    @classmethod
    def open(
        cls, store: Path | str, iteration: int | None = None, check_complete: bool = True
    ) -> CheckpointReader:
        """Open the checkpoint of this iteration, or the newest complete one."""
        return cls(find_complete(Path(store), iteration).path, check_complete)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        for fd in self._handles.values():
            os.close(fd)
        self._handles.clear()

    # What it holds.

    @property
    def iteration(self) -> int:
        return self.manifest.save.iteration

    @property
    def line(self) -> str:
        """For the writer of a job that continues this training."""
        return self.manifest.save.line

    @property
    def state(self) -> TrainingState:
        """The state that rank 0 gave."""
        state = self.manifest.state
        return TrainingState(
            partition=state.partition,
            shapes=state.shapes,
            ties=state.ties,
            loss_scale=from_plain(state.loss_scale),
            lr_schedule=from_plain(state.lr_schedule),
            data_position=from_plain(state.data_position),
            user=from_plain(state.user),
        )

    def own(self, rank: int) -> Any:
        """The state of this rank alone; None if there was no such rank."""
        return from_plain(self.manifest.own.get(rank))

    def names(self, kind: str = WEIGHT) -> list[str]:
        return [name for held, name in self._pieces if held == kind]

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        return self._find(name, kind)[0][1].shape

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        return DTYPES[self._find(name, kind)[0][1].dtype]

    # Reading.

    def read(self, name: str, kind: str = WEIGHT, box: Box | None = None) -> Tensor:
        """The tensor, or the elements `box` of it, on the CPU."""
        box = box or whole(self.shape(name, kind))
        out = torch.empty(box.extent, dtype=self.dtype(name, kind))
        self.fill([WantedTensor(name=name, out=out, kind=kind, box=box)])
        return out

    def read_optimizer(self, name: str, part: Box | TensorShare | None = None) -> Any:
        """The optimizer's state of a parameter, or None if it had none.

        `part` is what is wanted of the parameter: state of the parameter's own shape comes in that
        part, other state whole.
        """
        return self.read_optimizers({name: part}).get(name)

    def read_optimizers(self, parts: Mapping[str, Box | TensorShare | None]) -> dict[str, Any]:
        """The same of several parameters at once, without those that had no state."""
        wanted: list[WantedTensor] = []

        def place(name: str, part: Box | TensorShare | None, key: str) -> Tensor:
            kind = OPTIMIZER + key
            full = self.shape(name, kind)
            if part is None or full != self.shape(name):
                part = whole(full)
            out = torch.empty(part.extent, dtype=self.dtype(name, kind))
            if isinstance(part, TensorShare):
                for outer, inner in part.pieces:
                    held = out[inner.slices]
                    wanted.append(WantedTensor(name=name, out=held, kind=kind, box=outer))
            else:
                wanted.append(WantedTensor(name=name, out=out, kind=kind, box=part))
            return out

        found = {}
        for name, part in parts.items():
            tree = self.manifest.optimizer.get(self._leads.get(name, name))
            if tree is not None:
                found[name] = from_plain(tree, partial(place, name, part))
        self.fill(wanted)
        return found

    def fill(self, wanted: Iterable[WantedTensor]) -> None:
        """Read into tensors that are there, of any layout, type and device."""
        tasks = [planned for one in wanted for planned in self._plan(one)]
        if len(tasks) == 1:
            self._named(tasks[0][1])
            return

        def run() -> None:
            begun = []
            for is_part in (False, True):
                held = [task for kind, task in tasks if kind == is_part]
                size = max(1, min(TASKS_TOGETHER, len(held) // (4 * PART_THREADS)))
                for at in range(0, len(held), size):
                    begun.append(self._pools[is_part].submit(_run_all, held[at : at + size]))
            try:
                for one in begun:
                    one.result()
            finally:
                for one in begun:
                    one.cancel()

        self._named(run)

    def _find(self, name: str, kind: str) -> Sequence[tuple[str, Piece]]:
        lead = self._leads.get(name, name)
        found = self._pieces.get((kind, lead))
        if found is None and kind == WEIGHT:
            found = self._pieces.get((BUFFER, lead))
        if found is None:
            near = difflib.get_close_matches(name, self.names(kind), 1)
            hint = f"; it has {near[0]!r}" if near else ""
            raise CheckpointError(f"{self.folder} holds no {kind} {name!r}{hint}")
        return found

    def _plan(self, wanted: WantedTensor) -> Iterator[tuple[bool, Callable[[], None]]]:
        """A task for each stored block that has a part in it, and whether of its piece only a part
        is wanted."""
        found = self._find(wanted.name, wanted.kind)
        shape = found[0][1].shape
        box = wanted.box or whole(shape)
        if not box.fits(shape) or tuple(wanted.out.shape) != box.extent:
            raise ValueError(
                f"{wanted.kind} {wanted.name!r} is {list(shape)} in {self.folder}: {box} of it "
                f"does not go into a tensor of {list(wanted.out.shape)}"
            )
        for file, piece in found:
            held = box.intersect(piece.box) if box.volume else None
            if held is None:
                continue
            is_part = held != piece.box
            fd = self._open(file, is_part)
            out = wanted.out.detach()
            if held == box and len(piece.checks) == 1 and not is_part:
                at = fd, file, piece, box, piece.start, piece.checks[0]
                yield False, self._build_task(*at, box, out)
                continue
            for inner, start, check in piece.blocks():
                block = inner.inside(piece.box)
                common = block.intersect(box)
                if common is not None:
                    part = out[common.seen_from(box).slices]
                    task = self._build_task(fd, file, piece, block, start, check, common, part)
                    yield is_part, task

    def _build_task(
        self,
        fd: int,
        file: str,
        piece: Piece,
        block: Box,
        start: int,
        check: str,
        common: Box,
        out: Tensor,
    ) -> Callable[[], None]:
        dtype = DTYPES[piece.dtype]

        def run() -> None:
            direct = common == block and out.is_contiguous() and out.dtype == dtype
            if direct and out.device.type == "cpu":
                self._read_block(fd, file, piece, start, check, out)
                return
            held = self._borrow(piece, block)
            self._read_block(fd, file, piece, start, check, held)
            with torch.no_grad():
                out.copy_(held[common.seen_from(block).slices])

        return run

    def _borrow(self, piece: Piece, block: Box) -> Tensor:
        """This thread's memory for a block, used again for the next."""
        size = block.volume * ITEM_BYTES[piece.dtype]
        held: Tensor | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < size:
            held = self._scratch.held = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(DTYPES[piece.dtype]).view(block.extent)

    def _read_block(
        self, fd: int, file: str, piece: Piece, start: int, check: str, out: Tensor
    ) -> None:
        data = view_bytes(out)
        at = 0
        while at < len(data):
            got = os.preadv(fd, [data[at:]], start + at)
            if not got:
                raise DamagedCheckpoint(f"{self.folder / file} is cut short")
            at += got
        if crc_text(data) != check:
            raise DamagedCheckpoint(
                f"{self.folder / file} was changed: the checksum of {piece.kind} {piece.name!r} "
                "differs"
            )

    def _open(self, file: str, for_parts: bool) -> int:
        key = file, for_parts
        if key not in self._handles:
            path = self.folder / file
            try:
                self._handles[key] = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                text = f"{path} is missing{offer_good(self.folder)}"
                raise DamagedCheckpoint(text) from error
            if for_parts and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._handles[key], 0, 0, os.POSIX_FADV_RANDOM)
        return self._handles[key]

    def _named(self, work: Callable[[], T]) -> T:
        """Run; to an error about a damaged file, add what to load instead."""
        try:
            return work()
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(str(error) + offer_good(self.folder)) from error
        except OSError as error:
            text = f"{self.folder} cannot be read: {error}{offer_good(self.folder)}"
            raise CheckpointError(text) from error
