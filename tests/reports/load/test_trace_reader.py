"""Traces read back: as written, torn, broken, mixed with anything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from tests import ROOT
from tests.reports.traces import MS, ORIGIN, Event, write_rank
from varuna_core.records.logs.times import Exchange
from varuna_core.records.logs.trace import COLUMNS, TraceWriter
from vjob.reports.load import trace_lines
from vjob.reports.load.blocks import LONGEST_LINE, BlockReader
from vjob.reports.load.trace_lines import Events, parse_lines, parse_pieces, parse_slowly
from vjob.reports.load.trace_reader import read_events, read_traces, stream_events

NAMES = st.text("FfRBIWabc .-_/:", max_size=12)
NUMBERS = st.integers(-(2**62), 2**62)
ROWS = st.tuples(NAMES, *[NUMBERS] * (len(COLUMNS) - 2), NAMES)


def as_rows(events: Events | None) -> list[list[object]]:
    if events is None:
        return []
    columns = [events.columns[name].tolist() for name in COLUMNS[1:-1]]
    kinds = [events.kind_names[at] for at in events.kinds]
    whats = [events.what_names[at] for at in events.whats]
    return [list(row) for row in zip(kinds, *columns, whats, strict=True)]


def render(rows: list[tuple[object, ...]]) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


@given(st.lists(ROWS, max_size=20), st.lists(st.dictionaries(NAMES, NUMBERS, max_size=9)))
@settings(deadline=None)
def test_whole_lines_are_read_quickly_and_as_they_are(
    rows: list[tuple[object, ...]], objects: list[dict[str, int]]
) -> None:
    texts = [json.dumps(item, separators=(",", ":")).encode() + b"\n" for item in objects]
    lines = render(rows).splitlines(keepends=True)
    mixed = [line for pair in zip(lines, texts, strict=False) for line in pair]
    mixed += lines[len(texts) :] + texts[len(lines) :]
    found = parse_lines(b"".join(mixed))
    assert as_rows(found.events) == [list(row) for row in rows]
    assert found.objects == objects and found.skipped == 0


def test_a_file_of_other_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "node-0.jsonl"
    path.write_bytes(b"{}\n" * 12_000_000)
    traces = read_traces([("attempt-0", path)])
    assert "lines that are not a trace's" in traces.ranks[-1].trouble
    assert sum(trace.skipped for trace in traces.ranks) < 10_000_000


@given(st.lists(ROWS, min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_a_torn_file_loses_its_last_line_only(
    rows: list[tuple[object, ...]], data: st.DataObject
) -> None:
    text = render(rows)
    last = text.rstrip(b"\n").rfind(b"\n") + 1
    cut = data.draw(st.integers(last, len(text) - 2))
    found = parse_lines(text[:cut])
    assert as_rows(found.events) == [list(row) for row in rows[:-1]]
    assert found.skipped == (cut > last)


@given(st.lists(ROWS, max_size=4), st.binary(max_size=60), st.lists(ROWS, max_size=4))
@example([], b'["F",1,0,0,0,0,0,0,"a\\"b"]', [])
@example([], b'["F",1,0,0,1.5,0,0,0,""]', [])
@example([], b'["F",,0,0,0,0,0,0,""]', [])
@example([], b'["F",9223372036854775807,0,0,0,0,0,0,""]', [])
@example([], b"\r\n\x00\xff[[[[" + b"[" * 40, [])
@example([], b'{"trace": {}}\n{"step": [1]}\n{}', [])
@settings(deadline=None)
def test_broken_lines_are_counted_and_the_others_read(
    before: list[tuple[object, ...]], junk: bytes, after: list[tuple[object, ...]]
) -> None:
    found = parse_lines(render(before) + junk + b"\n" + render(after))
    rows = as_rows(found.events)
    assert rows[: len(before)] == [list(row) for row in before]
    assert rows[len(rows) - len(after) :] == [list(row) for row in after]
    lines = [line for line in junk.split(b"\n") if line.strip()]
    extra = len(rows) - len(before) - len(after) + len(found.objects)
    assert extra + found.skipped <= len(lines)


@given(st.lists(ROWS, min_size=1, max_size=10))
@settings(deadline=None)
def test_the_slow_way_reads_the_same(rows: list[tuple[object, ...]]) -> None:
    events, skipped = parse_slowly(render(rows))
    assert as_rows(events) == as_rows(parse_lines(render(rows)).events)
    assert skipped == 0


PIECES = st.one_of(
    st.lists(ROWS, max_size=3).map(render),
    st.tuples(st.lists(ROWS, max_size=3), st.integers(0, 40)).map(
        lambda pair: render(pair[0])[: -pair[1] or None]
    ),
    st.binary(max_size=40),
    st.sampled_from([b"", b"\n", b" \n", b'{"step":1}\n', b' ["F",1,0,0,0,0,0,0,""]\n', b"[\n"]),
)


@given(st.lists(PIECES, max_size=8))
@settings(deadline=None)
def test_pieces_read_together_are_as_each_alone(pieces: list[bytes]) -> None:
    found = list(parse_pieces(enumerate(pieces)))
    assert [key for key, _ in found] == list(range(len(pieces)))
    for piece, (_, lines) in zip(pieces, found, strict=True):
        alone = parse_lines(piece)
        assert as_rows(lines.events) == as_rows(alone.events)
        assert (lines.objects, lines.skipped) == (alone.objects, alone.skipped)


def test_what_the_writer_writes_takes_the_quick_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: bytes) -> tuple[Events, int]:
        raise AssertionError(data)

    monkeypatch.setattr(trace_lines, "parse_slowly", fail)
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1)
    writer.begin_step(1)
    writer("0F0", 0.0, 0.5, 1.0)
    writer.add('odd "kind", with\\all\n', 1.0, 2.0, what="café")
    writer.close()
    traces = read_traces([("", tmp_path / "0.jsonl")])
    assert traces.ranks[0].num_events == 2 and traces.ranks[0].skipped == 0


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_no_file_is_too_broken_to_read(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("job")
    path = write_rank(folder, 0, [("F", 1, 0, 0, 0, 0, MS, 0, "")])
    whole = path.read_bytes()
    for content in (junk, whole + junk, junk + b"\n" + whole):
        path.write_bytes(content)
        traces = read_traces([("", path)])
        read_events(traces, traces.detailed_steps)
        list(stream_events(traces))


def test_what_the_writer_wrote_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "3.jsonl"
    writer = TraceWriter(path, 3, stages=[1], replica=2, log_every=2, facts={"device": "A10"})
    clock = writer.read_clock()
    writer.add_exchanges([Exchange(clock, clock + 5 * MS, clock + 5 * MS, clock + 2 * MS)])
    begin = time.perf_counter()
    for step in (1, 2):
        writer.begin_step(step)
        writer("1F0", begin, begin + 0.25, begin + 1.0)
        writer.add("all-reduce", begin + 1, begin + 2, num_bytes=77, what="gradients")
        writer.end_step()
    writer.close()
    traces = read_traces([("0", path)])
    (trace,) = traces.ranks
    assert (trace.rank, trace.stages, trace.replica, trace.device) == (3, (1,), 2, "A10")
    assert trace.offsets[0][1:] == (4 * MS, MS)
    assert traces.steps["step"].tolist() == [1, 2]
    assert traces.steps["work_s"].tolist() == pytest.approx([0.75, 0.75])
    assert traces.steps["wait_s"].tolist() == pytest.approx([0.25, 0.25])
    assert traces.steps["all-reduce_s"].tolist() == pytest.approx([1, 1])
    assert traces.detailed_steps == [("0", 2)]
    events = read_events(traces, [("0", 2)])
    assert events["kind"].tolist() == ["F", "all-reduce"]
    assert events["bytes"].tolist() == [0, 77]
    assert (events["end_s"] - events["ready_s"]).tolist() == pytest.approx([0.75, 1.0])


def test_clocks_that_drift_are_aligned_between_their_measurements(tmp_path: Path) -> None:
    events = [("F", step, 0, 0, step * 1000 * MS, 0, MS, 0, "") for step in (0, 5, 10)]
    path = write_rank(tmp_path, 0, events)
    text = path.read_text().replace(
        '{"offset":0,"residual":1000,"at":0}',
        '{"offset":0,"residual":1000,"at":0}\n{"offset":20,"residual":9,"at":10000000000}',
    )
    path.write_text(text)
    (trace,) = read_traces([("", path)]).ranks
    assert trace.residual_ns == 1000
    aligned = trace.align(np.array([0, 5000 * MS, 10000 * MS, 20000 * MS])) - ORIGIN
    assert aligned.tolist() == [0, 5000 * MS + 10, 10000 * MS + 20, 20000 * MS + 20]


def test_a_writer_that_starts_again_has_its_own_clock(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, [("F", 1, 0, 0, 0, 0, MS, 0, "")])
    first = path.read_bytes()
    write_rank(tmp_path, 0, [("F", 2, 0, 0, 0, 0, MS, 0, "")], shift_ns=9 * MS)
    path.write_bytes(first[:-9] + b"\n" + path.read_bytes())
    traces = read_traces([("", path)])
    assert [trace.origin - ORIGIN for trace in traces.ranks] == [0, 9 * MS]
    assert traces.steps["step"].tolist() == [2]  # the line of the first was torn
    assert [trace.skipped for trace in traces.ranks] == [1, 0]
    assert len(read_events(traces, [("", 1), ("", 2)])) == 2


def pack_node(paths: list[Path], into: Path, *, cut_at: int, tear: bool = False) -> None:
    """The files of ranks as one of their node, in batches of so many lines in turn."""
    lines = [path.read_bytes().splitlines(keepends=True) for path in paths]
    written = []
    while any(lines):
        for rank, own in enumerate(lines):
            batch = b"".join(own[:cut_at])
            del own[:cut_at]
            if batch:
                written.append(b'\n{"rank":%d}\n' % rank + batch)
    if tear:
        written.insert(len(paths), b'\n{"rank":1}\n["F",7,0')
    into.write_bytes(b"".join(written))


@pytest.mark.parametrize("cut_at", [1, 3, 1000])
def test_a_nodes_ranks_in_one_file_are_as_in_files_of_their_own(
    tmp_path: Path, cut_at: int
) -> None:
    paths = []
    for rank in range(4):
        events: list[Event] = [
            ("F", step, rank, micro, (step * 100 + micro * 10) * MS, 0, (rank + 1) * MS, 0, "")
            for step in range(1, 30)
            for micro in range(3)
        ]
        own = write_rank(tmp_path, rank, events, stage=rank, shift_ns=rank * MS)
        paths.append(own)
    apart = read_traces([("0", path) for path in paths])
    node = tmp_path / "node-0.jsonl"
    pack_node(paths, node, cut_at=cut_at, tear=True)
    together = read_traces([("0", node)])
    assert [trace.rank for trace in together.ranks] == [0, 1, 2, 3]
    assert [trace.offsets for trace in together.ranks] == [trace.offsets for trace in apart.ranks]
    assert [trace.skipped for trace in together.ranks] == [0, 1, 0, 0], "the torn line"
    assert_frame_equal(together.steps, apart.steps)
    wanted = [("0", 3), ("0", 29)]
    assert_frame_equal(read_events(together, wanted), read_events(apart, wanted))
    whole = [pd.concat(stream_events(traces)) for traces in (together, apart)]
    assert_frame_equal(*(frame.reset_index(drop=True) for frame in whole))


def test_a_rank_that_starts_again_in_its_nodes_file_has_its_own_clock(tmp_path: Path) -> None:
    events = [("F", step, 0, 0, step * MS, 0, MS, 0, "") for step in (1, 2)]
    first = [write_rank(tmp_path, rank, events) for rank in range(2)]
    node = tmp_path / "node-0.jsonl"
    pack_node(first, node, cut_at=1000)
    before = node.read_bytes()
    again = write_rank(tmp_path, 0, [("F", 3, 0, 0, 0, 0, MS, 0, "")], shift_ns=9 * MS)
    pack_node([again], node, cut_at=1000)
    node.write_bytes(before + node.read_bytes())
    traces = read_traces([("", node)])
    assert [(trace.rank, trace.origin - ORIGIN) for trace in traces.ranks] == [
        (0, 0),
        (0, 9 * MS),
        (1, 0),
    ]
    assert traces.steps["step"].tolist() == [1, 2, 3, 1, 2]


APPENDS = """
import sys
from pathlib import Path
from varuna_core.records.logs.trace import TraceWriter
rank = int(sys.argv[2])
writer = TraceWriter(Path(sys.argv[1]), rank, stages=[rank], log_every=1)
for step in range(1, 401):
    writer.begin_step(step)
    for number in range(20):
        writer("%dF%d" % (rank, number), 1.0, 1.5, 2.0)
    writer.end_step()
    if step % 7 == 0:
        writer.flush()
