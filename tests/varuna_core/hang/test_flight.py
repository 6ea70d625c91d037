"""Dumps of torch's Flight Recorder, read without torch."""

import pytest

from varuna_core.hang.flight import find_gap, find_last, read_flight

WORLD = ["0", "default_pg"]


def dump(*names, group=WORLD, first=1):
    """A rank's record: gloo leaves every entry at `scheduled`."""
    return {
        "entries": [
            {
                "collective_seq_id": number,
                "process_group": group,
                "profiling_name": f"gloo:{name}",
                "state": "scheduled",
                "is_p2p": False,
            }
            for number, name in enumerate(names, start=first)
        ]
    }


def read(*dumps):
    return {rank: read_flight(one) for rank, one in enumerate(dumps)}


REDUCE = ("all_reduce",) * 4


@pytest.mark.parametrize(
    ("dumps", "expected"),
    [
        pytest.param([dump(*REDUCE)] * 2, None, id="all called the same, whatever their state"),
        pytest.param(
            [dump(*REDUCE), dump(*REDUCE[:3])], ("all_reduce", 4, (0,), (1,), ""), id="one missing"
        ),
        pytest.param(
            [dump(*REDUCE), dump(*REDUCE[:3], "barrier"), dump(*REDUCE)],
            ("all_reduce", 4, (0, 2), (1,), "barrier"),
            id="another one",
        ),
        pytest.param(
            [dump(*REDUCE), dump(*REDUCE[:2]), dump(*REDUCE[:3])],
            ("all_reduce", 3, (0, 2), (1,), ""),
            id="the one furthest behind",
        ),
        pytest.param(
            [dump("broadcast"), {"entries": []}], ("broadcast", 1, (0,), (1,), ""), id="none"
        ),
        pytest.param(
            [dump("send", group=["1", "pp"]), dump(*REDUCE)], None, id="older calls are not kept"
        ),
        pytest.param(
            [dump(*REDUCE, first=90), dump(*REDUCE[:2], first=90)],
            ("all_reduce", 92, (0,), (1,), ""),
            id="the beginning is no longer kept",
        ),
    ],
)
def test_the_first_difference_is_named(dumps, expected):
    gap = find_gap(read(*dumps), len(dumps))
    found = gap and (gap.name, gap.number, gap.called_by, gap.missing, gap.other)
    assert found == expected


def test_a_rank_without_a_record_leaves_it_open():
    assert find_gap(read(dump(*REDUCE), dump(*REDUCE[:3])), world=3) is None


def test_the_last_collective_has_its_number():
    assert find_last(read(dump(*REDUCE), dump(*REDUCE))) == "all_reduce 4"


@pytest.mark.parametrize("value", [None, 7, [], {}, {"entries": 7}])
def test_what_is_no_dump_is_none(value):
    assert read_flight(value) is None
