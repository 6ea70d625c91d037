"""`vjob report`, from the command line to its files."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import vjob
from tests.jobs.runs.test_outcome import make_record
from tests.reports.traces import write_simulated
from tests.varuna_core.agent.local_run import make_plan
from varuna_core.records.files import write_json
from varuna_core.records.logs.training_log import Iteration, format_iteration
from varuna_core.records.plan import write_plan
from varuna_core.records.record import SUBMITTED, JobRecord, append_event, write_record
from varuna_core.records.runfolder import RunFolder
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.reporting.report import goes_on
from vjob.jobs.runs.find import RunView
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.shelf.commands.cli import cli


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "log2" / "4711"
    write_simulated(folder, build_schedule("1f1b", 2, 3), build_even_costs(2), steps=(1, 2, 3, 4))
    iteration = Iteration(2, 4, time_ms=12.0, losses={"lm loss": 9.0})
    text = f"<script>alert('x')</script>\x1b[31m\n{format_iteration(iteration)}\n"
    (folder / "n0.out").write_text(text)
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["report", *words])


def test_the_text_of_a_bare_folder(job: Path) -> None:
    done = run("log2/4711", "--text")
    assert done.exit_code == 0, done.output
    assert not (job / "report.html").exists()
    assert "Ranks are idle for 25 % of a step's pipeline" in done.output
    assert "step 2: 0.0120 s" in done.output
    assert "\x1b" not in done.output


def test_a_run_is_over_for_the_report_when_it_is_for_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vjob report` said that a job had not ended for a second after status said DONE."""
    folder = RunFolder(tmp_path / "demo-1")
    folder.path.mkdir()
    write_plan(folder.plan, make_plan())
    jobs = (JobRecord(id="77", group=None),)
    record = replace(make_record(folder), state=SUBMITTED, scheduler="slurm", jobs=jobs)
    write_record(folder, record)
    info = SchedulerJob(id="77", state=JobState.RUNNING, native_word="RUNNING")
    view = RunView(run=folder, record=record, infos=(info,))
    assert goes_on(view)
    attempt = folder.attempt(0)
    attempt.path.mkdir()
    attempt.outcome.parent.mkdir(exist_ok=True)
    outcome = {"code": 0, "reason": "all 2 ranks exited 0", "ended": 5.0}
    write_json(attempt.outcome, outcome)
    desk = SchedulerDesk(folder, "slurm", view=lambda _: view)
    verdict = judge(RunReader(folder, desk=desk).read())
    assert goes_on(view) is (verdict.health is not Health.DONE)


def test_the_page_lands_in_the_folder_or_where_it_is_asked_for(job: Path) -> None:
    done = run("log2/4711")
    assert done.exit_code == 0, done.output
    page = (job / "report.html").read_text()
    assert str(job / "report.html") in done.output and "FINDINGS" not in done.output
    assert "Ranks are idle for 25 % of a step&#39;s pipeline" in page
    done = run("log2/4711/n0.out", "-o", "here.html")
    assert done.exit_code == 0, done.output
    assert "<title>n0.out - vjob report</title>" in Path("here.html").read_text()
    assert "default-src 'none'; script-src 'unsafe-inline'; style" in page, "it loads nothing"


def test_tables_as_csv_and_parquet_are_the_same(job: Path) -> None:
    for kind in ("csv", "parquet"):
        done = run(str(job), "--export", kind, "-o", "tables")
        assert done.exit_code == 0, done.output
        assert done.output.count("wrote") == 1 and "FINDINGS" not in done.output
    for name in ("events", "steps", "ranks", "losses"):
        as_csv = pd.read_csv(f"tables/{name}.csv", keep_default_na=False, na_values=[""])
        as_parquet = pd.read_parquet(f"tables/{name}.parquet")
        assert len(as_csv) == len(as_parquet) > 0
        assert list(as_csv.columns) == list(as_parquet.columns)
    assert len(pd.read_csv("tables/events.csv")) == 2 * 4 * 6


def test_an_export_has_the_jobs_name_where_none_is_given(job: Path) -> None:
    for kind, name in (("csv", "4711-csv"), ("perfetto", "4711.perfetto.json.gz")):
        done = run(str(job), "--export", kind)
        assert done.exit_code == 0 and f" {name}" in done.output and Path(name).exists()


