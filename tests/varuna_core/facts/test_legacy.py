"""Ends of run folders that three earlier commits really wrote (`old_runs.json`, trimmed)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from varuna_core.facts.cause import Actor, EndCause
from varuna_core.facts.known import Sure
from varuna_core.facts.legacy import read_end
from varuna_core.facts.sentences import describe_end
from varuna_core.records.record import append_event, read_record, read_run_end
from varuna_core.records.runfolder import RunFolder

OLD = json.loads((ROOT / "tests/varuna_core/facts/old_runs.json").read_text())
ENDS = {
    "ok": (EndCause.COMPLETED, Actor.RANK, 0),
    "exit3": (EndCause.RANK_EXIT, Actor.RANK, 3),
    "kill9": (EndCause.RANK_SIGNAL, Actor.UNKNOWN, 137),
    "cancel": (EndCause.CANCELLED, Actor.VJOB, 143),
    "hang": (EndCause.SUPERVISOR_DIED, Actor.UNKNOWN, 143),
}
"""Of `hang` the supervisor was killed; its record says NODE_FAIL."""


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("commit", OLD)
def test_an_old_run_folder_has_an_end(commit: str, case: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for name, value in OLD[commit][case]["files"].items():
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    for event in OLD[commit][case]["events"]:
        append_event(run.vjob_events, event["kind"])
    before = (run.path / "record.json").read_text()
    record = read_record(run)
    assert record is not None and record.end is None
    end = read_run_end(run, record)
    assert end is not None and (end.cause, end.actor, end.code) == ENDS[case]
    assert (end.evidence[0].source, end.evidence[0].sure) == ("legacy", Sure.INFERRED)
    if case != "hang":  # its record named what the ranks saw of it
        assert describe_end(end) == record.message
    assert (run.path / "record.json").read_text() == before, "nothing is changed"


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"verdict": "NODE_FAIL", "scheduler": "slurm"}, EndCause.NODE_FAIL),
        ({"verdict": "NODE_FAIL", "scheduler": "local"}, EndCause.SUPERVISOR_DIED),
        ({"verdict": "DEADLINE"}, EndCause.DEADLINE),
        ({"verdict": "CANCELLED", "message": "cancelled by root"}, EndCause.CANCELLED),
        (
            {"verdict": "CANCELLED", "message": "never started: a-1, which it waited for, ..."},
            EndCause.DEPENDENCY_FAILED,
        ),
        (
            {"verdict": "FAILED", "message": "RaisedSignal:53: is log_folder ..."},
            EndCause.NO_OUTPUT,
        ),
        ({"verdict": "FAILED", "message": "it broke"}, EndCause.UNKNOWN),
        ({"state": "refused", "message": "invalid account"}, EndCause.REFUSED),
        ({"state": "refused", "message": "the submit was cut off ..."}, EndCause.SUBMIT_LOST),
    ],
)
def test_records_alone_are_read_as_far_as_they_go(facts: dict[str, Any], cause: EndCause) -> None:
    end = read_end({"state": "ended", **facts}, None, None, [])
    assert end is not None and end.cause is cause
    assert read_end({"state": "submitted"}, None, None, []) is None
    if end.by:
        assert (end.by, end.actor) in (("root", Actor.ADMIN), ("a-1", Actor.SCHEDULER))
