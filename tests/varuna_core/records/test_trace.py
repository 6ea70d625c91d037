"""The trace writer: what it writes, and that it never troubles the training."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from varuna_core.records.logs import trace as traces
from varuna_core.records.logs.times import Exchange, choose_offset, find_offset
from varuna_core.records.logs.trace import COLUMNS, TraceWriter


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_steps(writer: TraceWriter, steps: range) -> None:
    for step in steps:
        writer.begin_step(step)
        writer(f"2F{step}", 1.0, 1.5, 3.5)
        writer(f"2B{step}", 4.0, 4.0, 5.0)
        writer.end_step()


def test_totals_of_every_step_and_details_of_some(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "7.jsonl", 7, stages=[2], replica=1, log_every=2)
    run_steps(writer, range(1, 4))
    writer.close()
    header, *lines = read(tmp_path / "7.jsonl")
    assert (header["trace"], header["rank"], header["stages"]) == (1, 7, [2])
    assert (header["replica"], tuple(header["columns"])) == (1, COLUMNS)
    events = [line for line in lines if isinstance(line, list)]
    assert [event[:4] for event in events] == [["F", 2, 2, 2], ["B", 2, 2, 2]]
    assert [event[5:] for event in events] == [[5 * 10**8, 2 * 10**9, 0, ""], [0, 10**9, 0, ""]]
    steps = [line for line in lines if isinstance(line, dict)]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert steps[0]["sums"] == {"F": [1, 5 * 10**8, 2 * 10**9], "B": [1, 0, 10**9]}
    assert steps[0]["last"] - steps[0]["first"] == 4 * 10**9


def test_a_step_that_was_cut_off_keeps_its_events(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=100)
    writer.begin_step(7)
    writer("0F0", 1.0, 1.0, 2.0)
    writer.close()
    _, event = read(tmp_path / "0.jsonl")
    assert event[:2] == ["F", 7]


def test_of_a_step_with_too_many_events_the_first_are_kept_and_all_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces, "MOST_EVENTS", 3)
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1)
    for step in (1, 2):
        writer.begin_step(step)
        for number in range(10 if step == 1 else 2):
            writer.add("optimizer", 1.0, 2.0, microbatch=number)
        writer.end_step()
    writer.close()
    _, *lines = read(tmp_path / "0.jsonl")
    events = [line for line in lines if isinstance(line, list)]
    assert [event[1:4:2] for event in events] == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    sums = [line["sums"]["optimizer"] for line in lines if isinstance(line, dict)]
    assert sums == [[10, 0, 10 * 10**9], [2, 0, 2 * 10**9]]
    assert caplog.text.count("step 1 has too many spans") == len(caplog.records) == 1


def test_without_an_end_a_step_lasts_to_the_next(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "0.jsonl", 0)
    for step in (1, 2):
        writer.begin_step(step)
    writer.end_step()
    writer.close()
    _, first, second = read(tmp_path / "0.jsonl")
    assert second["begin"] == first["begin"] + first["took"]


def test_a_full_disk_ends_the_trace_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full refuses every write; so does a file size limit, in the midst of a line."""
    writer = TraceWriter(Path("/dev/full"), 0)
    with caplog.at_level(logging.WARNING):
        run_steps(writer, range(1, 2000))
        writer.flush()
        writer.close()
    assert writer.is_stopped
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full is no longer written, but the training continues: No space left on device"
    ]


def test_a_file_that_may_not_grow_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, kept[1]))
        writer = TraceWriter(path, 0)
        run_steps(writer, range(1, 40))
        writer.flush()
        assert writer.is_stopped
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, handler)
    *whole, _ = path.read_text().splitlines()
    assert len(whole) > 2 and all(json.loads(line) for line in whole)
    again = TraceWriter(path, 0)  # a restart on the torn file
    again.close()
    assert json.loads(path.read_text().splitlines()[-1])["rank"] == 0


@pytest.mark.parametrize("wrong", [{"num_bytes": "many"}, {"microbatch": 1.5}, {"begin": None}])
def test_what_is_no_number_ends_the_trace_not_the_training(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1)
    writer.begin_step(1)
    writer.add("send", **{"begin": 1.0, "end": 2.0, **wrong})
    writer.end_step()
    assert writer.is_stopped
    writer.begin_step(2)
    writer.close()


def test_a_folder_that_is_missing_ends_the_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "none" / "0.jsonl", 0)
    assert writer.is_stopped
    run_steps(writer, range(3))
    writer.close()


def test_events_of_other_threads_are_kept(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1)
    writer.begin_step(1)
    threads = [
        threading.Thread(target=lambda: [writer.add("send", 1.0, 2.0) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.end_step()
    writer.close()
    assert read(tmp_path / "0.jsonl")[-1]["sums"]["send"][0] == 2000


def test_a_process_that_exits_without_closing_leaves_its_trace(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from varuna_core.records.logs.trace import TraceWriter
writer = TraceWriter(Path({str(tmp_path)!r}) / "0.jsonl", 0, log_every=1)
writer.begin_step(1)
writer("0F0", 1.0, 1.0, 2.0)
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 3
    assert len(read(tmp_path / "0.jsonl")) == 2


def test_the_file_is_the_users_own(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "0.jsonl", 0).close()
    assert os.stat(tmp_path / "0.jsonl").st_mode & 0o777 == 0o600


@given(
    true=st.integers(-(10**15), 10**15),
    there=st.integers(0, 10**9),
    back=st.integers(0, 10**9),
    held=st.integers(0, 10**9),
)
@settings(deadline=None)
def test_an_offset_is_right_to_within_its_residual(
    true: int, there: int, back: int, held: int
) -> None:
    heard = there + true
    found = find_offset(Exchange(0, heard, heard + held, there + held + back))
    assert abs(found.offset_ns - true) <= found.residual_ns
    assert found.residual_ns <= (there + back) // 2 + 1


def test_the_quickest_exchange_knows_best() -> None:
    slow, quick = Exchange(0, 900, 900, 1000), Exchange(0, 15, 15, 20)
    best = choose_offset([slow, quick])
    assert best is not None and (best.offset_ns, best.residual_ns) == (5, 10)
    assert choose_offset([]) is None


def test_a_buffer_is_written_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "FLUSH_S", 1e9)
    monkeypatch.setattr(traces, "FLUSH_BYTES", 3000)
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1)
    sizes = set()
    for step in range(40):
        run_steps(writer, range(step, step + 1))
        text = (tmp_path / "0.jsonl").read_bytes()
        assert text.endswith(b"\n")
        sizes.add(len(text))
    writer.close()
    assert 2 < len(sizes) < 20
