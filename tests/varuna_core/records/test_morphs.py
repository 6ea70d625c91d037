"""The event of a morph, as others tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_core.records.morphing import Replaced, claim_epoch
from varuna_core.records.record import MORPH_PARTS, format_morph, read_morph_parts, read_pause_s
from varuna_core.records.runfolder import RunFolder

WHOLE = {"from": "8 x 4", "to": "6 x 4", "pause_s": 12.4, **dict.fromkeys(MORPH_PARTS, 2.0)}


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (WHOLE, "from 8 x 4 to 6 x 4, 12 s"),
        ({"from": "8 x 4", "to": "6 x 4"}, "from 8 x 4 to 6 x 4, no step followed it"),
        ({"to": "6 x 4", "pause_s": "soon"}, "from ? to 6 x 4, no step followed it"),
    ],
)
def test_it_is_told_in_a_line(event: dict[str, object], said: str) -> None:
    assert format_morph(event) == said


def test_what_is_no_number_is_no_part() -> None:
    assert list(read_morph_parts(WHOLE)) == list(MORPH_PARTS)
    assert read_morph_parts({**WHOLE, "stop_s": None, "plan_s": "x", "load_s": True}) == {
        name: 2.0 for name in ("notice_s", "start_s", "first_step_s")
    }
    assert read_pause_s({"pause_s": 3}) == 3.0


def test_each_start_of_a_manager_has_an_epoch_of_its_own_and_an_earlier_session_none(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path).morph
    folder.make()
    assert [claim_epoch(folder, session) for session in ("7.0", "7.0", "7.1", "9.0")] == [
        0,
        1,
        2,
        3,
    ]
    for earlier in ("7.0", "7.1"):
        with pytest.raises(Replaced):
            claim_epoch(folder, earlier)
    assert claim_epoch(folder, "9.0") == 4
