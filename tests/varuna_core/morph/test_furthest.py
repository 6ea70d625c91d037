"""How far the attempts of a script came, by what their ranks printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.morph.furthest import MOST_BYTES, Furthest
from varuna_core.records.plan import write_plan
from varuna_core.records.runfolder import RunFolder


def read(folder: Path, logs: Sequence[str], progress: str | None = None) -> list[int]:
    """What each attempt has come to, from what its second rank printed."""
    run = RunFolder(folder)
    plan = make_plan(make_group("all", 2, 1), progress=progress)
    for number, text in enumerate(logs):
        attempt = run.attempt(number)
        path = attempt.rank_log(1, "out")
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode())
        write_plan(attempt.plan, plan)
    furthest = Furthest(run, plan)
    assert [furthest.has_step(number) for number in range(len(logs))] == [True] * len(logs)
    return [furthest.find(number) for number in range(len(logs))]


EPOCHS = r"^E(?P<epoch>\d+) (?P<step>\d+)/"


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("Epoch {epoch} step {step}/100 loss 1.5", None),
        ("Epoch {epoch}:  {step}%|# | {step}/100 [00:10<01:30,  1.00it/s]", None),
        ("Epoch {epoch}/9\n{step}/100 ━━━━━━━━ 0s 10ms/step - loss: 1.5788", None),
        ("E{epoch} {step}/100", EPOCHS),
    ],
)
def test_a_later_epoch_is_further_whatever_its_step(
    tmp_path: Path, line: str, progress: str | None
) -> None:
    """Each attempt resumed at its own last checkpoint, and lost a node some steps later."""
    texts = [
        "\n".join(line.format(epoch=epoch, step=step) for epoch, step in places) + "\n"
        for places in ([(1, 90), (1, 100), (2, 50)], [(2, 60), (3, 5)], [(3, 4)], [(3, 7)])
    ]
    found = read(tmp_path, texts, progress)
    assert found[0] < found[1] == found[2] < found[3]


def test_a_later_epoch_of_a_learned_counter_is_further(tmp_path: Path) -> None:
    line = "Epoch: [{}][ {}/100]  Time  0.120 ( 0.130)  Loss 6.9 (6.9)\n"
    first = "".join(line.format(0, step) for step in (80, 90, 100))
    later = "".join(line.format(1, step) for step in (10, 20, 30))
    found = read(tmp_path, [first, later])
    assert -1 < found[0] < found[1]


def test_without_epochs_it_is_the_step(tmp_path: Path) -> None:
    said = ["step 5/100 loss 1.5\n", "step 3/100 loss 1.5\nstep 9/100 loss 1.5", "step 1 loss 1.5"]
    assert read(tmp_path, said) == [5, 9, 9]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A terminal's codes before a line that an anchored pattern knows, and a bar's last state."""
    assert read(tmp_path / "a", ["\x1b[32m\x08E0 7/9\x1b[0m\n"], EPOCHS) == [7]
    assert read(tmp_path / "b", ["\x0bE0 7/9\n"], r"^\s*E0 (?P<step>\d+)/") == [7]
    assert read(tmp_path / "c", ["E0 7/9\rE0 8/9\r\n"], EPOCHS) == [8]


def test_what_is_said_after_the_last_step_hides_it_not(tmp_path: Path) -> None:
    noise = "NCCL INFO channel\n" * 3000  # of about 53 KiB
    text = "step 5/100 loss 1.5\n" + noise
    assert read(tmp_path / "a", [text]) == [5]
    run = RunFolder(tmp_path / "a")
    with run.attempt(0).rank_log(1, "out").open("a") as handle:
        handle.write(noise)
    plan = make_plan(make_group("all", 2, 1))
    assert Furthest(run, plan).find(0) == 5
    with run.attempt(0).rank_log(1, "out").open("a") as handle:
        handle.write("x" * MOST_BYTES)
    assert Furthest(run, plan).find(0) == -1


def test_attempts_that_told_of_no_step_came_nowhere(tmp_path: Path) -> None:
    furthest = Furthest(RunFolder(tmp_path), make_plan(make_group("all", 2, 1)))
    assert (furthest.find(3), furthest.has_step(0)) == (-1, False)
