"""Read a rank's part of a checkpoint of any layout: only the needed files and blocks, checked.

with CheckpointReader.open(store) as reader:
    weight = reader.read("h.0.attn.weight")
    rows = reader.read("h.0.mlp.weight", box=Box((256, 0), (256, 512)))
    states = reader.read_optimizers({"h.0.attn.weight": None})
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import BLOCK_BYTES, Box, TensorShare, whole
from varuna_core.checkpoint.format.document import crc_text
from varuna_core.checkpoint.format.entries import DTYPES, MOST_BLOCKS, view_bytes
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
"""Numbers of threads, each of which reads a block and then checks it. Two keep a fast disk busy
with whole tensors, for which the kernel reads ahead. For parts of tensors readahead is off, since
it would read unwanted blocks; more threads make up for this."""


class WantedTensor(NamedTuple):
    """A tensor to fill: the elements `box` of the stored one, cast to the type of `out`."""

    name: str
    out: Tensor
    kind: str = WEIGHT
    box: Box | None = None


class _Block(NamedTuple):
    """A stored block, and the memory that it is read into."""

    fd: int
    start: int
    data: memoryview
    check: str
    file: str
    piece: Piece


TASKS_TOGETHER = 64
"""Blocks that a thread reads in one task, at most: handing over many small ones takes longer."""


def _list_runs(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Yield groups of blocks that follow each other in a file, each small enough for one read."""
    run: list[_Block] = []
    size = 0
    for block in sorted(blocks, key=itemgetter(0, 1)):
        is_next = run and (run[-1].fd, run[-1].start + len(run[-1].data)) == block[:2]
        if not is_next or size >= BLOCK_BYTES or len(run) == MOST_BLOCKS:
            if run:
                yield run
            run, size = [], 0
        run.append(block)
        size += len(block.data)
    if run:
        yield run


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


