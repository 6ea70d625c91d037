"""Snapshots of real local runs, and what a second look costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from varuna_core.records.files import write_json
from varuna_core.records.morphing import ENDED, GATHERING, RUNNING, ManagerState
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.model.text import render_json
from vjob.jobs.monitor.readers import run as runs
from vjob.jobs.monitor.readers.job_reader import open_reader
from vjob.jobs.monitor.readers.run import RunReader, format_going, list_spare

FATE = """
name: fate
program: {{script: {fate}, args: {args}}}
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 2
  nodes: [{{group: m, count: 2, ranks: 2}}]
"""

TRAINER = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    print("WORLD_SIZE: 9\\nNNODES: 2\\nPARTITION: 1-1", flush=True)
if rank == 3:
    for step in range(1, 6):
        print(f" iteration {step:8d}/       9 | elapsed time per iteration (ms): 100.0 | "
              f"lm loss: {1 / step:.6E} | number of nan iterations:   0 |", flush=True)
    print("saving checkpoint at iteration 5 to /ckpt", flush=True)
print(f"ready {rank}", flush=True)
time.sleep(120)
"""


@pytest.fixture
def vjob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vjob:
    vjob = Vjob(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    return vjob


def fate(*args: str) -> str:
    return FATE.format(fate=PROGRAMS / "fail_as_told.py", args=json.dumps(list(args)))


def test_a_run_that_lives_and_then_ends_is_read_by_one_reader(vjob: Vjob) -> None:
    (vjob.folder / "trainer.py").write_text(TRAINER)
    run = vjob.submit(FATE.format(fate=vjob.folder / "trainer.py", args="[]"))
    reader = RunReader(run)
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    wait_for(lambda: reader.read().phase is not None, 30, lambda: vjob.explain(run))
    found = reader.read()
    assert (found.state, found.record_state, found.scheduler.name) == (
        "RUNNING",
        "submitted",
        "local",
    )
    assert [job.state for job in found.scheduler.jobs] == ["RUNNING"]
    assert (found.world, found.num_nodes, found.attempt, found.num_gpus) == (4, 2, 0, 0)
    assert found.walltime_s == 120
    assert [(node.name, node.ranks, node.group) for node in found.nodes] == [
        ("local0", (0, 1), "m"),
        ("local1", (2, 3), "m"),
    ]
    assert {node.phase for node in found.nodes} == {"running"}
    assert all(abs(found.now - (node.beat_at or 0)) < 60 for node in found.nodes)
    assert found.attempt_started is not None and found.went_at is not None
    assert found.attempt_started <= found.went_at <= found.now + 1
    assert [(rank.rank, rank.node, rank.stage) for rank in found.ranks] == [
        (0, "local0", 0), (1, "local0", 0), (2, "local1", 0), (3, "local1", 0)
    ]  # fmt: skip
    assert found.progress is not None and found.phase is not None
    assert (found.progress.step, found.progress.num_steps) == (5, 9)
    assert [point.step for point in found.progress.points] == [1, 2, 3, 4, 5]
    assert found.progress.points[-1].loss == pytest.approx(0.2)
    assert found.progress.source == "local1.out" and found.progress.first_step == 1
    assert (found.phase.name, found.phase.line.node, found.phase.line.rank) == (
        "checkpoint",
        "local1",
        3,
    )
    wrong = {echo.name: (echo.said, echo.wanted) for echo in found.echoes}
    assert wrong == {"WORLD_SIZE": ("9", "4"), "NNODES": ("2", "2"), "PARTITION": ("1-1", None)}
    assert found.info == {"WORLD_SIZE": "9", "NNODES": "2", "PARTITION": "1-1"}
    assert found.disks[0].what == "logs" and found.disks[0].total_bytes > 0
    assert found.clock_skew_s is None and not found.unreadable
    render_json(found, None)
    vjob("cancel", "last", "--now")
    vjob.wait_over(run)
    ended = reader.read()
    assert (ended.state, ended.record_state) == ("CANCELLED", "ended")
    assert all(rank.exit is not None and rank.exit.stopped for rank in ended.ranks)
    assert ended.outcome is not None and ended.stop is not None


def test_all_gpus_of_a_node_are_shown_though_its_ranks_are_fewer(vjob: Vjob) -> None:
    """Of 16 GPUs and two ranks the last two were shown."""
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    gpus = [
        {"index": index, "name": "A100", "temperature": 50.0, "utilization": 90.0,
         "memory_used_mb": 1.0, "memory_total_mb": 2.0}
        for index in range(16)
    ]  # fmt: skip
    with run.attempt(0).node_log("local0", "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "gpus": gpus}) + "\n")
    shown = RunReader(run).read().nodes[0].gpu
    assert [line.partition("]")[0] for line in shown] == [f"[{index}" for index in range(16)]


def test_the_rank_that_failed_is_there_with_its_exit_and_its_line(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    found = RunReader(run).read()
    assert (found.state, found.record_verdict) == ("FAILED", "FAILED")
    assert [rank.exit.code for rank in found.ranks if rank.exit and not rank.exit.stopped] == [9]
    assert found.outcome is not None and found.outcome.culprit_rank == 2
    (line,) = [line for line in found.errors if line.node and "this is the end" in line.text]
    assert (line.node, line.rank, line.file) == ("local1", 2, "local1.err")
    assert line.text == "ValueError: this is the end"
    assert {node.phase for node in found.nodes} == {"done"}


def test_a_look_with_nothing_new_gives_the_same_nodes(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    reader = RunReader(run)
    first = reader.read()
    again = reader.read()
    assert again.nodes is first.nodes and again.ranks is first.ranks


def test_a_requeued_run_tells_of_the_attempt_before(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    reader = RunReader(run)
    assert reader.read().attempt == 0
    again = run.attempt(1)
    again.make()
    write_json(again.master, {"time": 5.0, "attempt": 1})
    found = reader.read()
    assert found.attempt == 1 and found.attempt_started is not None
    assert [(item.number, "exited 9" in item.reason) for item in found.earlier] == [(0, True)]
    assert found.nodes == () and found.went_at is None


def test_the_plans_of_the_last_attempts_alone_are_read(
    vjob: Vjob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    for number in range(1, 40):
        run.attempt(number).path.mkdir()
    asked: list[int] = []
    monkeypatch.setattr(runs, "read_attempt_plan", lambda _, number: asked.append(number))
    earlier = RunReader(run).read().earlier
    assert len(earlier) == 39 and len(asked) <= runs.NUM_EARLIER + 1


def test_another_try_of_the_same_attempt_forgets_the_older(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    reader = RunReader(run)
    assert reader.read().errors
    run.attempt(0).set_aside()
    write_json(run.attempt(0).master, {"time": 5.0, "attempt": 0})
    with run.scheduler_log().open("a") as handle:
        handle.write("ValueError: of the older\nattempt 0: ranks meet at 127.0.0.1:1 on local0\n")
        handle.write("ValueError: of the newer\n")
    found = reader.read()
    assert [line.text for line in found.errors] == ["ValueError: of the newer"]
    assert found.nodes == () and found.stop is None


def test_a_run_is_found_as_every_command_finds_it(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    for job in ("last", "fate", "L1", run.name, str(run.path)):
        assert open_reader(job, vjob.folder).read().run == run.name


def test_a_torn_file_is_no_trouble(vjob: Vjob) -> None:
    run = vjob.submit(fate("2", "exit:9"))
    vjob.wait_over(run)
    for path in [*run.path.glob("attempt-0/*/*.json"), run.plan, *run.path.glob("attempt-0/*.err")]:
        if path != run.record:
            path.write_bytes(path.read_bytes()[:20] + b"\xff\x00")
    found = RunReader(RunFolder(run.path)).read()
    assert found.world is None and {node.name for node in found.nodes} == {"local0", "local1"}


def test_a_run_that_is_requeued_goes_on() -> None:
    """Its last attempt may have ended well, as one that was warned does; that is not its end."""
    ended = ManagerState(phase=ENDED, attempt=13, members=("0/a",), requeue=True)
    assert format_going(ended, is_ending=True).endswith("of its next start")
    gathers = ManagerState(phase=GATHERING, attempt=13, earlier=13)
    assert format_going(gathers, is_ending=True).endswith("of its next start")
    assert format_going(replace(ended, requeue=False), is_ending=True) == ""
    assert format_going(ManagerState(phase=GATHERING), is_ending=False) == ""
    goes = replace(ended, phase=GATHERING, nodes=("0/a", "1/b"))
    assert format_going(goes, is_ending=True) == "1 nodes to 2"


def test_nodes_that_are_here_without_a_place_are_spare() -> None:
    nodes = ("0/a", "1/b", "12/c", "2/d")
    state = ManagerState(phase=RUNNING, nodes=nodes, members=("0/a", "1/b"))
    assert list_spare(state) == [2, 12]
    assert list_spare(replace(state, members=nodes)) == []
    assert list_spare(replace(state, phase=GATHERING)) == []
