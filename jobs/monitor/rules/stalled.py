"""Rules for a job that starts, is in a checkpoint, or stalls; and who holds it up. Pure.

A collective ends when all ranks have come, so a rank, node or GPU that does something else than all
others is the one they wait for. `find_suspect` tries several signs, the surest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.log_lines.errors import first_root
from vjob.jobs.monitor.model.snapshot import Gpu, Health, Node, Rank, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    advise,
    find_life,
    find_started,
    find_step_line,
    format_names,
    format_rank,
    format_step,
    is_live,
    is_plain_job,
    join,
    list_alive,
    rows_in,
)
from vjob.jobs.monitor.rules.pace import (
    FLOOR_S,
    find_phase,
    find_silence_s,
    find_step_at,
    job_cause_limit_s,
    job_limit_s,
    phase_limit_s,
)

SILENT_S = 150.0
"""A node's beats come every few seconds, and NFS may hold them back for a minute."""
IDLE, BUSY = 5.0, 90.0
"""Per cent of a GPU or a core."""
SPINS = 98.0
TRACE_LATE_S = 6.0
"""A trace is written out every five seconds, and by a rank that goes on alone."""
MUCH_OUTPUT = 1000
"""Bytes of standard output: more than a greeting."""
FEW = 0.25
"""At most this share of the ranks is the odd part."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank or node that may hold up the others, and the evidence."""

    reason: str
    node: str = ""
    rank: int | None = None
    remedy: str = ""


def find_suspect(snapshot: Snapshot) -> Suspect | None:
    """The suspect with the surest sign."""
    for look in (_stopped, _zombie, _silent_node, _in_kernel, _idle_node, _odd_cpu, _behind):
        suspect = look(snapshot)
        if suspect is not None:
            return suspect
    return None


def find_sure_suspect(snapshot: Snapshot) -> Suspect | None:
    return _stopped(snapshot) or _zombie(snapshot)


def describe_gpus(snapshot: Snapshot) -> str:
    """State of all GPUs together; empty where it tells nothing."""
    gpus = [gpu for node in snapshot.nodes for gpu in _gpus(node)]
    used = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    if not used:
        return ""
    if min(used) >= SPINS and all(_is_flat(gpu) for gpu in gpus):
        power = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
        watts = f", {sum(power) / len(power):.0f} W each" if power else ""
        return (
            f"all {len(used)} GPUs are at 100 %{watts} and no step ends: they spin in a collective"
        )
    if max(used) <= IDLE:
        return (
            f"all {len(used)} GPUs are idle: the ranks wait on the host, for data or for a rank "
            "that crashed"
        )
    return ""


def _stopped(snapshot: Snapshot) -> Suspect | None:
    found = [rank for rank in list_alive(snapshot) if rank.process_state in ("T", "t")]
    if not found:
        return None
    return Suspect(
        reason=f"{_format_ranks(found)} {_is_or_are(found)} stopped (SIGSTOP, or a debugger)",
        node=found[0].node,
        rank=found[0].rank,
        remedy=f"`kill -CONT {found[0].pid or 'PID'}` on {found[0].node or 'its node'}",
    )


def _zombie(snapshot: Snapshot) -> Suspect | None:
    found = [rank for rank in list_alive(snapshot) if rank.process_state in ("Z", "X")]
    if not found:
        return None
    return Suspect(
        reason=f"{_format_ranks(found)} {_is_or_are(found)} dead and not collected yet",
        node=found[0].node,
        rank=found[0].rank,
    )


