"""Runs inside a job of Slurm that was there before: its nodes, its end, its cancel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out, wait_for
from varuna_core.facts.cause import EndCause
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm

CONF = """
name: inside
program: {{script: {script}, args: {args}}}
cluster:
  grace_s: 3
  join_s: 60
{more}
  nodes:
    - {{group: all, count: {count}, ranks: 2}}
"""
PLAIN = ("-N2", "-pgpu2", "--gres=gpu:a10:4", "-t10")


class Shell:
    """A shell inside a job of Slurm that goes on by itself."""

    def __init__(self, lab: Lab, folder: Path, *words: str) -> None:
        self.lab = lab
        said = lab.run(["salloc", "--no-shell", *words]).stderr
        found = re.search(r"Granted job allocation (\d+)", said)
        assert found, said
        self.job = found[1]
        self.vjob = Vjob(folder, {**lab.env, "SLURM_JOB_ID": self.job, "SLURM_NTASKS": "8"})

    def list_jobs(self) -> list[str]:
        return self.lab.run(["squeue", "--noheader", "--format=%A"]).stdout.split()

    def get_state(self) -> str:
        return self.lab.run(["squeue", "-h", "-t", "all", f"-j{self.job}", "-o%T"]).stdout.strip()


@pytest.fixture
def shell(clean_lab: Lab, tmp_path: Path) -> Shell:
    return Shell(clean_lab, tmp_path, *PLAIN)


def conf(program: str = "report_rank.py", *args: str, count: int = 2, more: str = "") -> str:
    script = PROGRAMS / program
    return CONF.format(script=script, args=json.dumps(args), count=count, more=more)


def wait_ready(vjob: Vjob, run: RunFolder, count: int) -> None:
    wait_for(lambda: read_out(run).count("ready") == count, 60, lambda: vjob.explain(run))


def test_a_run_uses_the_nodes_of_the_job_around_it(shell: Shell) -> None:
    run = shell.vjob.submit(conf())
    (job,) = shell.vjob.status(str(run.path))["scheduler"]["jobs"]
    record = shell.vjob.wait_over(run)
    assert record["verdict"] == "COMPLETED", shell.vjob.explain(run)
    assert job["id"].partition(".")[0] == shell.job
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert sorted((row["rank"], row["host"]) for row in rows) == [
        (0, "b1"), (1, "b1"), (2, "b2"), (3, "b2")
    ]  # fmt: skip
    assert shell.list_jobs() == [shell.job]
    assert shell.get_state() == "RUNNING"


def test_cancel_ends_the_run_and_leaves_the_job(shell: Shell) -> None:
    run = shell.vjob.submit(conf("fail_as_told.py", "0", "hang"))
    wait_ready(shell.vjob, run, 4)
    asked = shell.vjob("stacks", "last", code=None)  # of both nodes, if only for want of py-spy
    assert {"b1", "b2"} <= set(re.findall(r"\bb\d", asked.stdout + asked.stderr))
    shell.vjob("cancel", "last", "--now")
    assert shell.vjob.wait_over(run)["verdict"] == "CANCELLED"
    assert (shell.list_jobs(), shell.get_state()) == ([shell.job], "RUNNING")
    steps = shell.lab.run(["squeue", "--steps", "-h", f"-j{shell.job}", "-o%i"]).stdout.split()
    assert not [step for step in steps if step.rpartition(".")[2].isdecimal()]


@pytest.mark.parametrize("how", ["scancel", "timeout"])
def test_the_end_of_the_job_around_it_is_named(shell: Shell, how: str) -> None:
    run = shell.vjob.submit(conf("fail_as_told.py", "0", "hang"))
    wait_ready(shell.vjob, run, 4)
    if how == "scancel":
        shell.lab.run(["scancel", shell.job])
    else:
        shell.lab.run(["scontrol", "update", f"job={shell.job}", "TimeLimit=1"])
    record = shell.vjob.wait_over(run, 150)
    end = read_record(run).end
    assert end is not None and end.within == shell.job
    cause = {"scancel": EndCause.CANCELLED, "timeout": EndCause.TIME_LIMIT}[how]
    assert (end.cause, record["verdict"]) == (cause, cause.name if how == "scancel" else "TIMEOUT")
    assert f"job {shell.job}" in shell.vjob("status", "last", code=None).stdout


def test_a_het_job_is_used_by_a_conf_with_its_groups(clean_lab: Lab, tmp_path: Path) -> None:
    shell = Shell(clean_lab, tmp_path, "-N1", "-pgpu2", "-t10", ":", "-N2", "-pgpu1")
    groups = "    - {group: one, count: 1, ranks: 2}\n    - {group: two, count: 2, ranks: 2}\n"
    text = conf().partition("    - {group")[0] + groups
    run = shell.vjob.submit(text)
    assert shell.vjob.wait_over(run)["verdict"] == "COMPLETED", shell.vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    hosts = [row["host"] for row in sorted(rows, key=lambda row: row["rank"])]
    assert hosts == ["b1", "b1", "a1", "a1", "a2", "a2"]


def test_new_job_asks_for_another_job(shell: Shell) -> None:
    run = shell.vjob.submit(conf(count=1), "--new-job")
    assert shell.vjob.wait_over(run)["verdict"] == "COMPLETED", shell.vjob.explain(run)
    record = read_record(run)
    assert record is not None and record.jobs[0].id.isdecimal()
    assert record.jobs[0].id != shell.job


def test_a_shell_that_is_a_step_shares_what_it_has(shell: Shell) -> None:
    name = shell.vjob.write(conf())
    env = {**shell.vjob.env, "SLURM_JOB_ID": shell.job}
    words = [sys.executable, "-m", "vjob", "submit", name, "--follow"]
    step = ["srun", f"--jobid={shell.job}", "--nodes=1", "--ntasks=1", "--export=ALL", *words]
    done = subprocess.run(
        step,
        cwd=shell.vjob.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"inside job {shell.job} of this shell" in done.stderr
