"""The job around a shell: what it has, and which confs fit into it."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_core.facts.cause import EndCause
from vjob.jobs.conf.schema import Cluster, JobConf, Morph, NodeGroup, Program
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers.allocation.held_job import (
    HeldNode,
    adapt_conf,
    find_job_id,
    is_step,
    parse_held_job,
)
from vjob.jobs.schedulers.allocation.scheduler import end_within
from vjob.jobs.schedulers.job import JobState, SchedulerJob

# scontrol --details -o show job, Slurm 22.05, without keys that nobody reads.
PLAIN = (
    "JobId=7 JobName=no-shell Account=root QOS=normal JobState=RUNNING Reason=None Restarts=0 "
    "ExitCode=0:0 RunTime=00:01:00 TimeLimit=00:05:00 StartTime=2026-11-28T07:45:24 Partition=gpu2 "
    "NodeList=b[1-2] NumNodes=2 NumCPUs=8 JOB_GRES=gpu:a10:8   Nodes=b1 CPU_IDs=0-6 Mem=1000 "
    "GRES=gpu:a10:4(IDX:0-3)   Nodes=b2 CPU_IDs=0 Mem=1000 GRES=gpu:a10:4(IDX:0-3) MinCPUsNode=1\n"
)
HET = "".join(
    f"JobId={4 + n} HetJobId=4 HetJobOffset={n} HetJobIdSet=4-5 Account=root QOS=normal "
    f"JobState=RUNNING Reason=None TimeLimit=00:05:00 Partition={queue} NodeList={nodes} "
    f"JOB_GRES=(null)   Nodes={nodes} CPU_IDs=0-1 Mem=1000 GRES= MinCPUsNode=1\n"
    for n, (queue, nodes) in reversed(list(enumerate([("gpu2", "b1"), ("gpu1", "a[1-2]")])))
)
OVER = PLAIN.replace("RUNNING", "TIMEOUT")


def make_conf(*groups: dict[str, Any], morph: bool = False, **cluster: Any) -> JobConf:
    nodes = tuple(
        NodeGroup(**{"group": f"g{number}", "count": 1, "ranks": 1, **group})
        for number, group in enumerate(groups)
    )
    return JobConf(
        name="x",
        program=Program(kind="script", path="/x.py"),
        cluster=Cluster(nodes=nodes, **cluster),
        morph=Morph(enabled=morph),
        log_folder="/log",
    )


def adapt(text: str, conf: JobConf, *written: str) -> str:
    changed, notes = adapt_conf(conf, written, "7", parse_held_job(text))
    assert not changed.cluster.requeue
    return notes[0]


def test_what_the_job_has_of_each_node() -> None:
    (part,) = parse_held_job(PLAIN)
    assert part.nodes == (
        HeldNode(name="b1", cpus=7, gpus=4),
        HeldNode(name="b2", cpus=1, gpus=4),
    )
    assert (part.queue, part.account, part.qos, part.limit_s) == ("gpu2", "root", "normal", 300.0)
    assert [part.info.nodes for part in parse_held_job(HET)] == [("b1",), ("a1", "a2")]
    assert parse_held_job("") == []


@pytest.mark.parametrize(
    ("environ", "job", "has_part"),
    [
        ({}, "", False),
        ({"SLURM_JOB_ID": "L3"}, "", False),  # a local run
        ({"SLURM_JOB_ID": "7"}, "7", False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7", True),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}, "7", False),  # an interactive job
    ],
)
def test_the_job_of_a_shell(environ: dict[str, str], job: str, has_part: bool) -> None:
    assert (find_job_id(environ), is_step(environ)) == (job, has_part)


@pytest.mark.parametrize(
    ("text", "conf", "words"),
    [
        (PLAIN, make_conf({"count": 3}), ["count: 3", "job 7 has 2 nodes", "--new-job"]),
        (PLAIN, make_conf({"gpus": "a10:8"}), ["wants 8 gpus per node", "job 7 has 4 on b1"]),
        (PLAIN, make_conf({"count": 2, "cpus": 4}), ["wants 4 cpus per node", "has 1 on b2"]),
        (PLAIN, make_conf({}, {}), ["has 2 groups", "has room for 1", "--new-job"]),
        (HET, make_conf({}, {}, hetero="split"), ["has 2 groups", "hetero: hetjob"]),
        (HET, make_conf({"count": 2}, {}), ["group g0", "count: 2", "has 1 node for it"]),
        (PLAIN, make_conf({}, morph=True), ["morph.enabled", "--new-job"]),
        (OVER, make_conf({}), ["job 7", "TIMEOUT", "leave the shell"]),
        ("", make_conf({}), ["job 7", "no longer known"]),
    ],
)
def test_a_conf_that_does_not_fit_is_refused(text: str, conf: JobConf, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        adapt(text, conf)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("conf", "written", "others"),
    [
        (make_conf({"count": 2, "queue": "gpu2"}, walltime_min=5), [], ""),
        (make_conf({}), [], ""),
        (make_conf({}, walltime_min=60), [], "cluster.walltime_min"),
        (make_conf({"queue": "gpu1"}, account="me"), [],
         "cluster.account, cluster.nodes[0].queue"),
        (make_conf({}, requeue=True), ["cluster.requeue"], "cluster.requeue"),
    ],
)  # fmt: skip
def test_keys_that_do_not_hold_are_named(conf: JobConf, written: list[str], others: str) -> None:
    line = adapt(PLAIN, conf, *written)
    assert line.startswith("the run is inside job 7 of this shell (b[1-2], 4 min left)")
    assert line.partition("ends with that job")[2] == (
        f"; the job's values replace {others} of the conf" if others else ""
    )


def test_each_group_of_a_het_conf_has_its_component() -> None:
    assert "(b1,a[1-2]" in adapt(HET, make_conf({}, {"count": 2}))


@pytest.mark.parametrize(
    ("word", "state", "cause"),
    [
        ("TIMEOUT", JobState.TIMEOUT, EndCause.TIME_LIMIT),
        ("CANCELLED", JobState.CANCELLED, EndCause.CANCELLED),
        ("NODE_FAIL", JobState.NODE_FAIL, EndCause.NODE_FAIL),
        ("COMPLETED", JobState.CANCELLED, EndCause.ALLOCATION_ENDED),
        ("FAILED", JobState.CANCELLED, EndCause.ALLOCATION_ENDED),
    ],
)
def test_a_run_ends_as_the_job_around_it(word: str, state: JobState, cause: EndCause) -> None:
    run = SchedulerJob(id="7.L1", state=JobState.FAILED, native_word="FAILED")
    end = end_within(run, "7", JobState(word), word)
    assert (end.state, end.end_cause, end.within) == (state, cause, "7")
