"""Time limits for silence, learned from the job's own steps. Pure.

    points    step 10     step 20     step 30                      now
    ------------|-----------|-----------|----------------------------|
                 <-- gap -->             <-------- silence --------->

A gap is the time between two reports of steps: with a line every 10 steps, that of ten steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from varuna_core.records.logs.slow_ranks import WARM_UP_STEPS
from vjob.jobs.monitor.model.snapshot import Phase, Point, Snapshot, is_time

LEARN_GAPS = 3
"""Least number of gaps from which a limit is learned."""
FLOOR_S = 120.0
"""Shortest silence in seconds that counts as a stall, since NFS may show files a minute late and
heartbeats come every few seconds."""
MANY_STEPS = 20.0
"""A silence of this many steps, and at least a minute, is remarkable, even while too few gaps are
known to tell a stall."""
CAUSE_FLOOR_S = 20.0
"""Shortest silence that counts as a stall if the stuck rank is known, such as a stopped process."""
UNLEARNED_S = 1200.0
"""Limit in seconds for warm-up and the first steps, until enough gaps are known."""
MEDIANS, P95S, LONGEST = 5.0, 3.0, 2.0
"""Factors by which a silence may exceed the gaps' median, 95th percentile and longest gap."""
PHASE_FIRST_S = 1800.0
"""Limit in seconds for a checkpoint or evaluation until the first of the run has ended."""
PHASE_LEAST_S = 300.0
PHASE_TIMES = 3.0
"""Factor by which a later checkpoint or evaluation may exceed the longest so far."""
LATE_S = 60.0
"""Seconds by which NFS may show files late."""


def list_gaps(
    points: Sequence[Point], first_step: int | None = None, *, skip: int = WARM_UP_STEPS
) -> list[float]:
    """Return the seconds between reports of steps, without the first `skip` steps of the attempt.

    A gap is the printed time or the time between lines, whichever is longer, since printed times do
    not include checkpoints and evaluations.
    """
    first = first_step if first_step is not None else (points[0].step if points else 0)
    gaps = []
    for before, point in zip([None, *points], points, strict=False):
        if point.step < first + skip or (before is None and len(points) > 1):
            continue
        num_steps = point.step - before.step if before is not None else 1
        if num_steps < 1 or (before is not None and before.step < first):
            continue
        printed = point.step_s * num_steps if is_time(point.step_s) else 0.0
        is_timed = before is not None and point.at is not None and before.at is not None
        seen = point.at - before.at if is_timed else 0.0  # type: ignore[operator, union-attr]
        if max(printed, seen) > 0:
            gaps.append(max(printed, seen))
    return gaps


def stall_limit_s(
    points: Sequence[Point], *, first_step: int | None = None, floor_s: float = FLOOR_S
) -> float:
    """Return the longest silence of a healthy job: max(5 x median, 3 x p95, 2 x longest gap,
    floor).

    `points` are the last steps, oldest first. While they have too few gaps, the limit is that of
    warm-up. The user may set `floor_s`.
    """
    gaps = list_gaps(points, first_step)
    if len(gaps) < LEARN_GAPS:
        longest = max(list_gaps(points, first_step, skip=0), default=0.0)
        return max(UNLEARNED_S, floor_s, LONGEST * longest)
    return max(
        MEDIANS * statistics.median(gaps),
        P95S * compute_quantile(gaps, 0.95),
        LONGEST * max(gaps),
        floor_s,
    )


def phase_limit_s(snapshot: Snapshot, name: str) -> float:
    """Return the limit for a checkpoint or an evaluation, learned from the longest of this run."""
    longest = snapshot.phases_s.get(name)
    return PHASE_FIRST_S if not longest else max(PHASE_TIMES * longest, PHASE_LEAST_S)


def find_step_at(snapshot: Snapshot) -> float | None:
    """Return when the last step was done, by the latest source; None before the first step."""
    progress = snapshot.progress
    times = [rank.step_at for rank in snapshot.ranks if rank.step_at is not None]
    if progress is not None and progress.at is not None:
        times.append(progress.at)
    if progress is not None and not times:  # it was written before anything that came later
        times = [node.log_at for node in snapshot.nodes if node.log_at is not None]
    return max(times, default=None)


def is_step_older(snapshot: Snapshot) -> bool:
    """Return True if the time that `find_step_at` returns is only the latest possible time of the
    last step, which may have been done much earlier."""
    progress = snapshot.progress
    is_counted = any(rank.step_at is not None for rank in snapshot.ranks)
    return progress is not None and progress.is_older and not is_counted


def find_phase(snapshot: Snapshot) -> Phase | None:
    """Return the phase that the job is in; None if a step has been done since its begin, since then
    the checkpoint is written while the training continues."""
    phase = snapshot.phase
    if phase is None:
        return None
    step_at = find_step_at(snapshot)
    if phase.since is None or step_at is None or step_at <= phase.since + 1.0:
        return phase
    return None


def find_silence_s(snapshot: Snapshot) -> float | None:
    """Return the seconds since the last step, checkpoint or evaluation ended; None if none did."""
    step_at = find_step_at(snapshot)
    if step_at is None:
        return None
    later = [at for at in (snapshot.phase_ended_at, snapshot.checkpoint_at) if at is not None]
    return max(snapshot.now - max([step_at, *later]), 0.0)


