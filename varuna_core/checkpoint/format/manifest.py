"""Describe a checkpoint's manifest: the pieces of every tensor with checksums, and small state.

Each rank writes a **marker**, its own part of the manifest, after all its other files. The
**manifest** merges all markers and is checked, so a reader opens one small file and then only the
tensor files that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from varuna_core.checkpoint.format.box import Box, find_fault, list_blocks, whole
from varuna_core.checkpoint.format.document import read_document
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES
from varuna_core.records.checkpoints import MANIFEST

WEIGHT, BUFFER = "weight", "buffer"


class Piece(NamedTuple):
    """A piece of a tensor in a file."""

    kind: str
    """weight, buffer, or optimizer.<key> for a tensor of the optimizer's state."""
    name: str
    """Name in the plain model; a tied tensor has its first name."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """The part of the tensor that this piece holds."""
    start: int
    """Offset of the piece's bytes in the file."""
    rows: int
    """Number of rows (of dimension 0) that each checksum covers."""
    checks: tuple[str, ...]

    @property
    def row_bytes(self) -> int:
        return prod(self.box.extent[1:]) * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]

    def blocks(self) -> Iterable[tuple[Box, int, str]]:
        """Yield each block in the piece's own coordinates, with its file offset and checksum."""
        for box, check in zip(list_blocks(self.box.extent, self.rows), self.checks, strict=True):
            row = box.offset[0] if box.offset else 0
            yield box, self.start + row * self.row_bytes, check


@dataclass(frozen=True, kw_only=True)
class HeldFile:
    """A tensor file and its pieces."""

    size: int
    head: str
    """Checksum of the bytes before the first tensor."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Save:
    """The origin of a checkpoint. Stored as `save.json` when the folder is made."""

    iteration: int
    save: str
    """<job>.<n>: the job's n-th save; names the folder while it is written."""
    job: str
    line: str
    """The job that began the training; jobs that continue the training keep it."""
    run: str = ""
    """The name of vjob's run that wrote the checkpoint; empty if vjob did not start the job."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """State that all ranks agree on, from rank 0. Values are JSON values as of `plain.py`."""

    partition: str
    """Segments of each stage when it was saved, such as 0-11-8-5-0: for people, not needed for
    loading."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and persistent buffer, tied ones under each name: a checkpoint
    without one of these is not complete."""
    ties: Sequence[Sequence[str]] = ()
    """Groups of names for one tensor, which is stored under the first name of the group."""
    loss_scale: Any = None
    lr_schedule: Any = None
    data_position: Any = None
    user: Any = None
    """The user's own small state."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """One rank's part of the manifest."""

    save: Save
    rank: int
    world_size: int
    files: Mapping[str, HeldFile]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Optimizer state by parameter, with keys in place of the tensors."""
    own: Any = None
    """State that only this rank has, such as random states."""
    state: TrainingState | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a whole checkpoint."""

    save: Save
    world_size: int
    state: TrainingState
    files: Mapping[str, HeldFile]
    optimizer: Mapping[str, Any]
    own: Mapping[int, Any]


def add_up(markers: Sequence[Marker]) -> Manifest:
    """Merge all ranks' markers into a manifest; CheckpointError if they do not fit together."""
    first = min(markers, key=lambda marker: marker.rank)
    if first.state is None:
        raise CheckpointError(f"rank {first.rank} passed no training state, which rank 0 must pass")
    files: dict[str, HeldFile] = {}
    optimizer: dict[str, Any] = {}
    for marker in markers:
        files.update(marker.files)
        for name, tree in marker.optimizer.items():
            if optimizer.setdefault(name, tree) is not tree and optimizer[name] != tree:
                raise CheckpointError(
                    f"the optimizer state of {name!r} on rank {marker.rank} differs from "
                    "another rank's: the replicas have diverged"
                )
    manifest = Manifest(
        save=first.save,
        world_size=first.world_size,
        state=first.state,
        files=files,
        optimizer=optimizer,
        own={marker.rank: marker.own for marker in markers if marker.own is not None},
    )
    faults = find_faults(manifest)
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError("not a complete checkpoint: " + "; ".join(faults[:5]) + more)
    return manifest


def find_faults(manifest: Manifest) -> list[str]:
    """Return the faults of tensors that are missing or not covered exactly once by their pieces."""
    faults = []
    found = group_pieces(manifest)
    for (kind, name), held in found.items():
        if not held[1:] and held[0][1].box == whole(held[0][1].shape):
            continue
        shapes = {(piece.shape, piece.dtype) for _, piece in held}
        if len(shapes) > 1:
            faults.append(f"{kind} {name!r} has shards of different shapes or types {shapes}")
            continue
        fault = find_fault(held[0][1].shape, [piece.box for _, piece in held])
        if fault:
            faults.append(f"{kind} {name!r}: {fault}")
    leads = find_leads(manifest.state.ties)
    for name, shape in manifest.state.shapes.items():
        lead = leads.get(name, name)
        stored = found.get((WEIGHT, lead)) or found.get((BUFFER, lead))
        if not stored:
            faults.append(f"nobody wrote {name!r}")
        elif stored[0][1].shape != tuple(shape):
            faults.append(f"{name!r} is {list(shape)}, written as {list(stored[0][1].shape)}")
    return faults


