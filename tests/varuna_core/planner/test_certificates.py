"""Certificates of small questions, compared with every plan.

`python -m benchmarks.planner.certificates` asks thousands.
"""

from __future__ import annotations

import random

import pytest

from tests.varuna_core.planner.every_plan import check_question, draw_question

COUNT, PARTS = 60, 6


@pytest.mark.parametrize("part", range(PARTS))
def test_no_plan_is_better_than_a_certificate_says(part: int) -> None:
    answered = exact = 0
    for number in range(part, COUNT, PARTS):
        name = f"certificates/1/{number}"
        wrong, counts = check_question(draw_question(random.Random(name)))
        assert not wrong, (name, wrong)
        answered += counts["answered"]
        exact += counts["gap 0"]
    assert answered >= COUNT // PARTS // 2 and exact
