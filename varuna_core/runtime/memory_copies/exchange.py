"""Assembly of one copy in memory: shares go from the nodes that hold them to those that want them.

    what each node has ─► one holder for each share ─► its marker, to all ─► one manifest
    files that a node's ranks want ─► its own, or from a holder ─► <home>/varuna_ckpt_<n>

Every rank makes the same calls in the same order, over the group of all ranks; a node's first rank
does its node's part. An error on one rank ends no call early: all go through, then all hear of it.
Markers are JSON, and what a file holds is checked by whoever reads it, as in any checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.checkpoint.format.document import crc_text, parse_document, write_document
from varuna_core.checkpoint.format.entries import view_bytes
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import (
    Manifest,
    Marker,
    add_up,
    find_leads,
    parse_marker,
    render_manifest,
)
from varuna_core.records.checkpoints import MANIFEST, name_of
from varuna_core.records.memory_copies import list_shares

CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Mark:
    """The share that one rank of the earlier attempt wrote, as its node reports it."""

    rank: int
    share: int
    count: int
    check: str
    """Of its files, the same for replicas that were equal."""
    own: Any


class MemoryExchange:
    """One rank's side."""

    def __init__(self, home: Path, copy: str) -> None:
        self.folder = home / copy
        self._home = home
        is_alone = not dist.is_initialized()
        self._rank, self._world = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        keys = self._gather(f"{socket.gethostname()} {home}")
        self._leaders = [keys.index(key) for key in keys]
        """Of each rank, the first rank of its node."""
        self._errors: list[str] = []

    @property
    def is_leader(self) -> bool:
        return self._leaders[self._rank] == self._rank

    def assemble(self, list_wanted: Callable[[Manifest], Iterable[str]]) -> tuple[Path, list[str]]:
        """The folder to read from, once all ranks have heard that nobody's list has an error."""
        held = self._gather_marks()
        chosen = _choose(held)
        manifest = self._agree(held, chosen)
        target = self._home / name_of(manifest.save.iteration)
        wanted = self._gather(json.dumps(sorted(list_wanted(manifest))))
        if self.is_leader:
            with self._noted():
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(mode=0o700)
        needs: dict[int, set[str]] = {}
        for rank, text in enumerate(wanted):
            needs.setdefault(self._leaders[rank], set()).update(json.loads(text))
        for mark in chosen:
            self._hand_out(manifest, mark, held, needs, target)
        if self.is_leader:
            with self._noted():
                write_document(target / MANIFEST, "manifest", render_manifest(manifest), False)
        return target, self._errors

    def _gather_marks(self) -> dict[int, list[Mark]]:
        """Marks of each node that holds any, by its leader."""
        mine: list[Mark] = []
        if self.is_leader:
            with self._noted():
                for share in list_shares(self._home, self.folder.name):
                    marker = self._read_marker(share.rank)
                    mine.append(
                        Mark(share.rank, share.index, share.count, _check(marker), marker.own)
                    )
        told = self._gather(json.dumps([vars(mark) for mark in mine]))
        found = {rank: [Mark(**one) for one in json.loads(text)] for rank, text in enumerate(told)}
        return {leader: marks for leader, marks in found.items() if marks}

    def _read_marker(self, rank: int) -> Marker:
        path = self._path_of(rank)
        return parse_marker(parse_document(path.read_bytes(), path, "marker"), path)

    def _path_of(self, rank: int) -> Path:
        return self.folder / "markers" / f"rank-{rank:04d}.json"

    def _agree(self, held: Mapping[int, list[Mark]], chosen: list[Mark]) -> Manifest:
        """All markers that were chosen, on every rank, added up; with what any rank alone had."""
        markers = []
        for mark in chosen:
            data = b""
            leader = _list_holders(held, mark)[0][0]
            if leader == self._rank:
                with self._noted():
                    data = self._path_of(mark.rank).read_bytes()
            path = self._path_of(mark.rank)
            data = self._broadcast(data, leader)
            markers.append(parse_marker(parse_document(data, path, "marker"), path))
        own = {mark.rank: mark.own for marks in held.values() for mark in marks}
        return replace(add_up(markers), own=own)

    def _hand_out(
        self,
        manifest: Manifest,
        mark: Mark,
        held: Mapping[int, list[Mark]],
        needs: Mapping[int, set[str]],
        target: Path,
    ) -> None:
        """The files of one share."""
        ending = f".rank-{mark.rank:04d}.safetensors"
        holders = _list_holders(held, mark)
        laid_by = dict(reversed(holders))
        for name in sorted(name for name in manifest.files if name.endswith(ending)):
            mine = laid_by.get(self._rank)
            own = name if mine is None else name.replace(ending, f".rank-{mine:04d}.safetensors")
            size = manifest.files[name].size
            takers = [one for one in sorted(needs) if name in needs[one] and one not in laid_by]
            if mine is not None and name in needs.get(self._rank, ()):
                with self._noted():
                    os.link(self.folder / own, target / name)
            for number, taker in enumerate(takers):
                giver = holders[number % len(holders)][0]
                if self._rank == giver:
                    self._give(self.folder / own, size, taker)
                elif self._rank == taker:
                    self._take(target / name, size, giver)

    def _give(self, path: Path, size: int, taker: int) -> None:
        with contextlib.ExitStack() as stack:
            fd = None
            with self._noted():
                fd = os.open(path, os.O_RDONLY)
                stack.callback(os.close, fd)
            for at in range(0, size, CHUNK_BYTES):
                chunk = torch.zeros(min(CHUNK_BYTES, size - at), dtype=torch.uint8)
                if fd is not None:
                    with self._noted():
                        os.preadv(fd, [view_bytes(chunk)], at)  # cut short: its checksum tells
                dist.send(chunk, taker)

    def _take(self, path: Path, size: int, giver: int) -> None:
        with contextlib.ExitStack() as stack:
            handle = None
            with self._noted():
                handle = stack.enter_context(open(path, "xb"))
            for at in range(0, size, CHUNK_BYTES):
                chunk = torch.empty(min(CHUNK_BYTES, size - at), dtype=torch.uint8)
                dist.recv(chunk, giver)
                if handle is not None:
                    with self._noted():
                        handle.write(view_bytes(chunk))

    @contextlib.contextmanager
    def _noted(self) -> Any:
        """The others wait for us in the next call: an error is kept until all are through."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._errors.append(str(error))

    # Words and bytes.

    def _gather(self, text: str) -> list[str]:
        """Collect each rank's text on every rank."""
        if self._world == 1:
            return [text]
        data = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        told = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._world)]
        dist.all_gather(told, _pack(data, longest))
        return [
            bytes(view_bytes(one))[: int(size)].decode()
            for one, size in zip(told, sizes, strict=True)
        ]

    def _broadcast(self, data: bytes, source: int) -> bytes:
        if self._world == 1:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        packed = _pack(data, int(size))
        if len(packed):
            dist.broadcast(packed, source)
        return bytes(view_bytes(packed))


