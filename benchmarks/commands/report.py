"""Cost of reading a run's files for a report, beside plain ways to read the same files.

    python -m benchmarks.commands.report [--trace-mb 1000] [--nodes 64 --log-mb 50] [--ranks 1024]
        [--events 1024000] [--before TREE] [--write]

Each way runs in a process of its own; its memory is that process' peak. The logs are one file under
many names. The seed's way is measured on a part of one log and told for all: that would take hours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.commands.report_page import measure_ordinary, measure_page, write_page
from tests.megatron_lines import format_timers
from varuna_core.records.logs.trace import COLUMNS, FORMAT, TraceWriter
from varuna_core.records.logs.training_log import Iteration, format_iteration

RESULT = RESULTS / "report.md"
MB = 1 << 20
TIMERS = ("forward-compute", "backward-compute", "forward-recv", "backward-send", "optimizer")


def measure(function: Callable[..., Any], *args: Any) -> tuple[float, float, Any]:
    """Seconds, peak MB and result of a call in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_run, (function, args))


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float, Any]:
    begin = time.perf_counter()
    result = function(*args)
    seconds = time.perf_counter() - begin
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result


# Files.


def write_trace(path: Path, rank: int, *, num_steps: int, num_events: int, stages: int = 8) -> None:
    """As the writer writes; `num_events` a step, forwards and backwards of one stage."""
    stage, replica = rank % stages, rank // stages
    header = {"trace": FORMAT, "rank": rank, "stages": [stage], "replica": replica, "host": "n0"}
    lines = [json.dumps({**header, "origin": 1_700_000_000_000_000_000, "columns": COLUMNS})]
    half, now = num_events // 2, 0
    work = 900_000 + 10_000 * stage
    with open(path, "w", encoding="ascii") as handle:
        for step in range(num_steps):
            begin = now
            for at in range(num_events):
                kind = "F" if at < half else "B"
                wait = 1000 + (at * 7919 + rank) % 50_000
                lines.append(f'["{kind}",{step},{stage},{at % half},{now},{wait},{work},0,""]')
                now += wait + work
            sums = f'{{"F":[{half},1,{half * work}],"B":[{half},1,{half * work}]}}'
            lines.append(
                f'{{"step":{step},"begin":{begin},"took":{now - begin},"sums":{sums},'
                f'"first":{begin},"last":{now}}}'
            )
            handle.write("\n".join(lines) + "\n")
            lines = []


def write_log(path: Path, size: int, num_ranks: int = 32) -> None:
    """Megatron's log of a profiled job: iterations, timers with the seed's lists, warnings."""
    calls = {
        (timer, rank): (
            [1686000000.123456 + at for at in range(8)],
            [1686000000.623456 + at for at in range(8)],
        )
        for timer in TIMERS
        for rank in range(num_ranks)
    }
    timers = {timer: {rank: 100.0 + rank for rank in range(num_ranks)} for timer in TIMERS}
    block = format_timers(timers, calls) + "\n" + "  warnings.warn(\n" * 40
    with open(path, "w", encoding="ascii") as handle:
        step = 0
        while handle.tell() < size:
            step += 10
            handle.write(format_iteration(Iteration(step, 10**6, time_ms=1400.0 + step % 7)) + "\n")
            handle.write(block)


# Ways to read.


def read_json(paths: list[Path]) -> int:
    """`json.loads` of every line."""
    count = 0
    for path in paths:
        with open(path, "rb") as handle:
            for line in handle:
                json.loads(line)
                count += 1
    return count


def count_and_read_json(path: Path) -> int:
    """`wc -l`, and `json.loads` of every line."""
    subprocess.run(["wc", "-l", str(path)], check=True, stdout=subprocess.DEVNULL)
    return read_json([path])


def read_all_events(folder: Path) -> int:
    """Both passes, and every event in a table once."""
    from vjob.reports.load.trace_reader import read_traces, stream_events

    paths = sorted((folder / "trace").glob("*.jsonl"))
    traces = read_traces([("", path) for path in paths])
    return sum(map(len, stream_events(traces)))


def report(folder: Path) -> int:
    """All that `vjob report --text` does."""
    from vjob.reports.analysis.findings import find_all
    from vjob.reports.analysis.measures import analyse
    from vjob.reports.export.text import render_text
    from vjob.reports.load.tables import load_job

    job = load_job(folder)
    analysis = analyse(job)
    return len(render_text(job, analysis, find_all(job, analysis), is_partial=False))