def test_what_has_no_trace_is_not_exported_as_one(job: Path) -> None:
    done = run(str(job / "n0.out"), "--export", "perfetto")
    assert done.exit_code == 1 and "no rank wrote a trace" in done.output
    assert "--export parquet" in done.output and not Path("n0.out.perfetto.json.gz").exists()


def test_a_timeline_for_perfetto(job: Path) -> None:
    done = run(str(job), "--export", "perfetto", "-o", "trace.json.gz")
    assert done.exit_code == 0, done.output
    with gzip.open("trace.json.gz", "rt") as handle:
        events = json.load(handle)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert f"{len(slices)} slices" in done.output
    steps = {event["args"]["step"] for event in slices}
    work = [event for event in slices if event["name"] != "wait"]
    assert len(work) == len(steps) * 12
    assert {event["name"] for event in work} >= {"forward 0", "backward 2"}
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert {"stage 0", "stage 1", "rank 0 n0"} <= set(names)
    # Three activations and three gradients a step, each from inside a slice to inside a slice.
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == 6 * len(steps)
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] + 0.01
        assert start["pid"] != ends[number]["pid"]
        for end in (start, ends[number]):
            assert any(
                item["pid"] == end["pid"]
                and item["tid"] == end["tid"]
                and item["ts"] - 0.01 <= end["ts"] <= item["ts"] + item["dur"] + 0.01
                for item in work
            )
    # Slices of a thread do not overlap: Perfetto would drop them.
    for thread in {event["tid"] for event in slices}:
        own = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == thread
        )
        pairs = itertools.pairwise(own)
        assert all(after[0] >= before[1] - 0.01 for before, after in pairs)


@pytest.mark.parametrize("word", ["nothing", "./nothing", "."])
def test_what_is_no_job_is_said(job: Path, word: str) -> None:
    done = run(word)
    assert done.exit_code == 2
    assert "Traceback" not in done.output and "vjob: " in done.output


def test_a_folder_that_cannot_be_written_is_said(job: Path) -> None:
    Path("tables").write_text("a file")
    done = run(str(job), "--export", "perfetto", "-o", "none/trace.json.gz")
    assert done.exit_code == 2 and "none/trace.json.gz: the folder none does not" in done.output


def test_the_figures_and_findings_as_json(job: Path) -> None:
    done = run(str(job), "--json")
    value = json.loads(done.stdout)
    assert done.exit_code == 0 and not (job / "report.html").exists()
    assert value["job"] == job.name and value["headline"]["state"]
    assert {"format", "is_partial", "time", "findings"} <= value.keys()
    assert all(one["sentence"] and one["evidence"] for one in value["findings"])
    assert sum(one["share"] for one in value["time"]) >= 0.99 or not value["time"]


@pytest.mark.parametrize(
    ("state", "verdict", "message", "said"),
    [
        (
            "ended",
            "CANCELLED",
            "cancelled with vjob cancel",
            "CANCELLED: cancelled with vjob cancel",
        ),
        ("ended", "COMPLETED", "all 2 ranks exited 0", "COMPLETED: all 2 ranks exited 0"),
        ("refused", "", "no such queue", "REFUSED: no such queue"),
        ("submitted", "", "", "UNKNOWN: local has forgotten the job, and it left no outcome"),
    ],
)
def test_a_run_is_as_every_other_command_says(
    job: Path, state: str, verdict: str, message: str, said: str
) -> None:
    """Its events alone called a run that somebody cancelled `failed`."""
    folder = RunFolder(job)
    attempt = folder.attempt(0)
    attempt.path.mkdir()
    (job / "trace").rename(attempt.path / "trace")
    append_event(folder.vjob_events, "started", attempt=0)
    append_event(folder.vjob_events, "ended", attempt=0, code=143, reason="told to end")
    facts = {"state": state, "verdict": verdict, "message": message, "scheduler": "local"}
    write_record(folder, replace(make_record(folder), **facts))  # type: ignore[arg-type]
    done = run(str(job), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["headline"]["state"] == said
    if state != "submitted":
        assert str(vjob.job(job).tables.job.state) == said
