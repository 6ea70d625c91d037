"""Our schedules and torch's, simulated on the same costs: makespan, and backwards in one go.

    python -m benchmarks.pipeline.simulated [--ranks 2 4] [--write]

Nothing runs: torch's lists are those that its classes make, read by our parser and verified. A
schedule is compared with ours of as many stages a rank; a model is the same in both, so that of one
stage a rank each is twice as long. m is P, 2P, 4P and 8P, where torch has the schedule for it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.varuna_core.schedule.csv_text import parse_csv
from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.fuse import EQUAL, count_fused
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of a numpy that is not there
    from torch.distributed.pipelining import schedules

RESULT = Path(__file__).parent.parent / "results" / "schedules.md"
TORCHS = {  # stages a rank
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
COSTS: dict[str, tuple[float, float, float, float]] = {
    "F = I = W": (1.0, 1.0, 1.0, 2.0),
    "I < F < W": (1.0, 0.8, 1.2, 2.0),
    "W < F < I": (1.0, 1.2, 0.8, 2.0),
    "F < I = W": (0.8, 1.1, 1.1, 2.2),
    "F = I = W, B 3 % less": (1.0, 1.0, 1.0, 1.94),
}
"""F, I, W and B of one of two stages a rank."""


def make_costs(figures: Sequence[float], num_ranks: int, stages_per_rank: int) -> Costs:
    stages = num_ranks * stages_per_rank
    forward, input_grad, weight_grad, backward = (2 / stages_per_rank * one for one in figures)
    even = build_even_costs(stages, forward, input_grad, weight_grad)
    return replace(even, backward=(backward,) * stages)


def build_torchs(name: str, num_ranks: int, num_microbatches: int) -> Schedule | None:
    """Torch's schedule of that name, None where it has none for so many micro-batches."""
    kind = schedules.get_schedule_class(name)
    stages = num_ranks * TORCHS[name]
    rounds = max(1, num_microbatches // num_ranks)
    if name.startswith("Interleaved") and num_microbatches % rounds:
        return None
    if name == "DualPipeV" and num_microbatches < stages:
        return None
    one: Any = object.__new__(kind)  # its __init__ asks for stages of a model and for processes
    one._n_microbatches, one._num_stages = num_microbatches, stages
    one.num_stages, one.n_local_stages, one.pp_group_size = stages, TORCHS[name], num_ranks
    one.number_of_rounds, one.microbatches_per_round = rounds, num_microbatches // rounds
    if name == "1F1B":
        # Of torch 2.13 the last rank's list starts at micro-batch 1; what it runs starts at 0.
        lists = [_renumber(one._get_pipeline_order()[rank]) for rank in range(num_ranks)]
    else:
        lists = [one._calculate_single_rank_operations(rank) for rank in range(num_ranks)]
    text = "\n".join(",".join(map(str, _list_compute(actions))) for actions in lists)
    return parse_csv(text, f"torch {name}")


def _renumber(actions: Sequence[Any]) -> list[Any]:
    """Each kind of action from micro-batch 0 on."""
    counts: Counter[Any] = Counter()
    numbered = []
    for action in actions:
        if action is not None:
            kind = action.computation_type
            numbered.append(action._replace(microbatch_index=counts[kind]))
            counts[kind] += 1
    return numbered


def _list_compute(actions: Sequence[Any]) -> Iterator[Any]:
    """Without idle steps and sums over replicas; the two of an overlapped pair one after the other,
    as torch runs them."""
    for action in actions:
        if action is not None and action.sub_actions is not None:
            yield from action.sub_actions
        elif action is not None and action.computation_type != schedules.REDUCE_GRAD:
            yield action


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One of torch's schedules beside ours of as many stages a rank."""

    costs: str
    torchs: str
    num_ranks: int
    num_microbatches: int
    ours: str
    makespans: tuple[float, float]
    """Ours, torch's."""
    fused: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.makespans[0] / self.makespans[1]

    @property
    def is_shorter(self) -> bool:
        return self.makespans[0] * EQUAL < self.makespans[1]

    @property
    def fuses_fewer(self) -> bool:
        return self.fused[0] < self.fused[1]

    @property
    def is_behind(self) -> bool:
        """Longer, or as long with fewer backwards in one go."""
        as_long = not self.is_shorter
        return self.makespans[0] > self.makespans[1] * EQUAL or (as_long and self.fuses_fewer)


def compare(costs: str, num_ranks: int, num_microbatches: int) -> list[Comparison]:
    """All of torch's that there are for these sizes."""
    found = []
    ours: dict[int, tuple[Costs, Schedule, float]] = {}
    for name, each in TORCHS.items():
        theirs = build_torchs(name, num_ranks, num_microbatches)
        if theirs is None:
            continue
        if each not in ours:
            figures = make_costs(COSTS[costs], num_ranks, each)
            made = build_schedule(
                "auto", num_ranks, num_microbatches, stages_per_rank=each, costs=figures
            )
            verify(made)
            ours[each] = figures, made, simulate(made, figures).makespan
        figures, made, makespan = ours[each]
        verify(theirs)
        found.append(
            Comparison(
                costs=costs,
                torchs=name,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                ours=made.name,
                makespans=(makespan, simulate(theirs, figures).makespan),
                fused=(count_fused(made), count_fused(theirs)),
            )
        )
    return found


def render(found: Sequence[Comparison]) -> str:
    """What all come to, then the cases of P = 2, 4, 8 and 16 with m = 4P."""
    lines = [
        "| costs | torch's | cases | ours over torch's, median | most | as long | "
        "of these fewer in one go | shorter | of these fewer in one go |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for costs in COSTS:
        for name in TORCHS:
            cases = [one for one in found if (one.costs, one.torchs) == (costs, name)]
            if not cases:
                continue
            ratios = [one.ratio for one in cases]
            shorter = [one for one in cases if one.is_shorter]
            equal = [one for one in cases if not one.is_shorter]
            figures = (
                *(costs, name, len(cases)),
                *(f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"),
                *(len(equal), sum(one.fuses_fewer for one in equal)),
                *(len(shorter), sum(one.fuses_fewer for one in shorter)),
            )
            lines.append("| " + " | ".join(map(str, figures)) + " |")
    lines += [
        "",
        "| costs | P | m | torch's | its makespan | its backwards in one go | ours | makespan | "
        "backwards in one go |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        ranks, microbatches = one.num_ranks, one.num_microbatches
        if ranks in (2, 4, 8, 16) and microbatches == 4 * ranks and one.torchs == "DualPipeV":
            whole = ranks * microbatches * TORCHS[one.torchs]
            lines.append(
                f"| {one.costs} | {ranks} | {microbatches} | {one.torchs} | "
                f"{one.makespans[1]:g} | {one.fused[1]} of {whole} | {one.ours} | "
                f"{one.makespans[0]:g} | {one.fused[0]} of {whole} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Compare, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(2, 17)))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    found = []
    for costs in COSTS:
        for num_ranks in given.ranks:
            for times in (1, 2, 4, 8):
                found += compare(costs, num_ranks, times * num_ranks)
    behind = [one for one in found if one.is_behind]
    text = (
        f"{len(found)} comparisons; ours is longer, or as long with fewer backwards in one go, in "
        f"{len(behind)} (bound: 0).\n\n{render(found)}\n"
    )
    print(text)
    for one in behind:
        print(one)
    if given.write:
        RESULT.write_text(
            "# Schedules: ours and torch's, simulated on the same costs\n\n"
            f"Made by `python -m benchmarks.pipeline.simulated {' '.join(sys.argv[1:])}`: "
            f"P = {', '.join(map(str, given.ranks))}; m = P, 2P, 4P and 8P; torch "
            f"{torch.__version__}, Python {platform.python_version()}. Ours is what `auto` chooses "
            "with as many stages a rank; times are sums of action costs, so another machine writes "
            "the same page. Costs of one of two stages a rank: "
            + "; ".join(
                f"{name}: {', '.join(f'{k} {v:g}' for k, v in zip('FIWB', each, strict=True))}"
                for name, each in COSTS.items()
            )
            + f". {text}"
        )
    raise SystemExit(1 if behind else 0)


if __name__ == "__main__":
    main()