def read_logs(folder: Path) -> int:
    """All logs to tables; how many calls were kept."""
    from vjob.reports.load.training_log import LogReader, LogTables

    tables = LogTables()
    for path in sorted(folder.glob("*.out")):
        LogReader(tables, "", path.stem, path).read()
    built = tables.build_tables()
    return len(built["timers_by_rank"]) + len(built["timer_calls"])


def read_as_the_seed(path: Path, size: int, *, frame_a_row: bool) -> int:
    """readlines, and a row for each call of each timer: a frame of its own, or a dict."""
    import pandas as pd

    with open(path, encoding="ascii") as handle:
        lines = handle.read(size).split("\n")
    rows: list[Any] = []
    rank, starts = -1, []
    for line in lines:
        if "rank " in line and ":" in line:
            rank = int(line.split("rank")[1].split(":")[0])
        elif "start time lst" in line:
            starts = line.split(":")[1].split()
        elif "end time lst" in line:
            task = line.split()[0]
            for number, (start, end) in enumerate(
                zip(starts, line.split(":")[1].split(), strict=False)
            ):
                row = {
                    "rank": rank,
                    "task": task,
                    "number": number,
                    "start": datetime.fromtimestamp(float(start)),
                    "end": datetime.fromtimestamp(float(end)),
                }
                rows.append(pd.DataFrame([row]) if frame_a_row else row)
    return len(pd.concat(rows) if frame_a_row else pd.DataFrame(rows))


