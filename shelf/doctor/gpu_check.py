"""`vjob doctor --gpu`: two ranks on one node of a conf, or on this machine, and what they report.

The node, the container and the environment are the conf's; the program is
`varuna_core/programs/gpu_check.py`, which is not imported here: it is torch's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import varuna_core
from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.facts.known import NotKnown
from vjob.jobs.api.confs import FROM_PYTHON, ConfText, resolve
from vjob.jobs.api.executor import VjobExecutor
from vjob.jobs.api.face import load
from vjob.jobs.api.job import VjobJob
from vjob.jobs.conf.fates import list_changed
from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup, Program
from vjob.jobs.conf.write import render_resolved
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.shelf.doctor.gpu import judge_absent, judge_failed, judge_ranks

SCRIPT = Path(varuna_core.__file__).parent / "programs/gpu_check.py"
MARK = "gpu-check "
"""Begins a rank's line of JSON."""
NUM_RANKS, WALLTIME_MIN, SAMPLE_S = 2, 10, 1
PROGRAM = Program(kind="script", path=str(SCRIPT), launch="torchrun", snapshot="none")


def check_gpus(conf_path: Path | None, say: Callable[[str], object]) -> list[Diagnosis]:
    """Run the check and judge it; where there is no GPU to run on, say so."""
    conf = build_conf(None if conf_path is None else load(conf_path))
    group = conf.cluster.nodes[0]
    if conf_path is not None and not group.num_gpus:
        return [judge_absent(f"cluster.nodes of {conf_path} has no gpus")]
    if is_here(conf.cluster):
        counted = count_visible(choose_accelerator(), os.environ)
        if isinstance(counted, NotKnown):
            return [judge_absent(f"the GPUs of this machine cannot be counted ({counted.reason})")]
        if not counted.value:
            how = counted.evidence[0].source
            return [judge_absent(f"no GPU on this machine ({how})")]
        group = replace(group, gpus=group.gpus or min(NUM_RANKS, counted.value))
        conf = replace(conf, cluster=replace(conf.cluster, nodes=(group,)))
    return run_check(conf, conf_path or FROM_PYTHON, say)


def build_conf(asked: JobConf | None) -> JobConf:
    """One node of the first group that has GPUs, with two ranks; without a conf this machine."""
    if asked is None:
        group = NodeGroup(group="gpu", ranks=NUM_RANKS)
        own = Cluster(scheduler="local", nodes=(group,))
        asked = JobConf(name="gpu-check", program=PROGRAM, cluster=own)
    groups = asked.cluster.nodes
    group = next((one for one in groups if one.num_gpus), groups[0])
    gpus: str | int | None = group.gpus
    if group.num_gpus and group.devices is None:
        gpus = min(NUM_RANKS, group.num_gpus)
        gpus = f"{group.gpu_type}:{gpus}" if group.gpu_type else gpus
    devices = None if group.devices is None else group.devices[:NUM_RANKS]
    cluster = replace(
        asked.cluster,
        nodes=(replace(group, count=1, ranks=NUM_RANKS, gpus=gpus, devices=devices),),
        hetero="auto",
        walltime_min=min(WALLTIME_MIN, asked.cluster.walltime_min or WALLTIME_MIN),
        requeue=False,
        restarts=None,
        restart_same=False,
        signal_before_end_s=0,
        sample_s=SAMPLE_S,
    )
    return JobConf(
        name="gpu-check",
        program=replace(PROGRAM, python=asked.program.python),
        cluster=cluster,
        container=asked.container,
        workdir=asked.workdir,
        env=asked.env,
        pass_env=asked.pass_env,
        setup=asked.setup,
        log_folder=asked.log_folder,
    )


def is_here(cluster: Cluster) -> bool:
    """Whether the nodes of such a conf are this machine."""
    return schedulers.choose_for(cluster).can.one_host


def run_check(conf: JobConf, path: Path, say: Callable[[str], object]) -> list[Diagnosis]:
    """Submit, wait, judge; relative paths of the conf start at the path's folder."""
    text = render_resolved(conf, written=list_changed(conf))
    resolved = resolve(ConfText(path=path, text=text))
    job = VjobExecutor(resolved.conf.log_folder).submit_conf(resolved)
    say(f"doctor: {job.name} runs; its folder is {job.folder}")
    try:
        job.wait()
    except KeyboardInterrupt:
        job.cancel(now=True)
        raise
    answers = [read_answer(job, rank) for rank in range(NUM_RANKS)]
    status = job.status()
    if any(one is None for one in answers):
        return [judge_failed(status.verdict.reason)]
    nodes = status.snapshot.nodes
    readings = [asdict(gpu) for node in nodes for gpu in node.gpus if gpu.index != "cpu"]
    return judge_ranks([one for one in answers if one is not None], readings)


def read_answer(job: VjobJob[Any], rank: int) -> dict[str, Any] | None:
    """None where the rank printed no such line."""
    lines: Sequence[str] = job.logs(rank=rank).splitlines()
    found = next((line for line in lines if MARK in line), None)
    if found is None:
        return None
    answer: dict[str, Any] = json.loads(found.partition(MARK)[2])
    return answer
