"""Attempts that end for want of room wait for it, and are not counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, wait_for
from tests.small_disk import filled, mount_small
from varuna_core.records.record import read_events, read_restarts
from varuna_core.records.runfolder import RunFolder

CONF = """
name: room
program: {{script: {script}, args: ["{store}"]}}
train: {{checkpoint: {{folder: {store}}}}}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 2
  join_s: 20
  {restarts}
  nodes: [{{group: m, count: 2, ranks: 1}}]
{more}
"""
KINDS = {
    "restarts": {"restarts": "restarts: 1", "more": ""},
    "morph": {
        "restarts": "",
        "more": "morph: {enabled: true, mode: world, min_nodes: 1, warm: false}",
    },
}


@pytest.fixture
def vjob(tmp_path: Path) -> Iterator[Vjob]:
    with mount_small(tmp_path / "ckpt"):
        yield Vjob(tmp_path)


def submit(vjob: Vjob, kind: str) -> RunFolder:
    store = vjob.folder / "ckpt"
    script = PROGRAMS / "needs_room.py"
    return vjob.submit(CONF.format(script=script, store=store, **KINDS[kind]))


def await_waiting(vjob: Vjob, run: RunFolder) -> None:
    def waits() -> bool:
        verdict = vjob.status(str(run.path))["verdict"]
        return bool(verdict["rule"] == "no room" and str(vjob.folder / "ckpt") in verdict["reason"])

    wait_for(waits, 120, lambda: vjob.explain(run))


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_attempt_starts_once_there_is_room(vjob: Vjob, kind: str) -> None:
    """Three attempts within twelve seconds were the end of the run."""
    with filled(vjob.folder / "ckpt"):
        run = submit(vjob, kind)
        await_waiting(vjob, run)
    assert vjob.wait_over(run, 120, may_fail=True)["verdict"] == "COMPLETED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0, 1]
    assert [one["folder"] for one in read_events(run) if one["kind"] == "no-room"] == [
        str(vjob.folder / "ckpt")
    ]
    assert [one["left"] for one in read_restarts(run)] == ([1] if kind == "restarts" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_ends_the_wait(vjob: Vjob, kind: str) -> None:
    with filled(vjob.folder / "ckpt"):
        run = submit(vjob, kind)
        await_waiting(vjob, run)
        vjob("cancel", str(run.path), "--now")
        record = vjob.wait_over(run, 60, may_fail=True)
    assert record["verdict"] == "CANCELLED", vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0]
