"""Reasons that never pass, and those that do.

The names are those of https://slurm.schedmd.com/job_reason_codes.html (Slurm 25.05), all of them.
"""

from __future__ import annotations

import pytest

from varuna_core.facts.catalogue.known_line import Fate
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Context
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.reasons import explain_reason, find_reason
from vjob.jobs.schedulers.slurm.commands import (
    END_CAUSES,
    judge_end,
    parse_show_job_output,
    parse_squeue_output,
)

COUNTED = ["BB", "Billing", "Cpu", "Energy", "GRES", "License", "Mem", "Memory", "Node", "Unknown"]
NEVER_NAMES = """
AssocMaxWallDurationPerJobLimit QOSMaxWallDurationPerJobLimit MaxMemPerLimit QOSMinBB QOSMinBilling
QOSMinCpuNotSatisfied QOSMinEnergy QOSMinGRES QOSMinLicense QOSMinMemory QOSMinNode QOSMinUnknown
AccountNotAllowed InvalidAccount InvalidQOS QOSNotAllowed BadConstraints DeadLine
DependencyNeverSatisfied JobHeldAdmin JobHeldUser JobHoldMaxRequeue PartitionConfig
PartitionNodeLimit PartitionTimeLimit ReservationDeleted BurstBufferOperation
"""
PASSING_NAMES = """
QOSMaxCpuPerUserLimit QOSMaxNodePerUserLimit QOSMaxJobsPerUserLimit QOSMaxSubmitJobPerUserLimit
AssocMaxJobsLimit AssocMaxSubmitJobLimit AssociationJobLimit AssociationResourceLimit
AssociationTimeLimit QOSJobLimit QOSResourceLimit QOSTimeLimit QOSUsageThreshold AccountingPolicy
BeginTime BurstBufferResources BurstBufferStageIn Cleaning Constraints Dependency FedJobLock
JobArrayTaskLimit Licenses NodeDown None PartitionDown PartitionInactive Priority Prolog
ReqNodeNotAvail Reservation Resources SchedDefer
"""
GROUP_NAMES = """
CpuLimit CPUMinutesLimit CPURunMinutesLimit JobsLimit MemLimit NodeLimit SubmitJobsLimit WallLimit
"""
ENDED_NAMES = """
InactiveLimit JobLaunchFailure NonZeroExitCode OutOfMemory SystemFailure TimeLimit
"""
WHOSE = ("Assoc", "QOS")
EACH = ("PerJob", "PerNode", "MinutesPerJob", "PerJobLimit", "MinutesPerJobLimit")
NEVER = [f"{whose}Max{what}{each}" for whose in WHOSE for what in COUNTED for each in EACH]
NEVER += NEVER_NAMES.split()
PASSES = [
    *(f"{whose}Grp{what}{kind}" for whose in WHOSE for what in COUNTED
      for kind in ("", "Minutes", "RunMinutes")),
    *(f"{whose}Grp{what}" for whose in WHOSE for what in GROUP_NAMES.split()),
    *(f"Max{what}PerAccount" for what in (*COUNTED, "Jobs", "SubmitJobs")),
    *(f"QOSMax{what}PerUser" for what in COUNTED),
    *PASSING_NAMES.split(),
]  # fmt: skip
ENDED = ENDED_NAMES.split()
SENTENCES = {
    "Job's account not permitted to use this partition (big allows a not b)": Fate.NEVER,
    "Job's QOS not permitted to use this partition (big denies b including b)": Fate.NEVER,
    "User's group not permitted to use this partition": Fate.NEVER,
    "launch failed requeued held": Fate.NEVER,
    "job requeued in held state": Fate.NEVER,
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]": Fate.PASSES,
    "ReqNodeNotAvail, Reserved for maintenance": Fate.PASSES,
    "ReqNodeNotAvail, May be reserved for other job": Fate.PASSES,
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions":
        Fate.PASSES,
}  # fmt: skip
"""What slurmctld 22.05 writes in place of a code."""


@pytest.mark.parametrize(
    ("names", "fate"), [(NEVER, Fate.NEVER), (PASSES, Fate.PASSES), (ENDED, Fate.ENDED)]
)
def test_every_reason_that_slurm_documents_has_its_fate_and_a_remedy(
    names: list[str], fate: Fate
) -> None:
    found = {name: find_reason(name) for name in names}
    assert {name: row.fate for name, row in found.items() if row} == dict.fromkeys(names, fate)
    assert all(row.explain(Context.CONF) for row in found.values() if row)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_in_place_of_a_code_has_its_fate_in_the_spelling_of_each_tool(
    sentence: str,
) -> None:
    fate = SENTENCES[sentence]
    shown = f"JobId=7 JobState=PENDING Reason={sentence.replace(' ', '_')} Restarts=0"
    listed = f"7|0|N/A|PENDING||{sentence}|0|N/A|(null)|5:00|5:00|N/A|N/A|(null)|0|"
    for infos in (parse_show_job_output(shown), parse_squeue_output(listed)):
        (info,) = infos
        row = find_reason(info.reason_text)
        assert info.reason_text == sentence and row is not None and row.fate is fate
        assert bool(explain_reason(infos)) == (fate is Fate.NEVER)


def test_a_reason_that_nobody_documents_is_no_trouble() -> None:
    assert find_reason("SolarFlare") is None and explain_reason(pending("SolarFlare")) == ""


def pending(reason: str) -> list[SchedulerJob]:
    return [SchedulerJob(id="7", state=JobState.PENDING, native_word="PENDING", reason_text=reason)]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("PartitionConfig", "count"),
        ("PartitionConfig", "cluster.walltime_min"),
        ("PartitionConfig", "lower cpus"),
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


@pytest.mark.parametrize(
    ("reason", "number", "cause"),
    [
        ("JobLaunchFailure", None, EndCause.LAUNCH_FAILED),
        ("RaisedSignal:53(Real-time_signal_19)", 53, EndCause.NO_OUTPUT),
        ("Priority", 53, EndCause.NO_OUTPUT),  # sacct: the reason is that of its pending
        ("JobLaunchFailure", 10, EndCause.BATCH_KILLED),  # a signal before a trap for it (22.05)
        ("RaisedSignal:9(Killed)", 9, EndCause.BATCH_KILLED),
        ("NonZeroExitCode", None, END_CAUSES.get(JobState.FAILED)),
        ("None", None, END_CAUSES.get(JobState.FAILED)),
    ],
)
def test_a_job_that_no_node_could_start_is_told_from_one_that_ran(
    reason: str, number: int | None, cause: EndCause | None
) -> None:
    assert judge_end(JobState.FAILED, "FAILED", reason, number, is_preempted=False) is cause
