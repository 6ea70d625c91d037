"""Gather the plain model's state dict on rank 0, tensor by tensor from the ranks that hold shards.

    each rank   sends a list of the shards that it would write to a checkpoint, by the store
    rank 0      checks that the shards make up the model, and sends the order to all ranks
    tensor by tensor in this order:   shards ─► joined on rank 0 ─► the state dict, or a file

Other ranks hold only their own part and a copy of one shard; rank 0, if it writes a safetensors
file, its own part and one tensor. An error on any rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.checkpoint.format.box import Box, find_fault, whole
from varuna_core.checkpoint.format.entries import DTYPES, Entry, name_dtype
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import WEIGHT, find_leads
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES
from varuna_core.checkpoint.store.exchange import check_target, write_state_dict
from varuna_core.runtime.comm.failure import close_group, is_connection_error
from varuna_core.runtime.comm.links import NO_TIMEOUT
from varuna_core.runtime.saving.consensus import Consensus


@dataclass(frozen=True, kw_only=True)
class HeldPiece:
    """A shard of a tensor, and the rank that holds the shard."""

    rank: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box


Plan = Mapping[str, Sequence[HeldPiece]]
"""The shards of each tensor, keyed by its first name, in sending order."""


class Gather:
    """One rank's side of a single gather of a model."""

    def __init__(
        self,
        model: nn.Module,
        ties: Sequence[Sequence[str]],
        consensus: Consensus,
        only_trained: bool = False,
    ) -> None:
        """`model` is the plain model, used only for names, order and dtypes, not for values."""
        self.consensus = consensus
        self._plain = model.state_dict()
        if only_trained:
            named = model.named_parameters(remove_duplicate=False)
            trained = {name for name, parameter in named if parameter.requires_grad}
            self._plain = {name: self._plain[name] for name in self._plain if name in trained}
        self._leads = find_leads(ties)
        self._names_of: dict[str, list[str]] = {}
        for name, value in self._plain.items():
            if isinstance(value, Tensor):
                self._names_of.setdefault(self._leads.get(name, name), []).append(name)

    def run(self, take: Callable[[], Sequence[Entry]], target: Path | None) -> Any:
        """Return the state dict on rank 0, or write it to the target; None on other ranks.

        `take` returns this rank's shards; those of all ranks must cover each element exactly once.
        """
        mine: list[Entry] = []

        def begin() -> None:
            if target is not None:
                check_target(target)
            mine.extend(entry for entry in take() if entry.name in self._names_of)

        self.consensus.run_on_all(begin)
        plan = self._agree(mine)
        result: list[Any] = []
        if self.consensus.world_size == 1:
            self.consensus.run_on_all(
                lambda: result.append(self._receive(plan, mine, _Receiver(plan, None), target))
            )
        else:
            self._stream(plan, mine, target, result)
        return result[0] if result else None

    def _stream(
        self, plan: Plan, mine: Sequence[Entry], target: Path | None, result: list[Any]
    ) -> None:
        group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        broken: list[Exception] = []

        def work() -> None:
            try:
                if self.consensus.rank:
                    _Sender(plan, mine, group, self.consensus.rank).run()
                    return
                receiver = _Receiver(plan, group)
                try:
                    result.append(self._receive(plan, mine, receiver, target))
                finally:
                    receiver.stop()
            except _Refused:
                pass  # the other side says why
            except Exception as error:
                if not is_connection_error(error):
                    raise
                broken.append(error)  # of a rank that is gone, or has the reason

        def expect_whole() -> None:
            for error in broken:
                raise CheckpointError(f"the model was not gathered: {error}") from error

        try:
            self.consensus.run_on_all(work)
            self.consensus.run_on_all(expect_whole)
        finally:
            close_group(group)

    def _agree(self, mine: Sequence[Entry]) -> Plan:
        """Return the plan for all ranks' shards; raise an error on all ranks if the shards do not
        make up the model."""
        word = json.dumps([[e.name, e.dtype, e.shape, e.box.offset, e.box.extent] for e in mine])
        return _parse_plan(self.consensus.settle(word, self._decide))

    def _decide(self, words: list[str]) -> str:
        found: dict[str, list[HeldPiece]] = {name: [] for name in self._names_of}
        for rank, word in enumerate(words):
            for name, dtype, shape, offset, extent in json.loads(word):
                box = Box(tuple(offset), tuple(extent))
                piece = HeldPiece(rank=rank, dtype=dtype, shape=tuple(shape), box=box)
                found[name].append(piece)
        for name, held in found.items():
            plain = tuple(self._plain[name].shape)
            shapes = {(piece.shape, piece.dtype) for piece in held}
            fault = find_fault(plain, [piece.box for piece in held])
            if fault or len(shapes) > 1 or held[0].shape != plain:
                raise CheckpointError(f"{name!r} is not whole: {fault or shapes}")
        # As a file of them is laid out: the widest types first.
        order = sorted(found, key=lambda name: -ITEM_BYTES[self._type_of(name, found[name][0])])
        return json.dumps({name: [_render_piece(p) for p in found[name]] for name in order})

    def _type_of(self, name: str, piece: HeldPiece) -> str:
        """Return the dtype to gather: fp32 for masters, else the dtype of the plain model."""
        if DTYPES[piece.dtype] in (torch.float16, torch.bfloat16):
            return name_dtype(self._plain[name].dtype, name)
        return piece.dtype

    # Rank 0.

    def _receive(
        self, plan: Plan, mine: Sequence[Entry], receiver: _Receiver, target: Path | None
    ) -> dict[str, Tensor] | None:
        arrivals = _Arrivals(self._join_all(plan, mine, receiver))
        if target is not None:
            entries = [
                _make_arriving(name, self._type_of(lead, held[0]), held[0].shape, arrivals, lead)
                for lead, held in plan.items()
                for name in self._names_of[lead]
            ]
            write_state_dict(target, entries, self._leads, {})
            return None
        made: dict[str, Tensor] = {lead: arrivals.take(lead) for lead in plan}
        state: Any = type(self._plain)()
        for name, value in self._plain.items():
            lead = self._leads.get(name, name)
            state[name] = made[lead] if isinstance(value, Tensor) else value
        if hasattr(self._plain, "_metadata"):
            state._metadata = self._plain._metadata
        found: dict[str, Tensor] = state
        return found

    def _join_all(
        self, plan: Plan, mine: Sequence[Entry], receiver: _Receiver
    ) -> Iterator[tuple[str, Tensor]]:
        own = _index(mine)
        for name, held in plan.items():
            dtype = DTYPES[self._type_of(name, held[0])]
            yield name, _join(name, held, own, receiver).to(dtype)


