"""Check a conf's layout against its ranks, its batch and its model."""

from __future__ import annotations

from collections.abc import Iterator

from vjob.jobs.conf.schema import BUILT_IN, OWN, OWN_MODEL, JobConf, Llama, Model
from vjob.jobs.conf.world_size import get_replicas, get_world, is_open, require_number
from vjob.jobs.errors import KeyProblem


def check_layout(conf: JobConf) -> Iterator[KeyProblem]:
    """Check that world = pipeline x data x tensor, tensor groups fit in nodes, and sizes divide."""
    parallel = conf.parallel
    for group in conf.cluster.nodes:
        if group.num_ranks % parallel.tensor:
            message = (
                f"{parallel.tensor} does not divide the {group.num_ranks} ranks of a node in "
                f"group {group.group}; a tensor group must lie within one node"
            )
            yield "parallel.tensor", parallel.tensor, message
            break
    if is_open(conf):
        yield from _check_open(conf)
    else:
        if not conf.morph.enabled:
            yield from _check_world(conf)
        elif conf.program.kind in OWN:
            yield from _check_least(conf)
        yield from _check_batch(conf)
    yield from _check_model(conf)
    yield from _check_sharing(conf)
    if conf.parallel.context > 1 and conf.program.kind in BUILT_IN:
        yield from _check_context(conf)


