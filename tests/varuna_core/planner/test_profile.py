"""Profiles: read as written, merged, refused in words; nothing missing is zero."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.planner.profiles import make_profile
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.gpus import GPUS, find_gpu, list_gpus
from varuna_core.planner.profile.profile import (
    FIGURES,
    HALVES,
    OPTIONAL,
    TIMES,
    Half,
    LinkTime,
    Network,
    Spread,
    build_link,
)
from varuna_core.planner.profile.profile_file import (
    parse_profile,
    read_profile,
    render_profile,
    write_profile,
)
from varuna_core.planner.profile.transformer import Transformer, estimate_profile

GPT2_XL = Transformer(
    name="gpt2-xl", layers=48, hidden=1600, heads=25, length=1024, vocabulary=50257
)


@given(st.integers(), st.integers(min_value=3, max_value=6))
def test_a_profile_is_read_as_it_was_written(seed: int, size: int) -> None:
    profile = make_profile(random.Random(seed), size)
    assert parse_profile(render_profile(profile)) == profile
    spread = Spread(
        rounds=(0.9, 0.95, 1.0, 1.1, 1.5), actions=((0.5, 1.0, 1.0, 1.0, 2.0),) * len(TIMES)
    )
    cells = {key: replace(cell, spread=spread) for key, cell in profile.gpus["big"].cells.items()}
    big = replace(profile.gpus["big"], cells=cells)
    profile = replace(profile, gpus={**profile.gpus, "big": big})
    assert parse_profile(render_profile(profile)) == profile
    falling = render_profile(profile).replace("0.95", "0.85")
    with pytest.raises(PlanningError, match="expected 5 growing numbers"):
        parse_profile(falling)


def test_a_file_of_another_version_is_refused() -> None:
    fields = json.loads(render_profile(make_profile(random.Random(1), 4)))
    fields["vjob_profile"] = 1
    with pytest.raises(PlanningError, match="version 1, but this vjob reads 2: profile again"):
        parse_profile(json.dumps(fields))


def test_a_file_without_figures_of_ways_of_recompute_is_read() -> None:
    profile = make_profile(random.Random(1), 4)
    assert profile.knows("selective") and profile.knows("offload")
    fields = json.loads(render_profile(profile))
    for gpu in fields["gpus"].values():
        del gpu["copies_beside"]
        for cell in gpu["cells"]:
            for name in OPTIONAL:
                cell.pop(name, None)
    old = parse_profile(json.dumps(fields))
    assert not old.knows("selective") and not old.knows("offload") and old.knows("full")
    assert parse_profile(render_profile(old)) == old
    assert old.estimate_cell("big", 3).selective_s == ()  # between two sizes
    both = old.extend(replace(profile, gpus={"big": profile.gpus["big"]}))
    assert not both.knows("offload"), "the other kind of GPU has none"


def test_a_file_of_this_version_says_what_an_action_costs() -> None:
    fields = json.loads(render_profile(make_profile(random.Random(1), 4)))
    del fields["gpus"]["big"]["cells"][0]["action_s"]["backward_s"]
    with pytest.raises(PlanningError, match="the key 'backward_s' is missing"):
        parse_profile(json.dumps(fields))


def test_details_are_kept_written_and_joined() -> None:
    profile = make_profile(random.Random(1), 3)
    first = {"gpu": "big", "tensor": 1, "measured": {"1": [0, 1]}, "largest_micro_batch": 8}
    second = {"gpu": "big", "tensor": 1, "measured": {"2": [0]}, "largest_micro_batch": 2}
    other = {"gpu": "big", "tensor": 2, "stopped": "out of memory"}
    one = replace(profile, details=({**first, "stopped": "out of memory at 16"},))
    both = one.extend(replace(profile, details=(second, other)))
    assert [(d["gpu"], d["tensor"]) for d in both.details] == [("big", 1), ("big", 2)]
    assert both.details[0]["measured"] == {"1": [0, 1], "2": [0]}
    assert both.details[0]["largest_micro_batch"] == 8
    assert both.details[0]["stopped"] == "out of memory at 16"
    assert parse_profile(render_profile(both)) == both
    assert profile.extend(both).details == both.details == both.extend(profile).details


def test_a_file_that_is_damaged_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, make_profile(random.Random(1), 4))
    assert read_profile(path).model.num_segments == 4
    path.write_text(path.read_text()[:-20])
    with pytest.raises(PlanningError, match=r"profile\.json: not JSON"):
        read_profile(path)
    with pytest.raises(PlanningError, match="No such file"):
        read_profile(tmp_path / "none.json")


def list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*path, key))
        if isinstance(inner, (dict, list)):
            found += list_places(inner, (*path, key))
    return found


@given(st.data())
def test_any_damage_is_read_or_refused_in_words(data: st.DataObject) -> None:
    fields = json.loads(render_profile(make_profile(random.Random(1), 3)))
    *path, last = data.draw(st.sampled_from(list_places(fields)))
    inner = fields
    for key in path:
        inner = inner[key]
    word = st.sampled_from([None, "x", -1, 1e400, [], {}, [1], True, float("nan")])
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[last]
    else:
        inner[last] = data.draw(word)
    try:
        parse_profile(json.dumps(fields))
    except PlanningError as error:
        assert str(error)


def test_what_is_missing_is_an_error_or_called_an_estimate() -> None:
    profile = make_profile(random.Random(2), 4)  # sizes 1, 2, 4
    assert profile.estimate_cell("big", 2).source == "measured"
    assert profile.estimate_cell("big", 3).source == "interpolated"
    assert profile.estimate_cell("big", 8).source == "extrapolated"
    low, high = profile.estimate_cell("big", 2), profile.estimate_cell("big", 4)
    middle = profile.estimate_cell("big", 3)
    for name in FIGURES:
        mean = (np.array(getattr(low, name)) + np.array(getattr(high, name))) / 2
        assert getattr(middle, name) == pytest.approx(tuple(mean))
    assert min(profile.estimate_cell("big", 8).forward_s) > 0
    with pytest.raises(MissingData, match="no GPU 'huge'; it has big, small"):
        profile.estimate_cell("huge", 1)
    with pytest.raises(MissingData, match="no times of big with tensor degree 8"):
        profile.estimate_cell("big", 1, 8)
    with pytest.raises(MissingData, match="no inter-node link from big to huge"):
        profile.network.find("big", "huge", "inter")
    one_size = {key: cell for key, cell in profile.gpus["big"].cells.items() if key[0] == 1}
    alone = replace(profile, gpus={"big": replace(profile.gpus["big"], cells=one_size)})
    with pytest.raises(MissingData, match="only at micro-batch 1"):
        alone.estimate_cell("big", 2)


def test_partial_profiles_merge_and_the_later_one_counts() -> None:
    whole = make_profile(random.Random(3), 4)
    parts = [replace(whole, gpus={kind: gpu}) for kind, gpu in whole.gpus.items()]
    assert parts[0].extend(parts[1]) == whole
    big = whole.gpus["big"]
    halves = [
        replace(big, cells={k: c for k, c in big.cells.items() if k[1] == tensor}, optimizer_s={})
        for tensor in (1, 2)
    ]
    merged = replace(whole, gpus={"big": halves[0]}).extend(replace(whole, gpus={"big": halves[1]}))
    assert merged.gpus["big"].cells == big.cells
    assert merged.gpus["big"].optimizer_s == {}


def test_a_profile_of_something_else_is_refused() -> None:
    profile = make_profile(random.Random(4), 4)
    other = replace(profile.model, name="other")
    with pytest.raises(PlanningError, match=r"of model 'drawn'.*for 'other'"):
        profile.check_is_of(other, profile.software)
    with pytest.raises(PlanningError, match=r"made with torch 2\.13, but this is 2\.14"):
        profile.check_is_of(profile.model, {"torch": "2.14"})
    with pytest.raises(PlanningError, match="its CutPoints have changed"):
        profile.check_is_of(replace(profile.model, num_segments=5), profile.software)


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 1)), min_size=1, max_size=5),
    st.lists(st.floats(0, 1e10), min_size=1, max_size=5),
)
def test_link_times_grow_and_one_by_one_is_as_all_at_once(
    points: list[tuple[float, float]], sizes: list[float]
) -> None:
    ordered = sorted({size for size, _ in points})
    times = sorted(took for _, took in points)[: len(ordered)]
    link = LinkTime(points=tuple(zip(ordered, times, strict=True)))
    found = [link.compute_time(size) for size in sorted(sizes)]
    assert found == sorted(found)
    assert link.compute_times(np.array(sorted(sizes))) == pytest.approx(found)


def test_a_sum_over_nodes_is_slower_than_within_one() -> None:
    links = {("a", "a", "intra"): build_link(0, 100), ("a", "a", "inter"): build_link(0, 10)}
    network = Network(links=links, all_reduces={})  # type: ignore[arg-type]
    assert network.find_all_reduce([("a", 1)], 1e9)[0] == 0
    assert network.find_all_reduce([("a", 4)], 1e9)[0] == pytest.approx(2 * 3 / 4 / 100)
    # Two nodes of one rank: 2 (n - 1) / n of the bytes over the node's link.
    assert network.find_all_reduce([("a", 1)] * 2, 1e9)[0] == pytest.approx(0.1)
    assert network.find_all_reduce([("a", 1)] * 2, 1e9, sharing=4)[0] == pytest.approx(0.4)
    both = network.find_all_reduce([("a", 4)] * 2, 1e9)[0]
    assert both == pytest.approx(0.1 + 2 * 3 / 4 / 100)
    measured = Network(links={}, all_reduces={("a", 8, 4): build_link(0, 5, "measured")})
    assert measured.find_all_reduce([("a", 4)] * 2, 1e9) == (pytest.approx(0.2), "measured")
    assert measured.compute_half("reduce", [("a", 4)] * 2, 1e9) == pytest.approx(0.1)


def test_the_sum_over_thousands_of_like_nodes_asks_each_link_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    compute = LinkTime.compute_times
    monkeypatch.setattr(
        LinkTime, "compute_times", lambda link, sent: asked.append(link) or compute(link, sent)
    )
    links = {("a", "a", "intra"): build_link(0, 100), ("a", "a", "inter"): build_link(0, 10)}
    network = Network(links=links, all_reduces={})  # type: ignore[arg-type]
    network.find_all_reduce([("a", 4)] * 3000, 1e9)
    assert len(asked) == 2


def test_a_half_of_a_sum_is_as_measured_or_half_of_it() -> None:
    halves: dict[tuple[Half, str, int, int], LinkTime] = {
        ("reduce", "a", 8, 4): build_link(0, 4, "measured"),
        ("all_gather", "a", 8, 4): build_link(0, 20, "measured"),
    }
    sums = {("a", 8, 4): build_link(0, 5, "measured")}
    network = Network(links={}, all_reduces=sums, halves=halves)
    nodes = [("a", 4)] * 2
    found = [float(network.compute_half(half, nodes, 1e9)) for half in HALVES]
    assert found == pytest.approx([0.25, 0.1, 0.1, 0.05])
    assert network.compute_half("reduce", nodes, 1e9, sharing=2) == pytest.approx(0.5)
    profile = replace(make_profile(random.Random(1), 4), network=network)
    assert parse_profile(render_profile(profile)) == profile == profile.extend(profile)
    fields = json.loads(render_profile(profile))
    fields["halves"][0]["half"] = "shuffle"
    with pytest.raises(
        PlanningError, match="'shuffle' is not a half of an all-reduce: use one of reduce"
    ):
        parse_profile(json.dumps(fields))
    del fields["halves"]
    assert parse_profile(json.dumps(fields)).network.halves == {}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("a100_40gb", "A100-40"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_gpu_is_found_by_what_tools_call_it(said: str, name: str) -> None:
    assert find_gpu(said).name == name
    assert all(find_gpu(own).name == own for own in GPUS)


def test_an_unknown_or_ambiguous_gpu_is_refused_with_names() -> None:
    with pytest.raises(PlanningError, match="A100-40 or A100-80: give the full name"):
        find_gpu("NVIDIA A100")
    with pytest.raises(PlanningError, match="GPU 'B17' is not in the table; known are A100-40"):
        find_gpu("B17")


def test_sizes_of_gpt2_xl_are_its_own() -> None:
    # 1,557,611,200 as published, the tied head once more, and the final norm.
    model = GPT2_XL.build_model([1])
    assert sum(model.parameters[1]) - 1600 * 50257 == 1_557_611_200


def test_an_estimated_profile_says_so_everywhere() -> None:
    profile = estimate_profile(GPT2_XL, ["A100-40", "A10"], inter_gb_s=5)
    assert {c.source for gpu in profile.gpus.values() for c in gpu.cells.values()} == {"estimate"}
    assert {gpu.optimizer_source for gpu in profile.gpus.values()} == {"estimate"}
    assert {link.source for link in profile.network.links.values()} == {"estimate"}
    assert parse_profile(render_profile(profile)) == profile
    # A quarter to twice of what was measured on A10 (2.342 ms forward of a block).
    assert 0.6e-3 < profile.estimate_cell("A10", 1).forward_s[1] < 4.7e-3


def test_a_name_without_its_size_may_be_several_the_smallest_first() -> None:
    assert [gpu.name for gpu in list_gpus("a100")] == ["A100-40", "A100-80"]
    assert [gpu.name for gpu in list_gpus("A100-SXM4-80GB")] == ["A100-80"]
    assert list_gpus("abacus") == []
