"""Managers of two starts of the batch script that live at once: only the newer one counts."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.varuna_core.agent.local_run import TIMING, make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.cli import main
from varuna_core.morph.machine import repeat
from varuna_core.morph.manager import Manager
from varuna_core.morph.messages import CalledToEnd, Tick
from varuna_core.morph.orders import (
    IDLE,
    WAIT,
    Newest,
    Orders,
    Presence,
    follow,
    is_for_guest,
    read_orders,
    write_presence,
)
from varuna_core.records import morphing
from varuna_core.records.files import write_json
from varuna_core.records.morphing import (
    ENDED,
    RUNNING,
    ManagerState,
    Replaced,
    claim_attempt,
    claim_epoch,
    read_newest_epoch,
    read_state,
    write_state,
)
from varuna_core.records.plan import MorphPlan, Plan, write_plan
from varuna_core.records.record import CANCEL_ASKED, append_event
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts, derive_facts, render_training

LIMITS = MorphPlan(min_nodes=2, max_nodes=3, requeue=True, save_s=5, warm=False)


class Made(NamedTuple):
    run: RunFolder
    plan: Plan
    facts: TrainingFacts

    def start_manager(self, session: str) -> Manager:
        return Manager(self.run, self.plan, self.facts, session)

    def show_nodes(self, session: str, keys: str, count: int) -> list[Presence]:
        """Three agents of this session that have just come."""
        blank = Presence(
            seat=0, key="", session=session, host="", pid=1, count=count, state=IDLE, attempt=-1,
            code=0,
        )  # fmt: skip
        found = [
            replace(blank, seat=seat, key=key, host=f"n{seat}") for seat, key in enumerate(keys)
        ]
        for presence in found:
            write_presence(self.run.morph, presence)
        return found


def make_run(folder: Path) -> Made:
    run = RunFolder(folder / "run")
    run.path.mkdir(mode=0o700)
    plan = make_plan(
        make_group("all", 3, 1),
        timing=replace(TIMING, lost_s=6.0, join_s=60.0),
        morph=True,
        morphing=LIMITS,
    )
    write_plan(run.plan, plan)
    training = replace(GPT, pipeline=3, checkpoint_folder=str(folder / "ckpt"))
    run.training.write_text(render_training(training))
    run.morph.make()
    return Made(run, plan, derive_facts(training))


def turn(manager: Manager) -> None:
    """What `run` does between two waits, behind its check that it still owns the run."""
    manager._tell(*manager._read_inputs(), Tick())
    manager._write_orders()


def test_what_an_old_manager_writes_late_sends_no_healthy_node_home(tmp_path: Path) -> None:
    """It passed its check and stood still there: a file server that hung, a frozen machine. Slurm
    requeued the job meanwhile. Its orders used to land over those of the new manager, whose nodes
    took them for the word that the run went on elsewhere."""
    made = make_run(tmp_path)
    made.show_nodes("7.0", "abc", 1)
    old = made.start_manager("7.0")
    turn(old)
    assert not old._is_replaced()
    nodes = made.show_nodes("7.1", "def", 1)
    new = made.start_manager("7.1")
    turn(new)
    turn(old)
    state = read_state(made.run.morph)
    assert state is not None and state.session == "7.1"
    assert old._is_replaced() and not new._is_replaced()
    for index, node in enumerate(nodes):
        task = follow(read_orders(made.run.morph), node, knows_session=True)
        assert task.leave == "" and (task.attempt, task.node) == (state.attempt, index)


def test_a_killed_manager_is_followed_by_one_with_an_epoch_of_its_own(tmp_path: Path) -> None:
    """What the killed one had under way may land when its successor has written already."""
    made = make_run(tmp_path)
    made.show_nodes("7.0", "abc", 1)
    killed = made.start_manager("7.0")
    turn(killed)
    successor = made.start_manager("7.0")
    assert read_newest_epoch(made.run.morph) == 1 and killed._is_replaced()
    state = successor._state
    assert (state.phase, state.attempt) == (RUNNING, 0), "it goes on where the killed one was"
    successor._do(repeat(state))
    killed._land()
    killed._write_orders()
    orders = read_orders(made.run.morph)
    assert orders is not None and (orders.session, orders.epoch, orders.attempt) == ("7.0", 1, 0)


def test_an_earlier_start_of_the_job_never_takes_the_run_over(tmp_path: Path) -> None:
    """Neither one that stood still before its claim, nor one that had claimed before; but another
    job may, and a later start whatever it claimed before."""
    folder = make_run(tmp_path).run.morph
    assert claim_epoch(folder, "7.9") == 0 and claim_epoch(folder, "7.10") == 1
    for outdated in ("7.2", "7.9"):
        with pytest.raises(Replaced):
            claim_epoch(folder, outdated)
    assert claim_epoch(folder, "7.10") == 2 and claim_epoch(folder, "8.0") == 3
    with pytest.raises(Replaced):
        claim_epoch(folder, "7.10")


def test_a_claim_that_cannot_be_read_counts_and_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system without hard links, where the writer died over it."""
    monkeypatch.setattr(morphing, "CLAIM_READ_S", 0.0)
    folder = make_run(tmp_path).run.morph
    claim_epoch(folder, "7.0")
    folder.claim(1).write_text('{"sess')
    assert read_newest_epoch(folder) == 1 and read_orders(folder) is None
    assert claim_epoch(folder, "7.0") == 2


