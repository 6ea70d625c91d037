"""The word of a run in the list of runs."""

from __future__ import annotations

import pytest

from vjob.jobs.monitor.model.run_row import RunRow


@pytest.mark.parametrize(
    ("state", "is_over", "word"),
    [
        ("COMPLETED", True, "DONE"),
        ("FAILED", True, "DEAD"),
        ("TIMEOUT", True, "DEAD"),
        ("CANCELLED", True, "CANCELLED"),
        ("REFUSED", True, "REFUSED"),
        ("RUNNING", False, "UNKNOWN"),
    ],
)
def test_a_run_that_was_not_judged_has_a_word_of_verdicts(
    state: str, is_over: bool, word: str
) -> None:
    row = RunRow(
        run="r",
        name="n",
        folder="/r",
        jobs=(),
        state=state,
        is_over=is_over,
        submitted=None,
        age_s=None,
        verdict=None,
        message="",
    )
    assert row.health == row.as_json()["state"] == word
