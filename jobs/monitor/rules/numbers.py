"""Rules for a job whose numbers say that it learns nothing: NaN, overflow, exploding gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from vjob.jobs.monitor.model.snapshot import Line, Point, Snapshot
from vjob.jobs.monitor.model.verdict import Verdict
from vjob.jobs.monitor.rules.base import find_step_line, is_live
from vjob.jobs.monitor.rules.failing import failing

SKIPS = 20
"""So many skipped steps in a row are no search for the loss scale any more."""
FLAT_SKIPS = 10
"""And so many, where the scale does not even fall."""
LEAST_SCALE = 1.0
EXPLODED = 100.0
"""Times the median of the gradient norms before, in three points, with a loss that rose."""
LOSS_ROSE = 2.0


def not_a_number(snapshot: Snapshot) -> Verdict | None:
    """The latest loss is none, in a step that was taken."""
    points = _live_points(snapshot)
    point = next((item for item in reversed(points) if item.loss is not None or item.nan), None)
    if point is None:
        return None
    is_bad = point.loss is not None and not math.isfinite(point.loss) and not point.skipped
    if not is_bad and not point.nan:
        return None
    first = _first_bad(points)
    what = f"the loss is {point.loss}" if is_bad else f"{point.nan} step(s) with NaN"
    line = next((x for x in snapshot.errors if x.kind == "not a number"), None)
    saved = snapshot.checkpoint_step
    back = f"; the checkpoint of step {saved} is from before" if saved and saved < first else ""
    return failing(
        snapshot,
        "not a number",
        f"{what} at step {point.step}, first at step {first}",
        _evidence(snapshot, point.step, line),
        facts=(_say_source(snapshot),),
        remedy="lower the learning rate or clip gradients, and look at the samples of that step"
        + back,
        verbs=("cancel JOB",),
    )


def loss_scale(snapshot: Snapshot) -> Verdict | None:
    """fp16 skips step after step and no smaller scale helps."""
    points = _live_points(snapshot)
    if not points or not points[-1].skipped:
        return None
    run = _skipped_run(points)
    num_skipped = sum(point.skipped for point in run)
    scales = [point.loss_scale for point in run if point.loss_scale is not None]
    at_least = bool(scales) and scales[-1] <= LEAST_SCALE
    is_flat = len(set(scales)) == 1 and len(scales) > 1 and num_skipped >= FLAT_SKIPS
    if not at_least and not is_flat and num_skipped < SKIPS:
        return None
    scale = f", the loss scale is {scales[-1]:g}" if scales else ""
    return failing(
        snapshot,
        "loss scale",
        f"the last {num_skipped} step(s) were all skipped for overflow{scale}",
        _evidence(snapshot, points[-1].step),
        facts=(_say_source(snapshot),),
        remedy="lower the learning rate, look for a NaN in data or weights, or use "
        "train.precision: bf16",
        verbs=("cancel JOB",),
    )


def gradients_explode(snapshot: Snapshot) -> Verdict | None:
    points = [point for point in _live_points(snapshot) if point.grad_norm is not None]
    if len(points) < 13:
        return None
    norms = [point.grad_norm for point in points if point.grad_norm is not None]
    usual = statistics.median(norms[:-3])
    losses = [point.loss for point in points if point.loss is not None]
    if not usual > 0 or len(losses) < 13:
        return None
    rose = statistics.median(losses[-3:]) > LOSS_ROSE * statistics.median(losses[:-3]) > 0
    if not rose or min(norms[-3:]) < EXPLODED * usual:
        return None
    return failing(
        snapshot,
        "gradients explode",
        f"the gradient norm is {norms[-1]:.3g}, usually {usual:.3g}, and the loss rose to "
        f"{losses[-1]:.4g}",
        _evidence(snapshot, points[-1].step),
        facts=(_say_source(snapshot),),
        remedy="lower the learning rate or set train.clip_grad_norm, from a checkpoint before",
        verbs=("cancel JOB",),
    )


def _live_points(snapshot: Snapshot) -> Sequence[Point]:
    progress = snapshot.progress
    return progress.points if progress is not None and is_live(snapshot) else ()


def _first_bad(points: Sequence[Point]) -> int:
    """The first step of the last run of points that are none."""
    first = points[-1].step
    for point in reversed(points):
        is_bad = point.nan or (point.loss is not None and not math.isfinite(point.loss))
        if point.loss is not None and not is_bad:
            break
        first = point.step if is_bad else first
    return first


def _skipped_run(points: Sequence[Point]) -> list[Point]:
    """The last points of which every step was skipped."""
    run: list[Point] = []
    for at in range(len(points) - 1, -1, -1):
        num_steps = points[at].step - points[at - 1].step if at else points[at].skipped
        if not points[at].skipped or points[at].skipped < num_steps:
            break
        run.insert(0, points[at])
    return run


def _evidence(snapshot: Snapshot, step: int, line: Line | None = None) -> tuple[Line, ...]:
    """A line that says so in words, and the one of the step."""
    return tuple(x for x in (line, find_step_line(snapshot, step)) if x is not None)


def _say_source(snapshot: Snapshot) -> str:
    progress = snapshot.progress
    return f"as {progress.source} tells" if progress is not None and progress.source else ""
