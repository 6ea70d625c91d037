"""Small parts of the readers: traces, beats, samples, clocks, settings, checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import SINGLE, make_conf, make_plan
from varuna_core.records.checkpoints import find_newest
from varuna_core.records.files import write_json
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.readers.file_systems import Skew, probe
from vjob.jobs.monitor.readers.gpu_logs import GpuSamples, describe_late
from vjob.jobs.monitor.readers.rank_files import Beats, JsonFolder, TraceFile
from vjob.jobs.monitor.readers.settings import _list_wanted, read_asked


def write_steps(path: Path, first: int, last: int, log_every: int = 10) -> None:
    writer = TraceWriter(path, 3, stages=[1], log_every=log_every, facts={"device": "A100"})
    for step in range(first, last + 1):
        writer.begin_step(step)
        begin = writer._begun
        writer("0F0", begin, begin + 0.1, begin + 0.4)
        writer("0B0", begin + 0.4, begin + 0.4, begin + 1.0)
        for _ in range(50):
            writer.add("send", begin, begin + 0.1)
        writer.end_step()
    writer.close()


def test_the_end_of_a_trace_tells_steps_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "3.jsonl"
    write_steps(path, 1, 100, log_every=1)
    assert path.stat().st_size > 100_000
    file = TraceFile(path)
    assert file.poll() == {3} and not file.poll()
    trace = file.ranks[3]
    assert trace.last is not None and trace.last.step == 100 and trace.device == "A100"
    assert trace.medians()[1] == pytest.approx(0.9, abs=0.01)
    assert trace.last.end_at == pytest.approx(path.stat().st_mtime, abs=30)
    points = trace.points(offset_s=1000.0)
    assert points[-1].at == pytest.approx(path.stat().st_mtime + 1000, abs=30)
    write_steps(path, 101, 103)
    assert file.poll() == {3} and trace.last.step == 103


def test_a_step_whose_details_fill_the_end_is_found_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "3.jsonl"
    write_steps(path, 1, 5)
    with path.open("a") as handle:
        handle.write('["F",6,1,4,81200345,1200,903411,65536,""]\n' * 2000)
    file = TraceFile(path)
    file.poll()
    last = file.ranks[3].last
    assert last is not None and last.step == 5


def test_the_traces_of_a_nodes_ranks_lie_in_one_file(tmp_path: Path) -> None:
    """Also where a look begins in the midst of a batch, and with another rank's torn one."""
    path = tmp_path / "node-0.jsonl"
    writers = [TraceWriter(path, rank, stages=[rank], log_every=1) for rank in range(8)]
    for step in range(1, 201):
        for rank, writer in enumerate(writers):
            writer.begin_step(step + rank)
            begin = writer._begun
            for _ in range(20):
                writer(f"{rank}F0", begin, begin, begin + 0.1 * (rank + 1))
            writer.end_step()
            if step % 10 == 0:
                writer.flush()
    with path.open("a") as handle:
        handle.write('{"rank":5}\n{"step": 99')
    assert path.stat().st_size > 1_000_000
    file = TraceFile(path)
    assert file.poll() == set(range(8))
    for rank, writer in enumerate(writers):
        end = file.ranks[rank]
        assert end.last is not None and end.last.step == 200 + rank
        assert end.stages == (rank,) and end.last.work_s == pytest.approx(2.0 * (rank + 1))
        writer.close()
    late = TraceWriter(path, 3, stages=[3], log_every=1)
    late.begin_step(400)
    late.end_step()
    late.close()
    assert 3 in file.poll()
    end = file.ranks[3]
    assert end.last is not None and end.last.step == 400


