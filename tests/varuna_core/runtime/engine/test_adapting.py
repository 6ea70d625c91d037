"""A schedule that follows measured costs: whose clocks, when, and when not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.engine import adapting
from varuna_core.runtime.engine.adapting import WINDOW, ActionTimes, Adapting, measure_hops
from varuna_core.runtime.engine.plans import Plans
from varuna_core.schedule.actions import Kind
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.measured import MEASURED
from varuna_core.schedule.recompute import Memory, measure_memory

RANKS = parse_stage_map("0;1;2;3;", 4)


def make_plans(**options: Any) -> Plans:
    return Plans("auto", RANKS, build_even_costs(4), "none", usual=8, **options)


def slow_link(hop: float = 3.0) -> Costs:
    each = (1.0,) * 4
    return Costs(forward=each, input_grad=each, weight_grad=each, hops=(0.0, hop, 0.0))


@settings(deadline=None)
@given(st.data())
def test_clocks_that_differ_by_anything_tell_the_time_of_a_message(data: Any) -> None:
    """The mean of both ways; of a step's messages the quickest, of the steps the middle one."""
    depth = data.draw(st.integers(2, 4))
    m, steps = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 5]))
    stage_map = parse_stage_map("".join(f"{rank};" for rank in range(depth)), depth)
    offsets = [data.draw(st.floats(-1e5, 1e5)) for _ in range(depth)]
    hops = [data.draw(st.floats(0, 1)) for _ in range(depth - 1)]
    ranks = [ActionTimes(stage_map) for _ in range(depth)]
    for step in range(steps):
        for rank in ranks:
            rank.begin(m)
        busy = 0.0 if step <= steps // 2 else 5.0  # fewer than half of the steps
        for boundary, hop in enumerate(hops):
            for number in range(m):
                queued = busy + data.draw(st.floats(0, 3)) * (number > 0)
                for is_activation in (True, False):
                    ends = (boundary, boundary + 1)
                    out, into = ends if is_activation else ends[::-1]
                    message = is_activation, into, number
                    left = 10.0 * step + number
                    ranks[out].has_left(message, left + offsets[out])
                    ranks[into].has_come(message, left + hop + queued + offsets[into])
    summed = sum(rank.list_figures() for rank in ranks)
    assert isinstance(summed, torch.Tensor)
    messages = summed[len(MEASURED) * depth :].view(-1, 2, depth - 1, m)
    torch.testing.assert_close(
        measure_hops(messages), torch.tensor(hops, dtype=torch.float64), atol=1e-8, rtol=0
    )


def test_the_median_of_an_action_counts_from_when_its_message_was_there() -> None:
    times = ActionTimes(RANKS)
    times.begin(1)
    for ready, end in ((1.0, 1.5), (2.0, 2.25), (3.0, 9.0)):
        times.add("f", 2, ready, end)
    times.add("B", 2, 0.0, 1.0)
    figures = times.list_figures()[: len(MEASURED) * 4].view(len(MEASURED), 4)
    assert figures[MEASURED.index("F"), 2] == 0.5 and figures[MEASURED.index("B"), 2] == 1.0
    assert figures.count_nonzero() == 2
    times.begin(2)
    assert not times.list_figures().count_nonzero(), "another number of micro-batches"


class LateStream:
    """Each thing is done half a second after the host has queued it; nothing was marked before."""

    def __init__(self) -> None:
        self.marked: list[float] = []
        self.forgotten = 0.0

    def mark(self, at: float) -> None:
        self.marked.append(at)

    def settle(self) -> None:
        pass

    def find(self, at: float) -> float:
        before = [one + 0.5 for one in self.marked if one <= at]
        return max([at, *before[-1:]])

    def forget(self, before: float) -> None:
        self.forgotten = before


def test_on_a_gpu_an_action_takes_what_the_stream_takes() -> None:
    stream: Any = LateStream()
    times = ActionTimes(RANKS, stream)
    times.begin(1)
    times.add("F", 0, 10.0, 10.1)  # done at 10.6
    times.add("F", 0, 10.1, 10.2)  # from then until 10.7
    times.add("F", 0, 20.0, 20.1)
    assert times.list_figures().sum() == pytest.approx(0.6)
    times.clear()
    assert stream.forgotten > 0, "marks do not pile up"


