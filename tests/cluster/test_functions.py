"""Functions on the real Slurm of the lab: where their ranks are, and that they come again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.cluster.lab import Lab
from tests.command import wait_for
from tests.varuna_core.functions import rank_functions as functions
from tests.varuna_core.functions.function_run import Functions, read_result
from varuna_core.records.exits import read_outcome
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm

CONF = f"""
name: fn
cluster:
  scheduler: slurm
  hetero: %s
  walltime_min: 20
  grace_s: 3
  join_s: 60
  lost_s: 15
  signal_before_end_s: 30
  requeue: %s
  nodes:
%s
env: {{PYTHONPATH: {ROOT}}}
"""
TWO = "    - {group: pair, count: 2, queue: %s, ranks: 2}"
GROUPS = (
    "    - {group: weak, count: 2, queue: gpu2, ranks: 2}\n"
    "    - {group: strong, count: 2, queue: gpu1, ranks: 1}"
)


@pytest.fixture
def runs(clean_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Functions:
    return Functions(tmp_path, monkeypatch, clean_lab.env)


def wait_for_count(runs: Functions, run: RunFolder, attempt: int, ranks: int = 4) -> None:
    names = [runs.folder / f"{attempt}.{rank}" for rank in range(ranks)]
    wait_for(lambda: all(name.exists() for name in names), 90, lambda: runs.vjob.explain(run))


@pytest.mark.parametrize("layout", ["hetjob", "split"])
def test_ranks_of_all_groups_know_the_job_and_all_its_hosts(runs: Functions, layout: str) -> None:
    run = runs.submit(functions.describe_rank, conf=CONF % (layout, "false", GROUPS))
    record = runs.wait(run)
    assert record["verdict"] == "COMPLETED", runs.vjob.explain(run)
    told = [read_result(run, rank)[1] for rank in range(6)]
    assert {item["job_id"] for item in told} == {record["jobs"][0]["id"]}
    assert {tuple(item["hostnames"][1:]) for item in told} == {("b2", "a1", "a2")}
    assert [item["node"] for item in told] == [0, 0, 1, 1, 2, 3]
    assert all(item["num_nodes"] == 4 and item["num_tasks"] == 6 for item in told)


def count_to_the_end(runs: Functions, run: RunFolder) -> dict[str, Any]:
    """Let the counter of attempt 1 end; the record."""
    wait_for_count(runs, run, 1)
    (runs.folder / "go").touch()
    record = runs.wait(run)
    assert record["verdict"] == "COMPLETED", runs.vjob.explain(run)
    for rank in range(4):
        kind, told = read_result(run, rank)
        assert kind == "success" and told["begin"] > 0 and told["saves"] == 1
    return record


def test_a_preempted_function_goes_on_where_it_was(runs: Functions, clean_lab: Lab) -> None:
    run = runs.submit(
        functions.Counter(str(runs.folder), 50), conf=CONF % ("auto", "true", TWO % "low")
    )
    wait_for_count(runs, run, 0)
    node = json.loads(run.attempt(0).node_report(1).read_text())["host"]
    clean_lab.run(["srun", f"--nodelist={node}", "--exclusive", "true"])
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and outcome.code == 0, runs.vjob.explain(run)
    assert "the job is requeued (3 more timeouts allowed)" in outcome.reason
    count_to_the_end(runs, run)


@pytest.mark.long
def test_a_function_preempted_without_a_warning_saves_in_its_grace(
    runs: Functions, clean_lab: Lab
) -> None:
    run = runs.submit(
        functions.Counter(str(runs.folder), 50),
        conf=CONF % ("auto", "true", TWO % "low"),
        **{"cluster.signal_before_end_s": 0},
    )
    wait_for_count(runs, run, 0)
    node = json.loads(run.attempt(0).node_report(1).read_text())["host"]
    clean_lab.run(["srun", f"--nodelist={node}", "--exclusive", "true"])
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and outcome.code == 143, "Slurm requeues it, not we"
    count_to_the_end(runs, run)


@pytest.mark.long
def test_a_het_job_near_its_time_limit_comes_again(runs: Functions, clean_lab: Lab) -> None:
    nodes = GROUPS.replace("count: 2, queue: gpu2, ranks: 2", "count: 1, queue: gpu2, ranks: 2")
    runs.timeout_min = 1
    run = runs.submit(
        functions.Counter(str(runs.folder), 50), conf=CONF % ("hetjob", "true", nodes)
    )
    wait_for_count(runs, run, 0)
    job = json.loads(run.record.read_text())["jobs"][0]["id"]
    clean_lab.run(["scancel", "--batch", "--signal=USR1", job])
    wait_for_count(runs, run, 1)
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and "(2 more timeouts allowed)" in outcome.reason
    record = count_to_the_end(runs, run)
    assert [item["id"] for item in record["jobs"]] == [job]


def test_a_cancelled_function_does_not_come_again(runs: Functions, clean_lab: Lab) -> None:
    run = runs.submit(
        functions.Counter(str(runs.folder), 50), conf=CONF % ("auto", "true", TWO % "all")
    )
    wait_for_count(runs, run, 0)
    assert "saved and left" in runs.vjob("cancel", run.name).stdout
    assert runs.wait(run)["verdict"] == "CANCELLED" and not run.attempt(1).path.exists()
