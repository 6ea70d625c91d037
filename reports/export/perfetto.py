"""Write the chosen steps as a gzipped Chrome JSON trace, which ui.perfetto.dev opens.

A stage is a process, and a rank of an attempt a thread; whatever runs beside the rank's work has a
thread of its own, since slices of one thread must not overlap. Arrows lead from the action that
sent a message to the one that took it. Events are written one by one, so only the table is held in
memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from varuna_core.records.logs.trace import COMPUTE
from vjob.reports.analysis.measures import Analysis
from vjob.reports.analysis.pipeline import Pipeline
from vjob.reports.load.tables import Job

NAMES = {
    "F": "forward",
    "f": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "O": "offload",
    "L": "load",
    "detail": "span",
    "other": "span",
}


def write_perfetto(job: Job, analysis: Analysis, path: Path) -> int:
    """Write a job's events to `path` as gzipped Perfetto JSON; return the number of slices."""
    count = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as handle:
        handle.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        before = ""
        for event in list_events(job, analysis):
            handle.write(before + json.dumps(event, separators=(",", ":")))
            before = ",\n"
            count += event["ph"] == "X"
        handle.write("\n]}\n")
    return count


def list_events(job: Job, analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Yield names, slices and arrows, with times in microseconds since the job's first step."""
    threads = _number_threads(job)
    yield from _list_names(job, threads)
    columns = ["attempt", "rank", "kind", "step", "stage", "microbatch"]
    columns += ["begin_s", "ready_s", "end_s"]
    rows = job.events[[*columns, "bytes", "what"]].itertuples(index=False)
    for attempt, rank, kind, step, stage, micro, begin, ready, end, size, what in rows:
        is_work = kind in COMPUTE
        place = {"pid": max(int(stage), 0), "tid": threads[attempt, int(rank)] + (not is_work)}
        arguments: dict[str, Any] = {"step": int(step)}
        if micro >= 0:
            arguments["micro-batch"] = int(micro)
        if size:
            arguments["bytes"] = int(size)
        if is_work and ready > begin:
            yield _slice("wait", begin, ready, place, {"step": int(step)})
        name = f"{NAMES.get(kind, kind)}{f' {micro}' if micro >= 0 else ''}"
        yield _slice(f"{name} {what}".rstrip(), ready if is_work else begin, end, place, arguments)
    number = 0
    for analysed in {(step.attempt, step.step): step for step in analysis.steps}.values():
        for pipeline in analysed.pipelines:
            for start, finish in _list_arrows(pipeline, analysed.attempt, threads):
                number += 1
                yield {**start, "id": number}
                yield {**finish, "id": number}


def _number_threads(job: Job) -> Mapping[tuple[str, int], int]:
    """Return the thread of each rank's work by attempt; events beside a rank's work get the next
    thread number.

    An attempt has threads of its own, for by the nodes' clocks it may begin before the last ended.
    """
    pairs = job.events[["attempt", "rank"]].drop_duplicates().itertuples(index=False)
    order = {attempt.label: at for at, attempt in enumerate(job.sources.attempts)}
    known = [(str(attempt), int(rank)) for attempt, rank in pairs]
    known.sort(key=lambda pair: (order.get(pair[0], 0), pair))
    return {pair: 2 * number for number, pair in enumerate(known)}


def _slice(
    name: str, begin: float, end: float, place: dict[str, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(begin * 1e6, 3), "dur": round(max(0.0, end - begin) * 1e6, 3)}
    return {"name": name, "ph": "X", **times, **place, "args": arguments}


def _list_names(job: Job, threads: Mapping[tuple[str, int], int]) -> Iterator[dict[str, Any]]:
    ranks = job.events[["attempt", "rank", "stage", "kind"]].drop_duplicates()
    several = ranks["attempt"].nunique() > 1
    hosts = {trace.rank: trace.host for trace in job.traces.ranks}
    seen: set[tuple[int, int]] = set()
    for attempt, rank, stage, kind in ranks.itertuples(index=False):
        process = max(int(stage), 0)
        thread = threads[attempt, int(rank)] + (kind not in COMPUTE)
        if (process, -1) not in seen:
            seen.add((process, -1))
            yield _name("process_name", process, 0, f"stage {process}")
        if (process, thread) not in seen:
            seen.add((process, thread))
            beside = "" if kind in COMPUTE else " beside"
            start = f", attempt {attempt}" if several else ""
            name = f"rank {rank} {hosts.get(rank, '')}{start}{beside}"
            yield _name("thread_name", process, thread, name)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _list_arrows(
    pipeline: Pipeline, attempt: str, threads: Mapping[tuple[str, int], int]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for action, ran in pipeline.ran.items():
        sender = pipeline.order.find_sender(action)
        if sender is None or pipeline.ran[sender].rank == ran.rank:
            continue
        sent = pipeline.ran[sender]
        # An arrow hangs on the slice in which its time lies: just inside either end.
        leaves = max(sent.ready, sent.end - 1e-6)
        finish = _end_arrow("f", ran.ready, threads[attempt, ran.rank], action.stage)
        start = _end_arrow("s", leaves, threads[attempt, sent.rank], sender.stage)
        yield start, {**finish, "bp": "e"}


def _end_arrow(phase: str, time: float, thread: int, stage: int) -> dict[str, Any]:
    place = {"ts": round(time * 1e6, 3), "pid": stage, "tid": thread}
    return {"name": "message", "cat": "message", "ph": phase, **place}
