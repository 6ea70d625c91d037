"""Dry runs of a process that trains many cases: equal models on equal inputs run dry once.

A dry run, and a stage's comparison with it, are half of what a case of a tiny model takes. A
comparison that found nothing and warned of nothing is not made again. Models are equal where all
that pickle writes of them is, but for the values of weights and buffers, which a dry run does not
see. What pickle cannot write, and a dry run for real, is run each time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from varuna_core.runtime.comm.values import tensors_of
from varuna_core.runtime.split import replay, split
from varuna_core.runtime.split.record import Record
from varuna_core.runtime.split.rehearsal import Rehearsal, rehearse
from varuna_core.runtime.split.replay import Replay
from varuna_core.runtime.split.stage import StubPlan


class Writer(pickle.Pickler):
    """Leaves out the values of these tensors."""

    def __init__(self, file: io.BytesIO, unseen: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.places = {id(tensor): place for place, tensor in enumerate(unseen)}

    def persistent_id(self, held: Any) -> Any:
        if id(held) not in self.places:
            return None
        kind = type(held).__name__, str(held.dtype), str(held.device), held.requires_grad
        return self.places[id(held)], *kind, tuple(held.shape), held.stride()


class DryRuns:
    """Stands in for `rehearse` and `Replay.check`."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Rehearsal, Record, list[bool]]] = {}
        self._kept: set[int] = set()
        """Identities of those that `_made` keeps alive."""
        self._alike: set[tuple[int, range, bool]] = set()

    def install(self) -> None:
        split.rehearse = self.rehearse  # type: ignore[attr-defined]  # imported there by name
        compare = Replay.check

        def check(
            self: Replay, index: int, segments: range, plan: StubPlan, record: Record
        ) -> None:
            key = id(self.rehearsal), segments, self.rehearsal.model.training
            if key in runs._alike:
                return
            with patch.object(replay.log, "warning", wraps=replay.log.warning) as warning:
                compare(self, index, segments, plan, record)
            if id(self.rehearsal) in runs._kept and not warning.called:
                runs._alike.add(key)

        runs, Replay.check = self, check  # type: ignore[method-assign]

    def rehearse(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        device: torch.device,
        types: Mapping[int, torch.dtype],
        kept: Any,
    ) -> tuple[Rehearsal, Record]:
        unseen = [*model.parameters(), *model.buffers(), *tensors_of(dict(inputs))]
        converted = [types.get(id(held)) for held in unseen]
        text = io.BytesIO()
        try:
            Writer(text, unseen).dump((model, dict(inputs), device, converted, kept))
        except Exception:  # whatever a model raises that cannot be written
            return rehearse(model, inputs, device, types, kept)
        key = sha256(text.getbuffer()).hexdigest()
        if key not in self._made:
            rehearsal, record = rehearse(model, inputs, device, types, kept)
            if rehearsal.real:
                return rehearsal, record
            self._made[key] = rehearsal, record, [m.training for m in model.modules()]
            self._kept.add(id(rehearsal))
        rehearsal, record, modes = self._made[key]
        for module, mode in zip(rehearsal.model.modules(), modes, strict=True):
            module.training = mode  # a later run may have been in another one
        rehearsal.record = record
        return rehearsal, record
