"""Rules for a job that runs and will fail, or learns nothing: errors, NaN, overflow. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.facts.catalogue.remedies import ask_admin, do
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, is_grave
from varuna_core.facts.known import Evidence, NotKnown, Sure
from varuna_core.facts.remedy import Action, Remedy, Target
from vjob.jobs.monitor.log_lines.errors import first_root, is_proof
from vjob.jobs.monitor.model.snapshot import (
    COUNTED,
    Echo,
    Gpu,
    Health,
    Line,
    Point,
    Snapshot,
    Verdict,
)
from vjob.jobs.monitor.rules.base import (
    Values,
    cancel,
    conclude,
    find_bad_loss,
    find_end_line,
    find_failed,
    find_life,
    find_node,
    find_started,
    find_step_line,
    is_bare,
    is_live,
    is_plain_job,
    line_values,
    list_bad_norms,
    name_job,
    norm_values,
    remedies_of_line,
    show,
)
from vjob.jobs.monitor.rules.doubts import CLOCKS_S, went_on
from vjob.jobs.monitor.rules.pace import find_phase, find_silence_s, find_step_at, job_overdue_s

LOWER_RATE = Remedy(Action.LOWER, Target.LEARNING_RATE)
CLIP = Remedy(Action.SET, Target.GRADIENT_CLIPPING)
START_SILENCE_S = 120.0
"""Seconds of silence after an error, before the first step, that mean the error was fatal."""
NO_PROCESS_S = 600.0
"""Seconds after the start of the ranks by which some GPU must have a process."""
IDLE, IDLE_MB = 5.0, 1000.0
"""Most utilization (per cent) and memory (MB) of an unused GPU."""
FULL_BYTES = 64 * 1024 * 1024
FULL_INODES = 64


def rank_failed(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if a rank failed by itself while the job is still running."""
    if not is_live(snapshot):
        return None
    first = find_failed(snapshot)
    if first is None:
        return None
    root = first_root([line for line in snapshot.errors if line.rank == first.rank])
    other = first_root(snapshot.errors)
    if (root is None or not is_proof(root, Proof.CAUSE)) and other is not None:
        root = other if is_proof(other, Proof.CAUSE) else root or other
    return failing(
        snapshot,
        "rank failed",
        {"rank": first.rank, "node": first.node, "how": first.how},
        (root,),
        evidence=(Evidence("exit file", Sure.MEASURED),),
        node=first.node,
        rank=first.rank,
        root=root,
    )


def asked_to_end(snapshot: Snapshot) -> Verdict | None:
    stop = snapshot.stop
    if not stop or stop.get("code") == 0 or not is_live(snapshot):  # 0: all is saved
        return None
    node, rank = stop.get("node"), stop.get("rank")
    root = first_root(snapshot.errors) if stop.get("kind") in ("rank", "lost", "group") else None
    root = find_end_line(snapshot) if stop.get("kind") == "signal" else root
    return failing(
        snapshot,
        "asked to end",
        {"kind": stop.get("kind"), "said": stop.get("reason") or NotKnown("no reason was given")},
        (root,),
        node=str(node or ""),
        rank=rank if isinstance(rank, int) else None,
        root=root,
    )


