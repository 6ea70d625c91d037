"""How `close` tells of ranks that exited 0 after somebody asked them to save and leave."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.closing import close_attempt
from varuna_core.facts.cause import EndCause
from varuna_core.records.exits import NodeExits, rank_exit, read_judgement
from varuna_core.records.files import write_json
from varuna_core.records.logs.step_counts import Tally
from varuna_core.records.nodes import NodeReport, write_report
from varuna_core.records.plan import write_plan
from varuna_core.records.record import CANCEL_ASKED, append_event
from varuna_core.records.requests import write_signal, write_stop
from varuna_core.records.runfolder import RunFolder

NOTE = "; SIGUSR1, as sent before the time limit, had asked the ranks to save and exit"
WELL = "the one rank exited 0"
SHORT = (
    "stopped at step 120 of 400, as SIGUSR1 asked the run to save and leave before the time limit"
)
BATCH = "batch-USR1-1"


@pytest.mark.parametrize(
    ("key", "steps", "counted", "code", "said"),
    [
        ("", range(100, 121, 10), 0, 0, WELL),
        (BATCH, (), 0, 0, WELL + NOTE),
        (BATCH, (), 1, 0, WELL + NOTE),
        (BATCH, range(100, 121, 10), 0, 143, SHORT),
        (BATCH, range(380, 401, 10), 0, 0, WELL + NOTE),
        (BATCH, range(375, 400, 20), 0, 0, WELL + NOTE),
        (BATCH, (120,), 0, 0, WELL + NOTE),
        (BATCH, (120,), 1, 143, SHORT),
        (BATCH, (120,), 280, 0, WELL + NOTE),
        ("cancel-1", range(100, 121, 10), 0, 143, WELL),
    ],
    ids=["nobody asked", "no step known", "only counted", "short", "all done", "maybe done",
         "one line", "one line, one step", "one line, many steps", "cancel"],
)  # fmt: skip
def test_the_code_and_the_words_tell_who_asked(
    tmp_path: Path, key: str, steps: Iterable[int], counted: int, code: int, said: str
) -> None:
    run, plan = RunFolder(tmp_path), make_plan()
    attempt = run.attempt(0)
    attempt.make()
    write_plan(run.plan, plan)
    write_json(attempt.go, {})
    ended = rank_exit(0, "n0", 0, stopped=False, started=0.0, ended=1.0, error="")
    NodeExits(attempt, 0, 1).write(ended)
    report = NodeReport(0, "n0", "m", "127.0.0.1", None, None, None, 1.0, True, (), ())
    write_report(attempt, report)
    attempt.node_log("n0", "out").write_text("".join(f"0: step {n}/400 loss 1.5\n" for n in steps))
    if counted:
        tally = Tally(0.0, 0.0)
        tally.add(1.0, counted)
        attempt.steps(0).write_bytes(tally.pack_head((1, 1, 1, 1, 0), 0))
    if key:
        write_signal(attempt, "USR1", key)
    if key.startswith("cancel"):
        append_event(run.vjob_events, CANCEL_ASKED, now=False)
    assert close_attempt(run, plan, 0, None, 0).code == code
    judged = read_judgement(attempt)
    assert judged is not None and judged.outcome.code == 0, "the ranks' own"
    assert judged.outcome.reason == said
    is_short = judged.end.cause is EndCause.TIME_LIMIT
    assert is_short is (said == SHORT)


def test_an_attempt_that_a_lost_node_ended_says_so_with_its_name(tmp_path: Path) -> None:
    """srun tells the other nodes with SIGTERM: theirs was the cause, code 143 the code."""
    run, plan = RunFolder(tmp_path), make_plan()
    attempt = run.attempt(0)
    attempt.make()
    write_plan(run.plan, plan)
    write_json(attempt.go, {})
    ended = rank_exit(0, "n0", -15, stopped=True, started=0.0, ended=1.0, error="")
    NodeExits(attempt, 0, 1).write(ended)
    write_stop(attempt, "signal", 143, "SIGTERM from outside, seen first on n0")
    (tmp_path / "scheduler.out").write_text("srun: error: Node failure on n1\n")
    assert close_attempt(run, plan, 0, None, 143).code == 113
    judged = read_judgement(attempt)
    assert judged is not None and judged.end.node == "n1"
    assert judged.outcome.reason == "the scheduler reports that node n1 failed"
