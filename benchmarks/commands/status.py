"""Cost of `vjob status` on a large job, beside `tail` over the same files; first and second look.

    python -m benchmarks.commands.status [--before TREE] [--nodes 1024] [--rounds 9] [--write]

The files are sparse, 100 MB each, with lines as Megatron-LM, gpustat and Python's warnings print
them at their ends, and lie in memory. Whole processes run in turn; their processor time counts.
Where each call on these files waits for a file server, which a preloaded library stages, the time
by the clock does.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.commands.slow_server import WAIT_S, build_slow_server
from benchmarks.machine import compile_to
from benchmarks.turns import (
    Row,
    add_before,
    describe_load,
    divide,
    list_envs,
    render_rows,
    time_in_turn,
)
from tests.megatron_lines import format_timers
from varuna_core.records import record as records
from varuna_core.records.files import write_json
from varuna_core.records.logs.training_log import Iteration, format_iteration
from varuna_core.records.plan import GroupPlan, Plan, Timing, write_plan
from varuna_core.records.record import JobRecord, RunRecord, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.readers.job_reader import Reader, open_reader
from vjob.jobs.monitor.readers.run import RunReader

RESULT = RESULTS / "status.md"
BOUND, SLOW_BOUND = 8.0, 1.0
SLOW_ROUNDS = 3
FILE_BYTES = 100_000_000
END_BYTES = 96 * 1024
RANKS = 8
SQUEUE = """\
#!/bin/sh
echo squeue >> {calls}
i=0
while [ $i -lt {components} ]; do
  echo "$((77+i))|77|$i|RUNNING|n0|None|0|2026-01-01T00:00:00|x||10:00|N/A|N/A|(null)|0|"
  i=$((i+1))
done
"""
OTHER = "#!/bin/sh\necho $(basename $0) >> {calls}\n"


def write_end(path: Path, lines: list[str]) -> None:
    """100 MB with nothing in them but these lines, as often as fit, at the end."""
    text = "\n".join(lines) + "\n"
    data = (text * (END_BYTES // len(text) + 1)).encode()[-END_BYTES:]
    with path.open("wb") as handle:
        handle.truncate(FILE_BYTES - len(data))
        handle.seek(0, os.SEEK_END)
        handle.write(data)


def write_logs(folder: Path, num_nodes: int) -> None:
    """Every node has timers, memory and warnings; the last one has the iterations."""
    for node in range(num_nodes):
        ranks = range(node * RANKS, node * RANKS + RANKS)
        timers = {
            name: {rank: 100 + rank % 7 + at / 100 for rank in ranks}
            for at, name in enumerate(("forward-compute", "backward-compute", "optimizer"))
        }
        out = [f"{ranks[0]}: {line}" for line in format_timers(timers).splitlines()]
        if node == num_nodes - 1:
            out += [
                f"{ranks[-1]}: " + format_iteration(
                    Iteration(step, 500_000, time_ms=1400.0 + step, losses={"lm loss": 2.0})
                )
                for step in range(10, 200, 10)
            ]  # fmt: skip
        err = []
        for rank in ranks:
            err += [
                f"{rank}: /opt/lib/python3/site-packages/torch/functional.py:{500 + rank}: "
                "UserWarning: torch.meshgrid: in an upcoming release, it will be required to pass",
                f"{rank}:   warnings.warn(",
                f"{rank}: [W socket.cpp:{rank}] connected to n{node:04d}:{61000 + rank}",
            ]
        gpu = [
            f"[{at}] NVIDIA A100-SXM4 | {40 + (node + at) % 9}'C, {90 + at} % | 38123 / 40960 MB |"
            for at in range(RANKS)
        ]
        for kind, lines in (("out", out), ("err", err), ("gpu", gpu)):
            write_end(folder / f"n{node:04d}.{kind}", lines)


def make_run(folder: Path, num_nodes: int) -> RunFolder:
    """A run of the logs of `folder`, with reports and beats, that Slurm says to be running."""
    run = RunFolder(folder.parent / "big-1")
    attempt = run.attempt(0)
    attempt.path.parent.mkdir()
    folder.rename(attempt.path)
    attempt.make()
    group = GroupPlan(
        name="g", count=num_nodes, queue=None, gpu_type=None, gpus=8, devices=None, cpus=None,
        memory_gb=None, interface=None, ranks=RANKS, env={}, first_node=0, first_rank=0,
    )  # fmt: skip
    write_plan(run.plan, make_plan(group))
    write_record(
        run,
        RunRecord(
            run=run.name, name="big", state=records.SUBMITTED, scheduler="slurm", layout="hetjob",
            num_jobs=1, jobs=(JobRecord(id="77", group=None),), submitted=time.time(), user="u",
            host="h", conf="c", version="0", pid=0, pid_start=None,
        ),
    )  # fmt: skip
    write_json(attempt.master, {"time": 1.0, "attempt": 0})
    write_json(attempt.go, {"time": 2.0, "opened": 1.0, "port": 1})
    for index in range(num_nodes):
        host = f"n{index:04d}"
        report = {"index": index, "host": host, "ready": True, "clock_offset_s": 0.0, "checks": []}
        attempt.node_report(index).write_text(str(report).replace("'", '"').replace("True", "true"))
        beat = {"index": index, "host": host, "time": time.time(), "count": 1, "state": "running"}
        attempt.beat(index).write_text(str(beat).replace("'", '"'))
    return run


def make_plan(group: GroupPlan) -> Plan:
    return Plan(
        run="big-1", name="big", scheduler="slurm", layout="hetjob", morph=False, groups=(group,),
        pipeline=1, data=group.count * RANKS, tensor=1, order="data", partition=None,
        stage_map=",".join(map(str, range(group.count * RANKS))) + ";", command=("x",),
        python="python3", workdir="/", env={}, containers=(), must_exist=(),
        port=None, timing=Timing(10, 600, 600, 10, 120, 10),
    )  # fmt: skip


def time_looks(reader: Reader, num_again: int) -> tuple[float, list[float]]:
    """Seconds of the first look, and of those with nothing new once times have settled."""
    start = time.perf_counter()
    reader.read()
    first = time.perf_counter() - start
    reader.read()
    again = []
    for _ in range(num_again):
        start = time.perf_counter()
        reader.read()
        again.append(time.perf_counter() - start)
    return first, again


def measure_looks(run: RunFolder, rounds: int) -> tuple[list[float], float]:
    """The ratios of a later look to the first, and the first's seconds."""
    ratios, firsts = [], []
    for _ in range(rounds):
        first, again = time_looks(RunReader(run), 5)
        firsts.append(first)
        ratios.append(statistics.median(again) / first)
    return ratios, statistics.median(firsts)


