"""Growth of vjob's parts with the number of nodes, from 64 to 10,240, on generated inputs.

    python -m benchmarks.commands.scale [--most 10240] [--only NAME ...] [--write]

Each part does once, in this process, what a command or a service does: the conf's plan and its
scripts, `vjob status`' first look and its later ones, the report's text, the manager of a run that
may morph, the simulator, the search for a plan. Processor seconds, which a busy machine stretches
little; files lie wherever temporary ones do. The last column is the slope of the growth over the
two largest sizes: 1 is in proportion to the nodes, 2 is their square.

status      3 log files of 100 MB (sparse) and a report and a beat a node
report      a trace of 2 steps and 40 events a node
manager     a sign of life a node: the turn that finds all nodes new, and one that finds them alive
simulator   1f1b, a stage for 16 nodes, 512 micro-batches
search      GPT-2 XL on three kinds of nodes of 8 GPUs, for at most 10 s of one processor
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.commands import report, spine, status
from benchmarks.drawing import draw_growth
from benchmarks.machine import read_memory_gb, read_processor

RESULT = RESULTS / "scale.md"
SIZES = (64, 256, 1024, 4096, 10240)
LINEAR = 1.2
"""A slope that still counts as in proportion: caches are left, tables double."""
SEARCH_S = 10.0
Points = dict[str, float]


@contextmanager
def timed(points: Points, name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    points[name] = time.process_time() - begin


def measure_submit(folder: Path, nodes: int) -> Points:
    """A conf of two groups: checked, planned, written as scripts."""
    points: Points = {}
    path = spine.write_conf(folder, nodes)
    with timed(points, "read and check the conf"):
        conf = spine.read_conf(path)
    here = spine.PlanContext(
        run="big-1", scheduler="slurm", python=sys.executable, base=str(folder), user_id=0,
        environ={}, folder=str(folder / "big-1"),
    )  # fmt: skip
    with timed(points, "plan"):
        plan = spine.build_plan(conf, here)
        spine.render_plan(plan)
    with timed(points, "render of scripts"):
        spine.render_scripts(conf, plan, spine.RunFolder(folder / "big-1"))
    return points


def measure_status(folder: Path, nodes: int) -> Points:
    points: Points = {}
    logs = folder / "logs"
    logs.mkdir()
    status.write_logs(logs, nodes)
    reader = status.RunReader(status.make_run(logs, nodes))
    with timed(points, "status: first look"):
        reader.read()
    reader.read()
    with timed(points, "status: later look"):
        reader.read()
    return points


def measure_report(folder: Path, nodes: int) -> Points:
    points: Points = {}
    (folder / "trace").mkdir()
    for rank in range(nodes):
        path = folder / "trace" / f"rank{rank:05d}.jsonl"
        report.write_trace(path, rank, num_steps=2, num_events=40)
    with timed(points, "report"):
        report.report(folder)
    return points


def measure_manager(folder: Path, nodes: int) -> Points:
    """One turn of its loop as `Manager.run` makes them, without the files of an attempt."""
    from varuna_core.morph.machine import advance, begin
    from varuna_core.morph.messages import Rules, Tick
    from varuna_core.morph.node_observer import NodeObserver, Sight
    from varuna_core.morph.orders import Presence, read_presences, write_presence
    from varuna_core.records.runfolder import RunFolder

    points: Points = {}
    morph = RunFolder(folder).morph
    morph.make()
    lives = [
        Presence(seat, "k", "7.0", f"n{seat:05d}", 1, 1, "idle", -1, 0) for seat in range(nodes)
    ]
    for life in lives:
        write_presence(morph, life)
    rules = Rules(
        min_nodes=2, expected=nodes, gather_s=600.0, wait_s=600.0, save_s=60.0, stop_s=60.0,
        finish_s=60.0, may_requeue=False,
    )  # fmt: skip
    state = begin(rules, 0.0, None, -1, -1)
    observer = NodeObserver(lost_s=60.0, beat_s=2.0, poll_s=0.25)
    for name in ("manager: all nodes are new", "manager: a turn"):
        with timed(points, name):
            sight = Sight(read_presences(morph, "7.0"), None, {}, {}, -1, {})
            for said in (*observer.observe(state, sight, 1.0), Tick()):
                state, _ = advance(state, said, 1.0, rules, tuple)
    return points


def measure_simulator(folder: Path, nodes: int) -> Points:
    from varuna_core.planner.model.schedule_model import find_schedule_model
    from varuna_core.schedule.compiled import list_costs, list_hops
    from varuna_core.schedule.costs import build_even_costs

    points: Points = {}
    stages = nodes // 16

    even = build_even_costs(stages, hop=0.1)
    with timed(points, "simulator: its lists of actions"):
        compiled = find_schedule_model("1f1b", stages, 512, "none").compiled
    with timed(points, "simulator: a step"):
        compiled.run(list_costs(even), list_hops(even))
    return points


def measure_search(folder: Path, nodes: int) -> Points:
    from benchmarks.planner.cases import GPT2_XL, LARGE, build_large_profile
    from varuna_core.planner.model.training import TrainingModel
    from varuna_core.planner.search.search import Search

    points: Points = {}
    kinds = [replace(kind, count=math.ceil(nodes / len(LARGE.kinds))) for kind in LARGE.kinds]
    cluster = replace(LARGE, kinds=tuple(kinds))
    profile = build_large_profile(GPT2_XL)
    with timed(points, "search for a plan"):
        Search(
            profile, TrainingModel(batch=8192), cluster, limit_s=SEARCH_S, clock=time.process_time
        ).run()
    return points


PARTS: dict[str, Callable[[Path, int], Points]] = {
    "submit": measure_submit,
    "status": measure_status,
    "report": measure_report,
    "manager": measure_manager,
    "simulator": measure_simulator,
    "search": measure_search,
}


def measure(sizes: Sequence[int], parts: Sequence[str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for part in parts:
        for nodes in sizes:
            folder = Path(tempfile.mkdtemp())
            try:
                for name, seconds in PARTS[part](folder, nodes).items():
                    found.setdefault(name, {})[nodes] = seconds
            finally:
                shutil.rmtree(folder)
            print(f"{part} at {nodes:,}", file=sys.stderr, flush=True)
    return found


def find_slope(points: dict[int, float]) -> float:
    (low, first), (high, last) = sorted(points.items())[-2:]
    return math.log(last / first) / math.log(high / low)


def render(sizes: Sequence[int], found: dict[str, dict[int, float]]) -> str:
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores of {read_processor()}, "
        f"{read_memory_gb():.0f} GB of memory. Processor seconds:",
        "",
        "| what | " + " | ".join(f"{size:,} nodes" for size in sizes) + " | slope at the end |",
        "|---|" + "---|" * (len(sizes) + 1),
    ]
    for name, points in found.items():
        row = " | ".join(f"{points[size]:.4f}" for size in sizes)
        lines.append(f"| {name} | {row} | {find_slope(points):.2f} |")
    largest = {name: points[sizes[-1]] for name, points in found.items()}
    slowest = max(largest, key=lambda name: largest[name])
    steepest = max(found, key=lambda name: find_slope(found[name]))
    bent = [name for name in found if find_slope(found[name]) > LINEAR and largest[name] > 1]
    lines += [
        "",
        f"The first bottleneck: {slowest}, {largest[slowest]:.1f} s at {sizes[-1]:,} nodes. The "
        f"steepest: {steepest}, slope {find_slope(found[steepest]):.2f}. Over a second and "
        f"steeper than {LINEAR}: {', '.join(bent) or 'nothing'}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --write keep the result file and its picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=SIZES[-1], help="nodes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.most]
    if len(sizes) < 2:
        parser.error("growth needs two sizes: --most 256 at least")
    with tempfile.TemporaryDirectory() as tools:
        for tool in ("squeue", "scontrol", "sacct", "sinfo"):
            text = status.SQUEUE if tool == "squeue" else status.OTHER
            Path(tools, tool).write_text(text.format(calls=Path(tools, "calls"), components=16))
            Path(tools, tool).chmod(0o755)
        os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        found = measure(sizes, options.only)
    text = render(sizes, found)
    command = " ".join(["python -m benchmarks.commands.scale", *sys.argv[1:]])
    print(text)
    if options.write:
        picture = RESULT.with_suffix(".svg")
        lines = {name: sorted(points.items()) for name, points in found.items()}
        picture.write_text(draw_growth("Growth with the number of nodes", "seconds", lines))
        RESULT.write_text(
            f"# Up to {sizes[-1]:,} nodes\n\nMade by `{command}`. "
            f"{text}\n\n![Growth]({picture.name})\n"
        )


if __name__ == "__main__":
    main()
