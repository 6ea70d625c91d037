"""Rules for a job that is starting, writing a checkpoint, or stalled, and for the rank or node that
holds it up. Pure.

A collective ends only when all ranks have joined it, so the others wait for the rank, node or GPU
that does something different. `find_suspect` tries several signs, the surest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_core.facts.catalogue.remedies import do
from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Evidence, NotKnown, Sure
from varuna_core.facts.remedy import Action, Remedy, Target
from vjob.jobs.monitor.log_lines.errors import first_root
from vjob.jobs.monitor.model.snapshot import Gpu, Health, Node, Progress, Rank, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    cancel,
    conclude,
    find_life,
    find_node,
    find_started,
    find_step_line,
    hang_values,
    is_live,
    is_plain_job,
    list_alive,
    rows_in,
    show,
    step_values,
)
from vjob.jobs.monitor.rules.pace import (
    FLOOR_S,
    MANY_STEPS,
    find_phase,
    find_silence_s,
    find_silent_nodes,
    find_step_at,
    job_cause_limit_s,
    job_limit_s,
    phase_limit_s,
)

TELL_STEPS = Remedy(Action.SET, Target.PROGRESS, detail="to a pattern of lines about steps")
RESUBMIT_WITHOUT = Remedy(Action.EXCLUDE, Target.NODE, detail="and submit again")
SILENT_S = 150.0
"""Seconds without a heartbeat after which a node is silent: heartbeats come every few seconds, and
NFS may delay them by a minute."""
LOST_BEFORE_S = 10.0
"""Least seconds between a node's last heartbeat and the scheduler's `down` that confirm the
loss."""
IDLE, BUSY = 5.0, 90.0
"""Utilization of a GPU or a core, in per cent, up to which it is idle and from which it is busy."""
SPINS = 98.0
TRACE_LATE_S = 6.0
"""Seconds by which a rank's trace may lag, since traces are flushed every five seconds."""
MUCH_OUTPUT = 1000
"""Bytes of output that are more than a start-up message."""
FEW = 0.25
"""Largest fraction of the ranks or nodes that counts as the exception."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank or node that may hold up the others, and the evidence."""

    finding: Finding
    node: str = ""
    rank: int | None = None

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return self.finding.remedies


def find_suspect(snapshot: Snapshot) -> Suspect | None:
    """Return the suspect with the surest sign; None if there is none."""
    for look in (_stopped, _zombie, _silent_node, _in_kernel, _idle_node, _odd_cpu, _behind):
        suspect = look(snapshot)
        if suspect is not None:
            return suspect
    return None


def find_sure_suspect(snapshot: Snapshot) -> Suspect | None:
    return _stopped(snapshot) or _zombie(snapshot)


def find_gpu_state(snapshot: Snapshot) -> Finding | None:
    """Return a finding if all GPUs spin or all are idle; else None."""
    gpus = [gpu for node in snapshot.nodes for gpu in _gpus(node)]
    used = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    if not used:
        return None
    expected = snapshot.num_gpus or len(gpus)
    seen = (Evidence("GPU samples", Sure.MEASURED, seen=len(used), expected=expected),)
    if min(used) >= SPINS and all(_is_flat(gpu) for gpu in gpus):
        power = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
        watts = sum(power) / len(power) if power else NotKnown("no sample has the power")
        values = {"num_gpus": len(used), "watts_each": watts}
        return Finding("gpus spin", values=values, evidence=seen)
    if max(used) <= IDLE:
        return Finding("gpus idle", values={"num_gpus": len(used)}, evidence=seen)
    return None


def _suspect_ranks(rule: str, found: Sequence[Rank], remedies: Sequence[Remedy] = ()) -> Suspect:
    return Suspect(
        finding=Finding(
            rule,
            values={
                "ranks": [rank.rank for rank in found],
                "nodes": list(dict.fromkeys(rank.node for rank in found if rank.node)),
            },
            evidence=(Evidence("beat", Sure.MEASURED, seen=len(found)),),
            remedies=tuple(remedies),
        ),
        node=found[0].node,
        rank=found[0].rank,
    )


def _stopped(snapshot: Snapshot) -> Suspect | None:
    found = [rank for rank in list_alive(snapshot) if rank.process_state in ("T", "t")]
    if not found:
        return None
    beside = [rank for rank in found if rank.node == found[0].node]
    pids = " ".join(str(rank.pid or "PID") for rank in beside)
    go_on = do(f"`kill -CONT {pids}` on {found[0].node or 'its node'}")
    return _suspect_ranks("stopped ranks", found, [go_on])


