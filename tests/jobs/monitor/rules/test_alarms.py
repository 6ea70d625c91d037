"""No healthy job gets a bad verdict, and no sick one a good one: drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.monitor.builders import (
    change_gpus,
    change_rank,
    healthy,
    make_exit,
    make_line,
    make_nodes,
    make_points,
    make_progress,
    make_ranks,
    name_rule,
    silent,
    with_points,
)
from vjob.jobs.monitor.model.snapshot import (
    Echo,
    Health,
    Line,
    Node,
    Phase,
    Point,
    Progress,
    Snapshot,
)
from vjob.jobs.monitor.rules.judge import RULES, judge
from vjob.jobs.monitor.rules.pace import (
    CAUSE_FLOOR_S,
    FLOOR_S,
    LATE_S,
    job_cause_limit_s,
    job_overdue_s,
    list_gaps,
    stall_limit_s,
)

GOOD = (Health.HEALTHY, Health.CHECKPOINTING, Health.STARTING)
NAMES = {name_rule(rule) for rule in RULES}
CHATTER = (
    "UserWarning: CUDA initialization: the driver on your system is too old",
    "  warnings.warn(",
    "error: 0",
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "2024-05-01 10:00:00,123 ERROR wandb: network down",
    "n061:2193:2201 [1] NCCL WARN Cuda graphs are not supported",
    "Connection refused, retrying in 5 s",
    "CPU3: Core temperature above threshold, cpu clock throttled",
)
jitter = st.floats(0.75, 1.3)


@st.composite
def draw_points(draw: st.DrawFn, end: float) -> tuple[Point, ...]:
    step_s = draw(st.floats(0.01, 90))
    every = draw(st.sampled_from([1, 1, 10, 50]))
    count = draw(st.integers(1, 60))
    times = [step_s * draw(jitter) for _ in range(count)]
    for number in range(min(3, count)):
        times[number] *= draw(st.floats(1, 40))  # warm-up
    for number in draw(st.lists(st.integers(0, count - 1), max_size=count // 20)):
        times[number] *= draw(st.floats(1, 3))
    points = list(make_points(times, every=every, end=end))
    for number in draw(st.lists(st.integers(0, count - 1), max_size=4)):
        points[number] = replace(points[number], skipped=1, loss=None)
    return tuple(points)


@st.composite
def draw_nodes(draw: st.DrawFn, now: float) -> tuple[Node, ...]:
    nodes = make_nodes([f"n{number:03d}" for number in range(draw(st.integers(1, 5)))])
    late = st.floats(0, LATE_S + 10)
    return tuple(
        replace(
            node,
            beat_at=now - draw(late),
            log_at=now - draw(late),
            gpus_at=now - draw(late),
            gpus=tuple(
                replace(
                    gpu,
                    utilization=draw(st.sampled_from([0.0, 40.0, 97.0, 100.0])),
                    temperature=draw(st.integers(30, 92)),
                    memory_used_mb=draw(st.floats(9000, 22700)),
                )
                for gpu in node.gpus
            ),
        )
        for node in nodes
    )


@st.composite
def draw_healthy(draw: st.DrawFn) -> Snapshot:
    """A job in the middle of its work, shown by files that may be a minute late."""
    base = healthy()
    points = draw(draw_points(base.now))
    step_s = points[-1].step_s or 1.0
    gap = step_s * (points[-1].step - points[-2].step if len(points) > 1 else 1)
    # Where the next step is now, and how late the file system shows the last one.
    now = base.now + draw(st.floats(0, 1.3)) * gap + draw(st.floats(0, LATE_S))
    nodes = draw(draw_nodes(now))
    ranks = tuple(
        replace(
            rank,
            process_state=draw(st.sampled_from("RSSD")),
            cpu_percent=draw(st.floats(0, 100)),
            step=points[-1].step - draw(st.integers(0, 1)),
            step_s=step_s,
            work_s=step_s * 0.6 * draw(st.floats(0.85, 1.15)),
            step_at=base.now - draw(st.floats(0, LATE_S)),
        )
        for rank in make_ranks(nodes)
    )
    texts = draw(st.lists(st.sampled_from(CHATTER), max_size=5))
    lines = [make_line(text, node="n000", rank=0) for text in texts]
    snapshot = replace(
        base,
        now=now,
        nodes=nodes,
        num_nodes=len(nodes),
        ranks=draw(st.sampled_from([ranks, ()])),
        progress=make_progress(points),
        errors=tuple(line for line in lines if line.kind),
        scheduler=replace(base.scheduler, age_s=draw(st.floats(0, 900))),
    )
    phase = draw(st.sampled_from([None, None, "checkpoint", "evaluation"]))
    if phase is not None:
        longest = draw(st.floats(1, 2000))
        aged = replace(
            snapshot,
            phases_s={phase: longest},
            phase=Phase(name=phase, since=snapshot.now, line=Line(text=phase)),
        )
        snapshot = silent(aged, draw(st.floats(0, 2)) * longest)
    return snapshot


@given(draw_healthy())
def test_a_healthy_job_never_gets_a_bad_verdict(snapshot: Snapshot) -> None:
    verdict = judge(snapshot)
    assert verdict.health in GOOD, verdict
    assert verdict.exit_code == 0
    assert verdict.rule in NAMES


def stop_a_rank(snapshot: Snapshot) -> Snapshot:
    ranks = snapshot.ranks or make_ranks(snapshot.nodes)
    stopped = change_rank(replace(snapshot, ranks=ranks), 2, process_state="T")
    return fall_silent(stopped)


def break_the_loss(snapshot: Snapshot) -> Snapshot:
    assert snapshot.progress is not None
    points = snapshot.progress.points
    bad = replace(points[-1], loss=float("nan"), skipped=0)
    return with_points(snapshot, (*points[:-1], bad))


def misread_the_conf(snapshot: Snapshot) -> Snapshot:
    line = make_line("WORLD_SIZE: 8")
    return replace(snapshot, echoes=(Echo(name="WORLD_SIZE", said="8", wanted="16", line=line),))


def lose_a_rank(snapshot: Snapshot) -> Snapshot:
    ranks = snapshot.ranks or make_ranks(snapshot.nodes)
    return change_rank(replace(snapshot, ranks=ranks), 1, exit=make_exit(1, "n000", 1))


def fall_silent(snapshot: Snapshot) -> Snapshot:
    return silent(_no_phase(snapshot), 3600 * 24 * 30)


def spin(snapshot: Snapshot) -> Snapshot:
    return change_gpus(fall_silent(snapshot), None, utilization=100.0, history=(100.0,) * 9)


def run_out_of_memory(snapshot: Snapshot) -> Snapshot:
    line = make_line("RuntimeError: CUDA out of memory.", node="n000", rank=3)
    return replace(fall_silent(snapshot), errors=(line,))


SICK: tuple[tuple[Callable[[Snapshot], Snapshot], Health], ...] = (
    (break_the_loss, Health.FAILING),
    (misread_the_conf, Health.FAILING),
    (lose_a_rank, Health.FAILING),
    (fall_silent, Health.STALLED),
    (stop_a_rank, Health.STALLED),
    (spin, Health.STALLED),
    (run_out_of_memory, Health.FAILING),
)


def _no_phase(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, phase=None, phases_s={})


@given(draw_healthy(), st.sampled_from(SICK))
def test_a_sick_job_always_gets_a_bad_verdict(
    snapshot: Snapshot, sickness: tuple[Callable[[Snapshot], Snapshot], Health]
) -> None:
    make_sick, health = sickness
    verdict = judge(make_sick(snapshot))
    assert verdict.health is health, verdict
    assert verdict.advice
    assert verdict.rule in NAMES


@given(st.floats(0.01, 8), st.integers(10, 80), st.integers(0, 15))
def test_a_stopped_rank_of_quick_steps_is_found_within_the_learned_limit(
    step_s: float, count: int, rank: int
) -> None:
    snapshot = with_points(healthy(), make_points([step_s] * count))
    stopped = change_rank(snapshot, rank, process_state="T")
    verdict = judge(silent(stopped, CAUSE_FLOOR_S + 1))
    assert (verdict.health, verdict.rank) == (Health.STALLED, rank)
    assert verdict.node == f"n{rank // 4:03d}"


@given(st.lists(st.floats(0.001, 1e4), max_size=60), st.sampled_from([1, 10]))
def test_limits_are_never_shorter_than_what_was_seen(times: list[float], every: int) -> None:
    points = make_points(times, every=every)
    gaps = list_gaps(points)
    snapshot = replace(healthy(), progress=Progress(step=0, points=points))
    for limit in (stall_limit_s(points), job_cause_limit_s(snapshot)):
        assert limit >= 2 * max(gaps, default=0.0) or len(gaps) < 3
    assert stall_limit_s(points) >= FLOOR_S
    assert stall_limit_s(points, floor_s=5000) >= 5000
    assert job_overdue_s(snapshot) >= LATE_S


def test_first_steps_and_steps_that_go_back_teach_nothing() -> None:
    points = make_points([300.0] * 5 + [1.0] * 20)
    assert max(list_gaps(points)) == 1.0
    assert stall_limit_s(points) == FLOOR_S
    again = (*points, *make_points([1.0] * 3, first=1))
    assert max(list_gaps(again)) == 1.0


def test_a_gap_that_only_the_clock_shows_counts() -> None:
    points = list(make_points([1.0] * 40))
    later = [replace(point, at=(point.at or 0) + 200) for point in points[20:]]
    assert stall_limit_s((*points[:20], *later)) == 2 * 201
