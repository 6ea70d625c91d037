"""What the scheduler says, or does not say in time."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.runs.test_outcome import make_record
from tests.jobs.stub_programs import StubPrograms
from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.restarts import JobFacts, note_requeue
from varuna_core.records import record as records
from varuna_core.records.plan import write_plan
from varuna_core.records.record import JobEnd, JobRecord, read_record, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.model.text import render, render_json
from vjob.jobs.monitor.readers import run as readers
from vjob.jobs.monitor.readers import scheduler as scheduling
from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
from vjob.jobs.runs import find
from vjob.jobs.runs.find import RunView
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.slurm.commands import parse_squeue_output

ROW = (
    "{id}|77|{offset}|{word}|n0|{reason}|2|2026-11-22T08:00:00|vjob:demo-1||10:00|N/A|N/A|(null)|0|"
)

DOWN = (
    "NodeName=b1 Arch=x86_64 State=DOWN+NOT_RESPONDING ThreadsPerCore=1 "
    "Reason=Not responding [root@2026-11-28T10:51:27]"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "demo-1")
    run.path.mkdir()
    write_plan(run.plan, make_plan())
    record = replace(
        make_record(run),
        state=records.SUBMITTED,
        scheduler="slurm",
        verdict="",
        submitted=time.time(),
        jobs=(JobRecord(id="77", group=None),),
    )
    write_record(run, record)
    return run


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubPrograms:
    tools = StubPrograms(tmp_path)
    monkeypatch.setenv("PATH", tools.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tools


def say(tools: StubPrograms, *rows: str) -> None:
    tools.add("squeue", "".join(f"print({row!r})\n" for row in rows))


def view_of(run: RunFolder, *infos: SchedulerJob, problem: str = "") -> RunView:
    return RunView(run=run, record=make_record(run), infos=infos, problem=problem)


def age_record(run: RunFolder) -> None:
    """As if the run had been submitted an hour ago: nothing about it has changed since."""
    hour_ago = time.time() - 3600
    os.utime(run.record, (hour_ago, hour_ago))


def test_one_question_for_many_looks_however_many_components(
    run: RunFolder, tools: StubPrograms
) -> None:
    age_record(run)
    rows = [ROW.format(id=77 + at, offset=at, word="RUNNING", reason="None") for at in range(16)]
    say(tools, *rows)
    for name in ("scontrol", "sacct", "sinfo"):
        tools.add(name)
    reader = open_reader(str(run.path), run.path)
    for _ in range(3):
        found = reader.read()
        assert len(found.scheduler.jobs) == 16 and found.state == "RUNNING"
        assert len(tools.calls("squeue")) == 1
    assert not tools.calls("sinfo")
    (nodes,), (starts,) = tools.calls("scontrol"), tools.calls("sacct")
    assert nodes["argv"][-2:] == ["node", "n0"] and "-D" in starts["argv"]  # type: ignore[index, operator]
    assert found.scheduler.jobs[3].id == "77+3" and found.scheduler.jobs[0].restarts == 2
    assert 0 <= found.scheduler.age_s < 60 and found.scheduler.problem == ""


def age_answer(tools: StubPrograms) -> None:
    """Change the reader so that it asked squeue twelve seconds ago."""
    (cache,) = (tools.folder.parent / "state/vjob/scheduler").glob("*.squeue.json")
    entries = json.loads(cache.read_text())
    for entry in entries.values():
        entry["asked"] -= 12
    cache.write_text(json.dumps(entries))
    broker._memory.clear()


def test_a_held_job_that_was_just_cancelled_needs_no_release(
    run: RunFolder, tools: StubPrograms
) -> None:
    """`scontrol release` was advised for 24 s after its scancel."""
    age_record(run)
    say(tools, ROW.format(id=77, offset=0, word="PENDING", reason="JobHeldUser"))
    assert JudgedReader(open_reader(str(run.path), run.path)).read()[1].never_starts
    age_answer(tools)
    say(tools, ROW.format(id=77, offset=0, word="CANCELLED", reason="None"))
    _, verdict = JudgedReader(open_reader(str(run.path), run.path)).read()
    assert "release" not in verdict.advice and not verdict.never_starts


def test_a_shared_answer_is_shown_with_its_age(run: RunFolder, tools: StubPrograms) -> None:
    age_record(run)
    say(
        tools, ROW.format(id=77, offset="N/A", word="RUNNING", reason="None").replace("|77|", "|0|")
    )
    open_reader(str(run.path), run.path).read()
    age_answer(tools)
    found = open_reader(str(run.path), run.path).read()
    assert 12 <= found.scheduler.age_s < 25 and len(tools.calls("squeue")) == 1
    assert re.search(
        r"\n  job 77 .*\n  scheduler asked 1\d s ago\n", render(found, None, all_nodes=True)
    )
    assert json.loads(render_json(found, None))["scheduler"]["age_s"] == found.scheduler.age_s


def test_a_pending_job_has_its_reason_and_start_and_a_running_one_neither(
    run: RunFolder, tools: StubPrograms
) -> None:
    say(tools, ROW.format(id=77, offset=0, word="PENDING", reason="Resources"))
    (row,) = open_reader(str(run.path), run.path).read().scheduler.jobs
    assert (row.reason, row.start) == ("Resources", "2026-11-22T08:00:00")
    say(tools, ROW.format(id=77, offset=0, word="RUNNING", reason="Resources"))
    (row,) = open_reader(str(run.path), run.path).read().scheduler.jobs
    assert (row.reason, row.start) == ("", "")


def test_a_word_that_nobody_knows_is_kept(run: RunFolder, tools: StubPrograms) -> None:
    say(tools, ROW.format(id=77, offset=0, word="TELEPORTING", reason="None"))
    found = open_reader(str(run.path), run.path).read()
    (row,) = found.scheduler.jobs
    assert (row.state, row.word, found.state) == ("UNKNOWN", "TELEPORTING", "UNKNOWN")


def test_a_controller_that_does_not_answer_leaves_the_last_good_word_and_its_age(
    run: RunFolder, tools: StubPrograms
) -> None:
    say(tools, ROW.format(id=77, offset=0, word="RUNNING", reason="None"))
    reader = open_reader(str(run.path), run.path)
    assert reader.read().state == "RUNNING"
    tools.add("squeue", "print('slurm_load_jobs error: timed out', file=sys.stderr); sys.exit(1)")
    found = reader.read()
    assert "timed out" in found.scheduler.problem and found.record_state == "submitted"
    assert [job.state for job in found.scheduler.jobs] == ["RUNNING"]
    say(tools, ROW.format(id=77, offset=0, word="RUNNING", reason="None"))
    assert reader.read().scheduler.problem == ""


def test_a_question_that_hangs_is_not_waited_for_and_asked_once(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "FIRST_S", 0.05)
    monkeypatch.setattr(scheduling, "LATER_S", 0.01)
    free, asked = threading.Event(), []
    good = view_of(run, SchedulerJob(id="77", state=JobState.RUNNING, native_word="RUNNING"))

    def view(run: RunFolder) -> RunView:
        asked.append(run)
        assert free.wait(60)
        return good

    clock = iter(range(100))
    desk = SchedulerDesk(run, "slurm", view=view, now=lambda: float(next(clock)))
    for _ in range(3):
        desk.ask()
        seen, scheduler = desk.answer()
        assert seen is None and "has not answered" in scheduler.problem
    assert len(asked) == 1
    free.set()
    monkeypatch.setattr(scheduling, "FIRST_S", 60.0)
    seen, scheduler = desk.answer()
    assert seen is good and scheduler.problem == ""
    assert [job.id for job in scheduler.jobs] == ["77"]


def test_the_age_of_the_last_good_word_grows(run: RunFolder) -> None:
    views = [view_of(run, SchedulerJob(id="77", state=JobState.RUNNING, native_word="RUNNING"))]
    views += [view_of(run, problem="down"), view_of(run, problem="down")]
    seconds = [0.0]
    desk = SchedulerDesk(run, "slurm", view=lambda _: views.pop(0), now=lambda: seconds[0])
    ages = []
    for _ in range(3):
        desk.ask()
        ages.append(desk.answer()[1].age_s)
        seconds[0] += 100.0
    assert ages == [0.0, 100.0, 200.0]


def test_an_error_of_the_first_question_is_the_users(run: RunFolder) -> None:
    def view(run: RunFolder) -> RunView:
        raise InputError("no such thing")

    desk = SchedulerDesk(run, "slurm", view=view)
    desk.ask()
    with pytest.raises(InputError, match="no such thing"):
        desk.answer()


def test_silent_nodes_are_asked_about_now_and_then(run: RunFolder, tools: StubPrograms) -> None:
    tools.add("scontrol", f"print({DOWN!r})")
    view = view_of(run, SchedulerJob(id="77", state=JobState.RUNNING, native_word="RUNNING"))
    view = replace(view, record=replace(view.record, scheduler="slurm"))
    seconds = [0.0]
    desk = SchedulerDesk(run, "slurm", view=lambda _: view, now=lambda: seconds[0])
    for _ in range(3):
        desk.ask(["b1", "b2"])
        said = {"b1": "down+not_responding (Not responding)"}
        assert desk.answer()[1].lost_nodes == said
        seconds[0] += 1
    assert len(tools.calls("scontrol")) == 1
    assert "b[1-2]" in tools.calls("scontrol")[0]["argv"]  # type: ignore[operator]


def end_record(run: RunFolder, *ends: JobEnd) -> None:
    record = replace(
        make_record(run),
        state=records.ENDED,
        scheduler="slurm",
        verdict="COMPLETED",
        jobs=(JobRecord(id="77", group=None),),
        job_ends=ends,
    )
    write_record(run, record)


def test_a_run_that_is_over_keeps_its_jobs(run: RunFolder, tools: StubPrograms) -> None:
    """`.scheduler.jobs` was empty some seconds after the end."""
    tools.add("squeue", "")
    shown = "JobId=77 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 NodeList=n[0-1] "
    shown += "StartTime=2026-11-22T08:00:00 EndTime=2026-11-22T08:05:00 TimeLimit=00:10:00"
    tools.add("scontrol", f"print({shown!r})")
    tools.add("sacct", "")
    first = open_reader(str(run.path), run.path).read()
    broker._memory.clear()
    later = open_reader(str(run.path), run.path).read()
    assert (first.record_state, later.record_state) == ("ended", "ended")
    for found in (first, later):
        (row,) = found.scheduler.jobs
        assert (row.id, row.state, row.nodes, row.exit_code) == ("77", "FAILED", "n[0-1]", "3:0")
        assert (row.limit_s, (row.ends or 0) - (row.started or 0)) == (600.0, 300.0)


def test_an_old_record_has_its_jobs_ids_at_least(run: RunFolder, tools: StubPrograms) -> None:
    end_record(run)
    (row,) = open_reader(str(run.path), run.path).read().scheduler.jobs
    assert (row.id, row.state, row.ends) == ("77", "COMPLETED", None)


def test_a_run_that_ended_is_known_while_the_controller_is_away(
    run: RunFolder, tools: StubPrograms
) -> None:
    """Ended runs were UNKNOWN, while accounting had their end."""
    age_record(run)
    away = "sys.exit('slurm_load_jobs error: Unable to contact slurm controller')"
    for name in ("squeue", "scontrol"):
        tools.add(name, away)
    tools.add("sacct", "print('77|COMPLETED|n0|None|0:0|x|x|00:10:00|')")
    found = open_reader(str(run.path), run.path).read()
    assert (found.record_state, found.state, found.scheduler.problem) == ("ended", "COMPLETED", "")


@pytest.mark.parametrize("word", ["RUNNING", "PENDING", "PREEMPTED", "NODE_FAIL"])
def test_what_may_go_on_is_not_known_while_the_controller_is_away(
    run: RunFolder, tools: StubPrograms, word: str
) -> None:
    age_record(run)
    away = "sys.exit('slurm_load_jobs error: Unable to contact slurm controller')"
    for name in ("squeue", "scontrol"):
        tools.add(name, away)
    tools.add("sacct", f"print('77|{word}|n0|None|0:0|x|x|00:10:00|')")
    found = open_reader(str(run.path), run.path).read()
    assert found.record_state == "submitted" and "Unable to contact" in found.scheduler.problem


def test_the_cause_of_a_requeue_is_asked_for_once(run: RunFolder, tools: StubPrograms) -> None:
    age_record(run)
    say(
        tools,
        ROW.format(id=77, offset="N/A", word="PENDING", reason="BeginTime").replace(
            "|77|", "|N/A|"
        ),
    )
    tools.add("sacct", "print('77|PREEMPTED\\n77|REQUEUED\\n77|PENDING')")
    reader = open_reader(str(run.path), run.path)
    for _ in range(3):
        (row,) = reader.read().scheduler.jobs
        assert row.earlier == ("preempted", "requeued") and row.waiting == "begin-time"
    assert len(tools.calls("sacct")) == 1


def test_a_preemption_that_the_batch_script_made_a_requeue_is_one(
    run: RunFolder, tools: StubPrograms
) -> None:
    """It saves, and requeues its job within the grace time: accounting says REQUEUED."""
    age_record(run)
    row = ROW.format(id=77, offset="N/A", word="PENDING", reason="BeginTime")
    say(tools, row.replace("|77|", "|N/A|"))
    tools.add("sacct", "print('77|REQUEUED\\n77|REQUEUED\\n77|PENDING')")
    note_requeue(run, "77", 1, JobFacts(is_running=True, is_preempted=True, restarts=1))
    note_requeue(run, "78", 0, JobFacts(is_running=True, is_preempted=True, restarts=1))
    (found,) = open_reader(str(run.path), run.path).read().scheduler.jobs
    assert found.earlier == ("requeued", "preempted")
    tools.add("sacct", "sys.exit('Slurm accounting storage is disabled')")
    broker._memory.clear()
    note_requeue(run, "77", 0, JobFacts(is_running=True, is_preempted=True, restarts=0))
    index = tools.folder.parent / "state/vjob/scheduler"
    for file in index.glob("*.sacct.json"):
        file.unlink()
    (found,) = open_reader(str(run.path), run.path).read().scheduler.jobs
    assert found.earlier == ("preempted", "preempted"), "a site without accounting"


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_colleagues_job_that_the_site_hides_is_not_forgotten(
    run: RunFolder, tools: StubPrograms, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """With PrivateData=jobs, a run of a colleague that went on was over after ten minutes."""
    for module in (find, readers):
        monkeypatch.setattr(module, "is_ours", lambda run: is_ours)
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, submitted=time.time() - 3600))
    age_record(run)
    tools.add("squeue", "")
    tools.add("scontrol", "sys.exit('slurm_load_jobs error: Invalid job id specified')")
    tools.add("sacct", "print('77|RUNNING|n0|None|0:0|x|Unknown|00:10:00|')")
    found = open_reader(str(run.path), run.path).read()
    assert found.record_state == ("ended" if is_ours else "submitted")
    assert ("does not show the job" in found.message) is not is_ours


def test_no_rows_are_no_jobs() -> None:
    assert parse_squeue_output("") == []
