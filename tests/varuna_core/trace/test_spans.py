"""Steps and spans of a script: what is written, and when nothing is."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Vjob
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job
from vjob.reports.page.timeline import build_lanes, build_steps

BEGIN = "from varuna_core import trace\nimport os, sys, threading, time\n"


def run(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run lines as a rank does; its trace is `folder/3.jsonl`."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VJOB_TRACE": str(folder / "3.jsonl"), **env},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def trace(folder: Path, code: str, **env: str) -> list[Any]:
    done = run(folder, code, **env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return read(folder)


def read(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "3.jsonl").read_text().splitlines()]


def list_kinds(lines: list[Any]) -> list[tuple[Any, ...]]:
    """(kind, step, micro-batch, what) of the events."""
    return [(*line[:2], line[3], line[8]) for line in lines if isinstance(line, list)]


def list_steps(lines: list[Any]) -> list[dict[str, Any]]:
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def test_without_a_trace_nothing_is_written_and_decorators_change_nothing(tmp_path: Path) -> None:
    code = """
def plain(): return 7
assert trace.span("load")(plain) is plain and trace.step()(plain) is plain
with trace.step(1), trace.span("forward"): pass
assert trace.get_writer() is None and "torch" not in sys.modules
"""
    done = run(tmp_path, code, VJOB_TRACE="")
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def test_the_header_says_who_writes_and_torch_is_not_imported(tmp_path: Path) -> None:
    code = "trace.start(every=5)\nassert 'torch' not in sys.modules"
    (header,) = trace(tmp_path, code, VJOB_STAGE="1", VJOB_REPLICA="4")
    assert (header["rank"], header["stages"], header["replica"]) == (3, [1], 4)
    assert header["log_every"] == 5


def test_each_step_has_sums_and_some_have_details(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
for number in range(1, 23):
    with trace.step(number):
        with trace.span("forward", stage=2, micro_batch=1): pass
""")  # fmt: skip
    assert [line["step"] for line in list_steps(lines)] == list(range(1, 23))
    assert all(line["sums"]["F"][0] == 1 for line in list_steps(lines))
    assert [event[1] for event in list_kinds(lines)] == [1, 2, 10, 20]
    assert lines[1][2:4] == [2, 1]


def test_steps_without_numbers_are_counted_and_functions_are_steps(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
@trace.step()
def train():
    with trace.step(): return load()
@trace.span("load")
def load(): return 5
with trace.step(6): pass
assert train() == train() == 5
""")  # fmt: skip
    assert [line["step"] for line in list_steps(lines)] == [6, 7, 8]
    assert list_kinds(lines) == [("data", 7, -1, "")]


def test_time_in_a_span_of_a_known_kind_is_taken_out_of_the_one_around_it(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
with trace.step(1):
    with trace.span("micro-batch"):
        with trace.span("forward", micro_batch=0):
            with trace.span("attention"):
                with trace.span("communication"): time.sleep(0.05)
        with trace.span("evaluation"): pass
    with trace.span("alone"): time.sleep(0.01)
""")  # fmt: skip
    assert sorted(list_kinds(lines)) == [
        ("F", 1, 0, ""),
        ("F", 1, 0, "goes on"),
        ("communication", 1, 0, ""),
        ("detail", 1, -1, "evaluation"),
        ("detail", 1, -1, "micro-batch"),
        ("detail", 1, 0, "attention"),
        ("other", 1, -1, "alone"),
    ]
    (step,) = list_steps(lines)
    sums = step["sums"]
    assert set(sums) == {"F", "communication", "other"} and sums["F"][0] == 1
    assert sums["communication"][2] >= 5e7 and sums["other"][2] >= 1e7
    assert sum(work for _, _, work in sums.values()) <= step["took"]


def test_a_step_that_raises_keeps_its_spans_and_has_no_sums(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
try:
    with trace.step(1), trace.span("forward"): raise KeyError
except KeyError: pass
with trace.step(2): pass
""")  # fmt: skip
    assert list_kinds(lines) == [("F", 1, -1, "")]
    assert [(line["step"], line["sums"]) for line in list_steps(lines)] == [(2, {})]


def test_sync_is_called_at_both_ends(tmp_path: Path) -> None:
    trace(tmp_path, """
calls = []
with trace.step(1, sync=lambda: calls.append("step")):
    with trace.span("forward", sync=lambda: calls.append("span")): pass
assert calls == ["step", "span", "span", "step"]
""")  # fmt: skip


def test_spans_of_threads_are_apart(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
def load():
    for _ in range(500):
        with trace.span("load"):
            with trace.span("decode"): pass
with trace.step(1):
    threads = [threading.Thread(target=load) for _ in range(4)]
    with trace.span("forward"):
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
""")  # fmt: skip
    (step,) = list_steps(lines)
    assert {kind: three[0] for kind, three in step["sums"].items()} == {"data": 2000, "F": 1}


def test_children_of_the_process_write_nothing(tmp_path: Path) -> None:
    code = """
with trace.step(1), trace.span("forward"):
    child = os.fork()
    if child == 0:
        with trace.span("load"): pass
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with trace.span("load"): pass
"""
    own = BEGIN + "with trace.step(9), trace.span('load'): pass"
    more = f"import subprocess\nsubprocess.run([sys.executable, '-c', {own!r}], check=True)"
    lines = trace(tmp_path, code + more)
    assert [line["step"] for line in list_steps(lines)] == [1]
    assert [event[0] for event in list_kinds(lines)] == ["F", "data", "F"]


