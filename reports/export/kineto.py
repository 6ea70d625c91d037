"""The chosen steps as files of torch.profiler's kind (Kineto), one a rank.

HTA, TensorBoard's profiler plugin, chrome://tracing and ui.perfetto.dev read them:

    <host>_<rank>.pt.trace.json.gz
      pid 1000000 + rank   tid 1    ProfilerStep#N
                           tid 2..  what the CPU does: data, checkpoint, a script's own spans
                           tid 1000 a launch of no length for each kernel: HTA drops those without
      pid 0                tid 7    actions of the schedule, as kernels
                           tid 20.. what runs beside them; communication is named `ncclKernel_...`

Those tools take for communication what is named so, and for work of a GPU what is a kernel: that
decides where a span goes here, whatever ran it. Events of one tid never overlap.
"""

from __future__ import annotations

import gzip
import heapq
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from varuna_core.records.logs.trace import COMMUNICATION, COMPUTE, DETAIL, OTHER
from vjob.reports.export.perfetto import NAMES
from vjob.reports.load.tables import Job

ON_CPU = ("data", "checkpoint", DETAIL, OTHER)
STEPS_TID, CPU_TID, LAUNCH_TID = 1, 2, 1000
ACTIONS_TID, BESIDE_TID = 7, 20


def write_kineto(job: Job, folder: Path) -> list[Path]:
    """A file a rank; with several attempts a folder each."""
    folder.mkdir(parents=True, exist_ok=True)
    attempts = job.events["attempt"].nunique()
    hosts = {(trace.attempt, trace.rank): trace for trace in job.traces.ranks if trace.has_header}
    world = job.plan.world or job.events["rank"].nunique()
    written = []
    for (attempt, rank), own in job.events.groupby(["attempt", "rank"], sort=True):
        trace = hosts.get((attempt, rank))
        host = re.sub(r"[^A-Za-z0-9.-]+", "-", trace.host if trace else "") or "rank"
        place = folder / f"attempt-{attempt}" if attempts > 1 else folder
        place.mkdir(exist_ok=True)
        written.append(place / f"{host}_{rank}.pt.trace.json.gz")
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": trace.device if trace else ""}],
            "distributedInfo": {"backend": "nccl", "rank": int(rank), "world_size": int(world)},
            "host_name": trace.host if trace else "",
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": job.traces.zero_ns,
            "traceName": written[-1].name,
        }
        with gzip.open(written[-1], "wt", encoding="utf-8", compresslevel=6) as handle:
            handle.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            before = ""
            for event in list_rank_events(job, str(attempt), int(rank), own):
                handle.write(before + json.dumps(event, separators=(",", ":")))
                before = ",\n"
            handle.write("\n]}\n")
    return written


def list_rank_events(
    job: Job, attempt: str, rank: int, events: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    """Names of the threads, steps, spans; times in microseconds since the job's first step."""
    process = 1_000_000 + rank  # no number of a GPU
    yield from _name_threads(process, rank)
    for step, begin, end in _list_steps(job, attempt, rank, events):
        place = {"pid": process, "tid": STEPS_TID}
        yield _span(f"ProfilerStep#{step}", "user_annotation", begin, end, place, {})
    lanes = {True: _Lanes(CPU_TID), False: _Lanes(BESIDE_TID)}
    rows = events.sort_values(["begin_s", "end_s"])[
        ["kind", "step", "stage", "microbatch", "begin_s", "ready_s", "end_s", "bytes", "what"]
    ].itertuples(index=False)
    for number, row in enumerate(rows, start=1):
        kind, step, stage, micro, begin, ready, end, size, what = row
        facts: dict[str, Any] = {"step": int(step), "stage": int(stage)}
        facts |= {"micro-batch": int(micro)} if micro >= 0 else {}
        facts |= {"bytes": int(size)} if size else {}
        facts |= {"what": str(what)} if what else {}
        name = NAMES.get(kind, kind)
        if kind in ON_CPU:
            label = str(what) if what else name
            place = {"pid": process, "tid": lanes[True].take(begin, end)}
            yield _span(label, "cpu_op", begin, end, place, facts)
            continue
        if kind in COMPUTE:
            begin, tid = ready, ACTIONS_TID
        else:
            tid = lanes[False].take(begin, end)
        name = f"ncclKernel_{name}" if kind in COMMUNICATION else name
        name, category = ("Memcpy", "gpu_memcpy") if kind == "memcpy" else (name, "kernel")
        launch = {"correlation": number, "External id": number}
        place = {"pid": process, "tid": LAUNCH_TID}
        yield _span("cudaLaunchKernel", "cuda_runtime", begin, begin, place, launch)
        facts |= {**launch, "device": 0, "stream": tid}
        yield _span(name, category, begin, end, {"pid": 0, "tid": tid}, facts)


class _Lanes:
    """The first thread that is free at the begin of a span; spans come in the order of theirs."""

    def __init__(self, first: int) -> None:
        self._busy: list[tuple[float, int]] = []
        self._free: list[int] = []
        self._next = first

    def take(self, begin: float, end: float) -> int:
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            tid = heapq.heappop(self._free)
        else:
            tid, self._next = self._next, self._next + 1
        heapq.heappush(self._busy, (end, tid))
        return tid


def _list_steps(
    job: Job, attempt: str, rank: int, events: pd.DataFrame
) -> list[tuple[int, float, float]]:
    """Number, begin and end of the steps that have events; of Megatron's timers by these alone."""
    by_events = events.groupby("step").agg(begin=("begin_s", "min"), end=("end_s", "max"))
    spans = {int(step): (float(b), float(e)) for step, b, e in by_events.itertuples()}
    steps = job.traces.steps
    if len(steps):
        own = steps[(steps["attempt"] == attempt) & (steps["rank"] == rank)]
        for step, begin, took in own[["step", "begin_s", "took_s"]].itertuples(index=False):
            if int(step) in spans:
                spans[int(step)] = (float(begin), float(begin + took))
    ordered = sorted((begin, end, step) for step, (begin, end) in spans.items())
    nexts = [begin for begin, _, _ in ordered[1:]] + [float("inf")]
    return [
        (step, begin, min(end, after))
        for (begin, end, step), after in zip(ordered, nexts, strict=True)
    ]


def _span(
    name: str,
    category: str,
    begin: float,
    end: float,
    place: dict[str, int],
    facts: dict[str, Any],
) -> dict[str, Any]:
    times = {"ts": round(begin * 1e6, 3), "dur": round(max(0.0, end - begin) * 1e6, 3)}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": facts}


def _name_threads(process: int, rank: int) -> Iterator[dict[str, Any]]:
    names = (
        ("process_name", process, 0, f"rank {rank}"),
        ("process_name", 0, 0, f"rank {rank}: schedule and communication"),
        ("thread_name", process, STEPS_TID, "steps"),
        ("thread_name", process, LAUNCH_TID, "launches"),
        ("thread_name", 0, ACTIONS_TID, "stream 7: actions"),
    )
    for what, pid, tid, name in names:
        yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
