"""Which ranks hold a place of the pipeline, without torch."""

from __future__ import annotations

import pytest

from varuna_core.records.rank_map import parse_stage_map


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_map_is_shown_as_it_was_given(tensor: int) -> None:
    text = "0,3;1,4;2,5;"
    assert str(parse_stage_map(text, 6 * tensor, tensor)) == text
    assert parse_stage_map([[0, 3], [1, 4], [2, 5]], 6 * tensor, tensor) == parse_stage_map(
        text.rstrip(";"), 6 * tensor, tensor
    )


def test_ranks_of_an_entry_are_at_one_place_in_any_slice() -> None:
    layout = parse_stage_map("0,2;1,3;", 12, tensor=3)
    assert layout.ranks == ((0, 6), (3, 9)) and layout.world_size == 12
    for slice_of in (layout, layout.slice(2)):
        assert [slice_of.find(rank) for rank in (0, 2, 3, 5, 6, 8, 9, 11)] == [
            (0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1),
        ]  # fmt: skip
        assert slice_of.sharing(1, 0) == [3, 4, 5]
    assert layout.name(11) == "rank 11 (stage 1, replica 1, tensor rank 2)"
    with pytest.raises(ValueError, match="rank 12 has no place in stage_to_rank_map '0,2;1,3;'"):
        layout.find(12)


@pytest.mark.parametrize(
    ("text", "world", "tensor", "says"),
    [
        ("0,a;", 2, 1, "expected ranks as in"),
        ("0,1;2;", 3, 1, "every stage needs as many ranks as stage 0"),
        ("0;1;1;", 3, 1, "must name each of the ranks 0 to 2 once"),
        ("0;2;", 4, 2, r"each of the entries 0 to 1 \(of 2 ranks each, of 4\) once"),
        ("0;1;", 4, 3, "tensor 3 must divide the 4 ranks"),
        ("", 1, 1, "expected ranks"),
    ],
)
def test_what_is_no_map_is_refused(text: str, world: int, tensor: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_stage_map(text, world, tensor)