writer.close()
"""


def test_ranks_that_append_at_once_do_not_mix(tmp_path: Path) -> None:
    node = tmp_path / "node-0.jsonl"
    ranks = [
        subprocess.Popen([sys.executable, "-c", APPENDS, str(node), str(rank)], cwd=ROOT)
        for rank in range(4)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0, 0]
    traces = read_traces([("", node)])
    assert [(trace.rank, trace.num_events) for trace in traces.ranks] == [
        (rank, 8000) for rank in range(4)
    ]
    assert not any(trace.skipped for trace in traces.ranks)
    events = read_events(traces, traces.detailed_steps)
    assert (events["stage"] == events["rank"]).all() and len(traces.steps) == 1600


def test_another_format_is_said(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text('{"trace":2,"rank":0}\n')
    assert read_traces([("", path)]).ranks[0].trouble == "trace format 2, but this vjob reads 1"


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 20))
@settings(deadline=None)
def test_blocks_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "file"
    data = b"\n".join(lines)
    path.write_bytes(data)
    blocks = list(BlockReader(path, size))
    assert b"".join(block for _, block in blocks) == data
    assert all(data[start : start + len(block)] == block for start, block in blocks)
    assert all(block.endswith(b"\n") for _, block in blocks[:-1])


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"x" * (2 * LONGEST_LINE) + b"\nb\nc")
    reader = BlockReader(path)
    blocks = list(reader)
    assert [block for _, block in blocks] == [b"a\n", b"b\n", b"c"]
    assert all(path.read_bytes()[at : at + len(block)] == block for at, block in blocks)
    assert reader.skipped == 1
