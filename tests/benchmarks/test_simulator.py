"""The layouts of the simulator's benchmark: each can be planned, and is run as it is planned."""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace

import pytest

from tests.varuna_core.planner.profiles import make_profile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


def test_what_a_run_is_told_gives_the_order_of_the_plan() -> None:
    from benchmarks.simulator.layouts import LAUNCHES, LEFT, RIGHT
    from benchmarks.simulator.plans import make_tables, plan
    from varuna_core.schedule.registry import build_schedule

    seen = set()
    for launch in LAUNCHES:
        size = sum(launch.layouts[0].counts)
        drawn = make_profile(random.Random(1), size)
        kinds = {LEFT: "big", RIGHT: "small"}
        gpus = {own: drawn.gpus[kind] for own, kind in kinds.items()}
        links = {
            (a, b, where): drawn.network.links[kinds[a], kinds[b], where]
            for a, b in itertools.product(kinds, kinds)
            for where in ("intra", "inter")
        }
        network = replace(drawn.network, links=links, all_reduces={})
        tables = make_tables(replace(drawn, gpus=gpus, network=network), launch)
        for layout in launch.layouts:
            assert sum(layout.counts) == size and len(layout.counts) % layout.ranks == 0
            assert layout.ranks * layout.replicas == launch.ranks
            found = plan(tables, launch, layout)
            assert found.stages_per_rank == layout.stages_per_rank
            if layout.stages_per_rank > 1:
                assert found.order is not None
                seen.add((layout.schedule, layout.stages_per_rank))
                run = build_schedule(
                    layout.schedule,
                    layout.ranks,
                    found.option.num_microbatches,
                    stages_per_rank=layout.stages_per_rank,
                    costs=found.costs,
                    recompute=layout.recompute,
                )
                assert run.ranks == found.order.compiled.schedule.ranks
    assert seen == {("zbv", 2), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)}
