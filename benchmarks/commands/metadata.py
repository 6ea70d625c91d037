"""Calls on the file system that the agents of a run make on its folder while its ranks train.

    python -m benchmarks.commands.metadata [--nodes 1 2 4 8] [--before COMMIT] [--write]

Agents, and the manager of a run that may morph, are real processes on this machine; the ranks only
sleep. strace counts each call of any of them with a path in the run folder or a descriptor of it:
open, stat and fstat, rename, unlink, link, getdents and their kin; fsync stands beside. All nodes
are summed and divided by their number. Nobody asks for anything meanwhile.

The aim is at most 20 a node and minute. What fewer looks cost is measured too: how long the request
of a `vjob cancel` takes to each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.machine import read_processor
from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.agent.bundle import write_bundle
from varuna_core.agent.meeting.link import call_hub
from varuna_core.records.logs.training_log import BEGIN, FIRST_STEP
from varuna_core.records.plan import MorphPlan, Timing, write_plan
from varuna_core.records.requests import write_signal
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import render_training

RESULT = RESULTS / "metadata.md"
BOUND = 20.0
TIMING = Timing(grace_s=2.0, join_s=120.0, prepare_s=5.0, beat_s=5.0, lost_s=90.0, sample_s=10.0)
"""The defaults of a conf, where they matter here."""
TRACED = "trace=%file,getdents64,getdents,fstat,fchmod,fchown,ftruncate,fsync,fdatasync"
SYNCS = ("fsync", "fdatasync")
START_S = 400.0
SETTLE_S = 150.0
"""From the first step on; connections are there then, and nothing that landed is new."""
TRAINS = f'echo "{BEGIN}"; echo "{FIRST_STEP}"; exec sleep 100000'
ANSWERS = f"""\
trap 'echo heard' USR1; echo "{BEGIN}"; echo "{FIRST_STEP}"; while :; do sleep 0.05; done"""
NUM_REQUESTS = 6
"""Of each kind, for a run's latency."""


@dataclass(frozen=True)
class Count:
    """Calls of one run."""

    calls: Counter[str]
    """By name."""
    nodes: int
    seconds: float

    @property
    def num_metadata(self) -> int:
        return sum(number for name, number in self.calls.items() if name not in SYNCS)

    def rate(self, number: int) -> float:
        """A node and minute."""
        return number / self.nodes * 60 / self.seconds

    @property
    def metadata(self) -> float:
        return self.rate(self.num_metadata)

    @property
    def syncs(self) -> float:
        return self.rate(sum(self.calls[name] for name in SYNCS))


def count_calls(trace: str, folder: Path) -> Counter[str]:
    """From strace's text (-f -y): calls that name the folder, or a descriptor in it."""
    found: Counter[str] = Counter()
    for line in trace.splitlines():
        match = re.match(r"(?:\d+\s+)?(\w+)\(", line)
        # The second half of a call that another thread cut in two is none of its own.
        if match and str(folder) in line:
            found[match.group(1)] += 1
    return found


