"""Timelines for ui.perfetto.dev, read by json alone."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.reports.export.runs import RUNS, MadeRun, list_events, write_run
from vjob.reports.analysis.measures import analyse
from vjob.reports.export.perfetto import write_perfetto
from vjob.reports.load.tables import load_job


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
def test_a_timeline_holds_every_event_of_the_chosen_steps(
    tmp_path_factory: pytest.TempPathFactory, made: MadeRun
) -> None:
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder, made)
    job = load_job(folder)
    chosen = {*job.chosen.values()}
    wanted = [
        event
        for number, ranks in enumerate(made.attempts)
        for own in ranks
        for event in list_events(own)
        if (str(number), event[1]) in chosen
    ]
    path = folder / "perfetto.json.gz"
    count = write_perfetto(job, analyse(job), path)
    slices = check_slices(read_gzip(path)["traceEvents"])
    assert len(slices) == count == len(wanted) + sum(one["name"] == "wait" for one in slices)