def list_files(manifest: Manifest, names: Iterable[str]) -> set[str]:
    """Files that hold a part of these tensors, or of their optimizer's state."""
    leads = find_leads(manifest.state.ties)
    wanted = {leads.get(name, name) for name in names}
    return {
        file
        for file, held in manifest.files.items()
        if any(piece.name in wanted for piece in held.pieces)
    }


def _choose(held: Mapping[int, list[Mark]]) -> list[Mark]:
    """One mark for each share, the lowest rank's; an error where nobody has one."""
    by_share: dict[int, Mark] = {}
    marks = sorted((mark for one in held.values() for mark in one), key=lambda mark: mark.rank)
    for mark in marks:
        by_share.setdefault(mark.share, mark)
    missing = set(range(marks[0].count)) - set(by_share) if marks else {0}
    if missing:
        raise CheckpointError(f"share {min(missing)} of the copy in memory is on no node any more")
    return [by_share[index] for index in sorted(by_share)]


def _list_holders(held: Mapping[int, list[Mark]], wanted: Mark) -> list[tuple[int, int]]:
    """Leaders whose node has these bytes, and the rank of old that laid them there; the wanted
    one's own first."""
    found = [
        (mark.rank, leader)
        for leader, marks in held.items()
        for mark in marks
        if (mark.share, mark.check) == (wanted.share, wanted.check)
    ]
    return [(leader, rank) for rank, leader in sorted(found)]


def _check(marker: Marker) -> str:
    """Checksum of all that its files hold, whatever their names."""
    held = sorted(
        (name.partition(".")[0], file.size, file.head, [piece.checks for piece in file.pieces])
        for name, file in marker.files.items()
    )
    return crc_text(json.dumps(held).encode())


def _pack(data: bytes, size: int) -> torch.Tensor:
    packed = torch.zeros(size, dtype=torch.uint8)
    if data:
        packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return packed
