"""Reasons that never pass, and those that do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vjob.jobs.schedulers.slurm_commands import JobInfo, JobState
from vjob.jobs.schedulers.slurm_reasons import explain_launch, explain_reason, find_killer


def pending(reason: str) -> list[JobInfo]:
    return [JobInfo(id="7", state=JobState.PENDING, word="PENDING", reason=reason)]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PartitionConfig", "count"),
        ("PartitionTimeLimit", "walltime_min"),
        ("QOSMaxNodePerJobLimit", "limit"),
        ("AssocMaxWallDurationPerJobLimit", "limit"),
        ("BadConstraints", "constraint"),
        ("launch failed requeued held", "log_folder"),
    ],
)
def test_a_reason_that_never_passes_has_a_remedy(reason: str, word: str) -> None:
    assert word in explain_reason(pending(reason))


@pytest.mark.parametrize("reason", ["", "Priority", "Resources", "BeginTime", "Dependency"])
def test_a_reason_that_passes_is_no_trouble(reason: str) -> None:
    assert explain_reason(pending(reason)) == ""


def ended(reason: str, exit_code: str = "0:0") -> JobInfo:
    """As scontrol or sacct shows it."""
    state = JobState.FAILED
    return JobInfo(id="7", state=state, word="FAILED", reason=reason, exit_code=exit_code)


@pytest.mark.parametrize(
    ("info", "word"),
    [
        (ended("JobLaunchFailure"), "JobLaunchFailure"),
        (ended("RaisedSignal:53(Real-time_signal_19)", "0:53"), "RaisedSignal:53"),
        (ended("Priority", "0:53"), "RaisedSignal:53"),  # sacct: the reason is that of its pending
    ],
)
def test_a_job_that_no_node_could_start_asks_for_the_log_folder(info: JobInfo, word: str) -> None:
    said = explain_launch(info)
    assert said.startswith(word) and "is log_folder on a file system that the nodes see" in said


@pytest.mark.parametrize(
    "info",
    [ended("NonZeroExitCode", "53:0"), ended("TimeLimit"), ended("None", "0:0")],
)
def test_a_job_whose_script_ran_has_no_such_remedy(info: JobInfo) -> None:
    assert explain_launch(info) == ""


@pytest.mark.parametrize(
    ("info", "killer"),
    [
        (ended("JobLaunchFailure", "0:10"), "SIGUSR1"),
        (ended("RaisedSignal:9(Killed)", "0:9"), "SIGKILL"),
        (ended("JobLaunchFailure", "0:99"), "signal 99"),
    ],
)
def test_a_batch_script_that_was_killed_is_no_failure_to_start(info: JobInfo, killer: str) -> None:
    """Slurm 22.05 calls it one where a signal came before a trap for it."""
    assert explain_launch(info) == f"the batch script was ended by {killer}"
    cancelled = replace(info, state=JobState.CANCELLED)
    assert find_killer(cancelled) == "", "that is what a cancel does"
