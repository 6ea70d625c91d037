"""Megatron's standard output, GPU samples and bare folders."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.megatron_lines import format_timers, format_timers_max, format_timers_minmax
from varuna_core.records.exits import rank_exit
from varuna_core.records.logs.training_log import (
    Iteration,
    MemoryLine,
    format_iteration,
    format_memory,
)
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.export.text import render_text
from vjob.reports.load import blocks, gpu_log, sources
from vjob.reports.load.blocks import Thinned
from vjob.reports.load.gpu_log import NodeFaults, read_gpus
from vjob.reports.load.sources import MOST_ATTEMPTS, SourceError, locate_sources
from vjob.reports.load.tables import load_job
from vjob.reports.load.training_log import LogReader, LogTables

SEED_LINES = """\
[before the start of training step] datetime: 2023-06-14 16:08:12 
[Rank 24] (after 20 iterations) memory (MB) | allocated: 3035.10107421875 | max allocated: \
3869.255859375 | reserved: 4020.0 | max reserved: 4020.0
 iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration (ms): \
1423.8 | learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | loss scale: \
262144.0 | grad norm: 16.666 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration       40/      50 | consumed samples:         2560 | elapsed time per iteration (ms): \
1373.9 | learning rate: 1.172E-06 | global batch size:    64 | lm loss: 9.237929E+00 | loss scale: \
262144.0 | grad norm: 5.335 | number of skipped iterations:   0 | number of nan iterations:   0 |
"""  # Megatron ends its phase lines with a blank
SEED_GPU = "[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |\n"


def read(text: str | bytes, folder: Path, name: str = "n067") -> LogTables:
    path = folder / f"{name}.out"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tables = LogTables()
    LogReader(tables, "", name, path).read()
    return tables


def line(step: int, time_ms: float = 100.0) -> str:
    return format_iteration(Iteration(step, 50, time_ms=time_ms, losses={"lm loss": 9.0})) + "\n"


def test_the_printed_samples_of_the_seed_parse(tmp_path: Path) -> None:
    tables = read(SEED_LINES, tmp_path).build_tables()
    table = tables["iterations"]
    assert table["step"].tolist() == [30, 40]
    assert table["time_ms"].tolist() == [1423.8, 1373.9]
    assert table["loss"].tolist() == [10.17721, 9.237929]
    assert table["loss_scale"].tolist() == [262144.0] * 2
    (memory,) = tables["memory"].to_dict("records")
    assert (memory["rank"], memory["max_allocated"]) == (24, 3869.255859375)


def test_a_bare_folder_of_the_seed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "n067.out").write_text(SEED_LINES)
    (tmp_path / "n061.out").write_text("NODE_RANK: 1\nPARTITION: 0-11-8-8-8-8-5-0\nMODEL: xl\n")
    (tmp_path / "n060.gpu").write_text(SEED_GPU * 3)
    job = load_job(tmp_path)
    assert job.job_info == {"NODE_RANK": "1", "PARTITION": "0-11-8-8-8-8-5-0", "MODEL": "xl"}
    analysis = analyse(job)
    text = render_text(job, analysis, find_all(job, analysis), is_partial=False)
    assert "10 steps up to 30: mean 1.4238 s" in text
    assert "rank 24: 4020 MB" in text
    assert "PARTITION: 0-11-8-8-8-8-5-0" in text


@pytest.mark.parametrize("tag", ["", "3: ", "[rank3]: ", "[default3]:"])
def test_timers_of_all_ranks_with_the_seeds_lists(tmp_path: Path, tag: str) -> None:
    text = ""
    for step, value in ((10, 900.0), (20, 100.0), (30, 300.0), (40, 200.0), (50, 50.0)):
        times = [1686000000.25 + step, 1686000000.5 + step]
        calls = {("forward-compute", rank): (times, [t + 0.125 for t in times]) for rank in (0, 1)}
        timers = {"forward-compute": {0: value, 1: 2 * value}, "optimizer": {1: 1.5}}
        text += line(step, value) + format_timers(timers, calls) + "\n"
    text = "".join(tag + part for part in text.splitlines(keepends=True))
    tables = read(text, tmp_path).build_tables()
    by_rank = tables["timers_by_rank"].set_index(["timer", "rank"])
    assert by_rank.loc[("forward-compute", 1), "sum_ms"] == 2 * 1550
    assert by_rank.loc[("optimizer", 1), "count"] == 5
    by_step = tables["timers_by_step"].set_index(["timer", "step"])
    assert by_step.loc[("forward-compute", 30)].tolist() == [300.0, 600.0]
    calls_table = tables["timer_calls"]
    assert sorted(calls_table["step"].unique()) == [10, 30, 40, 50]  # first, slowest, last two
    assert len(calls_table) == 4 * 2 * 2
    assert (calls_table["end"] - calls_table["begin"]).tolist() == [0.125] * 16


def test_timers_by_their_extremes(tmp_path: Path) -> None:
    text = line(10) + format_timers_minmax({"forward-compute": (1.5, 2.5)}) + "\n"
    text += line(20) + format_timers_max({"forward-compute": 3.25}) + "\n"
    by_step = read(text, tmp_path).build_tables()["timers_by_step"]
    assert by_step[["step", "min_ms", "max_ms"]].to_numpy().tolist() == [
        [10, 1.5, 2.5],
        [20, 3.25, 3.25],
    ]


def test_other_lines_between_those_of_a_block_do_no_harm(tmp_path: Path) -> None:
    block = format_timers({"forward-compute": {0: 1.0, 1: 2.0}}).splitlines(keepends=True)
    noise = format_memory(MemoryLine(7, 10, 1.0, 2.0, 3.0, 4.0)) + "\n  warnings.warn(\n"
    text = line(10) + noise.join(block) + "\n"
    tables = read(text, tmp_path).build_tables()
    assert len(tables["timers_by_rank"]) == 2
    assert tables["memory"]["rank"].unique().tolist() == [7]


def test_a_torn_line_is_counted_and_never_half_read(tmp_path: Path) -> None:
    whole = line(10)
    for cut in range(len(whole) - 2):
        tables = read(whole[:cut], tmp_path)
        for row in tables.iterations.rows:
            assert row["loss"] in (None, 9.0) and row["time_ms"] in (None, 100.0)
    assert sum(read("iteration 3/ 50 | lm lo\n" + whole, tmp_path).skipped.values()) == 1


PIECES = st.sampled_from(
    [
        *SEED_LINES.encode().splitlines(keepends=True),
        *format_timers({"a-b": {0: 1.0}}, {("a-b", 0): ([1.0], [2.0])}).encode().splitlines(True),
        format_timers_minmax({"a": (1.0, 2.0)}).encode(),
        SEED_GPU.encode(),
        b"NODE_RANK: ",
        b"iteration 99999999999999999999/ 5 | lm loss: nan | number of nan iterations: inf |\n",
        b"iteration 1/ 5 | consumed samples: 1e300 | number of skipped iterations: 1e300 |\n",
        b"<script>alert(1)</script>\n",
        b'{"time": 1, "gpus": [{"index": 0, "memory_used_mb": "x"}]}\n',
        b'{"time": 1e999, "gpus": []}\n',
    ]
)


@given(st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=15))
@example([b"\xff\xfe\x00iteration \n", b"iteration 1/ 2 |" * 5])
@settings(deadline=None, max_examples=60)
def test_no_log_is_too_broken_for_a_report(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    for name in ("n0.out", "n1.gpu", "n2.gpu.jsonl", "n3.txt"):
        (folder / name).write_bytes(b"".join(pieces))
    job = load_job(folder)
    analysis = analyse(job)
    text = render_text(job, analysis, find_all(job, analysis), is_partial=True)
    assert all(char == "\n" or char.isprintable() for char in text)


def test_gpu_samples_as_json_and_as_text(tmp_path: Path) -> None:
    path = tmp_path / "n0.gpu.jsonl"
    path.write_text(
        '{"time": 5.0, "gpus": [{"index": 1, "name": "A10", "utilization": 50, '
        '"memory_used_mb": 7, "memory_total_mb": 9}]}\n{"time": 6.0, "gpu\n'
    )
    rows, skipped = read_gpus(path, NodeFaults("0", "n0"))
    assert skipped == 1
    assert (rows[0]["gpu"], rows[0]["utilization"], rows[0]["memory_used_mb"]) == ("1", 50.0, 7.0)
    text = tmp_path / "n0.gpu"
    text.write_text("n060  Wed Jun 14 16:08:12 2023  525.60\n" + SEED_GPU)
    (row,), skipped = read_gpus(text, NodeFaults("", "n0"))
    assert skipped == 0 and row["time"] is not None and row["memory_total_mb"] == 22731


def test_a_folder_of_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no attempt-<n> of a run, no <node>\.out"):
        locate_sources(tmp_path)
    with pytest.raises(SourceError, match="neither a folder nor a file"):
        locate_sources(tmp_path / "none")


@given(st.integers(0, 500), st.integers(1, 20))
@settings(deadline=None)
def test_thinned_rows_are_evenly_spread(count: int, most: int) -> None:
    thinned = Thinned(most)
    for number in range(count):
        thinned.append({"n": number})
    assert len(thinned.rows) <= most
    assert [row["n"] for row in thinned.rows] == list(range(0, count, thinned.stride))


def test_of_very_many_attempts_the_newest_are_read_and_the_others_counted(tmp_path: Path) -> None:
    for number in range(MOST_ATTEMPTS + 3):
        (tmp_path / f"attempt-{number}").mkdir()
    (tmp_path / "record.json").write_text("{}")
    found = locate_sources(tmp_path)
    assert [one.label for one in found.attempts][:1] == ["3"] and found.num_left_out == 3
    assert load_job(tmp_path).skipped["older attempts"] == "3 attempts: only the newest are read"


def test_of_very_many_files_some_are_opened_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_NODES", 3)
    opened = []
    monkeypatch.setattr(LogReader, "read", lambda self: opened.append(self.node))
    for folder in ("attempt-0", "attempt-1/earlier-0", "attempt-1"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            (tmp_path / folder / f"n{number}.out").write_text("0: step 1 loss 2\n")
    (tmp_path / "record.json").write_text("{}")
    job = load_job(tmp_path)
    assert opened == ["n0", "n1", "n2"] * 2
    assert job.skipped["1/*"] == "9 files were not read: there are too many"
    assert job.skipped["older attempts"] == "1 attempts: only the newest are read"


def test_nodes_whose_logs_are_not_read_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_NODES", 2)
    for number in range(3):
        text = f"NNODES=3\nNODE_RANK={number}\n0: step 1 loss 2\n"
        (tmp_path / f"n{number}.out").write_text(text)
    job = load_job(tmp_path)
    assert job.missing is None and job.skipped["*"] == "1 files were not read: there are too many"


@pytest.mark.parametrize("ends_so", [False, True])
def test_a_hole_of_many_gigabytes_is_not_read(
    ends_so: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that somebody cut while its program wrote on begins with one."""
    path, hole = tmp_path / "n0.out", 40 << 30
    with path.open("wb") as out:
        out.write(b"first\n")
        out.seek(hole)
        out.truncate() if ends_so else out.write(b"\nlast\n")
    num_read = 0

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal num_read
            num_read += 1
            return super().read(size)

    monkeypatch.setattr(blocks, "open_file", lambda path: Counted(io.FileIO(path)))
    reader = blocks.BlockReader(path)
    text = b"".join(block for _, block in reader)
    assert text == (b"first\n" if ends_so else b"first\nlast\n")
    assert reader.skipped == 1 and num_read < 20
    starts = [start for start, _ in reader]
    assert starts[1:] == ([] if ends_so else [hole + 1])


def test_names_that_are_not_of_utf_8_make_a_report(tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-0"
    (attempt / "exit").mkdir(parents=True)
    (attempt / "caf\udce9.out").write_text(line(1))
    whole = rank_exit(0, "\ud800", 0, stopped=False, started=0.0, ended=1.0, error="")
    bad = {**asdict(whole), "code": None}
    (attempt / "exit/node-0.json").write_text(json.dumps({"exits": [asdict(whole), bad]}))
    job = load_job(tmp_path)
    assert job.exits["node"].tolist() == ["?"] and "caf?" in set(job.logs["iterations"]["node"])
    analyse(job)


def test_lines_that_are_no_samples_are_counted_and_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n.gpu.jsonl"
    path.write_bytes(b'{}\n\n# gpus\n{"gpus": 3}\n' + b"{}\n" * 500)
    parsed: list[str] = []
    monkeypatch.setattr(gpu_log, "_parse_sample", lambda text: parsed.append(text))
    assert read_gpus(path, NodeFaults("0", "n")) == ([], 502)
    assert parsed == ['{"gpus": 3}']