def _zombie(snapshot: Snapshot) -> Suspect | None:
    found = [rank for rank in list_alive(snapshot) if rank.process_state in ("Z", "X")]
    return _suspect_ranks("dead ranks", found) if found else None


def _silent_node(snapshot: Snapshot) -> Suspect | None:
    lost = list(snapshot.scheduler.lost_nodes)
    silent = find_silent_nodes(snapshot, SILENT_S)
    if lost:
        values: dict[str, Any] = {"node": lost[0], "word": snapshot.scheduler.lost_nodes[lost[0]]}
        return Suspect(finding=Finding("node called down", values=values), node=lost[0])
    if not silent:
        return None
    if len(silent) == len(snapshot.nodes) and len(silent) > 1:
        values = {"silence_s": min(silent.values())}
        return Suspect(finding=Finding("all nodes silent", values=values))
    names = sorted(silent, key=lambda name: -silent[name])
    up = Remedy(
        Action.INSPECT, Target.NODE_STATE, names[0], detail=f"to see whether {names[0]} is up"
    )
    values = {"nodes": names, "silence_s": silent[names[0]]}
    return Suspect(finding=Finding("silent node", values=values, remedies=(up,)), node=names[0])


def _in_kernel(snapshot: Snapshot) -> Suspect | None:
    alive = list_alive(snapshot)
    found = [rank for rank in alive if rank.process_state == "D"]
    if not _is_few(len(found), len(alive)):
        return None
    look = do(f"look at the mounts and `dmesg` of {found[0].node or 'its node'}")
    return _suspect_ranks("ranks in the kernel", found, [look])


def _idle_node(snapshot: Snapshot) -> Suspect | None:
    """Return the few nodes whose GPUs are idle while all others are busy, or a single such GPU."""
    usage = {
        node.name: [gpu.utilization for gpu in _gpus(node) if gpu.utilization is not None]
        for node in snapshot.nodes
    }
    usage = {name: used for name, used in usage.items() if used}
    idle = [name for name, used in usage.items() if max(used) <= IDLE]
    busy = [name for name, used in usage.items() if min(used) >= BUSY]
    if idle and len(idle) + len(busy) == len(usage) and _is_few(len(idle), len(usage)):
        values: dict[str, Any] = {"nodes": idle, "num_busy": len(busy)}
        return Suspect(finding=Finding("idle node", values=values), node=idle[0])
    cards = [(node, gpu) for node in snapshot.nodes for gpu in _gpus(node)]
    cards = [(node, gpu) for node, gpu in cards if gpu.utilization is not None]
    lazy = [(node, gpu) for node, gpu in cards if (gpu.utilization or 0) <= IDLE]
    keen = [gpu for _, gpu in cards if (gpu.utilization or 0) >= BUSY]
    if len(lazy) == 1 and len(keen) == len(cards) - 1 and len(cards) > 2:
        node, gpu = lazy[0]
        values = {"gpu": gpu.index, "node": node.name, "num_busy": len(keen)}
        return Suspect(finding=Finding("idle gpu", values=values), node=node.name)
    return None


def _odd_cpu(snapshot: Snapshot) -> Suspect | None:
    """Return the rank that computes while all others wait, or waits while all others compute."""
    ranks = [rank for rank in list_alive(snapshot) if rank.cpu_percent is not None]
    keen = [rank for rank in ranks if (rank.cpu_percent or 0) >= 50]
    lazy = [rank for rank in ranks if (rank.cpu_percent or 0) <= IDLE]
    if len(keen) + len(lazy) != len(ranks) or len(ranks) < 3:
        return None
    for few, computes in ((keen, True), (lazy, False)):
        if len(few) == 1:
            rank, node = few[0].rank, few[0].node
            values = {"rank": rank, "node": node, "num_others": len(ranks) - 1}
            finding = Finding("odd rank", values={**values, "computes": computes})
            return Suspect(finding=finding, node=node, rank=rank)
    return None


