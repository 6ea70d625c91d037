"""`vjob status` in its plain form: the scheduler's state, and each node's last lines."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from jobs.pending import explain_reason
from jobs.runs import RunView
from jobs.slurm import JobInfo, JobState
from jobs.verdict import read_node_names
from varuna_core.records import record as records
from varuna_core.records.exits import Outcome, RankExit, read_exits, read_outcome
from varuna_core.records.plan import Plan, read_attempt_plan
from varuna_core.records.runfolder import AttemptFolder
from varuna_core.records.stop import read_stop
from varuna_core.records.tail import clean, last_lines

OK, FAILED, NOT_KNOWN, NEVER_STARTS = 0, 10, 11, 12
"""Exit codes of `vjob status`."""
MANY_NODES = 16
KINDS = ("out", "err", "gpu")


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node of the last attempt."""

    name: str
    ranks: str
    """`0-3`, empty where not known."""
    out: list[str]
    err: list[str]
    gpu: list[str]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is known of a run at one moment."""

    time: float
    run: str
    folder: str
    state: str
    message: str
    scheduler: str
    layout: str
    jobs: list[dict[str, str]]
    attempt: int | None
    earlier: dict[int, str]
    """Why the attempts before this one ended."""
    world: int | None
    exits: dict[int, RankExit]
    nodes: list[NodeView]
    outcome: Outcome | None
    scheduler_lines: list[str]
    num_hidden: int
    """Nodes left out of `nodes`."""
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def take_snapshot(view: RunView, *, num_lines: int) -> Snapshot:
    """Read what the run folder shows now."""
    run, record = view.run, view.record
    attempts = run.attempts()
    attempt = attempts[-1] if attempts else None
    plan = read_attempt_plan(run, attempt.number if attempt else 0)
    scheduler_lines = [
        line for path in sorted(run.path.glob("scheduler*.out")) for line in last_lines(path, 8)
    ]
    return Snapshot(
        time=time.time(),
        run=run.name,
        folder=str(run.path),
        state=view.state,
        message=record.message
        or explain_reason(view.infos)
        or _explain_silence(view)
        or _explain_ending(attempt),
        scheduler=record.scheduler,
        layout=record.layout,
        jobs=[_job_row(info) for info in view.infos]
        or [{"id": job.id, "group": job.group or ""} for job in record.jobs],
        attempt=attempt.number if attempt else None,
        earlier={item.number: _explain_attempt(item) for item in attempts[:-1]},
        world=plan.world if plan else None,
        exits=read_exits(attempt, plan.world) if attempt and plan else {},
        nodes=read_nodes(attempt, plan, num_lines) if attempt else [],
        outcome=record.outcome or (read_outcome(attempt) if attempt else None),
        scheduler_lines=scheduler_lines,
        num_hidden=0,
        exit_code=_exit_code(view),
    )


def _explain_silence(view: RunView) -> str:
    if view.record.state != records.SUBMITTED or view.infos:
        return ""
    return f"{view.record.scheduler} does not answer, or knows the job no more; last lines below"


def _explain_ending(attempt: AttemptFolder | None) -> str:
    """Of a run that is about to end, or to start again."""
    stop = read_stop(attempt) if attempt else None
    return f"ending: {stop['reason']}" if stop else ""


def _explain_attempt(attempt: AttemptFolder) -> str:
    outcome, stop = read_outcome(attempt), read_stop(attempt)
    if outcome is not None:
        return outcome.reason
    return str(stop["reason"]) if stop else "ended without a word: requeued, or its host was lost"


def _job_row(info: JobInfo) -> dict[str, str]:
    facts = {"id": info.id, "state": info.word, "nodes": info.nodes}
    if info.state is not JobState.RUNNING:  # Slurm keeps why it waited before
        facts["reason"] = info.reason
    if info.state is JobState.PENDING and info.start[:1].isdigit():
        facts["start"] = f"expected {info.start}"
    return {key: value for key, value in facts.items() if value}


def _exit_code(view: RunView) -> int:
    if view.record.state == records.REFUSED:
        return FAILED
    if view.record.state == records.ENDED:
        return OK if view.record.verdict == "COMPLETED" else FAILED
    if explain_reason(view.infos):
        return NEVER_STARTS
    return NOT_KNOWN if view.state == "UNKNOWN" else OK


def read_nodes(attempt: AttemptFolder, plan: Plan | None, num_lines: int) -> list[NodeView]:
    """Every node that has left a file."""
    ranks: dict[str, str] = {}
    order: dict[str, int] = {}
    if plan is not None:
        for number, name in read_node_names(attempt, plan).items():
            held = plan.node(number).ranks
            order[name] = number
            ranks[name] = str(held[0]) if len(held) == 1 else f"{held[0]}-{held[-1]}"
    names = {path.stem for kind in KINDS for path in attempt.path.glob(f"*.{kind}")}
    return [
        NodeView(
            name=name,
            ranks=ranks.get(name, ""),
            out=last_lines(attempt.node_log(name, "out"), num_lines),
            err=last_lines(attempt.node_log(name, "err"), num_lines),
            gpu=last_lines(attempt.node_log(name, "gpu"), num_lines),
        )
        for name in sorted(names, key=lambda name: (order.get(name, len(order)), name))
    ]


def shorten(snapshot: Snapshot) -> Snapshot:
    """On a large run only the nodes that matter most: the culprit's, the first, and the last."""
    if len(snapshot.nodes) <= MANY_NODES:
        return snapshot
    culprit = snapshot.outcome.culprit_node if snapshot.outcome else None
    ends = {snapshot.nodes[0].name, snapshot.nodes[-1].name}
    failed = [x.node for x in snapshot.exits.values() if x.code != 0 and not x.stopped]
    wanted = {culprit, *ends, *failed[:MANY_NODES]}
    return replace(
        snapshot,
        nodes=[node for node in snapshot.nodes if node.name in wanted],
        num_hidden=sum(node.name not in wanted for node in snapshot.nodes),
    )


