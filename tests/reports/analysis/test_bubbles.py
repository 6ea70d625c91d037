"""What an order would take with free messages: as the simulator says, for many replicas at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.schedule.actions import Action, Schedule
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.generators import build_gpipe, build_one_f_one_b
from varuna_core.schedule.recompute import apply_recompute
from vjob.reports.analysis.idle_time import compare_bubbles
from vjob.reports.analysis.pipeline import Order, Pipeline

SECONDS = st.floats(0.001, 10.0)


def run_as(schedule: Schedule, replica: int, costs: Costs, late: float) -> Pipeline:
    """As simulated, each action `late` to begin its work."""
    begins = [start for starts in simulate(schedule, costs).starts for start in starts]
    actions = [action for rank in schedule.ranks for action in rank]
    took = [costs.by_kind[action.kind][action.stage] for action in actions]
    owners = [rank for rank, own in enumerate(schedule.ranks) for _ in own]
    order = Order(schedule=schedule, actions=tuple(actions), ranks=np.array(owners))
    ready = np.array(begins) + late
    return Pipeline(
        replica=replica,
        ranks=tuple(range(schedule.num_ranks)),
        order=order,
        begin_s=np.array(begins),
        ready_s=ready,
        end_s=ready + np.array(took),
    )


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
@settings(deadline=None)
def test_the_ideals_of_replicas_are_what_the_simulator_says(
    data: st.DataObject, stages: int, microbatches: int, replicas: int
) -> None:
    build = data.draw(st.sampled_from([build_one_f_one_b, build_gpipe]))
    way = data.draw(st.sampled_from(["none", "offload"]))
    schedule = apply_recompute(build(stages, microbatches), way)
    moved = [stage for stage, own in enumerate(schedule.ranks) if any(a.kind == "O" for a in own)]
    drawn = st.tuples(*[SECONDS] * stages)
    known = [
        Costs(
            forward=data.draw(drawn),
            input_grad=data.draw(drawn),
            weight_grad=data.draw(drawn),
            backward=data.draw(drawn),
            offload=data.draw(drawn),
            load=data.draw(drawn),
        )
        for _ in range(replicas)
    ]
    pipelines = [run_as(schedule, at, costs, late=0.5) for at, costs in enumerate(known)]
    for costs, found in zip(known, compare_bubbles(pipelines), strict=True):
        assert not isinstance(found, str)
        timing = simulate(schedule, costs)
        assert found.ideal_s == pytest.approx(timing.makespan)
        assert found.ideal == pytest.approx(timing.bubble_share, abs=1e-9)
        assert found.measured > found.ideal  # the work began late
        mean_forward, mean_backward = (sum(c) / stages for c in (costs.forward, costs.backward))
        even = Costs(
            forward=(mean_forward,) * stages,
            input_grad=(0.0,) * stages,
            weight_grad=(0.0,) * stages,
            backward=(mean_backward,) * stages,
            offload=(sum(costs.offload[stage] for stage in moved) / stages,) * stages,
            load=(sum(costs.load[stage] for stage in moved) / stages,) * stages,
        )
        assert found.ideal_even_s == pytest.approx(simulate(schedule, even).makespan)


def test_an_order_that_cannot_run_is_said_of_each_that_ran_it() -> None:
    backward_first = Schedule(
        name="as run",
        ranks=((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))),
        placement=(0, 1),
        num_microbatches=1,
    )
    order = Order(
        schedule=backward_first,
        actions=tuple(action for rank in backward_first.ranks for action in rank),
        ranks=np.array([0, 0, 1, 1]),
    )
    times = {"begin_s": np.zeros(4), "ready_s": np.zeros(4), "end_s": np.ones(4)}
    pipelines = [Pipeline(replica=at, ranks=(0, 1), order=order, **times) for at in (0, 1)]
    for found in compare_bubbles(pipelines):
        assert isinstance(found, str) and "deadlock" in found