def test_a_claim_that_cannot_be_read_at_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed manager of the earlier start, started again, took the run from the later one."""
    folder = make_run(tmp_path).run.morph
    claim_epoch(folder, "7.0")
    claim_epoch(folder, "7.1")
    text = folder.claim(1).read_text()
    folder.claim(1).write_text("")
    monkeypatch.setattr(morphing.time, "sleep", lambda _: folder.claim(1).write_text(text))
    with pytest.raises(Replaced):
        claim_epoch(folder, "7.0")


def test_an_attempt_that_a_late_manager_took_is_passed_over(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    made.show_nodes("7.0", "abc", 1)
    old = made.start_manager("7.0")
    nodes = made.show_nodes("7.1", "def", 1)
    new = made.start_manager("7.1")
    assert (old._state.attempt, new._state.attempt) == (-1, -1)
    assert claim_attempt(made.run.attempt(0), old._epoch, "7.0")  # it stood still in front of this
    turn(new)
    state = read_state(made.run.morph)
    assert state is not None and (state.session, state.attempt) == ("7.1", 1)
    assert made.run.attempt(1).plan.exists()
    orders = read_orders(made.run.morph)
    assert orders is not None and orders.nodes == tuple(node.name for node in nodes)


def test_a_late_manager_that_finds_its_attempt_taken_ends(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    made.show_nodes("7.0", "abc", 1)
    old = made.start_manager("7.0")
    seen = old._read_inputs()
    made.show_nodes("7.1", "def", 1)
    turn(made.start_manager("7.1"))
    plan = made.run.attempt(0).plan.read_text()
    with pytest.raises(Replaced):
        old._tell(*seen, Tick())
    with pytest.raises(Replaced):  # nor where it stood still behind its check
        claim_attempt(made.run.attempt(0), old._epoch, "7.0")
    assert made.run.attempt(0).plan.read_text() == plan
    assert old.run() == 0


def test_the_end_of_a_late_manager_is_not_told_in_an_attempt_of_the_new_one(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    old = made.start_manager("7.0")
    made.show_nodes("7.1", "def", 1)
    turn(made.start_manager("7.1"))
    with pytest.raises(Replaced):
        old._tell(CalledToEnd("cancelled"))
    assert not made.run.attempt(0).outcome.exists()


def test_a_cancel_of_before_a_run_was_started_again_ends_no_later_start(tmp_path: Path) -> None:
    """Neither where the manager is killed meanwhile, nor after a requeue of the new start."""
    made = make_run(tmp_path)
    append_event(made.run.vjob_events, CANCEL_ASKED, now=False)
    first = made.start_manager("7.0")
    assert first._is_cancelled()
    first._tell(CalledToEnd("cancelled"))
    assert not made.start_manager("7.1")._is_cancelled()
    again = made.start_manager("7.1")
    assert not again._is_cancelled()
    write_state(made.run.morph, again._epoch, replace(again._state, phase=ENDED, requeue=True))
    requeued = made.start_manager("7.2")
    assert not requeued._is_cancelled()
    append_event(made.run.vjob_events, CANCEL_ASKED, now=False)
    assert requeued._is_cancelled()


def test_an_agent_goes_back_to_no_earlier_epoch() -> None:
    newest = Newest()
    orders = Orders("7.1", 3, ("0/a",), (), end=False, epoch=4)
    assert newest.take(orders) == orders
    assert newest.take(replace(orders, session="7.0", epoch=3)) is None
    assert newest.take(None) is None and newest.epoch == 4
    assert newest.take(replace(orders, epoch=5)) is not None


def test_the_run_has_gone_on_as_soon_as_it_is_claimed(tmp_path: Path) -> None:
    """The new manager has written no orders yet: nodes of the old one do not wait for them."""
    made = make_run(tmp_path)
    me = made.show_nodes("7.0", "abc", 1)[0]
    turn(made.start_manager("7.0"))
    claim_epoch(made.run.morph, "7.1")
    orders = read_orders(made.run.morph)
    assert follow(orders, me, knows_session=True).leave == "the run went on in another job"
    assert follow(orders, replace(me, session="7.1"), knows_session=True) == WAIT
    assert orders is not None and is_for_guest(orders, me)


def test_a_run_begun_by_an_earlier_vjob_is_read_and_not_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path)
    state = ManagerState(session="7.0", phase=RUNNING, attempt=2)
    write_json(made.run.morph.unclaimed, asdict(state))
    assert read_state(made.run.morph) == state
    code = main(["manage", "--run", str(made.run.path), "--session", "7.1"])
    assert code == 2 and "is of an earlier vjob: submit again" in capsys.readouterr().err
    assert read_newest_epoch(made.run.morph) == -1