def _silent_node(snapshot: Snapshot) -> Suspect | None:
    lost = list(snapshot.scheduler.lost_nodes)
    silent = {
        node.name: snapshot.now - node.beat_at
        for node in snapshot.nodes
        if node.beat_at is not None and node.phase != "done"
        if snapshot.now - node.beat_at > SILENT_S
    }
    if lost:
        word = snapshot.scheduler.lost_nodes[lost[0]]
        return Suspect(reason=f"the scheduler calls {lost[0]} {word}", node=lost[0])
    if not silent:
        return None
    if len(silent) == len(snapshot.nodes) and len(silent) > 1:
        return Suspect(
            reason=f"no node gave a sign of life for {format_duration(min(silent.values()))}: "
            "the file server may hang, or the job is gone"
        )
    names = sorted(silent, key=lambda name: -silent[name])
    return Suspect(
        reason=f"no sign of life from {format_names(names)} "
        f"for {format_duration(silent[names[0]])}",
        node=names[0],
        remedy=f"look whether {names[0]} is up: `scontrol show node {names[0]}`",
    )


def _in_kernel(snapshot: Snapshot) -> Suspect | None:
    alive = list_alive(snapshot)
    found = [rank for rank in alive if rank.process_state == "D"]
    if not _is_few(len(found), len(alive)):
        return None
    return Suspect(
        reason=f"{_format_ranks(found)} {_is_or_are(found)} stuck in the kernel (state D: a disk, "
        "a dead mount, a driver)",
        node=found[0].node,
        rank=found[0].rank,
        remedy=f"look at the mounts and `dmesg` of {found[0].node or 'its node'}",
    )


def _idle_node(snapshot: Snapshot) -> Suspect | None:
    """One node's GPUs idle while the others spin, or one GPU of them all."""
    usage = {
        node.name: [gpu.utilization for gpu in _gpus(node) if gpu.utilization is not None]
        for node in snapshot.nodes
    }
    usage = {name: used for name, used in usage.items() if used}
    idle = [name for name, used in usage.items() if max(used) <= IDLE]
    busy = [name for name, used in usage.items() if min(used) >= BUSY]
    if idle and len(idle) + len(busy) == len(usage) and _is_few(len(idle), len(usage)):
        return Suspect(
            reason=f"the GPUs of {format_names(idle)} are idle while those of {len(busy)} other "
            "node(s) are at 100 %",
            node=idle[0],
        )
    cards = [(node, gpu) for node in snapshot.nodes for gpu in _gpus(node)]
    cards = [(node, gpu) for node, gpu in cards if gpu.utilization is not None]
    lazy = [(node, gpu) for node, gpu in cards if (gpu.utilization or 0) <= IDLE]
    keen = [gpu for _, gpu in cards if (gpu.utilization or 0) >= BUSY]
    if len(lazy) == 1 and len(keen) == len(cards) - 1 and len(cards) > 2:
        node, gpu = lazy[0]
        return Suspect(
            reason=f"GPU {gpu.index} of {node.name} is idle while {len(keen)} others are at 100 %",
            node=node.name,
        )
    return None


def _odd_cpu(snapshot: Snapshot) -> Suspect | None:
    """One rank computes while all others wait, or waits while all others spin."""
    ranks = [rank for rank in list_alive(snapshot) if rank.cpu_percent is not None]
    keen = [rank for rank in ranks if (rank.cpu_percent or 0) >= 50]
    lazy = [rank for rank in ranks if (rank.cpu_percent or 0) <= IDLE]
    if len(keen) + len(lazy) != len(ranks) or len(ranks) < 3:
        return None
    for few, what, others in (
        (keen, "computes", "wait"),
        (lazy, "does nothing", "are busy"),
    ):
        if len(few) == 1:
            return Suspect(
                reason=f"{format_rank(few[0].rank, few[0].node)} {what} while all "
                f"{len(ranks) - 1} others {others}",
                node=few[0].node,
                rank=few[0].rank,
            )
    return None


