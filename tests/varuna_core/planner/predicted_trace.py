"""A simulated step as trace files in the runtime's format, for tests that need a run to read.

One file a place of the pipeline, the slowest column's replica; docs/report.md has the schema.
"""

from __future__ import annotations

import json
from pathlib import Path

from varuna_core.planner.model.step import StepCosts, StepTime
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.records.files import write_atomic
from varuna_core.records.logs.trace import COLUMNS, FORMAT
from varuna_core.schedule.compiled import Compiled, ScheduleTimes, list_stages

HOST = "predicted"


def write_trace(
    folder: Path, compiled: Compiled, costs: StepCosts, step: StepTime, *, number: int = 0
) -> list[Path]:
    """`<rank>.jsonl` for each rank of one replica; the step must have been simulated with
    `keep_starts`."""
    slowest = max(range(len(step.timed)), key=lambda i: step.timed[i].makespan)
    timed, column = step.timed[slowest], costs.columns[slowest]
    if len(timed.starts) != len(compiled.actions):
        raise PlanningError("the step was simulated without keep_starts")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(compiled.num_ranks):
        lines = _list_lines(compiled, timed, column.costs, costs, step, rank, number)
        path = folder / f"{rank}.jsonl"
        write_atomic(
            path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        )
        paths.append(path)
    return paths


def _list_lines(
    compiled: Compiled,
    timed: ScheduleTimes,
    took: tuple[float, ...],
    costs: StepCosts,
    step: StepTime,
    rank: int,
    number: int,
) -> list[object]:
    stages = list_stages(compiled.schedule, rank)
    header = {
        "trace": FORMAT,
        "rank": rank,
        "stages": stages,
        "replica": 0,
        "host": HOST,
        "origin": 0,
        "log_every": 1,
        "columns": COLUMNS,
        "predicted": True,
    }
    events: list[list[object]] = []
    sums: dict[str, list[int]] = {}
    before = begin_all = _ns(costs.data_s)

    def add(kind: str, stage: int, microbatch: int, start: float, end: float, what: str) -> None:
        """From the rank's last event on it waits, until `start`."""
        nonlocal before
        ready, done = _ns(start), _ns(end)
        wait, work = max(0, ready - before), done - ready
        events.append([kind, number, stage, microbatch, ready - wait, wait, work, 0, what])
        total = sums.setdefault(kind, [0, 0, 0])
        total[0] += 1
        total[1] += wait
        total[2] += work
        before = done

    for start, op, (of, kind, stage, microbatch) in zip(
        timed.starts, compiled.ops, compiled.actions, strict=True
    ):
        if of == rank:
            begin = costs.data_s + start
            add(kind, stage, microbatch, begin, begin + took[op[1]], "")
    last = before
    for stage in stages:
        if costs.reduce_s[stage]:
            end = max(before / 1e9, costs.data_s + step.stages[stage].reduced_at_s)
            add(
                "all-reduce",
                stage,
                -1,
                max(before / 1e9, end - costs.reduce_s[stage]),
                end,
                "gradients",
            )
    for held, tied_s in costs.ties:
        if rank in {compiled.schedule.placement[stage] for stage in held}:
            end = costs.data_s + step.tied_s
            add("all-reduce", stages[0], -1, max(before / 1e9, end - tied_s), end, "tied")
    optimizer = sum(costs.optimizer_s[stage] for stage in stages)
    begin = costs.data_s + step.tied_s
    add("optimizer", stages[0], -1, begin, begin + optimizer, "")
    summary = {
        "step": number,
        "begin": 0,
        "took": _ns(step.step_s),
        "sums": sums,
        "first": begin_all,
        "last": last,
    }
    return [header, *events, summary]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
