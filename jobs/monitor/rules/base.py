"""Shared parts of the rules: their type, names of ranks, nodes and the job, and common predicates.

A rule is a pure function that returns a verdict on a snapshot, or None if the rule does not apply.
Its name, in words, is a heading of docs/verdicts.md and the key of its sentence in `words.py`: a
rule returns values and remedies, never sentences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.finding import Finding
from varuna_core.facts.hang import Hang
from varuna_core.facts.known import Evidence, NotKnown, Sure
from varuna_core.facts.remedy import Action, Context, Remedy, Target, context_of
from varuna_core.records.exits import RankExit, find_culprit
from varuna_core.records.logs.training_log import count_bad_norms
from varuna_core.records.requests import REQUEUE
from vjob.jobs.monitor.log_lines.errors import explain_parts
from vjob.jobs.monitor.model.snapshot import (
    Health,
    JobRow,
    Line,
    Node,
    Point,
    Rank,
    Snapshot,
    Verdict,
)
from vjob.jobs.schedulers.job import OVER

Rule = Callable[[Snapshot], Verdict | None]

RUNNING = ("RUNNING", "COMPLETING")
OVER_WORDS = frozenset(state.value for state in OVER)
_TAG = re.compile(r"(\d{1,7}): ")
MANY = 8
"""Most nodes or ranks that a sentence names."""


def format_names(names: Iterable[str]) -> str:
    """Format names as `a, b and 3 more`."""
    found = list(names)
    more = f" and {len(found) - MANY} more" if len(found) > MANY else ""
    return ", ".join(found[:MANY]) + more


def format_line(line: Line) -> str:
    """Return the text of a line, shortened for a sentence."""
    text = line.text.strip().rstrip(".,;:")
    return text if len(text) <= 200 else f"{text[:197]}..."


def format_step(snapshot: Snapshot) -> str:
    progress = snapshot.progress
    if progress is None:
        return "no step"
    return progress.name


def name_job(snapshot: Snapshot) -> str:
    """Return the name of the job as the user types it."""
    if is_bare(snapshot):
        return snapshot.folder
    jobs = snapshot.scheduler.jobs
    if jobs:
        return jobs[0].id.partition("+")[0]
    return snapshot.run


def is_bare(snapshot: Snapshot) -> bool:
    """Return True for a bare folder of logs, which has neither a record nor a scheduler."""
    return not snapshot.scheduler.name and not snapshot.record_state


def is_plain_job(snapshot: Snapshot) -> bool:
    """Return True for a Slurm job that vjob did not submit."""
    return bool(snapshot.scheduler.name) and not snapshot.record_state


def context_of_job(snapshot: Snapshot) -> Context:
    """Return the context that decides the wording of remedies for this job."""
    return context_of(snapshot.scheduler.name, has_conf=bool(snapshot.record_state))


def rows_in(snapshot: Snapshot, states: Iterable[str]) -> list[JobRow]:
    wanted = set(states)
    return [row for row in snapshot.scheduler.jobs if row.state in wanted]


def is_over(snapshot: Snapshot) -> bool:
    """Return True if the job is over by the record, the scheduler or the attempt's outcome."""
    if snapshot.record_state == "ended":
        return True
    jobs = snapshot.scheduler.jobs
    if jobs:
        # A split run ends with its first job; an outcome is written just before the job ends.
        if all(row.state in OVER_WORDS for row in jobs):
            return True
        is_waiting = bool(rows_in(snapshot, ("PENDING", "REQUEUED", "CONFIGURING")))
        is_next = snapshot.morph or is_between(snapshot) or is_coming_again(snapshot)
        is_next = is_next or snapshot.waits_for_room
        return snapshot.outcome is not None and not is_waiting and not is_next
    # Who cannot ask cannot know whether it starts again.
    return snapshot.outcome is not None and not snapshot.scheduler.problem


def is_between(snapshot: Snapshot) -> bool:
    """Return True if the job or its ranks are restarting, so that the latest known attempt is the
    previous one."""
    rows = rows_in(snapshot, RUNNING)
    if snapshot.attempt is None or not rows:
        return False
    return max(row.restarts for row in rows) + snapshot.restarts > snapshot.attempt


def is_coming_again(snapshot: Snapshot) -> bool:
    """Return True if a function saved its state and the batch script is to requeue the job."""
    return (snapshot.stop or {}).get("kind") == REQUEUE and bool(rows_in(snapshot, RUNNING))


