"""torch.profiler's files: real ones, made by this test on CPUs, and small ones of GPU kernels.

The latter are made by the format, as torch 2.13's Kineto writes kernels of CUDA (`cat` kernel,
gpu_memcpy, gpu_memset; microseconds from baseTimeNanoseconds), for no GPU wrote them.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import Vjob
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.kineto import MOST_PIECES, is_profile, read_profile
from vjob.reports.load.tables import Job, load_job
from vjob.reports.page.run_page import render_page
from vjob.reports.page.sections import build_sections
from vjob.reports.page.timeline import build_lanes, build_steps

BASE = 1_727_740_800_000_000_000
STEP_US = 1000.0


def kernel(name: str, ts: float, dur: float, cat: str = "kernel", **more: Any) -> dict[str, Any]:
    facts = {"External id": 1, "device": 0, "stream": 7, "correlation": 3}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": facts, **more}  # fmt: skip


def step(number: int, ts: float, dur: float = STEP_US) -> dict[str, Any]:
    return kernel(f"ProfilerStep#{number}", ts, dur, "user_annotation", args={"External id": 1})


def write(path: Path, rank: int | None, events: list[Any], **head: Any) -> Path:
    """With the head, the white space and the order of a file of Kineto's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A10", "totalGlobalMem": 1}],
        **({"distributedInfo": {"backend": "nccl", "rank": rank}} if rank is not None else {}),
        "host_name": f"n{rank}",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE,
        **head,
    }
    text = json.dumps(shown, indent=2)[:-2]
    text += ',\n    "traceEvents": [\n    \n  ' + ",\n  ".join(json.dumps(e) for e in events)
    text += '\n  ],"traceName": "/x.json" }\n'
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def make_step(number: int, ts: float) -> list[dict[str, Any]]:
    """600 us of kernels on two streams, 200 of them beside 300 of nccl, and a copy of 50."""
    return [
        step(number, ts),
        kernel("void gemm<float, 2>(float*)", ts + 100, 400),
        kernel("elementwise", ts + 300, 200),  # beside it, on another stream
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", ts + 600, 300),
        kernel("elementwise", ts + 600, 200),
        kernel("Memcpy HtoD (Pageable -> Device)", ts, 50, "gpu_memcpy"),
        kernel("Memset (Device)", ts + 50, 5, "gpu_memset"),
        kernel("aten::mm", ts, 20, "cpu_op"),
        {"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": ts, "cat": "ac2g", "name": "ac2g"},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    ]


def load(folder: Path) -> tuple[Job, Any]:
    job = load_job(folder)
    return job, analyse(job)


