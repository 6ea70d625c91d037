"""`vjob tend` beside a run whose scheduler is a list of jobs and whose ranks are files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.confs import MORPH, make_conf, make_plan
from tests.jobs.elastic.test_membership import Cluster, left, make_run, show
from tests.varuna_core.programs.trainings import GPT
from varuna_core.facts.known import Known, NotKnown, Value
from varuna_core.records.files import lock_file, read_json, write_json
from varuna_core.records.morphing import read_joins
from varuna_core.records.plan import read_plan, write_plan
from varuna_core.records.record import append_event, read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import render_training
from vjob.jobs.elastic import membership
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.process import ENTRY
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import IdleNode, JobState, SchedulerJob
from vjob.jobs.submit.scripts import render_batch
from vjob.shelf.elastic import autoscale
from vjob.shelf.elastic.autoscale import Autoscaler

TEXT = MORPH.replace("a100:4", "a100:1").replace("pipeline: 4", "pipeline: 1")
GROWS = TEXT.replace("min_nodes: 2", "min_nodes: 2, max_nodes: 8, grow: auto")
LEAVES = TEXT.replace("min_nodes: 2", "min_nodes: 2, leave_slow: true")


class Idle(Cluster):
    """With nodes that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = 0
        self.asked = 0
        self.left_s: float | None = None
        self.silent = False

    def poll(self, jobs: Sequence[str], **options: Any) -> dict[str, list[SchedulerJob]]:
        if self.silent:
            raise UncertainError("squeue failed: Unable to contact slurm controller")
        return super().poll(jobs, **options)

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        self.asked += 1
        assert queues == ["gpu1"]
        return [
            IdleNode(
                name=f"i{n}",
                queue="gpu1",
                is_default=False,
                gpus=(("a100", 4),),
                cpus=8,
                memory_mb=1,
            )
            for n in range(self.idle)
        ]

    def ask_time_left(self, job: str) -> Known[float]:
        return NotKnown("no limit") if self.left_s is None else Value(self.left_s)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Idle:
    found = Idle()
    monkeypatch.setattr(schedulers, "get_scheduler", lambda name, run=None: found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


def make_training_run(folder: Path, text: str, *, steps: int = 1000, nodes: int = 4) -> RunFolder:
    """Its ranks have done 40 steps of 2 s."""
    text = text.replace("count: 4", f"count: {nodes}")
    run = make_run(folder, text, nodes)
    shape = {"layers": 12, "global_batch_size": 64, "micro_batch_size": 1, "pipeline": 1}
    training = replace(GPT, steps=steps, partition=None, **shape)
    run.training.write_text(render_training(training))
    run.attempt(0).make()
    write_own_plan(run, nodes)
    say_members(run, range(nodes))
    for rank in range(nodes):
        trace(run, rank, work_s=1.5)
    return run


def write_own_plan(run: RunFolder, nodes: int) -> None:
    """Of an attempt on the first of them: last of all, as a manager does."""
    plan = read_plan(run.plan)
    assert plan is not None
    (group,) = plan.groups
    groups = (replace(group, count=nodes),)
    stage_map = f"{','.join(map(str, range(nodes)))};"
    write_plan(run.attempt(0).plan, replace(plan, groups=groups, data=nodes, stage_map=stage_map))


def say_members(run: RunFolder, seats: Sequence[int], phase: str = "running") -> None:
    show(run, seats)
    state = read_json(run.morph.manager(0))
    write_json(run.morph.manager(0), {**state, "phase": phase, "members": state["nodes"]})


def trace(run: RunFolder, rank: int, *, work_s: float, steps: int = 40) -> None:
    lines: list[dict[str, Any]] = [{"trace": 1, "rank": rank, "origin": 10**18, "device": "A100"}]
    for step in range(1, steps + 1):
        sums = {"F": [64, 0, work_s * 1e9]}
        lines.append({"step": step, "begin": step * 2 * 10**9, "took": 2 * 10**9, "sums": sums})
    path = run.attempt(0).trace(rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def look(run: RunFolder) -> list[str]:
    """Of a new one each time, as after a kill."""
    said: list[str] = []
    assert Autoscaler(run, said.append).poll()
    return said


def test_idle_nodes_join_once_and_the_reason_is_told(cluster: Idle, tmp_path: Path) -> None:
    run = make_training_run(tmp_path, GROWS)
    assert look(run) == ["no idle nodes fit"]
    cluster.idle = 3
    (said,) = look(run)
    assert said.startswith("job 11 will bring 3 more nodes: about 1.")
    assert said.endswith("now 2 s; this is worth a pause of 120 s (a guess)")
    (join,) = read_joins(run.morph)
    assert (join.by_itself, join.group.count, list(join.seats)) == (True, 3, [4, 5, 6])
    (event,) = [one for one in read_events(run) if one["kind"] == "grow-asked"]
    assert "estimated from the numbers of slots and ranks" in event["why"]
    assert look(run) == [] and cluster.asked == 2, "one on its way is enough"
    with pytest.raises(InputError, match="is already waiting to join"):
        membership.grow(run, count=1, queue=None, walltime_min=None, why="another one thinks so")
    assert membership.grow(run, count=1, queue=None, walltime_min=None), "a person may"
    cluster.states["11"] = JobState.RUNNING
    say_members(run, range(7))
    look(run)
    assert len(read_joins(run.morph)) == 2, "there are 8 with the one that a person asked for"


def test_a_script_whose_end_nobody_knows_takes_idle_nodes_too(
    cluster: Idle, tmp_path: Path
) -> None:
    """Any gain is worth a pause in the end; what its conf does not say of it is not assumed."""
    own = "program: {script: train.py}\n"
    text = own.join(
        part.partition("train: ")[2].partition("\n")[2] if index else part
        for index, part in enumerate(GROWS.split("program: pretrain_gpt\n"))
    )
    run = make_training_run(tmp_path, text)
    run.training.unlink()
    cluster.idle = 3
    (said,) = look(run)
    assert said.startswith("job 11 will bring 3 more nodes: about 1.14 s a step")


def test_who_waits_goes_home_when_it_is_not_worth_it_any_more(
    cluster: Idle, tmp_path: Path
) -> None:
    run = make_training_run(tmp_path, GROWS)
    cluster.idle = 4
    look(run)
    cluster.left_s = 300.0
    assert look(run) == [] and not cluster.cancelled, "twice the pause is asked at first alone"
    cluster.left_s = 130.0
    said = look(run)
    assert cluster.cancelled == ["11"]
    assert said[0] == (
        "job 11, which had not started, is cancelled: the new nodes would no longer be worth a "
        "pause of 120 s (a guess)"
    )
    assert [one["group"] for one in read_events(run) if one["kind"] == "withdrawn"] == ["join1"]
    cluster.left_s = None
    assert look(run) == [], "not again at once"
    assert len(read_joins(run.morph)) == 1


def test_who_waits_too_long_makes_room_for_what_is_idle_now(
    cluster: Idle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_training_run(tmp_path, GROWS)
    now = [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    cluster.idle = 4
    look(run)
    now[0] += 590
    assert look(run) == []
    now[0] += 60
    cluster.idle = 1
    cancelled, asked = look(run)
    assert "after 11 min in the queue, other jobs have its nodes" in cancelled
    assert "1 more node: " in asked and cluster.cancelled == ["11"]
    assert [join.group.count for join in read_joins(run.morph)] == [4, 1]


def test_nobody_is_asked_where_no_number_of_nodes_would_be_worth_it(
    cluster: Idle, tmp_path: Path
) -> None:
    run = make_training_run(tmp_path, GROWS, steps=100)
    cluster.idle = 4
    assert look(run) == ["more nodes would not be worth a pause of 120 s (a guess)"]
    assert cluster.asked == 0
    append_event(run.morph_events, "morph", pause_s=8.0)
    assert look(run)[0].endswith("a pause of 8 s (the last)")
    assert len(read_joins(run.morph)) == 1


def test_a_person_who_shrinks_a_run_is_not_worked_against(cluster: Idle, tmp_path: Path) -> None:
    run = make_training_run(tmp_path, GROWS)
    cluster.idle = 4
    membership.shrink(run, count=1, hosts=())
    assert look(run) == ["`vjob shrink` turned automatic growth off; `vjob grow` turns it on"]
    membership.grow(run, count=1, queue=None, walltime_min=None)
    look(run)
    assert [join.by_itself for join in read_joins(run.morph)] == [False, True]


def test_nothing_is_done_while_the_run_morphs_or_is_over(cluster: Idle, tmp_path: Path) -> None:
    run = make_training_run(tmp_path, GROWS)
    cluster.idle = 4
    for phase in ("gathering", "saving", "judging"):
        say_members(run, range(4), phase)
        assert look(run) == []
    say_members(run, range(4), "ended")
    assert not Autoscaler(run, print).poll()
    say_members(run, range(4))
    cluster.states["1"] = JobState.COMPLETED
    assert not Autoscaler(run, print).poll()
    assert read_joins(run.morph) == []


def test_a_scheduler_that_does_not_answer_is_told_once(cluster: Idle, tmp_path: Path) -> None:
    run = make_training_run(tmp_path, GROWS)
    cluster.idle, cluster.silent = 4, True
    said: list[str] = []
    autoscaler = Autoscaler(run, said.append)
    assert autoscaler.poll() and autoscaler.poll()
    assert said == ["nothing is changed for now: squeue failed: Unable to contact slurm controller"]
    cluster.silent = False
    assert autoscaler.poll() and len(said) == 2 and len(read_joins(run.morph)) == 1


def test_jobs_that_end_of_no_use_are_asked_for_less_and_less_often(
    cluster: Idle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_training_run(tmp_path, GROWS)
    cluster.idle = 4
    now = [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    begun: list[float] = []
    for _ in range(100):
        look(run)
        if len(read_joins(run.morph)) > len(begun):
            begun.append(now[0])
            (job,) = [job for job, state in cluster.states.items() if state is JobState.PENDING]
            cluster.states[job] = JobState.CANCELLED
        now[0] += 60
    gaps = [b - a for a, b in itertools.pairwise(begun)]
    assert gaps[:4] == [120.0, 240.0, 480.0, 960.0]


def test_a_slow_node_is_asked_to_leave_and_stays_away(cluster: Idle, tmp_path: Path) -> None:
    run = make_training_run(tmp_path, LEAVES, nodes=16)
    assert look(run) == []
    trace(run, 5, work_s=1.9)  # 2 s a step with it, 1.6 x 5 / 4 without
    (said,) = look(run)
    assert said.startswith("node 5 is slow but stays")
    trace(run, 5, work_s=2.2)
    (said,) = look(run)
    assert said.startswith("node 5 is asked to leave: rank 5 works 47 % longer than its 15 peers")
    assert left(run) == [5] and read_json(run.morph.leave(5))["why"] in said
    assert look(run) == [], "once"
    assert membership.read_slow_hosts(run) == {"h5"}


def test_an_attempt_is_known_by_its_own_plan_however_late_that_lands(
    cluster: Idle, tmp_path: Path
) -> None:
    """The manager's word of an attempt comes before its plan: of fewer nodes than the run's."""
    run = make_training_run(tmp_path, LEAVES, nodes=16)
    say_members(run, range(15))
    run.attempt(0).plan.unlink()
    trace(run, 5, work_s=2.2)
    said: list[str] = []
    autoscaler, reader = Autoscaler(run, said.append), RunReader(run)
    assert autoscaler.poll() and said == []
    assert reader.read().world == 16
    write_own_plan(run, 15)
    assert autoscaler.poll() and said[0].startswith("node 5 is asked to leave: rank 5 works 47 %")
    assert reader.read().world == 15


def test_one_looks_after_a_run_and_only_where_it_was_asked_to(
    cluster: Idle, tmp_path: Path
) -> None:
    run = make_training_run(tmp_path, GROWS)
    said: list[str] = []
    with lock_file(run.morph.tend_lock):
        assert autoscale.run_autoscaler(run, said.append) == 0
    assert said == ["another `vjob tend` is running for run"]
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"neither morph\.grow nor morph\.leave_slow"):
        autoscale.run_autoscaler(make_training_run(tmp_path / "other", TEXT), print)


def test_the_batch_script_starts_it_where_it_was_asked_for() -> None:
    run = RunFolder(Path("/log/r"))
    for text, is_started in ((GROWS, True), (LEAVES, True), (TEXT, False)):
        conf = make_conf(text)
        script = render_batch(conf, make_plan(conf), run)
        line = f'/opt/vjob/bin/python {ENTRY} tend "$run" &\n'
        assert (line in script) == is_started and ("tend" in script) == is_started
