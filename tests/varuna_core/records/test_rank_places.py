"""A field of the stage map is a place in the pipeline, which may hold several stages."""

from varuna_core.records.rank_map import RankPlace, locate_ranks
from varuna_core.schedule.registry import place_stages


def test_a_rank_of_a_v_holds_a_stage_of_each_arm() -> None:
    found = locate_ranks("0;1;", placement=place_stages("zbv", 2, 2))
    assert found == {0: RankPlace(0, 0, (0, 3)), 1: RankPlace(1, 0, (1, 2))}


def test_an_interleaved_rank_holds_a_stage_of_each_round() -> None:
    found = locate_ranks("0,2;1,3;", placement=place_stages("interleaved", 2, 3))
    assert found[1] == RankPlace(1, 0, (1, 3, 5)) and found[2] == RankPlace(0, 1, (0, 2, 4))


def test_without_a_schedule_a_place_is_a_stage() -> None:
    assert locate_ranks("0;1;", 2) == {
        0: RankPlace(0, 0, (0,)),
        1: RankPlace(0, 0, (0,)),
        2: RankPlace(1, 0, (1,)),
        3: RankPlace(1, 0, (1,)),
    }
    assert locate_ranks("") == {}
