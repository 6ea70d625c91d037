"""Logs of a Megatron-LM that prints when each of its calls began and ended, staged with one thing
wrong: what `vjob status` and `vjob report` say of them first.

    python -m benchmarks.commands.profiled_logs [--only NAME] [--keep FOLDER] [--write]

A folder has a log of each node as plain batch scripts leave them. Stages work by 1F1B with 2 % of
noise; the last rank prints the calls of all ranks after each line about a step, as the option
`--timing-log-option all` asks for, in times of each node's own clock. Timers have the names, order
and nesting of the Megatron-LM fork that prints starts and ends (AvatarHwang/FASOP): in the steady
phase one call sends a result and receives the next input.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import RESULTS
from tests.megatron_lines import format_timers
from varuna_core.records.logs.training_log import Iteration, format_iteration, format_job_info
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import build_schedule
from vjob.jobs.monitor.readers.job_reader import open_reader
from vjob.reports.analysis.findings import CLOCKS_WRONG, find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job

RESULT = RESULTS / "profiled_logs.md"
BEGIN_S = 1_686_700_000.0
NOISE = 0.02
FILLERS = ("loss-compute", "batch-generator", "post-process")
"""Timers within a forward."""
ORDER = (
    "forward-backward", "forward-compute", "post-process", "loss-compute", "backward-compute",
    "batch-generator", "forward-recv", "forward-send", "backward-recv", "backward-send",
    "forward-send-backward-recv", "backward-send-forward-recv", "grads-all-reduce",
    "optimizer-inner-step", "optimizer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A job whose logs are staged; the defaults are healthy."""

    stages: int = 8
    replicas: int = 4
    micros: int = 16
    ranks_per_node: int = 4
    layers: tuple[int, ...] = (6,) * 8
    """The layers of each stage."""
    layer_s: float = 0.004
    hop_s: float = 0.002
    """Seconds of a message between stages."""
    steps: int = 50
    log_every: int = 10
    nodes: tuple[str, ...] = tuple(f"n{60 + at:03d}" for at in range(8))
    master: str = "192.168.120.70"
    slow: dict[int, float] = field(default_factory=dict)
    """By how much longer a rank's work takes."""
    skew_s: dict[int, float] = field(default_factory=dict)
    """Seconds that a node's clock is ahead, by the node's number."""
    missing: tuple[int, ...] = ()
    """Nodes whose logs are not there."""
    cut: float = 1.0
    """The share of the last block of calls that was written."""
    fillers: int = 2
    """Timers within each forward that are printed."""
    prints_starts: bool = True
    """The lists of starts and ends, which the seed's timers print; today's print sums alone."""
    is_tagged: bool = False
    """Lines have the rank in front, as of `srun --label`."""
    kinds: tuple[str, ...] = ()
    """The name of each node's GPUs in its samples; no samples where it is not given."""
    gathers_ranks: bool = False
    """All nodes print into the last one's file."""
    seed: int = 1

    @property
    def world(self) -> int:
        return self.stages * self.replicas


