"""Draws docs/pictures/schedules/*.svg: a step of each schedule, as the simulator times it.

The lists of actions are those that the engine runs. Colours are told apart by the colour-blind, and
what stands outside a bar is a grey that reads on a white page and on a dark one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.compiled import ScheduleTiming, simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify

RANKS, MICROBATCHES = 4, 6
LEFT, TOP, LANE, GAP, WIDTH = 76, 8, 26, 6, 860
GREY = "#78808a"
COLOURS: Mapping[str, str] = {
    "F": "#56b4e9",
    "f": "#b5ddf6",
    "R": "#cc79a7",
    "B": "#e69f00",
    "I": "#f0c35e",
    "W": "#2fb48c",
}
WORDS: Mapping[str, str] = {
    "F": "F forward",
    "f": "f forward, inputs kept",
    "R": "R recompute",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
}


def main(folder: Path) -> None:
    """All pictures."""
    for name, per_rank in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("varuna", 1),
        ("zero_bubble", 1),
        ("interleaved", 2),
        ("zbv", 2),
    ):
        # A stage of a rank that has two is half as long.
        costs = build_even_costs(RANKS * per_rank, *(1 / per_rank,) * 3)
        schedule = build_schedule(name, RANKS, MICROBATCHES, stages_per_rank=per_rank, costs=costs)
        labels = [f"rank {rank}" for rank in range(RANKS)]
        (folder / f"{name}.svg").write_text(draw(schedule, costs, labels))
    for name, layers in (("mixed-even", (5, 5, 5, 5)), ("mixed-balanced", (8, 4, 4, 4))):
        costs = build_mixed_costs(layers)
        schedule = build_schedule("1f1b", RANKS, MICROBATCHES, costs=costs)
        labels = [f"{count} on {kind}" for count, kind in zip(layers, KINDS, strict=True)]
        (folder / f"{name}.svg").write_text(draw(schedule, costs, labels, scale=27.0))


KINDS = ("A100", "A10", "A10", "A10")


def build_mixed_costs(layers: Sequence[int]) -> Costs:
    """One GPU that is twice as fast as the others; a layer of those takes a fifth of a unit."""
    each = tuple(
        count / (10 if kind == "A100" else 5) for count, kind in zip(layers, KINDS, strict=True)
    )
    return Costs(forward=each, input_grad=each, weight_grad=each)


def draw(schedule: Schedule, costs: Costs, labels: Sequence[str], scale: float = 0.0) -> str:
    """A lane a rank, an axis of time, what it comes to."""
    timing = simulate(schedule, costs)
    across = (WIDTH - LEFT - 8) / (scale or timing.makespan)
    parts = []
    for rank, label in enumerate(labels):
        y = TOP + rank * (LANE + GAP)
        parts.append(
            f'<text class="o" x="{LEFT - 6}" y="{y + 17}" text-anchor="end">{label}</text>'
        )
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{timing.makespan * across:.1f}" height="{LANE}" '
            f'fill="{GREY}" fill-opacity=".13"/>'
        )
        parts += draw_lane(schedule, costs, timing, rank, y, across)
    bottom = TOP + len(labels) * (LANE + GAP) + 14
    parts += draw_legend(schedule, bottom)
    parts.append(
        f'<text class="o" x="{LEFT}" y="{bottom + 20}">{describe(schedule, timing)}</text>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 28}" '
        f'role="img" aria-label="{schedule.name}: {describe(schedule, timing)}">'
    )
    style = (
        "<style>text{font:12px sans-serif;fill:#14181c}.m{text-anchor:middle}"
        f".o{{fill:{GREY}}}</style>"
    )
    return "\n".join([head, style, *parts, "</svg>"]) + "\n"


def draw_lane(
    schedule: Schedule, costs: Costs, timing: ScheduleTiming, rank: int, y: float, across: float
) -> list[str]:
    parts = []
    for action, start in zip(schedule.ranks[rank], timing.starts[rank], strict=True):
        width = costs.by_kind[action.kind][action.stage] * across
        x = LEFT + start * across
        # The later stages of a rank that has several are outlined.
        later = action.stage >= schedule.num_ranks
        edge = ' stroke="#14181c" stroke-opacity=".7"' if later else ""
        parts.append(
            f'<rect x="{x + 0.7:.1f}" y="{y + 1}" width="{max(1.0, width - 1.4):.1f}" '
            f'height="{LANE - 2}" rx="2" fill="{COLOURS[action.kind]}"{edge}/>'
        )
        if width > 11:
            parts.append(
                f'<text class="m" x="{x + width / 2:.1f}" y="{y + 17}">{action.microbatch}</text>'
            )
    return parts


def draw_legend(schedule: Schedule, y: float) -> list[str]:
    used = {action.kind for actions in schedule.ranks for action in actions}
    parts, x = [], float(LEFT)
    for kind in (kind for kind in COLOURS if kind in used):
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>'
        )
        parts.append(f'<text class="o" x="{x + 17}" y="{y}">{WORDS[kind]}</text>')
        x += 34 + 6.4 * len(WORDS[kind])
    return parts


def describe(schedule: Schedule, timing: ScheduleTiming) -> str:
    held = verify(schedule)
    text = f"{timing.makespan:g} units, {timing.bubble_share:.0%} idle; graphs held at most: "
    text += " ".join(map(str, held.graphs))
    return text + (f"; inputs: {' '.join(map(str, held.inputs))}" if any(held.inputs) else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
