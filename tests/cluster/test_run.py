"""`vjob run` on the real Slurm of the lab: its options as jobs, and what Ctrl-C ends."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_allocation import PLAIN, Shell
from tests.command import PROGRAMS, Vjob, wait_for
from vjob.jobs.conf.quantities import parse_duration
from vjob.jobs.conf.slurm_words import to_minutes

pytestmark = pytest.mark.slurm

TIMES = ("90", "12:30", "0:30", "2:00:00", "1:2:3", "1-0", "1-12", "1-12:30", "1-0:0:1", "0-0:90")


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def test_slurms_options_are_a_job_that_is_followed_to_its_end(vjob: Vjob, clean_lab: Lab) -> None:
    words = ["-N", "2", "-p", "gpu1", "--ntasks-per-node=2", "--gpus-per-task", "a100:1", "-c1"]
    words += ["--mem", "100", "-t", "5", "--exclusive", "--nice=3", "-b", "now", "-w", "a[1-2]"]
    done = vjob("run", *words, "-J", "mine", str(PROGRAMS / "report_rank.py"), "-p", "x")
    rows = [json.loads(line.partition(": ")[2]) for line in done.stdout.splitlines()]
    assert sorted((row["rank"], row["host"]) for row in rows) == [
        (0, "a1"), (1, "a1"), (2, "a2"), (3, "a2"),
    ]  # fmt: skip
    assert {(row["gpus"], row["leak"]) for row in rows} == {("0,1", "leaked")}
    assert all(row["args"] == ["-p", "x"] for row in rows)
    (job,) = re.findall(r"submitted mine-\S+ as job (\d+) ", done.stderr)
    said = clean_lab.run(["scontrol", "-o", "show", "job", job]).stdout
    assert "TimeLimit=00:05:00" in said and "Nice=3" in said and "NumNodes=2" in said


def test_without_them_it_runs_here_and_says_how_to_submit(vjob: Vjob, clean_lab: Lab) -> None:
    vjob.write("print('here')", "here.py")
    done = vjob("run", "here.py")
    assert done.stdout == "here\n" and "-p QUEUE submits it to Slurm" in done.stderr
    assert clean_lab.run(["squeue", "-h"]).stdout == ""


@pytest.mark.parametrize("options", [["-p", "all"], ["-p", "all", "-b", "now+1hour"]], ids=str)
def test_ctrl_c_ends_a_job_that_runs_or_waits(
    vjob: Vjob, clean_lab: Lab, options: list[str]
) -> None:
    vjob.write("import time\nprint('ready', flush=True)\ntime.sleep(600)\n", "wait.py")
    shown = vjob.folder / "shown"
    with shown.open("w") as out:
        started = vjob.start("run", "--json", *options, "wait.py", stdout=out)
    word = '"ready"' if "-b" not in options else '"jobs"'
    wait_for(lambda: word in shown.read_text(), 90, shown.read_text)
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=120) == 130
    wait_for(lambda: clean_lab.run(["squeue", "-h"]).stdout == "", 30, lambda: "a job is left")


def test_slurm_reads_a_time_as_we_do(clean_lab: Lab) -> None:
    for text in TIMES:
        held = ["sbatch", "--parsable", "-H", "-p", "all", "-t", text, "--wrap", "true"]
        job = clean_lab.run(held).stdout.strip()
        said = clean_lab.run(["scontrol", "-o", "show", "job", job]).stdout
        (limit,) = re.findall(r"TimeLimit=(\S+)", said)
        seconds = parse_duration(limit)
        assert seconds is not None and to_minutes(text) == -(-seconds // 60), text
        clean_lab.run(["scancel", job])


def test_inside_a_job_it_is_a_step_of_that_job(clean_lab: Lab, tmp_path: Path) -> None:
    shell = Shell(clean_lab, tmp_path, *PLAIN)
    done = shell.vjob("run", "-N", "2", "-n", "4", str(PROGRAMS / "report_rank.py"))
    rows = [json.loads(line.partition(": ")[2]) for line in done.stdout.splitlines()]
    assert sorted((row["rank"], row["host"]) for row in rows) == [
        (0, "b1"), (1, "b1"), (2, "b2"), (3, "b2"),
    ]  # fmt: skip
    assert f"as job {shell.job}." in done.stderr
    assert shell.list_jobs() == [shell.job]
