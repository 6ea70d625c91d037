"""Differences between Slurm's words and vjob's are found, and nothing else is called one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.commands.lives import LIVES, compare_commands, compare_jobs, name_component

SHOWN = {
    "JobId": "20", "JobState": "RUNNING", "Reason": "None", "TimeLimit": "00:10:00",
    "StartTime": "2026-11-28T10:50:52", "EndTime": "2026-11-28T11:00:52", "NodeList": "a2",
    "ExitCode": "0:0", "Restarts": "1", "PreemptTime": "None",
}  # fmt: skip
ROW = {
    "id": "20", "word": "RUNNING", "reason": "", "limit_s": 600.0, "started": 1795863052.0,
    "ends": 1795863652.0, "nodes": "a2", "exit_code": "", "restarts": 1, "preempted": None,
    "start": "",
}  # fmt: skip


def compare(row: dict[str, Any], walltime_s: float = 600.0) -> list[str]:
    status = {"scheduler": {"jobs": [row]}, "walltime_s": walltime_s}
    return list(compare_jobs([SHOWN], [["20", "RUNNING"]], status))


def test_equal_facts_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**ROW, "started": None, "ends": None}
    said = {text.partition(":")[0] for text in compare(row)}
    assert said == {"start", "end"}, "all else is equal in any time zone"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"word": "PENDING"}, "state"),
        ({"limit_s": 120.0}, "limit"),
        ({"nodes": "a1"}, "nodes"),
        ({"restarts": 0}, "restarts"),
        ({"preempted": 1.0}, "preempted"),
        ({"id": "21"}, "job"),
    ],
)
def test_each_fact_is_compared(change: dict[str, Any], fact: str) -> None:
    assert any(text.startswith(fact) for text in compare({**ROW, **change}))
    assert any(text.startswith("walltime_s") for text in compare(ROW, 120.0))


def test_done_and_has_not_ended_are_a_difference() -> None:
    status = {"state": "RUNNING", "verdict": {"health": "DONE"}}
    listed = {"state": "RUNNING"}
    assert list(compare_commands(status, listed, {"is_partial": True}))
    assert not list(compare_commands(status, listed, {"is_partial": False}))


def test_components_and_elements_have_the_ids_that_users_type() -> None:
    assert name_component({"JobId": "17", "HetJobId": "16", "HetJobOffset": "1"}) == "16+1"
    assert name_component({"JobId": "19", "ArrayJobId": "18", "ArrayTaskId": "0"}) == "18_0"
    assert len(LIVES) >= 40
