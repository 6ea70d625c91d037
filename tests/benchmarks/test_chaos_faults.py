"""Schedules of faults, their actions and the losses of histories, without a run."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.experiment import Report, read_faults
from benchmarks.chaos.fault_actions import LAB_ACTIONS, LOCAL_ACTIONS, spoil
from benchmarks.chaos.faults import ANYWHERE, GAP, ON_SLURM, Fault, count_steps, draw_faults
from benchmarks.chaos.history import read_losses
from varuna_core.records.runfolder import RunFolder


@given(seed=st.integers(), count=st.integers(0, 40))
def test_a_seed_is_a_schedule(seed: int, count: int) -> None:
    found = draw_faults(seed, count, ANYWHERE)
    assert found == draw_faults(seed, count, ANYWHERE)
    assert len(found) == count
    at = [fault.at for fault in found]
    assert at == sorted(at)
    assert all(at.count(one) <= 2 for one in at), "three at once may end a run, and rightly"
    assert len({fault.kind for fault in found}) == min(count, len(ANYWHERE))
    assert count_steps(found) >= max(at, default=0) + 2 * GAP


def test_every_kind_has_an_action() -> None:
    assert set(ANYWHERE) == set(LOCAL_ACTIONS)
    assert set(ON_SLURM) == set(LAB_ACTIONS)


def test_a_report_can_be_replayed(tmp_path: Path) -> None:
    faults = draw_faults(7, 5, ANYWHERE)
    report = Report(seed=7, testbed="local", faults=[vars(one) for one in faults], folder="x")
    report.write(tmp_path / "report.json")
    assert read_faults(tmp_path / "report.json") == faults


def write_lines(run: RunFolder, number: int, first: int, steps: list[int]) -> None:
    folder = run.attempt(number).path / "ranks"
    folder.mkdir(parents=True)
    text = f"resumed from iteration {first} in ckpt\n" if first else ""
    text += "".join(f" iteration {step:8d}/ 90 | lm loss: {number}.{step} | x\n" for step in steps)
    (folder / "3.out").write_text(text)


def test_of_a_step_done_twice_the_last_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_lines(run, 0, 0, [1, 2, 3, 4])
    write_lines(run, 1, 2, [3, 4, 5])
    losses, problems = read_losses(run)
    assert problems == []
    assert losses == {1: 0.1, 2: 0.2, 3: 1.3, 4: 1.4, 5: 1.5}


def test_what_cannot_be_a_history_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_lines(run, 0, 0, [1, 2, 4])
    write_lines(run, 1, 8, [9, 10])
    write_lines(run, 2, 10, [12])
    _, problems = read_losses(run)
    assert problems == [
        "attempt 0 leaves out steps",
        "attempt 1 goes on from step 8, which nobody has done",
        "attempt 2 begins with step 12 after iteration 10",
    ]


def test_a_line_that_was_cut_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_lines(run, 0, 0, [1])
    with (run.attempt(0).path / "ranks" / "3.out").open("a") as file:
        file.write(" iteration        2/ 90 | elap iteration        3/ 90 | lm loss: 0.3 | x\n")
    assert read_losses(run)[0] == {1: 0.1, 3: 0.3}


def test_what_is_spoilt_is_not_what_it_was(tmp_path: Path) -> None:
    for how in range(3):
        file = tmp_path / f"segment-{how}"
        file.write_bytes(bytes(100))
        spoil(file, how)
        assert not file.exists() or file.read_bytes() != bytes(100)


def test_a_fault_is_told_in_its_fields() -> None:
    fault = Fault(kind="warn", at=10, pick=0.5, lasts_s=2.0)
    assert vars(fault) == {"kind": "warn", "at": 10, "pick": 0.5, "lasts_s": 2.0}
