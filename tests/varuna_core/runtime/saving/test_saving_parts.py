"""Saving and loading in one process: precisions, optimizers, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.small import Gpt, TiedGpt, make_inputs
from tests.ranks.precision_rank import Foreign
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import CheckpointError, NoCheckpoint
from varuna_core.records.checkpoints import Complete, list_complete
from varuna_core.runtime.saving import saving
from varuna_core.runtime.saving.saving import LEFT
from varuna_core.runtime.saving.tensors import fit_rates, list_options, put_optimizer


def build(model: type[Gpt] = Gpt, seed: int = 0, **options: Any) -> Varuna:
    torch.manual_seed(seed)
    return Varuna(model(), "0;", make_inputs(), 4, 2, device="cpu", schedule="1f1b", **options)


def take_steps(varuna: Varuna, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(varuna.step(make_inputs(seed=varuna.iteration))[0].item())
        varuna.optimizer.step()
        varuna.zero_grad()
    return losses


@pytest.mark.parametrize("target", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("source", ["fp32", "bf16", "fp16"])
def test_any_precision_takes_up_the_masters_of_any(
    tmp_path: Path, source: str, target: str
) -> None:
    one, other = build(TiedGpt, precision=source), build(TiedGpt, seed=1, precision=target)
    for varuna in (one, other):
        varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), 0.1, momentum=0.9), 2.0**8)
    take_steps(one, 2)
    assert one.checkpoint(tmp_path) is None
    assert other.load_checkpoint(tmp_path) == other.iteration == 2
    for name, master in one.masters().items():
        assert torch.equal(master, other.masters()[name]), name
        mine, theirs = one.optimizer.state[master], other.optimizer.state[other.masters()[name]]
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])
    assert abs(take_steps(one, 1)[0] - take_steps(other, 1)[0]) < 0.05


def test_a_training_saved_without_its_optimizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    varuna = build()
    optimizer = torch.optim.SGD(varuna.parameters(), 0.1, momentum=0.9)
    varuna.checkpoint(tmp_path, 0)
    assert "set_optimizer" not in caplog.text  # it has only weights yet
    varuna.step(make_inputs())
    optimizer.step()
    for number in (1, 2):
        varuna.checkpoint(tmp_path / "later", number)
    assert caplog.text.count("no optimizer state is saved: pass the optimizer to") == 1
    varuna.set_optimizer(optimizer)
    varuna.checkpoint(tmp_path / "last")
    assert caplog.text.count("no optimizer state is saved") == 1


def test_a_save_beside_training_is_waited_for(tmp_path: Path) -> None:
    varuna = build()
    pending = varuna.checkpoint(tmp_path / "store", 7, tmp_path / "local")
    assert pending is not None
    pending.result()
    assert pending.done() and varuna.load_checkpoint(tmp_path / "store") == 7
    assert varuna.iteration == 0
    taken = tmp_path / "store" / "varuna_ckpt_8"  # somebody else's
    taken.mkdir()
    (taken / "theirs").touch()
    second = varuna.checkpoint(tmp_path / "store", 8, tmp_path / "local")
    assert second is not None
    with pytest.raises(CheckpointError, match="varuna_ckpt_8 already exists"):
        second.result()
    pending.result()
    varuna.close()


def test_an_optimizer_without_a_state_dict_keeps_its_options(tmp_path: Path) -> None:
    one, other = build(), build(seed=1)
    one.set_optimizer(Foreign(one.parameters(), lr=0.25))
    take_steps(one, 1)
    one.checkpoint(tmp_path)
    other.set_optimizer(Foreign(other.parameters(), lr=1.0))
    other.load_checkpoint(tmp_path)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert take_steps(one, 2) == take_steps(other, 2)


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    one, other = build(), build()
    one.set_optimizer(torch.optim.AdamW(one.parameters()))
    one.checkpoint(tmp_path)
    other.set_optimizer(torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(
        CheckpointError, match=r"state of AdamW, but the optimizer is SGD: .*export"
    ):
        other.load_checkpoint(tmp_path)


def test_going_back_forgets_the_optimizer_of_the_future(tmp_path: Path) -> None:
    varuna = build()
    varuna.set_optimizer(torch.optim.AdamW(varuna.parameters()))
    varuna.checkpoint(tmp_path, on_demand=True)
    first = take_steps(varuna, 3)
    varuna.checkpoint(tmp_path)
    assert varuna.load_checkpoint(tmp_path, 0) == 0
    assert not varuna.optimizer.state
    assert take_steps(varuna, 3) == first
    varuna.checkpoint(tmp_path)  # in place of the future that was left
    assert sorted(path.name for path in tmp_path.glob("varuna*")) == [
        "varuna_ckpt_0",
        "varuna_ckpt_3",
    ]


@pytest.mark.parametrize("num_stale", [2, 1000])
def test_a_listing_of_a_file_server_that_comes_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stale: int
) -> None:
    """NFS shows a folder as it was, for up to a minute: who leaves then has saved all the same."""
    stale: list[list[Complete]] = [[] for _ in range(num_stale)]
    monkeypatch.setattr(
        saving, "list_complete", lambda store: stale.pop() if stale else list_complete(store)
    )
    monkeypatch.setattr(saving, "SEEN_POLL_S", 0.01)
    monkeypatch.setattr(saving, "SEEN_S", 60.0 if num_stale == 2 else 0.1)
    varuna = build()
    if num_stale == 2:
        varuna.checkpoint(tmp_path, on_demand=True)
        return
    with pytest.raises(CheckpointError, match="iteration 0 is not complete"):
        varuna.checkpoint(tmp_path, on_demand=True)


def test_a_note_that_the_training_left_goes_when_it_comes_back(tmp_path: Path) -> None:
    varuna = build()
    varuna.checkpoint(tmp_path)
    (tmp_path / LEFT).write_text("{}")
    varuna.load_checkpoint(tmp_path)
    assert not (tmp_path / LEFT).exists()


def test_a_run_that_saved_before_does_not_begin_anew_where_its_store_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    varuna = build()
    monkeypatch.setenv("VJOB_SAVED", "40")
    with pytest.raises(NoCheckpoint, match="saved iteration 40, but it is missing now"):
        varuna.load_checkpoint(tmp_path, missing_ok=True)


def test_what_a_checkpoint_does_not_hold_is_named(tmp_path: Path) -> None:
    varuna = build()
    with pytest.raises(NoCheckpoint, match="holds no complete checkpoint"):
        varuna.load_checkpoint(tmp_path)
    assert varuna.load_checkpoint(tmp_path, missing_ok=True) == 0
    with pytest.raises(NoCheckpoint, match="of iteration 3"):
        varuna.load_checkpoint(tmp_path, 3, missing_ok=True)
    varuna.user_state = {"model": varuna.split.model}
    with pytest.raises(TypeError, match="user/model is a Gpt"):
        varuna.checkpoint(tmp_path)
    with pytest.raises(ValueError, match="object is not a scheduler"):
        varuna.set_scheduler(object())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        varuna.checkpoint(tmp_path / "file", on_demand=True)


def test_groups_may_be_cut_otherwise() -> None:
    """Options follow the parameters; where those of a group differ, the group's own stay."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    rates = [{"params": [p], "lr": 0.1 * (i // 2)} for i, p in enumerate(parameters)]
    options = list_options(torch.optim.SGD(rates, lr=9.0, momentum=0.5))
    found = {key: {"optimizer": "SGD", "options": o, "state": None} for key, o in options.items()}
    groups = [{"params": parameters[:2]}, {"params": parameters[2:3]}, {"params": parameters[3:]}]
    other = torch.optim.SGD(groups, lr=7.0)
    put_optimizer(other, found)
    assert [group["lr"] for group in other.param_groups] == [0.0, 0.1, 0.1]
    mixed = torch.optim.SGD([{"params": parameters}], lr=7.0)
    put_optimizer(mixed, found)
    assert mixed.param_groups[0]["lr"] == 7.0 and mixed.param_groups[0]["momentum"] == 0.5


def test_a_schedule_gets_the_rates_of_this_ranks_groups() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.5)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer),
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
        ],
        milestones=[3],
    )
    state = schedule.state_dict()
    state["_schedulers"][0]["base_lrs"] = state["_last_lr"] = [9.0]
    fitted = fit_rates(state, optimizer)
    assert fitted["_schedulers"][0]["base_lrs"] == [0.5, 0.5]
    assert fitted["_last_lr"] == [group["lr"] for group in optimizer.param_groups]