class CheckpointReader:
    """Reader of one complete checkpoint; each tensor file is opened when it is first needed."""

    def __init__(self, folder: Path | str, check_complete: bool = True) -> None:
        """Open a checkpoint. With `check_complete`, check the sizes of all files; the data that is
        read is always checked."""
        self.folder = Path(folder)
        expect_ours(self.folder)
        self.manifest = self._named(lambda: read_manifest(self.folder))
        if check_complete:
            wrong = compare_sizes(self.folder, self.manifest)
            if wrong:
                more = f", and {len(wrong) - 1} other files" if len(wrong) > 1 else ""
                raise DamagedCheckpoint(next(iter(wrong.values())) + more + offer_good(self.folder))
        self._pieces = group_pieces(self.manifest)
        self._leads = find_leads(self.manifest.state.ties)
        self._handles: dict[tuple[str, bool], int] = {}
        self._scratch = threading.local()
        self._pools = {
            False: ThreadPoolExecutor(WHOLE_THREADS),
            True: ThreadPoolExecutor(PART_THREADS),
        }
        """Thread pools: True for parts of tensors, False for whole ones."""

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
        """The `line` to pass to the writer of a job that continues this training."""
        return self.manifest.save.line

    @property
    def state(self) -> TrainingState:
        """State of the training that rank 0 passed to the save."""
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
        """Return the state that only this rank had; None if there was no such rank."""
        return from_plain(self.manifest.own.get(rank))

    def names(self, kind: str = WEIGHT) -> list[str]:
        return [name for held, name in self._pieces if held == kind]

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        return self._find(name, kind)[0][1].shape

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        return DTYPES[self._find(name, kind)[0][1].dtype]

    # Reading.

    def read(self, name: str, kind: str = WEIGHT, box: Box | None = None) -> Tensor:
        """Read a tensor, or the elements `box` of it, to the CPU."""
        box = box or whole(self.shape(name, kind))
        out = torch.empty(box.extent, dtype=self.dtype(name, kind))
        self.fill([WantedTensor(name=name, out=out, kind=kind, box=box)])
        return out

    def read_optimizer(self, name: str, part: Box | TensorShare | None = None) -> Any:
        """Read the optimizer's state of a parameter; None if it had none.

        `part` is the wanted part of the parameter: state tensors of the parameter's shape are cut
        in the same way, other state is read whole.
        """
        return self.read_optimizers({name: part}).get(name)

    def read_optimizers(self, parts: Mapping[str, Box | TensorShare | None]) -> dict[str, Any]:
        """Read the optimizer's state of several parameters at once, without those that had none."""
        wanted: list[WantedTensor] = []

        def place(name: str, part: Box | TensorShare | None, key: str) -> Tensor:
            kind = OPTIMIZER + key
            stored = self._find(name, kind)[0][1]
            full, dtype = stored.shape, DTYPES[stored.dtype]
            if part is None or full != self.shape(name):
                out = torch.empty(full, dtype=dtype)
                wanted.append(WantedTensor(name, out, kind))
                return out
            out = torch.empty(part.extent, dtype=dtype)
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
        """Read into existing tensors of any layout, type and device."""
        tasks: list[tuple[bool, Callable[[], None]]] = []
        small: list[_Block] = []
        for one in wanted:
            block = self._find_block(one)
            if block is None:
                tasks += self._plan(one)
            else:
                small.append(block)
        tasks += [(False, partial(self._read_blocks, run)) for run in _list_runs(small)]
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

    def _find_block(self, wanted: WantedTensor) -> _Block | None:
        """Return the stored block that can be read straight into the memory of a wanted tensor.

        None if the tensor is stored in several blocks, or must be cast, cut or moved to a device.
        """
        (file, piece), *others = self._find(wanted.name, wanted.kind)
        out = wanted.out
        if (
            others
            or len(piece.checks) != 1
            or wanted.box not in (None, piece.box)
            or out.shape != piece.shape
            or out.dtype != DTYPES[piece.dtype]
            or out.device.type != "cpu"
            or not out.is_contiguous()
        ):
            return None
        fd = self._open(file, False)
        return _Block(fd, piece.start, view_bytes(out), piece.checks[0], file, piece)

    def _plan(self, wanted: WantedTensor) -> Iterator[tuple[bool, Callable[[], None]]]:
        """Yield, for each stored block that overlaps the wanted elements, True if only a part of
        its piece is wanted, and the task that reads it."""
        found = self._find(wanted.name, wanted.kind)
        shape = found[0][1].shape
        box = wanted.box or whole(shape)
        if not box.fits(shape) or tuple(wanted.out.shape) != box.extent:
            raise ValueError(
                f"{wanted.kind} {wanted.name!r} has shape {list(shape)} in {self.folder}: its "
                f"box {box} does not fit a tensor of shape {list(wanted.out.shape)}"
            )
        for file, piece in found:
            held = box.intersect(piece.box) if box.volume else None
            if held is None:
                continue
            is_part = held != piece.box
            fd = self._open(file, is_part)
            out = wanted.out.detach()
            for inner, start, check in piece.blocks():
                block = inner.inside(piece.box)
                common = block.intersect(box)
                if common is not None:
                    part = out[common.seen_from(box).slices]
                    at = fd, start, check, file, piece
                    yield is_part, partial(self._read_part, at, block, common, part)

    def _read_part(
        self, at: tuple[int, int, str, str, Piece], block: Box, common: Box, out: Tensor
    ) -> None:
        """Read the elements `common` of a stored block; `at` has file, offset, checksum, piece."""
        fd, start, check, file, piece = at
        fits = common == block and out.is_contiguous() and out.dtype == DTYPES[piece.dtype]
        in_place = fits and out.device.type == "cpu"
        held = out if in_place else self._borrow(piece, block)
        self._read_blocks([_Block(fd, start, view_bytes(held), check, file, piece)])
        if not in_place:
            with torch.no_grad():
                out.copy_(held[common.seen_from(block).slices])

    def _borrow(self, piece: Piece, block: Box) -> Tensor:
        """Return this thread's scratch memory for a block; the next block overwrites it."""
        size = block.volume * ITEM_BYTES[piece.dtype]
        held: Tensor | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < size:
            held = self._scratch.held = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(DTYPES[piece.dtype]).view(block.extent)

    def _read_blocks(self, blocks: Sequence[_Block]) -> None:
        """Read blocks that are adjacent in one file, and check each."""
        fd, start = blocks[0].fd, blocks[0].start
        left = [block.data for block in blocks]
        while left:
            got = os.preadv(fd, left, start)
            if not got:
                raise DamagedCheckpoint(f"{self.folder / blocks[0].file} is cut short")
            start += got
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]
        for block in blocks:
            if crc_text(block.data) != block.check:
                raise DamagedCheckpoint(
                    f"{self.folder / block.file} was changed: the checksum of {block.piece.kind} "
                    f"{block.piece.name!r} differs"
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
        """Run `work`; an error about damage also names the checkpoint to load instead."""
        try:
            return work()
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(str(error) + offer_good(self.folder)) from error
        except OSError as error:
            text = f"{self.folder} cannot be read: {error}{offer_good(self.folder)}"
            raise CheckpointError(text) from error
