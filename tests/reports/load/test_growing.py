"""Traces of a job that goes on, read again and again: only what was added, and the same tables."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

from tests.reports.traces import write_simulated
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.load import blocks
from vjob.reports.load.blocks import Replaced
from vjob.reports.load.trace_reader import GrowingTraces, read_events, read_traces
from vjob.shelf.web.report import ReportSource


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, one of which was started again."""
    folder = tmp_path_factory.mktemp("whole")
    write_simulated(folder, build_schedule("1f1b", 2, 4), build_even_costs(2), steps=range(1, 400))
    again = (folder / "trace/1.jsonl").read_text().split("\n", 1)[0]
    text = (folder / "trace/1.jsonl").read_text()
    middle = text.index("\n", len(text) // 2) + 1
    (folder / "trace/1.jsonl").write_text(text[:middle] + again + "\n" + text[middle:])
    return folder / "trace"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that were read of traces."""
    numbers: list[int] = []
    opened = blocks.open_file

    class Counting:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def read(self, size: int) -> bytes:
            data: bytes = self.handle.read(size)
            numbers.append(len(data))
            return data

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            self.handle.close()

    monkeypatch.setattr(blocks, "open_file", lambda path: Counting(opened(path)))
    yield numbers


def grow(whole: Path, folder: Path, share: float) -> list[tuple[str, Path]]:
    """Both files up to a place, which may be within a line."""
    folder.mkdir(exist_ok=True)
    for path in whole.iterdir():
        data = path.read_bytes()[: round(share * path.stat().st_size)]
        with open(folder / path.name, "ab") as handle:
            handle.write(data[handle.tell() :])
    return [("", path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_in_parts_is_what_is_read_at_once(
    seed: int, whole: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    growing = GrowingTraces()
    for share in [*sorted(chance.random() for _ in range(6)), 1.0]:
        paths = grow(whole, tmp_path / "trace", share)
        parts = growing.read(paths)
        wanted = chance.sample(parts.detailed_steps, min(5, len(parts.detailed_steps)))
        events = growing.read_events(parts, wanted)
        # At once, a torn last line is counted; while files grow it is none yet.
        for _, path in paths:
            data = path.read_bytes()
            path.with_suffix(".whole").write_bytes(data[: data.rfind(b"\n") + 1])
        same = [(label, path.with_suffix(".whole")) for label, path in paths]
        once = read_traces(same)
        assert_frame_equal(parts.steps, once.steps)
        assert_frame_equal(events, read_events(once, wanted))
        assert [trace.skipped for trace in parts.ranks] == [t.skipped for t in once.ranks]
        for _, path in same:
            path.unlink()


def test_of_a_trace_that_grows_only_what_is_new_is_read(
    whole: Path, tmp_path: Path, counted: list[int]
) -> None:
    paths = grow(whole, tmp_path / "trace", 0.95)
    growing = GrowingTraces()
    traces = growing.read(paths)
    growing.read_events(traces, traces.detailed_steps[::8])
    before = sum(path.stat().st_size for _, path in paths)
    assert sum(counted) >= before
    counted.clear()
    traces = growing.read(grow(whole, tmp_path / "trace", 1.0))
    added = sum(path.stat().st_size for _, path in paths) - before
    assert 0 < sum(counted) < added + 1000
    counted.clear()
    growing.read_events(traces, traces.detailed_steps[:380:8])
    assert sum(counted) == 0
    growing.read_events(traces, traces.detailed_steps[::8])
    assert 0 < sum(counted) < 2 * added


def test_a_file_that_was_replaced_is_noticed(whole: Path, tmp_path: Path) -> None:
    paths = grow(whole, tmp_path / "trace", 0.5)
    growing = GrowingTraces()
    growing.read(paths)
    shutil.copy(paths[0][1], tmp_path / "other")
    (tmp_path / "other").replace(paths[0][1])
    with pytest.raises(Replaced):
        growing.read(paths)
    growing = GrowingTraces()
    growing.read(paths)
    paths[1][1].write_bytes(b"")
    with pytest.raises(Replaced):
        growing.read(paths)
    with pytest.raises(Replaced):
        growing.read(paths[:1])


def test_the_live_page_reads_what_is_new_and_starts_again_after_a_replacement(
    whole: Path, tmp_path: Path, counted: list[int]
) -> None:
    source = ReportSource(tmp_path, None)
    for share in (0.9, 0.95):
        counted.clear()
        paths = grow(whole, tmp_path / "trace", share)
        made = source.make()
        assert made.parts is not None
    size = sum(path.stat().st_size for _, path in paths)
    assert 0 < sum(counted) < size / 2
    paths[0][1].rename(tmp_path / "old")
    grow(whole, tmp_path / "trace", 1.0)
    assert source.make().parts is not None
