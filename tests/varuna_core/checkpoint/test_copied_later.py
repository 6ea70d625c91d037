"""A save beside training copies what only the optimizer changes under the next step's work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from varuna_core.checkpoint.format.entries import CheckpointPart, make_entry
from varuna_core.checkpoint.format.errors import NotSaved
from varuna_core.checkpoint.format.manifest import BUFFER, WEIGHT, TrainingState
from varuna_core.checkpoint.store.reader import OPTIMIZER, CheckpointReader, WantedTensor
from varuna_core.checkpoint.store.writer import CheckpointWriter, Staging

SHAPE = (64, 48)
KINDS = {"w": WEIGHT, "running": BUFFER, "moment": OPTIMIZER + "exp_avg"}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(SHAPE) for name in KINDS}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread that copies waits for it."""
    opened, finish = threading.Event(), Staging.finish

    def wait_and_copy(self: Staging) -> Any:
        assert opened.wait(60)
        return finish(self)

    monkeypatch.setattr(Staging, "finish", wait_and_copy)
    return opened


def make_part(tensors: dict[str, Tensor], iteration: int = 1) -> CheckpointPart:
    entries = [
        make_entry(kind, "w" if kind != BUFFER else name, tensors[name])
        for name, kind in KINDS.items()
    ]
    return CheckpointPart(
        iteration=iteration,
        segments={0: entries},
        state=TrainingState(partition="1", shapes={"w": SHAPE, "running": SHAPE}),
    )


def read(store: Path, iteration: int = 1) -> dict[str, Tensor]:
    with CheckpointReader(store / f"varuna_ckpt_{iteration}") as reader:
        found = {name: torch.empty(SHAPE) for name in KINDS}
        reader.fill(
            WantedTensor(name="w" if kind != BUFFER else name, kind=kind, out=found[name])
            for name, kind in KINDS.items()
        )
    return found


def test_a_forward_changes_buffers_before_the_rest_is_copied(
    tmp_path: Path, tensors: dict[str, Tensor], gate: threading.Event
) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    writer = CheckpointWriter(tmp_path, job="a", background=True)
    writer.save(make_part(tensors), later=True)
    tensors["running"].zero_()
    gate.set()
    writer.wait_copied()
    for tensor in tensors.values():
        tensor.zero_()
    writer.close()
    found = read(tmp_path)
    assert all(torch.equal(found[name], before[name]) for name in KINDS)


def test_nothing_is_put_off_unless_somebody_waits_for_it(
    tmp_path: Path, tensors: dict[str, Tensor], gate: threading.Event
) -> None:
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    writer = CheckpointWriter(tmp_path, job="a", background=True)
    writer.save(make_part(tensors))
    for tensor in tensors.values():
        tensor.zero_()
    gate.set()
    writer.close()
    found = read(tmp_path)
    assert all(torch.equal(found[name], before[name]) for name in KINDS)


@pytest.mark.parametrize("way", ["in place", "data", "moment"])
def test_a_change_that_comes_too_early_is_no_checkpoint_and_the_next_is_copied_at_once(
    tmp_path: Path, tensors: dict[str, Tensor], gate: threading.Event, way: str
) -> None:
    writer = CheckpointWriter(tmp_path, job="a", background=True)
    writer.save(make_part(tensors), later=True)
    changed = tensors["moment" if way == "moment" else "w"]
    if way == "data":
        changed.data.copy_(torch.zeros(SHAPE))  # an average of weights that is evaluated
    else:
        changed.add_(1)
    gate.set()
    with pytest.raises(NotSaved, match="'w' was changed before it was copied"):
        writer.wait()
    assert not (tmp_path / "varuna_ckpt_1").exists()
    gate.clear()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    writer.save(make_part(tensors, 2), later=True)
    for tensor in tensors.values():
        tensor.zero_()
    gate.set()
    writer.close()
    found = read(tmp_path, 2)
    assert all(torch.equal(found[name], before[name]) for name in KINDS)


def test_whoever_waits_does_not_wait_for_a_thread_that_is_gone(tensors: dict[str, Tensor]) -> None:
    staging = Staging()
    staging.take(make_part(tensors).segments, later=True)
    assert not staging.copied.is_set()
    staging.finish()
    assert staging.copied.is_set()