def count_calls(calls: Path, run: RunFolder, looks: int) -> dict[str, int]:
    """Scheduler programs that so many looks started."""
    calls.write_text("")
    for beat in (run.attempt(0).path / "beat").iterdir():
        os.utime(beat)  # nodes that fell silent are asked about, now and then
    reader = open_reader(str(run.path), run.path)
    for _ in range(looks):
        reader.read()
    names = calls.read_text().split()
    return {name: names.count(name) for name in sorted(set(names))}


LEFT = """\
What bounds a first look of 1,024 nodes, by samples of its stack: the ends of logs (31 %, half of it
to open and read them), the samples of GPUs (12 %), small files (8 %), a reader for each file (8 %),
and the objects of nodes, ranks and GPUs (32 %)."""


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    add_before(parser)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "logs"
        tools, calls = Path(name) / "bin", Path(name) / "calls"
        folder.mkdir(), tools.mkdir()
        for tool in ("squeue", "scontrol", "sacct", "sinfo"):
            text = SQUEUE if tool == "squeue" else OTHER
            (tools / tool).write_text(text.format(calls=calls, components=16))
            (tools / tool).chmod(0o755)
        os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        env = {**compile_to(Path(name, "compiled")), "XDG_STATE_HOME": str(Path(name) / "state")}
        envs = list_envs(env, options.before)
        write_logs(folder, options.nodes)
        status = [sys.executable, "-m", "vjob", "status", "--json"]
        tail = ["sh", "-c", f"exec tail -n 50 {folder}/*"]
        turns = [*(([*status, str(folder)], env) for env in envs), (tail, env)]
        bare = time_in_turn(turns, Path(name), options.rounds)
        run = make_run(folder, options.nodes)
        tail = ["sh", "-c", f"exec tail -n 50 {run.attempt(0).path}/n*.*"]
        turns = [*(([*status, str(run.path)], env) for env in envs), (tail, env)]
        whole = time_in_turn(turns, Path(name), options.rounds)
        slow = build_slow_server(Path(name, "slow.so"), run.path)
        for path in run.attempt(0).path.rglob("*.*"):
            os.utime(path)  # nodes that are silent for minutes change what status says
        slowly = time_in_turn(
            [(command, {**env, **slow}) for command, env in turns], Path(name), SLOW_ROUNDS
        )
        looks, first_s = measure_looks(run, options.rounds)
        called = count_calls(calls, run, 5)
    rows: list[Row] = [
        ("`vjob status --json` of a bare folder over one `tail -n 50`", BOUND, *divide(bare)),
        ("the same of a run: reports, beats and squeue too", BOUND, *divide(whole)),
        (
            f"the same where each open, stat and read waits {WAIT_S * 1e3:g} ms: its seconds over "
            "`tail`'s",
            SLOW_BOUND,
            *divide(slowly, "seconds"),
        ),
        ("a look with nothing new over the first, of the run", 0.05, looks, []),
    ]
    seconds = [
        statistics.median(each[0].seconds for each in costs) for costs in (bare, whole, slowly)
    ]
    lines = [
        f"Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds, "
        f"{describe_load()}; "
        f"{options.nodes:,} nodes of {RANKS} ranks, {3 * options.nodes:,} files of 100 MB.",
        "",
        *render_rows(options.before, rows),
        "",
        f"The commands take {seconds[0]:.2f} s and {seconds[1]:.2f} s, the first look within a "
        f"process {first_s:.2f} s; where each call waits, the second takes {seconds[2]:.2f} s.",
        "",
        f"Five looks at a job of 16 components started: {called}.",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        RESULT.write_text(
            "# A look at a large job\n\n"
            "Made by `python -m benchmarks.commands.status --before TREE "
            f"--rounds {options.rounds} --write`. {text}\n\n{LEFT}\n"
        )


if __name__ == "__main__":
    main()
