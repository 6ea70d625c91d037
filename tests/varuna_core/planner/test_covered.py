"""Parts that a profile does not cover: typed, printed, and in the width of a prediction."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.command import ROOT
from tests.varuna_core.planner.profiles import call_measured, make_profile
from tests.varuna_core.planner.test_band import EVEN, spread_out
from varuna_core.facts.known import NotKnown, Within
from varuna_core.facts.not_covered import Lack, NotCovered, describe_lack, read_not_covered
from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.result.covered import BELOW, BETWEEN, BEYOND, weigh_size
from varuna_core.planner.result.plan import ShapePlan, build_plan
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes

CLUSTER = Cluster(
    kinds=(
        NodeKind(name="b", gpu="big", gpus=2, count=1),
        NodeKind(name="s", gpu="small", gpus=2, count=1),
    )
)


@pytest.mark.parametrize(
    ("wanted", "sizes", "factor"),
    [
        (3, (1, 2, 4), BETWEEN[4]),
        (8, (1, 16), BETWEEN[16]),
        (6, (1, 32), BETWEEN[32]),
        (8, (2, 4), BEYOND[2]),
        (12, (2, 4), BEYOND[4]),
        (1, (2, 4), BELOW[2]),
        (1, (8, 16), BELOW[8]),
        (64, (2, 4), None),
        (8, (1, 64), None),
    ],
)
def test_the_width_of_a_size_is_what_was_measured(
    wanted: int, sizes: tuple[int, ...], factor: tuple[float, float] | None
) -> None:
    found = weigh_size(wanted, sizes)
    if factor is None:
        assert isinstance(found, NotKnown)
    else:
        assert isinstance(found, Within) and (found.low, found.high) == factor


def test_the_widths_are_the_result_pages() -> None:
    """Each covers what the page has for as many times, and for fewer."""
    text = (ROOT / "benchmarks" / "results" / "planner_sizes.md").read_text()
    rows = re.findall(
        r"\| (\w+), (\d+) times[^|]*\| \d+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", text
    )
    tables = {"between": BETWEEN, "beyond": BEYOND, "below": BELOW}
    assert {name for name, *_ in rows} == set(tables)
    for name, table in tables.items():
        for most, width in table.items():
            own = [
                tuple(map(float, row[2:])) for row in rows if row[0] == name and int(row[1]) <= most
            ]
            assert width == (min(low for low, _ in own), max(high for _, high in own)), name


def plan(profile: Profile, cluster: Cluster = CLUSTER, **wishes: Any) -> ShapePlan:
    training = TrainingModel(batch=8)
    wanted = Wishes(**{"stages": 2, "replicas": 2, "tensor": 1, "schedule": "1f1b", **wishes})
    search = Search(profile, training, cluster, wanted)
    return build_plan(search.tables, cluster, search.run().best)


@pytest.fixture
def measured() -> Profile:
    return call_measured(spread_out(make_profile(random.Random(3), 5), EVEN, EVEN))


def test_a_plan_that_is_covered_has_its_band_and_no_more(measured: Profile) -> None:
    found = plan(measured, micro_batch=2)
    assert found.lacks == () and found.at_least_s is None
    assert isinstance(found.expected_s, Within) and found.band is not None
    assert found.band_s == (found.band.low_s, found.band.high_s)


def drop_size(profile: Profile, size: int) -> Profile:
    gpus = {
        kind: replace(gpu, cells={key: cell for key, cell in gpu.cells.items() if key[0] != size})
        for kind, gpu in profile.gpus.items()
    }
    return replace(profile, gpus=gpus)


def test_a_size_that_was_not_measured_widens_the_band(measured: Profile) -> None:
    sizes = sorted({size for size, _ in measured.gpus["big"].cells})
    assert sizes[0] < 2 < sizes[-1]
    found = plan(drop_size(measured, 2), micro_batch=2)
    assert {(one.lack, one.subject, one.wanted) for one in found.lacks} == {
        (Lack.SIZE, "big", 2),
        (Lack.SIZE, "small", 2),
    }
    assert found.sources == ("interpolated",) and found.band is not None
    narrow = found.step_s * 0.97, found.step_s * 1.03
    low_s, high_s = found.band_s
    assert low_s < narrow[0] and high_s > narrow[1]
    told = found.build_prediction()
    assert told.band_s == found.band_s and told.not_covered == found.lacks


def test_the_width_of_gpus_is_not_taken_for_processors(measured: Profile) -> None:
    profile = drop_size(measured, 2)
    gpus = {"cpu": profile.gpus["big"]}
    sums = {("cpu", 2, 2): next(iter(measured.network.all_reduces.values()))}
    links = {("cpu", "cpu", where): link for (_, _, where), link in measured.network.links.items()}
    network = replace(measured.network, links=links, all_reduces=sums)
    cluster = Cluster(kinds=(NodeKind(name="c", gpu="cpu", gpus=2, count=1),))
    wanted = {"micro_batch": 2, "stages": 2, "replicas": 1}
    found = plan(replace(profile, gpus=gpus, network=network), cluster, **wanted)
    (lack,) = found.lacks
    assert isinstance(lack.factor, NotKnown) and found.band_s == () and found.at_least_s is None


@pytest.mark.parametrize("lack", [Lack.LINK, Lack.SUM])
def test_what_has_no_measured_width_leaves_the_most_open(measured: Profile, lack: Lack) -> None:
    network = measured.network
    if lack is Lack.LINK:
        links = {key: replace(link, source="estimate") for key, link in network.links.items()}
        network = replace(network, links=links)
    else:
        network = replace(network, all_reduces={})
    found = plan(replace(measured, network=network), micro_batch=2)
    assert {one.lack for one in found.lacks} == {lack}
    assert isinstance(found.expected_s, NotKnown) and found.band_s == ()
    assert found.at_least_s is not None and 0 < found.at_least_s < found.step_s
    assert all(describe_lack(one) in found.expected_s.reason for one in found.lacks)


def test_times_from_data_sheets_have_the_width_of_published_runs(measured: Profile) -> None:
    gpus = {
        kind: replace(
            gpu, cells={key: replace(cell, source="estimate") for key, cell in gpu.cells.items()}
        )
        for kind, gpu in measured.gpus.items()
    }
    found = plan(replace(measured, gpus=gpus), micro_batch=2)
    assert isinstance(found.expected_s, Within) and found.band_s == ()
    assert found.expected_s.high == pytest.approx(4 * found.step_s)


@pytest.mark.parametrize("lack", Lack)
def test_facts_are_read_as_they_were_written(lack: Lack) -> None:
    for factor in (weigh_size(3, (2, 4)), NotKnown("nobody knows")):
        one = NotCovered(lack, "A10", factor, 3, (2, 4))
        assert read_not_covered(json.loads(json.dumps(one.as_json()))) == one
        assert "A10" in describe_lack(one)
    assert read_not_covered({"lack": lack.value}) is None and read_not_covered(3) is None
