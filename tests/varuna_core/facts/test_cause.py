"""Ends as JSON, as sentences, and which of two witnesses of an end is believed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from varuna_core.facts.catalogue.ends import list_remedies
from varuna_core.facts.cause import END_VERSION, Actor, End, EndCause, parse_end
from varuna_core.facts.deciding import choose_end
from varuna_core.facts.known import Evidence, Sure
from varuna_core.facts.remedy import Context, render_all
from varuna_core.facts.sentences import PHRASES, SCHEDULER, STOP, describe_end

FULL = End(
    EndCause.RANK_SIGNAL,
    Actor.USER,
    by="ann",
    code=137,
    signal="SIGKILL",
    rank=3,
    node="n1",
    at=12.5,
    started=True,
    evidence=(Evidence("exit file", Sure.MEASURED, seen=1, expected=4),),
)


def test_an_end_comes_back_from_its_file() -> None:
    written = json.loads(json.dumps(asdict(FULL)))
    assert written["cause"] == "rank-signal" and parse_end(written) == FULL
    assert parse_end({**written, "of": "a later vjob"}) == FULL, "unknown keys are dropped"


@pytest.mark.parametrize(
    "damage",
    [
        {"version": END_VERSION + 1},
        {"version": None},
        {"code": "three"},
        {"code": True},
        {"at": 1e300},
        {"rank": 2**70},
        {"evidence": [3]},
        {"evidence": "torn"},
        {"evidence": [{"sure": "measured"}]},
    ],
)
def test_a_later_version_or_a_damaged_end_is_as_good_as_missing(damage: dict[str, Any]) -> None:
    assert parse_end({**asdict(FULL), **damage}) is None


def test_words_of_a_later_vjob_are_unknown() -> None:
    found = parse_end({"version": 1, "cause": "eclipse", "actor": ["moon"]})
    assert found == End(EndCause.UNKNOWN, Actor.UNKNOWN)


@pytest.mark.parametrize("value", [None, [], "end", 3])
def test_what_is_no_object_is_no_end(value: Any) -> None:
    assert parse_end(value) is None


@pytest.mark.parametrize("cause", EndCause)
def test_every_cause_has_a_sentence_and_its_remedies_hold_everywhere(cause: EndCause) -> None:
    assert describe_end(End(cause)) == PHRASES[cause]
    for context in Context:
        text = render_all(list_remedies(End(cause), checkpoint_step=40), context)
        assert context is not Context.SBATCH or "cluster." not in text


def told(signal: str = "") -> End:
    """An attempt whose ranks were told to end, or killed."""
    if signal:
        return End(EndCause.RANK_SIGNAL, code=137, signal=signal, rank=0, node="n0")
    return End(EndCause.STOPPED, code=143, evidence=(Evidence(STOP, text="SIGTERM"),))


EXITED = End(EndCause.RANK_EXIT, Actor.RANK, code=9, rank=0, node="n0")
SEEN_LOST = End(EndCause.NODE_SILENT, node="n1", code=113)
NO_EXIT = End(
    EndCause.AGENT_DIED,
    code=113,
    rank=0,
    node="n1",
    evidence=(Evidence("exit file", Sure.INFERRED, seen=0, expected=1),),
)


@pytest.mark.parametrize(
    ("attempt", "job", "cause"),
    [
        (told(), EndCause.TIME_LIMIT, EndCause.TIME_LIMIT),
        (told(), EndCause.DEADLINE, EndCause.DEADLINE),
        (told("SIGKILL"), EndCause.DEADLINE, EndCause.DEADLINE),
        (told("SIGSEGV"), EndCause.DEADLINE, EndCause.RANK_SIGNAL),
        (told(), EndCause.PREEMPTED, EndCause.PREEMPTED),
        (told(), EndCause.CANCELLED, EndCause.CANCELLED),
        (NO_EXIT, EndCause.CANCELLED, EndCause.CANCELLED),
        (SEEN_LOST, EndCause.CANCELLED, EndCause.NODE_SILENT),
        (EXITED, EndCause.TIME_LIMIT, EndCause.RANK_EXIT),
        (told("SIGKILL"), EndCause.OOM_JOB, EndCause.OOM_HOST),
        (told("SIGKILL"), EndCause.NODE_FAIL, EndCause.NODE_FAIL),
        (NO_EXIT, EndCause.NODE_FAIL, EndCause.NODE_FAIL),
        (told(), EndCause.SUPERVISOR_DIED, EndCause.SUPERVISOR_DIED),
        (EXITED, EndCause.UNKNOWN, EndCause.RANK_EXIT),
        (None, EndCause.DEADLINE, EndCause.DEADLINE),
    ],
)
def test_the_witness_who_saw_the_cause_is_believed(
    attempt: End | None, job: EndCause, cause: EndCause
) -> None:
    end = choose_end(attempt, End(job, evidence=(Evidence(SCHEDULER, text=job.value),)))
    assert end.cause is cause
    assert attempt is None or set(attempt.evidence) <= set(end.evidence), "nothing is lost"


def test_what_nobody_saw_is_unknown() -> None:
    assert choose_end(None, None) == End(EndCause.UNKNOWN)
    assert choose_end(None, EXITED) is EXITED
