"""The one sentence that a report opens with, and the state that stands below it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varuna_core.facts.known import NotKnown, Value, Within
from vjob.jobs.reporting.report import read_job
from vjob.reports.analysis.findings import Finding, find_all
from vjob.reports.analysis.measures import Analysis
from vjob.reports.analysis.opening import write_opening
from vjob.reports.load.tables import Job, RunState

LOG = "".join(f"step {step}/9 loss {9 - step}.5\n" for step in range(1, 6))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Analysis]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "n060.out").write_text(LOG)
    job, analysis = read_job(folder)
    head = replace(
        analysis.headline, duration_s=Value(90.0), step_s=NotKnown("no clock"),
        goodput=Within(0.8, 0.9),
    )  # fmt: skip
    return job, replace(analysis, headline=head)


@pytest.mark.parametrize(
    ("state", "went"),
    [
        ("COMPLETED", "The run ended well"),
        ("FAILED", "The run did not end well"),
        ("RUNNING", "The run goes on"),
        ("UNKNOWN", "The run is not known to have ended"),
    ],
)
def test_it_says_how_the_run_went_as_far_as_is_known(
    read: tuple[Job, Analysis], state: str, went: str
) -> None:
    job, analysis = read
    said = write_opening(replace(job, state=RunState(state)), analysis, [])
    assert said.startswith(f"{went} after 90 s, at step 5 of 9; 80 % to 90 % of the time since")


def test_a_run_in_the_queue_has_not_started_and_has_no_findings(
    read: tuple[Job, Analysis],
) -> None:
    """It was "not known to have ended; no finding suggests a change"."""
    job, analysis = replace(read[0], state=RunState("PENDING")), read[1]
    assert find_all(job, analysis) == []
    assert write_opening(job, analysis, []).startswith("The run has not started; `vjob status")
    job = replace(job, history=[{"kind": "started", "time": 1.0}])  # then it was requeued
    assert write_opening(job, analysis, []).startswith("The run is not known to have ended")


def test_it_says_how_much_of_the_time_was_a_wait(read: tuple[Job, Analysis]) -> None:
    """It said "ended well after 2 min; 80 % of the time was steps" of 99 s in the queue."""
    job, analysis = read
    for queued_s, has in ((60.0, True), (2.0, False)):
        head = replace(analysis.headline, queued_s=Value(queued_s))
        said = write_opening(job, replace(analysis, headline=head), [])
        assert ("after 90 s, 60 s of it before the start, at" in said) is has


def test_a_run_whose_loss_was_not_a_number_did_not_end_well(read: tuple[Job, Analysis]) -> None:
    job, analysis = read
    bad = Finding(
        rule="not a number", weight=2.0, sentence="The loss was not a number.", evidence="", key=""
    )
    said = write_opening(replace(job, state=RunState("COMPLETED")), analysis, [bad])
    assert said.startswith("The run ended after")


def test_it_says_what_a_hang_cost(read: tuple[Job, Analysis]) -> None:
    job, analysis = read
    head = replace(analysis.headline, hung="rank 1 is stopped", hung_hours=0.5)
    said = write_opening(job, replace(analysis, headline=head), [])
    assert "; a hang cost 0.5 rank-hours" in said
    assert "a hang" not in write_opening(job, analysis, [])


def test_it_names_a_start_up_that_took_much_of_the_time(read: tuple[Job, Analysis]) -> None:
    """It said that 30 % of the time was steps, and nothing of the 64 % before them."""
    job, analysis = read
    for share, has in ((0.64, True), (0.04, False)):
        head = replace(analysis.headline, goodput=Value(0.3), start=Value(share))
        said = write_opening(job, replace(analysis, headline=head), [])
        assert ("30 % of the time since the start was steps, 64 % its start-up" in said) is has


def test_it_names_the_first_change_that_a_finding_asks_for(read: tuple[Job, Analysis]) -> None:
    job, analysis = read
    fell = Finding(weight=0.1, sentence="The loss fell.", evidence="", key="")
    slow = Finding(weight=0.5, sentence="Rank 3 is slow.", evidence="", key="cluster.exclude: [n3]")
    findings = [fell, slow]
    said = write_opening(replace(job, state=RunState("COMPLETED")), analysis, findings)
    assert said.endswith("; change first: cluster.exclude: [n3], for rank 3 is slow.")
    ended = Finding(rule="ended badly", weight=4.0, sentence="It ended.", evidence="", key="")
    said = write_opening(replace(job, state=RunState("FAILED", "rank 0")), analysis, [ended, slow])
    assert said.endswith("; the first finding below says why; change then: cluster.exclude: [n3], "
                         "for rank 3 is slow.")  # fmt: skip


def test_of_a_long_reason_the_end_is_kept_too() -> None:
    """What vjob did about an end comes last, after an exception of any length."""
    said = str(RunState("FAILED", f"rank 0 exited 1: {'x' * 500}; no new checkpoint in 3 attempts"))
    assert said.startswith("FAILED: rank 0 exited 1: xx")
    assert said.endswith("x; no new checkpoint in 3 attempts")
    assert len(said) < 320
