"""`vjob status` as a user types it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for

FATE = """
name: {name}
program: {{script: {fate}, args: {args}}}
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 2
  nodes: [{{group: m, count: 1, ranks: 2}}]
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def fate(name: str, *args: str) -> str:
    return FATE.format(name=name, fate=PROGRAMS / "fail_as_told.py", args=json.dumps(list(args)))


def test_without_a_job_all_runs_are_listed_with_how_they_are(vjob: Vjob) -> None:
    assert "no runs yet" in vjob("status").stdout
    done = vjob.submit(fate("fails", "1", "exit:9"))
    vjob.wait_over(done)
    run = vjob.submit(fate("lives", "-1", "hang"))
    wait_for(lambda: read_out(run).count("ready") == 2, 30, lambda: vjob.explain(run))
    said = vjob("status").stdout.splitlines()
    heads = [line for line in said if not line.startswith(" ")]
    assert len(heads) == 3 and heads[0].startswith("JOB")
    assert "fails" in heads[1] and "exited 9" in " ".join(said) and "lives" in heads[2]
    assert max(map(len, said)) <= 80, "a pipe has the width of a terminal"
    vjob.env["COLUMNS"] = "200"
    wide = vjob("status", "--all").stdout.splitlines()
    assert len(wide) == 3 and "exited 9" in wide[1]
    rows = json.loads(vjob("status", "--json").stdout)
    assert rows[0]["state"] == "DEAD" and rows[0]["exit_code"] == 10
    assert [row["run"] for row in rows] == [done.name, run.name]
    vjob("cancel", "last", "--now")


def test_watching_prints_until_the_job_has_ended(vjob: Vjob) -> None:
    run = vjob.submit(fate("lives", "-1", "hang"))
    wait_for(lambda: read_out(run).count("ready") == 2, 30, lambda: vjob.explain(run))
    out = vjob.folder / "said"
    with out.open("w") as handle:
        child = vjob.start("status", "last", "--json", "--watch", "0.2", stdout=handle)
    wait_for(lambda: out.read_text().count("\n") >= 2, 60)
    vjob("cancel", "last", "--now")
    assert child.wait(timeout=60) == 16
    states = [json.loads(line)["record_state"] for line in out.read_text().splitlines()]
    assert states[0] == "submitted" and states[-1] == "ended"


def test_ctrl_c_ends_a_watch(vjob: Vjob) -> None:
    run = vjob.submit(fate("lives", "-1", "hang"))
    out = vjob.folder / "said"
    with out.open("w") as handle:
        child = vjob.start("status", str(run.path), "--watch", "60", stdout=handle)
    wait_for(lambda: out.read_text(), 60)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(timeout=60) == 130
    vjob("cancel", "last", "--now")
