"""A job that goes back into the queue, one that is left alone, and one that ends."""

from __future__ import annotations

import pytest

from varuna_core.agent.restarts import Way, choose_way, may_return, parse_job

SHOWN = "JobId=7 JobState=RUNNING Reason=None {}Restarts={} BatchFlag=1"
PREEMPT = "PreemptTime=2026-11-22T01:02:03 "


@pytest.mark.parametrize(
    ("said", "ended", "shown", "way"),
    [
        ("requeue", "", SHOWN.format("", 0), Way.REQUEUE),
        ("requeue", "", "", Way.REQUEUE),  # there is no scontrol, or it does not answer
        ("requeue", "", SHOWN.replace("RUNNING", "COMPLETING").format("", 0), Way.REQUEUE),
        ("requeue", "TERM", SHOWN.format("", 0), Way.ENDED),
        ("requeue", "", SHOWN.format("", 1), Way.LEAVE),
        ("requeue", "", "JobId=7 JobState=RUNNING", Way.LEAVE),
        ("143", "TERM", SHOWN.format(PREEMPT, 0), Way.REQUEUE),
        ("143", "TERM", SHOWN.format("PreemptTime=None ", 0), Way.GO_ON),
        ("143", "TERM", SHOWN.format("", 0), Way.GO_ON),
        ("143", "", SHOWN.format(PREEMPT, 1), Way.LEAVE),
        ("143", "", "", Way.GO_ON),
        ("0", "", SHOWN.format(PREEMPT, 0), Way.REQUEUE),
        ("0", "", SHOWN.replace("RUNNING", "CANCELLED").format(PREEMPT, 0), Way.GO_ON),
    ],
)
def test_the_way_of_a_job(said: str, ended: str, shown: str, way: Way) -> None:
    assert choose_way(said, ended, parse_job(shown), 0) is way


@pytest.mark.parametrize(
    ("said", "warned", "asks"),
    [("requeue", False, True), ("143", False, True), ("0", True, True), ("0", False, False),
     ("9", True, False), ("", False, False)],
)  # fmt: skip
def test_the_scheduler_is_asked_only_where_its_word_counts(
    said: str, warned: bool, asks: bool
) -> None:
    assert may_return(said, warned=warned) is asks
