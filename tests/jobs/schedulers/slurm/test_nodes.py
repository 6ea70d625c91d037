"""sinfo's text as groups of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.planning.test_plan_command import SINFO
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers.slurm.nodes import (
    build_sinfo_nodes_command,
    guess_kind,
    parse_gres,
    parse_sinfo_nodes,
)


def test_alike_nodes_are_one_group() -> None:
    odd, first, second = parse_sinfo_nodes(SINFO)
    assert (odd.group, odd.count, odd.gpus) == ("odd", 3, "odd:2")
    assert (first.group, first.count, first.queue, first.gpus) == ("a100", 2, "gpu", "a100:4")
    assert (second.count, second.queue, second.gpus) == (1, "old", "RTX3090:8")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:a100:2(S:0),gpu:a10:2(S:1)", [("a100", 2), ("a10", 2)]),
        ("gpu:4", [("", 4)]),
        ("shard:a100:8,gpu:a100:1", [("a100", 1)]),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", [("nvidia_h100_80gb_hbm3", 8)]),
        ("(null)", []),
        ("gpu:0", []),
    ],
)
def test_gres(text: str, found: list[tuple[str, int]]) -> None:
    assert parse_gres(text) == found


def test_features_tell_a_kind_where_they_name_one() -> None:
    assert guess_kind("ib,v100-32,x86") == "V100-32"
    assert guess_kind("ib,a10,l4") == guess_kind("(null)") == ""


def test_the_partition_is_asked_for() -> None:
    assert build_sinfo_nodes_command("gpu")[-1] == "--partition=gpu"


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        groups = parse_sinfo_nodes(text)
    except InputError:
        return
    assert all(group.count > 0 and group.num_gpus > 0 for group in groups)
