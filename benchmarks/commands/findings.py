"""The first finding of a report: of staged runs with one thing wrong, and of healthy ones.

    python -m benchmarks.commands.findings [--only CAUSE] [--write]

Each run is a folder as the agents and ranks leave it: traces, samples, exits and events of a
simulated pipeline, its times with 2 % of noise. The rules were made on sizes of TUNING; the page is
of three other instances of each cause, in SIZES, and of three healthy runs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from varuna_core.records.logs.trace import COLUMNS, FORMAT
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.findings import CAUSES, Finding, find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job

RESULT = RESULTS / "findings.md"
BEGIN_S = 1_700_000_000.0
NOISE = 0.02


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is staged; the defaults are healthy."""

    stages: int = 2
    replicas: int = 2
    micros: int = 16
    layers: int = 16
    partition: tuple[int, ...] = ()
    """Layers of each stage; equal if empty."""
    layer_s: float = 0.02
    """Forward of one layer for one micro-batch."""
    steps: int = 30
    start_s: float = 25.0
    data_s: float = 0.02
    sum_s: float = 0.1
    """What the sum of gradients takes once all have joined."""
    save_every: int = 15
    save_s: float = 1.0
    slow: dict[int, float] = field(default_factory=dict)
    """By how much longer a node's work takes."""
    faults: int = 0
    """Attempts that failed before the last."""
    pause_s: float = 5.0
    """Between two attempts."""
    utilization: float = 94.0
    unused: int = 0
    """GPUs of each node that do nothing."""
    temperature: float = 64.0
    throttle: dict[int, str] = field(default_factory=dict)
    """Words of the driver by node."""
    used_mb: float = 60_000.0
    swap_mb: dict[int, float] = field(default_factory=dict)
    """What a node has in swap in the end; all have a little all the time."""
    slows_down: float = 1.0
    """Factor of the work of all ranks in the second half of the steps."""
    micro_batch: int = 4
    queue_s: float = 4.0
    walltime_min: int = 30

    @property
    def world(self) -> int:
        return self.stages * self.replicas


def build_training(run: Run) -> dict[str, Any]:
    """training.json of a model that needs as many operations as the staged layers take time."""
    batch = run.micros * run.replicas * run.micro_batch
    return {
        "program": "pretrain_gpt", "model": "gpt", "layers": run.layers, "hidden": 4096,
        "heads": 32, "sequence": 2048, "vocab": 50_000, "dropout": 0.0, "data": None,
        "split": "100,0,0", "vocabulary": None, "steps": run.steps, "global_batch_size": batch,
        "micro_batch_size": run.micro_batch, "precision": "bf16", "loss_scale": "dynamic",
        "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95],
        "fused": True, "apex": False, "offload": False, "lr_schedule": "cosine",
        "warmup_steps": 1, "decay_steps": 10, "min_lr": 0.0, "clip_grad_norm": 1.0, "seed": 1,
        "log_every": 1, "evaluate_every": 0, "evaluate_steps": 1, "tensorboard": False,
        "compile": False, "cuda_graphs": False, "checkpoint_folder": None,
        "checkpoint_every": run.save_every, "checkpoint_keep": 2, "checkpoint_local": None,
        "saved": -1,
        "recompute": "none", "schedule": "1f1b",
        "partition": None, "pipeline": run.stages, "zero": 0, "tensor": 1,
        "sequence_parallel": False, "timeline": True, "format": 1,
    }  # fmt: skip


