"""Estimates from data sheets against measured steps that others published: how far off they are.

    python -m benchmarks.planner.estimates FOLDER [--write]

Each published run is estimated as `vjob submit` does for a conf without a profile:
`estimate_profile` for its GPUs, the link that is assumed where a conf says nothing, this planner's
step of its layout. No figure is fitted. vTrain's runs (GPT on A100) count as half precision; those
of many GPUs recompute everything: their graphs would not fit. Sailor's (OPT-350M) are fp32 by the
bytes of their weights, one estimate with the assumed link, one with the links that their data name.

The second table asks what a cut by data sheets costs, by profiles that were measured. What the
product says of an estimate (`ESTIMATE` in jobs/planning/question.py) are this result's figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from benchmarks.planner.public import MODEL, Published
from benchmarks.planner.vtrain import VOCABULARY, Measured, read_rows
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import NodeKind, place_in_turn
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.gpus import find_gpu
from varuna_core.planner.profile.profile import Network, Profile, build_link
from varuna_core.planner.profile.transformer import Transformer, build_cell, estimate_profile
from vjob.jobs.planning.question import LINK_GB_S

RESULT = RESULTS / "estimates.md"
AS_PUBLISHED = ", links as published"
PRODUCTS = {
    "A100-40": "A100-40",
    "GH-96": "GH200",
    "RTX-2080": "RTX2080TI",
    "RTX-3090": "RTX3090",
    "Titan-RTX": "TITANRTX",
    "V100-16": "V100-16",
}
"""Sailor's names; a node of eight RTX-2080 is of the Ti."""
OPT_350M = Transformer(
    name=MODEL,
    layers=24,
    hidden=1024,
    heads=16,
    length=2048,
    vocabulary=50272,
    flash=False,
)
ALIKE = 0.03
"""Two layouts whose measured steps differ by less are not ranked."""


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One published run: its measured step and the estimate of it."""

    name: str
    measured_s: float
    predicted_s: float
    question: Hashable = None
    """Runs of one question differ in the layout alone."""

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout as it was run: its nodes in turn, the segments that end each stage."""

    nodes: tuple[NodeKind, ...]
    bounds: tuple[int, ...]
    shape: Shape
    recompute: str = "none"


def predict_step(profile: Profile, training: TrainingModel, layout: Layout) -> float:
    """Seconds of a step by this planner's model; memory is no question, as it ran."""
    gpus = {kind: replace(gpu, memory_bytes=1e15) for kind, gpu in profile.gpus.items()}
    tables, shape = Tables(replace(profile, gpus=gpus), training), layout.shape
    stages = len(layout.bounds) - 1
    placed = place_in_turn(layout.nodes, stages, shape.tensor, shape.replicas)
    count = training.count_micro_batches(shape.replicas, shape.micro_batch)
    work = build_schedule_model("1f1b", stages, count, layout.recompute)
    chain = Chain(tables, shape, placed, work)
    return simulate_step(chain.compiled, chain.build_costs(layout.bounds)).step_s