@given(st.binary(max_size=300))
def test_a_foreign_trace_is_no_trouble(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("trace") / "0.jsonl"
    path.write_bytes(b'{"step": 1, "begin": 1e400, "took": "x", "sums": [1]}\n' + data + b"\n")
    file = TraceFile(path)
    file.poll()
    for trace in file.ranks.values():
        trace.medians()


def test_beats_tell_how_busy_a_rank_is_once_there_are_two() -> None:
    beats = Beats()
    beats.note({"time": 100.0, "ranks": {"3": {"pid": 7, "state": "S", "cpu_s": 10.0}}})
    assert beats.processes[3].cpu_percent is None and beats.processes[3].pid == 7
    beats.note({"time": 110.0, "ranks": {"3": {"pid": 7, "state": "R", "cpu_s": 15.0}}})
    assert (beats.processes[3].cpu_percent, beats.processes[3].state) == (50.0, "R")
    beats.note({"time": 120.0, "ranks": {"3": {"pid": 8, "state": "R", "cpu_s": 0.5}}})
    assert beats.processes[3].cpu_percent is None, "another process"
    for odd in ({}, {"ranks": 5}, {"ranks": {"x": 1, "4": None}}, {"time": "x", "state": "done"}):
        beats.note(odd)
    assert beats.is_done


def sample(at: float, **more: object) -> str:
    gpu = {"index": 0, "name": "A10", "temperature": 40, "utilization": at, "memory_used_mb": 1,
           "memory_total_mb": 2, "power_w": None, **more}  # fmt: skip
    value = {"time": at, "gpus": [gpu], "cpu_percent": 12.5, "memory_used_mb": 3}
    return json.dumps(value) + "\n"


def test_samples_tell_processes_errors_and_throttling_where_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "n0.gpu.jsonl"
    path.write_text(sample(1) + sample(2))
    samples = GpuSamples(path)
    assert samples.poll() and not samples.poll()
    (gpu,) = samples.list_gpus({7})
    assert gpu.history == (1.0, 2.0) and gpu.num_processes is None and gpu.num_foreign is None
    assert (samples.at, samples.cpu_percent, gpu.power_w) == (2.0, 12.5, None)
    with path.open("a") as handle:
        handle.write(sample(3, processes=[7, 8], ecc_errors=2, throttle="hw_thermal"))
    samples.poll()
    (gpu,) = samples.list_gpus({7})
    assert (gpu.num_processes, gpu.num_foreign, gpu.ecc_errors) == (2, 1, 2)
    assert gpu.throttle == "hw_thermal"
    assert samples.list_gpus({99})[0].num_foreign is None, "pids of another namespace"


def test_a_gpu_that_a_later_sample_lacks_is_not_shown_as_it_was(tmp_path: Path) -> None:
    """Lost GPUs kept their last reading, and a driver that failed left a node as it had been."""
    path = tmp_path / "n0.gpu.jsonl"
    both = [{"index": 0, "utilization": 97.0}, {"index": 1, "utilization": 96.0}]
    looks = [
        ({"gpus": both}, ["0", "1"], (), ""),
        ({"gpus": both[:1], "gpus_lost": [1]}, ["0"], (1,), ""),
        ({"gpus": [], "gpus_not_known": "nvidia-smi: no answer in 10 s"}, [], (),
         "nvidia-smi: no answer in 10 s"),
        ({"gpus": both}, ["0", "1"], (), ""),
    ]  # fmt: skip
    samples = GpuSamples(path)
    for at, (sample, indices, lost, reason) in enumerate(looks):
        with path.open("a") as file:
            file.write(json.dumps({"time": 100.0 + at, **sample}) + "\n")
        assert samples.poll()
        assert [gpu.index for gpu in samples.list_gpus(())] == indices
        assert (samples.lost, samples.not_known) == (lost, reason)


def test_a_clock_ahead_of_ours_shows_in_a_file_of_the_future() -> None:
    skew = Skew()
    skew.note(1100.0, 1000.0)
    assert skew.offset_s == 100.0 and skew.worth_saying == 100.0


def test_a_clock_behind_ours_shows_in_a_file_that_changes() -> None:
    skew = Skew()
    skew.note(500.0, 1000.0)
    assert skew.offset_s == 0.0, "the file may just be old"
    skew.note(None, 1100.0)
    assert skew.offset_s == 0.0
    skew.note(605.0, 1110.0)  # written in the last ten seconds
    assert skew.offset_s == pytest.approx(605 - 1100 + 60)


def test_a_file_of_our_own_tells_the_clock_and_leaves_nothing(tmp_path: Path) -> None:
    offset = probe(tmp_path)
    assert offset is not None and abs(offset) < 5 and list(tmp_path.iterdir()) == []
    assert probe(tmp_path / "missing") is None


@given(
    offset=st.floats(-10_000, 10_000),
    looks=st.lists(st.tuples(st.floats(1, 50), st.floats(0, 1)), min_size=1, max_size=10),
)
def test_the_true_offset_is_never_excluded(offset: float, looks: list[tuple[float, float]]) -> None:
    skew, now = Skew(), 1e6
    for passed, share in looks:
        now += passed
        skew.note(now - passed * share + offset, now)  # written since the look before
    assert skew._least - 1e-6 <= offset <= skew._most + 1e-6


def test_checkpoint_folder_and_steps_come_from_the_conf_where_no_program_of_ours_runs(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    assert read_asked(run, read_plan(run.plan)).checkpoints is None
    run.resolved.write_text("train: {checkpoint: {folder: /c, every: 5}}\n")
    assert read_asked(run, None).checkpoints == Path("/c")
    run.resolved.write_text("train: {checkpoint: [")
    assert read_asked(run, None).checkpoints is None
    run.resolved.write_text("train: {steps: 20}\n")
    asked = read_asked(run, None)
    assert (asked.checkpoints, asked.num_steps) == (None, 20), "its script refers to the steps"
    run.training.write_text('{"checkpoint_folder": "/d", "steps": 7, "hidden": 64}')
    asked = read_asked(run, None)
    assert (asked.checkpoints, asked.num_steps) == (Path("/d"), 7)
    assert asked.wanted == {"HIDDEN_SIZE": "64"}


def test_the_newest_complete_checkpoint_is_found_by_its_manifest(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None and find_newest(tmp_path / "missing") is None
    for name in ("varuna_ckpt_10", "varuna_ckpt_30.j.1.partial", "varuna_ckpt_40.j.1.removed",
                 "varuna_ckpt_20.j.2.partial", "other"):  # fmt: skip
        (tmp_path / name).mkdir()
    for name in ("varuna_ckpt_10", "varuna_ckpt_20.j.2.partial", "varuna_ckpt_40.j.1.removed"):
        (tmp_path / name / "manifest.json").write_text("{}")
    os.utime(tmp_path / "varuna_ckpt_20.j.2.partial" / "manifest.json", (5, 7))
    found = find_newest(tmp_path)
    assert found is not None and (found.step, found.written) == (20, 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("25\n")
    found = find_newest(tmp_path)
    assert found is not None and found.step == 25
    (tmp_path / "latest").write_text("global_step300")
    found = find_newest(tmp_path)
    assert found is not None and found.step == 300


def test_a_folder_of_small_files_tells_what_is_new_and_forgets_what_is_gone(tmp_path: Path) -> None:
    folder = JsonFolder(tmp_path, ManyFiles())
    assert folder.poll() == []
    write_json(tmp_path / "0.json", {"a": 1})
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / ".1.json.part").write_text("{}")
    assert folder.poll() == ["0"] and folder.values == {"0": {"a": 1}}
    assert folder.poll() == [] and folder.poll() == []
    write_json(tmp_path / "0.json", {"a": 2})
    write_json(tmp_path / "torn.json", {"b": 3})
    assert sorted(folder.poll()) == ["0", "torn"] and folder.values["0"] == {"a": 2}
    (tmp_path / "0.json").unlink()
    folder.poll()
    assert folder.values == {"torn": {"b": 3}}
    assert JsonFolder(tmp_path / "missing", ManyFiles()).poll() == []


@pytest.mark.parametrize(
    ("asked", "layers", "printed"),
    [
        ("4-2-2-2", 8, "3-2-2-1"),  # the planner's: a mixed run with a profile was called FAILING
        ("3-2-2-1", 8, "3-2-2-1"),
        ("10", 8, "8"),
        ("1-8-1", 8, "0-8-0"),
        ("4-2-2-2", None, "4-2-2-2"),
        ("auto", 8, "auto"),
    ],
)
def test_a_partition_that_counts_both_ends_is_the_one_that_runs_print(
    asked: str, layers: int | None, printed: str
) -> None:
    plan = replace(make_plan(make_conf(SINGLE)), partition=asked)
    training = {} if layers is None else {"layers": layers}
    assert _list_wanted(plan, training)["PARTITION"] == printed


@pytest.mark.parametrize(
    ("at", "beat_at", "expected"),
    [
        (1000.0, 1150.0, ""),
        (1000.0, 1300.0, "no sample for 5 min, although the node's agent is alive"),
        (None, 1300.0, ""),
        (1000.0, None, ""),
    ],
)
def test_a_sampler_that_hangs_in_its_driver_is_named(
    at: float | None, beat_at: float | None, expected: str
) -> None:
    assert describe_late(at, beat_at, 10.0) == expected