def _behind(snapshot: Snapshot) -> Suspect | None:
    """Return the few ranks whose last step is behind that of the others."""
    ranks = [rank for rank in list_alive(snapshot) if rank.step is not None]
    last = max((rank.step or 0 for rank in ranks), default=0)
    found = [
        rank for rank in ranks if (last - (rank.step or 0)) * (rank.step_s or 0.0) > TRACE_LATE_S
    ]
    if not _is_few(len(found), len(ranks)):
        return None
    first = min(found, key=lambda rank: (rank.step or 0, rank.rank))
    values = {
        "ranks": [rank.rank for rank in found],
        "nodes": list(dict.fromkeys(rank.node for rank in found if rank.node)),
        "step": first.step,
        "others_step": last,
    }
    finding = Finding(
        "ranks behind", values=values, evidence=(Evidence("steps of each rank", Sure.MEASURED),)
    )
    return Suspect(finding=finding, node=first.node, rank=first.rank)


def _gpus(node: Node) -> Sequence[Gpu]:
    return [gpu for gpu in node.gpus if gpu.index != "cpu"]


def _is_flat(gpu: Gpu) -> bool:
    known = [value for value in gpu.history if value is not None]
    return not known or min(known[-5:]) >= SPINS


def _is_few(count: int, total: int) -> bool:
    """Return True if `count` is at least one and a small part of `total`."""
    return 0 < count <= max(1, FEW * total) and count < total


CONTAINER_S = 3600.0
RENDEZVOUS_S = 1200.0
WARM_UP_S = 1200.0
"""Limits of a start's phases in seconds; agents end a job themselves at shorter limits of the
conf."""
WARM_UP_MOST_S = 3600.0
"""Limit of warm-up in seconds while the ranks continue to write to their logs."""
QUIET_S = 300.0
"""Seconds without output after which the logs are quiet."""
IMPORTS_S = 60.0
"""Seconds for which ranks with busy processors may be importing."""
START_S = 300.0
"""Seconds for which ranks without output and load may be importing and connecting."""
HINT_S = 60.0
"""Seconds without a known step after which the conf's key `progress` is suggested."""
SURE_START_S = 60.0
"""Seconds for which a rank may be stopped before the first step."""


def lost_node(snapshot: Snapshot) -> Verdict | None:
    """Return DEAD if the scheduler reports a node as down and the node's heartbeats have ended."""
    if not is_live(snapshot) or not snapshot.scheduler.lost_nodes:
        return None
    for name, word in snapshot.scheduler.lost_nodes.items():
        node = find_node(snapshot, name)
        beat = node.beat_at if node is not None else None
        silence = snapshot.now - beat if beat is not None else None
        if silence is not None and silence < SILENT_S and not _fell_silent(snapshot, name, beat):
            continue  # the controller alone does not reach it, or it came back
        unknown = NotKnown("the node left no heartbeat")
        return conclude(
            Health.DEAD,
            "lost node",
            {"node": name, "word": word, "silence_s": unknown if silence is None else silence},
            evidence=(Evidence(snapshot.scheduler.name, Sure.REPORTED, text=word),),
            details=_list_details(snapshot, goes_on=True),
            remedies=(RESUBMIT_WITHOUT, *cancel(snapshot)),
            node=name,
        )
    return None


def _fell_silent(snapshot: Snapshot, name: str, beat: float | None) -> bool:
    """Return True if the last heartbeat was well before the scheduler reported the node as down."""
    states = [one for one in snapshot.scheduler.node_states if one.name == name]
    since = states[0].since if states else None
    return since is not None and beat is not None and since - beat > LOST_BEFORE_S