def test_a_killed_process_leaves_what_was_flushed(tmp_path: Path) -> None:
    done = run(tmp_path, """
from varuna_core.records.logs import trace as writer
writer.FLUSH_BYTES = 0
for number in (1, 2):
    with trace.step(number): pass
with trace.step(3), trace.span("forward"): os.kill(os.getpid(), 9)
""")  # fmt: skip
    assert done.returncode == -9
    assert [line["step"] for line in list_steps(read(tmp_path))] == [1, 2]


def test_what_cannot_be_written_stops_the_trace_and_not_the_script(tmp_path: Path) -> None:
    done = run(
        tmp_path, "for n in range(3):\n with trace.step(n), trace.span('x', stage='y'): pass"
    )
    assert done.returncode == 0 and done.stderr.count("is no longer written") == 1
    done = run(tmp_path / "gone", "with trace.step(1): pass")
    assert done.returncode == 0 and "No such file" in done.stderr


def test_numbers_of_other_libraries_are_steps_and_other_things_are_counted(tmp_path: Path) -> None:
    code = "import numpy\nfor n in (numpy.int64(4), 'x', 7.0):\n with trace.step(n): pass"
    done = run(tmp_path, code)
    assert done.returncode == 0 and done.stderr.count("not given a whole number") == 1, done.stderr
    assert [line["step"] for line in list_steps(read(tmp_path))] == [4, 5, 6]


def test_a_step_of_very_many_spans_is_bounded(tmp_path: Path) -> None:
    done = run(tmp_path, """
from varuna_core.records.logs import trace as writer
writer.MOST_EVENTS = 100
for number in (1, 2):
    with trace.step(number):
        for _ in range(950):
            with trace.span("forward"): pass
    assert len(trace.get_writer()._events) < 100
""")  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("too many spans") == 2, done.stderr
    lines = read(tmp_path)
    assert len(list_kinds(lines)) == 200
    assert [line["sums"]["F"][0] for line in list_steps(lines)] == [950, 950]


def test_details_become_rarer_as_the_file_grows(tmp_path: Path) -> None:
    lines = trace(tmp_path, """
from varuna_core.records.logs import trace as writer
writer.DETAIL_BYTES = 100
trace.start(every=1)
for number in range(1, 33):
    with trace.step(number):
        with trace.span("forward"): pass
""")  # fmt: skip
    detailed = [event[1] for event in list_kinds(lines)]
    assert detailed[:4] == [1, 2, 3, 4] and len(detailed) < 16 and detailed[-1] == 32
    assert len(list_steps(lines)) == 32


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vjob, Path]:
    """A run of 40 traced steps on two ranks of this machine."""
    vjob = Vjob(tmp_path_factory.mktemp("traced"))
    run_folder = vjob.submit(
        f"name: traced\nprogram: {{script: {PROGRAMS / 'traced_steps.py'}, args: ['40']}}\n"
        "cluster: {scheduler: local, walltime_min: 20, nodes: [{group: m, ranks: 2}]}\n"
        f"env: {{PYTHONPATH: {ROOT}}}\n"
    )
    assert vjob.wait_over(run_folder)["verdict"] == "COMPLETED", vjob.explain(run_folder)
    return vjob, run_folder.path


def test_status_knows_the_step_and_the_pace_of_a_script(job: tuple[Vjob, Path]) -> None:
    vjob, _ = job
    found = json.loads(vjob("status", "last", "--json").stdout)
    assert found["progress"]["step"] == 40
    assert found["progress"]["points"][-1]["step_s"] > 0.01
    assert "step 40, 0.0" in vjob("status", "last").stdout


def test_the_report_of_a_script_has_true_steps_and_a_timeline(job: tuple[Vjob, Path]) -> None:
    vjob, folder = job
    text = vjob("report", "last", "--text").stdout
    assert "traced steps: 40" in text
    assert "The clock of" not in text  # ranks of one machine have one clock
    found = load_job(folder)
    assert (
        found.traces.steps.groupby("rank")["step"].agg(["min", "max", "count"]).to_dict("records")
        == [{"min": 1, "max": 40, "count": 40}] * 2
    )
    analysis = analyse(found)
    lanes = build_lanes(found, analysis)
    assert [lane["rank"] for lane in lanes["0"]] == [0, 1]
    steps = build_steps(found, lanes)
    assert {step.facts["step"] for step in steps} >= {1, 40}
    labels = {(kind, what) for kind, _, _, what in steps[0].facts["labels"]}
    assert {("F", ""), ("F", "goes on"), ("detail", "attention"), ("data", "")} <= labels
    median = analysis.find_step("median")
    assert median is not None and not median.trouble
    assert len(median.pipelines) == 2  # each rank is a replica: its pieces were put together


def test_the_slow_rank_of_a_script_is_named(job: tuple[Vjob, Path]) -> None:
    _, folder = job
    assert [found.rank for found in analyse(load_job(folder)).stragglers] == [1]


def test_perfetto_has_the_spans_of_a_script(job: tuple[Vjob, Path], tmp_path: Path) -> None:
    vjob, _ = job
    path = tmp_path / "trace.json.gz"
    vjob("report", "last", "--export", "perfetto", "-o", str(path))
    names = {
        event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert {"forward 0", "span 0 attention", "communication 0", "data"} <= names


@pytest.mark.parametrize(("local_rank", "is_written"), [("", True), ("0", True), ("1", False)])
def test_of_the_ranks_that_a_launcher_starts_the_first_writes_for_its_node(
    local_rank: str, is_written: bool, tmp_path: Path
) -> None:
    env = {"VJOB_NODE_RANKS": "2", **({"LOCAL_RANK": local_rank} if local_rank else {})}
    done = run(tmp_path, "with trace.step(1): pass", **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "3.jsonl").exists() == is_written
