"""Requests that vjob makes of a Slurm controller, by type, as `sdiag` counts them on the lab.

    python -m benchmarks.commands.scheduler_load [--before TREE] [--seconds 60] [--write]

Whole commands on an idle lab, each from an empty state folder: a submit of one job and of two, a
cancel of one that waits and of one that runs, a minute of ten `vjob status --watch 2` beside each
other, and the questions of `vjob tend` for an hour, by a clock that is set on between them. Counted
are the types of requests that Slurm's tools make; what the lab's daemons and a job's own steps ask
is left out, and they are the only others on it. `--before` measures another checkout the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks import RESULTS, ROOT
from tests.cluster.lab import Lab

RESULT = RESULTS / "scheduler_load.md"
BUDGETS = {
    "submit": 3,
    "submit of two jobs": 4,
    "cancel of a job that waits": 4,
    "cancel of a job that runs": 4,
    "a minute of ten viewers": 8,
    "an hour of tend": 240,
}
"""Requests at most, as docs/admins.md promises them."""
TOOLS = re.compile(
    r"REQUEST_(SUBMIT_BATCH_(HET_)?JOB|JOB_(USER_)?INFO(_SINGLE)?|JOB_STATE|PARTITION_INFO"
    r"|NODE_INFO(_SINGLE)?|FED_INFO|BUILD_INFO|PING|KILL_JOBS?|RESERVATION_INFO)$"
)
CONF = """
name: load
program: {script: wait.py}
cluster:
  scheduler: slurm
  walltime_min: 10
  grace_s: 3
  nodes: [NODES]
"""
NEVER = "{group: a, count: 9, queue: gpu2}"
RUNS = "{group: a, count: 1, queue: gpu2}"
TWO = f"{NEVER}, {{group: b, count: 9, queue: gpu1}}"
TEND = """
import sys, time, types
from pathlib import Path
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs import find
from vjob.jobs.schedulers.slurm import scheduler as slurm
run, looks, look_s = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3])
words, stepped = {}, types.ModuleType("time")
vars(stepped).update(vars(time))
late = 0.0
stepped.time = lambda: time.time() + late
slurm.time = stepped
try:
    from vjob.jobs.schedulers import broker
    from vjob.jobs.schedulers.base import SELDOM_S
    broker.time, words = stepped, {"floor_s": SELDOM_S}
except ImportError:
    pass
scheduler = slurm.SlurmScheduler()
ask_left = getattr(scheduler, "ask_time_left", None) or scheduler.find_left_s
for _ in range(looks):
    view = find.view_run(run, warn=False, **words)
    ask_left(view.record.jobs[0].id)
    scheduler.find_idle(["gpu2"])
    late += look_s
"""
"""Questions of shelf/elastic/autoscale.py, in its order; the clock goes on between two looks."""


def count_requests(sdiag: str) -> Counter[str]:
    """Requests of tools since the controller started, by type."""
    table = sdiag.partition("by message type")[2].partition("by user")[0]
    rows = re.findall(r"^\s+(\w+)\s+\(\s*\d+\) count:(\d+)", table, re.MULTILINE)
    return Counter({name: int(count) for name, count in rows if TOOLS.match(name)})


class Bench:
    """A lab, a checkout of vjob, and a folder."""

    def __init__(self, lab: Lab, tree: Path, folder: Path) -> None:
        self.lab, self.tree, self.folder = lab, tree, folder
        self.env = {**os.environ, **lab.env, "PYTHONPATH": str(tree)}
        self._forget(0)
        (folder / "wait.py").write_text("import time\ntime.sleep(600)\n")

    def _forget(self, number: int) -> None:
        """From now on nothing is known of any answer, and no run but by its path."""
        self._number = number
        self.env["XDG_STATE_HOME"] = str(self.folder / f"state{number}")

    @contextmanager
    def count(self, into: Counter[str]) -> Iterator[None]:
        self._forget(self._number + 1)
        before = count_requests(self.lab.run(["sdiag"]).stdout)
        yield
        into.update(count_requests(self.lab.run(["sdiag"]).stdout) - before)

    def call(self, *words: str) -> str:
        command = [sys.executable, "-m", "vjob", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"vjob {words[0]} exited {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, nodes: str, *words: str) -> str:
        """The new run's folder."""
        (self.folder / "conf.yaml").write_text(CONF.replace("NODES", nodes))
        return str(json.loads(self.call("submit", "conf.yaml", "--json", *words))["folder"])

    def wait_running(self, run: str) -> None:
        deadline = time.monotonic() + 120
        while not list(Path(run).glob("attempt-0/state/go.json")):
            if time.monotonic() > deadline:
                raise SystemExit(f"{run} did not start")
            time.sleep(0.2)