def _behind(snapshot: Snapshot) -> Suspect | None:
    """Ranks whose trace ends before that of the others."""
    ranks = [rank for rank in list_alive(snapshot) if rank.step is not None]
    last = max((rank.step or 0 for rank in ranks), default=0)
    found = [
        rank for rank in ranks if (last - (rank.step or 0)) * (rank.step_s or 0.0) > TRACE_LATE_S
    ]
    if not _is_few(len(found), len(ranks)):
        return None
    first = min(found, key=lambda rank: (rank.step or 0, rank.rank))
    return Suspect(
        reason=f"the trace of {_format_ranks(found)} ends at step {first.step}, those of the "
        f"others at {last}",
        node=first.node,
        rank=first.rank,
    )


def _gpus(node: Node) -> Sequence[Gpu]:
    return [gpu for gpu in node.gpus if gpu.index != "cpu"]


def _is_flat(gpu: Gpu) -> bool:
    known = [value for value in gpu.history if value is not None]
    return not known or min(known[-5:]) >= SPINS


def _is_few(count: int, total: int) -> bool:
    """Some, and clearly not most."""
    return 0 < count <= max(1, FEW * total) and count < total


def _is_or_are(ranks: Sequence[Rank]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _format_ranks(ranks: Sequence[Rank]) -> str:
    if len(ranks) == 1:
        return format_rank(ranks[0].rank, ranks[0].node)
    nodes = format_names(dict.fromkeys(rank.node for rank in ranks if rank.node))
    where = f" on {nodes}" if nodes else ""
    return f"ranks {format_names(str(rank.rank) for rank in ranks)}{where}"


CONTAINER_S = 3600.0
RENDEZVOUS_S = 1200.0
WARM_UP_S = 1200.0
"""Limits of the phases of a start; agents end a job themselves at shorter ones, as conf says."""
WARM_UP_MOST_S = 3600.0
"""Of warm-up, where the ranks go on writing to their logs."""
QUIET_S = 300.0
"""A log that was not written to for so long is quiet."""
SURE_START_S = 60.0
"""A rank may be stopped so long before the first step."""


def lost_node(snapshot: Snapshot) -> Verdict | None:
    """The scheduler calls a node of the job down, and its beats ended too."""
    if not is_live(snapshot) or not snapshot.scheduler.lost_nodes:
        return None
    for name, word in snapshot.scheduler.lost_nodes.items():
        node = next((item for item in snapshot.nodes if item.name == name), None)
        beat = node.beat_at if node is not None else None
        silence = snapshot.now - beat if beat is not None else None
        if silence is not None and silence < SILENT_S:
            continue  # the controller alone does not reach it, or it came back
        quiet = f", no sign of life for {format_duration(silence)}" if silence is not None else ""
        return Verdict(
            health=Health.DEAD,
            rule="lost node",
            reason=f"node {name} was lost: the scheduler calls it {word}{quiet}",
            facts=_facts(snapshot),
            advice=join(
                ["submit again without it (cluster.exclude)", advise(snapshot, "cancel JOB")], "; "
            ),
            node=name,
        )
    return None


def held_up(snapshot: Snapshot) -> Verdict | None:
    """A rank is stopped or dead, and a step is late already."""
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
    return Verdict(
        health=Health.STALLED,
        rule="held up",
        reason=f"{suspect.reason}; no step for {format_duration(silence)} "
        f"(limit {format_duration(limit)}), after {format_step(snapshot)}",
        evidence=tuple(x for x in (find_step_line(snapshot),) if x is not None),
        facts=_facts(snapshot),
        advice=join([suspect.remedy, advise(snapshot, "stacks JOB")], "; "),
        node=suspect.node,
        rank=suspect.rank,
    )


def in_phase(snapshot: Snapshot) -> Verdict | None:
    """A checkpoint or an evaluation, as long as it may take."""
    phase = find_phase(snapshot) if is_live(snapshot) else None
    if phase is None:
        return None
    age = snapshot.now - phase.since if phase.since is not None else None
    limit = phase_limit_s(snapshot, phase.name)
    longest = snapshot.phases_s.get(phase.name)
    usual = (
        f"the longest so far took {format_duration(longest)}" if longest else "the first of the run"
    )
    since = f" for {format_duration(age)}" if age is not None else ""
    if age is not None and age > limit:
        suspect = find_suspect(snapshot)
        who = f"; {suspect.reason}" if suspect is not None else ""
        return Verdict(
            health=Health.STALLED,
            rule="in phase",
            reason=f"in {_article(phase.name)}{since}, the limit is {format_duration(limit)}{who}",
            evidence=(phase.line,),
            facts=(usual, *_facts(snapshot)),
            advice=advise(snapshot, "stacks JOB"),
            node=suspect.node if suspect is not None else "",
            rank=suspect.rank if suspect is not None else None,
        )
    is_checkpoint = phase.name == "checkpoint"
    return Verdict(
        health=Health.CHECKPOINTING if is_checkpoint else Health.HEALTHY,
        rule="in phase",
        reason=f"in {_article(phase.name)}{since}, after {format_step(snapshot)}; {usual}",
        evidence=(phase.line,),
    )


def stalled(snapshot: Snapshot, floor_s: float = FLOOR_S) -> Verdict | None:
    """No step for longer than the job's own steps allow."""
    silence = find_silence_s(snapshot)
    if silence is None or not is_live(snapshot):
        return None
    limit = job_limit_s(snapshot, floor_s)
    if silence <= limit:
        return None
    suspect = find_suspect(snapshot)
    gpus = describe_gpus(snapshot)
    root = first_root(snapshot.errors) or find_step_line(snapshot)
    who = suspect.reason if suspect is not None else gpus
    facts = [fact for fact in (gpus if suspect is not None else "", *_facts(snapshot)) if fact]
    return Verdict(
        health=Health.STALLED,
        rule="stalled",
        reason=f"no step for {format_duration(silence)} after {format_step(snapshot)} (limit "
        f"{format_duration(limit)})" + (f": {who}" if who else ""),
        evidence=(root,) if root is not None else (),
        facts=tuple(facts),
        advice=join(
            [
                suspect.remedy if suspect is not None else "",
                advise(snapshot, "stacks JOB", "logs JOB --errors"),
            ],
            "; ",
        ),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def starting(snapshot: Snapshot) -> Verdict | None:
    """No step yet: the nodes boot, prepare the container, meet, or the ranks warm up."""
    if rows_in(snapshot, ("CONFIGURING",)) and snapshot.attempt is None:
        return Verdict(
            health=Health.STARTING, rule="starting", reason="the scheduler makes its nodes ready"
        )
    if not is_live(snapshot) and not rows_in(snapshot, ("RUNNING",)):
        return None
    if find_step_at(snapshot) is not None or snapshot.progress is not None:
        return None
    phase, what, limit, begun = _start_phase(snapshot)
    age = snapshot.now - begun if begun is not None else None
    since = f" for {format_duration(age)}" if age is not None else ""
    if is_plain_job(snapshot):  # it may be no training at all
        return Verdict(
            health=Health.HEALTHY,
            rule="starting",
            reason=f"it runs{since} and prints no step that vjob knows",
        )
    if age is not None and age > limit:
        if phase == "warm-up":
            late = _late_warm_up(snapshot, age, since)
            if late is not None:
                return late
        else:
            return _late_start(snapshot, f"{what}{since}, the limit is {format_duration(limit)}")
    return Verdict(
        health=Health.STARTING,
        rule="starting",
        phase=phase,
        reason=f"{what}{since}{_find_unknown_output(snapshot, phase)}",
        facts=_start_facts(snapshot),
    )


def _start_phase(snapshot: Snapshot) -> tuple[str, str, float, float | None]:
    """Its name, a sentence, its limit, and when it began."""
    begun = find_started(snapshot)
    if snapshot.went_at is not None:
        return "warm-up", "the ranks started and did no step yet", WARM_UP_S, begun
    phases = {node.name: node.phase for node in snapshot.nodes}
    preparing = [name for name, phase in phases.items() if phase == "container"]
    if preparing:
        what = f"{format_names(preparing)} prepare(s) the container"
        return "container", what, CONTAINER_S, begun
    if any(phase in ("running", "done") for phase in phases.values()) or snapshot.ranks:
        return "warm-up", "the ranks started and did no step yet", WARM_UP_S, begun
    if not any(phases.values()) and any(node.log_at is not None for node in snapshot.nodes):
        return "warm-up", "no step was printed yet", WARM_UP_S, begun
    missing = (snapshot.num_nodes or 0) - sum(1 for phase in phases.values() if phase)
    what = "the nodes meet"
    if missing > 0:
        what = f"{missing} of {snapshot.num_nodes} nodes have not reported"
    return "rendezvous", what, RENDEZVOUS_S, begun


def _late_start(snapshot: Snapshot, reason: str) -> Verdict:
    suspect = find_suspect(snapshot)
    who = f": {suspect.reason}" if suspect is not None else ""
    return Verdict(
        health=Health.STALLED,
        rule="starting",
        reason=reason + who,
        facts=_start_facts(snapshot),
        advice=advise(snapshot, "stacks JOB", "logs JOB"),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def _late_warm_up(snapshot: Snapshot, age: float, since: str) -> Verdict | None:
    """A job that prints no step that we know is well as long as it shows life otherwise."""
    log_at = max((node.log_at for node in snapshot.nodes if node.log_at is not None), default=None)
    quiet = snapshot.now - log_at if log_at is not None else age
    works = _is_working(snapshot)
    steps_are_told = snapshot.num_gpus is not None and bool(snapshot.info)
    if quiet <= QUIET_S or works:
        if steps_are_told and age > WARM_UP_MOST_S and not works:
            return _late_start(snapshot, f"the ranks started and did no step{since}")
        return Verdict(
            health=Health.HEALTHY,
            rule="starting",
            reason=f"it runs{since} and prints no step that vjob knows; the last output is "
            f"{format_duration(quiet)} old{_find_unknown_output(snapshot, 'warm-up')}",
            facts=_start_facts(snapshot),
        )
    return _late_start(
        snapshot,
        f"the ranks started and did no step{since}, the logs are quiet {format_duration(quiet)}",
    )


def _find_unknown_output(snapshot: Snapshot, phase: str) -> str:
    """A clause where the program prints much and no line is a step; built-in programs print their
    settings, and their steps are known."""
    num_bytes = sum(node.sizes.get("out", 0) for node in snapshot.nodes)
    if phase != "warm-up" or snapshot.info or num_bytes < MUCH_OUTPUT:
        return ""
    return (
        "; none of the lines that it printed is known as a step: if some are, set `progress` "
        "(docs/steps.md)"
    )


def _is_working(snapshot: Snapshot) -> bool:
    """GPUs or ranks that compute, and not all of them at 100 % without an end."""
    used = [
        gpu.utilization
        for node in snapshot.nodes
        for gpu in node.gpus
        if gpu.index != "cpu" and gpu.utilization is not None
    ]
    if used:
        return max(used) > 5 and not describe_gpus(snapshot)
    return any((rank.cpu_percent or 0) > 20 for rank in snapshot.ranks)


def _facts(snapshot: Snapshot) -> tuple[str, ...]:
    facts = []
    life = find_life(snapshot)
    if life is not None:
        facts.append(
            f"the last sign of life of any node is {format_duration(snapshot.now - life)} old"
        )
    if snapshot.checkpoint_step is not None:
        facts.append(f"the last checkpoint is of step {snapshot.checkpoint_step}")
    return tuple(facts)


def _start_facts(snapshot: Snapshot) -> tuple[str, ...]:
    by_phase: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.phase:
            by_phase[node.phase] = by_phase.get(node.phase, 0) + 1
    said = ", ".join(f"{count} {phase}" for phase, count in by_phase.items())
    return (f"nodes: {said}",) if said else ()


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "aeiou" else f"a {name}"
