"""`cluster.restarts` on this machine: the rendered script, real ranks that fail, real signals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from varuna_core.records.record import read_events, read_restarts

CONF = """
name: again
program: {{script: {script}, args: ["2", "{fates}"]}}
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 2
  restarts: {restarts}
{more}
  nodes: [{{group: m, count: 2, ranks: 2}}]
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    return Vjob(tmp_path)


def conf(fates: str, restarts: int = 3, more: str = "") -> str:
    script = PROGRAMS / "fail_at_first.py"
    return CONF.format(script=script, fates=fates, restarts=restarts, more=more)


def test_a_rank_that_fails_twice_is_started_twice_and_the_job_ends_well(vjob: Vjob) -> None:
    run = vjob.submit(conf("9,7"))
    wait_for(lambda: read_restarts(run), 60, lambda: vjob.explain(run))
    verdict = vjob.status("last")["verdict"]
    assert verdict["health"] not in ("DONE", "DEAD"), verdict
    assert vjob.wait_over(run, may_fail=True)["verdict"] == "COMPLETED", vjob.explain(run)
    said = [line for line in read_out(run, 2).splitlines() if "ready" in line]
    assert len(said) == 4 and all("attempt 2, restart 2 of 3" in line for line in said)
    assert [item.number for item in run.attempts()] == [0, 1, 2]
    kept = [json.loads(run.attempt(number).outcome.read_text()) for number in range(3)]
    assert [outcome["code"] for outcome in kept] == [9, 7, 0]
    events = read_restarts(run)
    assert [(event["next"], event["left"], event["wait_s"]) for event in events] == [
        (1, 2, 3),
        (2, 1, 6),
    ]
    ports = {json.loads(run.attempt(number).master.read_text())["port"] for number in range(3)}
    assert len(ports) == 3
    text = vjob("status", "last").stdout
    assert "attempt 2, 2 of 3 restarts used, 4 ranks: 4 ended well" in text
    assert "attempt 1 ended: rank 2 on local1 exited 7: ValueError: no sample" in text
    report = vjob("report", "last", "--text").stdout
    assert "in 3 attempts" in report and "rank 2 on local1 exited 9" in report


@pytest.mark.long
def test_all_jobs_of_a_split_run_go_on_to_the_same_attempt(vjob: Vjob) -> None:
    """Rank 2 is the second job's; those of the first are ended for its failure, and start again."""
    groups = "[{group: m, count: 1, ranks: 2}, {group: s, count: 1, ranks: 2}]"
    text = conf("9,7", more="  hetero: split")
    text = text.replace("[{group: m, count: 2, ranks: 2}]", groups)
    run = vjob.submit(text)
    record = vjob.wait_over(run, may_fail=True)
    assert record["verdict"] == "COMPLETED" and len(record["jobs"]) == 2, vjob.explain(run)
    assert read_out(run, 2).count("ready, attempt 2, restart 2 of 3") == 4
    started = [
        (event["group"], event["attempt"])
        for event in read_events(run)
        if event["kind"] == "started"
    ]
    assert sorted(started) == [(name, number) for name in ("m", "s") for number in range(3)]
    run = vjob.submit(text.replace("9,7", "9@2,9@2"))
    assert vjob.wait_over(run, may_fail=True)["verdict"] == "FAILED"
    assert [attempt.number for attempt in run.attempts()] == [0, 1]


def test_the_same_error_in_the_same_step_twice_running_ends_the_job_and_says_so(
    vjob: Vjob,
) -> None:
    run = vjob.submit(conf("9@3,9@4,9@4"))
    record = vjob.wait_over(run, may_fail=True)
    assert record["outcome"]["code"] == 9
    assert "the same error after step 4 twice in a row: not started again" in record["message"]
    assert [event["step"] for event in read_restarts(run)] == [3, 4]
    said = vjob("status", "last", code=10).stdout
    assert "cluster.restart_same: true starts it anyway" in said
    assert "attempt 0 ended at step 3: rank 2" in said


def test_the_budget_ends_and_wrong_input_is_not_tried_again(vjob: Vjob) -> None:
    run = vjob.submit(conf("9@4,9@4", 1, "  restart_same: true"))
    record = vjob.wait_over(run, may_fail=True)
    assert record["message"].endswith("; cluster.restarts: 1 is used up")
    assert [item.number for item in run.attempts()] == [0, 1]
    run = vjob.submit(conf("2"))
    record = vjob.wait_over(run, may_fail=True)
    assert "exit code 2 stands for wrong input: not started again" in record["message"]
    assert not read_restarts(run)


def test_a_cancel_while_it_waits_to_start_again_ends_the_job_at_once(vjob: Vjob) -> None:
    run = vjob.submit(conf("9,9,9,9,9"))
    wait_for(lambda: len(read_restarts(run)) == 2, 90, lambda: vjob.explain(run))
    assert "is cancelled" in vjob("cancel", "last", "--now").stdout
    record = vjob.wait_over(run, may_fail=True)
    assert record["verdict"] == "CANCELLED"
    assert record["message"].startswith("cancelled with vjob cancel"), record
    assert not run.attempt(2).master.exists()
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("started") == 2


def test_a_cancel_while_ranks_run_starts_nothing_anew(vjob: Vjob) -> None:
    script = PROGRAMS / "fail_as_told.py"
    text = conf("").replace('["2", ""]', '["-1", "hang", "catch:3"]')
    run = vjob.submit(text.replace(str(PROGRAMS / "fail_at_first.py"), str(script)))
    wait_for(lambda: read_out(run).count("ready") == 4, 30, lambda: vjob.explain(run))
    said = vjob("cancel", "last", code=1).stderr
    assert "exited 3" in said and "started again" not in said
    assert not read_restarts(run)


@pytest.mark.long
def test_a_requeued_job_goes_on_counting_attempts(vjob: Vjob) -> None:
    run = vjob.submit(conf("9,9,9", 2))
    wait_for(lambda: read_restarts(run), 60, lambda: vjob.explain(run))
    (run.path / "local-requeue.L1").touch()
    vjob.wait_over(run, may_fail=True)
    started = [event["attempt"] for event in read_events(run) if event["kind"] == "started"]
    assert started == [0, 1, 2, 3] and len(read_restarts(run)) == 2
    assert read_out(run, 3).count("ready, attempt 3") == 4
