"""Pace by when lines were written: of logs whose lines say nothing of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from tests.jobs.monitor.builders import NOW, healthy
from varuna_core.records.logs.learner import Doubt
from varuna_core.records.logs.times import MarkReader, TimesTail, format_mark
from varuna_core.records.runfolder import OPENED
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.model.snapshot import Health, Progress
from vjob.jobs.monitor.readers.node_files import NodeFiles, find_progress, view_logs
from vjob.jobs.monitor.readers.node_logs import LogFile
from vjob.jobs.monitor.rules.judge import judge


class NodeLogs:
    """Logs of a node as an agent writes them."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err, self.times = (folder / f"n0.{end}" for end in ("out", "err", "times"))
        for path in (self.out, self.err, self.times):
            path.touch()
        paths = {"out": str(self.out), "err": str(self.err)}
        self.files = NodeFiles("n0", paths, Classifier(), 64 * 1024, 10)

    def write(self, at: float, text: str, *, is_err: bool = False) -> None:
        with self.times.open("ab") as handle:
            handle.write(format_mark(at, self.out.stat().st_size, self.err.stat().st_size))
        with (self.err if is_err else self.out).open("a") as handle:
            handle.write(text + "\n")

    def read(self) -> Progress:
        self.files.poll()
        found = find_progress([self.files])
        assert found is not None
        return found


