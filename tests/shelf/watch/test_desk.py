"""`vjob watch` of a run: what it prints, notes, tells and does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.command import PROGRAMS, ROOT, Vjob, read_out, wait_for
from tests.shelf.watch.test_watch import make_run, make_snapshot, make_verdict
from varuna_core.records.record import append_event, read_events
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.shelf.watch import desk as watch_desk
from vjob.shelf.watch.desk import WatchOptions, read_last_news, run_watch
from vjob.shelf.watch.notify import Channels
from vjob.shelf.watch.watch import FINE

Watched = Callable[..., int]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Runs a watch of a run folder whose looks come to these verdicts, and no further."""
    monkeypatch.setattr(watch_desk.Desk, "listen", lambda desk: None)

    def start(run: RunFolder, verdicts: Sequence[Verdict], **options: object) -> int:
        left = [*verdicts]

        def look() -> tuple[Snapshot, Verdict]:
            return make_snapshot(run.path), left.pop(0)

        monkeypatch.setattr(watch_desk.Desk, "wait", lambda desk, seconds: bool(left))
        monkeypatch.setattr(watch_desk, "open_look", lambda job, here: look)
        return run_watch(str(run.path), Path("/"), WatchOptions(every_s=0.001, **options))  # type: ignore[arg-type]

    return start


def stalled(**changes: object) -> Verdict:
    return make_verdict(Health.STALLED, node="b2", rank=3, advice="vjob stacks 12", **changes)


def test_changes_are_printed_and_become_events(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    healthy, dead = make_verdict(Health.HEALTHY), make_verdict(Health.DEAD)
    assert watched(run, [healthy, healthy, stalled(), stalled(), stalled(), dead, dead]) == 10
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "it is" in line] == ["HEALTHY", "STALLED", "DEAD"]
    assert lines[2].strip() == "vjob stacks 12"
    events = [event for event in read_events(run) if event["kind"] == "verdict"]
    assert [event["health"] for event in events] == ["HEALTHY", "STALLED", "DEAD"]
    assert (events[1]["node"], events[1]["rank"], events[1]["rule"]) == ("b2", 3, "stalled")
    notices = [event for event in read_events(run) if event["kind"] == "notice"]
    assert [(event["news"], event["to"]) for event in notices] == [("STALLED", []), ("DEAD", [])]
    assert read_last_news(run) == "DEAD"


def test_json_lines_are_for_scripts(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    watched(run, [stalled(), stalled(), stalled(), make_verdict(Health.DONE)], as_json=True,
            on=("STALLED=exclude",))  # fmt: skip
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value["kind"] for value in values] == ["verdict", "action", "verdict"]
    assert (values[0]["health"], values[0]["exit_code"]) == ("STALLED", 14)
    assert values[1]["done"].startswith("b2 should be avoided")
    events = [event for event in read_events(run) if event["kind"] == "action"]
    assert [(event["verb"], event["node"]) for event in events] == [("exclude", "b2")]


def test_a_notice_that_reached_nobody_is_told_by_the_next_watch(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert watched(run, [stalled()] * 4, command="exit 3") == 14
    assert "command: exited 3" in capsys.readouterr().err
    assert read_last_news(run) == FINE
    heard = tmp_path / "heard"
    watched(run, [stalled()] * 4, command=f"cat >> {heard}")
    assert [json.loads(line)["news"] for line in heard.read_text().splitlines()] == ["STALLED"]
    assert read_last_news(run) == "STALLED"
    watched(run, [stalled()] * 4, command=f"cat >> {heard}")
    assert len(heard.read_text().splitlines()) == 1


def test_quiet_notifies_nobody(watched: Watched, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    heard = tmp_path / "heard"
    run.resolved.write_text(f"notify: {{command: 'cat > {heard}'}}\n")
    watched(run, [make_verdict(Health.DONE)] * 3, quiet=True)
    assert not heard.exists()
    run.vjob_events.unlink()
    watched(run, [make_verdict(Health.DONE)] * 3)
    assert json.loads(heard.read_text())["news"] == "DONE"


def test_events_that_cannot_be_written_end_no_watch(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    run.vjob_events.mkdir()
    assert watched(run, [make_verdict(Health.DONE)] * 3) == 0
    assert "cannot be written" in capsys.readouterr().err


def test_a_bare_folder_is_watched_and_never_acted_on(watched: Watched, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert watched(run, [make_verdict(Health.DONE)] * 3) == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="folder of logs"):
        watched(run, [stalled()], on=("STALLED=cancel",))


CONF = """
name: fate
program: {{script: {script}, args: ["-1", hang]}}
cluster:
  scheduler: local
  walltime_min: 2
  grace_s: 2
  nodes: [{{group: m, count: 1, ranks: 2}}]
"""


def test_cancel_ends_a_real_run_once_the_stall_has_held(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vjob = Vjob(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    run = vjob.submit(CONF.format(script=PROGRAMS / "fail_as_told.py"))
    wait_for(lambda: read_out(run).count("ready") == 2, 60, lambda: vjob.explain(run))
    healthy = make_verdict(Health.HEALTHY)
    watched(run, [healthy, stalled(), healthy, stalled(), healthy], 
            on=("STALLED=cancel",))  # fmt: skip
    assert vjob.status(str(run.path))["verdict"]["exit_code"] == 0, (
        "a flapping verdict cancels nothing"
    )
    watched(run, [stalled(), stalled(), stalled(), make_verdict(Health.DEAD)],
            on=("STALLED=cancel",))  # fmt: skip
    assert vjob.wait_over(run)["verdict"] == "CANCELLED"
    actions = [event for event in read_events(run) if event["kind"] == "action"]
    assert [(event["verb"], event["because"]) for event in actions] == [("cancel", "STALLED")]


ALONE = """
import sys
from pathlib import Path
from vjob.shelf.watch import desk as watch_desk
from tests.shelf.watch.test_desk import make_snapshot, stalled
folder = Path(sys.argv[1])
watch_desk.open_look = lambda job, here: lambda: (make_snapshot(folder), stalled())
sys.exit(watch_desk.run_watch(str(folder), folder, watch_desk.WatchOptions(every_s=3600)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_the_last_verdict(number: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    child = subprocess.Popen(
        [sys.executable, "-c", ALONE, str(run.path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    assert "STALLED" in child.stdout.readline()
    child.send_signal(number)
    child.communicate(timeout=30)
    assert child.returncode == 14


def test_the_time_that_was_asked_for_ends_a_watch() -> None:
    def make(end: float | None) -> watch_desk.Desk:
        return watch_desk.Desk(None, None, Channels(), [], end, as_json=False)

    assert not make(time.monotonic() - 1).wait(3600)
    assert make(None).wait(0.001)
    assert make(time.monotonic() + 3600).wait(0.001)
    left = make(None)
    left.leave(signal.SIGUSR2, None)
    assert not left.wait(3600)


def test_events_of_others_do_not_disturb(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    append_event(run.vjob_events, "cancel-asked", now=True)
    append_event(run.vjob_events, "notice", news="SLOW", to=["command"], failed=["command"])
    assert read_last_news(run) == FINE
