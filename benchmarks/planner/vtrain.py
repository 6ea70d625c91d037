"""Predictions against VIA-Research/vTrain's measured steps (MIT) of GPT models on A100 GPUs.

    python -m benchmarks.planner.vtrain FOLDER

Times of a layer are fitted on the rows of other cells, never on those of the cell that is told: for
one node a cell is a hidden size with a tensor degree, for many nodes it is a model. What is fitted
are a few rates that all cells share: a layer's own time, its flops, what its tensor ranks exchange,
the head's flops, a message between stages, a byte of the sum over replicas, a step's own time. The
step is then our simulator's: 1f1b of equal stages, the head on the last one.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from varuna_core.planner.model.schedule_model import build_schedule_model

VOCABULARY = 51200
NODE_GPUS = 8
Array = Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row."""

    model: str
    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    layers: int
    length: int
    tensor: int
    replicas: int
    stages: int
    step_ms: float

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.micro_batch // self.replicas

    def list_rates(self) -> dict[str, float]:
        """Amounts of work, by rate: of a layer, the head, a message, the rest."""
        b, s, h, t = self.micro_batch, self.length, self.hidden, self.tensor
        parameters = (12 * h * h * self.layers / self.stages + h * VOCABULARY) / t
        share = 2 * (self.replicas - 1) / self.replicas
        return {
            "layer": 1.0,
            "flops": b * s * (72 * h * h + 12 * h * s) / t / 1e12,
            "exchanged": b * s * h * (t - 1) / t / 1e9,
            "head": b * s * 6 * h * VOCABULARY / t / 1e12,
            "message": b * s * h / 1e9 if self.stages > 1 else 0.0,
            "sum": share * parameters / 1e9,
            "step": 1.0,
        }


OF_LAYER, OF_STEP = ("layer", "flops", "exchanged"), ("sum", "step")


def read_rows(path: Path) -> list[Measured]:
    with path.open() as file:
        return [
            Measured(
                model=row.get("Parameters (billion)", "") or row["hidden size"],
                gpus=int(row["# GPUs"]),
                batch=int(row["global batch"]),
                micro_batch=int(row["micro batch"]),
                hidden=int(row["hidden size"]),
                layers=int(row["# layers"]),
                length=int(row["sequence length"]),
                tensor=int(row["tensor parallelism"]),
                replicas=int(row["data parallelism"]),
                stages=int(row["pipeline parallelism"]),
                step_ms=float(row["iteration time (ms)"]),
            )
            for row in csv.DictReader(file)
        ]


def _build_features(row: Measured) -> list[float]:
    """How often a step pays each rate, for equal stages."""
    rates, slots = row.list_rates(), row.num_microbatches + row.stages - 1
    layers = row.layers / row.stages
    return [
        *(slots * layers * rates[name] for name in OF_LAYER),
        row.num_microbatches * rates["head"],
        2 * (row.stages - 1) * rates["message"],
        *(rates[name] for name in OF_STEP),
    ]


def fit_rates(rows: Sequence[Measured]) -> Array:
    """Rates of 0 or more with the least squares of relative errors."""
    features = np.array([_build_features(row) for row in rows])
    features /= np.array([[row.step_ms] for row in rows])
    used = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, used], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            rates = np.zeros(features.shape[1])
            rates[used] = np.maximum(found, 0.0)
            return rates
        used.pop(int(found.argmin()))


def predict(row: Measured, rates: Array) -> float:
    """By the simulator; a third of the work is forward."""
    each = row.list_rates()
    layer = sum(each[name] * rate for name, rate in zip(OF_LAYER, rates, strict=False))
    head, message = each["head"] * rates[3], each["message"] * rates[4]
    work = [layer * row.layers / row.stages] * row.stages
    work[-1] += head
    none = [0.0] * row.stages
    costs = [*(w / 3 for w in work), *none, *none, *(2 * w / 3 for w in work), *none, *none]
    compiled = build_schedule_model("1f1b", row.stages, row.num_microbatches, "none").compiled
    pipeline = compiled.run(costs, [message] * (2 * (row.stages - 1))).makespan
    return pipeline + sum(each[name] * rate for name, rate in zip(OF_STEP, rates[5:], strict=True))


def predict_held_out(rows: Sequence[Measured], cell: Callable[[Measured], Hashable]) -> Array:
    """Each cell by rates of the others."""
    found = np.zeros(len(rows))
    cells = [cell(row) for row in rows]
    for one in dict.fromkeys(cells):
        rates = fit_rates([row for row, its in zip(rows, cells, strict=True) if its != one])
        for i, its in enumerate(cells):
            if its == one:
                found[i] = predict(rows[i], rates)
    return found


def _rank(values: Array) -> Array:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    return ranks


def list_regrets(rows: Sequence[Measured], found: Array) -> list[float]:
    """Compute the chosen plan's cost for each question (model, GPUs, batch) with several plans."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.model, row.layers, row.gpus, row.batch].append(i)
    regrets = []
    for places in groups.values():
        if len(places) > 1:
            chosen = min(places, key=lambda i: found[i])
            best = min(rows[i].step_ms for i in places)
            regrets.append(rows[chosen].step_ms / best - 1)
    return regrets


def render_vtrain(folder: Path) -> list[str]:
    lines = [
        "| rows | held out in turn | rows | mean error | largest | Spearman | mean regret | "
        "largest regret | questions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases: tuple[tuple[str, str, Callable[[Measured], Hashable]], ...] = (
        ("single", "hidden size with tensor degree", lambda row: (row.hidden, row.tensor)),
        ("multi", "model", lambda row: row.model),
        ("multi, tensor ranks on one node", "model", lambda row: row.model),
    )
    for name, words, cell in cases:
        rows = read_rows(folder / f"ground_truth_{name.split(',')[0]}.csv")
        if "," in name:
            rows = [row for row in rows if row.tensor <= NODE_GPUS]
        found = predict_held_out(rows, cell)
        measured = np.array([row.step_ms for row in rows])
        errors = np.abs(found / measured - 1)
        spearman = float(np.corrcoef(_rank(found), _rank(measured))[0, 1])
        regrets = list_regrets(rows, found)
        lines.append(
            f"| {name} | {words} | {len(rows)} | {errors.mean():.1%} | {errors.max():.1%} | "
            f"{spearman:.3f} | {np.mean(regrets):.1%} | {max(regrets):.1%} | {len(regrets)} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print("\n".join(render_vtrain(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