def wrong_setting(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the run prints another value of a setting than the conf or plan has."""
    wrong = [echo for echo in snapshot.echoes if is_wrong(echo)]
    if not wrong or not is_live(snapshot):
        return None
    first = wrong[0]
    check = Remedy(Action.INSPECT, Target.PROGRAM, detail="and env, which may also set that value")
    return failing(
        snapshot,
        "wrong setting",
        {
            "name": first.name,
            "said": first.said,
            "wanted": first.wanted,
            "more": [echo.name for echo in wrong[1:]],
            "meaning": "the training does not use what you asked for",
        },
        tuple(echo.line for echo in wrong[:3]),
        node=first.line.node,
        rank=first.line.rank,
        remedies=(check, *cancel(snapshot)),
    )


def is_wrong(echo: Echo) -> bool:
    return (
        echo.wanted is not None
        and bool(echo.said.strip())
        and _plain(echo.said) != _plain(echo.wanted)
    )


def saves_skipped(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the last saves were skipped or wait because the disk is full or the file
    server failed."""
    found = snapshot.skipped
    if found is None or not is_live(snapshot):
        return None
    if snapshot.checkpoint_step is not None and snapshot.checkpoint_step >= found.iteration:
        return None
    disks = [disk for disk in snapshot.disks if disk.path == found.folder]
    again = "the save is tried again every 5 s" if found.waits else "the next save tries again"
    free = disks[0].free_bytes if disks else NotKnown("the disk of that folder was not checked")
    if found.no_room:
        remedy = Remedy(Action.MAKE_ROOM, detail=f"there; {again}")
    else:
        remedy = do(f"check the file server; {again}")
    return failing(
        snapshot,
        "saves skipped",
        {
            "count": found.count,
            "waits": found.waits,
            "no_room": found.no_room,
            "folder": found.folder,
            "free_bytes": free,
            "kept_step": snapshot.checkpoint_step or NotKnown("no checkpoint is known"),
            "age_s": max(0.0, snapshot.now - found.since),
        },
        (),
        details=(Finding("said", values={"text": found.reason}),),
        remedies=(remedy, *show(snapshot, Target.ERRORS)),
    )


def disk_full(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if a disk is full and a log line reports it."""
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
    unknown = NotKnown("the file system does not count inodes")
    return failing(
        snapshot,
        "disk full",
        {
            "what": disk.what,
            "path": disk.path,
            "free_bytes": disk.free_bytes,
            "free_inodes": disk.free_inodes if disk.free_inodes is not None else unknown,
        },
        (line,),
        node=line.node,
        rank=line.rank,
        remedies=(
            Remedy(Action.MAKE_ROOM, detail="on that disk before the next checkpoint"),
            *show(snapshot, Target.ERRORS),
        ),
    )


def error_line(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if a log reports an error and no step has been done since."""
    if not is_live(snapshot):
        return None
    lines = [line for line in snapshot.errors if not went_on(line, snapshot)]
    phase = find_phase(snapshot)
    if phase is not None:
        # Its silence says nothing: only what was written in it, some time ago, does.
        late = snapshot.now - job_overdue_s(snapshot)
        lines = [line for line in lines if _is_between(line, phase.since, late)]
    root = first_root(lines)
    if root is None:
        return None
    silence = find_silence_s(snapshot)
    since = "step"
    if silence is None:
        since = "output"
        life = _find_output(snapshot, root)
        started = find_started(snapshot)
        last = max((at for at in (life, started) if at is not None), default=None)
        if last is None or snapshot.now - last < START_SILENCE_S:
            return None
        silence = snapshot.now - last
    elif silence <= job_overdue_s(snapshot):
        return None
    echoes = [line for line in lines if line is not root and is_proof(line, Proof.FALLOUT)]
    return failing(
        snapshot,
        "error line",
        {**line_values(root), "silence_s": silence, "since": since},
        (root, *echoes[:2]),
        node=root.node,
        rank=root.rank,
        root=root,
    )


def _is_between(line: Line, since: float | None, until: float) -> bool:
    times = [at for at in (line.at, line.written_by) if at is not None]
    return bool(times) and since is not None and since <= min(times) <= until


def no_gpu_process(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the ranks started long ago and no process uses any of the job's GPUs."""
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
    more, remedies = remedies_of_line(root)
    if not remedies:
        more = {"meaning": "the ranks wait, or run without a GPU"}
    seen = Evidence("GPU samples", Sure.MEASURED, seen=len(gpus), expected=snapshot.num_gpus)
    return failing(
        snapshot,
        "no gpu process",
        {"num_gpus": len(gpus), "age_s": snapshot.now - started, **more},
        (root,),
        evidence=(seen,),
        remedies=(*remedies, *show(snapshot, Target.STACKS, Target.LOGS)),
    )


def gpu_lost(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the driver lists a GPU of the job but cannot access it."""
    lost = [(node, index) for node in snapshot.nodes for index in node.gpus_lost]
    if not is_live(snapshot) or not lost:
        return None
    node = lost[0][0]
    numbers = [index for one, index in lost if one is node]
    faults = [one for one in node.faults if one.rule == Fault.LOST.value]
    sure = all(one.values.get("ranks_sure") for one in faults)
    read = len(node.gpus)
    return failing(
        snapshot,
        "gpu lost",
        {
            "node": node.name,
            "gpus": numbers,
            "ranks": sorted({rank for one in faults for rank in one.values.get("ranks") or []}),
            "ranks_sure": sure,
            "num_read": read,
            "num_gpus": read + len(numbers),
            "num_more_nodes": len({one.name for one, _ in lost}) - 1,
        },
        (),
        evidence=(Evidence("GPU samples", Sure.MEASURED, seen=read, expected=read + len(numbers)),),
        node=node.name,
        remedies=(
            Remedy(Action.EXCLUDE, Target.NODE, node.name),
            ask_admin("to reset it"),
            *show(snapshot, Target.ERRORS),
        ),
    )


def sick_hardware(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the hardware reports a grave fault and no step has been done since."""
    step_at = find_step_at(snapshot)
    grave = [
        (node, fault)
        for node in snapshot.nodes
        for fault in node.faults
        if is_grave(fault) and fault.rule != Fault.LOST.value
        if step_at is None or step_at <= fault.values["last"] + CLOCKS_S
    ]
    if not is_live(snapshot) or not grave:
        return None
    silence = find_silence_s(snapshot)
    if silence is not None and silence <= job_overdue_s(snapshot):
        return None
    node, fault = min(grave, key=lambda one: float(one[1].values["since"]))
    ranks = fault.values.get("ranks") or []
    remedies = [name_node(one, node.name) for one in fault.remedies]
    return failing(
        snapshot,
        "sick hardware",
        {"node": node.name, "fault": fault, "num_more": len(grave) - 1},
        (),
        evidence=fault.evidence,
        node=node.name,
        rank=ranks[0] if ranks and fault.values.get("ranks_sure") else None,
        remedies=(*remedies, *show(snapshot, Target.ERRORS)),
    )


def name_node(remedy: Remedy, node: str) -> Remedy:
    """Return the remedy, with the node's name if it is to exclude the node."""
    return replace(remedy, value=node) if remedy.action is Action.EXCLUDE else remedy


def failing(
    snapshot: Snapshot,
    rule: str,
    values: Values,
    lines: Sequence[Line | None],
    *,
    node: str = "",
    rank: int | None = None,
    details: tuple[Finding, ...] = (),
    evidence: tuple[Evidence, ...] = (),
    root: Line | None = None,
    remedies: tuple[Remedy, ...] = (),
) -> Verdict:
    """Return FAILING with these remedies, or else with those of the line `root`."""
    if not remedies:
        more, known = remedies_of_line(root)
        values, remedies = {**values, **more}, (*known, *show(snapshot, Target.ERRORS))
    return conclude(
        Health.FAILING,
        rule,
        values,
        lines=lines,
        evidence=evidence,
        details=details,
        remedies=remedies,
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
    """Return when the node that printed the line last wrote to its logs; if the node is not known,
    return the job's last sign of life."""
    node = find_node(snapshot, line.node)
    return node.log_at if node is not None else find_life(snapshot)


def _plain(value: str) -> str:
    """Normalize a value for comparison of logs and confs: 1e-3 equals 0.001, True equals true."""
    text = value.strip().strip("'\"").lower()
    text = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text, text)
    try:
        return repr(float(text))
    except ValueError:
        return re.sub(r"[\s,;-]+", "-", text)


SKIPS = 20
"""Consecutive skipped steps that are too many for a search of the loss scale."""
FLAT_SKIPS = 10
"""Number of consecutive skipped steps that is too many if the loss scale does not fall."""
LEAST_SCALE = 1.0
EXPLODED = 100.0
"""Factor over the earlier median of gradient norms at which gradients explode, in three points and
with a rising loss."""
LOSS_ROSE = 2.0


def not_a_number(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if the latest loss is not a finite number, in a step that was not skipped, or
    if the last gradient norms are not."""
    points = _live_points(snapshot)
    norms = list_bad_norms(snapshot) if is_live(snapshot) else ()
    if not points and snapshot.loss is not None and is_live(snapshot):
        points = (snapshot.loss,)
    point = find_bad_loss(points)
    if point is None and not norms:
        return None
    if point is None:
        point, first = norms[-1], norms[0].step
        values: Values = norm_values(norms)
    else:
        is_bad = point.loss is not None and not math.isfinite(point.loss) and not point.skipped
        first = _first_bad(points)
        values = {
            "loss": str(point.loss) if is_bad else NotKnown("the last line shows no NaN or Inf"),
            "num_nan": point.nan,
            "step": point.step if point.step >= 0 else NotKnown("the line names no step"),
            "first_step": first,
        }
    line = next((x for x in snapshot.errors if x.kind == "not a number"), None)
    saved = snapshot.checkpoint_step
    back: tuple[Remedy, ...] = ()
    if saved and saved < first:
        back = (do(f"go back to the checkpoint of step {saved}, saved before the first NaN"),)
    return failing(
        snapshot,
        "not a number",
        values,
        (line, find_step_line(snapshot, point.step)),
        details=_list_sources(snapshot) if point.step >= 0 else (),
        remedies=(
            LOWER_RATE,
            replace(CLIP, instead=True),
            do("look at the samples of that step"),
            *back,
            *_cancel_without_save(snapshot),
        ),
    )


def _cancel_without_save(snapshot: Snapshot) -> tuple[Remedy, ...]:
    if is_bare(snapshot) or is_plain_job(snapshot):
        return cancel(snapshot)
    return (do(f"`vjob cancel --now {name_job(snapshot)}`: a save would keep the NaN"),)


def loss_scale(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if fp16 skips step after step and a smaller loss scale does not help."""
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
    unknown = NotKnown("no line gives the loss scale")
    return failing(
        snapshot,
        "loss scale",
        {"num_skipped": num_skipped, "scale": scales[-1] if scales else unknown},
        (find_step_line(snapshot, points[-1].step),),
        details=_list_sources(snapshot),
        remedies=(
            LOWER_RATE,
            do("look for a NaN in data or weights"),
            Remedy(Action.SET, Target.PRECISION, "bf16", instead=True),
            *cancel(snapshot),
        ),
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
        {"norm": norms[-1], "usual_norm": usual, "loss": losses[-1]},
        (find_step_line(snapshot, points[-1].step),),
        details=_list_sources(snapshot),
        remedies=(
            LOWER_RATE,
            replace(CLIP, instead=True),
            do("go back to a checkpoint from before the gradients grew"),
            *cancel(snapshot),
        ),
    )


def _live_points(snapshot: Snapshot) -> Sequence[Point]:
    progress = snapshot.progress
    return progress.points if progress is not None and is_live(snapshot) else ()


def _first_bad(points: Sequence[Point]) -> int:
    """Return the first step of the last series of points whose loss is not a finite number."""
    first = points[-1].step
    for point in reversed(points):
        is_bad = point.nan or (point.loss is not None and not math.isfinite(point.loss))
        if point.loss is not None and not is_bad:
            break
        first = point.step if is_bad else first
    return first


def _skipped_run(points: Sequence[Point]) -> list[Point]:
    """Return the last points of which every step was skipped."""
    run: list[Point] = []
    for at in range(len(points) - 1, -1, -1):
        num_steps = points[at].step - points[at - 1].step if at else points[at].skipped
        if not points[at].skipped or points[at].skipped < num_steps:
            break
        run.insert(0, points[at])
    return run


def _list_sources(snapshot: Snapshot) -> tuple[Finding, ...]:
    progress = snapshot.progress
    if progress is None or progress.source in ("", COUNTED):  # no loss is known to the counter
        return ()
    return (Finding("source", values={"source": progress.source}),)
