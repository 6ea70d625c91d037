"""What commands and services do once, on generated inputs for some number of nodes of 8 ranks.

status, watch, web   3 log files of 100 MB (sparse), a report and a beat a node
report               a trace of 2 steps and 40 events a node
manager              a sign of life a node
search               GPT-2 XL on three kinds of nodes of 8 GPUs, with 5 s of one processor
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import metadata, report, spine, status
from benchmarks.planner.cases import GPT2_XL, LARGE, build_large_profile

SEARCH_S = 5.0
Points = dict[str, float]


@contextmanager
def timed(points: Points, name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    points[name] = time.process_time() - begin


def measure_submit(folder: Path, nodes: int) -> Points:
    points: Points = {}
    path = spine.write_conf(folder, nodes)
    spine.read_conf(path)  # imports and caches, which are no growth
    with timed(points, "conf: read and checked"):
        conf = spine.read_conf(path)
    here = spine.PlanContext(
        run="big-1", scheduler="slurm", python=sys.executable, base=str(folder), user_id=0,
        environ={}, folder=str(folder / "big-1"),
    )  # fmt: skip
    with timed(points, "plan.json"):
        plan = spine.build_plan(conf, here)
        spine.render_plan(plan)
    with timed(points, "scripts"):
        spine.render_scripts(conf, plan, spine.RunFolder(folder / "big-1"))
    return points


def make_running(folder: Path, nodes: int) -> status.RunFolder:
    """A run that trains, with a scheduler that says so."""
    tools, logs = folder / "bin", folder / "logs"
    tools.mkdir(), logs.mkdir()
    for tool in ("squeue", "scontrol", "sacct", "sinfo"):
        text = status.SQUEUE if tool == "squeue" else status.OTHER
        (tools / tool).write_text(text.format(calls="/dev/null", components=1))
        (tools / tool).chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    status.write_logs(logs, nodes)
    return status.make_run(logs, nodes)


def measure_status(folder: Path, nodes: int) -> Points:
    points: Points = {}
    reader = status.RunReader(make_running(folder, nodes))
    with timed(points, "status: first look"):
        reader.read()
    reader.read()  # times have settled after this one
    with timed(points, "status: later look"):
        reader.read()
    return points


def count_calls(folder: Path, nodes: int, looks: int) -> int:
    """Return the calls on files of a process that looks so often at a run."""
    run, trace = make_running(folder, nodes), folder / "trace"
    look = f"r = open_reader({str(run.path)!r}, Path()); [r.read() for _ in range({looks})]"
    imports = "from pathlib import Path; from vjob.jobs.monitor.readers.job_reader import *"
    strace = ["strace", "-f", "-c", "-U", "calls", "-e", metadata.TRACED, "-o", str(trace)]
    subprocess.run([*strace, sys.executable, "-c", f"{imports}; {look}"], check=True)
    return int([line for line in trace.read_text().split() if line.isdecimal()][-1])


class Turns:
    """The effects of a watch that ends after some turns, with the processor's time at each."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.times = [time.process_time()]

    def tell(self, *said: object) -> None:
        """Nobody listens."""

    notify = complain = tell

    def wait(self, seconds: float) -> bool:
        self.times.append(time.process_time())
        return len(self.times) <= self._number


def measure_watch(folder: Path, nodes: int) -> Points:
    from vjob.shelf.watch.desk import open_look
    from vjob.shelf.watch.watch import watch_job

    run, turns = make_running(folder, nodes), Turns(3)
    watch_job(open_look(str(run.path), folder), turns, every_s=15.0)
    return {"watch: a later turn": turns.times[3] - turns.times[2]}


def measure_web(folder: Path, nodes: int) -> Points:
    from vjob.jobs.schedulers.run_index import add_run
    from vjob.shelf.web.server import Site
    from vjob.shelf.web.status import open_job, open_runs

    points: Points = {}
    run = make_running(folder, nodes)
    add_run(run, "big")
    for name, page in (("job", open_job(str(run.path), folder, ())), ("list", open_runs())):
        assert page.feed is not None
        page.feed.renew(), page.feed.renew()
        with timed(points, f"web: the {name}, read again"):
            page.feed.renew()
        site = Site(page)
        page.feed.close()
        with timed(points, f"web: the {name}, answered"):
            for part in (
                "state?since=0&after=0",
                *(f"part/{k}" for k in page.feed.look().names.values()),
            ):
                reply = site.answer("GET", f"/{site.token}/{part}", "localhost")
                assert reply.status == 200 and reply.body, part
    return points


def measure_report(folder: Path, nodes: int) -> Points:
    points: Points = {}
    (folder / "trace").mkdir()
    for rank in range(nodes):
        path = folder / "trace" / f"rank{rank:05d}.jsonl"
        report.write_trace(path, rank, num_steps=2, num_events=40)
    with timed(points, "report, a trace a node"):
        report.report(folder)
    return points


def measure_manager(folder: Path, nodes: int) -> Points:
    """Turns of its loop as `Manager.run` makes them, without the files of an attempt."""
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
    with timed(points, "manager: reads all signs of life"):
        seen = read_presences(morph, "7.0")
    ended = {seat: replace(life, state="ended", attempt=0) for seat, life in seen.items()}
    for name, presences in (("all nodes are new", seen), ("a turn", seen), ("all end", ended)):
        with timed(points, f"manager: {name}"):
            sight = Sight(presences, None, {}, {}, -1, {})
            for said in (*observer.observe(state, sight, 1.0), Tick()):
                state, _ = advance(state, said, 1.0, rules, tuple)
    assert state.phase == "judging", state.phase
    return points


def measure_search(folder: Path, nodes: int) -> Points:
    from varuna_core.planner.model.training import TrainingModel
    from varuna_core.planner.result.refusal import search_or_explain
    from varuna_core.planner.search.deadline import within
    from varuna_core.planner.search.space import Wishes

    kinds = [replace(kind, count=math.ceil(nodes / len(LARGE.kinds))) for kind in LARGE.kinds]
    cluster, points = replace(LARGE, kinds=tuple(kinds)), Points()
    profile = build_large_profile(GPT2_XL)
    with timed(points, "search for a plan"):
        deadline = within(SEARCH_S, time.process_time)
        training = TrainingModel(batch=8192)
        found = search_or_explain(profile, training, cluster, Wishes(), deadline=deadline)
    points["search: step in ms"] = found.chosen.step_s * 1e3
    points["search: gap in %"] = found.gap * 100
    return points


PARTS: Mapping[str, Callable[[Path, int], Points]] = {
    "submit": measure_submit,
    "status": measure_status,
    "watch": measure_watch,
    "web": measure_web,
    "report": measure_report,
    "manager": measure_manager,
    "search": measure_search,
}
