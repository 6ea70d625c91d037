"""Which node this is, and what it is called."""

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.agent.setup.site import Refusal, compute_index, group_of, host_name

PLAN = make_plan(make_group("big", 2, 1), make_group("small", 3, 1))
SLURM = make_plan(make_group("big", 2, 1), scheduler="slurm")


@pytest.mark.parametrize(
    ("given", "env", "index"),
    [
        (4, {"SLURM_NODEID": "1"}, 4),
        (None, {"SLURM_NODEID": "1"}, 1),
        (None, {"SLURM_NODEID": "1", "VJOB_GROUP": "big"}, 1),
        (None, {"SLURM_NODEID": "1", "VJOB_GROUP": "small"}, 3),
        (None, {"SLURM_NODEID": "1", "VJOB_GROUP": ""}, 1),
    ],
)
def test_the_index_counts_from_the_groups_first_node(
    given: int | None, env: dict[str, str], index: int
) -> None:
    assert compute_index(PLAN, given, env) == index


@pytest.mark.parametrize(
    ("given", "env", "words"),
    [
        (5, {}, "nodes 0 to 4"),
        (None, {}, "set --node or SLURM_NODEID"),
        (None, {"SLURM_NODEID": "0", "VJOB_GROUP": "tiny"}, "the plan has big, small"),
    ],
)
def test_a_node_that_is_not_in_the_plan_is_refused(
    given: int | None, env: dict[str, str], words: str
) -> None:
    with pytest.raises(Refusal, match=words):
        compute_index(PLAN, given, env)


def test_files_of_the_first_group_carry_no_group() -> None:
    assert (group_of(PLAN, None), group_of(PLAN, "big"), group_of(PLAN, "")) == (None, None, None)
    assert group_of(PLAN, "small") == "small"


def test_names_are_short_safe_and_different() -> None:
    assert host_name(SLURM, 1, {}, "n061.cluster.example") == "n061"
    assert host_name(SLURM, 1, {"SLURMD_NODENAME": "gpu-7"}, "n061") == "gpu-7"
    assert host_name(SLURM, 1, {}, "a/b c") == "a-b-c"
    assert [host_name(PLAN, index, {}, "laptop") for index in (0, 1)] == ["local0", "local1"]
    alone = make_plan(make_group("m", 1, 2))
    assert host_name(alone, 0, {}, "laptop.home") == "laptop"
    assert host_name(PLAN, 0, {"VJOB_NODE_NAME": "stand-in0"}, "laptop") == "stand-in0"