def write_logs(folder: Path, job: Logged) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(job.seed)
    last = len(job.nodes) - 1
    texts: dict[int, list[str]] = {}
    for node in range(len(job.nodes)):
        settings = {
            "NODE_RANK": node, "MASTER_ADDR": job.master, "NNODES": len(job.nodes),
            "WORLD_SIZE": job.world, "GLOBAL_BATCH_SIZE": job.micros * job.replicas,
            "MICRO_BATCH_SIZE": 1, "TENSOR_MP_SIZE": 1, "DP_SIZE": job.replicas,
            "PIPELINE_MP_SIZE": job.stages, "PARTITION": "-".join(map(str, job.layers)),
            "MODEL": "xl", "HIDDEN_SIZE": 1600, "NUM_LAYERS": sum(job.layers),
            "PROFILE": "true", "PROFILE_ARGS": "--timing-log-level 2 --timing-log-option all",
        }  # fmt: skip
        texts[node] = [job.nodes[node], "Profiling", *format_job_info(settings).splitlines()]
        if not node:
            texts[node].append("[before the start of training step] datetime: 2023-06-14 16:08:12 ")
    at = BEGIN_S
    block: dict[str, dict[int, list[tuple[float, float]]]] = {}
    begun = at
    cut_lines = 0
    for step in range(1, job.steps + 1):
        at = _run_step(job, at, chance, block)
        if step % job.log_every:
            continue
        line = Iteration(
            step, job.steps, step * job.micros * job.replicas, 1000 * (at - begun) / job.log_every,
            7e-7, job.micros * job.replicas, {"lm loss": 10.0 - step / 50}, 262144.0, 5.0, 0, 0,
        )  # fmt: skip
        texts[last].append(format_iteration(line))
        written = _format_block(job, block).splitlines()
        cut_lines = len(written)
        texts[last] += written
        if step == job.log_every:
            for rank in range(0, job.world, job.replicas):
                words = "memory (MB) | allocated: 1570.7 | max allocated: 3869.2 | reserved: 4020.0"
                texts[rank // job.ranks_per_node].append(
                    f"[Rank {rank}] (after {step} iterations) {words} | max reserved: 4020.0"
                )
        block, begun = {}, at
    if job.cut < 1:
        keep = len(texts[last]) - cut_lines + int(cut_lines * job.cut)
        torn = texts[last][keep]
        texts[last] = [*texts[last][:keep], torn[: len(torn) // 2]]
    _write_files(folder, job, texts, chance)


def _write_files(
    folder: Path, job: Logged, texts: dict[int, list[str]], chance: random.Random
) -> None:
    last = len(job.nodes) - 1
    if job.is_tagged:
        for node, lines in texts.items():
            rank = (node + 1) * job.ranks_per_node - 1
            texts[node] = [f"{rank}: {line}" for line in lines]
    if job.gathers_ranks:
        others = [line for node in range(last) for line in texts.pop(node)]
        places = sorted(chance.sample(range(len(texts[last])), len(others)), reverse=True)
        for place, line in zip(places, reversed(others), strict=True):
            texts[last].insert(place, line)
    for node, lines in texts.items():
        if node not in job.missing:
            sample = [
                f"[{at}] {kind:16} | 49'C,  97 % | 10000 / 22731 MB |"
                for at, kind in enumerate(job.kinds)
            ]
            if sample:
                heading = f"{job.nodes[node]}  Wed Jun 14 16:10:12 2023"
                (folder / f"{job.nodes[node]}.gpu").write_text("\n".join([heading, *sample, ""]))
            end = "" if job.cut < 1 and node == last else "\n"
            (folder / f"{job.nodes[node]}.out").write_text("\n".join(lines) + end)
            (folder / f"{job.nodes[node]}.err").write_text("  warnings.warn(\n")


def _run_step(
    job: Logged,
    at: float,
    chance: random.Random,
    block: dict[str, dict[int, list[tuple[float, float]]]],
) -> float:
    """Add the calls of one step; return when it ended."""
    schedule = build_schedule("1f1b", job.stages, job.micros)
    ends: dict[int, float] = {}

    def add(name: str, rank: int, begin: float, end: float) -> None:
        ahead = job.skew_s.get(rank // job.ranks_per_node, 0.0)
        block.setdefault(name, {}).setdefault(rank, []).append((begin + ahead, end + ahead))

    for replica in range(job.replicas):
        work = tuple(
            max(job.layers[stage], 0.2)
            * job.layer_s
            * job.slow.get(stage * job.replicas + replica, 1.0)
            * chance.gauss(1, NOISE)
            for stage in range(job.stages)
        )
        hops = (job.hop_s,) * (job.stages - 1)
        costs = Costs(forward=work, input_grad=work, weight_grad=work, hops=hops)
        timing = simulate(schedule, costs)
        for index, actions in enumerate(schedule.ranks):
            rank, free = index * job.replicas + replica, at
            waits = _list_waits(index, job.stages, job.micros)
            for action, start in zip(actions, timing.starts[index], strict=True):
                begin, cost = at + start, costs.by_kind[action.kind][action.stage]
                before, after = next(waits[action.kind])
                if before:
                    add(before, rank, min(free, begin), begin)
                way = "forward" if action.kind == "F" else "backward"
                free = begin + cost
                add(f"{way}-compute", rank, begin, free)
                for place, name in enumerate(FILLERS[: job.fillers] if way == "forward" else ()):
                    add(name, rank, begin + place * 1e-5, begin + (place + 1) * 1e-5)
                if after:
                    add(after, rank, free, free + 1e-5)
                    free += 1e-5
            add("forward-backward", rank, at, free)
            ends[rank] = free
    for rank in range(job.world):
        peers = [ends[rank // job.replicas * job.replicas + one] for one in range(job.replicas)]
        add("grads-all-reduce", rank, ends[rank], max(peers) + 0.01)
    done = max(ends.values()) + 0.01
    for rank in range(job.world):
        add("optimizer", rank, done, done + 0.02)
        add("optimizer-inner-step", rank, done + 0.001, done + 0.019)
    return done + 0.03


def _list_waits(index: int, stages: int, micros: int) -> dict[str, Iterator[tuple[str, str]]]:
    """The timers before and after each forward and backward of a stage, empty for none."""
    warm = min(stages - 1 - index, micros)
    before = [("forward-recv" if at <= warm else "backward-send-forward-recv") if index else ""
              for at in range(micros)]  # fmt: skip
    sends = ["forward-send" if at < warm else "" for at in range(micros)]
    is_last = index == stages - 1
    steady = micros - warm
    others = ["" if is_last else "forward-send-backward-recv" if at < steady else "backward-recv"
              for at in range(micros)]  # fmt: skip
    ends = ["backward-send" if index and at >= steady - 1 else "" for at in range(micros)]
    return {"F": zip(before, sends, strict=True), "B": zip(others, ends, strict=True)}


def _format_block(job: Logged, block: dict[str, dict[int, list[tuple[float, float]]]]) -> str:
    timers = {
        name: {rank: 1000 * sum(e - b for b, e in own) / job.log_every for rank, own in
               sorted(ranks.items())}
        for name, ranks in sorted(block.items(), key=lambda one: ORDER.index(one[0]))
    }  # fmt: skip
    calls = {
        (name, rank): ([b for b, _ in own], [e for _, e in own])
        for name, ranks in block.items()
        for rank, own in ranks.items()
    }
    return format_timers(timers, calls if job.prints_starts else None)


# What is staged.

BASE = Logged()
DASHED = tuple(f"gpu-a{at}-{40 + at}.cluster-2.site.edu" for at in range(8))
OTHER = replace(
    BASE, stages=2, layers=(24,) * 2, nodes=("m01", "m02"), master="192.168.120.90", seed=9,
    slow={1: 1.5}, steps=20,
)  # fmt: skip
CASES: dict[str, tuple[Logged, str]] = {
    "nothing": (BASE, ""),
    "nothing, another size": (
        replace(BASE, stages=4, replicas=8, micros=24, layers=(12,) * 4, steps=30, seed=2),
        "",
    ),
    "a slow rank": (replace(BASE, slow={18: 2.0}), "straggler"),
    "a slow rank of the last stage": (replace(BASE, slow={31: 1.3}, seed=3), "straggler"),
    "unequal stages": (replace(BASE, layers=(6, 6, 6, 9, 6, 6, 6, 3), seed=4), "partition"),
    "a slow rank and unequal stages": (
        replace(BASE, layers=(6, 6, 6, 9, 6, 6, 6, 3), slow={18: 2.0}, seed=5),
        "straggler",
    ),
    "nothing, two kinds of GPU in each stage": (
        replace(
            BASE,
            slow={rank: 1.6 for rank in range(32) if rank % 4 > 1},
            seed=10,
            kinds=("NVIDIA A100", "NVIDIA A100", "NVIDIA A10", "NVIDIA A10"),
        ),
        "",
    ),
    "a clock 0.35 s ahead": (replace(BASE, skew_s={3: 0.35}), "clock wrong"),
    "two clocks wrong, and a slow rank": (
        replace(BASE, skew_s={0: -0.35, 6: 1.2}, slow={9: 1.6}, seed=6),
        "straggler",
    ),
    "a log cut in its last block": (replace(BASE, cut=0.6), "cut steps"),
    "a log cut early in its last block": (replace(BASE, cut=0.2, seed=11), "cut steps"),
    "a log cut at the end of its last block": (replace(BASE, cut=0.9, seed=12), "cut steps"),
    "all nodes in one file, which is cut": (
        replace(BASE, gathers_ranks=True, cut=0.5, seed=13),
        "cut steps",
    ),
    "logs of two nodes missing": (replace(BASE, missing=(2, 5)), "missing logs"),
    "the log with the steps missing": (replace(BASE, missing=(7,)), "missing logs"),
    "names with dashes and domains": (
        replace(BASE, nodes=DASHED, slow={18: 2.0}, seed=7),
        "straggler",
    ),
    "ranks in front of lines": (replace(BASE, is_tagged=True, slow={5: 1.4}, seed=8), "straggler"),
    "all nodes in one file": (replace(BASE, gathers_ranks=True, slow={5: 1.4}), "straggler"),
    "two jobs in one folder": (BASE, "other job"),
    "3 MB of calls a step": (
        replace(BASE, micros=384, fillers=3, log_every=2, steps=6, slow={2: 1.5}),
        "straggler",
    ),
    "sums alone, as of today's Megatron-LM": (
        replace(BASE, prints_starts=False, slow={18: 2.0}),
        "straggler",
    ),
}
"""Each with the rule of the finding that must be first; none for healthy jobs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The answers of status and report about a folder."""

    name: str
    wanted: str
    rule: str
    """The rule of the first finding, if it is a cause or what others rest on; else empty."""
    said: str
    step: int | None
    num_steps: int
    """The step of the last line about steps in the folder."""
    size: int
    took_s: tuple[float, float]
    """By status and by the report."""

    @property
    def is_right(self) -> bool:
        has_step = self.step == (self.num_steps or None)
        return self.rule == self.wanted and has_step


def judge(name: str, job: Logged, wanted: str, folder: Path) -> Row:
    write_logs(folder, job)
    if wanted == "other job":
        write_logs(folder, OTHER)
    begun = time.perf_counter()
    snapshot = open_reader(str(folder), folder).read()
    between = time.perf_counter()
    loaded = load_job(folder)
    first = find_all(loaded, analyse(loaded))[0]
    ended = time.perf_counter()
    is_first = bool(first.cause) or first.weight >= CLOCKS_WRONG
    return Row(
        name=name,
        wanted=wanted,
        rule=first.rule if is_first else "",
        said=first.sentence if is_first else "none",
        step=snapshot.progress.step if snapshot.progress is not None else None,
        num_steps=0 if len(job.nodes) - 1 in job.missing else job.steps,
        size=sum(path.stat().st_size for path in folder.iterdir()),
        took_s=(between - begun, ended - between),
    )


def render(rows: Sequence[Row]) -> str:
    lines = [
        "# Status and report of staged logs with calls",
        "",
        "Made by `python -m benchmarks.commands.profiled_logs --write`: folders of logs as plain "
        "batch scripts leave them, of 1F1B pipelines with 2 % of noise; after each line about a "
        "step the start and end of every call of all ranks.",
        "",
        f"**{sum(row.is_right for row in rows)} of {len(rows)}** have the right finding first, and "
        "status has the last step that is there. Bound: all.",
        "",
        "| wrong | MB | status | status, s | report, s | right | the first finding |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step = "no step" if row.step is None else f"step {row.step}"
        took = " | ".join(f"{seconds:.1f}" for seconds in row.took_s)
        lines.append(
            f"| {row.name} | {row.size / 1e6:.1f} | {step} | {took} | "
            f"{'yes' if row.is_right else 'NO'} | {row.said} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--keep", type=Path, help="write the logs there and keep them")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    wanted = parser.parse_args()
    rows = []
    for name, (job, rule) in CASES.items():
        if wanted.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                base = wanted.keep or Path(folder)
                rows.append(judge(name, job, rule, base / name.replace(" ", "-").replace(",", "")))
    text = render(rows)
    print(text)
    if wanted.write:
        RESULT.write_text(text)
    raise SystemExit(0 if all(row.is_right for row in rows) else 1)


if __name__ == "__main__":
    main()
