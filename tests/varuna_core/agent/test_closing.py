"""How `close` tells of ranks that exited 0 after somebody asked them to save and leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.closing import close_attempt
from varuna_core.records.exits import NodeExits, rank_exit, read_outcome
from varuna_core.records.files import write_json
from varuna_core.records.plan import write_plan
from varuna_core.records.record import CANCEL_ASKED, append_event
from varuna_core.records.requests import write_signal
from varuna_core.records.runfolder import RunFolder

NOTE = "; SIGUSR1, as before the time limit, had asked them to save and leave"


@pytest.mark.parametrize(
    ("key", "code", "note"),
    [("", 0, ""), ("batch-USR1-1", 0, NOTE), ("cancel-1", 143, "")],
    ids=["nobody asked", "the scheduler", "vjob cancel"],
)
def test_the_code_and_the_words_tell_who_asked(
    tmp_path: Path, key: str, code: int, note: str
) -> None:
    run, plan = RunFolder(tmp_path), make_plan()
    attempt = run.attempt(0)
    attempt.make()
    write_plan(run.plan, plan)
    write_json(attempt.go, {})
    ended = rank_exit(0, "n0", 0, stopped=False, started=0.0, ended=1.0, error="")
    NodeExits(attempt, 0, 1).write(ended)
    if key:
        write_signal(attempt, "USR1", key)
    if key.startswith("cancel"):
        append_event(run.vjob_events, CANCEL_ASKED, now=False)
    assert close_attempt(run, plan, 0, None, 0).code == code
    outcome = read_outcome(attempt)
    assert outcome is not None and outcome.code == 0, "the ranks' own"
    assert outcome.reason == f"the one rank exited 0{note}"
