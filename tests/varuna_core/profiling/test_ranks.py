"""A profile on two ranks: shared layers, two kinds of GPU, links and sums, failures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks.profiler_rank import SIZES
from tests.ranks.start import collect, start_ranks
from varuna_core.planner.profile.profile import HALVES
from varuna_core.planner.profile.profile_file import read_profile
from varuna_core.profiling.links import SIZES as MESSAGES
from varuna_core.profiling.links import choose_groups, choose_pairs, make_link
from varuna_core.profiling.ranks import ProfiledRank, deal

pytestmark = pytest.mark.slow

LARGEST = MESSAGES[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one start of two ranks."""
    made = tmp_path_factory.mktemp("profiles")
    with start_ranks("tests.ranks.profiler_rank", 2, str(made)) as ranks:
        done = collect(ranks)
    assert [code for code, _ in done] == [0, 0], "\n".join(out for _, out in done)
    return made


def read_case(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text())[name] for rank in range(2)]


def test_layers_are_measured_shared_and_whole(folder: Path) -> None:
    profile = read_profile(folder / "gpt.profile.json")
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1), (1, 2), (2, 2)}
    whole, shared = profile.model.parameters[1], profile.model.parameters[2]
    hidden = SIZES["hidden"]
    # Biases behind a sum and norms are whole on each rank.
    kept = 6 * hidden
    assert shared[1] == (whole[1] - kept) // 2 + kept
    one, two = (profile.gpus["cpu"].cells[2, degree] for degree in (1, 2))
    assert one.output_bytes == two.output_bytes
    assert two.graph_bytes[1] < one.graph_bytes[1]
    assert read_case(folder, "shared")[0] == read_case(folder, "shared")[1]


def test_messages_and_sums_are_timed_over_their_size(folder: Path) -> None:
    network = read_profile(folder / "gpt.profile.json").network
    assert set(network.links) == {("cpu", "cpu", "intra")}
    assert set(network.all_reduces) == {("cpu", 2, 2)}
    assert set(network.halves) == {(half, "cpu", 2, 2) for half in HALVES}
    for link in network.halves.values():
        sizes = [size for size, _ in link.points]
        assert sizes == list(MESSAGES[len(MESSAGES) // 2 :: 2]) and sizes[-1] == LARGEST
        assert link.points[-1][1] > 2 * link.points[0][1] > 0
    for link in (*network.links.values(), *network.all_reduces.values()):
        assert [size for size, _ in link.points] == list(MESSAGES)
        assert link.source == "measured" and link.points[0][1] > 0
        # 64 MiB take longer than 1 KiB: no noise is that large.
        assert link.points[-1][1] > 2 * link.points[0][1]


def test_one_rank_that_runs_out_stops_those_who_share_with_it(folder: Path) -> None:
    for rank in read_case(folder, "limited"):
        assert rank["cells"] == [[1, 2]]
        (words,) = rank["stopped"]
        assert words.startswith("out of memory at micro-batch 2: segment ")


def test_each_kind_of_gpu_has_its_own_end(folder: Path) -> None:
    for rank, largest in zip(read_case(folder, "mixed"), (8, 4), strict=True):
        assert rank["cells"] == {
            "large": [[1, 1], [2, 1], [4, 1], [8, 1]],
            "small": [[1, 1], [2, 1]],
        }
        assert sorted(rank["links"]) == [["large", "small", "inter"], ["small", "large", "inter"]]
        assert rank["sums"] == []
        assert rank["largest"] == largest


def test_segments_are_dealt_to_the_ranks(folder: Path) -> None:
    first, second = (rank["run"] for rank in read_case(folder, "dealt"))
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4] and first and second


def test_an_error_ends_all_ranks_with_its_words(folder: Path) -> None:
    first, second = (rank["error"] for rank in read_case(folder, "failing"))
    assert second == "KeyError: 'no such batch'"
    assert first == f"RankFailed: rank 1: {second}"
    assert not (folder / "failing.profile.json").exists()


# Who is measured, without ranks.


def place_ranks(*nodes: tuple[str, int]) -> list[ProfiledRank]:
    """Nodes by the kind and the number of their GPUs."""
    found: list[ProfiledRank] = []
    for node, (kind, count) in enumerate(nodes):
        for _ in range(count):
            found.append(ProfiledRank(rank=len(found), kind=kind, node=f"n{node}", memory_bytes=1))
    return found


def test_one_pair_stands_for_its_class() -> None:
    pairs = choose_pairs(place_ranks(("A", 4), ("A", 4), ("B", 2)))
    assert [(p.a, p.b, p.where) for p in pairs] == [
        (0, 1, "intra"),
        (0, 4, "inter"),
        (0, 8, "inter"),
        (8, 9, "intra"),
    ]


def test_groups_are_those_in_use_and_the_usual_ones() -> None:
    places = place_ranks(("A", 4), ("A", 4), ("A", 4), ("B", 1))
    groups = choose_groups(places, [[0, 1, 4, 5], [0, 12], [0, 1, 4]])
    assert groups == {
        ("A", 4, 2): [0, 1, 4, 5],
        ("A", 2, 2): [0, 1],
        ("A", 4, 4): [0, 1, 2, 3],
        ("A", 2, 1): [0, 4],
        ("A", 3, 1): [0, 4, 8],
        ("A", 8, 4): [0, 1, 2, 3, 4, 5, 6, 7],
        ("A", 12, 4): list(range(12)),
    }
    assert choose_groups(place_ranks(("A", 1))) == {}


nodes = st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 5)), min_size=1, max_size=6)


@given(nodes)
def test_every_class_of_pairs_has_one_and_no_other(layout: list[tuple[str, int]]) -> None:
    places = place_ranks(*layout)
    wanted = {
        (frozenset((a.kind, b.kind)), a.node == b.node)
        for a, b in itertools.combinations(places, 2)
    }
    found = [
        (frozenset((places[p.a].kind, places[p.b].kind)), p.where == "intra")
        for p in choose_pairs(places)
    ]
    assert set(found) == wanted and len(found) == len(wanted)


@given(nodes)
def test_groups_are_regular(layout: list[tuple[str, int]]) -> None:
    places = place_ranks(*layout)
    for (kind, count, on_a_node), ranks in choose_groups(places).items():
        assert len(set(ranks)) == count > 1
        assert {places[rank].kind for rank in ranks} == {kind}
        held = [places[rank].node for rank in ranks]
        assert {held.count(node) for node in held} == {on_a_node}


@given(st.integers(1, 6), st.integers(0, 20))
def test_segments_are_dealt_once(num_entries: int, num_samples: int) -> None:
    entries = {"A": [[2 * e, 2 * e + 1] for e in range(num_entries)]}
    samples = list(range(num_samples))
    for side in range(2):
        dealt = [deal(entries, samples, 2 * e + side) for e in range(num_entries)]
        assert sorted(itertools.chain.from_iterable(dealt)) == samples
    assert deal(entries, samples, 99) == ()


@given(st.dictionaries(st.integers(1, 10**9), st.floats(0, 100), min_size=1))
def test_a_links_times_never_shrink(times: dict[int, float]) -> None:
    points = make_link(times).points
    assert [size for size, _ in points] == sorted(times)
    assert all(a <= b for (_, a), (_, b) in itertools.pairwise(points))
