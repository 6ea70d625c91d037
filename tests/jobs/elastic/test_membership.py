"""Growing and shrinking a run whose scheduler is a list of jobs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.confs import MORPH, MORPH_SPLIT, SINGLE, make_conf, make_plan
from varuna_core.records import record as records
from varuna_core.records.files import list_names, lock_file, read_json, write_json
from varuna_core.records.morphing import read_join_job, read_joins, read_newest_epoch
from varuna_core.records.plan import write_plan
from varuna_core.records.record import JobRecord, RunRecord, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.write import render_resolved
from vjob.jobs.elastic import membership
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.runs import find as runs
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.base import Submission
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

ROOMY = MORPH.replace("min_nodes: 2", "min_nodes: 2, max_nodes: 8")


class Cluster(SlurmScheduler):
    """Jobs and their states."""

    name = "slurm"

    def __init__(self) -> None:
        self.states = {"1": JobState.RUNNING}
        self.cancelled: list[str] = []
        self.refusal: VjobError | None = None
        self.after: list[str] = []

    def make_command(self, submission: Submission) -> list[str]:
        if self.refusal is not None:
            raise self.refusal
        self.after += submission.after.started
        job = str(len(self.states) + 10)
        self.states[job] = JobState.PENDING
        return ["echo", job]

    def poll(self, jobs: Sequence[str], **options: Any) -> dict[str, list[SchedulerJob]]:
        return {
            job: [SchedulerJob(id=job, state=self.states[job], native_word=self.states[job].value)]
            for job in jobs
        }

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)
        self.states[job] = JobState.CANCELLED

    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        return {}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(schedulers, "get_scheduler", lambda name, run=None: found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


def test_nothing_is_submitted_where_the_scheduler_does_not_answer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(jobs: Sequence[str], **options: Any) -> dict[str, list[SchedulerJob]]:
        raise UncertainError("Unable to contact slurm controller")

    run = make_run(tmp_path)
    monkeypatch.setattr(cluster, "poll", poll)
    with pytest.raises(VjobError, match=r"no job is submitted: slurm does not answer \(Unable"):
        membership.grow(run, count=1, queue=None, walltime_min=None)
    assert read_joins(run.morph) == []


def make_run(folder: Path, text: str = ROOMY, nodes: int = 4) -> RunFolder:
    """A run whose manager sees so many nodes."""
    run = RunFolder(folder / "run")
    run.path.mkdir()
    conf = make_conf(text)
    run.resolved.write_text(render_resolved(conf, redact=True))
    write_plan(run.plan, make_plan(conf))
    jobs = (JobRecord(id="1", group=None),)
    write_record(run, make_record(run, jobs))
    run.morph.make()
    show(run, range(nodes))
    return run


def make_record(run: RunFolder, jobs: tuple[JobRecord, ...]) -> RunRecord:
    return RunRecord(
        run=run.name,
        name="elastic",
        scheduler="slurm",
        layout="single",
        state=records.SUBMITTED,
        num_jobs=1,
        jobs=jobs,
        submitted=1.0,
        user="ann",
        host="login",
        conf="conf.yaml",
        version="0",
        pid=1,
        pid_start=None,
    )


def show(run: RunFolder, seats: Sequence[int]) -> None:
    names = [f"{seat}/k" for seat in seats]
    state: dict[str, Any] = {"phase": "running", "attempt": 0, "nodes": names, "session": "1.0"}
    write_json(run.morph.manager(0), state)
    write_json(run.morph.claim(0), {"session": "1.0", "host": "h0", "pid": 1, "time": 1.0})
    for seat in seats:
        write_json(run.morph.node(seat), {"host": f"h{seat}"})


def grow(run: RunFolder, count: int, queue: str | None = None) -> str:
    return membership.grow(run, count=count, queue=queue, walltime_min=None)[1]


def left(run: RunFolder) -> list[int]:
    return sorted(int(name[:-5]) for name in list_names(run.morph.leave(0).parent))


def test_a_job_that_joins_has_the_runs_options_and_other_hosts(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    job = grow(run, 2, "gpu9")
    (join,) = read_joins(run.morph)
    said = read_join_job(run.morph, join)
    assert said is not None and said.job == job and cluster.after == ["1"]
    text = run.batch_script("join1").read_text()
    for line in (
        "--job-name=elastic-join1", "--nodes=2", "--partition=gpu9", "--time=90",
        "--gres=gpu:a100:4", "--exclude=h0,h1,h2,h3", "--output=scheduler.join1.out",
        "--signal=B:USR1@120", "--comment=vjob:run",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text.replace("plain-20260102-030405", "run"), line
    assert "group=join1\nsession= " in text and "morph manage" not in text
    assert list(join.seats) == [4, 5] and join.group.first_rank == 16


def test_nodes_are_like_those_of_their_queue(cluster: Cluster, tmp_path: Path) -> None:
    text = MORPH_SPLIT.replace("min_nodes: 2", "min_nodes: 2, max_nodes: 8")
    run = make_run(tmp_path, text)
    grow(run, 1, "gpu2")
    (join,) = read_joins(run.morph)
    assert (join.group.gpu_type, join.group.cpus) == ("a10", 14)
    assert "--cpus-per-task=14" in run.batch_script("join1").read_text()


def test_room_counts_what_is_here_and_what_is_on_its_way(cluster: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    job = grow(run, 3)
    with pytest.raises(InputError, match=r"7 nodes and 2 more .* at most 1 may join"):
        grow(run, 2)
    cluster.states[job] = JobState.CANCELLED
    show(run, [0, 1])  # two of the run's own are lost
    assert grow(run, 6) == "12"
    assert [list(join.seats) for join in read_joins(run.morph)] == [[4, 5, 6], list(range(7, 13))]


def test_a_refused_job_takes_no_room(cluster: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cluster.refusal = VjobError("sbatch refused the job: invalid partition")
    with pytest.raises(VjobError, match="invalid partition"):
        grow(run, 4)
    cluster.refusal = UncertainError("no answer")
    with pytest.raises(UncertainError):
        grow(run, 1)  # this one may exist
    cluster.refusal = None
    with pytest.raises(InputError, match="5 nodes and 4 more"):
        grow(run, 4)
    assert grow(run, 3)


def test_what_is_over_or_fixed_does_not_grow(cluster: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, state=records.ENDED, verdict="COMPLETED"))
    with pytest.raises(InputError, match="is over: COMPLETED; submit its conf again"):
        grow(run, 1)
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="of run cannot change"):
        grow(make_run(tmp_path / "other", SINGLE), 1)


def test_shrinking_takes_back_what_waits_then_the_last_to_come(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    first, second = grow(run, 2), grow(run, 2)
    cluster.states[first] = JobState.RUNNING
    show(run, range(6))
    said = membership.shrink(run, count=3, hosts=())
    assert cluster.cancelled == [second] and left(run) == [5]
    assert said == [
        "join2: its job of 2 nodes had not started and was cancelled",
        "h5: asked to leave at the next checkpoint",
    ]
    assert membership.shrink(run, count=None, hosts=["h2"]) == [
        "h2: asked to leave at the next checkpoint"
    ]
    with pytest.raises(InputError, match="h5: not among the nodes"):
        membership.shrink(run, count=None, hosts=["h5"])
    with pytest.raises(InputError, match="4 nodes without 3 are 1, fewer than"):
        membership.shrink(run, count=3, hosts=())
    with pytest.raises(InputError, match="only 3 of the 4 nodes"):
        membership.shrink(run, count=4, hosts=())
    assert left(run) == [2, 5]


def test_two_who_shrink_at_once_count_each_others_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """The second waits for the first: 2 of 4 may go, not 2 and 2."""
    run = make_run(tmp_path)
    said: list[object] = []

    def shrink() -> None:
        try:
            said.extend(membership.shrink(run, count=None, hosts=["h1", "h2"]))
        except InputError as error:
            said.append(error)

    with lock_file(run.morph.shrink_lock):
        second = threading.Thread(target=shrink)
        second.start()
        write_json(run.morph.leave(3), {"node": 3})
    second.join(60)
    assert "3 nodes without 2 are 1, fewer than" in str(said[0]) and left(run) == [3]
    membership.leave_out(run, 2, "it is slow")
    assert left(run) == [2, 3] and membership.read_slow_hosts(run) == {"h2"}
    membership.leave_out(run, 3, "it is slow")  # it goes already
    with pytest.raises(InputError, match="2 nodes without 1 are 1"):
        membership.leave_out(run, 1, "it is slow")
    assert left(run) == [2, 3]


def test_how_a_joined_job_fares_is_not_how_the_run_ended(cluster: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    joins = grow(run, 1), grow(run, 1)
    cluster.states[joins[0]] = JobState.FAILED
    view = runs.view_run(run)
    assert view.state == "RUNNING" and [info.id for info in view.joined] == list(joins)
    cluster.states["1"] = JobState.COMPLETED
    view = runs.view_run(run)
    assert view.record.verdict == "COMPLETED"
    assert cluster.cancelled == [joins[1]], "what waits has nothing to join any more"
    assert read_json(run.morph.join_job(0)) == {"job": joins[0], "reason": ""}


def test_a_run_begun_before_there_were_epochs_grows_and_shrinks(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Under the agent that it carries, which writes where it always did."""
    run = make_run(tmp_path)
    os.replace(run.morph.manager(0), run.morph.unclaimed)
    shutil.rmtree(run.morph.epochs)
    assert "h3" in membership.shrink(run, count=1, hosts=[])[0] and left(run) == [3]
    grow(run, 2)
    assert "agent.pyz" in run.batch_script("join1").read_text()
    assert read_newest_epoch(run.morph) == -1
