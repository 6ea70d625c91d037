"""Slurm's texts, as recorded from releases that are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.facts.known import Value
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers.job import After, JobState
from vjob.jobs.schedulers.slurm import nodes, settings
from vjob.jobs.schedulers.slurm.commands import (
    build_sbatch_command,
    build_squeue_command,
    build_states_command,
    can_expedite,
    expand_nodes,
    has_only_state,
    parse_estimate,
    parse_left,
    parse_sacct_output,
    parse_sbatch_output,
    parse_show_job_output,
    parse_squeue_output,
    parse_state,
    parse_states,
)
from vjob.jobs.schedulers.slurm.foreign_job import parse_parts

SQUEUE_22_05_HET = "".join(
    # squeue pads each field to 20 characters; the mark behind it is ours.
    "".join(f"{cell:<20}|" for cell in row.split())
    + "vjob:mix-20260102-030405||10:00|N/A|N/A|(null)|0|\n"
    for row in (
        "26 26 0 RUNNING b1 None 0 2026-01-02T03:04:05",
        "27 26 1 RUNNING a[1-2] None 0 2026-01-02T03:04:05",
    )
)

SACCT_22_05_HET = """\
26+0|COMPLETED|b1|None|0:0|2026-01-02T03:04:05|2026-01-02T03:09:05|00:05:00|
26+1|COMPLETED|a[1-2]|None|0:0|2026-01-02T03:04:05|2026-01-02T03:09:05|00:05:00|
"""

SHOW_JOB_22_05 = (
    "JobId=31 JobName=x UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901729 Nice=0 "
    "Account=(null) QOS=normal JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=0 "
    "Restarts=1 BatchFlag=1 Reboot=0 ExitCode=9:0 RunTime=00:00:02 TimeLimit=00:05:00 "
    "StartTime=2026-01-02T03:04:05 EndTime=2026-01-02T03:04:07 NodeList=a[1-2] BatchHost=a1 "
    "NumNodes=2 Comment=vjob:x-20260102-030405 StdErr=/x StdIn=/dev/null StdOut=/x\n"
)


@pytest.mark.parametrize(
    ("version", "parameters", "can"),
    [
        ("25.11.0", "enable_configless,enable_expedited_requeue", True),
        ("26.5.1", "enable_expedited_requeue", True),
        ("25.05.3", "enable_expedited_requeue", False),
        ("25.11.0", "(null)", False),
        ("", "", False),
    ],
)
def test_expedited_requeue_is_asked_for_where_slurm_has_it(
    version: str, parameters: str, can: bool
) -> None:
    assert can_expedite({"SLURM_VERSION": version, "SlurmctldParameters": parameters}) is can
    command = build_sbatch_command("s.sh", "/log/run", expedite=can)
    assert ("--requeue=expedite" in command) is can


def test_het_components_get_the_leaders_id() -> None:
    found = parse_squeue_output(SQUEUE_22_05_HET)
    assert [info.id for info in found] == ["26+0", "26+1"]
    assert {info.leader for info in found} == {"26"}
    assert found[1].nodes == ("a1", "a2")
    assert found[0].comment == "vjob:mix-20260102-030405"


def test_sacct_rows_of_a_het_job_end_under_their_leader() -> None:
    found = parse_sacct_output(SACCT_22_05_HET)
    assert [(info.leader, info.state) for info in found] == [("26", JobState.COMPLETED)] * 2


def test_scontrols_words_are_read() -> None:
    (info,) = parse_show_job_output(SHOW_JOB_22_05)
    assert (info.id, info.state, info.exit_text, info.restarts) == ("31", JobState.FAILED, "9:0", 1)
    assert info.comment == "vjob:x-20260102-030405"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 0", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("REQUEUE_HOLD", JobState.PENDING),
        ("NODE_FAIL", JobState.NODE_FAIL),
        ("WARP_SPEED", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_a_word_that_slurm_may_say_has_a_state(word: str, state: JobState) -> None:
    assert parse_state(word) is state


@given(st.text(max_size=300))
def test_no_text_breaks_the_parsers(text: str) -> None:
    parse_squeue_output(text)
    parse_sacct_output(text)
    parse_show_job_output(text)
    parse_state(text)


ESTIMATES = (
    "sbatch: Job 7 to start at 2026-11-23T18:00:00 using 8 processors on nodes a[1-2] in "
    "partition gpu1",
    "sbatch: Job 7 to start at 2026-11-23T18:00:00 using 8 processors on a[1-2]",
)


@pytest.mark.parametrize("text", ESTIMATES)
def test_an_estimate_is_read_with_its_start_and_nodes(text: str) -> None:
    found = parse_estimate(text)
    assert found.as_json() == {
        "text": text,
        "start": datetime(2026, 11, 23, 18).timestamp(),
        "num_cpus": 8,
        "nodes": ["a1", "a2"],
        "queue": "gpu1" if "partition" in text else "",
    }


def test_an_estimate_that_says_less_or_nothing() -> None:
    found = parse_estimate("sbatch: Job 7 to start at Unknown")
    assert (found.is_read, found.start, found.nodes, found.num_cpus) == (True, None, (), None)
    said = "allocation failure: Requested node configuration"
    assert parse_estimate(said).as_json() == {"text": said}


def test_parsable_ids_are_read_below_warnings() -> None:
    assert parse_sbatch_output("sbatch: Warning: x\n4711;cluster\n") == "4711"
    with pytest.raises(UncertainError, match="no job id"):
        parse_sbatch_output("sbatch: odd\n")


def test_a_later_job_waits_for_the_start_of_the_first() -> None:
    command = build_sbatch_command("s.sh", "/log/run", after=After(started=("12",)))
    assert "--dependency=after:12" in command and command[-1] == "s.sh"


def test_squeue_is_asked_for_a_users_jobs_alone() -> None:
    command = build_squeue_command(1000)
    assert {"--user=1000", "--local", "--states=all"} < set(command)


def test_the_time_left_stands_behind_any_comment() -> None:
    row = "12|N/A|N/A|RUNNING|a1|None|0|2026-01-02T03:04:05|{}|1-00:00:10|2-00:00:00|N/A|N/A|x|0|\n"
    (info,) = parse_squeue_output(row.format("odd|10:00"))
    assert (info.comment, info.left) == ("odd|10:00", parse_left("1-00:00:10", "squeue"))
    (late,) = parse_squeue_output(row.format("").replace("1-00:00:10", "INVALID"))
    assert isinstance(late.left, Value) and late.left.value == 0.0  # its limit has passed
    (info,) = parse_show_job_output(SHOW_JOB_22_05)
    assert isinstance(info.left, Value) and info.left.value == 298.0


@pytest.mark.parametrize(
    ("version", "can"),
    [("slurm-wlm 22.05.8", False), ("slurm 24.05.0", True), ("slurm 25.11.1", True), ("", False)],
)
def test_states_alone_are_asked_for_where_squeue_can(version: str, can: bool) -> None:
    assert has_only_state(version) is can
    command = build_states_command(["1", "4_2"])
    assert {"--only-job-state", "--jobs=1,4_2"} < set(command)
    assert not any(word.startswith("--user") for word in command), "fatal together, from 25.05"
    assert parse_states("2+0|RUNNING\n4_2|RUNNING \n\n") == {"2+0": "RUNNING", "4_2": "RUNNING"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a[1-2],b1", ["a1", "a2", "b1"]),
        ("rack[1-2]n[01-03]", [f"rack{r}n0{n}" for r in (1, 2) for n in (1, 2, 3)]),
        ("gpu-a[1,3-4]-int", ["gpu-a1-int", "gpu-a3-int", "gpu-a4-int"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("", []),
        ("n[1-99999999999]", ["n[1-99999999999]"]),
        ("[1-9][1-9][1-9][1-9][1-9][1-9]x", ["[1-9][1-9][1-9][1-9][1-9][1-9]x"]),
        ("n[1-a]", ["n[1-a]"]),
        ("n[3-1]", ["n[3-1]"]),
    ],
)
def test_node_lists_expand_in_slurms_order(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


SACCT = "123|FAILED|n[1-2]|None|1:9|2026-11-28T01:00:00|2026-11-28T02:00:00|1-01:00:00|x\n"
SHOWN = (
    "JobId=1 ArrayJobId=7 ArrayTaskId=3 UserId=me(10) GroupId=me(10) NumNodes=2 Restarts=1 "
    "HetJobId=1 HetJobOffset=2 RunTime=1-00:01:00 TimeLimit=01:00:00 NodeList=n[1-2] ExitCode=0:9 "
    "StartTime=2026-11-28T01:00:00 StdOut=/a/%2j"
)
SBATCH = "sbatch: Job 7 to start at 2026-11-23T01:12:00 using 4 processors on nodes a[1-2] in b"
SINFO = "n1|gpu*|idle|gpu:a100:4(S:0-1)|64|512000|3|\n"


@pytest.mark.parametrize(
    ("text", "parse"),
    [
        (SQUEUE_22_05_HET, parse_squeue_output),
        (SACCT, parse_sacct_output),
        (SHOWN, parse_show_job_output),
        (SHOWN, parse_parts),
        (SBATCH, parse_estimate),
        (SINFO, nodes.parse_idle_nodes),
        (SINFO, nodes.parse_starting_nodes),
        (SINFO.replace("idle", "up"), nodes.parse_queues),
        ("gpu2|gpu|idle|gpu:4|a100-80gb,80|", nodes.parse_starting_nodes),
        ("25.11.1", lambda text: settings.judge_version({"SLURM_VERSION": text})),
        ("cred_expire=120", lambda text: settings.judge_requeue({"AuthInfo": text})),
        ("30 sec", lambda text: settings.judge_kill_wait({"KillWait": text})),
    ],
)
@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 18, "\u0663", "\xb2"])
def test_no_number_in_a_table_of_slurm_ends_a_command(
    text: str, parse: Callable[[str], object], digits: str
) -> None:
    for found in re.finditer(r"\d+", text):
        parse(text[: found.start()] + digits + text[found.end() :])