def test_kernels_are_folded_by_kind_and_step(tmp_path: Path) -> None:
    events = [*make_step(5, 9000.5), *make_step(6, 10_000.5)]
    for rank in (0, 1):
        write(tmp_path / f"attempt-0/trace/n{rank}_7.1.pt.trace.json", rank, events)
    job, analysis = load(tmp_path)
    assert not job.skipped and not analysis.missing_ranks
    table = job.traces.steps
    assert sorted(map(tuple, table[["rank", "step"]].to_numpy())) == [
        (0, 5),
        (0, 6),
        (1, 5),
        (1, 6),
    ]
    row = table.iloc[0]
    assert row["took_s"] == pytest.approx(1e-3)
    assert row["compute_s"] == pytest.approx(600e-6)  # two streams at once count once
    assert row["communication_s"] == pytest.approx(300e-6)
    assert row["memcpy_s"] == pytest.approx(55e-6)
    assert row["idle_s"] == pytest.approx(245e-6)  # 55 to 100, 500 to 600, 900 to 1000
    assert job.traces.zero_ns == BASE + 9_000_500
    names = set(job.events["what"])
    assert {"gemm_float_ 2_", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"} <= names
    found = analysis.find_step("median")
    assert found is not None
    assert found.communication["overlapped_s"].tolist() == pytest.approx([200e-6] * 2)
    assert found.communication["exposed_s"].tolist() == pytest.approx([100e-6] * 2)
    (table,) = [item for item in build_sections(job, analysis) if item.title == "profiled"]
    assert table.rows[1] == ("1", "2", "0.0010", "60.0 %", "30.0 %", "5.5 %", "24.5 %")
    (nodes,) = [item for item in build_sections(job, analysis) if item.title == "nodes"]
    assert [row[3] for row in nodes.rows] == ["NVIDIA A10"] * 2
    lanes = build_lanes(job, analysis)
    first = build_steps(job, lanes)[0]
    assert {kind for kind, *_ in first.facts["labels"]} == {"compute", "communication", "memcpy"}


def test_ranks_are_aligned_by_their_own_base(tmp_path: Path) -> None:
    write(tmp_path / "a.pt.trace.json", 0, make_step(1, 500.0))
    write(
        tmp_path / "b.pt.trace.json.gz",
        1,
        make_step(1, 400.0),
        baseTimeNanoseconds=BASE + 200_000,
    )
    write(tmp_path / "c.pt.trace.json", 2, make_step(1, BASE / 1e3 + 700), baseTimeNanoseconds=0)
    job, _ = load(tmp_path)
    begins = job.traces.steps.set_index("rank")["begin_s"]
    assert begins.tolist() == pytest.approx([0.0, 100e-6, 200e-6], abs=1e-6)


def test_files_without_ranks_or_steps_are_read_in_order(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.pt.trace.json", None, make_step(1, 0)[1:])
    job, _ = load(tmp_path)
    assert job.traces.steps[["rank", "step"]].to_numpy().tolist() == [[0, 0], [1, 0]]


def test_torn_files_give_what_they_have(tmp_path: Path) -> None:
    events = [event for number in range(50) for event in make_step(number, number * 1e3)]
    whole = write(tmp_path / "whole.json", 0, events)
    data = whole.read_bytes()
    for name, torn in {
        "a.pt.trace.json": data[: len(data) // 2],
        "b.pt.trace.json.gz": gzip.compress(data)[:-200],
    }.items():
        (tmp_path / name).write_bytes(torn)
        assert is_profile(tmp_path / name)
        found = read_profile(tmp_path / name)
        assert 10 < len(found.steps) < 50 and "ends early" in found.trouble
    job, _ = load(tmp_path)
    assert len(job.traces.steps) > 20
    assert all("ends early" in why for why in job.skipped.values()) and len(job.skipped) == 2


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"traceEvents": 7}', '{"traceEvents": [', '{"traceEvents": [{]}',
     '{"schemaVersion": 1, "baseTimeNanoseconds": "x", "traceEvents": [{"ph": "X", "cat": 7},'
     '{"ph": "X", "cat": "kernel", "ts": "NaN", "name": "k"}, {"ph": "X", "ts": 1e300}]}'],
)  # fmt: skip
def test_other_json_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "n0.out").write_text("hello\n")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/x.json").write_text(text)
    job, _ = load(tmp_path)
    assert job.traces.steps.empty


def test_a_rank_with_a_trace_of_its_own_keeps_it(tmp_path: Path) -> None:
    from tests.reports.traces import write_rank

    write_rank(tmp_path, 0, [("F", 1, 0, 0, 0, 0, 5_000_000, 0, "")])
    write(tmp_path / "trace/p.pt.trace.json", 0, make_step(9, 0))
    job, _ = load(tmp_path)
    assert job.traces.steps["step"].tolist() == [1] and not job.traces.is_sample
    assert job.skipped == {"p.pt.trace.json": "rank 0 wrote a trace of its own"}


def test_very_many_kernels_are_drawn_as_few_and_summed_exactly(tmp_path: Path) -> None:
    count = 5 * MOST_PIECES
    events = [kernel("k", 2.0 * at, 1.0) for at in range(count)]
    write(tmp_path / "a.pt.trace.json", 0, [step(1, 0, 2.0 * count), *events])
    job, _ = load(tmp_path)
    assert MOST_PIECES / 2 < len(job.events) <= MOST_PIECES
    work = job.events["end_s"] - job.events["ready_s"]
    assert work.sum() == pytest.approx(count * 1e-6)
    assert job.traces.steps["compute_s"].item() == pytest.approx(count * 1e-6)


def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pt.trace.json", 0, [kernel("k" * 300, n, 1) for n in range(40_000)])
    size = path.stat().st_size
    tracemalloc.start()
    try:
        read_profile(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 15e6 and most < size / 2


def test_profiles_in_a_folder_that_the_conf_names_are_of_the_run_that_wrote_them(
    tmp_path: Path,
) -> None:
    vjob = Vjob(tmp_path)
    old = write(tmp_path / "prof/old.pt.trace.json", 0, make_step(77, 0))
    os.utime(old, (1e9, 1e9))
    run = vjob.submit(
        f"name: profiled\nprogram: {{script: {ROOT / 'tests/ranks/profiled_rank.py'}, "
        f"python: {sys.executable}}}\nprofile: {{traces: prof}}\n"
        "cluster: {scheduler: local, walltime_min: 3, nodes: [{group: m, ranks: 2}]}\n"
        f"env: {{PYTHONPATH: {ROOT}, OMP_NUM_THREADS: '1', TRACES: prof/deep}}\n"
    )
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    late = write(tmp_path / "prof/late.pt.trace.json", 0, make_step(78, 0))
    os.utime(late, (time.time() + 3600, time.time() + 3600))
    job, _ = load(run.path)
    (attempt,) = job.sources.attempts
    assert (attempt.folder / "preflight.txt").is_file() and len(attempt.logs) == 1
    table = job.traces.steps
    assert sorted(map(tuple, table[["rank", "step"]].to_numpy())) == [
        (rank, number) for rank in (0, 1) for number in (2, 3, 4)
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_real_run_under_the_profiler_has_a_timeline_and_its_true_steps(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    run = vjob.submit(
        f"name: profiled\nprogram: {{script: {ROOT / 'tests/ranks/profiled_rank.py'}, "
        f"args: [gzip], python: {sys.executable}}}\n"
        "cluster: {scheduler: local, walltime_min: 3, nodes: [{group: m, ranks: 2}]}\n"
        f"env: {{PYTHONPATH: {ROOT}, OMP_NUM_THREADS: '1'}}\n"
    )
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    job, analysis = load(run.path)
    assert not job.skipped
    table = job.traces.steps
    assert sorted(map(tuple, table[["rank", "step"]].to_numpy())) == [
        (rank, number) for rank in (0, 1) for number in (2, 3, 4)
    ]
    assert (table["compute_s"] > 0).all() and (table["communication_s"] > 0).all()
    assert (table["compute_s"] + table["optimizer_s"] <= table["took_s"]).all()
    begins = table.pivot(index="step", columns="rank", values="begin_s")
    assert ((begins[0] - begins[1]).abs() < 5).all()
    lanes = build_lanes(job, analysis)
    assert [lane["rank"] for lane in lanes["0"]] == [0, 1] and len(build_steps(job, lanes)) == 3
    findings = find_all(job, analysis)
    page = render_page(job, analysis, findings, is_partial=False, made_at="now")
    assert "There are no events" not in page
    said = " ".join(finding.sentence for finding in findings)
    assert "No rank wrote a trace" not in said and "cannot be put together" not in said
    text = vjob("report", "last", "--text").stdout
    assert "profiled steps: 3" in text and "traced steps" not in text
