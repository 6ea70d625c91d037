"""A profile of a device that does later what the host has launched, and the step it predicts.

A GPU's profile said 26 % too much of a step with small micro-batches: alone a segment's forward
takes as long as the host needs to launch it, and in a step the host is ahead by then, for backwards
take the device longer than the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models.profiled import Ladder, make_batch
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import PlacedPipeline, StageSite
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import (
    HOST_TIMES,
    TIMES,
    GpuProfile,
    Model,
    Network,
    Profile,
)
from varuna_core.planner.profile.profile_file import parse_profile, render_profile
from varuna_core.profiling import bench as profiler_bench
from varuna_core.profiling.bench import Bench, Clock, Crossings, Figures
from varuna_core.profiling.profile_file import build_cell
from varuna_core.runtime.split.split import split_model

MS = 1e-3
ACTION = (0.15 * MS, 0.004 * MS)
"""Seconds of the host and of the device for what the engine adds to an action."""
COUNT, SEGMENTS = 16, 6
Costs = dict[str, tuple[float, float]]
"""By kind of action what a segment takes of the host, and of the device."""


class LateDevice:
    """Its clock and the host's; work begins when it is launched and what came before is done."""

    def __init__(self) -> None:
        self.host = self.done = self.copied = 0.0
        self.slowness = 1.0
        """Of the host."""

    def launch(self, costs: tuple[float, float]) -> None:
        self.host += self.slowness * costs[0]
        self.done = max(self.done, self.host) + costs[1]

    def copy(self, seconds: float) -> None:
        """Beside what is launched from here on."""
        self.copied = max(self.done, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.done, self.copied)

    def occupy(self, seconds: float) -> None:
        self.done = max(self.done, self.host) + seconds

    def mark(self) -> Any:
        at = max(self.done, self.host)
        return SimpleNamespace(at=at, elapsed_time=lambda end: (end.at - at) * 1e3)


def measure(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, slowness: Sequence[float] = (1.0,)
) -> Figures:
    """What the profiler finds of a segment that takes so long, alone on such a device. The host is
    as slow as that in turn, one run of actions after the other."""
    slow = itertools.cycle(slowness)
    device = LateDevice()
    split = split_model(Ladder(), make_batch(2), 3, [1, 1, 1])
    bench = Bench(split, 1, Crossings(split), loss_scale=1.0, seed=1, sharding=None)
    bench.clock = Clock(device)

    def run(actions: Sequence[Any], *_: Any, **__: Any) -> None:
        device.slowness = next(slow)
        for action in actions:
            device.launch(ACTION)
            device.launch(costs.get(action.kind, (0.0, 0.0)))
            bench.clock("", 0, 0, 0)

    with monkeypatch.context() as changed:
        clock = SimpleNamespace(perf_counter=lambda: device.host)
        changed.setattr(profiler_bench, "time", clock)
        changed.setattr(bench.engine, "run", run)
        for _ in range(bench.begin(make_batch(2), 2)):
            bench.run_round()
    return bench.finish()


def run_step(costs: Costs) -> float:
    """Seconds of a step of all segments on one rank."""
    device = LateDevice()
    for _ in range(COUNT):
        for kind in ("F", "B"):
            device.launch(ACTION)
            for _ in range(SEGMENTS):
                device.launch(costs[kind])
    device.synchronize()
    return device.done


def build_profile(figures: Figures, empty: Figures) -> Profile:
    cell = build_cell([figures] * SEGMENTS, empty)
    gpu = GpuProfile(memory_bytes=1e12, cells={(1, 1): cell}, optimizer_s={1: (0.0,) * SEGMENTS})
    return Profile(
        model=Model(name="m", digest="0", num_segments=SEGMENTS, parameters={1: (1,) * SEGMENTS}),
        software={},
        gpus={"gpu": gpu},
        network=Network(links={}, all_reduces={}),
    )


def predict(profile: Profile) -> float:
    chain = Chain(
        Tables(profile, TrainingModel(batch=COUNT)),
        Shape(tensor=1, replicas=1, micro_batch=1),
        PlacedPipeline((StageSite(("gpu",), (("gpu", 1),), 1),), ()),
        build_schedule_model("1f1b", 1, COUNT, "none"),
    )
    return chain.compute_step((0, SEGMENTS))


CASES: dict[str, Costs] = {
    "the host is hidden": {"F": (0.2 * MS, 1.0 * MS), "B": (0.3 * MS, 2.0 * MS)},
    "its forwards are not, alone": {"F": (0.9 * MS, 0.7 * MS), "B": (0.5 * MS, 1.4 * MS)},
    "the device waits": {"F": (0.9 * MS, 0.2 * MS), "B": (0.8 * MS, 0.4 * MS)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_late_device_is_predicted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    costs = CASES[name]
    figures, empty = measure(monkeypatch, costs), measure(monkeypatch, {})
    assert figures.forward_host_s == pytest.approx(ACTION[0] + costs["F"][0])
    assert figures.forward_s == pytest.approx(ACTION[1] + costs["F"][1])
    assert empty.backward_host_s == pytest.approx(ACTION[0])
    assert empty.backward_s == pytest.approx(ACTION[1])
    profile = build_profile(figures, empty)
    assert parse_profile(render_profile(profile)) == profile
    assert predict(profile) == pytest.approx(run_step(costs), rel=0.015)


@pytest.mark.parametrize("case", CASES)
def test_a_host_that_others_use_too_changes_no_figure(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    costs = CASES[case]
    figures = measure(monkeypatch, costs, [1.0, 1.7, 1.9, 1.6, 1.8, 1.0, 1.7])
    alone = measure(monkeypatch, costs)
    for name in (*TIMES, *HOST_TIMES):
        assert getattr(figures, name) == pytest.approx(getattr(alone, name)), name


def test_a_copy_is_waited_for_to_know_how_long_it_takes() -> None:
    device = LateDevice()
    clock = Clock(device)
    clock.start()
    for action, own in (("0F0", 5.0), ("0O0", 0.0), ("0L0", 0.0), ("0B0", 7.0)):
        device.launch((1.0, own))
        if not own:
            device.copy(4.0)
        clock(action, 0, 0, 0)
    # The host launches F while the device is idle, and B when the copies are done.
    assert clock.read() == pytest.approx([1.0 + 5.0, 4.0, 1.0 + 4.0, 1.0 + 7.0])
