"""A predicted step is read by the reports as a measured one is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.varuna_core.planner.predicted_trace import write_trace
from tests.varuna_core.planner.profiles import make_chain
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.search.partition import find_partition
from varuna_core.schedule.actions import COPIES
from varuna_core.schedule.compiled import KINDS
from vjob.reports.load.trace_reader import read_events, read_traces


def test_reports_read_a_predicted_step(tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(20):
        chain = make_chain(draw)
        found = find_partition(chain)
        if found is None:
            continue
        costs = chain.build_costs(found.bounds)
        step = simulate_step(chain.compiled, costs, keep_starts=True)
        paths = write_trace(tmp_path / str(number), chain.compiled, costs, step)
        assert len(paths) == chain.num_stages
        traces = read_traces(("", path) for path in paths)
        assert not any(trace.skipped or trace.trouble for trace in traces.ranks)
        assert tuple(traces.steps["took_s"]) == pytest.approx((step.step_s,) * len(paths), abs=1e-8)
        work = traces.steps.sort_values("rank")["work_s"]
        busy = step.timed[0].busy
        assert tuple(work) == pytest.approx(busy, abs=1e-6)
        events = read_events(traces, traces.detailed_steps)
        actions = events[events["kind"].isin([*KINDS, *COPIES])]
        assert len(actions) == len(chain.compiled.actions)
        begins = actions.sort_values(["rank", "begin_s"])["ready_s"]
        starts = sorted(
            (rank, start)
            for (rank, *_), start in zip(chain.compiled.actions, step.timed[0].starts, strict=True)
        )
        data_s = chain.tables.training.data_s
        assert tuple(begins) == pytest.approx([data_s + start for _, start in starts], abs=1e-6)
