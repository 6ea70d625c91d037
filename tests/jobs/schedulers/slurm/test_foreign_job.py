"""What Slurm says of jobs that vjob did not submit."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.runs.foreign_job import find_foreign_job, find_run_or_job
from vjob.jobs.schedulers.broker import Answer
from vjob.jobs.schedulers.foreign_job import ForeignJob, JobPart
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.slurm import foreign_job
from vjob.jobs.schedulers.slurm.foreign_job import (
    expand_pattern,
    guess_output,
    parse_parts,
    parse_sacct_parts,
)

SHOWN = (
    "JobId=31 ArrayJobId=29 ArrayTaskId=2 JobName=my steps UserId=ann(1000) GroupId=ann(1000) "
    "MCS_label=N/A Priority=1 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:09 "
    "TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2026-11-23T13:00:00 "
    "StartTime=2026-11-23T13:00:05 EndTime=2026-11-23T14:00:05 Partition=gpu2 NodeList=b[1-2] "
    "BatchHost=b1 NumNodes=2 NumCPUs=4 TRES=cpu=4,node=2,billing=4,gres/gpu=8 "
    "Command=/home/ann/my job.sh WorkDir=/home/ann/my work StdErr=/home/ann/my work/%x-%A_%3a.err "
    "StdIn=/dev/null StdOut=/home/ann/my work/slurm-29_2.out Power="
)
PART = JobPart(
    info=SchedulerJob(id="29_2", state=JobState.RUNNING, native_word="RUNNING", nodes=("b1", "b2")),
    raw_id="31", name="steps", user="ann", uid=1000, work_dir="/home/ann", started=1.0,
)  # fmt: skip


def test_an_element_of_an_array_is_read_with_spaces_in_names_and_paths() -> None:
    (part,) = parse_parts(SHOWN + "\n")
    assert (part.info.id, part.raw_id, part.name, part.user, part.uid) == (
        "29_2", "31", "my steps", "ann", 1000
    )  # fmt: skip
    assert part.out == "/home/ann/my work/slurm-29_2.out"
    assert part.err == "/home/ann/my work/my steps-29_002.err"
    assert part.has_gpus and part.num_nodes == 2 and part.queue == "gpu2"
    assert part.limit_s == 3600 and part.started == time.mktime((2026, 11, 23, 13, 0, 5, 0, 0, -1))


def test_a_name_that_claims_another_owner_leaves_the_owner_open() -> None:
    forged = SHOWN.replace("my steps", f"x UserId=me({os.geteuid()}) GroupId=me(0)")
    (part,) = parse_parts(forged)
    assert part.uid is None and not part.is_ours


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("/x/slurm-%A_%a.out", "/x/slurm-29_2.out"),
        ("%j.out", "/home/ann/31.out"),
        ("/x/%5j-%b.%u.%x", "/x/00031-2.ann.steps"),
        ("/x/%N/%n.%t.%s", "/x/b1/0.0.batch"),
        ("/x/100%%.out", "/x/100%.out"),
        ("/x/\\%j.out", "/x/%j.out"),
        ("/dev/null", ""),
        ("(null)", ""),
        ("", ""),
    ],
)
def test_patterns_of_a_file_name_are_put_in(pattern: str, path: str) -> None:
    assert expand_pattern(pattern, PART) == path


def test_a_file_whose_node_is_not_known_yet_is_not_guessed() -> None:
    waiting = replace(PART, info=replace(PART.info, nodes=()))
    assert expand_pattern("/x/%N.out", waiting) == ""


@given(st.text())
def test_whatever_slurm_prints_is_read_or_passed_over(text: str) -> None:
    for part in parse_parts(text) + parse_parts(f"JobId=1 {text}") + parse_sacct_parts(text):
        assert part.info.state in JobState


def test_components_share_one_file_and_it_is_read_once() -> None:
    parts = tuple(
        replace(PART, info=replace(PART.info, id=f"40+{n}"), out="/x/40.out", err="/x/40.out")
        for n in range(2)
    )
    job = ForeignJob(scheduler="slurm", word="40", parts=parts, asked=0.0)
    assert job.files == {"40+0": {"out": "/x/40.out"}}


def test_what_pends_has_no_files_yet() -> None:
    job = ForeignJob(
        scheduler="slurm", word="1", parts=(replace(PART, started=None, out="/x/1.out"),), asked=0.0
    )
    assert job.files == {} and not job.is_over


def test_accounting_knows_no_files_and_the_usual_one_is_taken_if_it_is_there(
    tmp_path: Path,
) -> None:
    times = "2026-11-23T13:00:00|Unknown|Unknown|00:10:00"
    line = f"29_2|31|CANCELLED by 1000|b1|None|0:15|ann|1000|gpu2|{times}|1|{tmp_path}|a|b"
    (part,) = parse_sacct_parts(line)
    assert (part.name, part.info.state, part.started) == ("a|b", JobState.CANCELLED, None)
    assert guess_output(part).out == ""
    (tmp_path / "slurm-29_2.out").touch()
    assert guess_output(part).out == str(tmp_path / "slurm-29_2.out")


def test_a_word_that_is_no_id_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked: list[str] = []

    def ask(command: list[str], **facts: float) -> Answer:
        asked.append(command[0])
        raise UncertainError("away")

    monkeypatch.setattr(foreign_job.broker, "ask", ask)
    for word in ("name", "-1", "12;id", "L1", "12_", "12+x"):
        assert find_foreign_job(word) is None
    assert asked == []
    assert find_foreign_job("12") is None and asked == ["scontrol", "sacct"]
    with pytest.raises(InputError):
        find_run_or_job("name", tmp_path)
