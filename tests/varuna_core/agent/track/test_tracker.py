"""Attempts with a tracker beside their ranks, read back by the tools' own readers."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pythons import OLDEST, list_pythons
from tests.varuna_core.agent.local_run import (
    Stage,
    make_group,
    make_plan,
    shell,
    wait_until,
)
from tests.varuna_core.agent.track.readers import (
    MLFLOW,
    read_mlflow,
    read_prometheus,
    read_tensorboard,
    read_wandb,
)
from varuna_core.agent.track import points, process, tracker
from varuna_core.agent.track.points import Point
from varuna_core.agent.track.tools import TOOLS, Tensorboard, Tool, shorten
from varuna_core.records.logs.tail import Follower
from varuna_core.records.plan import TrackPlan, write_plan
from varuna_core.records.record import read_events

MakeStage = Callable[..., Stage]
ATTEMPT_S = 120.0
"""For an attempt to end: wandb and mlflow take seconds to import where processors are shared."""
STEPS = 'i=$BEGIN; while [ $i -lt $END ]; do i=$((i+1)); echo "step $i/9 loss 0.$i"; done; '
KEY = "0123456789abcdef0123456789abcdef01234567"


def make_track(**tools: Any) -> TrackPlan:
    return TrackPlan(id="demo-1-aabb", python=sys.executable, config={"train.steps": 9}, **tools)


def play(stage: Stage, attempt: int, begin: int, end: int, more: str = "", **env: str) -> int:
    """One attempt that prints some steps; the node's exit code."""
    command = shell(f"BEGIN={begin}; END={end}; {STEPS}{more}")
    write_plan(stage.run.plan, make_plan(command=command, track=stage.plan.track))
    stage.open(attempt=attempt)
    agent = stage.start(0, attempt, **env)
    code = agent.wait(timeout=ATTEMPT_S)
    stage.call("close", "--status", str(code), attempt=attempt)
    return code


def list_said(stage: Stage) -> list[str]:
    return [event["said"] for event in read_events(stage.run) if event["kind"] == "tracking"]


