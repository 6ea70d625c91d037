"""Recorded output of Slurm 22.05.8 for staged jobs and nodes, and the facts parsed from it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import NodeCondition, NodeState, Waiting
from varuna_core.facts.known import Value
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.schedulers.reasons import find_reason
from vjob.jobs.schedulers.slurm.commands import (
    parse_date,
    parse_earlier,
    parse_sacct_output,
    parse_show_job_output,
    parse_squeue_output,
)
from vjob.jobs.schedulers.slurm.nodes import build_show_node_command, parse_node_states

SQUEUE = """\
1|N/A|N/A|PENDING||JobHeldUser|0|N/A|vjob:a|10:00|10:00|N/A|N/A|(null)|0|
7|N/A|N/A|PENDING||JobHeldAdmin|0|2026-11-28T11:51:57||10:00|10:00|2026-11-28T12:01:57|N/A|(null)|0|
4|N/A|N/A|PENDING||Dependency|0|N/A||10:00|10:00|N/A|N/A|afterok:3(unfulfilled)|0|
3|N/A|N/A|RUNNING|b1|None|0|2026-11-28T10:50:44||9:47|10:00|2026-11-28T11:00:44|N/A|(null)|0|
20|N/A|N/A|RUNNING|a2|None|0|2026-11-28T10:50:52||9:17|10:00|2026-11-28T10:51:33|\
2026-11-28T10:51:27|(null)|0|
10|N/A|N/A|FAILED|b1|NonZeroExitCode|0|2026-11-28T10:53:15||10:00|10:00|2026-11-28T10:53:15|\
N/A|(null)|768|
"""
SHOWN = (
    "JobId=20 JobName=wrap Priority=4294901743 JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=0 ExitCode=0:0 RunTime=00:00:42 TimeLimit=00:10:00 "
    "StartTime=2026-11-28T10:50:52 EndTime=2026-11-28T10:51:33 PreemptTime=2026-11-28T10:51:27 "
    "NodeList=a2 Comment=vjob:x"
)
SACCT_ALL_STARTS = """\
9|PREEMPTED
9|RUNNING
12|REQUEUED
12|PENDING
14|NODE_FAIL
14|PENDING
4|RUNNING
26+0|PREEMPTED
"""
NODES = """\
NodeName=b3 Arch=x86_64 OS=Linux 6.18 #1 SMP @0  State=MIXED+DRAIN ThreadsPerCore=1 \
BootTime=2026-11-28T03:42:58 Reason=ECC GPU2 [root@2026-11-28T10:50:51]
NodeName=b4 Arch=x86_64 OS=Linux 6.18 State=IDLE+PLANNED ThreadsPerCore=1 BootTime=x
NodeName=c1 Arch=x86_64 State=UNKNOWN Comment=just after a start of the controller
NodeName=b1 Arch=x86_64 State=DOWN+NOT_RESPONDING ThreadsPerCore=1 \
Reason=Not responding [slurm@2026-11-28T10:51:27]
NodeName=b2 Arch=x86_64 State=MIXED* ThreadsPerCore=1
NodeName=a1 Arch=x86_64 State=IDLE+MAINTENANCE+RESERVED Comment=x ReservationName=maint
NodeName=a2 Arch=x86_64 State=ALLOCATED+REBOOT_REQUESTED Reason=kernel [root@Unknown] Comment=y
"""


def test_a_limit_that_was_changed_and_a_preemption_are_read() -> None:
    held, by_admin, waits, runs, preempted, failed = parse_squeue_output(SQUEUE)
    assert (held.reason_text, by_admin.reason_text) == ("JobHeldUser", "JobHeldAdmin")
    assert (waits.dependency, runs.dependency) == ("afterok:3(unfulfilled)", "")
    assert isinstance(runs.limit, Value) and runs.limit.value == 600.0
    assert runs.limit.evidence[0].source == "squeue"
    assert runs.ends == parse_date("2026-11-28T11:00:44") and runs.preempted is None
    assert preempted.preempted == parse_date("2026-11-28T10:51:27")
    assert preempted.ends == parse_date("2026-11-28T10:51:33")
    assert failed.ends == parse_date("2026-11-28T10:53:15")
    assert (failed.exit_text, runs.exit_text) == ("3:0", "")
    (shown,) = parse_show_job_output(SHOWN)
    assert (shown.preempted, shown.ends, shown.limit.__class__) == (
        preempted.preempted,
        preempted.ends,
        Value,
    )


@pytest.mark.parametrize(
    ("state", "taken", "cause"),
    [
        ("FAILED", "2026-11-28T10:51:27", EndCause.PREEMPTED),
        ("PREEMPTED", "2026-11-28T10:51:27", EndCause.PREEMPTED),
        ("FAILED", "None", None),
        ("COMPLETED", "2026-11-28T10:51:27", EndCause.COMPLETED),
    ],
)
def test_a_job_that_failed_in_its_grace_was_preempted(
    state: str, taken: str, cause: EndCause | None
) -> None:
    """It was `SIGTERM from outside`."""
    shown = SHOWN.replace("RUNNING", state).replace("2026-11-28T10:51:27", taken)
    (info,) = parse_show_job_output(shown)
    assert info.end_cause is cause


def test_accounting_has_the_end_and_the_limit() -> None:
    row = "10|FAILED|b1|None|3:0|2026-11-28T10:53:15|2026-11-28T10:53:16|00:10:00|vjob:x|y"
    (info,) = parse_sacct_output(row)
    assert (info.state, info.exit_text, info.comment) == (JobState.FAILED, "3:0", "vjob:x|y")
    assert info.ends == parse_date("2026-11-28T10:53:16")
    assert isinstance(info.limit, Value) and info.limit.evidence[0].source == "sacct"


def test_accounting_says_why_a_job_was_requeued() -> None:
    assert parse_earlier(SACCT_ALL_STARTS) == {
        "9": (EndCause.PREEMPTED,),
        "12": (EndCause.REQUEUED,),
        "14": (EndCause.NODE_FAIL,),
        "26+0": (EndCause.PREEMPTED,),
    }


def test_a_node_that_is_not_well_has_its_reason_and_who_gave_it() -> None:
    found = {one.name: one for one in parse_node_states(NODES)}
    assert found["b3"] == NodeState(
        "b3",
        NodeCondition.DRAINING,
        "mixed+drain",
        "ECC GPU2",
        "root",
        time.mktime((2026, 11, 28, 10, 50, 51, 0, 0, -1)),
    )
    assert {name: one.condition for name, one in found.items()} == {
        "b3": NodeCondition.DRAINING,
        "b1": NodeCondition.LOST,
        "b2": NodeCondition.LOST,
        "a1": NodeCondition.MAINTENANCE,
        "a2": NodeCondition.DRAINING,
    }
    assert (found["a2"].reason, found["a2"].by, found["a2"].since) == ("kernel", "root", None)
    assert (found["b1"].by, found["b2"].reason) == ("slurm", "")
    assert build_show_node_command(["b1", "b2"])[-1] == "b[1-2]"


@pytest.mark.parametrize(
    ("reason", "waits"),
    [
        ("JobHeldUser", Waiting.HELD_BY_USER),
        ("JobHeldAdmin", Waiting.HELD_BY_ADMIN),
        ("JobHoldMaxRequeue", Waiting.HELD_AFTER_REQUEUE),
        ("job requeued in held state", Waiting.HELD_AFTER_REQUEUE),
        ("Dependency", Waiting.DEPENDENCY),
        ("DependencyNeverSatisfied", Waiting.DEPENDENCY),
        ("BeginTime", Waiting.BEGIN_TIME),
        ("Reservation", Waiting.RESERVATION),
        ("ReservationDeleted", Waiting.RESERVATION),
        ("ReqNodeNotAvail, Reserved for maintenance", Waiting.MAINTENANCE),
        ("ReqNodeNotAvail, May be reserved for other job", Waiting.RESOURCES),
        ("ReqNodeNotAvail, UnavailableNodes:b1", Waiting.NODES_DOWN),
        ("Licenses", Waiting.LICENSES),
        ("QOSMaxJobsPerUserLimit", Waiting.LIMIT),
        ("AssocGrpCpuLimit", Waiting.LIMIT),
        ("AssocGrpCPUMinutesLimit", Waiting.BUDGET),
        ("QOSMaxWallDurationPerJobLimit", Waiting.JOB_LIMIT),
        ("InvalidQOS", Waiting.NOT_PERMITTED),
        ("JobArrayTaskLimit", Waiting.ARRAY_LIMIT),
        ("Priority", Waiting.PRIORITY),
        ("Resources", Waiting.RESOURCES),
        ("PartitionDown", Waiting.QUEUE_CLOSED),
        ("PartitionTimeLimit", Waiting.QUEUE_LIMIT),
        ("DeadLine", Waiting.DEADLINE),
    ],
)
def test_each_reason_has_its_kind(reason: str, waits: Waiting) -> None:
    row = find_reason(reason)
    assert row is not None and row.waits is waits


@pytest.mark.parametrize(
    "parse", [parse_squeue_output, parse_sacct_output, parse_earlier, parse_node_states]
)
@pytest.mark.parametrize(
    "text", ["", "\n|\n", "||||||||||||||||", "NodeName=", "x State=", "é|\0|"]
)
def test_odd_texts_are_no_rows_or_unknown(parse: Callable[[str], object], text: str) -> None:
    parse(text)
