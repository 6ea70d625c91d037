"""Traces for other tools, read by readers that are not vjob's: json alone, and HTA where it is."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.reports.export.runs import RUNS, MadeRun, list_events, write_run
from tests.reports.traces import MS, ORIGIN, write_rank, write_simulated
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.measures import analyse
from vjob.reports.export.kineto import write_kineto
from vjob.reports.export.perfetto import write_perfetto
from vjob.reports.load.tables import load_job

HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
if __name__ == "__main__":
    found = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
    for row in found.get_temporal_breakdown(visualize=False).to_dict("records"):
        print(row["rank"], row["compute_time(us)"], row["non_compute_time(us)"])
"""


def read_gzip(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as handle:
        return json.load(handle)


def check_slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As Chrome's trace format has them; those of a thread lie within each other or apart."""
    slices = [event for event in events if event["ph"] == "X"]
    threads = defaultdict(list)
    for event in slices:
        assert {"name", "ph", "ts", "dur", "pid", "tid"} <= event.keys()
        assert isinstance(event["name"], str) and event["dur"] >= 0 and event["ts"] >= -0.001
        threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for own in threads.values():
        open_ends: list[float] = []
        for begin, negative in sorted(own):
            while open_ends and open_ends[-1] <= begin + 0.002:
                open_ends.pop()
            assert not open_ends or begin - negative <= open_ends[-1] + 0.002
            open_ends.append(begin - negative)
    return slices


@given(RUNS)
@settings(max_examples=12)
def test_a_trace_a_rank_holds_every_event_of_the_chosen_steps(
    tmp_path_factory: pytest.TempPathFactory, made: MadeRun
) -> None:
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder, made)
    job = load_job(folder)
    files = write_kineto(job, folder / "out")
    wanted = {
        (str(number), rank): [one for one in list_events(own) if (str(number), one[1]) in chosen]
        for chosen in [{*job.chosen.values()}]
        for number, ranks in enumerate(made.attempts)
        for rank, own in enumerate(ranks)
    }
    wanted = {place: events for place, events in wanted.items() if events}
    assert len(files) == len(wanted)
    ranks: dict[str, set[int]] = defaultdict(set)
    several = len({attempt for attempt, _ in wanted}) > 1
    for path in files:
        value = read_gzip(path)
        rank = value["distributedInfo"]["rank"]
        attempt = path.parent.name.partition("-")[2] if several else next(iter(wanted))[0]
        ranks[attempt].add(rank)
        slices = check_slices(value["traceEvents"])
        named = [one for one in slices if one["cat"] in ("kernel", "cpu_op")]
        assert sorted(
            (value["baseTimeNanoseconds"] + round(one["ts"] * 1000), round(one["dur"] * 1000))
            for one in named
        ) == sorted(
            (ORIGIN + begin + wait * (kind in "FfRBIW"), work + wait * (kind not in "FfRBIW"))
            for kind, _, _, _, begin, wait, work, _, _ in wanted[attempt, rank]
        )
        steps = [one["name"] for one in slices if one["cat"] == "user_annotation"]
        assert set(steps) == {f"ProfilerStep#{one[1]}" for one in wanted[attempt, rank]}
        launches = {one["args"]["correlation"] for one in slices if one["cat"] == "cuda_runtime"}
        assert launches == {o["args"]["correlation"] for o in named if o["cat"] == "kernel"}
    assert {(attempt, rank) for attempt, own in ranks.items() for rank in own} == wanted.keys()
    path = folder / "perfetto.json.gz"
    count = write_perfetto(job, analyse(job), path)
    slices = [one for one in read_gzip(path)["traceEvents"] if one["ph"] == "X"]
    num_events = sum(map(len, wanted.values()))
    assert len(slices) == count == num_events + sum(one["name"] == "wait" for one in slices)


def write_job(folder: Path) -> None:
    """Two ranks; beside rank 0's work a message, half of which its work hides."""
    write_simulated(folder, build_schedule("1f1b", 2, 3), build_even_costs(2), steps=(1, 2, 3))
    events = [
        event
        for step, at in ((1, 0), (2, 100 * MS))
        for event in (
            ("F", step, 0, 0, at, 0, 10 * MS, 0, ""),
            ("send", step, 0, 0, at + 5 * MS, 0, 10 * MS, 64, ""),
            ("B", step, 0, 0, at + 20 * MS, 0, 10 * MS, 0, ""),
        )
    ]
    write_rank(folder, 0, events)


def test_our_own_reader_takes_the_exported_files_for_profiles(tmp_path: Path) -> None:
    write_job(tmp_path / "job")
    write_kineto(load_job(tmp_path / "job"), tmp_path / "out")
    again = load_job(tmp_path / "out").traces.steps.set_index(["rank", "step"])
    assert again.loc[(0, 1), "compute_s"] == pytest.approx(0.020)
    assert again.loc[(0, 1), "communication_s"] == pytest.approx(0.010)
    assert again.loc[(0, 2), "begin_s"] == pytest.approx(0.1)


def test_hta_finds_the_same_work_and_communication(tmp_path: Path) -> None:
    pytest.importorskip("hta", reason="needs HolisticTraceAnalysis")
    write_job(tmp_path / "job")
    write_kineto(load_job(tmp_path / "job"), tmp_path / "out")
    (tmp_path / "read.py").write_text(HTA)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "read.py"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    found = {int(float(rank)): (float(work), float(other)) for rank, work, other in rows}
    # HTA counts as communication what no work hides.
    assert found[0] == pytest.approx((40_000, 10_000), abs=10)
    assert found[1][1] == 0 and found[1][0] > 0


def test_several_attempts_have_a_folder_each(tmp_path: Path) -> None:
    for number in range(2):
        write_job(tmp_path / "run" / f"attempt-{number}")
    (tmp_path / "run" / "plan.json").write_text("{}")
    job = load_job(tmp_path / "run")
    files = write_kineto(job, tmp_path / "out")
    places = {path.parent.name for path in files}
    assert places == {f"attempt-{attempt}" for attempt in set(job.events["attempt"])}
    for _, own in itertools.groupby(files, key=lambda path: path.parent):
        ranks = [read_gzip(path)["distributedInfo"]["rank"] for path in own]
        assert len(ranks) == len(set(ranks))