def test_attempts_that_failed_and_began_again_are_one_run_in_every_tool(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 0 trains steps 1 to 5 and fails; its newest checkpoint is that of step 3."""
    if not MLFLOW.is_dir():
        pytest.skip(f"MLflow is not in {MLFLOW}: make .venv/.installed-dev")
    monkeypatch.setattr(sys, "path", [*sys.path, str(MLFLOW)])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    metrics, store = tmp_path / "gpt.prom", str(tmp_path / "mlruns")
    track = make_track(
        wandb={"project": "p", "entity": None, "mode": "offline", "group": None, "tags": ["a"]},
        mlflow={"experiment": "e", "uri": store},
        tensorboard=True,
        openmetrics=str(metrics),
    )
    stage = make_stage(make_plan(track=track))
    assert play(stage, 0, 0, 5, "exit 3", PYTHONPATH=str(MLFLOW)) == 3
    assert read_mlflow(store, "e")[0]["status"] == "FAILED"
    assert read_prometheus(metrics.read_text())["vjob_step"] == {(("run", "demo-1"),): 5.0}
    assert play(stage, 1, 3, 9, PYTHONPATH=str(MLFLOW)) == 0
    assert list_said(stage) == []
    once = [(step, step / 10) for step in range(1, 10)]
    again = [(4, 0.4), (5, 0.5)]

    (run,) = read_mlflow(store, "e")
    assert run["metrics"]["loss"] == once
    assert run["metrics"]["repeated/loss"] == again
    assert "events/started" in run["metrics"]
    assert run["status"] == "FINISHED"
    assert (run["params"]["train.steps"], run["params"]["vjob_run"]) == ("9", "demo-1")
    assert run["tags"]["vjob_id"] == track.id

    scalars = read_tensorboard(stage.run.tensorboard)
    assert (scalars["loss"], scalars["repeated/loss"]) == (once, again)

    ids, rows, config = read_wandb(stage.run.track)
    assert ids == {track.id}
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == once
    marked = [(row["step"], row["repeated/loss"]) for row in rows if "repeated/loss" in row]
    assert marked == again
    assert [row["_step"] for row in rows] == list(range(len(rows))), "rows go on, too"
    assert config["train.steps"] == 9

    found = read_prometheus(metrics.read_text())
    run_label = (("run", "demo-1"),)
    assert (found["vjob_step"], found["vjob_attempt"]) == ({run_label: 9.0}, {run_label: 1.0})
    assert found["vjob_run_up"] == {run_label: 0.0}
    assert found["vjob_events"][(("kind", "started"), *run_label)] == 2.0


@pytest.mark.parametrize("version", [OLDEST, sys.version_info[:2]])
def test_a_missing_package_is_said_once_and_the_other_tools_go_on(
    make_stage: MakeStage, tmp_path: Path, version: tuple[int, int]
) -> None:
    """A bare Python, the oldest too: TensorBoard's files and the gauges need no package."""
    python = list_pythons().get(version)
    if python is None:
        pytest.skip("no Python 3.8 on this machine")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {python} -I -S "$@"\n')
    bare.chmod(0o700)
    track = TrackPlan(
        id="x",
        python=str(bare),
        config={},
        wandb={"project": "p", "mode": "offline"},
        mlflow={"experiment": "e", "uri": str(tmp_path / "mlruns")},
        tensorboard=True,
        openmetrics=str(tmp_path / "missing" / "gpt.prom"),
    )
    stage = make_stage(make_plan(track=track))
    assert play(stage, 0, 0, 3) == 0
    said = list_said(stage)
    assert sorted(text.partition(":")[0] for text in said) == ["mlflow", "openmetrics", "wandb"]
    assert f"install it for {python}" in next(text for text in said if "wandb" in text).replace(
        os.path.realpath(python), python
    )
    assert read_tensorboard(stage.run.tensorboard)["loss"] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_tracker_that_is_killed_leaves_the_training_alone_and_keeps_the_key_secret(
    make_stage: MakeStage,
) -> None:
    """The next attempt shows what the killed one did not."""
    stage = make_stage(make_plan(track=make_track(tensorboard=True)))
    go = stage.run.path / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done; "
    command = shell(f"BEGIN=0; END=4; {STEPS} {wait}")
    write_plan(stage.run.plan, make_plan(command=command, track=stage.plan.track))
    stage.open()
    agent = stage.start(0, WANDB_API_KEY=KEY)
    pid = wait_until(lambda: find_tracker(stage), "the tracker")
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"WANDB_API_KEY={KEY}".encode() in environ
    assert b"CUDA_VISIBLE_DEVICES=" in environ
    assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    wait_until((stage.run.track / "lock").exists, "the tracker's work")
    os.kill(pid, signal.SIGTERM)  # as Slurm does at the time limit: it stays until the ranks end
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: list_said(stage), "what became of the tracker")
    assert agent.poll() is None, "the rank still runs"
    go.touch()
    assert agent.wait(timeout=ATTEMPT_S) == 0
    assert list_said(stage) == ["the tracker was ended by SIGKILL; training continues without it"]
    assert agent.stderr is not None and "the tracker was ended" in agent.stderr.read()
    assert play(stage, 1, 4, 6) == 0
    scalars = read_tensorboard(stage.run.tensorboard)
    assert [step for step, _ in scalars["loss"]] == [1, 2, 3, 4, 5, 6]
    assert "repeated/loss" not in scalars
    for path in stage.run.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_a_job_that_is_told_to_end_does_not_wait_for_a_tracker_beyond_the_grace(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """Slurm kills what is left 30 s after its TERM, and with it the word how the run ended."""
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n")
    stubborn.chmod(0o700)
    track = replace(make_track(tensorboard=True), python=str(stubborn))
    stage = make_stage(make_plan(command=shell("sleep 100"), track=track))
    stage.open()
    agent = stage.start(0)
    wait_until(lambda: find_tracker(stage), "the tracker")
    agent.send_signal(signal.SIGTERM)
    agent.wait(timeout=process.END_S - 8)
    assert find_tracker(stage) is None


def find_tracker(stage: Stage) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"track" in words and str(stage.run.path).encode() in words:
            return int(path.parent.name)
    return None


def test_only_the_first_node_starts_a_tracker_and_no_rank_is_its_parent(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(
        make_plan(
            make_group("a", 2, 1), command=shell("sleep 100"), track=make_track(tensorboard=True)
        )
    )
    stage.open()
    stage.start_all()
    pid = wait_until(lambda: find_tracker(stage), "the tracker")
    assert read_parent(pid) == stage.nodes[0].pid
    for agent in stage.nodes:
        agent.send_signal(signal.SIGTERM)
    stage.wait()
    wait_until(lambda: find_tracker(stage) is None, "the end of the tracker")


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Hanging(Tool):
    """A server that never answers."""

    name = "wandb"

    def put(self, points: Any) -> None:
        tracker.threading.Event().wait()


class Failing(Tool):
    """A server that answers every third time."""

    name = "mlflow"
    calls = 0
    shown: list[int] = []  # noqa: RUF012 -- of the test

    def put(self, points: Any) -> None:
        type(self).calls += 1
        if self.calls % 3:
            raise ConnectionError("http://me:secret@host is away")
        self.shown.extend(point.step for point in points)


def test_a_tool_that_hangs_or_fails_holds_up_no_other_and_not_the_end(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TOOLS, "wandb", Hanging)
    monkeypatch.setitem(TOOLS, "mlflow", Failing)
    monkeypatch.setattr(tracker, "FLUSH_S", 1.0)
    monkeypatch.setattr(tracker, "RETRY_S", 0.01)
    monkeypatch.setattr(tracker, "POLL_S", 0.05)
    monkeypatch.setattr(tracker, "_SAID", sys.stderr)
    track = make_track(wandb={"project": "p"}, mlflow={"uri": "u"}, tensorboard=True)
    stage = make_stage(make_plan(track=track))
    assert play_untracked(stage) == 0
    stage.run.track.mkdir()
    tracker.Tracker(stage.run, stage.plan, track, stage.attempt).run()
    assert [step for step, _ in read_tensorboard(stage.run.tensorboard)["loss"]] == [1, 2, 3]
    said = list_said(stage)
    assert said == [
        "mlflow: http://<redacted>@host is away",
        "mlflow: not everything was sent; the next attempt sends the rest",
        "wandb: not finished 1 s after the end of the ranks; the next attempt sends the rest",
    ]
    assert "secret" not in capsys.readouterr().err


def play_untracked(stage: Stage) -> int:
    write_plan(stage.run.plan, make_plan(command=shell(f"BEGIN=0; END=3; {STEPS}")))
    stage.open()
    return stage.start(0).wait(timeout=ATTEMPT_S)


def make_batch(*steps: int) -> tracker.Batch:
    points = [Point("steps", step, 1.0, {"loss": 1.0}, 0, 0.0, step) for step in steps]
    return tracker.Batch(points, None)


def test_a_feed_wakes_who_waits_when_it_ends() -> None:
    feed = tracker.Feed()
    feed.note("tool", 0)
    feed.add(make_batch(1))
    assert feed.wait(0) == make_batch(1)
    feed.finish(is_well=True)
    assert feed.wait(1) is None
    feed.pause(600)


def test_a_feed_keeps_what_some_tool_has_yet_to_see_and_no_more_than_that() -> None:
    """Days of samples would fill the memory of the node that the ranks share."""
    feed = tracker.Feed(most=6)
    feed.add(make_batch(0))
    assert not feed.batches, "nobody reads"
    for name in ("quick", "slow"):
        feed.note(name, 0)
    for step in (1, 2, 3):
        feed.add(make_batch(step))
    feed.note("quick", 3)
    assert feed.wait(0) == make_batch(1)
    feed.note("slow", 1)
    assert (list(feed.batches), feed.first) == ([make_batch(2), make_batch(3)], 1)
    feed.add(make_batch(4))
    feed.add(make_batch(5, 6))
    assert feed.wait(3) == make_batch(4) and feed.weight == 6
    with pytest.raises(tracker.Behind):
        feed.wait(1)
    feed.leave("slow")
    feed.note("quick", 5)
    assert (feed.weight, len(feed.batches)) == (0, 0)
    feed.leave("quick")
    feed.add(make_batch(7))
    assert not feed.batches, "nobody reads"


class Counted(Follower):
    """Counts the lines that are read, by the name of the attempt."""

    lines: Counter[str] = Counter()  # noqa: RUF012 -- of the test

    def _read_some(self) -> list[tuple[int, str]] | None:
        found = super()._read_some()
        if self.path.suffix in (".out", ".jsonl"):
            self.lines[self.path.parent.name] += len(found or [])
        return found


class Away(Tensorboard):
    """A server that comes back once all points were there."""

    name = "mlflow"
    shown: list[tuple[str, int]] = []  # noqa: RUF012 -- of the test
    back = tracker.threading.Event()

    def open(self) -> None:
        self.tracked.own["attempt"] = self.tracked.attempt

    def put(self, points: Any) -> None:
        self.back.wait(ATTEMPT_S)
        self.shown.extend((name, point.step) for point in points for name in point.values)

    def close(self, *, is_well: bool) -> None:
        pass


def write_steps(stage: Stage, begin: int, end: int) -> None:
    """Of the first attempt's only node, whose rank has ended already."""
    with stage.attempt.node_log("n0", "out").open("a") as log:
        log.writelines(f"0: step {step}/9000 loss 0.5\n" for step in range(begin, end))


def test_a_tool_that_is_far_behind_reads_the_files_and_the_list_stays_short(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is away; the other tool sees all points meanwhile, and no list holds them."""
    monkeypatch.setitem(TOOLS, "mlflow", Away)
    monkeypatch.setattr(tracker, "_SAID", sys.stderr)
    monkeypatch.setattr(tracker, "POLL_S", 0.01)
    monkeypatch.setattr(points, "PIECE", 100)
    track = make_track(mlflow={"uri": "u"}, tensorboard=True)
    stage = make_stage(make_plan(track=track))
    assert play_untracked(stage) == 0
    write_steps(stage, 4, 2001)
    stage.run.track.mkdir()
    made = tracker.Tracker(stage.run, stage.plan, track, stage.attempt)
    made._feed.most = 500
    heaviest = 0

    def add(batch: tracker.Batch, add: Callable[[tracker.Batch], None] = made._feed.add) -> None:
        nonlocal heaviest
        add(batch)
        heaviest = max(heaviest, made._feed.weight)
        if [point for point in batch.points if point.step == 2000]:
            Away.back.set()

    made._feed.add = add  # type: ignore[method-assign]
    made.run()
    assert heaviest <= 500 + 100, "the list, and a piece"
    wanted = [("loss", step) for step in range(1, 2001)]
    assert [one for one in Away.shown if one[0] == "loss"] == wanted
    assert [step for step, _ in read_tensorboard(stage.run.tensorboard)["loss"]] == [
        *range(1, 2001)
    ]
    assert list_said(stage) == []


def test_the_next_attempt_reads_only_what_no_tool_has_seen(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts of days are not read again at each restart."""
    monkeypatch.setattr(tracker, "_SAID", sys.stderr)
    monkeypatch.setattr(points, "Follower", Counted)
    Counted.lines.clear()
    track = make_track(tensorboard=True)
    stage = make_stage(make_plan(track=track))
    assert play_untracked(stage) == 0
    write_steps(stage, 4, 1001)
    stage.run.track.mkdir()
    tracker.Tracker(stage.run, stage.plan, track, stage.attempt).run()
    assert Counted.lines["attempt-0"] >= 1000
    Counted.lines.clear()
    write_steps(stage, 1001, 1004)  # came late
    stage.open(attempt=1)
    assert stage.start(0, 1).wait(timeout=ATTEMPT_S) == 0
    tracker.Tracker(stage.run, stage.plan, track, stage.run.attempt(1)).run()
    assert Counted.lines["attempt-0"] == 3
    scalars = read_tensorboard(stage.run.tensorboard)
    assert [step for step, _ in scalars["loss"]] == [*range(1, 1004)]
    assert [step for step, _ in scalars["repeated/loss"]] == [1, 2, 3]


def test_an_error_is_one_line_without_secrets() -> None:
    error = ValueError(f"bad key {KEY} for https://me:pw@host/x\nand more")
    said = shorten(error, {"WANDB_API_KEY": KEY})
    assert said == "bad key <redacted> for https://<redacted>@host/x"
