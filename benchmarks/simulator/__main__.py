"""The simulator held against the engine: a step predicted from a profile, and the step measured.

    python -m benchmarks.simulator [--quick | --gpu] [--rounds 3] [--write]

Every launch starts real ranks (gloo, sockets) that take turns: the profiler's own measurement, then
some steps of every layout, and again. The medians of the profiles predict, the medians of the steps
are held against them. Where there are more processes than cores a block's work is a timed wait;
a slow link is a tbf between two network namespaces (root). On a machine that others use steps say
little; `--cpu` then holds the actions of real arithmetic against the profile, both in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS
from benchmarks.pipeline import network
from benchmarks.pipeline.ranks import run_ranks
from benchmarks.simulator.layouts import (
    ALONE,
    GPU_ALONE,
    GPU_PAIR,
    LAUNCHES,
    QUICK,
    Launch,
    Layout,
)
from benchmarks.simulator.plans import make_tables, plan
from tests.ranks.device import VARIABLE, find_kind
from varuna_core.planner.model.step import StepTime, simulate_step
from varuna_core.planner.profile.profile import (
    FIGURES,
    QUANTILES,
    TIMES,
    Cell,
    LinkTime,
    Network,
    Profile,
    Spread,
)
from varuna_core.planner.profile.profile_file import parse_profile
from varuna_core.planner.result.band import Band, build_chain, find_band
from varuna_core.planner.search.search import measure_simplicity

RESULT = RESULTS / "simulator.md"
MEDIAN_AT_MOST, WORST_AT_MOST, WORST_ON_GPU = 0.02, 0.06, 0.05
SPEARMAN_AT_LEAST, CHOSEN_AT_MOST, HELD_AT_LEAST = 0.95, 1.01, 0.85
MODELS = {"gpt": "the GPT", "waits": "the model of timed waits"}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Memory is kept, as by a GPU's allocator: else a stage, which holds more than a segment, gives it
back and takes it anew with every micro-batch (a fifth of a forward of six blocks)."""
WHAT_IT_SAYS = """\
Profile and steps take turns in the same processes; medians of both. Actions: those of all ranks of
a replica in one traced step. A prediction is the median of steps drawn from the spread of the
profiles, its band holds nine of ten; "again" is how far the rounds' own medians of a layout are
apart. Chosen is, as by the planner, the simplest within the band of the fastest. Real
arithmetic says something only where nobody else uses the cores; timed waits suffer less."""
STEPS = 2
"""Of a layout in a round, after one that is not counted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout."""

    launch: Launch
    layout: Layout
    predicted: StepTime
    band: Band
    simplicity: tuple[int, ...]
    measured: list[float]
    """Seconds of each step."""
    pipeline_s: float | None
    """Seconds of the last round's last step, from the first action's begin to the last's end."""
    kinds: dict[str, tuple[float, float]]
    """By kind of action: what all ranks' took of it in that step, and what was predicted."""

    @property
    def measured_s(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.band.middle_s / self.measured_s - 1

    @property
    def again(self) -> float:
        """How far the rounds' medians are apart, as a share."""
        rounds = [self.measured[at : at + STEPS] for at in range(0, len(self.measured), STEPS)]
        middles = list(map(statistics.median, rounds))
        return (max(middles) - min(middles)) / self.measured_s

    @property
    def is_held(self) -> bool:
        return self.band.low_s <= self.measured_s <= self.band.high_s


def join_profiles(profiles: Sequence[Profile]) -> Profile:
    """Take the median of each figure."""
    first = profiles[0]

    def middle(rows: Sequence[Sequence[float]]) -> Any:
        return tuple(np.median(np.array(rows, dtype=float), axis=0).tolist())

    gpus = {}
    for kind, gpu in first.gpus.items():
        own = [profile.gpus[kind] for profile in profiles]
        cells = {
            key: replace(
                cell,
                **{
                    name: middle([getattr(g.cells[key], name) for g in own])
                    for name in (*FIGURES, "action_s", "action_host_s")
                },
                spread=join_spreads([g.cells[key] for g in own]),
            )
            for key, cell in gpu.cells.items()
        }
        optimizer = {t: middle([g.optimizer_s[t] for g in own]) for t in gpu.optimizer_s}
        gpus[kind] = replace(gpu, cells=cells, optimizer_s=optimizer)

    def join_links(found: Sequence[dict[Any, LinkTime]]) -> dict[Any, LinkTime]:
        return {
            key: LinkTime(
                points=tuple(
                    (size, statistics.median(one[key].compute_time(size) for one in found))
                    for size, _ in link.points
                )
            )
            for key, link in found[0].items()
        }

    networks = [profile.network for profile in profiles]
    joined = Network(
        links=join_links([one.links for one in networks]),
        all_reduces=join_links([one.all_reduces for one in networks]),
    )
    return replace(first, gpus=gpus, network=joined)


def join_spreads(cells: Sequence[Cell]) -> Spread | None:
    """The median of each quantile; rounds with what lies between the profiles, which are minutes
    apart."""
    spreads = [cell.spread for cell in cells if cell.spread is not None]
    if len(spreads) < len(cells):
        return None
    whole = [sum(sum(getattr(cell, name)) for name in TIMES) for cell in cells]
    usual = statistics.median(whole)
    rounds = [
        quantile * took / usual
        for spread, took in zip(spreads, whole, strict=True)
        for quantile in spread.rounds
    ]
    found = np.quantile(rounds, QUANTILES)
    actions = np.median([spread.actions for spread in spreads], axis=0)
    return Spread(
        rounds=tuple((found / np.median(rounds)).tolist()),
        actions=tuple(map(tuple, actions.tolist())),
    )


def predict(
    profile: Profile, planned: Profile, launch: Launch, layout: Layout
) -> tuple[StepTime, Band, tuple[int, ...], dict[str, float]]:
    """The step, its band, how simple it is, and by kind of action what all ranks of a replica take
    for it; the plan, and so the order of actions, is of the profile `planned`."""
    candidate = plan(make_tables(planned, launch), launch, layout)
    chain = build_chain(make_tables(profile, launch), candidate, least=0)
    costs = chain.build_costs(layout.bounds)
    step = simulate_step(chain.compiled, costs)
    taken: dict[str, float] = {}
    for _, cost, *_ in chain.compiled.ops:
        kind = "FfRBIW"[cost // chain.num_stages]
        taken[kind] = taken.get(kind, 0.0) + costs.columns[0].costs[cost]
    band = find_band(chain, layout.bounds)
    assert band is not None, "the profiler measures spreads"
    return step, band, measure_simplicity(candidate), taken


def measure(launch: Launch, rounds: int, cpu: bool, kept: Path | None) -> dict[str, Any]:
    """Collect the ranks' results; with a folder, those of an earlier run."""
    path = kept and kept / f"{launch.ranks}.json"
    if path is not None and path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    options = {"launch": asdict(launch), "rounds": rounds, "steps": STEPS, "cpu": cpu}
    inside: dict[str, Any] = {"environment": KEEP_MEMORY}
    link: AbstractContextManager[Sequence[Sequence[str]]] = nullcontext(())
    if launch.rate_mbit:
        link = network.slow_link(launch.rate_mbit)
    with link as sides:
        if sides:
            prefixes = [sides[node != launch.nodes[0]] for node in launch.nodes]
            environment = {**KEEP_MEMORY, "GLOO_SOCKET_IFNAME": "eth0"}
            inside = {"prefixes": prefixes, "environment": environment}
        found = run_ranks("benchmarks.simulator.ranks", launch.ranks, options, **inside)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return found


def compare(launch: Launch, result: dict[str, Any]) -> list[Row]:
    profile = join_profiles([parse_profile(text) for text in result["profiles"]])
    planned = parse_profile(result["planned"])
    rows = []
    is_asynchronous = os.environ.get(VARIABLE) == "cuda"  # events say when kernels were launched
    for layout, steps, events in zip(
        launch.layouts, result["steps"], result["events"], strict=True
    ):
        predicted, band, simplicity, taken = predict(profile, planned, launch, layout)
        own = [events[ranks[0]] for ranks in layout.stage_map]
        rows.append(
            Row(
                launch=launch,
                layout=layout,
                predicted=predicted,
                band=band,
                simplicity=simplicity,
                measured=steps,
                pipeline_s=None
                if is_asynchronous
                else max(e[3] for one in own for e in one) - min(e[1] for one in own for e in one),
                kinds={} if is_asynchronous else _compare_kinds(own, taken),
            )
        )
    return rows


def _compare_kinds(
    events: Sequence[Any], taken: dict[str, float]
) -> dict[str, tuple[float, float]]:
    took = dict.fromkeys(taken, 0.0)
    for one in events:
        for word, _, ready, end in one:
            kind = next(letter for letter in word if letter in taken)
            took[kind] += end - ready
    return {kind: (took[kind], taken[kind]) for kind in taken}


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's."""
    if len(rows) < 2:
        return 1.0
    ranks = [
        np.argsort(np.argsort(values))
        for values in ([r.band.middle_s for r in rows], [r.measured_s for r in rows])
    ]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| layout | steps | measured, ms (10 and 90 of 100) | again | predicted, ms (band) | "
        "error | pipeline, measured and predicted | actions, predicted over measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for launch in dict.fromkeys(row.launch.title for row in rows):
        lines.append(f"| **{launch}** | | | | | | | |")
        for row in (row for row in rows if row.launch.title == launch):
            low, high = np.quantile(row.measured, [0.1, 0.9])
            kinds = ", ".join(f"{kind} {b / a - 1:+.1%}" for kind, (a, b) in row.kinds.items() if a)
            pipeline = "" if row.pipeline_s is None else f"{row.pipeline_s * 1e3:.1f}, "
            lines.append(
                f"| {row.layout.name} | {len(row.measured)} | {row.measured_s * 1e3:.1f} "
                f"({low * 1e3:.1f} to {high * 1e3:.1f}) | {row.again:.1%} | "
                f"{row.band.middle_s * 1e3:.1f} ({row.band.low_s * 1e3:.1f} to "
                f"{row.band.high_s * 1e3:.1f}{'' if row.is_held else ', **missed**'}) | "
                f"{row.error:+.1%} | {pipeline}{row.predicted.pipeline_s * 1e3:.1f} | {kinds} |"
            )
    return "\n".join(lines)


def judge(rows: Sequence[Row], worst_at_most: float = WORST_AT_MOST) -> str:
    errors = [abs(row.error) for row in rows]
    lines = ["| what | bound | found | |", "|---|---|---|---|"]

    def add(what: str, bound: str, found: str, kept: bool) -> None:
        lines.append(f"| {what} | {bound} | {found} | {'kept' if kept else '**missed**'} |")

    middle, worst = statistics.median(errors), max(errors)
    add("median error", f"{MEDIAN_AT_MOST:.0%}", f"{middle:.1%}", middle <= MEDIAN_AT_MOST)
    bound = f"{worst_at_most:.0%}, or twice what lies between its rounds"
    kept = all(abs(row.error) <= max(worst_at_most, 2 * row.again) for row in rows)
    add("worst error", bound, f"{worst:.1%}", kept)
    held = sum(row.is_held for row in rows) / len(rows)
    add("within its band", f"at least {HELD_AT_LEAST:.0%}", f"{held:.0%}", held >= HELD_AT_LEAST)
    for model in dict.fromkeys(row.launch.model for row in rows):
        own = [row for row in rows if row.launch.model == model]
        rho = rank_correlation(own)
        what = f"ranks of the {len(own)} layouts of {MODELS[model]} (Spearman)"
        add(what, f"at least {SPEARMAN_AT_LEAST}", f"{rho:.3f}", rho >= SPEARMAN_AT_LEAST)
    for title in dict.fromkeys(row.launch.title for row in rows):
        own = [row for row in rows if row.launch.title == title]
        best = min(own, key=lambda row: row.predicted.step_s)
        limit_s = best.predicted.step_s * (1 + best.band.apart)
        near = [row for row in own if row.predicted.step_s <= limit_s]
        chosen = min(near, key=lambda row: (row.simplicity, row.predicted.step_s))
        over = chosen.measured_s / min(row.measured_s for row in own)
        add(
            f"chosen over best: {title}", f"{CHOSEN_AT_MOST}", f"{over:.3f}", over <= CHOSEN_AT_MOST
        )
    return "\n".join(lines)


def choose_gpu_launches() -> tuple[Launch, ...]:
    """On two GPUs a pipeline too; on processors a small one, to see that it runs at all."""
    kind = find_kind()
    if kind is None:
        sys.exit("Not run: no GPU here.")
    os.environ[VARIABLE] = kind
    if kind == "cpu":
        return (replace(ALONE, title="on processors", layouts=ALONE.layouts[:2]),)
    return (GPU_ALONE, GPU_PAIR)[: min(2, torch.cuda.device_count())]


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few layouts, two rounds")
    parser.add_argument("--gpu", action="store_true", help="layouts on this machine's GPUs")
    parser.add_argument("--only", type=int, nargs="+", help="launches by the number of processes")
    parser.add_argument("--cpu", action="store_true", help="actions by their threads' CPU time")
    parser.add_argument("--keep", type=Path, help="a folder for what was measured, or that has it")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.monotonic()
    launches: Sequence[Launch] = QUICK if given.quick else LAUNCHES
    rounds = 2 if given.quick else given.rounds
    if given.gpu:
        if given.write:
            parser.error(f"--write is for {RESULT.name}, which is of processors")
        launches = choose_gpu_launches()
    rows: list[Row] = []
    for launch in launches:
        if given.only and launch.ranks not in given.only:
            continue
        rows += compare(launch, measure(launch, rounds, given.cpu, given.keep))
        print(launch.title, f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    text = f"""# The simulator against the engine

Made by `{" ".join(["python -m benchmarks.simulator", *sys.argv[1:]])}`, {rounds} rounds, in
{time.monotonic() - began:.0f} s. torch {torch.__version__}, Python {platform.python_version()},
{platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the start.

{WHAT_IT_SAYS}

{judge(rows, WORST_ON_GPU if given.gpu else WORST_AT_MOST)}

{render(rows)}
"""
    print(text)
    if given.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
