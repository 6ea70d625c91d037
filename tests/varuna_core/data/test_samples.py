"""The order of samples: splits, blends, and a run that goes on at any position and layout."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.data.tokens import write_counting
from varuna_core.data.blend import BlendedSamples, build_blend, open_samples, parse_blend
from varuna_core.data.errors import DataError
from varuna_core.data.gpt import GptSamples, open_gpt
from varuna_core.data.split import NAMES, split_documents
from varuna_core.runtime.engine.microbatch import deal_samples


@given(
    shares=st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda x: sum(x) > 1e-3),
    size=st.integers(1, 10_000),
)
def test_a_split_covers_all_documents_in_order(shares: list[float], size: int) -> None:
    found = split_documents(",".join(map(repr, shares)), size)
    assert list(found) == list(NAMES)
    joined = [number for part in found.values() for number in part]
    assert joined == list(range(size))
    for share, part in zip(shares, found.values(), strict=False):
        assert abs(len(part) - size * share / sum(shares)) <= 2.5


@pytest.mark.parametrize(
    ("text", "size", "lengths"),
    [
        ("969,30,1", 1000, [969, 30, 1]),
        ("969,30,1", 40, [39, 1, 0]),
        ("900,50,50", 1234, [1110, 62, 62]),
        ("1", 7, [7, 0, 0]),
        ("8/1/1", 10, [8, 1, 1]),
        ("1,1,1", 5, [1, 2, 2]),
    ],
)
def test_splits_round_as_megatron_did_in_2023(text: str, size: int, lengths: list[int]) -> None:
    assert [len(part) for part in split_documents(text, size).values()] == lengths


@pytest.mark.parametrize("text", ["", "a,b", "0,0,0", "1,-1,1", "1,2,3,4", "nan", "inf,1"])
def test_a_split_that_is_none_says_what_one_is(text: str) -> None:
    with pytest.raises(DataError, match="split"):
        split_documents(text, 10)


def test_too_few_documents_for_a_part_that_is_needed(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [9] * 12)
    wanted = {"train": 5, "valid": 2}
    with pytest.raises(DataError, match=r'split "969,30,1" gives valid none of 12'):
        open_gpt(str(tmp_path / "a"), split="969,30,1", num_samples=wanted, sequence=4, seed=1)
    del wanted["valid"]
    open_gpt(str(tmp_path / "a"), split="969,30,1", num_samples=wanted, sequence=4, seed=1)


def test_no_tokens_at_all_is_refused(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [0, 0])
    with pytest.raises(DataError, match="no tokens"):
        open_gpt(str(tmp_path / "a"), split="1", num_samples={"train": 1}, sequence=4, seed=1)


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(deadline=None)
@given(raw=weights, size=st.integers(1, 300))
def test_blends_are_those_of_megatron_core(megatron: Any, raw: list[float], size: int) -> None:
    normal = megatron.utils.normalize(raw)
    which, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(
        which, number, np.array(normal), len(normal), size, False
    )
    ours = build_blend(normal, size)
    assert np.array_equal(ours[0], which) and np.array_equal(ours[1], number)


@given(raw=weights, size=st.integers(1, 300))
def test_every_part_of_a_blend_is_near_its_weights(raw: list[float], size: int) -> None:
    normal = (np.array(raw) / sum(raw)).tolist()
    which, number = build_blend(normal, size)
    for one, weight in enumerate(normal):
        taken = which == one
        assert number[taken].tolist() == list(range(int(taken.sum())))
        drift = np.cumsum(taken) - weight * np.arange(1, size + 1)
        assert np.abs(drift).max() <= len(raw)


@pytest.mark.parametrize("text", ["0.5 a 0.5", "a b", "1 a -1 b", "0 a 1 b", ""])
def test_a_blend_that_is_none_says_what_one_is(text: str) -> None:
    with pytest.raises(DataError, match="weights above 0"):
        parse_blend(text)


def test_a_blend_reads_each_data_set_in_its_order(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [50] * 10)
    write_counting(tmp_path / "b", [30] * 10)
    found = open_samples(
        f"0.75 {tmp_path}/a 0.25 {tmp_path}/b",
        split="1", num_samples={"train": 40}, sequence=5, seed=3, may_write=False,
    )["train"]  # fmt: skip
    assert isinstance(found, BlendedSamples) and len(found) == 40
    assert np.bincount(found.which).tolist() == [30, 10]
    for k in range(40):
        expected = found.sets[found.which[k]].read(int(found.number[k]))
        assert np.array_equal(found.read(k), expected)
    assert found.read_batch(range(3)).shape == (3, 6)
    with pytest.raises(DataError, match="sample 40 does not exist"):
        found.read(40)


layouts = st.tuples(st.integers(1, 5), st.integers(1, 4))


@settings(deadline=None)
@given(
    batch=st.integers(1, 9),
    steps=st.lists(layouts, min_size=1, max_size=8),
    num_documents=st.integers(1, 6),
)
def test_a_run_that_changes_its_layout_repeats_and_skips_no_sample(
    batch: int, steps: list[tuple[int, int]], num_documents: int
) -> None:
    """Each step at a layout (replicas, micro-batch) of its own, everything opened anew."""
    with TemporaryDirectory() as name:
        prefix = str(Path(name) / "a")
        write_counting(Path(prefix), [13] * num_documents)

        def open_run() -> GptSamples:
            wanted = {"train": batch * len(steps)}
            return open_gpt(prefix, split="1", num_samples=wanted, sequence=4, seed=5)["train"]

        read: list[tuple[int, ...]] = []
        consumed = 0
        state = open_run().state()
        for replicas, micro in steps:
            samples = open_run()
            samples.check_state(state)
            for share in deal_samples(batch, micro, replicas):
                numbers = range(consumed + share.start, consumed + share.stop)
                read += [tuple(row) for row in samples.read_batch(numbers).tolist()]
            consumed += batch
        straight = open_run().read_batch(range(batch * len(steps))).tolist()
        rows = open_run().maps.shuffle[: batch * len(steps)]
    assert read == [tuple(row) for row in straight]
    assert len(set(rows.tolist())) == len(rows)


def test_going_on_in_another_order_is_refused(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [9] * 12)

    def open_run(**changes: Any) -> GptSamples:
        values = {"split": "1", "num_samples": {"train": 20}, "sequence": 4, "seed": 1} | changes
        return open_gpt(str(tmp_path / "a"), may_write=False, **values)["train"]

    state = open_run().state()
    open_run().check_state(state)
    longer = open_run(num_samples={"train": 26})  # still one epoch, in the same order
    longer.check_state(state)
    assert (longer.read_batch(range(20)) == open_run().read_batch(range(20))).all()
    for changes, says in (
        ({"num_samples": {"train": 30}}, "epochs was 1, is 2"),
        ({"seed": 2}, "seed was 1, is 2"),
        ({"split": "2,1"}, r"documents was \[0, 12\], is \[0, 8\]"),
    ):
        with pytest.raises(DataError, match=says):
            open_run(**changes).check_state(state)
    write_counting(tmp_path / "a", [9] * 11 + [10])
    with pytest.raises(DataError, match="lengths was"):
        open_run().check_state(state)


def test_a_sample_past_the_end_is_refused(tmp_path: Path) -> None:
    write_counting(tmp_path / "a", [9] * 2)
    samples = open_gpt(
        str(tmp_path / "a"), split="1", num_samples={"train": 3}, sequence=4, seed=1
    )["train"]
    for number in (-1, len(samples)):
        with pytest.raises(DataError, match="has no sample"):
            samples.read(number)
