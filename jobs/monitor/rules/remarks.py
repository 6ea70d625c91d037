"""Remarks: secondary observations on a snapshot that do not change the verdict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.log_lines.errors import first_root, is_proof, merge_same
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.rules.base import (
    OVER_WORDS,
    explain_line,
    format_line,
    format_names,
    format_rank,
    is_live,
)
from vjob.jobs.monitor.rules.failing import went_on
from vjob.jobs.monitor.rules.pace import LATE_S, find_step_at

HOT = 88.0
"""Degrees of a GPU."""
FULL = 0.97
"""Share of a GPU's or node's memory."""
DISK_SHARE = 0.02
DISK_BYTES = 5e9
"""A disk with less than both of this left is nearly full."""
INODE_SHARE = 0.02
SKEW_S = 5.0
SILENT_S = 120.0

Remark = Callable[[Snapshot], Iterator[str]]


def scheduler_silent(snapshot: Snapshot) -> Iterator[str]:
    said = snapshot.scheduler
    if said.problem:
        age = f": its last word is {format_duration(said.age_s)} old" if said.jobs else ""
        yield f"the scheduler does not answer ({said.problem}){age}"


def unreadable_files(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.unreadable:
        name, why = next(iter(snapshot.unreadable.items()))
        more = len(snapshot.unreadable) - 1
        yield f"cannot read {name} ({why})" + (f" and {more} more" if more else "")


def errors_that_passed(snapshot: Snapshot) -> Iterator[str]:
    """Root lines after which the training went on; ones that the verdict names are left out."""
    if not is_live(snapshot):
        return
    step_at = find_step_at(snapshot)
    passed = [
        line for line in snapshot.errors if is_proof(line, Proof.CAUSE) and went_on(line, step_at)
    ]
    root = first_root(passed)
    if root is not None:
        who = format_rank(root.rank, root.node)
        yield f"an error was written and the training went on: {who} {format_line(root)}".rstrip()


def warnings(snapshot: Snapshot) -> Iterator[str]:
    for line in merge_same(x for x in snapshot.errors if is_proof(x, Proof.WARNING)):
        more = explain_line(snapshot, line)
        who = format_rank(line.rank, line.node)
        many = f" ({line.num_same} times)" if line.num_same > 1 else ""
        if line.kind not in ("overflow", "nccl warning", "logged error"):
            yield f"{who}: {format_line(line)}{many}" + (f"; {more}" if more else "")


def gpus_not_read(snapshot: Snapshot) -> Iterator[str]:
    """Nodes whose GPUs could not be read: nothing is known of these."""
    found: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        if node.gpus_not_known:
            found.setdefault(node.gpus_not_known, []).append(node.name)
    for why, names in found.items():
        yield f"GPUs not read: {format_names(names)}: {why}"


def gpu_troubles(snapshot: Snapshot) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        for gpu in node.gpus:
            if gpu.index == "cpu":
                continue
            where = f"{node.name}:{gpu.index}"
            used, total = gpu.memory_used_mb, gpu.memory_total_mb
            if gpu.ecc_errors:
                found.setdefault("uncorrected ECC errors", []).append(where)
            if gpu.temperature is not None and gpu.temperature >= HOT:
                found.setdefault(f"{HOT:.0f} degrees or more", []).append(where)
            if used is not None and total and used > FULL * total:
                found.setdefault(f"more than {FULL:.0%} of the memory used", []).append(where)
            if gpu.num_foreign:
                found.setdefault("processes that are not the job's", []).append(where)
            if gpu.held_down:
                found.setdefault(f"held down ({gpu.held_down})", []).append(where)
    for what, places in found.items():
        yield f"GPUs with {what}: {format_names(places)}"


def memory_full(snapshot: Snapshot) -> Iterator[str]:
    full = [
        node.name
        for node in snapshot.nodes
        if node.memory_used_mb is not None
        if node.memory_total_mb and node.memory_used_mb > FULL * node.memory_total_mb
    ]
    if full:
        yield f"memory is nearly used up on {format_names(full)}"


def disks_full(snapshot: Snapshot) -> Iterator[str]:
    for disk in snapshot.disks:
        if disk.free_bytes < min(DISK_SHARE * disk.total_bytes, DISK_BYTES):
            yield (
                f"the disk of {disk.what} has {disk.free_bytes / 1e9:.1f} GB left of "
                f"{disk.total_bytes / 1e9:.0f} GB ({disk.path})"
            )
        free, total = disk.free_inodes, disk.total_inodes
        if free is not None and total and free < INODE_SHARE * total:
            yield f"the disk of {disk.what} has {free} of {total} inodes left ({disk.path})"


def clocks(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.clock_skew_s is not None and abs(snapshot.clock_skew_s) > SKEW_S:
        skew = format_duration(abs(snapshot.clock_skew_s))
        yield f"the clock here and the file server's differ by {skew}"
    wrong = [
        node
        for node in snapshot.nodes
        if node.clock_offset_s is not None and abs(node.clock_offset_s) > SKEW_S
    ]
    if wrong:
        most = max(abs(node.clock_offset_s or 0.0) for node in wrong)
        names = format_names(node.name for node in wrong)
        yield f"clocks of {names} are off by up to {format_duration(most)}"


def silent_nodes(snapshot: Snapshot) -> Iterator[str]:
    if not is_live(snapshot):
        return
    silent = {
        node.name: snapshot.now - node.beat_at
        for node in snapshot.nodes
        if node.beat_at is not None and node.phase != "done"
        if snapshot.now - node.beat_at > max(SILENT_S, LATE_S)
    }
    if silent:
        most = format_duration(max(silent.values()))
        yield f"no sign of life from {format_names(silent)} for up to {most}"


def no_report(snapshot: Snapshot) -> Iterator[str]:
    missing = (snapshot.num_nodes or 0) - len(snapshot.nodes)
    if missing > 0 and snapshot.went_at is not None and is_live(snapshot):
        yield f"{missing} of {snapshot.num_nodes} nodes left nothing"


def preflight(snapshot: Snapshot) -> Iterator[str]:
    said: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        for check in node.checks:
            said.setdefault(check, []).append(node.name)
    for check, names in list(said.items())[:3]:
        yield f"preflight of {format_names(names)}: {check}"


def split_jobs(snapshot: Snapshot) -> Iterator[str]:
    over = [row for row in snapshot.scheduler.jobs if row.state in OVER_WORDS]
    if over and len(over) < len(snapshot.scheduler.jobs):
        said = format_names(f"{row.id} ({row.word or row.state})" for row in over)
        yield f"jobs of the run that are over: {said}"


def nodes_left_out(snapshot: Snapshot) -> Iterator[str]:
    yield from snapshot.left_out


def damaged_checkpoints(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.damaged:
        last = snapshot.damaged[-1]
        more = len(snapshot.damaged) - 1
        yield (
            f"the checkpoint of step {last.iteration} is damaged and set aside ({last.reason})"
            + (f", and {more} more" if more else "")
            + f": {last.path}"
        )


REMARKS: tuple[Remark, ...] = (
    scheduler_silent,
    errors_that_passed,
    silent_nodes,
    no_report,
    split_jobs,
    gpus_not_read,
    gpu_troubles,
    memory_full,
    disks_full,
    damaged_checkpoints,
    nodes_left_out,
    clocks,
    warnings,
    preflight,
    unreadable_files,
)


def list_remarks(snapshot: Snapshot) -> list[str]:
    return [text for remark in REMARKS for text in remark(snapshot)]
