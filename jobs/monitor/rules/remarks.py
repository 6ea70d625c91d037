"""Remarks: secondary observations on a snapshot that do not change the verdict. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.facts.cluster import NodeCondition
from varuna_core.facts.finding import Finding
from varuna_core.facts.hardware import Fault, is_grave
from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.facts.remedy import Action, Remedy, Target
from vjob.jobs.monitor.log_lines.errors import first_root, is_proof, is_warning, merge_same
from vjob.jobs.monitor.model.snapshot import Line, NewFiles, Snapshot
from vjob.jobs.monitor.rules.base import (
    OVER_WORDS,
    RUNNING,
    is_live,
    line_values,
    list_unheard,
    make_evidence,
    remedies_of_line,
    rows_in,
)
from vjob.jobs.monitor.rules.doubts import went_on
from vjob.jobs.monitor.rules.failing import name_node
from vjob.jobs.monitor.rules.pace import (
    find_left_s,
    find_limit_left_s,
    find_silent_nodes,
    has_ended_ranks,
)
from vjob.jobs.monitor.rules.stalled import stopped_ranks

LIMIT_NEAR_S = 600.0
"""Seconds before the time limit from which a remark names it."""
HOT = 88.0
"""Temperature in degrees Celsius from which a GPU is hot."""
FULL = 0.97
"""Fraction of a GPU's or a node's memory from which the memory is nearly full."""
DISK_SHARE = 0.02
DISK_BYTES = 5e9
"""A disk is nearly full if both its free share and its free bytes are below these limits."""
INODE_SHARE = 0.02
SKEW_S = 5.0
SILENT_S = 120.0
MOST_FAULTS = 8
"""Most hardware faults that are named."""

KEEP_FILES = Remedy(
    Action.ADD,
    Target.PROGRAM,
    "a folder outside of the code",
    "for files to keep, and copy the new files to that folder",
)

Remark = Callable[[Snapshot], Iterator[Finding]]


def scheduler_silent(snapshot: Snapshot) -> Iterator[Finding]:
    said = snapshot.scheduler
    if said.problem:
        age = said.age_s if said.jobs else NotKnown("the scheduler has not answered before")
        yield Finding("scheduler silent", values={"problem": said.problem, "age_s": age})


def unreadable_files(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.unreadable:
        name, why = next(iter(snapshot.unreadable.items()))
        more = len(snapshot.unreadable) - 1
        yield Finding("unreadable files", values={"name": name, "why": why, "num_more": more})


def errors_that_passed(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield errors after which the training continued, except errors that the verdict names."""
    if not is_live(snapshot):
        return
    errors = (line for line in snapshot.errors if is_proof(line, Proof.CAUSE))
    passed = [line for line in errors if went_on(line, snapshot)]
    root = first_root(passed)
    if root is not None:
        yield _of_line("error that passed", root)


def warnings(snapshot: Snapshot) -> Iterator[Finding]:
    for line in merge_same(x for x in snapshot.errors if is_proof(x, Proof.WARNING)):
        if line.kind not in ("overflow", "nccl warning", "logged error"):
            found = _of_line("warning", line)
            if is_warning(line.kind):
                meaning, remedies = remedies_of_line(line)
                found = replace(found, values={**found.values, **meaning}, remedies=remedies)
            yield found


def _of_line(rule: str, line: Line) -> Finding:
    return Finding(rule, values=line_values(line), evidence=(make_evidence(line),))


