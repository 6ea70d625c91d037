"""The Slurm job around this shell: the id comes from the environment, everything else from Slurm.

No other variable of the shell is trusted, since in a rank the variables describe the rank's step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from varuna_core.facts.known import Value
from varuna_core.records.files import as_whole
from varuna_core.records.formatting import fold_names, format_duration
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.node_names import expand_nodes
from vjob.jobs.schedulers.slurm import commands as slurm

ORDINARY_STEPS = 0xFFFFFFF0
"""Least step id of Slurm's special steps, such as the batch script or the shell of an interactive
job."""
JUST_S = 5.0
"""Greatest age in seconds of an answer about the job when a run is submitted inside the job."""
NOT_HELD = ("cluster.sbatch", "cluster.exclude", "cluster.requeue")
"""Keys that take effect only at a job's submission, and so have no effect inside an existing
job."""


@dataclass(frozen=True, kw_only=True)
class HeldNode:
    """Resources of the job on one node."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """One component of the job; a job that is not heterogeneous has a single component."""

    info: SchedulerJob
    queue: str
    account: str
    qos: str
    limit_s: float | None
    """Time limit in seconds; None if the component has none."""
    nodes: tuple[HeldNode, ...]


def find_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of the job that a shell with this environment is in; empty outside of jobs."""
    job = environ.get("SLURM_JOB_ID", "")
    return job if job.isdecimal() else ""


def is_step(environ: Mapping[str, str]) -> bool:
    """Return True if the shell itself runs in a step of the job, which occupies some of the job's
    resources."""
    step = as_whole(environ.get("SLURM_STEP_ID", ""))
    return step is not None and step < ORDINARY_STEPS


def ask_held_job(job: str, *, floor_s: float) -> list[HeldPart]:
    """Ask Slurm for the components of a job, in order; empty if the controller has forgotten it."""
    return parse_held_job(broker.ask(build_show_command(job), floor_s=floor_s).text)


def build_show_command(job: str) -> list[str]:
    """Return the command that shows a job, with its resources on each node."""
    tool, *words = slurm.build_show_job_command(job)
    return [tool, "--details", *words]


def parse_held_job(text: str) -> list[HeldPart]:
    found = []
    for line in text.splitlines():
        for info in slurm.parse_show_job_output(line):
            facts = dict(re.findall(r"(?:^|\s)(Partition|Account|QOS|TimeLimit)=(\S*)", line))
            found.append(
                HeldPart(
                    info=info,
                    queue=facts.get("Partition", ""),
                    account=facts.get("Account", ""),
                    qos=facts.get("QOS", ""),
                    limit_s=slurm.parse_time(facts.get("TimeLimit", "")),
                    nodes=_parse_nodes(line, info.nodes),
                )
            )
    return sorted(found, key=lambda part: part.info.component)


def _parse_nodes(line: str, names: Sequence[str]) -> tuple[HeldNode, ...]:
    """Parse `Nodes=b[1-2] CPU_IDs=0-6 Mem=1000 GRES=gpu:a10:4(IDX:0-3)`, repeated for each set of
    equal nodes."""
    found = {}
    for nodes, cpus, gres in re.findall(r"\sNodes=(\S+) CPU_IDs=(\S+) Mem=\S+ GRES=(\S*)", line):
        gpus = sum(map(int, re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres)))
        count = len(expand_nodes(f"[{cpus}]"))
        for name in expand_nodes(nodes):
            found[name] = HeldNode(name=name, cpus=count, gpus=gpus)
    return tuple(found[name] for name in names if name in found)


