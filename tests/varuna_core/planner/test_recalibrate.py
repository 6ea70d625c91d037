"""A profile that is off in known factors is put right by the trace of a step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.planner.predicted_trace import write_trace
from tests.varuna_core.planner.scaled import scale_times
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import Cluster, NodeKind, place
from varuna_core.planner.model.schedule_model import find_schedule_model
from varuna_core.planner.model.step import Jitter, StepTime, simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import TIMES, GpuProfile, Profile
from varuna_core.planner.profile.transformer import Transformer, estimate_profile
from varuna_core.planner.result.recalibrate import (
    MeasuredAction,
    Message,
    Recalibrated,
    recalibrate,
    scale_link,
)
from vjob.reports.analysis.action_times import ActionTime, MessageTime, list_actions, list_messages
from vjob.reports.load.trace_reader import read_events, read_traces

SHAPE = Shape(tensor=1, replicas=1, micro_batch=2)
KINDS = ("A100-40", "A10")
CLUSTER = Cluster(kinds=tuple(NodeKind(name=kind, gpu=kind, gpus=4, count=1) for kind in KINDS))
BOUNDS = (0, 5, 9, 12, 16, 19, 22, 24, 26)
"""Eight stages of 24 blocks; the embedding is in the first, the head in the last."""


@pytest.fixture
def profile() -> Profile:
    model = Transformer(name="m", layers=24, hidden=2048, heads=16, length=1024, vocabulary=50000)
    return estimate_profile(model, KINDS, micro_batches=(1, 2), degrees=(1,), inter_gb_s=2.0)


def make_chain(profile: Profile, way: str = "none") -> Chain:
    order = tuple((kind, kind.gpus) for kind in CLUSTER.kinds)
    placed = place(order, 8, 1, 1)
    assert placed is not None
    work = find_schedule_model("1f1b", 8, 16, "full" if way == "full" else "none")
    return Chain(Tables(profile, TrainingModel(batch=32)), SHAPE, placed, work)


def measure(
    true: Profile, folder: Path, jitter: float = 0.0, way: str = "none"
) -> tuple[list[ActionTime], list[MessageTime], StepTime]:
    """As a run of this profile would be traced."""
    chain = make_chain(true, way)
    costs = chain.build_costs(BOUNDS)
    noise = Jitter(share=jitter, seed=1) if jitter else None
    step = simulate_step(chain.compiled, costs, keep_starts=True, jitter=noise)
    paths = write_trace(folder, chain.compiled, costs, step)
    traces = read_traces(("", path) for path in paths)
    events = read_events(traces, traces.detailed_steps)
    return list_actions(events), list_messages(events, 1), step


def fit(profile: Profile, actions: list[ActionTime], messages: list[MessageTime]) -> Recalibrated:
    def kind(stage: int) -> str:
        return KINDS[stage // 4]

    cell = profile.find_cell(KINDS[0], 2)
    works = [
        MeasuredAction(
            gpu=kind(one.stage),
            begin=BOUNDS[one.stage],
            end=BOUNDS[one.stage + 1],
            action=one.kind,
            seconds=one.seconds,
        )
        for one in actions
    ]
    told = [
        Message(
            sender=kind(one.stage),
            receiver=kind(one.receiver),
            where="intra" if one.sender // 4 == one.receiver // 4 else "inter",
            num_bytes=cell.output_bytes[1],
            seconds=one.seconds,
        )
        for one in messages
    ]
    return recalibrate(profile, works, told, micro_batch=2, tensor=1, label="job 7")


def test_known_factors_are_found(profile: Profile, tmp_path: Path) -> None:
    true = scale_times(profile, {"A10"}, lambda _: True, 1.3)
    true = scale_times(true, {"A100-40"}, lambda segment: 0 < segment < 25, 0.8)
    true = scale_times(true, {"A10"}, lambda segment: segment == 25, 1.5)
    key = ("A100-40", "A10", "inter")
    links = {**true.network.links, key: scale_link(true.network.links[key], 2.0)}
    true = replace(true, network=replace(true.network, links=links))
    actions, messages, step = measure(true, tmp_path)
    found = fit(profile, actions, messages)
    assert found.profile.software["recalibrated"] == "job 7"
    for kind, segments in (("A10", (20, 25)), ("A100-40", (10,))):
        for size in (1, 2):
            wanted, got = true.find_cell(kind, size), found.profile.find_cell(kind, size)
            for name in ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s"):
                for segment in segments:
                    assert getattr(got, name)[segment] == pytest.approx(
                        getattr(wanted, name)[segment], rel=0.02
                    ), (kind, name, segment)
    size = found.profile.find_cell("A10", 2).output_bytes[1]
    assert found.profile.network.links[key].find_time(size) == pytest.approx(
        true.network.links[key].find_time(size), rel=0.01
    )
    again = make_chain(found.profile)
    assert again.find_step(BOUNDS) == pytest.approx(step.step_s, rel=0.01)
    off = make_chain(profile)
    assert abs(off.find_step(BOUNDS) / step.step_s - 1) > 0.05, "the old profile was off"


def test_any_factors_of_segments_leave_stages_true(profile: Profile, tmp_path: Path) -> None:
    """Where stages do not tell classes apart, their sums are right all the same."""
    draw = random.Random(3)
    for number in range(8):
        way = draw.choice(["none", "full"])
        true = profile
        for kind in KINDS:
            for segments in ((0,), tuple(range(1, 25)), (25,)):
                factor = draw.uniform(0.6, 1.7)
                true = scale_times(true, {kind}, set(segments).__contains__, factor)
        actions, messages, step = measure(true, tmp_path / str(number), way=way)
        found = fit(profile, actions, messages)
        assert make_chain(found.profile, way).find_step(BOUNDS) == pytest.approx(
            step.step_s, rel=0.01
        ), number


def test_noise_moves_no_factor_far(profile: Profile, tmp_path: Path) -> None:
    actions, messages, _ = measure(profile, tmp_path, jitter=0.02)
    found = fit(profile, actions, messages)
    assert all(0.9 < factor.value < 1.15 for factor in found.factors if "link" not in factor.what)


def test_kinds_that_did_not_run_stay(profile: Profile) -> None:
    work = MeasuredAction(gpu="A10", begin=1, end=5, action="F", seconds=1.0)
    found = recalibrate(profile, [work], micro_batch=2, tensor=1, label="x")
    assert found.profile.gpus["A100-40"] == profile.gpus["A100-40"]
    assert found.profile.network == profile.network
    cell, old = found.profile.find_cell("A10", 2), profile.find_cell("A10", 2)
    assert cell.weight_grad_s == old.weight_grad_s, "no backward was measured"
    assert sum(cell.forward_s[1:5]) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(PlanningError, match="no actions"):
        recalibrate(profile, [], micro_batch=2, tensor=1, label="x")


def test_what_an_action_costs_by_itself_is_not_fitted(profile: Profile, tmp_path: Path) -> None:
    def add(kind: str, gpu: GpuProfile) -> GpuProfile:
        cells = {k: replace(c, action_s=(0.002,) * len(TIMES)) for k, c in gpu.cells.items()}
        return replace(gpu, cells=cells)

    known = replace(profile, gpus={kind: add(kind, gpu) for kind, gpu in profile.gpus.items()})
    known = replace(known, details=({"gpu": "A10", "tensor": 1},))
    true = scale_times(known, {"A10"}, lambda _: True, 1.3)
    actions, messages, _ = measure(true, tmp_path)
    found = fit(known, actions, messages).profile
    wanted, got = true.find_cell("A10", 2), found.find_cell("A10", 2)
    assert got.action_s == wanted.action_s and found.details == known.details
    assert got.backward_s[20] == pytest.approx(wanted.backward_s[20], rel=0.005)
    assert got.forward_s[20] == pytest.approx(wanted.forward_s[20], rel=0.005)