def test_of_ranks_that_share_layers_the_first_one_counts() -> None:
    shared = parse_stage_map("0;1;", 4, 2)
    sums = []
    for tensor_rank in range(2):
        times = ActionTimes(shared.slice(tensor_rank))
        times.begin(1)
        times.add("F", 0, 0.0, 1.0)
        sums.append(float(times.list_figures().sum()))
    assert sums == [1.0, 0.0]


class Told:
    """Costs that ranks are said to have measured, one after the other."""

    def __init__(self, *costs: Costs) -> None:
        self.costs, self.asked = list(costs), 0

    def agree(self, times: Any, links: Any) -> tuple[dict[Kind, tuple[float, ...]], Any]:
        self.asked += 1
        costs = self.costs[min(self.asked, len(self.costs)) - 1]
        none = (0.0,) * costs.num_stages
        by_kind: dict[Kind, tuple[float, ...]] = {kind: none for kind in MEASURED}
        return by_kind | {"F": costs.forward, "B": costs.by_kind["B"]}, costs.hops


class OneRank:
    place = replica = 0


def follow(
    monkeypatch: pytest.MonkeyPatch, plans: Plans, told: Told, steps: int, find_memory: Any = None
) -> list[int]:
    """The steps, from 1, that begin with another schedule than the one before."""
    monkeypatch.setattr(adapting, "agree_on_times", told.agree)
    one: Any = OneRank()
    follower = Adapting(plans, one, ActionTimes(RANKS), find_memory)
    changed, last = [], plans.find(8).schedule.ranks
    for step in range(1, steps + 1):
        follower.begin_step()
        now = plans.find(8).schedule.ranks
        if now != last:
            changed.append(step)
        last = now
    return changed


def test_a_change_is_followed_within_ten_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans, told = make_plans(), Told(build_even_costs(4), slow_link())
    with caplog.at_level(logging.INFO):
        assert follow(monkeypatch, plans, told, 41) == [2 + 2 * WINDOW]
    (line,) = caplog.records
    assert "from now on" in line.getMessage() and line.levelno == logging.INFO, "no warning"
    assert told.asked == 9 and 2 * WINDOW <= 10
    best = make_plans()
    best.costs = slow_link()
    assert plans.find(8) == best.find(8), "the best for the costs as they are"


def test_there_and_back_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    even = build_even_costs(4)
    told = Told(*[even] * 2, *[slow_link()] * 2, *[even] * 2, slow_link(0.05))
    assert len(follow(monkeypatch, make_plans(), told, 81)) == 2


def test_what_is_shorter_by_less_than_a_hundredth_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = make_plans()
    assert follow(monkeypatch, plans, Told(slow_link(0.001)), 20) == []
    assert plans.costs == build_even_costs(4)


def test_a_schedule_that_does_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    present = make_plans().find(8).schedule
    graphs = Memory(graphs=(1.0,) * 4, inputs=(0.1,) * 4, limits=(1e9,) * 4)
    tight = Memory(graphs=(1.0,) * 4, inputs=(0.1,) * 4, limits=measure_memory(present, graphs))
    for memory, changes in ((None, 0), (graphs, 1), (tight, None)):
        plans = make_plans()
        found = follow(monkeypatch, plans, Told(slow_link()), 20, lambda memory=memory: memory)
        assert changes is None or len(found) == changes
        if memory is not None:
            held = measure_memory(plans.find(8).schedule, graphs)
            assert all(a <= b for a, b in zip(held, memory.limits, strict=True))
    plans = make_plans()
    nothing = Memory(graphs=(1.0,) * 4, inputs=(0.1,) * 4, limits=(0.5,) * 4)
    assert follow(monkeypatch, plans, Told(slow_link()), 20, lambda: nothing) == []
    assert plans.find(3).schedule.num_microbatches == 3
