"""Bare folders of per-node logs: the seed's, and sad ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import ROOT, Vjob
from varuna_core.records.logs.learner import Doubt
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.log_lines.tails import Budget
from vjob.jobs.monitor.model.snapshot import Health, Snapshot
from vjob.jobs.monitor.readers import node_files
from vjob.jobs.monitor.readers.job_reader import open_reader
from vjob.jobs.monitor.readers.log_folder import is_bare_folder
from vjob.jobs.monitor.rules.judge import judge

INFO = """\
NODE_RANK: {rank}
MASTER_ADDR: 192.168.120.70
NNODES: 8
WORLD_SIZE: 32
GLOBAL_BATCH_SIZE: 64
MICRO_BATCH_SIZE: 1
TENSOR_MP_SIZE: 1
DP_SIZE: 4
PIPELINE_MP_SIZE: 8
PARTITION: 0-11-8-8-8-8-5-0
MODEL: xl
HIDDEN_SIZE: 1600
NUM_LAYERS: 48
PROFILE: false
"""
ITERATION = (
    " iteration {step:8d}/      50 | consumed samples:         1920 | elapsed time per iteration "
    "(ms): {ms} | learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | "
    "loss scale: 262144.0 | grad norm: 16.666 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |\n"
)
TIMES = {10: 4541.6, 20: 1401.5, 30: 1423.8, 40: 1373.9, 50: 1409.8}


def write_seed(folder: Path) -> Path:
    """Eight nodes of four GPUs, as `get_result.sh` met them."""
    folder.mkdir(parents=True)
    for rank in range(8):
        name = f"n{60 + rank:03d}"
        out = INFO.format(rank=rank)
        out += "[before the start of training step] datetime: 2023-06-14 16:08:12 \n"
        out += f"[Rank {4 * rank}] (after 20 iterations) memory (MB) | allocated: 1570.7 | "
        out += "max allocated: 3869.2 | reserved: 4020.0 | max reserved: 4020.0\n"
        if rank == 7:
            out += "".join(ITERATION.format(step=step, ms=ms) for step, ms in TIMES.items())
        (folder / f"{name}.out").write_text(out)
        (folder / f"{name}.err").write_text("x.py:1: UserWarning: odd\n  warnings.warn(\n")
        gpu = "".join(
            f"[{at}] NVIDIA A10       | 49'C,   {at} % |     0 / 22731 MB |\n" for at in range(4)
        )
        (folder / f"{name}.gpu").write_text(gpu * 3)
    return folder


def read(folder: Path) -> Snapshot:
    return open_reader(str(folder), folder.parent).read()


def test_the_seeds_folder_tells_all_that_get_result_printed(tmp_path: Path) -> None:
    found = read(write_seed(tmp_path / "10932251"))
    assert [node.name for node in found.nodes] == [f"n{60 + at:03d}" for at in range(8)]
    assert found.progress is not None
    assert (found.progress.step, found.progress.num_steps) == (50, 50)
    assert {point.step: point.step_s for point in found.progress.points} == {
        step: pytest.approx(ms / 1000) for step, ms in TIMES.items()
    }
    assert found.progress.source == "n067.out"
    assert found.info["WORLD_SIZE"] == "32" and found.info["PARTITION"] == "0-11-8-8-8-8-5-0"
    assert list(found.info) == [line.partition(":")[0] for line in INFO.splitlines()]
    assert all(echo.wanted is None for echo in found.echoes)
    gpu = found.nodes[3].gpus[2]
    assert (gpu.index, gpu.name, gpu.temperature, gpu.utilization) == ("2", "NVIDIA A10", 49, 2)
    assert gpu.history == (2.0, 2.0, 2.0) and gpu.memory_total_mb == 22731
    assert found.nodes[0].err == ("x.py:1: UserWarning: odd", "  warnings.warn(")
    assert found.scheduler.name == "" and found.record_state == "" and found.ranks == ()


def test_the_command_prints_the_seeds_folder(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    write_seed(tmp_path / "log2" / "10932251")
    said = vjob("status", "log2/10932251", code=None).stdout
    for words in (
        "step 50 of 50, 1.41 s a step (the median of the last 4 readings), loss 10.1772",
        "out 21 lines, err 2 lines, gpu 12 lines",
        "  WORLD_SIZE: 32\n",
        "logs: n060.err n060.gpu n060.out n061.err",
        "  step 10 : 4.5416 s\n  step 20 : 1.4015 s\n",
        "  gpu  [3] NVIDIA A10       | 49'C,   3 % |     0 / 22731 MB |",
    ):
        assert words in said
    found = json.loads(vjob("status", "log2/10932251", "--json", code=None).stdout)
    assert found["format"] == 3 and found["progress"]["step"] == 50
    assert found["nodes"][7]["gpus"][3]["utilization"] == 3


FRAMES = '3: Traceback (most recent call last):\n3:   File "t.py", line 3, in <module>\n'
FATAL = "RuntimeError: CUDA error: an illegal memory access was encountered\n"


@pytest.mark.parametrize("text", [FRAMES + "3: " + FATAL, "3: " + FATAL])
def test_an_error_that_a_program_printed_ends_nothing(tmp_path: Path, text: str) -> None:
    folder = write_seed(tmp_path / "logs")
    for name in ("n067.out", "n061.err"):
        if "Traceback" in text and name.endswith(".err"):
            continue  # that is the end of a process
        with (folder / name).open("a") as handle:
            handle.write(text)
    assert judge(read(folder)).health is Health.DONE


@pytest.mark.parametrize("name", ["n067.err", "n061.err"])
def test_a_fatal_line_after_the_last_step_is_no_good_end(tmp_path: Path, name: str) -> None:
    folder = write_seed(tmp_path / "logs")
    assert judge(read(folder)).health is Health.DONE
    with (folder / name).open("a") as handle:
        handle.write(f"{FRAMES}3: {FATAL}")
    verdict = judge(read(folder))
    assert (verdict.health, verdict.exit_code) == (Health.DEAD, 10)
    assert "illegal memory access" in verdict.reason and "step 50 of 50" in verdict.reason
    assert (verdict.node, verdict.rank) == (name.partition(".")[0], 3)
    assert "vjob logs" in verdict.advice and "vjob report" not in verdict.advice


@pytest.mark.parametrize("name", ["n067.out", "n067.err"])
def test_a_fatal_line_of_an_earlier_start_is_no_bad_end(tmp_path: Path, name: str) -> None:
    """The job came again, in the same files, and did all its steps."""
    folder = write_seed(tmp_path / "logs")
    path = folder / name
    path.write_text(f"3: {FATAL}{path.read_text()}")
    os.utime(folder / "n067.err", (time.time() - 3600,) * 2)
    assert judge(read(folder)).health is Health.DONE


def test_a_run_folder_or_an_empty_one_is_no_bare_folder(tmp_path: Path) -> None:
    assert not is_bare_folder(tmp_path) and not is_bare_folder(tmp_path / "missing")
    (tmp_path / "n0.out").touch()
    assert is_bare_folder(tmp_path)
    (tmp_path / "record.json").touch()
    assert not is_bare_folder(tmp_path)
    with pytest.raises(VjobError, match="no run"):
        open_reader(str(tmp_path / "missing"), tmp_path)


def test_settings_at_the_head_of_a_long_log_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with (folder / "n0.out").open("w") as handle:
        handle.write(INFO.format(rank=0))
        handle.write("noise\n" * 200_000)
    assert read(folder).info["DP_SIZE"] == "4"


def test_what_is_added_is_seen_and_what_is_not_costs_nothing_new(tmp_path: Path) -> None:
    folder = write_seed(tmp_path / "logs")
    reader = open_reader(str(folder), tmp_path)
    first = reader.read()
    assert reader.read().nodes is first.nodes
    with (folder / "n060.out").open("a") as handle:
        handle.write(ITERATION.format(step=60, ms=1000.0))
    (folder / "n099.err").write_text("ValueError: late\n")
    found = reader.read()
    assert found.progress is not None and found.progress.step == 60
    assert found.nodes[-1].name == "n099" and found.nodes[-1].err == ("ValueError: late",)
    assert found.nodes[1] is first.nodes[1], "the others are as they were"


def test_bars_tell_the_step_and_lines_the_loss(tmp_path: Path) -> None:
    (tmp_path / "n0.out").write_text("{'loss': 2.5, 'grad_norm': 1.0, 'epoch': 0.1}\n")
    (tmp_path / "n0.err").write_text(
        "Loading checkpoint shards: 100%|##| 2/2 [00:01<00:00,  1.00s/it]\n"
        "\r  9%|#  | 9/100 [00:10<01:30,  1.00it/s]\r 10%|#  | 10/100 [00:11<01:30,  2.00it/s]"
    )
    progress = read(tmp_path).progress
    assert progress is not None
    assert (progress.step, progress.num_steps, progress.points[-1].loss) == (10, 100, 2.5)
    assert progress.points[-1].step_s == 0.5


def test_a_small_bar_within_a_large_one_is_no_step_back(tmp_path: Path) -> None:
    (tmp_path / "n0.err").write_text(
        " 50%|##| 50/100 [00:10<00:10,  5.00it/s]\n 10%|#  | 1/10 [00:01<00:09,  1.00it/s]\n"
    )
    progress = read(tmp_path).progress
    assert progress is not None and (progress.step, progress.num_steps) == (50, 100)


def test_losses_without_any_step_are_no_steps(tmp_path: Path) -> None:
    """The sixth of such lines was told as step 6, of a run that had done 60."""
    (tmp_path / "n0.out").write_text("{'loss': 2.5, 'epoch': 0.1}\n{'loss': nan, 'epoch': 0.2}\n")
    snapshot = read(tmp_path)
    assert snapshot.progress is None and snapshot.doubt is Doubt.ONLY_LOSSES
    assert snapshot.loss is not None and snapshot.loss.nan == 1
    said = json.loads(say_json(tmp_path))
    assert said["loss"]["loss"] == "nan" and said["doubt"] == Doubt.ONLY_LOSSES.value


def say_json(folder: Path) -> str:
    return Vjob(folder)("status", str(folder), "--json", code=None).stdout


def test_known_lines_are_told_once_with_how_many_ranks_wrote_them(tmp_path: Path) -> None:
    for node in range(2):
        lines = [f"{4 * node + rank}: ValueError: bad value {rank}\n" for rank in range(4)]
        path = tmp_path / f"n{node}.err"
        path.write_text("".join(lines))
        os.utime(path, (1000 - node, 1000 - node))
    (line,) = read(tmp_path).errors
    assert (line.node, line.rank, line.num_same) == ("n1", 4, 8), "the older file's is the first"
    assert (line.text, line.kind != "", line.file) == ("ValueError: bad value 0", True, "n1.err")


def test_a_checkpoint_that_began_is_a_phase_until_it_ends(tmp_path: Path) -> None:
    log = tmp_path / "n0.out"
    log.write_text(ITERATION.format(step=10, ms=1.0) + "saving checkpoint at iteration 10 to /c\n")
    reader = open_reader(str(tmp_path), tmp_path)
    phase = reader.read().phase
    assert phase is not None and phase.name == "checkpoint" and phase.since == log.stat().st_mtime
    with log.open("a") as handle:
        handle.write("  successfully saved checkpoint from iteration 10 to /c\n")
    os.utime(log, (phase.since + 7, phase.since + 7))
    found = reader.read()
    assert found.phase is None and found.phases_s["checkpoint"] == pytest.approx(7)
    assert found.phase_ended_at == pytest.approx(phase.since + 7)


CALLS = f" forward-compute start time lst:  {'1686700000.123456 ' * 150}\n"


def write_calls(log: Path, step: int, num_bytes: int) -> None:
    """A line about a step, and the calls of its ranks after it."""
    with log.open("a") as handle:
        handle.write(ITERATION.format(step=step, ms=100.0 + step) + "times across ranks (ms):\n")
        handle.write((CALLS + "     rank 12: 34.5\n") * (num_bytes // len(CALLS) + 1))


def test_megabytes_of_calls_after_a_step_hide_it_neither_at_first_nor_later(tmp_path: Path) -> None:
    log = tmp_path / "gpu-node-07.cluster.site.out"
    log.write_text(INFO.format(rank=0))
    for step in (10, 20):
        write_calls(log, step, 300_000)
    reader = open_reader(str(tmp_path), tmp_path)
    found = reader.read()
    assert found.progress is not None and found.progress.at == log.stat().st_mtime
    assert [point.step for point in found.progress.points] == [10, 20]
    assert [point.step_s for point in found.progress.points] == pytest.approx([0.11, 0.12])
    assert found.info["WORLD_SIZE"] == "32" and found.nodes[0].name == "gpu-node-07.cluster.site"
    for step in (30, 40):
        write_calls(log, step, 5_000_000)  # more than a look reads
    found = reader.read()
    assert found.progress is not None and found.progress.step == 40
    assert [point.step for point in found.progress.points] == [10, 20, 30, 40]


def test_a_log_too_long_to_search_is_said_and_searched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "Budget", lambda: Budget(num_bytes=1 << 20))
    log = tmp_path / "n0.out"
    write_calls(log, 10, 3_000_000)
    reader = open_reader(str(tmp_path), tmp_path)
    found = reader.read()
    assert found.progress is None and found.doubt is Doubt.FAR
    assert "not yet searched" in found.unreadable["n0.out"]
    for _ in range(3):
        found = reader.read()
    assert found.progress is not None and found.progress.step == 10 and not found.unreadable


def test_nodes_without_a_log_are_named_and_another_jobs_logs_left_out(tmp_path: Path) -> None:
    folder = write_seed(tmp_path / "log")
    for name in ("n062", "n065"):
        (folder / f"{name}.out").unlink()
    other = INFO.format(rank=0).replace("120.70", "120.90") + ITERATION.format(step=90, ms=1.0)
    (folder / "m1.out").write_text(other)
    reader = open_reader(str(folder), tmp_path)
    found = reader.read()
    assert found.without_log == (2, 5) and found.other_jobs == {"192.168.120.90": ("m1",)}
    assert found.progress is not None and found.progress.step == 50
    said = " ".join(judge(found).remarks)
    assert "2 of 8 nodes left no log here: NODE_RANK 2, 5" in said
    assert "logs of another job are here too and are ignored: m1" in said


def test_sad_files_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "binary.out").write_bytes(os.urandom(200_000))
    (tmp_path / "escape.err").write_bytes(b"\x1b]0;owned\x07\x1b[2Jtext\n" * 10)
    with (tmp_path / "long.out").open("wb") as handle:
        handle.truncate(1 << 30)
    (tmp_path / "empty.gpu").touch()
    (tmp_path / "bad.gpu.jsonl").write_bytes(b'{"time": 1, "gpus": 5}\n{"torn": \n[]\nnull\n\xff\n')
    (tmp_path / "folder.out").mkdir()
    (tmp_path / "dangling.out").symlink_to(tmp_path / "nowhere")
    locked = tmp_path / "locked.err"
    locked.write_text("secret\n")
    locked.chmod(0)
    reader = open_reader(str(tmp_path), tmp_path)
    found = reader.read()
    names = {node.name for node in found.nodes}
    assert names == {"binary", "escape", "long", "empty", "bad", "folder", "dangling", "locked"}
    assert "folder.out" in found.unreadable
    for name in ("binary.out", "escape.err"):
        (tmp_path / name).write_bytes(b"short\n")
    (tmp_path / "long.out").unlink()
    reader.read()
    said = say_json(tmp_path)
    assert "\x1b" not in said and "\x07" not in said
    assert all(char not in Vjob(tmp_path)("status", str(tmp_path), "--all", code=None).stdout
               for char in "\x1b\x07\x9b")  # fmt: skip


def test_a_look_at_a_thousand_nodes_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "n0.out").write_text("x\n")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from vjob.jobs.monitor.readers.job_reader import open_reader\n"
        f"open_reader({str(tmp_path)!r}, Path('.')).read()\n"
        "bad = {'torch', 'pandas', 'numpy', 'textual', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