def measure_submit(bench: Bench, nodes: str = NEVER, *words: str) -> Counter[str]:
    found: Counter[str] = Counter()
    with bench.count(found):
        run = bench.submit(nodes, *words)
    bench.call("cancel", run, "--now")
    return found


def measure_two(bench: Bench) -> Counter[str]:
    return measure_submit(bench, TWO, "--set", "cluster.hetero=split")


def measure_cancel_of_pending(bench: Bench) -> Counter[str]:
    run, found = bench.submit(NEVER), Counter[str]()
    with bench.count(found):
        bench.call("cancel", run, "--now")
    return found


def measure_cancel_of_running(bench: Bench) -> Counter[str]:
    run, found = bench.submit(RUNS), Counter[str]()
    bench.wait_running(run)
    with bench.count(found):
        bench.call("cancel", run, "--now")
    return found


def measure_viewers(bench: Bench, seconds: float = 60.0) -> Counter[str]:
    run, found = bench.submit(RUNS), Counter[str]()
    bench.wait_running(run)
    command = [sys.executable, "-m", "vjob", "status", run, "--watch", "2", "--json"]
    with bench.count(found):
        viewers = [
            subprocess.Popen(command, cwd=bench.folder, env=bench.env, stdout=subprocess.DEVNULL)
            for _ in range(10)
        ]
        time.sleep(seconds)
        for viewer in viewers:
            viewer.kill()
            viewer.wait()
    bench.call("cancel", run, "--now")
    return found


def run_tend(bench: Bench, run: str, look_s: int) -> None:
    words = [run, str(3600 // look_s), str(look_s)]
    subprocess.run(
        [sys.executable, "-c", TEND, *words], cwd=bench.folder, env=bench.env, check=True
    )


def measure_tend(bench: Bench, look_s: int = 60) -> Counter[str]:
    run, found = bench.submit(RUNS), Counter[str]()
    bench.wait_running(run)
    with bench.count(found):
        run_tend(bench, run, look_s)
    bench.call("cancel", run, "--now")
    return found


MEASURES: Mapping[str, Callable[[Bench], Counter[str]]] = {
    "submit": measure_submit,
    "submit of two jobs": measure_two,
    "cancel of a job that waits": measure_cancel_of_pending,
    "cancel of a job that runs": measure_cancel_of_running,
    "a minute of ten viewers": measure_viewers,
    "an hour of tend": measure_tend,
}


def measure_all(lab: Lab, tree: Path) -> dict[str, Counter[str]]:
    found = {}
    for name, measure in MEASURES.items():
        with tempfile.TemporaryDirectory(prefix="vjob-load-") as folder:
            found[name] = measure(Bench(lab, tree, Path(folder)))
        print(f"{tree.name}: {name}: {sum(found[name].values())}  {dict(found[name])}", flush=True)
    return found


def render(after: Mapping[str, Counter[str]], before: Mapping[str, Counter[str]]) -> str:
    lines = ["| what | before | now | at most | now, by type |", "|---|---|---|---|---|"]
    for name, requests in after.items():
        old = str(sum(before[name].values())) if before else "-"
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(requests.items()))
        lines.append(f"| {name} | {old} | {requests.total()} | {BUDGETS[name]} | {kinds} |")
    if before:
        lines += ["", "| what, before | by type |", "|---|---|"]
        for name, requests in before.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(requests.items()))
            lines.append(f"| {name} | {kinds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    lab = Lab.start()
    try:
        version = lab.run(["sinfo", "--version"]).stdout.strip()
        before = measure_all(lab, options.before.resolve()) if options.before else {}
        after = measure_all(lab, ROOT)
    finally:
        if lab.started_here:
            lab.stop()
    text = f"{version}, {time.strftime('%Y-%m-%d')}, as root.\n\n{render(after, before)}"
    print(text)
    if options.write:
        RESULT.write_text(
            "# Requests to the controller\n\n"
            "Made by `python -m benchmarks.commands.scheduler_load --before TREE --write`: "
            "requests of Slurm's tools that slurmctld counted (`sdiag`), each command from an "
            "empty state folder. "
            f"{text}\n\nAn ordinary user's squeue has JOB_USER_INFO in the place of JOB_INFO.\n"
        )


if __name__ == "__main__":
    main()
