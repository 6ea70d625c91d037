"""Rules for a job that runs and will fail, or learns nothing: errors, NaN, overflow. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.records.files import format_free
from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.log_lines.errors import first_root, is_proof
from vjob.jobs.monitor.model.snapshot import Echo, Gpu, Health, Line, Point, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    advise,
    explain_line,
    find_failed,
    find_life,
    find_node,
    find_started,
    find_step_line,
    format_line,
    format_names,
    format_rank,
    is_live,
    join,
)
from vjob.jobs.monitor.rules.pace import find_phase, find_silence_s, find_step_at, job_overdue_s

CLOCKS_S = 5.0
"""Clocks of nodes and file server may differ by so much."""
START_SILENCE_S = 120.0
"""Before the first step, an error that nothing follows for so long was the end."""
NO_PROCESS_S = 600.0
"""After the ranks started, all GPUs should have processes."""
IDLE, IDLE_MB = 5.0, 1000.0
"""Per cent and megabytes of a GPU that nobody uses, at most."""
FULL_BYTES = 64 * 1024 * 1024
FULL_INODES = 64


def rank_failed(snapshot: Snapshot) -> Verdict | None:
    """A rank ended by itself with an error, and others are still there."""
    if not is_live(snapshot):
        return None
    first = find_failed(snapshot)
    if first is None:
        return None
    how = f"was ended by {first.signal}" if first.signal else f"exited {first.code}"
    root = first_root([line for line in snapshot.errors if line.rank == first.rank])
    other = first_root(snapshot.errors)
    if (root is None or not is_proof(root, Proof.CAUSE)) and other is not None:
        root = other if is_proof(other, Proof.CAUSE) else root or other
    tail = f": {first.last_error}" if first.last_error else ""
    return failing(
        snapshot,
        "rank failed",
        f"{format_rank(first.rank, first.node)} {how}{tail}; the others are being ended",
        (root,) if root is not None else (),
        node=first.node,
        rank=first.rank,
        remedy=explain_line(snapshot, root),
    )


def asked_to_end(snapshot: Snapshot) -> Verdict | None:
    stop = snapshot.stop
    if not stop or stop.get("code") == 0 or not is_live(snapshot):  # 0: all is saved
        return None
    node, rank = stop.get("node"), stop.get("rank")
    root = first_root(snapshot.errors) if stop.get("kind") in ("rank", "lost", "group") else None
    return failing(
        snapshot,
        "asked to end",
        f"the attempt is being ended: {stop.get('reason', 'somebody said stop')}",
        (root,) if root is not None else (),
        node=str(node or ""),
        rank=rank if isinstance(rank, int) else None,
        remedy=explain_line(snapshot, root),
    )


def wrong_setting(snapshot: Snapshot) -> Verdict | None:
    """The run prints another value than the conf or plan has."""
    wrong = [echo for echo in snapshot.echoes if is_wrong(echo)]
    if not wrong or not is_live(snapshot):
        return None
    first = wrong[0]
    more = f" (and {format_names(echo.name for echo in wrong[1:])})" if len(wrong) > 1 else ""
    return failing(
        snapshot,
        "wrong setting",
        f"the run says {first.name}: {first.said}, the conf says {first.wanted}{more}",
        tuple(echo.line for echo in wrong[:3]),
        node=first.line.node,
        rank=first.line.rank,
        remedy="what trains is not what you asked for: cancel, and see what program.args and env "
        "set beside the conf",
        verbs=("cancel JOB",),
    )


def is_wrong(echo: Echo) -> bool:
    return (
        echo.wanted is not None
        and bool(echo.said.strip())
        and _plain(echo.said) != _plain(echo.wanted)
    )


def saves_skipped(snapshot: Snapshot) -> Verdict | None:
    """The last saves found no room, or the file server failed: they were skipped, or wait."""
    found = snapshot.skipped
    if found is None or not is_live(snapshot):
        return None
    if snapshot.checkpoint_step is not None and snapshot.checkpoint_step >= found.iteration:
        return None
    done, then = "skipped", "; training goes on"
    if found.waits:
        many, done, then = "a save", "waits", ", and the training with it"
    elif found.count == 1:
        many = "the last save was"
    else:
        many = f"the last {found.count} saves were"
    why = "no room" if found.no_room else "the disk or file server failed"
    disks = [disk for disk in snapshot.disks if disk.path == found.folder]
    room = f" ({format_free(disks[0].free_bytes)} free)" if disks else ""
    kept = f"; complete is iteration {snapshot.checkpoint_step}" if snapshot.checkpoint_step else ""
    age = format_duration(max(0.0, snapshot.now - found.since))
    return failing(
        snapshot,
        "saves skipped",
        f"{many} {done}, for {age}: {why} in {found.folder}{room}{then}{kept}",
        (),
        facts=(found.reason,),
        remedy=("make room there: " if found.no_room else "look at the file server: ")
        + ("it is tried again every 5 s" if found.waits else "the next save tries again"),
    )


def disk_full(snapshot: Snapshot) -> Verdict | None:
    """A disk has no room, and a rank said so."""
    line = next((x for x in snapshot.errors if x.kind in ("disk full", "quota")), None)
    full = [
        disk
        for disk in snapshot.disks
        if disk.free_bytes < FULL_BYTES
        or (disk.free_inodes is not None and disk.total_inodes and disk.free_inodes < FULL_INODES)
    ]
    if line is None or not full or not is_live(snapshot):
        return None
    disk = full[0]
    left = f"{disk.free_bytes / 1e6:.0f} MB"
    if disk.free_inodes is not None:
        left += f" and {disk.free_inodes} inodes"
    return failing(
        snapshot,
        "disk full",
        f"the disk of {disk.what} has {left} left ({disk.path})",
        (line,),
        node=line.node,
        rank=line.rank,
        remedy="make room there before the next checkpoint",
    )


def error_line(snapshot: Snapshot) -> Verdict | None:
    """An error was written, and no step was done since."""
    if not is_live(snapshot):
        return None
    step_at = find_step_at(snapshot)
    lines = [line for line in snapshot.errors if not went_on(line, step_at)]
    phase = find_phase(snapshot)
    if phase is not None:
        # Its silence says nothing: only what was written in it, some time ago, does.
        late = snapshot.now - job_overdue_s(snapshot)
        lines = [line for line in lines if _is_between(line, phase.since, late)]
    root = first_root(lines)
    if root is None:
        return None
    silence = find_silence_s(snapshot)
    if silence is None:
        life = _find_output(snapshot, root)
        started = find_started(snapshot)
        since = max((at for at in (life, started) if at is not None), default=None)
        if since is None or snapshot.now - since < START_SILENCE_S:
            return None
        what = f"and nothing came after it for {format_duration(snapshot.now - since)}"
    elif silence <= job_overdue_s(snapshot):
        return None
    else:
        what = f"and no step was done for {format_duration(silence)}"
    many = f" ({root.num_same} times in all)" if root.num_same > 1 else ""
    who = format_rank(root.rank, root.node)
    said = f"{who} said" if who else "a log says"
    return failing(
        snapshot,
        "error line",
        f"{said}: {format_line(root)}{many}, {what}",
        (root, *[line for line in lines if line is not root and is_proof(line, Proof.FALLOUT)][:2]),
        node=root.node,
        rank=root.rank,
        remedy=explain_line(snapshot, root),
    )


def _is_between(line: Line, since: float | None, until: float) -> bool:
    times = [at for at in (line.at, line.written_by) if at is not None]
    return bool(times) and since is not None and since <= min(times) <= until


def went_on(line: Line, step_at: float | None) -> bool:
    """True if a step was done after the line was written: then it was not the end."""
    times = [at for at in (line.at, line.written_by) if at is not None]
    return step_at is not None and bool(times) and step_at > min(times) + CLOCKS_S


def no_gpu_process(snapshot: Snapshot) -> Verdict | None:
    """The job has GPUs, its ranks started long ago, and nothing runs on any GPU."""
    started = find_started(snapshot)
    gpus = [(node, gpu) for node in snapshot.nodes for gpu in node.gpus if gpu.index != "cpu"]
    if not is_live(snapshot) or not gpus or started is None or snapshot.num_gpus == 0:
        return None
    if snapshot.now - started < NO_PROCESS_S or any(_is_used(gpu) for _, gpu in gpus):
        return None
    samples = [node.gpus_at for node in snapshot.nodes if node.gpus_at is not None]
    if not samples or snapshot.now - max(samples) > NO_PROCESS_S:
        return None
    silence = find_silence_s(snapshot)
    if silence is not None and silence <= job_overdue_s(snapshot):
        return None
    root = first_root(snapshot.errors)
    age = format_duration(snapshot.now - started)
    return failing(
        snapshot,
        "no gpu process",
        f"none of {len(gpus)} GPUs has a process, {age} after the ranks started",
        (root,) if root is not None else (),
        remedy=explain_line(snapshot, root) or "the ranks wait, or run without a GPU",
        verbs=("stacks JOB", "logs JOB"),
    )


def gpu_lost(snapshot: Snapshot) -> Verdict | None:
    """The driver has a GPU of the job's and cannot reach it."""
    lost = [(node.name, index) for node in snapshot.nodes for index in node.gpus_lost]
    if not is_live(snapshot) or not lost:
        return None
    name = lost[0][0]
    numbers = [str(index) for node, index in lost if node == name]
    which = f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(numbers)}"
    others = len({node for node, _ in lost}) - 1
    more = f", and of {others} other nodes" if others else ""
    seen = len(next(node for node in snapshot.nodes if node.name == name).gpus)
    return failing(
        snapshot,
        "gpu lost",
        f"{which} of {name} is lost{more}: the driver cannot reach it, and reads {seen} of "
        f"{seen + len(numbers)}",
        (),
        node=name,
        remedy="add the node to cluster.exclude, and ask an admin to reset it",
    )