def write_run(folder: Path, run: Run, seed: int) -> None:
    """The folder as a job leaves it; every node holds a rank."""
    chance = random.Random(seed)
    layers = run.partition or (run.layers // run.stages,) * run.stages
    events: list[dict[str, Any]] = [_event("submitted", 0.0)]
    now, done = run.queue_s, 0
    for attempt in range(run.faults + 1):
        own = folder / f"attempt-{attempt}"
        for name in ("trace", "exit"):
            (own / name).mkdir(parents=True, exist_ok=True)
        events.append(_event("started", now, attempt=attempt))
        is_last = attempt == run.faults
        first = done - done % run.save_every + 1
        last = run.steps if is_last else min(run.steps, first + run.steps // (run.faults + 2))
        begun, now = now, _write_traces(own, run, layers, range(first, last + 1), now, chance)
        done = last
        _write_samples(own, run, begun, now, chance)
        now += 2.0 if is_last else 6.0
        code = 0 if is_last else 1
        _write_exits(own, run, begun + 1, now, code)
        reason = f"rank 1 on n1 exited {code}: CUDA error" if code else "all ranks exited 0"
        events.append(_event("ended", now, attempt=attempt, code=code, reason=reason))
        now += run.pause_s
    _write_lines(folder / "events.jsonl", events)
    plan = {
        "name": folder.name, "pipeline": run.stages, "data": run.replicas, "tensor": 1,
        "partition": "-".join(map(str, layers)), "program": "pretrain_gpt",
        "groups": [{"name": "a", "gpu_type": "H100", "count": run.world, "ranks": 1}],
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "training.json").write_text(json.dumps(build_training(run)))
    (folder / "record.json").write_text("{}")
    (folder / "resolved.yaml").write_text(f"cluster: {{walltime_min: {run.walltime_min}}}\n")


def _event(kind: str, at: float, **facts: Any) -> dict[str, Any]:
    return {"time": BEGIN_S + at, "kind": kind, **facts}


def _write_lines(path: Path, values: list[Any]) -> None:
    path.write_text("".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values))


def _write_traces(
    folder: Path,
    run: Run,
    layers: tuple[int, ...],
    steps: range,
    now: float,
    chance: random.Random,
) -> float:
    """When the last step ended."""
    schedule = build_schedule("1f1b", run.stages, run.micros)
    node = {(stage, replica): stage * run.replicas + replica
            for stage in range(run.stages) for replica in range(run.replicas)}  # fmt: skip
    lines: dict[int, list[Any]] = {}
    for (stage, replica), rank in node.items():
        header = {
            "trace": FORMAT, "rank": rank, "stages": [stage], "replica": replica,
            "host": f"n{rank}", "device": "NVIDIA H100 80GB HBM3", "columns": COLUMNS,
            "origin": round((BEGIN_S + now) * 1e9), "partition": "-".join(map(str, layers)),
        }  # fmt: skip
        lines[rank] = [header, {"offset": 0, "residual": 1000, "at": 0}]
    at = run.start_s
    for step in steps:
        sums: dict[int, dict[str, list[int]]] = {rank: {} for rank in lines}
        ends: dict[int, float] = {}
        first: dict[int, float] = {}
        data = {rank: run.data_s * chance.uniform(0.9, 1.1) for rank in lines}
        for replica in range(run.replicas):
            work = []
            for stage in range(run.stages):
                slow = run.slow.get(node[stage, replica], 1.0)
                slow *= run.slows_down if step > run.steps // 2 else 1.0
                work.append(layers[stage] * run.layer_s * slow * chance.gauss(1, NOISE))
            own_work = tuple(work)
            costs = Costs(forward=own_work, input_grad=own_work, weight_grad=own_work)
            timing = simulate(schedule, costs)
            begin = at + max(data[node[stage, replica]] for stage in range(run.stages))
            for index, actions in enumerate(schedule.ranks):
                stage = schedule.placement.index(index)
                rank, free = node[stage, replica], begin
                first[rank] = begin
                for action, start in zip(actions, timing.starts[index], strict=True):
                    cost = costs.by_kind[action.kind][action.stage]
                    start += begin
                    place = (action.kind, step, action.stage, action.microbatch)
                    _add(lines[rank], sums[rank], place, free, start, start + cost)
                    free = start + cost
                ends[rank] = free
        joined = max(ends.values())
        for rank, own in lines.items():
            _add(own, sums[rank], ("data", step, 0, -1), at, at, at + data[rank])
            done = joined + run.sum_s
            _add(own, sums[rank], ("all-reduce", step, 0, -1), ends[rank], ends[rank], done)
            after = done + 0.01
            _add(own, sums[rank], ("optimizer", step, 0, -1), done, done, after)
            if step % run.save_every == 0:
                _add(own, sums[rank], ("checkpoint", step, 0, -1), after, after, after + run.save_s)
                after += run.save_s
            line = {"step": step, "begin": round(at * 1e9), "took": round((after - at) * 1e9)}
            line |= {"first": round(first[rank] * 1e9), "last": round(ends[rank] * 1e9)}
            own.append({**line, "sums": sums[rank]})
            last = after
        at = last
    for rank, own in lines.items():
        _write_lines(folder / "trace" / f"{rank}.jsonl", own)
    return now + at


def _add(
    lines: list[Any],
    sums: dict[str, list[int]],
    place: tuple[str, int, int, int],
    begin: float,
    ready: float,
    end: float,
) -> None:
    times = [round(moment * 1e9) for moment in (begin, ready, end)]
    wait, work = times[1] - times[0], times[2] - times[1]
    lines.append([*place, times[0], wait, work, 0, ""])
    found = sums.setdefault(place[0], [0, 0, 0])
    sums[place[0]] = [found[0] + 1, found[1] + wait, found[2] + work]


def _write_samples(folder: Path, run: Run, begin: float, end: float, chance: random.Random) -> None:
    for rank in range(run.world):
        samples = []
        at = begin
        while at < end:
            held = run.throttle.get(rank, "")
            gpus = []
            for index in range(1 + run.unused):
                used = max(0.0, min(100.0, chance.gauss(run.utilization, 2))) if not index else 0.0
                gpus.append(
                    {
                        "index": index,
                        "name": "NVIDIA H100 80GB HBM3",
                        "utilization": used,
                        "temperature": 91.0 if held else run.temperature + chance.uniform(-2, 2),
                        "memory_used_mb": run.used_mb if not index else 4.0,
                        "memory_total_mb": 81_559.0,
                        "power_w": 600.0,
                        "throttle": held,
                    }
                )
            grown = run.swap_mb.get(rank, 0.0) * (at - begin) / (end - begin)
            host = {"cpu_percent": 40.0, "swap_used_mb": 80.0 + grown}
            samples.append({"time": BEGIN_S + at, "gpus": gpus, **host})
            at += max(1.0, (end - begin) / 100)
        _write_lines(folder / f"n{rank}.gpu.jsonl", samples)


def _write_exits(folder: Path, run: Run, begin: float, end: float, code: int) -> None:
    for rank in range(run.world):
        value = {
            "rank": rank, "node": f"n{rank}", "code": code if rank == 1 else 0, "signal": None,
            "stopped": bool(code) and rank != 1, "started": BEGIN_S + begin,
            "ended": BEGIN_S + end, "last_error": "",
        }  # fmt: skip
        (folder / "exit" / f"node-{rank}.json").write_text(json.dumps({"exits": [value]}))


# What is staged.


def stage(cause: str, base: Run, strength: float) -> Run:
    """The healthy run with one thing wrong; `strength` from 0 (just) to 1 (badly)."""
    work_s = base.micros * 3 * base.layer_s * base.layers / base.stages
    step_s = work_s * (1 + (base.stages - 1) / base.micros)
    last = base.world - 1
    match cause:
        case "slow node":
            return replace(base, slow={last: 1.25 + strength})
        case "slowdown":
            return replace(base, slows_down=1.5 + strength)
        case "imbalance":
            per, heavy = base.layers // base.stages, 1 + round(strength * 2)
            parts = [per] * base.stages
            parts[0], parts[1] = per - heavy, per + heavy
            return replace(base, partition=tuple(parts))
        case "input":
            return replace(base, data_s=step_s * (0.2 + strength), utilization=70 - 40 * strength)
        case "micro-batch":
            micros = base.micros * (2 + round(4 * strength))
            return replace(base, micros=micros, layer_s=0.0006 - 0.0002 * strength, micro_batch=1,
                           steps=20, used_mb=20_000.0, save_s=0.02, sum_s=0.01,
                           data_s=0.002, start_s=5.0)  # fmt: skip
        case "checkpoint":
            return replace(base, save_every=2, save_s=step_s * (0.2 + strength))
        case "GPU idle":
            if strength > 0.6:
                return replace(base, unused=3)
            return replace(base, utilization=40 - 30 * strength)
        case "throttle":
            slow = {last: 1.2 + 0.5 * strength}
            return replace(base, slow=slow, throttle={last: "sw_thermal"})
        case "communication":
            return replace(base, sum_s=step_s * (0.4 + strength))
        case "restarts":
            return replace(base, faults=3 + round(4 * strength), start_s=step_s * 3)
        case "start":
            return replace(base, start_s=max(70.0, step_s * base.steps * (0.3 + strength)))
        case "swap":
            slow = {last: 1.2 + 0.5 * strength}
            return replace(base, slow=slow, swap_mb={last: 1500 + 20_000 * strength})
        case "memory":
            return replace(base, used_mb=14_000 - 8000 * strength)
        case "limit":
            ran_min = (base.start_s + step_s * base.steps) / 60
            limit = int(max(60, ran_min) * (8 + 10 * strength))
            return replace(base, walltime_min=limit, queue_s=200 + 4000 * strength)
    raise ValueError(f"nothing is staged for {cause!r}; there are {', '.join(STAGED)}")


STAGED = tuple(cause for cause in CAUSES if cause != "hang")
"""Causes that are staged here; benchmarks/hangs has hangs of real ranks."""

TUNING = Run()
"""The size at which the rules were made."""
SIZES = (
    (Run(stages=2, replicas=3, micros=12, layers=12, layer_s=0.05, steps=24, start_s=20), 0.2),
    (Run(stages=4, replicas=2, micros=32, layers=32, layer_s=0.011, steps=40, start_s=30), 0.5),
    (Run(stages=3, replicas=4, micros=24, layers=24, layer_s=0.03, steps=18, start_s=28), 0.9),
)
"""Runs that no rule was made on, each with how badly the one thing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One instance and what the report says of it first."""

    cause: str
    """Empty for a healthy run."""
    size: str
    first: Finding | None
    """The first finding of a cause."""
    unknown: float
    overlap: float

    @property
    def is_right(self) -> bool:
        return (self.first.cause if self.first is not None else "") == self.cause


def judge(cause: str, run: Run, seed: int, folder: Path) -> Row:
    """Write the run, read it as the report does."""
    target = folder / f"{cause.replace(' ', '-') or 'healthy'}-{seed}"
    write_run(target, run, seed)
    job = load_job(target)
    analysis = analyse(job)
    first = find_all(job, analysis)[0]
    shares = analysis.accounting.shares
    return Row(
        cause=cause,
        size=f"{run.stages} stages x {run.replicas}, {run.micros} micro-batches, {run.steps} steps",
        first=first if first.cause else None,
        unknown=shares.get("unknown", 0.0),
        overlap=analysis.accounting.overlap,
    )


def judge_all(causes: tuple[str, ...], folder: Path) -> list[Row]:
    rows = []
    for number, (base, strength) in enumerate(SIZES):
        for cause in causes:
            run = base if not cause else stage(cause, base, strength)
            rows.append(judge(cause, run, 100 + number, folder))
    return sorted(rows, key=lambda row: causes.index(row.cause))


def render(rows: list[Row]) -> str:
    staged, healthy = [r for r in rows if r.cause], [r for r in rows if not r.cause]
    right = sum(row.is_right for row in staged)
    calm = sum(row.is_right for row in healthy)
    lines = [
        "# Findings of the report on staged runs",
        "",
        "Made by `python -m benchmarks.commands.findings --write`: run folders of simulated "
        "pipelines with 2 % of noise, one thing wrong in each, at sizes that no rule was made on.",
        "",
        f"**{right} of {len(staged)}** staged runs have the right cause first; {calm} of "
        f"{len(healthy)} healthy runs have none. Bound: all of both. At most "
        f"{100 * max(row.unknown for row in rows):.2f} % of a run's time is unknown (bound 2), "
        f"{100 * max(row.overlap for row in rows):.4f} % is claimed twice (bound 0.1).",
        "",
        "| wrong | run | right | the first finding | to change |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        said = "none" if row.first is None else f"{row.first.cause}: {row.first.sentence}"
        key = "" if row.first is None or not row.first.key else f"`{row.first.key}`"
        verdict = "yes" if row.is_right else "NO"
        lines.append(f"| {row.cause or 'nothing'} | {row.size} | {verdict} | {said} | {key} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*STAGED, "healthy"])
    parser.add_argument("--tuning", action="store_true", help="at the size of the rules' making")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    wanted = parser.parse_args()
    causes: tuple[str, ...] = (*STAGED, "")
    if wanted.only:
        causes = ("",) if wanted.only == "healthy" else (wanted.only,)
    with tempfile.TemporaryDirectory() as folder:
        if wanted.tuning:
            rows = [
                judge(cause, stage(cause, TUNING, 0.4) if cause else TUNING, 1, Path(folder))
                for cause in causes
            ]
        else:
            rows = judge_all(causes, Path(folder))
    text = render(rows)
    print(text)
    if wanted.write:
        RESULT.write_text(text)
    raise SystemExit(0 if all(row.is_right for row in rows) else 1)


if __name__ == "__main__":
    main()
