"""Who holds up a job that goes on no more: the odd one out among ranks, nodes and GPUs. Pure.

A collective ends when all ranks have come, so one that does something else than all the others is
the one they wait for. Each way to look gives a suspect or nothing; the surest comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.model.snapshot import Gpu, Node, Rank, Snapshot
from vjob.jobs.monitor.rules.base import list_alive, say_names, say_rank

SILENT_S = 150.0
"""A node's beats come every few seconds, and NFS may hold them back for a minute."""
IDLE, BUSY = 5.0, 90.0
"""Per cent of a GPU or a core."""
SPINS = 98.0
TRACE_LATE_S = 6.0
"""A trace is written out every five seconds, and by a rank that goes on alone."""
FEW = 0.25
"""At most this share of the ranks is the odd part."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Who, and what says so."""

    reason: str
    node: str = ""
    rank: int | None = None
    remedy: str = ""


def find_suspect(snapshot: Snapshot) -> Suspect | None:
    """The surest one."""
    for look in (_stopped, _zombie, _silent_node, _in_kernel, _idle_node, _odd_cpu, _behind):
        suspect = look(snapshot)
        if suspect is not None:
            return suspect
    return None


def find_sure_suspect(snapshot: Snapshot) -> Suspect | None:
    return _stopped(snapshot) or _zombie(snapshot)


def describe_gpus(snapshot: Snapshot) -> str:
    """What the GPUs of all nodes do together; empty where nothing tells."""
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
        reason=f"{_say_ranks(found)} {_is_or_are(found)} stopped (SIGSTOP, or a debugger)",
        node=found[0].node,
        rank=found[0].rank,
        remedy=f"`kill -CONT {found[0].pid or 'PID'}` on {found[0].node or 'its node'}",
    )


def _zombie(snapshot: Snapshot) -> Suspect | None:
    found = [rank for rank in list_alive(snapshot) if rank.process_state in ("Z", "X")]
    if not found:
        return None
    return Suspect(
        reason=f"{_say_ranks(found)} {_is_or_are(found)} dead and not collected yet",
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
        reason=f"no sign of life from {say_names(names)} for {format_duration(silent[names[0]])}",
        node=names[0],
        remedy=f"look whether {names[0]} is up: `scontrol show node {names[0]}`",
    )


def _in_kernel(snapshot: Snapshot) -> Suspect | None:
    alive = list_alive(snapshot)
    found = [rank for rank in alive if rank.process_state == "D"]
    if not _is_few(len(found), len(alive)):
        return None
    return Suspect(
        reason=f"{_say_ranks(found)} {_is_or_are(found)} stuck in the kernel (state D: a disk, a "
        "dead mount, a driver)",
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
            reason=f"the GPUs of {say_names(idle)} are idle while those of {len(busy)} other "
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
                reason=f"{say_rank(few[0].rank, few[0].node)} {what} while all "
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
        reason=f"the trace of {_say_ranks(found)} ends at step {first.step}, those of the others "
        f"at {last}",
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


def _say_ranks(ranks: Sequence[Rank]) -> str:
    if len(ranks) == 1:
        return say_rank(ranks[0].rank, ranks[0].node)
    nodes = say_names(dict.fromkeys(rank.node for rank in ranks if rank.node))
    where = f" on {nodes}" if nodes else ""
    return f"ranks {say_names(str(rank.rank) for rank in ranks)}{where}"
