"""Build the conf of a try: the same program, data, environment and container, on one node. Pure.

    nodes           one, like those of the first group; all ranks if its GPUs suffice, else fewer
                    replicas, then fewer stages
    built-in        same layers; two steps, one evaluation, one checkpoint; on processors instead
                    of GPUs also the least width, micro-batches of one sample, and fp32
    others          arguments and keys unchanged, except train.log_every 1, if the program reads it
    checkpoints     in a folder of the try's own inside the real one
    off             morph, restarts, requeue, notify

`Trial.notes` lists what a try changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vjob.jobs.conf.schema import BUILT_IN, OWN, Cluster, JobConf, Morph, Notify, Train, spell_gpus
from vjob.jobs.conf.world_size import get_replicas, get_world, require_number

STEPS = 2
MOST_RANKS = 8
"""Greatest number of ranks on processors, which the ranks share."""
HEAD_WIDTH = 8
"""Width of an attention head in a model that runs on processors."""
SAVING = 5
"""Multiple of the limit that a program may take to evaluate, save and end after its steps."""
START_MIN = 8
"""Minutes in a try's time limit to prepare a node, and for a script to save."""
IMAGE_S = 600
"""Most seconds to prepare an image: test queues often allow half an hour in all."""
SEQUENCE = 128
"""Tokens of a random sample in a model that runs on processors."""
MOST_STEPS_OF_BATCH = 2
"""Most micro-batches of a replica: this number for each stage, or in total on processors."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The reduced conf that `vjob try` runs."""

    conf: JobConf
    notes: tuple[str, ...]
    """Differences from the whole run, a phrase each."""
    is_small: bool
    """True if the layout or the devices differ from the whole run's, so times and memory differ,
    too."""

    @property
    def is_built_in(self) -> bool:
        return self.conf.program.kind in BUILT_IN


def keep_launch(conf: JobConf, launch: str) -> JobConf:
    """Return the conf with the whole run's launch method: a single rank would get another one."""
    if conf.program.kind not in OWN:
        return conf
    named: Any = launch
    return replace(conf, program=replace(conf.program, launch=named))


def shrink(conf: JobConf, cluster: Cluster, *, limit_min: int, checkpoint: str | None) -> Trial:
    """Return the conf of a try on `cluster`, which has a single node; it saves in the folder
    `checkpoint`."""
    notes: list[str] = []
    (node,), first = cluster.nodes, conf.cluster.nodes[0]
    wants_gpus = any(group.num_gpus for group in conf.cluster.nodes)
    on_cpu = wants_gpus and not node.num_gpus
    small = _lay_out(conf, node.num_gpus if wants_gpus else 0, notes)
    world = get_world(small)
    others: list[str] = []
    if on_cpu:
        notes.append("the node has no GPU, so ranks run on processors")
        small = _fit_processors(small, notes)
    else:
        if len(conf.cluster.nodes) > 1 or first.count > 1:
            notes.append("all ranks share one node, so no link between nodes is used")
        kinds = {group.gpu_type for group in conf.cluster.nodes if group.num_gpus}
        others = sorted(kind for kind in kinds if kind not in (None, node.gpu_type))
    if others:
        notes.append(f"ranks of {' and '.join(others)} run on {node.gpu_type or 'other GPUs'}")
    interface = "auto" if notes else node.interface
    is_small = on_cpu or bool(others) or small.parallel.pipeline != conf.parallel.pipeline
    # All GPUs if the conf picks devices, else one for each rank.
    num_gpus = node.num_gpus if first.devices is not None else min(world, node.num_gpus)
    node = replace(
        node,
        group="try",
        count=1,
        ranks=world,
        gpus=spell_gpus(node.gpu_type, num_gpus) if wants_gpus else None,
        devices=None if on_cpu or world != first.num_ranks else first.devices,
        interface=interface,
    )
    if any(other.env != first.env for other in conf.cluster.nodes[1:]):
        notes.append(f"ranks have the env of group {first.group}")
    cluster = replace(
        cluster,
        nodes=(node,),
        machine_list=None,
        ssh_config=None,
        hetero="auto",
        walltime_min=_compute_walltime_min(conf, limit_min),
        requeue=False,
        restarts=None,
        restart_same=False,
        signal_before_end_s=0,
        sample_s=2,
    )
    tried = replace(
        small,
        name=f"try-{conf.name}",
        train=_shorten(small, checkpoint),
        cluster=cluster,
        morph=Morph(),
        notify=Notify(),
    )
    return Trial(conf=tried, notes=tuple(notes), is_small=is_small)