class Traced:
    """The processes of one run."""

    def __init__(
        self, folder: Path, nodes: int, *, morphs: bool, agent: bytes | None, text: str = TRAINS
    ) -> None:
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir(mode=0o700)
        self.nodes, self._morphs = nodes, morphs
        self._processes: list[subprocess.Popen[bytes]] = []
        plan = make_plan(make_group("all", nodes, 1), command=("sh", "-c", text), timing=TIMING)
        if morphs:
            limits = MorphPlan(min_nodes=1, max_nodes=nodes, requeue=False, save_s=5)
            plan = replace(plan, morph=True, morphing=limits)
            training = replace(GPT, pipeline=nodes, checkpoint_folder=str(folder / "run/ckpt"))
            self.run.training.write_text(render_training(training))
        write_plan(self.run.plan, plan)
        if agent is None:
            write_bundle(self.run.agent)
        else:
            self.run.agent.write_bytes(agent)

    def start(self) -> None:
        if self._morphs:
            self._begin("morph", "manage", "--session", "7.0")
            for node in range(self.nodes):
                self._begin("morph", "stay", "--session", "7.0", "--node", str(node), node=node)
            return
        self._begin("open", "--attempt", "0").wait()
        for node in range(self.nodes):
            self._begin("node", "--attempt", "0", "--node", str(node), node=node)

    def wait_for_training(self) -> None:
        deadline = time.monotonic() + START_S
        logs = [self.run.attempt(0).node_log(f"n{node}", "out") for node in range(self.nodes)]
        while not all(log.exists() and FIRST_STEP in log.read_text() for log in logs):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks of {self.run.path} did not start")
            time.sleep(0.2)

    def list_pids(self) -> list[int]:
        """Of ours: those started here, and the agents below the daemons."""
        own = [process.pid for process in self._processes if process.poll() is None]
        below = [
            int(child)
            for pid in own
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        agent = str(self.run.agent).encode()
        return own + [pid for pid in below if agent in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def count(self, seconds: float) -> Count:
        """The calls of so long a time from now."""
        words = [word for pid in self.list_pids() for word in ("-p", str(pid))]
        path = self.run.path.parent / "trace.txt"
        argv = ["strace", "-f", "-q", "-y", "-s", "0", "-e", TRACED, "-o", str(path), *words]
        tracer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        begun = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(seconds)
            raise RuntimeError("strace ended early: may processes be traced here?")
        took_s = time.monotonic() - begun
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        calls = count_calls(path.read_text(errors="replace"), self.run.path)
        return Count(calls=calls, nodes=self.nodes, seconds=took_s)

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _begin(self, *words: str, node: int = 0) -> subprocess.Popen[bytes]:
        head = 2 if words[0] == "morph" else 1
        argv = [*words[:head], "--run", str(self.run.path), *words[head:]]
        env = {"PATH": os.environ["PATH"], "VJOB_NODE_NAME": f"n{node}"}
        with (self.run.path.parent / f"{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(self.run.agent), *argv], stdout=log, stderr=log, env=env
            )
        self._processes.append(process)
        return process


@contextlib.contextmanager
def traced_run(
    nodes: int, *, morphs: bool, agent: bytes | None = None, text: str = TRAINS
) -> Iterator[Traced]:
    """A run whose ranks train, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="metadata-")).resolve()
    run = Traced(folder, nodes, morphs=morphs, agent=agent, text=text)
    try:
        run.start()
        run.wait_for_training()
        yield run
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)


def find_obstacle() -> str | None:
    """Why nothing can be counted here."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = ["strace", "-o", "/dev/null", "true"]
    return None if subprocess.run(probe).returncode == 0 else "strace may not trace here"


def build_agent(commit: str) -> bytes:
    """agent.pyz of an earlier commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "varuna_core"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        code = "import sys; from pathlib import Path; from varuna_core.agent.bundle import *\n"
        code += "write_bundle(Path(sys.argv[1]))"
        path = Path(folder) / "agent.pyz"
        subprocess.run([sys.executable, "-c", code, str(path)], cwd=folder, check=True)
        return path.read_bytes()


def measure(
    nodes: int, morphs: bool, agent: bytes | None, seconds: float, settle_s: float
) -> Count:
    """`agent` of an earlier commit has no connections to wait for."""
    with traced_run(nodes, morphs=morphs, agent=agent) as run:
        time.sleep(0.0 if agent else settle_s)
        return run.count(seconds)


def measure_latencies(nodes: int, morphs: bool, settle_s: float) -> dict[bool, list[float]]:
    """Seconds from a request to the last rank's answer; by whether somebody asked for a look."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with traced_run(nodes, morphs=morphs, text=ANSWERS) as run:
        time.sleep(settle_s)
        attempt = run.run.attempt(0)
        logs = [attempt.node_log(f"n{node}", "out") for node in range(nodes)]
        for number in range(2 * NUM_REQUESTS):
            asks = number % 2 == 0
            time.sleep(random.uniform(5.0, 10.0))
            begun = time.monotonic()
            write_signal(attempt, "USR1", f"request-{number}")
            if asks:
                call_hub(run.run.morph.link if morphs else attempt.link)
            while not all(log.read_text().count("heard") > number for log in logs):
                if time.monotonic() - begun > START_S:
                    raise TimeoutError(f"request {number} was not heard")
                time.sleep(0.02)
            found[asks].append(time.monotonic() - begun)
    return found


def render_latencies(found: dict[tuple[bool, int], dict[bool, list[float]]]) -> str:
    lines = [
        "Seconds from the request of `vjob cancel` (signal.json) to the signal at the last rank,",
        "where it can ask the hub for a look, and where a firewall leaves it the file alone:",
        "",
        "| run | nodes | asked: median | most | file alone: median | most |",
        "|---|---|---|---|---|---|",
    ]
    for (morphs, nodes), each in sorted(found.items()):
        cells = [
            f"{statistics.median(each[asks]):.1f} | {max(each[asks]):.1f}" for asks in (True, False)
        ]
        what = "may morph" if morphs else "fixed"
        lines.append(f"| {what} | {nodes} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def has_bound(morphs: bool, nodes: int) -> bool:
    """One node alone has to look at all that a manager looks at."""
    return not morphs or nodes > 1


def render(counts: dict[tuple[bool, int, bool], Count], before: str) -> str:
    """`counts` by morphs, nodes and whether it is the commit before."""
    lines = [
        f"Python {platform.python_version()}, {read_processor()}; all nodes are processes of one "
        "machine.",
        "",
        "Calls on the run folder a node and minute while the ranks train and nobody asks for",
        f"anything (`python -m benchmarks.commands.metadata`); the aim is at most {BOUND:g}.",
        f"Before: {before}.",
        "",
        "| run | nodes | metadata calls | bound | fsync | before | fsync before |",
        "|---|---|---|---|---|---|---|",
    ]
    for (morphs, nodes, is_before), count in sorted(counts.items()):
        if is_before:
            continue
        old = counts.get((morphs, nodes, True))
        then = "- | - |" if old is None else f"{old.metadata:.0f} | {old.syncs:.1f} |"
        what = "may morph" if morphs else "fixed"
        bound = f"{BOUND:g}" if has_bound(morphs, nodes) else "-"
        lines.append(
            f"| {what} | {nodes} | {count.metadata:.1f} | {bound} | {count.syncs:.1f} | {then}"
        )
    lines += ["", "By call, a node and minute:", ""]
    names = sorted({name for count in counts.values() for name in count.calls})
    lines += ["| run | nodes | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for (morphs, nodes, is_before), count in sorted(counts.items()):
        what = ("may morph" if morphs else "fixed") + (", before" if is_before else "")
        cells = [f"{count.rate(count.calls[name]):.1f}" for name in names]
        lines.append(f"| {what} | {nodes} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--before", metavar="COMMIT", help="count an earlier commit's agents too")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--settle", type=float, default=SETTLE_S, metavar="SECONDS")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args(words)
    if obstacle := find_obstacle():
        print(f"not measured: {obstacle}", file=sys.stderr)
        return 1
    earlier = build_agent(args.before) if args.before else None
    cases = [(morphs, nodes, False) for morphs in (False, True) for nodes in args.nodes]
    if earlier is not None:
        cases += [(morphs, nodes, True) for morphs, nodes, _ in cases]
    with ThreadPoolExecutor(len(cases)) as pool:  # they sleep nearly all the time
        jobs = {
            case: pool.submit(
                measure, case[1], case[0], earlier if case[2] else None,
                min(args.seconds, 20.0) if case[2] else args.seconds, args.settle,
            )
            for case in cases
        }  # fmt: skip
        counts = {case: job.result() for case, job in jobs.items()}
        waits = {
            (morphs, nodes): pool.submit(measure_latencies, nodes, morphs, args.settle)
            for morphs, nodes, is_before in cases
            if not is_before
        }
        latencies = {case: job.result() for case, job in waits.items()}
    text = render(counts, args.before or "not counted") + "\n" + render_latencies(latencies)
    print(text, end="")
    if args.write:
        RESULT.write_text(text)
    kept = [
        count.metadata <= BOUND
        for (morphs, nodes, is_before), count in counts.items()
        if not is_before and has_bound(morphs, nodes)
    ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