class _Arrivals:
    """The tensors in order of arrival; each is freed when the next one is requested."""

    def __init__(self, arriving: Iterator[tuple[str, Tensor]]) -> None:
        self._arriving = arriving
        self._last: tuple[str, Tensor] | None = None

    def take(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = next(self._arriving)
        came, tensor = self._last
        assert came == name, f"{came} came for {name}"
        return tensor


def _make_arriving(
    name: str, dtype: str, shape: tuple[int, ...], arrivals: _Arrivals, lead: str
) -> Entry:
    return Entry(
        kind=WEIGHT,
        name=name,
        shape=shape,
        box=whole(shape),
        dtype=dtype,
        load=lambda: arrivals.take(lead),
    )


def _index(mine: Sequence[Entry]) -> dict[tuple[str, Box], Entry]:
    return {(entry.name, entry.box): entry for entry in mine}


def _load(entry: Entry) -> Tensor:
    return entry.load().detach().cpu().contiguous()


def _join(
    name: str, held: Sequence[HeldPiece], own: Mapping[tuple[str, Box], Entry], receiver: _Receiver
) -> Tensor:
    """Join a full tensor from local and received shards, in newly allocated memory."""
    made: Tensor | None = None
    for piece in held:
        part = receiver.take(piece) if piece.rank else _load(own[name, piece.box])
        if piece.box.extent == piece.shape:
            return part if piece.rank else part.clone()
        if made is None:
            made = torch.empty(piece.shape, dtype=part.dtype)
        made[piece.box.slices] = part
    assert made is not None
    return made


# The messages: rank 0 asks for each piece, by GO or NO, and is answered by GO and the piece, or NO.

GO, NO = 1, 0


class _Refused(Exception):
    """Raised if the other side failed and reported this after its data."""


class _Receiver:
    """Rank 0's side of the transfer."""

    def __init__(self, plan: Plan, group: Any) -> None:
        self._group = group
        self._left = Counter(p.rank for held in plan.values() for p in held if _travels(p))

    def take(self, piece: HeldPiece) -> Tensor:
        made = torch.empty(piece.box.extent, dtype=DTYPES[piece.dtype])
        if _travels(piece):
            self._left[piece.rank] -= 1
            word = torch.tensor([GO], dtype=torch.uint8)
            dist.send(word, piece.rank, group=self._group)
            dist.recv(word, piece.rank, group=self._group)
            if word.item() == NO:
                del self._left[piece.rank]
                raise _Refused
            dist.recv(_as_bytes(made), piece.rank, group=self._group)
        return made

    def stop(self) -> None:
        """Tell the ranks that have not sent all shards to stop."""
        for rank in [rank for rank, count in self._left.items() if count]:
            with contextlib.suppress(RuntimeError):  # it is gone
                dist.send(torch.tensor([NO], dtype=torch.uint8), rank, group=self._group)


class _Sender:
    """Another rank's side of the transfer: sends each shard when rank 0 requests it."""

    def __init__(self, plan: Plan, mine: Sequence[Entry], group: Any, rank: int) -> None:
        self._group, self._own = group, _index(mine)
        wanted = [(n, p) for n, held in plan.items() for p in held if p.rank == rank]
        self._wanted = [(name, piece) for name, piece in wanted if _travels(piece)]

    def run(self) -> None:
        word = torch.empty(1, dtype=torch.uint8)
        for name, piece in self._wanted:
            dist.recv(word, 0, group=self._group)
            if word.item() == NO:
                raise _Refused
            try:
                part = _load(self._own[name, piece.box])
            except Exception:
                dist.send(torch.tensor([NO], dtype=torch.uint8), 0, group=self._group)
                raise
            dist.send(word, 0, group=self._group)
            dist.send(_as_bytes(part), 0, group=self._group)


def _travels(piece: HeldPiece) -> bool:
    return piece.rank > 0 and piece.box.volume > 0


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as bytes, since gloo does not support all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _render_piece(piece: HeldPiece) -> list[Any]:
    return [piece.rank, piece.dtype, piece.shape, piece.box.offset, piece.box.extent]


def _parse_plan(text: str) -> Plan:
    plan = {}
    for name, held in json.loads(text).items():
        plan[name] = [
            HeldPiece(
                rank=rank,
                dtype=dtype,
                shape=tuple(shape),
                box=Box(tuple(offset), tuple(extent)),
            )
            for rank, dtype, shape, offset, extent in held
        ]
    return plan
