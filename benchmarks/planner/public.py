"""Predictions against measured steps that others published; nothing is fitted to them.

    python -m benchmarks.planner.public FOLDER

FOLDER holds copies of eth-easl/sailor's validation data (MIT): plans with measured steps, profiles,
link fits. Each plan's replicas are columns: a stage has a GPU type and tensor degree in each.

Messages may be hidden behind work (`overlap`), keep the rank that sends (`wait`), or keep both ends
(`meet`): a transfer that begins when the receiver has asked for it, one direction after the other.
Which one a program does, its source says; the table has all three.

One thing in the profiles cannot be: a small micro-batch that takes longer than a larger one (GH200,
tensor degree 4: 1 sample 104 ms, 2 samples 84 ms). The larger one's time counts there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.step import ActionCosts, StepCosts, StepTime, simulate_step
from varuna_core.planner.profile.profile import LinkTime
from varuna_core.schedule.compiled import KINDS

MODEL = "OPT-350"
Sends = Literal["overlap", "wait", "meet"]
WAYS: tuple[Sends, ...] = ("overlap", "wait", "meet")
MIB = 2**20
SIZES = [2.0**k * MIB for k in range(-2, 11)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published plan, measured and predicted."""

    name: str
    measured_s: float
    step: StepTime

    @property
    def error(self) -> float:
        return self.step.step_s / self.measured_s - 1