def _compute_walltime_min(conf: JobConf, limit_min: int) -> int:
    """Return a time limit that is enough for a healthy try, but no longer than the whole run's."""
    most_min = START_MIN + limit_min * (SAVING if conf.program.kind in BUILT_IN else 1)
    if conf.container.image is not None and conf.container.runtime != "none":
        most_min += math.ceil(min(conf.cluster.prepare_s, IMAGE_S) / 60)
    return min(conf.cluster.walltime_min or most_min, most_min)


def _lay_out(conf: JobConf, num_gpus: int, notes: list[str]) -> JobConf:
    """Reduce the layout to the ranks that one node holds: first replicas, then stages."""
    parallel, world = conf.parallel, get_world(conf)
    pipeline = require_number(parallel.pipeline)
    share, most = pipeline * parallel.tensor, num_gpus or MOST_RANKS
    replicas = get_replicas(conf) or max(1, world // share)
    # A divisor, so that the batch can still be dealt out evenly.
    even = [n for n in range(1, replicas + 1) if replicas % n == 0]
    kept = max((n for n in even if n * share <= most), default=1)
    if num_gpus and share > most:
        stages = max(1, most // parallel.tensor)
        schedule = parallel.schedule if stages > 1 else "auto"
        notes.append(f"{stages} stages in place of {pipeline}, {kept} of {replicas} replicas")
        parallel = replace(parallel, pipeline=stages, partition="auto", schedule=schedule)
        conf = replace(conf, parallel=parallel)
    elif kept < replicas:
        of = f"{kept} of {replicas} replicas" if share > 1 else f"{kept} of {world} ranks"
        notes.append(of)
    elif world == replicas * share:  # a run that may morph leaves ranks over; the try has none
        return _close(conf, world)
    return _keep_replicas(conf, kept, replicas)


def _keep_replicas(conf: JobConf, kept: int, replicas: int) -> JobConf:
    """Reduce the replicas; in a built-in program each keeps its micro-batches, up to a few."""
    train, pipeline = conf.train, require_number(conf.parallel.pipeline)
    if conf.program.kind in BUILT_IN and train.global_batch_size is not None:
        micro = require_number(train.micro_batch_size)
        num = train.global_batch_size // (micro * replicas)
        num = min(num, max(1, MOST_STEPS_OF_BATCH * pipeline))
        train = replace(train, global_batch_size=micro * kept * num)
    conf = replace(conf, train=train, parallel=replace(conf.parallel, data=kept))
    return _close(conf, kept * pipeline * conf.parallel.tensor)


def _close(conf: JobConf, world: int) -> JobConf:
    """Return the conf with one node of `world` ranks, from which other values follow."""
    only = replace(conf.cluster.nodes[0], count=1, ranks=world)
    return replace(conf, cluster=replace(conf.cluster, nodes=(only,)))


def _fit_processors(conf: JobConf, notes: list[str]) -> JobConf:
    """Make a built-in program's model small enough for processors; keep others unchanged."""
    model, train = conf.model, conf.train
    if conf.program.kind not in BUILT_IN or model is None:
        return conf
    hidden, llama = min(model.hidden, model.heads * HEAD_WIDTH), model.llama
    if llama is not None:
        llama = replace(llama, head_size=None, inner=min(llama.inner, 4 * hidden))
    # Index maps of real data are kept for their length: another one would be made for nothing.
    is_random = conf.data is not None and conf.data.synthetic
    sequence = min(model.sequence, SEQUENCE) if is_random else model.sequence
    replicas = get_replicas(conf) or 1
    notes.append(f"width {hidden}, length {sequence}, fp32, one sample a micro-batch")
    batch = MOST_STEPS_OF_BATCH * replicas
    return replace(
        conf,
        model=replace(model, hidden=hidden, sequence=sequence, llama=llama),
        train=replace(train, micro_batch_size=1, global_batch_size=batch, precision="fp32"),
    )


def _shorten(conf: JobConf, checkpoint: str | None) -> Train:
    """Limit a built-in program to two logged steps; a script trains as its arguments say."""
    train = conf.train
    own = replace(train.checkpoint, folder=checkpoint)
    if conf.program.kind not in BUILT_IN:
        return replace(train, log_every=1, checkpoint=own)
    evaluates = train.evaluate.every > 0
    return replace(
        train,
        steps=STEPS,
        log_every=1,
        schedule=replace(train.schedule, decay_steps=train.schedule.decay_steps or train.steps),
        evaluate=replace(train.evaluate, every=STEPS if evaluates else 0, steps=1),
        checkpoint=replace(own, every=0, local=None),
    )