def test_steps_that_become_slower_are_slow_without_a_time_in_any_line(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    took = [1.4] * 100 + [4.2] * 16
    for step, before in enumerate(accumulate(took), start=1):
        at = NOW - sum(took) + before
        logs.write(at, f"0: step {step}/5000 loss {5 - step / 1000:.4f}")
    progress = logs.read()
    assert [round(point.step_s or 0, 1) for point in progress.points[-17:-14]] == [1.4, 4.2, 4.2]
    ranks = tuple(replace(rank, step=None, step_s=None, step_at=None) for rank in healthy().ranks)
    verdict = judge(replace(healthy(), ranks=ranks, progress=replace(progress, at=NOW)))
    assert (verdict.health, verdict.rule) == (Health.SLOW, "slower")
    assert "4.2 s now and took 1.4 s" in verdict.reason


def test_what_comes_later_is_timed_by_its_own_marks(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for step in range(1, 20):
        logs.write(NOW + 2 * step, f"0: step {step} loss 2.5")
        if step in (5, 12):
            assert logs.read().points[-1].step_s == 2.0
    assert {point.step_s for point in logs.read().points[1:]} == {2.0}


def test_an_evaluation_is_no_step(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    logs.write(NOW, "0: step 1 loss 2.5")
    logs.write(NOW + 1, "0: step 2 loss 2.5")
    logs.write(NOW + 2, "0: Evaluating on 640 samples")
    logs.write(NOW + 60, "0: step 3 loss 2.5")
    logs.write(NOW + 61, "0: step 4 loss 2.5")
    assert [point.step_s for point in logs.read().points] == [None, 1.0, None, 1.0]


def test_a_step_has_the_time_of_the_first_rank_that_printed_it(tmp_path: Path) -> None:
    """The report counts so too: with the last rank's time the two named different steps."""
    logs = NodeLogs(tmp_path)
    for step in range(3):
        logs.write(NOW + 10 * step, f"0: step {step} loss 2.5")
        logs.write(NOW + 10 * step + 4, f"1: step {step} loss 2.5")
    assert [point.at for point in logs.read().points] == [NOW, NOW + 10, NOW + 20]


def test_marks_of_a_growing_file_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "n.times"
    tail = TimesTail(path)
    assert tail.read()[0].find(0) is None
    path.write_bytes(format_mark(100.0, 0, 0) + b"101.0 5")
    assert tail.read()[0].find(7) == 100.0
    with path.open("ab") as handle:
        handle.write(b"0 0\n")
    assert tail.read()[0].find(70) == 101.0
    assert tail.read()[0].find_exact(50) == (101.0, 0.0)
    path.write_bytes(format_mark(200.0, 0, 0))
    assert tail.read()[0].find(7) == 200.0


def test_marks_of_a_whole_file_are_read_as_offsets_rise(tmp_path: Path) -> None:
    path = tmp_path / "n.times"
    assert MarkReader(path, is_err=False).find_exact(0) == (None, 0.0)
    path.write_bytes(b"100.000 0 0\nrubbish\n101.0 0 9\n90.000 50 9\nnan 60 9\n102.0 70 9")
    marks = MarkReader(path, is_err=False)
    found = [marks.find_exact(offset) for offset in (0, 7, 50, 80)]
    assert found == [(101.0, 0.0), (101.0, 0.25), (101.0, 0.0), (101.0, 0.25)]
    assert MarkReader(path, is_err=True).find_exact(9)[0] == 101.0


def test_what_an_earlier_attempt_left_in_the_batch_log_is_no_known_line(tmp_path: Path) -> None:
    """A requeued job goes on in the same file."""
    path = tmp_path / "scheduler.out"
    lost = "slurmstepd: error: *** STEP 5.0 ON b1 CANCELLED AT 2024-05-01T12:00:00 ***"
    path.write_text(f"attempt 0: {OPENED} b1:20000\n{lost}\nattempt 1: {OPENED} b1:20001\n")
    log = LogFile(path, "", path.name, Classifier(), begin=OPENED.encode())
    log.poll()
    assert log.known == []
    with path.open("a") as handle:
        handle.write(f"{lost}\n")
    log.poll()
    assert len(log.known) == 1


def test_the_head_of_a_long_log_tells_where_a_learned_counter_begins(tmp_path: Path) -> None:
    """The end alone names an epoch, and not the first one."""
    logs = NodeLogs(tmp_path)
    logs.write(100.0, "0: max steps: 6000")
    for at in range(5000):
        logs.write(
            100.0 + at, f"0: [ep {1 + at // 50}/120] it {at % 50}/50 | loss {9 - at / 999:.3f}"
        )
    found = logs.read()
    assert (found.step, found.num_steps, found.first_step) == (4999, 6000, 0)
    assert found.points[-1].step_s == 1.0 and found.loss is not None


def test_an_epoch_is_named_as_one(tmp_path: Path) -> None:
    logs = NodeLogs(tmp_path)
    for at in range(1, 9):
        logs.write(100.0 + at, f"0: Epoch {at}/30 - loss {9 - at / 9:.3f}")
    assert logs.read().name == "epoch 8 of 30"


def test_a_bar_without_a_name_needs_a_sign_of_training_once_it_begins_again(tmp_path: Path) -> None:
    """Pictures that are generated have such bars too; the sign may be in the other file."""
    logs = NodeLogs(tmp_path)
    for at in range(1, 30):
        bar = f"0: {at % 10}%|##| {at % 10 + 1}/10 [00:10<00:30,  2.00it/s]"
        logs.write(100.0 + at, bar, is_err=True)
    logs.files.poll()
    assert find_progress([logs.files]) is None
    assert view_logs([logs.files], None).doubt is Doubt.UNNAMED
    logs.write(140.0, "0: epoch 2: loss 2.5")
    assert logs.read().step == 30


def test_the_last_line_about_a_save_is_kept(tmp_path: Path) -> None:
    """A cancelled run said that nobody knows whether it saved, above such a line."""
    path = tmp_path / "n.out"
    log = LogFile(path, "n", path.name, Classifier(), num_lines=1)
    for text, saved in (
        ("0: Epoch 3 | Training snapshot saved at snapshot.pt", True),
        ("0: Model weights saved in ./out/checkpoint-500/model.safetensors", True),
        ("0: => saved ckpt_000200.pt (best)", True),
        ("0: Saved model to /scratch/run 1/model.pt", True),
        ("0: test loss 2.05 is the best so far, saving model to out/model.pt", True),
        ("0: saving checkpoint to out-shakespeare", True),
        ("0: Checkpoint saved: 12 episodes after 40 runs", True),
        ("0: Validation error decreased (0.31 --> 0.29).  Saving model ...", True),
        ("0: Error saving model: the folder is read-only", False),
        ("0: Loading saved model from model.pt", False),
        ("0: saving checkpoints every 500 steps to out", False),
        ("0: checkpoints to be saved: 3", False),
        ("0: time saving: 31 s", False),
        ("0: checkpoint could not be saved: disk full", False),
        ("0: the model will be saved every 500 steps", False),
        ("0: saved 31 MB of activations", False),
        ("0: the figure is saved as a.png", False),
    ):
        with path.open("a") as file:
            file.write(f"{text}\n" + "0: step\n" * 3)
        assert log.poll()
        if saved:
            expected = text
        assert log.saved is not None and f"0: {log.saved.text}" == expected


def test_a_step_before_many_other_lines_has_the_age_of_its_own_line(tmp_path: Path) -> None:
    """It had that of the file's last line."""
    logs = NodeLogs(tmp_path)
    for step in range(1, 20):
        logs.write(NOW + 2 * step, f"0: step {step} loss 2.5")
    for number in range(500):
        logs.write(NOW + 100 + number, "0: the loader waits for the file server")
    progress = logs.read()
    assert (progress.at, progress.is_older) == (NOW + 38, False)
