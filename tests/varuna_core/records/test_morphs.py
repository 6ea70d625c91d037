"""The event of a morph, as others tell it."""

from __future__ import annotations

import pytest

from varuna_core.records.morphs import PARTS, read_parts, read_pause_s, tell_morph

WHOLE = {"from": "8 x 4", "to": "6 x 4", "pause_s": 12.4, **dict.fromkeys(PARTS, 2.0)}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (WHOLE, "from 8 x 4 to 6 x 4, 12 s"),
        ({"from": "8 x 4", "to": "6 x 4"}, "from 8 x 4 to 6 x 4, no step came of it"),
        ({"to": "6 x 4", "pause_s": "soon"}, "from ? to 6 x 4, no step came of it"),
    ],
)
def test_it_is_told_in_a_line(event: dict[str, object], said: str) -> None:
    assert tell_morph(event) == said


def test_what_is_no_number_is_no_part() -> None:
    assert list(read_parts(WHOLE)) == list(PARTS)
    assert read_parts({**WHOLE, "stop_s": None, "plan_s": "x", "load_s": True}) == {
        name: 2.0 for name in ("notice_s", "start_s", "first_step_s")
    }
    assert read_pause_s({"pause_s": 3}) == 3.0