def time_limit_near(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a remark if the scheduler will end the job soon, or before the training is done."""
    left_s = find_limit_left_s(snapshot)
    if left_s is None or not is_live(snapshot) or has_ended_ranks(snapshot):
        return
    needed_s = find_left_s(snapshot)
    most_s = left_s if left_s > LIMIT_NEAR_S else left_s / 2
    if left_s > LIMIT_NEAR_S if needed_s is None else needed_s <= most_s:
        return
    needed: Known[float] = NotKnown("the pace or the number of steps is not known")
    if needed_s is not None:
        needed = Value(needed_s, (Evidence("step lines", Sure.ESTIMATED),))
    yield Finding(
        "time limit near",
        values={
            "left_s": left_s,
            "needed_s": needed,
            "comes_back": snapshot.comes_back,
            "checkpoint_step": snapshot.checkpoint_step or NotKnown("no checkpoint is known"),
        },
        evidence=(Evidence(snapshot.scheduler.name, Sure.REPORTED),),
    )


def early_signal_unheard(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a remark if ranks that make steps have no handler for the early signal."""
    if is_live(snapshot) and snapshot.progress is not None:
        yield from list_unheard(snapshot)


def being_preempted(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a remark if the scheduler preempts the job, which still has a grace time."""
    for row in rows_in(snapshot, RUNNING):
        if row.preempted is not None and is_live(snapshot):
            left: Known[float] = NotKnown("the scheduler does not say when it ends the job")
            if row.ends is not None:
                left = Value(max(0.0, row.ends - snapshot.now))
            since = time.strftime("%H:%M:%S", time.localtime(row.preempted))
            values = {"job": row.id, "since": since, "left_s": left}
            proof = (Evidence(snapshot.scheduler.name, since=row.preempted),)
            yield Finding("being preempted", values=values, evidence=proof)
            return


def nodes_not_well(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the nodes that are draining or under maintenance, with the admin's reason."""
    for state in snapshot.scheduler.node_states:
        if state.condition is not NodeCondition.LOST and is_live(snapshot):
            age: Known[float] = NotKnown("the scheduler does not say when this state began")
            if state.since is not None:
                age = Value(max(0.0, snapshot.now - state.since))
            values = {
                "node": state.name,
                "condition": state.condition.value,
                "reason": state.reason,
                "by": state.by,
                "age_s": age,
            }
            proof = (Evidence(snapshot.scheduler.name, text=state.word, since=state.since),)
            yield Finding("node not well", values=values, evidence=proof)


def gpus_not_read(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the nodes whose GPUs could not be read: the state of these GPUs is not known."""
    found: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        if node.gpus_not_known:
            found.setdefault(node.gpus_not_known, []).append(node.name)
    num_read = sum(not node.gpus_not_known for node in snapshot.nodes)
    seen = Evidence("GPU samples", Sure.MEASURED, seen=num_read, expected=len(snapshot.nodes))
    for why, names in found.items():
        yield Finding("gpus not read", values={"nodes": names, "gpus": NotKnown(why, (seen,))})


def faults_of_hardware(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield hardware faults that drivers and the kernel report, except lost GPUs of a running job,
    which are a verdict."""
    found = [
        (node.name, fault)
        for node in snapshot.nodes
        for fault in node.faults
        if fault.rule != Fault.LOST.value or not is_live(snapshot)
    ]
    found.sort(key=lambda one: (not is_grave(one[1]), float(one[1].values["since"])))
    for at, (node, fault) in enumerate(found[:MOST_FAULTS]):
        more = len(found) - MOST_FAULTS if at == MOST_FAULTS - 1 else 0
        yield Finding(
            "hardware",
            values={"node": node, "fault": fault, "num_more": max(0, more)},
            evidence=fault.evidence,
            remedies=tuple(name_node(one, node) for one in fault.remedies),
        )


def gpu_troubles(snapshot: Snapshot) -> Iterator[Finding]:
    found: dict[tuple[str, str], list[str]] = {}
    for node in snapshot.nodes:
        with_fault = {one.values["part"] for one in node.faults if one.rule == Fault.ECC.value}
        for gpu in node.gpus:
            if gpu.index == "cpu":
                continue
            ranks = f" (rank {', '.join(map(str, gpu.ranks))})" if gpu.ranks else ""
            where = f"{node.name}:{gpu.index}{ranks}"
            used, total = gpu.memory_used_mb, gpu.memory_total_mb
            if gpu.ecc_errors and gpu.index not in with_fault:
                found.setdefault(("ecc", ""), []).append(where)
            if gpu.temperature is not None and gpu.temperature >= HOT:
                found.setdefault(("hot", ""), []).append(where)
            if used is not None and total and used > FULL * total:
                found.setdefault(("full", ""), []).append(where)
            if gpu.num_foreign:
                found.setdefault(("foreign", ""), []).append(where)
            if gpu.held_down:
                found.setdefault(("held down", gpu.held_down), []).append(where)
    limits = {"hot": HOT, "full": FULL}
    for (trouble, why), places in found.items():
        values = {"trouble": trouble, "why": why, "gpus": places, "limit": limits.get(trouble)}
        yield Finding("gpu trouble", values=values)


def memory_full(snapshot: Snapshot) -> Iterator[Finding]:
    full = [
        node.name
        for node in snapshot.nodes
        if node.memory_used_mb is not None
        if node.memory_total_mb and node.memory_used_mb > FULL * node.memory_total_mb
    ]
    if full:
        yield Finding("memory full", values={"nodes": full})


def disks_full(snapshot: Snapshot) -> Iterator[Finding]:
    for disk in snapshot.disks:
        where = {"what": disk.what, "path": disk.path}
        if disk.free_bytes < min(DISK_SHARE * disk.total_bytes, DISK_BYTES):
            size = {"free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes}
            yield Finding("disk nearly full", values={**where, **size})
        free, total = disk.free_inodes, disk.total_inodes
        if free is not None and total and free < INODE_SHARE * total:
            count = {"free_inodes": free, "total_inodes": total}
            yield Finding("inodes nearly used up", values={**where, **count})


def files_in_the_copy(snapshot: Snapshot) -> Iterator[Finding]:
    yield from remark_new_files(snapshot.new_files)


def remark_new_files(found: NewFiles | None) -> Iterator[Finding]:
    """Yield a remark on files that ranks wrote into the copy of their code, which the next run does
    not have."""
    if found is not None:
        values = {"folder": found.folder, "names": found.names, "num_files": found.num_files}
        yield Finding("files in the copy", values=values, remedies=(KEEP_FILES,))


def clocks(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.clock_skew_s is not None and abs(snapshot.clock_skew_s) > SKEW_S:
        yield Finding("clock here", values={"skew_s": abs(snapshot.clock_skew_s)})
    wrong = [
        node
        for node in snapshot.nodes
        if node.clock_offset_s is not None and abs(node.clock_offset_s) > SKEW_S
    ]
    if wrong:
        most = max(abs(node.clock_offset_s or 0.0) for node in wrong)
        names = [node.name for node in wrong]
        yield Finding("clocks of nodes", values={"nodes": names, "most_s": most})


def silent_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    if not is_live(snapshot):
        return
    silent = find_silent_nodes(snapshot, SILENT_S)
    if silent:
        values = {"nodes": list(silent), "silence_s": max(silent.values())}
        yield Finding("silent nodes", values=values)


def no_report(snapshot: Snapshot) -> Iterator[Finding]:
    missing = (snapshot.num_nodes or 0) - len(snapshot.nodes)
    if missing > 0 and snapshot.went_at is not None and is_live(snapshot):
        values = {"missing": missing, "num_nodes": snapshot.num_nodes}
        yield Finding("nodes that left nothing", values=values)


def logs_missing(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the nodes of a bare folder's job that left no log in the folder."""
    if snapshot.without_log:
        values = {"node_ranks": list(snapshot.without_log), "num_nodes": snapshot.info["NNODES"]}
        yield Finding("nodes without a log", values=values)


def several_jobs(snapshot: Snapshot) -> Iterator[Finding]:
    for master, nodes in snapshot.other_jobs.items():
        yield Finding("several jobs", values={"master": master, "nodes": list(nodes)})


def preflight(snapshot: Snapshot) -> Iterator[Finding]:
    said: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        for check in node.checks:
            said.setdefault(check, []).append(node.name)
    for check, names in list(said.items())[:3]:
        yield Finding("preflight", values={"nodes": names, "said": check})


def split_jobs(snapshot: Snapshot) -> Iterator[Finding]:
    over = [row for row in snapshot.scheduler.jobs if row.state in OVER_WORDS]
    if over and len(over) < len(snapshot.scheduler.jobs):
        jobs = {row.id: row.word or row.state for row in over}
        yield Finding("jobs that are over", values={"jobs": jobs})


def nodes_left_out(snapshot: Snapshot) -> Iterator[Finding]:
    for why in snapshot.left_out:
        yield Finding("node left out", values={"said": why})


def damaged_checkpoints(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.damaged:
        last = snapshot.damaged[-1]
        yield Finding(
            "damaged checkpoint",
            values={
                "step": last.iteration,
                "reason": last.reason,
                "path": last.path,
                "num_more": len(snapshot.damaged) - 1,
            },
        )


REMARKS: tuple[Remark, ...] = (
    scheduler_silent,
    errors_that_passed,
    silent_nodes,
    no_report,
    logs_missing,
    several_jobs,
    split_jobs,
    stopped_ranks,
    being_preempted,
    nodes_not_well,
    time_limit_near,
    early_signal_unheard,
    gpus_not_read,
    faults_of_hardware,
    gpu_troubles,
    memory_full,
    disks_full,
    files_in_the_copy,
    damaged_checkpoints,
    nodes_left_out,
    clocks,
    warnings,
    preflight,
    unreadable_files,
)


def list_remarks(snapshot: Snapshot) -> list[Finding]:
    return [found for remark in REMARKS for found in remark(snapshot)]