def failing(
    snapshot: Snapshot,
    rule: str,
    reason: str,
    evidence: tuple[Line, ...],
    *,
    node: str = "",
    rank: int | None = None,
    facts: tuple[str, ...] = (),
    remedy: str = "",
    verbs: tuple[str, ...] = ("logs JOB --errors",),
) -> Verdict:
    return Verdict(
        health=Health.FAILING,
        rule=rule,
        reason=reason,
        evidence=evidence,
        facts=facts,
        advice=join([remedy, advise(snapshot, *verbs)], "; "),
        node=node,
        rank=rank,
    )


def _is_used(gpu: Gpu) -> bool:
    """True if a process uses the GPU: one counted as ours, or one that cannot be seen."""
    if gpu.num_processes is None or gpu.num_processes > (gpu.num_foreign or 0):
        return True
    return not gpu.num_foreign and (
        (gpu.utilization or 0.0) > IDLE or (gpu.memory_used_mb or 0.0) > IDLE_MB
    )


def _find_output(snapshot: Snapshot, line: Line) -> float | None:
    """When anything was last written on the node of the line."""
    node = find_node(snapshot, line.node)
    return node.log_at if node is not None else find_life(snapshot)


def _plain(value: str) -> str:
    """How values of logs and confs compare: 1e-3 is 0.001, True is true."""
    text = value.strip().strip("'\"").lower()
    text = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text, text)
    try:
        return repr(float(text))
    except ValueError:
        return re.sub(r"[\s,;-]+", "-", text)


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
        facts=(_format_source(snapshot),),
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
        facts=(_format_source(snapshot),),
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
        facts=(_format_source(snapshot),),
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


def _format_source(snapshot: Snapshot) -> str:
    progress = snapshot.progress
    return f"as {progress.source} tells" if progress is not None and progress.source else ""