def stopped_ranks(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a remark about stopped ranks while the job does not stall yet."""
    suspect = _stopped(snapshot)
    if suspect is not None and is_live(snapshot) and held_up(snapshot) is None:
        yield suspect.finding


def held_up(snapshot: Snapshot) -> Verdict | None:
    """Return STALLED if a rank is stopped or dead and a step is already late."""
    suspect = find_sure_suspect(snapshot)
    if suspect is None or not is_live(snapshot):
        return None
    silence = find_silence_s(snapshot)
    if silence is None:
        started = find_started(snapshot)
        silence = snapshot.now - started if started is not None else 0.0
        limit = SURE_START_S
    else:
        limit = job_cause_limit_s(snapshot)
    if silence <= limit:
        return None
    return conclude(
        Health.STALLED,
        "held up",
        {
            "suspect": suspect.finding,
            "silence_s": silence,
            "limit_s": limit,
            **step_values(snapshot),
        },
        lines=(find_step_line(snapshot),),
        details=_list_details(snapshot),
        remedies=(*suspect.remedies, *show(snapshot, Target.STACKS)),
        node=suspect.node,
        rank=suspect.rank,
    )


def hangs(snapshot: Snapshot) -> Verdict | None:
    """Return STALLED if the agents found a hang, with the rank or node that they blame."""
    hang = snapshot.hang
    if hang is None or hang.until is not None or not is_live(snapshot):
        return None
    suspect = find_sure_suspect(snapshot)
    return conclude(
        Health.STALLED,
        "hangs",
        {**hang_values(snapshot, hang), **step_values(snapshot)},
        evidence=(Evidence("agents", Sure.MEASURED, since=hang.since, until=hang.seen_at),),
        details=_list_details(snapshot),
        remedies=(*(suspect.remedies if suspect else ()), *show(snapshot, Target.STACKS)),
        node=hang.node,
        rank=hang.rank,
    )


def in_phase(snapshot: Snapshot) -> Verdict | None:
    """Return CHECKPOINTING or HEALTHY during a checkpoint or an evaluation, and STALLED if it takes
    too long."""
    phase = find_phase(snapshot) if is_live(snapshot) else None
    if phase is None:
        return None
    age = snapshot.now - phase.since if phase.since is not None else None
    limit = phase_limit_s(snapshot, phase.name)
    values = {
        "phase": phase.name,
        "age_s": age if age is not None else NotKnown("no line shows when the phase began"),
        "limit_s": limit,
        "longest_s": snapshot.phases_s.get(phase.name) or NotKnown("no such phase came before"),
        **step_values(snapshot),
    }
    if age is not None and age > limit:
        suspect = find_suspect(snapshot)
        if suspect is not None:
            values["suspect"] = suspect.finding
        return conclude(
            Health.STALLED,
            "in phase",
            {**values, "is_late": True},
            lines=(phase.line,),
            details=(Finding("longest phase", values=values), *_list_details(snapshot)),
            remedies=(*(suspect.remedies if suspect else ()), *show(snapshot, Target.STACKS)),
            node=suspect.node if suspect is not None else "",
            rank=suspect.rank if suspect is not None else None,
        )
    health = Health.CHECKPOINTING if phase.name == "checkpoint" else Health.HEALTHY
    return conclude(health, "in phase", {**values, "is_late": False}, lines=(phase.line,))


def stalled(snapshot: Snapshot, floor_s: float = FLOOR_S) -> Verdict | None:
    """Return STALLED if no step has been done for longer than the job's own steps allow."""
    silence = find_silence_s(snapshot)
    if silence is None or not is_live(snapshot):
        return None
    limit = job_limit_s(snapshot, floor_s)
    if silence <= limit:
        return None
    suspect = find_suspect(snapshot)
    gpus = find_gpu_state(snapshot)
    root = first_root(snapshot.errors) or find_step_line(snapshot)
    who = suspect.finding if suspect is not None else gpus
    values = {"silence_s": silence, "limit_s": limit, **step_values(snapshot)}
    beside = (gpus,) if suspect is not None and gpus is not None else ()
    return conclude(
        Health.STALLED,
        "stalled",
        {**values, "suspect": who} if who is not None else values,
        lines=(root,),
        evidence=gpus.evidence if gpus is not None else (),
        details=(*beside, *_list_details(snapshot)),
        remedies=(
            *(suspect.remedies if suspect is not None else ()),
            *show(snapshot, Target.STACKS, Target.ERRORS),
        ),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def stands(snapshot: Snapshot, floor_s: float = FLOOR_S) -> Verdict | None:
    """Return STALLED if some ranks do no steps while others continue without collectives."""
    ranks = [rank for rank in list_alive(snapshot) if rank.step_at is not None]
    newest = max((rank.step_at or 0.0 for rank in ranks), default=0.0)
    progress = snapshot.progress
    found = [
        rank
        for rank in ranks
        if newest - (rank.step_at or 0.0) > _standing_limit_s(snapshot, rank, floor_s)
        if progress is None or progress.done is None or not _is_through(rank, progress)
    ]
    if not found or len(found) == len(ranks) or not is_live(snapshot):
        return None
    first = min(found, key=lambda rank: (rank.step or 0, rank.rank))
    suspect = find_sure_suspect(snapshot)
    return conclude(
        Health.STALLED,
        "stands",
        {
            "ranks": [rank.rank for rank in found],
            "nodes": list(dict.fromkeys(rank.node for rank in found if rank.node)),
            "step": first.step,
            "others_step": max(rank.step or 0 for rank in ranks),
            "silence_s": snapshot.now - (first.step_at or 0.0),
            "limit_s": _standing_limit_s(snapshot, first, floor_s),
        },
        evidence=(Evidence("steps of each rank", Sure.MEASURED, seen=len(ranks)),),
        remedies=(*(suspect.remedies if suspect else ()), *show(snapshot, Target.STACKS)),
        node=first.node,
        rank=first.rank,
    )


def _standing_limit_s(snapshot: Snapshot, rank: Rank, floor_s: float) -> float:
    if rank.process_state in ("T", "t", "Z", "X"):
        return job_cause_limit_s(snapshot)
    return max(job_limit_s(snapshot, floor_s), MANY_STEPS * (rank.step_s or 0.0))


def _is_through(rank: Rank, progress: Progress) -> bool:
    """Return True if the rank has done all of its steps and waits for the others."""
    before = progress.step - (progress.done or 0)
    return bool(progress.num_steps) and before + (rank.step or 0) >= (progress.num_steps or 0)


def starting(snapshot: Snapshot) -> Verdict | None:
    """Return STARTING while nodes boot, prepare the container or wait for each other, or ranks
    import and connect; STALLED if that takes too long."""
    if rows_in(snapshot, ("CONFIGURING",)) and snapshot.attempt is None:
        return conclude(Health.STARTING, "starting", {"state": "configuring"})
    if not _is_before_steps(snapshot):
        return None
    phase, values, limit, begun = _start_phase(snapshot)
    age = snapshot.now - begun if begun is not None else None
    values["age_s"] = age if age is not None else NotKnown("its start is not known")
    if age is not None and age > limit:
        return _late_start(snapshot, {**values, "limit_s": limit})
    return conclude(
        Health.STARTING, "starting", values, phase=phase, details=_list_start_details(snapshot)
    )


def _is_before_steps(snapshot: Snapshot) -> bool:
    if not is_live(snapshot) and not rows_in(snapshot, ("RUNNING",)):
        return False
    return find_step_at(snapshot) is None and snapshot.progress is None


_STEP_CREATION = re.compile(r"(?i)^srun: .*\bstep creat(?:ion|ed)\b")
"""Line of srun about the step of the nodes' agents: that it has to wait, or that it was created."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Signs of activity of ranks while no step is known: output, busy GPUs or processors, and their
    age."""

    num_bytes: int
    """Size of the output of all ranks."""
    quiet_s: float | None
    """Seconds since the last output; None if there was none."""
    is_busy: bool
    """True if GPUs or processors of the ranks are busy."""
    age_s: float | None
    """Seconds since the ranks were started."""

    @property
    def are_running(self) -> bool:
        """True once the ranks do more than import and connect."""
        if self.num_bytes or self.age_s is None:
            return True
        return self.age_s > (IMPORTS_S if self.is_busy else START_S)


def compute_signs(snapshot: Snapshot) -> Signs:
    begun = find_started(snapshot)
    written = [node.log_at for node in snapshot.nodes if node.log_at is not None]
    num_bytes = sum(node.sizes.get(k, 0) for node in snapshot.nodes for k in ("out", "err"))
    return Signs(
        num_bytes=num_bytes,
        quiet_s=max(snapshot.now - max(written), 0.0) if written else None,
        is_busy=_is_working(snapshot),
        age_s=None if begun is None else snapshot.now - begun,
    )


def running(snapshot: Snapshot) -> Verdict | None:
    """Return RUNNING if the ranks run and no step is known; STALLED once they show no other sign of
    life."""
    if not _is_before_steps(snapshot) or _start_phase(snapshot)[0] != "warm-up":
        return None
    signs, is_told = compute_signs(snapshot), bool(snapshot.info)
    age, is_plain = signs.age_s or 0.0, is_plain_job(snapshot)
    if age > WARM_UP_S and not is_plain:
        is_late = signs.quiet_s is None or signs.quiet_s > QUIET_S
        is_late = is_late or (is_told and age > WARM_UP_MOST_S)
        if is_late and not signs.is_busy:
            quiet_s = signs.quiet_s if signs.quiet_s is not None else age
            values = {"state": "late warm-up", "age_s": age, "quiet_s": quiet_s}
            return _late_start(snapshot, values)
    elif not is_plain and (is_told or not signs.are_running):  # a built-in one prints its steps
        return None
    num_out = sum(node.sizes.get("out", 0) for node in snapshot.nodes)  # not warnings of imports
    is_early = age < HINT_S and num_out < MUCH_OUTPUT
    reason = (
        "no line of the program is known to report a step"
        if signs.num_bytes
        else "it printed nothing"
    )
    if signs.num_bytes and is_early:
        reason = "no step has been seen yet"
    steps = NotKnown(snapshot.doubt.value if snapshot.doubt is not None else reason)
    hint = (TELL_STEPS,) if signs.num_bytes else tuple(show(snapshot, Target.STACKS))
    return conclude(
        Health.RUNNING,
        "running",
        {
            "age_s": NotKnown("its start is not known") if signs.age_s is None else age,
            "steps": steps,
            "num_bytes": signs.num_bytes,
            "quiet_s": NotKnown("no output") if signs.quiet_s is None else signs.quiet_s,
            "is_busy": signs.is_busy,
        },
        details=_list_start_details(snapshot),
        remedies=() if is_told or is_early else hint,
    )


def _start_phase(snapshot: Snapshot) -> tuple[str, dict[str, Any], float, float | None]:
    """Return the start phase's name, its sentence's values, its limit, and when it began."""
    begun = find_started(snapshot)
    warm_up = "warm-up", {"state": "warm-up"}, WARM_UP_S, begun
    if snapshot.went_at is not None or is_plain_job(snapshot):  # that may be no training at all
        return warm_up
    phases = {node.name: node.phase for node in snapshot.nodes}
    preparing = [name for name, phase in phases.items() if phase == "container"]
    if preparing:
        return "container", {"state": "container", "nodes": preparing}, CONTAINER_S, begun
    if any(phase in ("running", "done") for phase in phases.values()) or snapshot.ranks:
        return warm_up
    if not any(phases.values()) and any(node.log_at is not None for node in snapshot.nodes):
        return warm_up
    missing = (snapshot.num_nodes or 0) - sum(1 for phase in phases.values() if phase)
    values = {"state": "rendezvous", "missing": max(missing, 0), "num_nodes": snapshot.num_nodes}
    created = [line for line in snapshot.scheduler_lines if _STEP_CREATION.search(line)]
    values["waits_for_step"] = bool(created) and "busy" in created[-1]
    return "rendezvous", values, RENDEZVOUS_S, begun


def _late_start(snapshot: Snapshot, values: dict[str, Any]) -> Verdict:
    suspect = find_suspect(snapshot)
    if suspect is not None:
        values = {**values, "suspect": suspect.finding}
    return conclude(
        Health.STALLED,
        "starting",
        {**values, "is_late": True},
        details=_list_start_details(snapshot),
        remedies=show(snapshot, Target.STACKS, Target.LOGS),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def _is_working(snapshot: Snapshot) -> bool:
    """Return True if GPUs or ranks compute, unless all GPUs spin at a constant 100 %."""
    used = [
        gpu.utilization
        for node in snapshot.nodes
        for gpu in node.gpus
        if gpu.index != "cpu" and gpu.utilization is not None
    ]
    if used:
        return max(used) > 5 and find_gpu_state(snapshot) is None
    return any((rank.cpu_percent or 0) > 20 for rank in snapshot.ranks)


def _list_details(snapshot: Snapshot, *, goes_on: bool = False) -> tuple[Finding, ...]:
    details = []
    life = find_life(snapshot)
    if life is not None:
        details.append(Finding("last life", values={"age_s": snapshot.now - life}))
    if snapshot.checkpoint_step is not None:
        values = {"step": snapshot.checkpoint_step, "goes_on": goes_on}
        details.append(Finding("checkpoint", values=values))
    return tuple(details)


def _list_start_details(snapshot: Snapshot) -> tuple[Finding, ...]:
    by_phase: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.phase:
            by_phase[node.phase] = by_phase.get(node.phase, 0) + 1
    return (Finding("nodes by phase", values=by_phase),) if by_phase else ()
