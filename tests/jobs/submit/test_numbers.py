"""Numbers of a conf that nobody means are refused, or planned without much work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vjob.jobs.conf.document import list_sections
from vjob.jobs.conf.parse import find_bounds, get_annotations, get_hints, get_members
from vjob.jobs.errors import VjobError
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.submit.submit import prepare

CONF = """name: t
program: pretrain_gpt
model: {layers: 4, hidden: 64, heads: 4}
data: {synthetic: true}
train: {global_batch_size: 8}
cluster: {scheduler: slurm, walltime_min: 5, nodes: [{count: 2, ranks: 2, gpus: "a100:2"}]}
"""
MOST_CALLS = 300_000
"""Of Python functions; an ordinary plan takes 11,000."""
HUGE = (2**31, 2**63 - 1, 10**17, 10**18 - 1, -(10**17))


def list_numbers() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every key that takes a number, and the largest value that its range allows."""
    for section in list_sections():
        for name, hint in get_annotations(section.cls).items():
            if {int, float} & set(get_members(get_hints(section.cls)[name])):
                most = [int(one.limit) for one in find_bounds(hint) if one.relation == "<="]
                yield f"{section.key}.{name}".replace("[]", "[0]").lstrip("."), tuple(most)


NUMBERS = dict(list_numbers())


class TooMuchError(Exception):
    """Raised where planning makes more calls than any conf needs."""


class CallLimit:
    """Counts the calls of Python functions in a block, and ends it at MOST_CALLS."""

    def __enter__(self) -> None:
        self.left = MOST_CALLS
        sys.setprofile(self.count)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def count(self, frame: FrameType, event: str, arg: object) -> None:
        self.left -= event == "call"
        if self.left < 0:
            sys.setprofile(None)
            raise TooMuchError


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numbers") / "t.yaml"
    path.write_text(CONF)
    return path


@given(key=st.sampled_from(sorted(NUMBERS)), value=st.sampled_from(HUGE), is_most=st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(key="cluster.join_s", value=10**17, is_most=False)
@example(key="model.layers", value=10**17, is_most=True)
@example(key="train.global_batch_size", value=10**17, is_most=True)
def test_huge_numbers_are_refused_or_planned_at_once(
    key: str, value: int, is_most: bool, conf: Path
) -> None:
    values = NUMBERS[key] if is_most else (value,)
    for one in values:
        with CallLimit():
            try:
                prepare(resolve_conf(conf, [f"{key}={one}"]), for_preview=True)
            except VjobError as error:
                assert str(error)