def is_live(snapshot: Snapshot) -> bool:
    """Return True if the job's ranks may be running now."""
    if is_over(snapshot) or is_between(snapshot):
        return False
    if snapshot.record_state in ("refused", "intent"):
        return False
    if not snapshot.scheduler.jobs:
        if snapshot.outcome is not None:
            return False
        return bool(snapshot.nodes or snapshot.ranks or snapshot.attempt is not None)
    return bool(rows_in(snapshot, RUNNING))


def find_started(snapshot: Snapshot) -> float | None:
    """Return when the ranks were started, or else when the attempt was; None if not known."""
    return snapshot.went_at if snapshot.went_at is not None else snapshot.attempt_started


def find_life(snapshot: Snapshot) -> float | None:
    """Return the time of the last sign of life of any rank or node; None if there is none."""
    progress = snapshot.progress
    times = [progress.at if progress else None, snapshot.phase_ended_at, snapshot.went_at]
    for node in snapshot.nodes:
        times += [node.beat_at, node.log_at, node.gpus_at]
    times += [rank.step_at for rank in snapshot.ranks]
    times += [snapshot.attempt_started]
    return max((at for at in times if at is not None), default=None)


def find_node(snapshot: Snapshot, name: str) -> Node | None:
    return next((node for node in snapshot.nodes if node.name == name), None)


def find_step_line(snapshot: Snapshot, step: int | None = None) -> Line | None:
    """Return the line that reported a step, by default the last step; None if it is not kept."""
    progress = snapshot.progress
    if progress is None:
        return None
    named = re.compile(rf"(?<![\d.]){progress.step if step is None else step}(?![\d.]\d|\d)")
    told_by = [node for node in snapshot.nodes if progress.source.startswith(f"{node.name}.")]
    for node in told_by or snapshot.nodes:
        for text in reversed(node.out):
            low = text.lower()
            if ("step" in low or "iter" in low or "loss" in low) and named.search(text):
                tag = _TAG.match(text)
                rank = int(tag.group(1)) if tag is not None else None
                return Line(text=text, node=node.name, rank=rank, file=f"{node.name}.out")
    return None


def find_bad_loss(points: Sequence[Point]) -> Point | None:
    """Return the last point with a loss if this loss is not a finite number and its step was not
    skipped; else None."""
    point = next((one for one in reversed(points) if one.loss is not None or one.nan), None)
    if point is None:
        return None
    is_bad = point.loss is not None and not math.isfinite(point.loss) and not point.skipped
    return point if is_bad or point.nan else None


def list_bad_norms(snapshot: Snapshot) -> Sequence[Point]:
    """Return the last points with a gradient norm, if these norms show that weights are lost."""
    points = snapshot.norms
    if not points and snapshot.progress is not None:
        points = snapshot.progress.points
    shown = [one for one in points if one.grad_norm is not None]
    rows = [(one.step, one.grad_norm, one.loss, bool(one.skipped)) for one in shown]
    return shown[len(shown) - count_bad_norms(rows) :]


def norm_values(run: Sequence[Point]) -> dict[str, Any]:
    """Return the values of points whose gradient norms are not finite."""
    no_loss = NotKnown("these lines show no loss")
    losses = [one.loss for one in run if one.loss is not None]
    return {
        "norm": str(run[-1].grad_norm),
        "num_lines": len(run),
        "step": run[-1].step if run[-1].step >= 0 else NotKnown("the line names no step"),
        "first_step": run[0].step,
        "loss": losses[-1] if losses else no_loss,
    }


def find_failed(snapshot: Snapshot) -> RankExit | None:
    """Return the exit of the rank with which the end of the job began, by the rule by which an
    attempt is judged too."""
    exits = [rank.exit for rank in snapshot.ranks if rank.exit is not None]
    return find_culprit(exits, (snapshot.stop or {}).get("rank"))


def list_alive(snapshot: Snapshot) -> list[Rank]:
    return [rank for rank in snapshot.ranks if rank.exit is None]


Values = Mapping[str, Any]
CANCEL = Remedy(Action.CANCEL)
NO_STEP = NotKnown("no line and no trace shows a step")
NO_TOTAL = NotKnown("neither the conf nor a line gives the number of steps")