def adapt_conf(
    conf: JobConf, written: Collection[str], job: str, parts: Sequence[HeldPart]
) -> tuple[JobConf, list[str]]:
    """Return the conf adapted to the job, and notes on keys that the job's values replace. Raise
    InputError if the job cannot hold the run."""
    ask_new = "or give --new-job to submit a new job"
    if not parts or parts[0].info.state is not JobState.RUNNING:
        state = parts[0].info.native_word if parts else "no longer known to Slurm"
        raise InputError(
            f"job {job}, which this shell is in, is {state}: leave the shell, {ask_new}"
        )
    if conf.morph.enabled:
        raise InputError(
            "a run that may morph requests and releases nodes, which is not possible inside "
            f"job {job}: remove morph.enabled, {ask_new}"
        )
    groups = conf.cluster.nodes
    if len(groups) > 1 and (conf.cluster.hetero == "split" or len(groups) != len(parts)):
        raise InputError(
            f"cluster.nodes has {len(groups)} groups, but job {job}, which this shell is in, "
            f"has room for {len(parts)}: write one group per component, with hetero: hetjob, "
            f"{ask_new}"
        )
    problems = []
    for group, part in zip(groups, parts, strict=False):
        problems += _find_misfits(group, part, job)
    if problems:
        raise InputError("\n  ".join([*problems, f"ask for less, {ask_new}"]))
    cluster = replace(conf.cluster, requeue=False)
    return replace(conf, cluster=cluster), [describe_terms(conf, written, job, parts)]


def _find_misfits(group: NodeGroup, part: HeldPart, job: str) -> list[str]:
    where = f"group {group.group} of cluster.nodes"
    held = len(part.info.nodes)
    if group.count > held:
        nodes = "node" if held == 1 else "nodes"
        return [f"{where} has count: {group.count}, but job {job} has {held} {nodes} for it"]
    problems = []
    used = part.nodes[: group.count]
    for what, wanted, counts in (
        ("gpus", group.num_gpus or 0, [node.gpus for node in used]),
        ("cpus", group.cpus or 0, [node.cpus for node in used]),
    ):
        if counts and wanted > min(counts):
            problems.append(
                f"{where} wants {wanted} {what} per node, but job {job} has {min(counts)} on "
                f"{used[counts.index(min(counts))].name}"
            )
    return problems


def describe_terms(
    conf: JobConf, written: Collection[str], job: str, parts: Sequence[HeldPart]
) -> str:
    """Describe in one line where the run runs, for how long, and which keys of the conf the job's
    values replace."""
    first = parts[0]
    left = first.info.left
    rest = f", {format_duration(left.value)} left" if isinstance(left, Value) else ""
    nodes = ",".join(fold_names(part.info.nodes) for part in parts)
    line = f"the run is inside job {job} of this shell ({nodes}{rest}) and ends with that job"
    others = _list_other_keys(conf, written, parts)
    return f"{line}; the job's values replace {', '.join(others)} of the conf" if others else line


def _list_other_keys(
    conf: JobConf, written: Collection[str], parts: Sequence[HeldPart]
) -> list[str]:
    """Return keys that the conf sets and whose values differ from the job's."""
    cluster, first = conf.cluster, parts[0]
    found = []
    if cluster.walltime_min is not None and 60.0 * cluster.walltime_min != first.limit_s:
        found.append("cluster.walltime_min")
    for key, asked, own in (
        ("cluster.account", cluster.account, first.account),
        ("cluster.qos", cluster.qos, first.qos),
    ):
        if asked is not None and asked != own:
            found.append(key)
    found += [key for key in NOT_HELD if any(name.startswith(key) for name in written)]
    for number, (group, part) in enumerate(zip(cluster.nodes, parts, strict=False)):
        if group.queue is not None and part.queue not in group.queue.split(","):
            found.append(f"cluster.nodes[{number}].queue")
        if group.sbatch:
            found.append(f"cluster.nodes[{number}].sbatch")
    return found


def examine(environ: Mapping[str, str]) -> list[Diagnosis]:
    """Return a diagnosis if this shell is in a job, inside which runs from here would run."""
    job = find_job_id(environ)
    try:
        parts = ask_held_job(job, floor_s=JUST_S) if job else []
    except UncertainError as error:
        return [Diagnosis(name="this shell", status="warn", text=f"runs in job {job}: {error}")]
    if not parts:
        return []
    info = parts[0].info
    if info.state is not JobState.RUNNING:
        text = f"job {job}, which this shell is in, is {info.native_word}: leave this shell"
        return [Diagnosis(name="this shell", status="warn", text=text)]
    nodes = ",".join(fold_names(part.info.nodes) for part in parts)
    text = f"inside job {job} on {nodes}: runs start inside this job; --new-job asks for another"
    return [Diagnosis(name="this shell", status="note", text=text)]
