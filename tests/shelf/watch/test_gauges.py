"""`vjob watch --openmetrics`: all runs, or one, in a file that Prometheus' own parsers read."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.shelf.watch.test_watch import make_snapshot, make_verdict
from tests.varuna_core.agent.track.readers import read_prometheus
from varuna_core.agent.track.openmetrics import HELP, render_gauges
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.model.snapshot import Health, Point, Progress
from vjob.shelf.watch.gauges import (
    MOST_ENDED,
    GaugeFile,
    build_gauges,
    choose_rows,
    export_look,
    export_runs,
)


def make_row(run: str, health: Health = Health.HEALTHY, **changes: object) -> RunRow:
    verdict = make_verdict(health)
    row = RunRow(
        run=run, name="gpt", folder="/run", jobs=("12",), state="RUNNING", is_over=False,
        submitted=90.0, age_s=10.0, verdict=verdict, message="",
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def label(run: str, name: str = "gpt", **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"run": run, "name": name, **more}.items()))


def test_of_two_runs_of_one_id_one_has_the_series() -> None:
    """In two folders, as those of a sweep with one name: node exporter refuses a series twice."""
    old = make_row("lr-1", Health.DEAD, folder="/a", is_over=True, step=3)
    live, new = (make_row("lr-1", folder=f"/{step}", step=step) for step in (4, 5))
    for rows, step in (([old, live, new], 5), ([live, replace(old, folder="/b")], 4)):
        gauges = list(build_gauges(rows, 100.0))
        assert len({(gauge.name, gauge.labels) for gauge in gauges}) == len(gauges)
        assert [gauge.value for gauge in gauges if gauge.name == "vjob_step"] == [step]
        states = [gauge.labels[2] for gauge in gauges if gauge.name == "vjob_run_state"]
        assert states == [("state", "HEALTHY")]


def test_each_run_has_its_series_and_only_numbers_that_are_known() -> None:
    rows = [
        make_row("a", step=7, num_steps=9, step_s=0.5, left_s=1.0, loss=float("nan"), attempt=2),
        make_row("b", Health.PENDING),
        make_row('c"\\\n', Health.DEAD, is_over=True, step=3),
    ]
    gauges = list(build_gauges(rows, 100.0))
    assert {gauge.name for gauge in gauges} <= set(HELP)
    found = read_prometheus(render_gauges(gauges))
    assert found["vjob_run_up"] == {label("a"): 1.0, label("b"): 0.0, label('c"\\\n'): 0.0}
    states = {labels: 1.0 for labels in (label("a", state="HEALTHY"), label("b", state="PENDING"))}
    assert found["vjob_run_state"] == {**states, label('c"\\\n', state="DEAD"): 1.0}
    assert found["vjob_step"] == {label("a"): 7.0, label('c"\\\n'): 3.0}
    assert (found["vjob_steps"], found["vjob_attempt"]) == ({label("a"): 9.0}, {label("a"): 2.0})
    assert found["vjob_step_seconds"] == {label("a"): 0.5}
    assert found["vjob_left_seconds"] == {label("a"): 1.0}
    assert str(found["vjob_loss"][label("a")]) == "nan"
    assert found["vjob_submitted_timestamp_seconds"][label("b")] == 90.0


def test_runs_that_are_over_do_not_fill_the_database() -> None:
    """Those that go on are all there."""
    over = [make_row(f"o{at}", Health.DONE, is_over=True) for at in range(MOST_ENDED + 5)]
    unread = make_row("unread", is_over=True, verdict=None)
    rows = [make_row("first"), *over, unread, make_row("last")]
    assert choose_rows(rows) == [rows[0], *over[5:], rows[-1]]


def test_a_file_that_no_exporter_would_read_is_refused(tmp_path: Path) -> None:
    for name, why in (("runs.txt", "must end in .prom"), ("missing/runs.prom", "is no folder")):
        with pytest.raises(InputError, match=why):
            GaugeFile(tmp_path / name, print)


def test_what_fails_is_said_once_and_tried_again(tmp_path: Path) -> None:
    """The folder goes and comes back; then the scheduler does not answer, and does again."""
    folder = tmp_path / "textfile"
    folder.mkdir()
    said: list[str] = []
    file = GaugeFile(folder / "me.prom", said.append)
    looks = iter([0, 1, 2, 3, 4, 5, 6])
    now = 0

    def read() -> tuple[list[RunRow], str]:
        if now == 1:
            folder.rmdir()
        if now == 3:
            folder.mkdir()
        if now == 6:
            raise UncertainError("squeue is away")
        return ([make_row("a", step=now)] if now else []), "slow" if now in (4, 5) else ""

    def wait() -> bool:
        nonlocal now
        if now == 0:
            (folder / "me.prom").unlink()
        now = next(looks, 7)
        return now < 7

    next(looks)
    export_runs(file, read, lambda: 100.0, wait)
    assert [text.rpartition(": ")[2] for text in said] == [
        "No such file or directory", "slow", "squeue is away",
    ]  # fmt: skip
    assert not file.is_well
    assert read_prometheus((folder / "me.prom").read_text())["vjob_step"] == {label("a"): 5.0}


def test_the_looks_of_a_watch_of_one_job_are_written_too(tmp_path: Path) -> None:
    progress = Progress(step=4, points=(Point(step=3, loss=2.0), Point(step=4)))
    snapshot, verdict = make_snapshot(progress=progress, attempt=1), make_verdict(Health.STALLED)
    path = tmp_path / "one.prom"
    look = export_look(lambda: (snapshot, verdict), GaugeFile(path, print), "gpt")
    assert look() == (snapshot, verdict)
    found = read_prometheus(path.read_text())
    assert found["vjob_run_state"] == {label("gpt-1", state="STALLED"): 1.0}
    assert found["vjob_loss"] == {label("gpt-1"): 2.0}
    assert found["vjob_updated_timestamp_seconds"] == {label("gpt-1"): 1e9}


CONF = """
name: {name}
program: {{script: {fate}, args: ["-1", "hang"]}}
cluster:
  {{scheduler: local, walltime_min: 2, grace_s: 2, nodes: [{{group: m, count: 1, ranks: 1}}]}}
"""


def test_the_command_writes_all_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    vjob, path = Vjob(tmp_path), tmp_path / "me.prom"
    assert "give a JOB" in vjob("watch", code=2).stderr
    both = ("watch", "--openmetrics", str(path), "--mail", "me@example.org")
    assert "no notices" in vjob(*both, code=2).stderr
    run = vjob.submit(CONF.format(name="lives", fate=PROGRAMS / "fail_as_told.py"))
    wait_for(lambda: "ready" in read_out(run), 60, lambda: vjob.explain(run))
    child = vjob.start("watch", "--openmetrics", str(path), "--every", "1", new_session=True)
    wait_for(path.exists, 60)
    labels = label(run.name, "lives")
    assert read_prometheus(path.read_text())["vjob_run_up"] == {labels: 1.0}
    vjob("cancel", "last", "--now")
    cancelled = {label(run.name, "lives", state="CANCELLED"): 1.0}
    wait_for(lambda: read_prometheus(path.read_text())["vjob_run_state"] == cancelled, 60)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 0
    assert path.stat().st_mode & 0o777 == 0o644
    assert [name for name in os.listdir(tmp_path) if "prom" in name] == ["me.prom"]
    vjob("watch", str(run.path), "--quiet", "--once", "--openmetrics", str(path), code=16)
    assert read_prometheus(path.read_text())["vjob_run_up"] == {labels: 0.0}