def write_steps(path: Path, num_steps: int, log_every: int) -> float:
    """Microseconds that the writer takes for a step of 50 events, the clock's included."""
    writer = TraceWriter(path, 0, log_every=log_every)
    actions = [f"0{kind}{number}" for kind in "FB" for number in range(25)]
    begin = time.perf_counter()
    for step in range(1, num_steps + 1):
        writer.begin_step(step)
        for action in actions:
            now = time.perf_counter()
            writer(action, now, now, time.perf_counter())
        writer.end_step()
    writer.close()
    return (time.perf_counter() - begin) / num_steps * 1e6


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace-mb", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--log-mb", type=int, default=50)
    parser.add_argument("--seed-mb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--events", type=int, default=1_024_000, help="of the page")
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout to compare with")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary one")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        text = "\n".join(
            [
                *measure_trace(Path(name) / "one", options.trace_mb),
                *measure_ranks(Path(name) / "many", options.ranks),
                *measure_logs(Path(name) / "logs", options.nodes, options.log_mb, options.seed_mb),
                *measure_writer(Path(name)),
                "",
                *measure_page(Path(name) / "page", options.events),
                *measure_ordinary(Path(name) / "ordinary", options.before),
            ]
        )
    print(text)
    if options.write:
        head = (
            f"# Reports\n\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        )
        command = "python -m benchmarks.commands.report --before TREE --write"
        version = f"Python {platform.python_version()}. `{command}`.\n\n"
        RESULT.write_text(head + version + text + "\n")


def measure_trace(folder: Path, size_mb: int) -> list[str]:
    """One file."""
    (folder / "trace").mkdir(parents=True)
    path = folder / "trace" / "0.jsonl"
    num_steps = max(1, size_mb * MB // 2650)
    write_trace(path, 0, num_steps=num_steps, num_events=50)
    plain_s, _, _ = measure(count_and_read_json, path)
    all_s, all_mb, count = measure(read_all_events, folder)
    report_s, report_mb, _ = measure(report, folder)
    path.unlink()
    return [
        f"A trace of {size_mb} MB, {count} events; `wc -l` and `json.loads`: {plain_s:.1f} s.",
        "",
        "| way | s | against it | bound | peak MB | bound |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {seconds:.1f} | {seconds / plain_s:.2f} | 6 | {peak_mb:.0f} | 1000 |"
            for name, seconds, peak_mb in (
                ("every event in a table", all_s, all_mb),
                ("the report", report_s, report_mb),
            )
        ),
        "",
    ]


RANKS_OF_NODE = 8
BATCH_STEPS = (1, 5, 25)
"""Steps in a batch that a rank appends to the file of its node."""


def pack_nodes(ranks: Path, nodes: Path, batch_steps: int, num_events: int = 50) -> None:
    """The traces of ranks, each a file, as the files of their nodes: batches in turn."""
    (nodes / "trace").mkdir(parents=True)
    paths = sorted((ranks / "trace").glob("*.jsonl"), key=lambda path: int(path.stem))
    for first in range(0, len(paths), RANKS_OF_NODE):
        own = [path.read_bytes().splitlines(True) for path in paths[first : first + RANKS_OF_NODE]]
        name = f"node-{first // RANKS_OF_NODE}.jsonl"
        with open(nodes / "trace" / name, "wb") as handle:
            size = batch_steps * (num_events + 1)
            for at in range(0, max(map(len, own)), size):
                for rank, lines in enumerate(own, first):
                    handle.write(b'\n{"rank":%d}\n' % rank + b"".join(lines[at : at + size]))


def measure_ranks(folder: Path, num_ranks: int) -> list[str]:
    """Many small traces: of ranks, and as a node has those of its ranks in one file."""
    ranks = folder / "ranks"
    (ranks / "trace").mkdir(parents=True)
    for rank in range(num_ranks):
        path = ranks / "trace" / f"{rank}.jsonl"
        write_trace(path, rank, num_steps=100, num_events=50)
    apart_s = min(measure(report, ranks)[0] for _ in range(2))
    together = []
    for steps in BATCH_STEPS:
        pack_nodes(ranks, folder / str(steps), steps)
        seconds = min(measure(report, folder / str(steps))[0] for _ in range(2))
        together.append(seconds / apart_s)
    folder = folder / str(BATCH_STEPS[1])
    plain_s, _, count = measure(read_json, sorted((ranks / "trace").glob("*.jsonl")))
    ways = (("text", report, [folder]), ("page", write_page, [folder, folder / "report.html"]))
    measured = {name: measure(way, *given) for name, way, given in ways}
    return [
        f"{num_ranks} ranks x 100 steps x 50 events, {count} lines; `json.loads`: {plain_s:.1f} s. "
        + " ".join(
            f"The report as a {name}: {seconds:.1f} s, {seconds / plain_s:.2f} times that (bound "
            f"4), {peak_mb:.0f} MB at most."
            for name, (seconds, peak_mb, _) in measured.items()
        ),
        "",
        f"Ranks of a node in one file, {RANKS_OF_NODE} of them, against a file each: "
        + ", ".join(
            f"{ratio:.2f} times as long in batches of {steps} steps"
            for steps, ratio in zip(BATCH_STEPS, together, strict=True)
        )
        + ".",
        "",
    ]


def measure_logs(folder: Path, num_nodes: int, size_mb: int, seed_mb: float) -> list[str]:
    """Logs of many nodes against the seed's way."""
    folder.mkdir()
    write_log(folder / "n000.out", size_mb * MB)
    for node in range(1, num_nodes):
        os.link(folder / "n000.out", folder / f"n{node:03}.out")
    ours_s, ours_mb, _ = measure(read_logs, folder)
    total = num_nodes * size_mb
    lines = [
        f"Megatron's logs, {num_nodes} nodes x {size_mb} MB: {ours_s:.1f} s, "
        f"{ours_mb:.0f} MB at most.",
        "",
        "| the seed's way | s for all of it, from a part | times ours | bound |",
        "|---|---|---|---|",
    ]
    for name, frame_a_row in (("a frame a row", True), ("a dict a row", False)):
        part_mb = min(seed_mb if frame_a_row else 10 * seed_mb, size_mb)
        seed_s, _, _ = measure(_read_part_as_the_seed, folder, part_mb, frame_a_row)
        whole_s = seed_s / part_mb * total
        lines.append(f"| {name} | {whole_s:.0f} | {whole_s / ours_s:.1f} | at least 10 |")
    return [*lines, ""]


def _read_part_as_the_seed(folder: Path, part_mb: float, frame_a_row: bool) -> int:
    return read_as_the_seed(folder / "n000.out", int(part_mb * MB), frame_a_row=frame_a_row)


def measure_writer(folder: Path) -> list[str]:
    """Measure the cost that tracing adds to a training."""
    lines = ["| writer, 50 events a step | us a step | of a step of 1 s |", "|---|---|---|"]
    for name, log_every in (("details of all steps", 1), ("of every tenth", 10)):
        took = write_steps(folder / f"w{log_every}.jsonl", 2000, log_every)
        lines.append(f"| {name} | {took:.0f} | {took / 1e4:.4f} % |")
    return lines


if __name__ == "__main__":
    main()
