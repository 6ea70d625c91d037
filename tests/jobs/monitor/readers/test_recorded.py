"""Logs as tools print them, of many ranks: the verdict finds where it began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.jobs.monitor.builders import DATA, from_log, make_outcome, silent, with_state
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.rules.judge import judge

ENDED = {
    # log: node and rank that began, kind of the telling line, a word of the advice
    "nccl_watchdog": ("n062", 9, "illegal memory access", "CUDA_LAUNCH_BLOCKING"),
    "cuda_oom": ("n061", 5, "cuda out of memory", "micro_batch_size"),
    "slurm_oom": ("n061", None, "host out of memory", "memory_gb"),
    "time_limit": ("n060", None, "time limit", "walltime_min"),
    "xid": ("n062", None, "off the bus", "cluster.exclude"),
    "megatron_nan": ("n063", 15, "not a number", "learning rate"),
    "deepspeed_overflow": ("n060", 0, "loss scale", "bf16"),
    "segfault": ("n061", 7, "segmentation fault", "PYTHONFAULTHANDLER"),
    "import_all": ("n060", 0, "import", "container.image"),
    "foreign_checkpoint": ("n060", 0, "checkpoint", "checkpoint.folder"),
    "port_in_use": ("n060", 0, "port in use", "cluster.port"),
    "node_fail": ("n061", None, "node failure", "cluster.exclude"),
    "shared_memory": ("n060", 2, "shared memory", "/dev/shm"),
    "container": ("n061", None, "container: mount source", "container.mounts"),
}
LIVE = [name for name in ENDED if name not in ("time_limit", "node_fail")]


@pytest.mark.parametrize("name", ENDED)
def test_the_cause_of_an_ended_job_is_found_in_its_logs(name: str) -> None:
    node, rank, kind, word = ENDED[name]
    verdict = judge(from_log(name, code=1))
    assert verdict.health is Health.DEAD
    assert verdict.evidence[0].kind == kind
    assert (verdict.node, verdict.rank) == (node, rank)
    assert word in verdict.advice


@pytest.mark.parametrize("name", LIVE)
def test_the_same_is_said_while_ranks_are_left(name: str) -> None:
    node, rank, kind, word = ENDED[name]
    verdict = judge(silent(from_log(name), 150))
    assert verdict.health is Health.FAILING
    if name != "megatron_nan":  # found in the numbers, before any line
        assert (verdict.node, verdict.rank) == (node, rank)
    assert verdict.evidence[0].kind == kind
    assert word in verdict.advice


def test_an_error_of_all_ranks_at_once_is_told_with_their_number() -> None:
    assert "8 times" in judge(from_log("import_all", code=1)).reason


def test_closed_connections_point_to_the_rank_that_was_killed() -> None:
    why = "rank 5 on n062 was ended by SIGKILL"
    outcome = make_outcome(137, why, 5, "n062", culprit_signal="SIGKILL")
    verdict = judge(from_log("gloo_closed", code=137, outcome=outcome))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.DEAD, "n062", 5)
    assert "sender unknown: kill -9 or out of memory" in verdict.reason


def test_closed_connections_alone_are_a_cause_of_their_own() -> None:
    verdict = judge(from_log("gloo_closed", code=1))
    assert (verdict.health, verdict.rank) == (Health.DEAD, 0)
    assert verdict.evidence[0].kind == "connection lost"


def test_the_time_limit_is_the_schedulers_word_with_its_line() -> None:
    verdict = judge(with_state(from_log("time_limit", code=143), "TIMEOUT"))
    assert "time limit" in verdict.reason and "step 400 of 500" in verdict.reason
    assert verdict.evidence[0].kind == "time limit"


def test_a_job_with_many_warnings_is_healthy() -> None:
    snapshot = from_log("healthy_warnings")
    assert [line.kind for line in snapshot.errors if line.kind != "overflow"] == []
    assert judge(snapshot).health is Health.HEALTHY
    assert judge(replace(snapshot, now=snapshot.now + 100)).health is Health.RUNNING, "few steps"


def test_each_log_is_used() -> None:
    names = {path.stem for path in DATA.glob("*.log")}
    assert names == {*ENDED, "gloo_closed", "healthy_warnings"}


def test_numbers_have_the_line_that_told_them_as_evidence() -> None:
    verdict = judge(replace(from_log("megatron_nan"), errors=()))
    assert verdict.health is Health.FAILING
    assert "iteration      110/" in verdict.evidence[0].text
    assert verdict.evidence[0].node == "n063"
    stalled = judge(silent(from_log("healthy_warnings"), 4000))
    assert stalled.health is Health.STALLED
    assert "iteration       40/" in stalled.evidence[0].text
    assert "iteration       40/" in judge(from_log("healthy_warnings")).evidence[0].text