def estimate_vtrain(row: Measured, recompute: str) -> Estimated:
    model = Transformer(
        name="gpt",
        layers=row.layers,
        hidden=row.hidden,
        heads=max(1, row.hidden // 128),
        length=row.length,
        vocabulary=VOCABULARY,
        flash=False,
    )
    profile = estimate_profile(
        model,
        ["A100-80"],
        micro_batches=(row.micro_batch,),
        degrees=(row.tensor,),
        inter_gb_s=LINK_GB_S,
    )
    on_node = max(row.tensor, min(8, row.gpus))
    node = NodeKind(name="node", gpu="A100-80", gpus=on_node, count=1)
    each, more = divmod(row.layers, row.stages)
    counts = [each + (s < more) for s in range(row.stages)]
    counts[0] += 1
    counts[-1] += 1
    layout = Layout(
        nodes=(node,) * -(-row.gpus // on_node),
        bounds=(0, *itertools.accumulate(counts)),
        shape=Shape(tensor=row.tensor, replicas=row.replicas, micro_batch=row.micro_batch),
        recompute=recompute,
    )
    return Estimated(
        name=f"{row.model} {row.tensor}x{row.replicas}x{row.stages}",
        measured_s=row.step_ms / 1e3,
        predicted_s=predict_step(profile, TrainingModel(batch=row.batch), layout),
        question=(row.model, row.layers, row.length, row.gpus, row.batch),
    )


def estimate_sailor(published: Published, path: Path, *, has_links: bool) -> Estimated:
    plan = json.loads(path.read_text())
    pipeline, zone = plan["pipeline_list"][0], plan["zone"]
    held = [[(r[0][0][0], r[1]) for r in stage] for stage in pipeline["tmp_per_stage"]]
    kinds = sorted({PRODUCTS[gpu] for stage in held for gpu, _ in stage})
    (tensor,) = {degree for stage in held for _, degree in stage}
    profile = estimate_profile(
        OPT_350M,
        kinds,
        micro_batches=(plan["mbs"],),
        degrees=(tensor,),
        inter_gb_s=LINK_GB_S,
        element_bytes=4,
    )
    if has_links:
        links = dict(profile.network.links)
        names = {PRODUCTS[gpu]: gpu for stage in held for gpu, _ in stage}
        for a, b in itertools.product(kinds, repeat=2):
            found = published.find_link(names[a], names[b], tensor, zone)
            size = 2.0**23
            links[a, b, "inter"] = build_link(0.0, size / found.compute_time(size) / 1e9)
        profile = replace(profile, network=Network(links=links, all_reduces={}))
    nodes = tuple(
        NodeKind(name=f"{s}-{r}", gpu=PRODUCTS[gpu], gpus=tensor, count=1)
        for s, stage in enumerate(held)
        for r, (gpu, _) in enumerate(stage)
    )
    layout = Layout(
        nodes=nodes,
        bounds=(0, *itertools.accumulate(map(len, pipeline["layers_per_stage"]))),
        shape=Shape(tensor=tensor, replicas=pipeline["dp"][0], micro_batch=plan["mbs"]),
    )
    training = TrainingModel(batch=plan["gbs"], weight_bytes=4, state_bytes=8)
    return Estimated(
        name=path.stem.removeprefix("plan_config_"),
        measured_s=plan["real"],
        predicted_s=predict_step(profile, training, layout),
    )


def estimate_all(folder: Path) -> Iterator[tuple[str, list[Estimated]]]:
    """The published runs, by what they were run on."""
    for name, words, recompute in (
        ("single", "GPT on 2 to 8 A100 of one node", "none"),
        ("multi", "GPT on 64 to 512 A100", "full"),
    ):
        rows = read_rows(folder / "vtrain" / f"ground_truth_{name}.csv")
        yield words, [estimate_vtrain(row, recompute) for row in rows]
    published = Published(folder / "sailor")
    for group, words in (("plans-gh200", "OPT-350M on GH200"), ("plans-mixed", MIXED)):
        files = sorted((folder / "sailor" / group).glob("*.json"))
        for has_links in (False, True):
            more = AS_PUBLISHED if has_links else ", link assumed"
            yield (
                words + more,
                [estimate_sailor(published, path, has_links=has_links) for path in files],
            )


MIXED = "OPT-350M on RTX 2080 Ti, 3090, Titan RTX"


def count_ranked(runs: Sequence[Estimated]) -> tuple[int, int]:
    """Pairs of layouts of one question that the estimate ranks as measured, and all pairs."""
    groups: dict[Hashable, list[Estimated]] = defaultdict(list)
    for one in runs:
        groups[one.question].append(one)
    right = pairs = 0
    for rows in groups.values():
        for a, b in itertools.combinations(rows, 2):
            if abs(a.measured_s / b.measured_s - 1) < ALIKE:
                continue
            pairs += 1
            right += (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
    return right, pairs


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model in two stages, one on each of two GPUs; times are those of the measured profiles."""

    gpus: tuple[str, str]
    by_work: float
    """Time of the slower stage over the best cut's, of stages of equal work."""
    by_sheets: float
    """The same, of stages that data sheets balance."""


def list_cuts(published: Published, size: int = 2) -> Iterator[Cut]:
    """Each pair of Sailor's GPUs, one micro-batch forward and backward, no tensor ranks."""
    for gpus in itertools.combinations(PRODUCTS, 2):
        measured, estimated = [], []
        for gpu in gpus:
            cell = build_cell(OPT_350M, find_gpu(PRODUCTS[gpu]), size, element_bytes=4)
            parts = cell.forward_s, cell.input_grad_s, cell.weight_grad_s
            estimated.append(np.sum(parts, axis=0))
            rows = published.profile(gpu)[str(size)]["1"]
            measured.append(np.array([sum(rows[str(i)][:2]) for i in range(len(estimated[0]))]))
        best = _time_slower(measured, find_cut(measured))
        yield Cut(
            gpus=gpus,
            by_work=_time_slower(measured, find_cut([estimated[0], estimated[0]])) / best,
            by_sheets=_time_slower(measured, find_cut(estimated)) / best,
        )


def find_cut(times: Sequence[Any]) -> int:
    return min(range(1, len(times[0])), key=lambda cut: _time_slower(times, cut))


def _time_slower(times: Sequence[Any], cut: int) -> float:
    return max(float(times[0][:cut].sum()), float(times[1][cut:].sum()))


def find_band(ratios: Iterable[float]) -> tuple[float, float, float]:
    """10th percentile, median, 90th percentile."""
    low, middle, high = np.percentile(list(ratios), (10, 50, 90))
    return float(low), float(middle), float(high)


def render_estimates(folder: Path) -> list[str]:
    lines = [
        "| runs | how many | predicted / measured: median | 10th to 90th percentile | all | "
        "pairs of layouts ranked right |",
        "|---|---|---|---|---|---|",
    ]
    for words, runs in estimate_all(folder):
        lines.append(_render_row(words, runs))
    return lines


def _render_row(words: str, runs: Sequence[Estimated]) -> str:
    ratios = [one.ratio for one in runs]
    low, middle, high = find_band(ratios)
    right, pairs = count_ranked(runs) if runs[0].question is not None else (0, 0)
    ranked = f"{right} of {pairs}, {right / pairs:.0%}" if pairs else "not of one question"
    return (
        f"| {words} | {len(runs)} | {middle:.2f} | {low:.2f} to {high:.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} | {ranked} |"
    )


def render_cuts(folder: Path) -> list[str]:
    lines = ["| GPUs | cut by counted work | cut by data sheets |", "|---|---|---|"]
    cuts = list(list_cuts(Published(folder / "sailor")))
    for cut in cuts:
        lines.append(f"| {' and '.join(cut.gpus)} | {cut.by_work:.2f} | {cut.by_sheets:.2f} |")
    bands = [find_band(getattr(cut, name) for cut in cuts) for name in ("by_work", "by_sheets")]
    said = " | ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in bands)
    return [*lines, f"| median (10th to 90th percentile) | {said} |"]


def find_errors(folder: Path) -> tuple[int, float, float, float]:
    """All runs, the lowest 10th and the highest 90th percentile of any set, and the share of pairs
    of layouts that are ranked right: what the product says of an estimate."""
    sets = [runs for words, runs in estimate_all(folder) if not words.endswith(AS_PUBLISHED)]
    bands = [find_band(one.ratio for one in runs) for runs in sets]
    counts = [count_ranked(runs) for runs in sets if runs[0].question is not None]
    return (
        sum(map(len, sets)),
        min(low for low, _, _ in bands),
        max(high for _, _, high in bands),
        sum(right for right, _ in counts) / sum(pairs for _, pairs in counts),
    )


WHAT_STEPS_SAY = """\
Where a node's GPUs hold little work each (one node, small models), steps are longer than estimated:
kernels do not fill a GPU, and tensor ranks of a small model wait for one another. On many A100 the
estimate is near in the middle. Sailor's fp32 runs seem to multiply in TF32 on A100 and GH200, which
this engine does not, and their tensor ranks of eight PCI Express GPUs are a few times slower than
the link's figure. Where hosts sit on a slow link, the assumed one is what is wrong: `--link` says
it to `vjob plan`."""

WHAT_CUTS_SAY = """\
OPT-350M in two stages, one on each kind of GPU, timed by the profiles that were measured: the
slower stage over that of the best cut. Each cut is made without these profiles. A cut by counted
work is the runtime's where nothing is known of the GPUs. Data sheets are worse where a program
multiplies in TF32 on one kind alone (A100 and RTX 3090 here), and little worse where kinds are
nearly alike."""


def render(folder: Path) -> str:
    """The result file's text."""
    count, low, high, ranked = find_errors(folder)
    parts = [
        "# Estimates from data sheets, beside what was measured",
        "Made by `python -m benchmarks.planner.estimates FOLDER --write`: eth-easl/sailor's and "
        "VIA-Research/vTrain's published data (MIT). Nothing is fitted.",
        f"All in all: {count} runs, predicted over measured {low:.2f} to {high:.2f} (the widest "
        f"of the sets' 10th to 90th percentiles, the link assumed), {ranked:.0%} of pairs of "
        "layouts ranked right. No measured run compares cuts over unlike GPUs; see the second "
        "table for what their measured profiles say of that.",
        "## Steps",
        "\n".join(render_estimates(folder)),
        WHAT_STEPS_SAY,
        "## Cuts over unlike GPUs",
        "\n".join(render_cuts(folder)),
        WHAT_CUTS_SAY,
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Print the tables; with --write keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with sailor/ and vtrain/")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    text = render(options.folder)
    print(text, end="")
    if options.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