def group_pieces(manifest: Manifest) -> dict[tuple[str, str], list[tuple[str, Piece]]]:
    """Map the kind and name of each tensor to its pieces, each with the file that holds it."""
    found: dict[tuple[str, str], list[tuple[str, Piece]]] = {}
    for file, held in manifest.files.items():
        for piece in held.pieces:
            found.setdefault((piece.kind, piece.name), []).append((file, piece))
    return found


def find_leads(ties: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the name under which each tied tensor is stored."""
    return {name: names[0] for names in ties for name in names}


def read_manifest(folder: Path) -> Manifest:
    return parse_manifest(read_document(folder / MANIFEST, "manifest"), folder / MANIFEST)


# As JSON.


def render_marker(marker: Marker) -> dict[str, Any]:
    return {
        "save": vars(marker.save),
        "rank": marker.rank,
        "world_size": marker.world_size,
        "files": _render_files(marker.files),
        "optimizer": _render_optimizer(marker.optimizer),
        "own": marker.own,
        "state": marker.state and _render_state(marker.state),
    }


def render_manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        "save": vars(manifest.save),
        "world_size": manifest.world_size,
        "state": _render_state(manifest.state),
        "files": _render_files(manifest.files),
        "optimizer": _render_optimizer(manifest.optimizer),
        "own": {str(rank): own for rank, own in manifest.own.items()},
    }


def parse_marker(content: Any, path: Path) -> Marker:
    try:
        return Marker(
            save=Save(**content["save"]),
            rank=content["rank"],
            world_size=content["world_size"],
            files=_parse_files(content["files"]),
            optimizer=_parse_optimizer(content["optimizer"]),
            own=content["own"],
            state=content["state"] and _parse_state(content["state"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is not a marker that this vjob reads") from error


def parse_manifest(content: Any, path: Path) -> Manifest:
    try:
        return Manifest(
            save=Save(**content["save"]),
            world_size=content["world_size"],
            state=_parse_state(content["state"]),
            files=_parse_files(content["files"]),
            optimizer=_parse_optimizer(content["optimizer"]),
            own={int(rank): own for rank, own in content["own"].items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is not a manifest of this version") from error


def _render_state(state: TrainingState) -> dict[str, Any]:
    return {**vars(state), "shapes": dict(state.shapes), "ties": [list(t) for t in state.ties]}


def _parse_state(content: Any) -> TrainingState:
    shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
    return TrainingState(**{**content, "shapes": shapes})


def _render_optimizer(trees: Mapping[str, Any]) -> list[Any]:
    """Render optimizer state so that parameters with equal options and keys share one record."""
    alike: dict[str, tuple[Any, list[str]]] = {}
    for name, tree in trees.items():
        alike.setdefault(repr(tree), (tree, []))[1].append(name)
    return [*alike.values()]


def _parse_optimizer(content: Any) -> dict[str, Any]:
    if isinstance(content, dict):  # format 1 repeats the record for each
        return content
    return {name: tree for tree, names in content for name in names}


def _render_files(files: Mapping[str, HeldFile]) -> dict[str, Any]:
    return {
        name: {"size": file.size, "head": file.head, "alike": _render_pieces(file.pieces)}
        for name, file in files.items()
    }


def _render_pieces(pieces: Iterable[Piece]) -> list[Any]:
    """Render pieces so that those that differ only in name, place and checksums share a record."""
    alike: dict[Any, tuple[list[str], list[int], list[str]]] = {}
    for kind, name, dtype, shape, box, start, rows, checks in pieces:
        record = kind, dtype, shape, box, rows
        names, starts, sums = alike.get(record) or alike.setdefault(record, ([], [], []))
        names.append(name)
        starts.append(start)
        sums.append(" ".join(checks))
    return [[*record, *columns] for record, columns in alike.items()]


def _parse_files(content: Any) -> dict[str, HeldFile]:
    return {
        name: HeldFile(size=file["size"], head=file["head"], pieces=tuple(_parse_pieces(file)))
        for name, file in content.items()
    }


def _parse_pieces(file: Any) -> list[Piece]:
    if "pieces" in file:  # format 1 repeats the record for each
        return [
            Piece(
                **{key: one[key] for key in ("kind", "name", "dtype", "start", "rows")},
                shape=tuple(one["shape"]),
                box=Box(tuple(one["offset"]), tuple(one["extent"])),
                checks=tuple(one["checks"].split()),
            )
            for one in file["pieces"]
        ]
    pieces = [
        Piece(kind, name, dtype, *at, start, rows, tuple(checks.split()))
        for kind, dtype, shape, box, rows, *columns in file["alike"]
        for at in [(tuple(shape), Box(tuple(box[0]), tuple(box[1])))]
        for name, start, checks in zip(*columns, strict=True)
    ]
    pieces.sort(key=attrgetter("start"))
    return pieces