def _count_ends(snapshot: Snapshot) -> str:
    """`: 1 failed, 5 stopped, 2 left no exit`."""
    exits = snapshot.exits.values()
    counts = {
        "ended well": sum(item.code == 0 for item in exits),
        "failed": sum(item.code != 0 and not item.stopped for item in exits),
        "stopped": sum(item.code != 0 and item.stopped for item in exits),
    }
    if snapshot.outcome is not None and snapshot.world:
        counts["left no exit"] = snapshot.world - len(exits)
    words = [f"{count} {word}" for word, count in counts.items() if count]
    return f": {', '.join(words)}" if words else ""


def render(snapshot: Snapshot) -> str:
    """As text for a terminal."""
    lines = [f"{snapshot.run}  {snapshot.state}"]
    if snapshot.message:
        lines.append(f"  {clean(snapshot.message)}")
    for job in snapshot.jobs:
        lines.append("  job " + "  ".join(value for value in job.values() if value))
    if snapshot.world:
        start = f"attempt {snapshot.attempt}, " if snapshot.attempt is not None else ""
        lines.append(f"  {start}{snapshot.world} ranks{_count_ends(snapshot)}")
    for number, why in snapshot.earlier.items():
        lines.append(f"  attempt {number} ended: {clean(why)}")
    lines.append(f"  files {snapshot.folder}")
    for node in snapshot.nodes:
        lines.append(f"{node.name}" + (f"  (ranks {node.ranks})" if node.ranks else ""))
        for kind, shown in (("out", node.out), ("err", node.err), ("gpu", node.gpu)):
            lines += [f"  {kind}  {line}" for line in shown]
    if snapshot.num_hidden:
        lines.append(f"and {snapshot.num_hidden} more nodes; --all shows them")
    blames_no_rank = snapshot.outcome is not None and snapshot.outcome.culprit_rank is None
    if snapshot.scheduler_lines and (not snapshot.nodes or (blames_no_rank and snapshot.exit_code)):
        lines.append("batch script")
        lines += [f"  {line}" for line in snapshot.scheduler_lines]
    return "\n".join(lines)