class Published:
    """The data of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = self._read("llm_info.json")[MODEL]
        self.links = self._read("multizone_bandwidths_het.json")
        self._profiles: dict[str, Any] = {}

    def _read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def profile(self, gpu: str) -> Any:
        if gpu not in self._profiles:
            self._profiles[gpu] = self._read(f"profiles/{MODEL}_{gpu}.json")
        return self._profiles[gpu]

    def find_link(self, a: str, b: str, gpus: int, zone: str) -> LinkTime:
        """Time of all that `gpus` of a node send, from a quadratic of GB/s in log2 of MiB."""
        found = None
        for one, other in ((a, b), (b, a)):
            fits = self.links[zone].get(one, {}).get(str(gpus), {}).get(zone, {}).get(other, {})
            found = found or fits.get(str(gpus))
        if found is None:
            raise KeyError(f"no link of {gpus} GPUs between {a} and {b}")
        c2, c1, c0 = found[0]
        points: list[tuple[float, float]] = []
        for size in SIZES:
            x = math.log2(size / MIB)
            took = size / ((c2 * x * x + c1 * x + c0) * 1e9)
            if not points or took > points[-1][1]:  # a fit may bend down beyond its data
                points.append((size, took))
        return LinkTime(points=tuple(points))

    def predict(self, plan: dict[str, Any], *, sends: Sends) -> StepTime:
        """One step of a published plan."""
        pipeline, zone, mbs = plan["pipeline_list"][0], plan["zone"], plan["mbs"]
        stages = pipeline["layers_per_stage"]
        replicas = pipeline["dp"][0]
        # Of each stage, of each replica: GPU type and tensor degree.
        held = [[(r[0][0][0], r[1]) for r in stage] for stage in pipeline["tmp_per_stage"]]
        m = plan["gbs"] // (mbs * replicas)
        columns = [
            self._build_column(stages, [stage[r] for stage in held], mbs, zone, sends)
            for r in range(replicas)
        ]
        reduce = [
            self._time_reduction(layers, stage, zone)
            for layers, stage in zip(stages, held, strict=True)
        ]
        updates = [
            max(sum(self._cell(gpu, mbs, tp, layer)[2] for layer in layers) for gpu, tp in stage)
            for layers, stage in zip(stages, held, strict=True)
        ]
        return simulate_step(
            build_schedule_model("1f1b", len(stages), m, "none").compiled,
            StepCosts(
                columns=tuple(columns),
                reduce_s=tuple(reduce),
                num_buckets=(1,) * len(stages),
                optimizer_s=tuple(updates),
                exchange_s=(0.0,) * len(stages),
                overlap_reduction=False,
            ),
        )

    def _cell(self, gpu: str, mbs: int, tp: int, layer: int) -> Sequence[float]:
        """Forward, backward and update: no more than any larger micro-batch takes."""
        rows = [
            by_degree[str(tp)][str(layer)]
            for size, by_degree in self.profile(gpu).items()
            if int(size) >= mbs and str(tp) in by_degree
        ]
        return [min(values) for values in zip(*rows, strict=True)]

    def _build_column(
        self,
        stages: Sequence[Sequence[int]],
        held: Sequence[tuple[str, int]],
        mbs: int,
        zone: str,
        sends: Sends,
    ) -> ActionCosts:
        hops: list[float] = []
        for stage, layers in enumerate(stages[:-1]):
            (a, tp), (b, _) = held[stage], held[stage + 1]
            size = mbs * self.info[str(tp)][str(layers[-1])]["act_output_bytes"]
            hops += [
                self.find_link(*pair, tp, zone).compute_time(size) for pair in ((a, b), (b, a))
            ]
        forward, backward = (
            [
                sum(self._cell(gpu, mbs, tp, layer)[way] for layer in layers)
                for layers, (gpu, tp) in zip(stages, held, strict=True)
            ]
            for way in range(2)
        )
        if sends != "overlap":
            for stage in range(len(stages) - 1):
                forward[stage] += hops[2 * stage]
                backward[stage + 1] += hops[2 * stage + 1]
                if sends == "meet":
                    forward[stage + 1] += hops[2 * stage]
                    backward[stage] += hops[2 * stage + 1]
            hops = [0.0] * len(hops)
        rows = {"F": forward, "B": backward}
        costs = [cost for kind in KINDS for cost in rows.get(kind, [0.0] * len(stages))]
        return ActionCosts(costs=tuple(costs), hops=tuple(hops))

    def _time_reduction(
        self, layers: Sequence[int], held: Sequence[tuple[str, int]], zone: str
    ) -> float:
        """A ring over the replicas; the tensor ranks of a node share its link."""
        count = len(held)
        if count == 1:
            return 0.0
        tp = max(degree for _, degree in held)
        size = sum(self.info[str(tp)][str(layer)]["params_bytes"] for layer in layers) * tp
        ring = zip(held, [*held[1:], held[0]], strict=True)
        return max(
            2 * (count - 1) * self.find_link(a, b, tp, zone).compute_time(size / count)
            for (a, _), (b, _) in ring
        )

    def list_rows(self, group: str, sends: Sends) -> list[Row]:
        return [
            Row(
                name=path.stem.removeprefix("plan_config_"),
                measured_s=plan["real"],
                step=self.predict(plan, sends=sends),
            )
            for path in sorted((self.folder / group).glob("*.json"))
            for plan in [json.loads(path.read_text())]
        ]


def render_rows(folder: Path) -> list[str]:
    """A table: each plan's parts, and the errors by what messages do."""
    published = Published(folder)
    lines = [
        "| plans | plan | measured s | sends overlap | sends wait | both ends wait | "
        "of which sums | optimizer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in ("plans-mixed", "plans-gh200"):
        ways = [published.list_rows(group, sends) for sends in WAYS]
        for row, *others in zip(*ways, strict=True):
            said = " | ".join(f"{one.step.step_s:.3f} ({one.error:+.1%})" for one in (row, *others))
            lines.append(
                f"| {group} | {row.name} | {row.measured_s:.3f} | {said} | "
                f"{row.step.reduced_s - row.step.pipeline_s:.3f} | {row.step.optimizer_s:.3f} |"
            )
        means = [sum(abs(row.error) for row in rows) / len(rows) for rows in ways]
        said = " | ".join(f"{mean:.1%}" for mean in means)
        lines.append(f"| {group} | mean of errors | | {said} | | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print("\n".join(render_rows(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