def _check_open(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield problems that prevent the planner from choosing the `auto` parts of the layout."""
    key = "parallel.pipeline" if conf.parallel.pipeline == "auto" else "train.micro_batch_size"
    if conf.train.global_batch_size is None:
        message = "must be set if vjob is to choose the layout, on which its default depends"
        yield "train.global_batch_size", None, message
    if conf.program.kind in OWN_MODEL:
        yield key, "auto", "needs a program whose model vjob knows; give a number (see `vjob plan`)"
    if conf.morph.enabled:
        yield key, "auto", "conflicts with morph.enabled; give a number"


def _check_world(conf: JobConf) -> Iterator[KeyProblem]:
    parallel, world = conf.parallel, get_world(conf)
    pipeline = require_number(parallel.pipeline)
    ranks = " + ".join(f"{group.count}x{group.num_ranks}" for group in conf.cluster.nodes)
    replica = pipeline * parallel.tensor
    factors = f"pipeline {pipeline} x tensor {parallel.tensor}"
    if parallel.data != "auto":
        needed = replica * parallel.data
        if needed != world:
            message = (
                f"pipeline {pipeline} x data {parallel.data} x tensor {parallel.tensor} = "
                f"{needed} ranks, but the nodes have {world} ({ranks})"
            )
            if world % replica == 0:
                message += f"; parallel.data {world // replica} or auto would fit"
            yield "parallel.data", parallel.data, message
    elif world < replica:
        message = f"{factors} = {replica} ranks, but the nodes have only {world} ({ranks})"
        yield "parallel.pipeline", parallel.pipeline, message
    elif world % replica:
        message = (
            f"a replica takes {replica} ranks ({factors}), so {world} ranks ({ranks}) leave "
            f"{world % replica} unused; change the factors, or count or ranks of cluster.nodes"
        )
        yield "parallel.pipeline", parallel.pipeline, message


def _check_least(conf: JobConf) -> Iterator[KeyProblem]:
    """Check that a morphing script of unknown number of layers has enough ranks for its stages."""
    parallel, world = conf.parallel, get_world(conf)
    pipeline = require_number(parallel.pipeline)
    is_known = parallel.partition != "auto" or conf.model is not None
    if world < pipeline * parallel.tensor and not is_known:
        ranks = " + ".join(f"{group.count}x{group.num_ranks}" for group in conf.cluster.nodes)
        stages = f"{pipeline} stages" + f" x tensor {parallel.tensor}" * (parallel.tensor > 1)
        message = (
            f"{stages} need more than {world} ranks ({ranks}), and vjob can use fewer stages only "
            "if it knows the number of layers: set parallel.partition"
        )
        yield "parallel.pipeline", pipeline, message


def _check_batch(conf: JobConf) -> Iterator[KeyProblem]:
    batch, micro, replicas = (
        conf.train.global_batch_size,
        require_number(conf.train.micro_batch_size),
        get_replicas(conf),
    )
    if batch is None or conf.morph.enabled or replicas is None:
        return
    if replicas % conf.parallel.context == 0:
        replicas //= conf.parallel.context
    if batch % (replicas * micro):
        message = (
            f"must be a multiple of data {replicas} x micro_batch_size {micro} = {replicas * micro}"
        )
        yield "train.global_batch_size", batch, message


def _check_model(conf: JobConf) -> Iterator[KeyProblem]:
    model, tensor = conf.model, conf.parallel.tensor
    if model is None:
        return
    if model.hidden % model.heads and (model.llama is None or model.llama.head_size is None):
        yield "model.hidden", model.hidden, f"must be a multiple of heads, {model.heads}"
    if model.llama is not None:
        yield from _check_llama(conf, model, model.llama)
    if model.heads % tensor:
        message = f"must divide the model's {model.heads} heads"
        yield "parallel.tensor", tensor, message


def _check_llama(conf: JobConf, model: Model, llama: Llama) -> Iterator[KeyProblem]:
    key, kv_heads = "model.llama.kv_heads", llama.kv_heads or model.heads
    if conf.program.kind == "pretrain_bert":
        yield "model.llama", "", "is for pretrain_gpt"
    if model.heads % kv_heads:
        yield key, kv_heads, f"must divide the model's {model.heads} heads"
    elif kv_heads % conf.parallel.tensor:
        message = f"must divide the {kv_heads} heads of keys and values"
        yield "parallel.tensor", conf.parallel.tensor, message
    size = llama.head_size or model.hidden // model.heads
    if size % 2:
        yield "model.llama.head_size", size, "must be even, because rotary positions rotate pairs"


def _check_sharing(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield combinations of tensor or sequence parallelism with other settings that the built-in
    programs do not support."""
    parallel, model, train = conf.parallel, conf.model, conf.train
    if conf.program.kind not in BUILT_IN:
        return
    if parallel.sequence_parallel:
        key = "parallel.sequence_parallel"
        if conf.program.kind != "pretrain_gpt":
            yield key, True, "is for pretrain_gpt"
        elif parallel.tensor == 1:
            yield key, True, "needs parallel.tensor above 1"
        elif model is not None and model.sequence % parallel.tensor:
            message = f"parallel.tensor {parallel.tensor} must divide model.sequence"
            yield key, True, f"{message}, {model.sequence}"
    if parallel.tensor == 1:
        return
    if train.precision == "fp8":
        yield "train.precision", "fp8", "conflicts with parallel.tensor above 1; use bf16"
    if train.compile:
        yield "train.compile", True, "conflicts with parallel.tensor above 1"
    if train.cuda_graphs:
        yield "train.cuda_graphs", True, "conflicts with parallel.tensor above 1"
    if train.optimizer.name == "lamb":
        message = "needs whole weights, but a rank has only a part with parallel.tensor above 1"
        yield "train.optimizer.name", "lamb", message


def _check_context(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield problems of `parallel.context` with other settings of the conf."""
    parallel, model, train = conf.parallel, conf.model, conf.train
    key, context = "parallel.context", parallel.context
    replicas = None if is_open(conf) else get_replicas(conf)
    if conf.program.kind != "pretrain_gpt":
        yield key, context, "is for pretrain_gpt"
    if is_open(conf):
        yield key, context, "conflicts with auto in the layout: set pipeline and micro_batch_size"
    if conf.morph.enabled:
        yield key, context, "conflicts with morph.enabled, which changes the replicas"
    elif replicas is not None and replicas % context:
        yield key, context, f"must divide parallel.data, {replicas}"
    if model is not None and model.sequence % context:
        yield key, context, f"must divide model.sequence, {model.sequence}"
    for other, value, is_on in (
        ("parallel.tensor", parallel.tensor, parallel.tensor > 1),
        ("train.compile", True, train.compile),
        ("train.cuda_graphs", True, train.cuda_graphs),
    ):
        if is_on:
            yield other, value, "conflicts with parallel.context above 1"


def check_partition(conf: JobConf) -> Iterator[KeyProblem]:
    """Check that a partition has a number for each stage (or chunk), summing to the model."""
    partition, schedule = conf.parallel.partition, conf.parallel.schedule
    key = "parallel.partition"
    if partition == "auto":
        return
    text, parts = partition.spell(), partition.counts
    pipeline = len(parts) if conf.parallel.pipeline == "auto" else conf.parallel.pipeline
    chunks: int | None = 1
    if schedule != "auto":
        # Imported late: it loads all schedules, a tenth of the time that a submit takes to start.
        from varuna_core.schedule.registry import SCHEDULES

        chunks = SCHEDULES[schedule].stages_per_rank
    if chunks is not None and chunks > 1:
        if len(parts) != chunks * pipeline:
            word = "two" if chunks == 2 else str(chunks)
            message = (
                f"has {len(parts)} numbers, but {schedule} needs {chunks * pipeline}: {word} "
                f"chunks for each of {pipeline} stages"
            )
            yield key, text, message
    elif chunks is None:
        if len(parts) % pipeline or len(parts) == pipeline:
            message = (
                f"has {len(parts)} numbers, but {schedule} needs equally many chunks on each of "
                f"{pipeline} stages: {2 * pipeline}, {3 * pipeline}, ..."
            )
            yield key, text, message
    elif len(parts) != pipeline and not conf.morph.enabled:
        message = f"has {len(parts)} numbers, but parallel.pipeline is {pipeline}"
        yield key, text, message
    if conf.model is None:
        return
    layers, total = conf.model.layers, sum(parts)
    problem = partition.find_problem(layers + 2)
    if problem == "ends":
        message = (
            f"sums to {total} = layers + 2, which counts the embedding and the head: the first "
            "and the last number must be at least 1"
        )
        yield key, text, message
    elif problem == "sum":
        message = (
            f"sums to {total}, but the model has {layers} layers ({layers + 2} with both ends)"
        )
        yield key, text, message


def check_ranks(conf: JobConf) -> Iterator[KeyProblem]:
    """Check that the profiled ranks exist."""
    world = get_world(conf)
    if conf.profile.ranks == "all":
        return
    for index, rank in enumerate(conf.profile.ranks):
        if rank < 0 or (rank >= world and not conf.morph.enabled):
            yield f"profile.ranks[{index}]", rank, f"must be a rank, 0 to {world - 1}"