def find_silent_nodes(snapshot: Snapshot, limit_s: float) -> dict[str, float]:
    """Return, by node, the seconds since its last heartbeat, for nodes whose last heartbeat is
    older than `limit_s`. Nodes that are done send none and are left out."""
    ages = {
        node.name: snapshot.now - node.beat_at
        for node in snapshot.nodes
        if node.beat_at is not None and node.phase != "done"
    }
    return {name: age_s for name, age_s in ages.items() if age_s > limit_s}


def job_limit_s(snapshot: Snapshot, floor_s: float = FLOOR_S) -> float:
    """Return `stall_limit_s` of the job's steps, raised if a phase may be going on that no line
    reports.

    While few steps are known, the limit is also at least twice the time until the first step.
    """
    points, first = _points_of(snapshot)
    limit = stall_limit_s(points, first_step=first, floor_s=floor_s)
    if snapshot.progress is not None and snapshot.progress.longest_s is not None:
        limit = max(limit, LONGEST * snapshot.progress.longest_s)
    if knows_few_gaps(snapshot) and points and snapshot.went_at is not None:
        first_at = points[0].at if points[0].at is not None else find_step_at(snapshot)
        limit = max(limit, LONGEST * ((first_at or 0.0) - snapshot.went_at))
    return _lengthen(snapshot, limit)


def knows_few_gaps(snapshot: Snapshot) -> bool:
    """Return True while too few gaps are known to learn a limit."""
    points, first = _points_of(snapshot)
    return len(list_gaps(points, first)) < LEARN_GAPS


def is_early_silence(snapshot: Snapshot) -> bool:
    """Return True for a silence that is long for the pace, while too few gaps are known to tell a
    stall."""
    silence = find_silence_s(snapshot)
    is_long = silence is not None and is_long_for_pace(snapshot, silence)
    return is_long and knows_few_gaps(snapshot)


def is_long_for_pace(snapshot: Snapshot, silence_s: float) -> bool:
    """Return True for a silence of many steps' length that exceeds twice the job's longest gap."""
    pace_s = find_pace_s(snapshot)
    if pace_s is None:
        return False
    points, first = _points_of(snapshot)
    longest = max(list_gaps(points, first, skip=0), default=0.0)
    limit = max(LATE_S, MANY_STEPS * pace_s, LONGEST * longest)
    return silence_s > _lengthen(snapshot, limit)


def job_cause_limit_s(snapshot: Snapshot) -> float:
    """Return the shorter limit for a known stuck rank, such as a stopped process."""
    gaps = list_gaps(*_points_of(snapshot))
    learned = LONGEST * max(gaps) if len(gaps) >= LEARN_GAPS else 3 * CAUSE_FLOOR_S
    return max(learned, CAUSE_FLOOR_S)


def job_overdue_s(snapshot: Snapshot) -> float:
    """Return how long a job must be silent before an error line counts as the cause: LATE_S plus a
    few of the usual gaps between steps."""
    gaps = list_gaps(*_points_of(snapshot))
    usual = max(3 * statistics.median(gaps), max(gaps)) if gaps else LATE_S
    return _lengthen(snapshot, LATE_S + usual)


def find_pace_s(snapshot: Snapshot) -> float | None:
    """Return the seconds per step: the median of the last points, or of the first points while
    there are no others."""
    return snapshot.progress.pace_s if snapshot.progress is not None else None


def find_left_s(snapshot: Snapshot) -> float | None:
    """Return the seconds until the last step at the present pace; None if pace or number of steps
    is not known, the last step is done or is old, or the ranks hang or have all exited."""
    pace_s, progress = find_pace_s(snapshot), snapshot.progress
    stands = snapshot.suspected or (snapshot.hang is not None and snapshot.hang.until is None)
    if (
        stands
        or has_ended_ranks(snapshot)
        or is_step_older(snapshot)
        or is_early_silence(snapshot)
        or pace_s is None
        or progress is None
        or not progress.num_steps
    ):
        return None
    left_s = (progress.num_steps - progress.step) * pace_s
    return left_s if left_s > 0 else None


def has_ended_ranks(snapshot: Snapshot) -> bool:
    """Return True if all ranks have exited."""
    return bool(snapshot.ranks) and all(rank.exit is not None for rank in snapshot.ranks)


def find_limit_left_s(snapshot: Snapshot) -> float | None:
    """Return the seconds until the scheduler ends the job, by its last answer; None if not known or
    unlimited."""
    rows = [row for row in snapshot.scheduler.jobs if row.state in ("RUNNING", "COMPLETING")]
    known = [row.left_s for row in rows if row.left_s is not None]
    return max(min(known) - snapshot.scheduler.age_s, 0.0) if known else None


def compute_quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile that is one of the values, without interpolation."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _lengthen(snapshot: Snapshot, limit: float) -> float:
    """Raise a limit by the time of events that no line reports: a phase, or the job's end."""
    unseen = 0.0 if snapshot.phase_ended_at is not None else PHASE_TIMES / 2
    limit += unseen * max(snapshot.phases_s.values(), default=0.0)
    progress = snapshot.progress
    is_last = progress is not None and progress.is_last
    return max(limit, PHASE_FIRST_S) if is_last else limit


def _points_of(snapshot: Snapshot) -> tuple[Sequence[Point], int | None]:
    progress = snapshot.progress
    return (progress.points, progress.first_step) if progress is not None else ((), None)