def conclude(
    health: Health,
    rule: str,
    values: Values | None = None,
    *,
    remedies: Sequence[Remedy] = (),
    lines: Sequence[Line | None] = (),
    evidence: Sequence[Evidence] = (),
    details: Sequence[Finding] = (),
    node: str = "",
    rank: int | None = None,
    phase: str = "",
    never_starts: bool = False,
    end: End | None = None,
) -> Verdict:
    """Build a verdict without sentences; `lines` are log lines that prove it, as far as they are
    known, and `evidence` is any other proof."""
    known = tuple(line for line in lines if line is not None)
    proof = (*map(make_evidence, known), *evidence)
    if end is not None:
        proof = (*proof, *end.evidence)
    return Verdict(
        health=health,
        main=Finding(
            rule,
            cause=end.cause if end is not None else None,
            values=values or {},
            evidence=proof,
            remedies=tuple(remedies),
        ),
        end=end,
        details=tuple(details),
        evidence=known,
        node=node,
        rank=rank,
        phase=phase,
        never_starts=never_starts,
    )


END_LINES = {
    EndCause.TIME_LIMIT: "time limit",
    EndCause.CANCELLED: "cancelled",
    EndCause.PREEMPTED: "preempted",
}
"""The catalogue's row for the line in which the scheduler says why it ends the whole job."""


def find_end_line(snapshot: Snapshot) -> Line | None:
    return next((x for x in snapshot.errors if x.kind in END_LINES.values() and not x.doubt), None)


def make_evidence(line: Line) -> Evidence:
    """Return a line as evidence; a line without a node is from the batch script's output."""
    sources = {"err": "rank stderr", "out": "rank stdout"}
    source = sources.get(line.file.rpartition(".")[2], "log") if line.node else "batch script"
    return Evidence(source, Sure.REPORTED, file=line.file, text=line.text, since=line.at)


def hang_values(snapshot: Snapshot, hang: Hang, until: float | None = None) -> dict[str, Any]:
    silence = max((snapshot.now if until is None else until) - hang.since, 0.0)
    hours = silence / 3600 * (snapshot.world or len(snapshot.ranks))
    return {"hang": hang.as_json(), "silence_s": silence, "rank_hours": hours}


def step_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the last step and the total number of steps, as far as known."""
    progress = snapshot.progress
    if progress is None:
        return {"step": NO_STEP, "num_steps": NO_TOTAL}
    values: dict[str, Any] = {"step": progress.step, "num_steps": progress.num_steps or NO_TOTAL}
    if progress.unit != "step":
        values["unit"] = progress.unit
    if progress.is_least:
        values["is_least"] = True
    return {**values, "is_counted": True} if progress.is_counted else values


def line_values(line: Line) -> dict[str, Any]:
    """Return the values of a line: its text, rank, node and number of equal lines."""
    return {
        "text": format_line(line),
        "rank": line.rank,
        "node": line.node,
        "num_same": line.num_same,
    }


def remedies_of_line(line: Line | None) -> tuple[dict[str, Any], tuple[Remedy, ...]]:
    """Return the meaning of a known line, as a value, and its remedies."""
    meaning, remedies = explain_parts(line)
    return ({"meaning": meaning} if meaning else {}), remedies


def show(snapshot: Snapshot, *targets: Target) -> tuple[Remedy, ...]:
    """Return remedies that name vjob commands for more details, omitting those that do not work for
    a bare folder or a job that vjob did not submit."""
    known = {Target.LOGS, Target.ERRORS}
    if not is_bare(snapshot):
        known.add(Target.STACKS)
        if not is_plain_job(snapshot):
            known.add(Target.REPORT)
    return tuple(Remedy(Action.INSPECT, target) for target in targets if target in known)


def cancel(snapshot: Snapshot) -> tuple[Remedy, ...]:
    return () if is_bare(snapshot) else (CANCEL,)


def list_unheard(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Return a finding if SIGUSR1 is to precede the time limit and ranks have no handler for it."""
    deaf = [node.name for node in snapshot.nodes if node.hears_usr1 is False]
    if not snapshot.warn_s or not deaf:
        return ()
    values = {"nodes": deaf, "warn_s": snapshot.warn_s, "is_live": is_live(snapshot)}
    return (Finding("early signal unheard", values=values, evidence=(Evidence("beat"),)),)


def join(parts: Sequence[str], between: str = ". ") -> str:
    return between.join(part for part in parts if part)
