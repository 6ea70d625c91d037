"""`cluster.restarts` on the lab: failed ranks are started anew as steps of the same job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_jobs import LAYOUTS, TWO_NODES, conf
from tests.command import Vjob, read_out, wait_for
from varuna_core.records.exits import read_outcome
from varuna_core.records.record import read_events, read_restarts
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm
RANK = 9
"""Of the second group, which in a split run is another job."""


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def submit(vjob: Vjob, fates: str, layout: str = "single", nodes: str | None = None) -> RunFolder:
    args = [str(RANK if nodes is None else 3), fates]
    return vjob.submit(conf("fail_at_first.py", args, layout, more="  restarts: 3", nodes=nodes))


@pytest.mark.long
def test_failed_ranks_are_started_anew_in_the_same_job(vjob: Vjob, clean_lab: Lab) -> None:
    """A plain job, a het job and a split run whose rank fails twice; a run that fails alike twice;
    one that is cancelled as it waits: side by side."""
    well = {layout: submit(vjob, "9@3,7@5", layout) for layout in LAYOUTS}
    alike = submit(vjob, "9@3,9@3", nodes=TWO_NODES)
    ended = submit(vjob, "9,9,9,9", nodes=TWO_NODES)

    wait_for(lambda: len(read_restarts(ended)) >= 2, 120, lambda: vjob.explain(ended))
    vjob("cancel", ended.name, "--now")
    record = vjob.wait_over(ended, timeout_s=150, may_fail=True)
    assert record["verdict"] == "CANCELLED", record
    assert record["message"].startswith("cancelled with vjob cancel"), record
    kinds = [event["kind"] for event in read_events(ended)]
    # On a busy machine the command may come as the third begins.
    assert kinds.count("started") in (2, 3), "nothing starts after the cancel"

    record = vjob.wait_over(alike, timeout_s=150, may_fail=True)
    assert record["outcome"]["code"] == 9
    assert "the same error after step 3 twice in a row: not started again" in record["message"]
    assert [attempt.number for attempt in alike.attempts()] == [0, 1]

    for layout, run in well.items():
        record = vjob.wait_over(run, timeout_s=150, may_fail=True)
        assert record["verdict"] == "COMPLETED", vjob.explain(run)
        assert len(record["jobs"]) == (2 if layout == "split" else 1)
        for job in record["jobs"]:
            said = clean_lab.run(["scontrol", "-o", "show", "job", job["id"]]).stdout
            assert "ExitCode=0:0" in said and "Restarts=0" in said
        world = 12 if layout == "single" else 16
        assert read_out(run, 2).count("ready, attempt 2, restart 2 of 3") == world
        assert [event["reason"].split(":")[0] for event in read_restarts(run)] == [
            f"rank {RANK} on {'b3' if layout == 'single' else 'a1'} exited {code}"
            for code in (9, 7)
        ]


LEAVER = """
import os, pathlib, signal, sys, time

done = pathlib.Path(f"done.{os.environ['RANK']}")
if done.exists():
    sys.exit(0)

def save(*_):
    done.touch()
    sys.exit(0)

signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True:
    time.sleep(0.2)
"""
LOW = """
name: leaver
program: {{script: leaver.py}}
cluster:
  scheduler: slurm
  requeue: true
  signal_before_end_s: 20
  restarts: {restarts}
  walltime_min: 5
  nodes: [{{group: only, queue: low, count: 1, ranks: 2}}]
"""


@pytest.mark.parametrize("restarts", ["null", "2"], ids=["plain", "restarts"])
def test_ranks_that_save_on_the_warning_of_a_preemption_come_again(
    vjob: Vjob, clean_lab: Lab, restarts: str
) -> None:
    """They exit with 0, which is no end: the job was told to leave."""
    vjob.write(LEAVER, "leaver.py")
    run = vjob.submit(LOW.format(restarts=restarts))
    wait_for(lambda: read_out(run, 0).count("ready") == 2, 120, lambda: vjob.explain(run))
    node = json.loads(run.attempt(0).node_report(0).read_text())["host"]
    clean_lab.run(["srun", f"--nodelist={node}", "--exclusive", "true"], timeout_s=240)
    assert vjob.wait_over(run, timeout_s=150)["verdict"] == "COMPLETED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0, 1], vjob.explain(run)
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and outcome.code == 0
