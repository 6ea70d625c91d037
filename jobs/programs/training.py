"""Convert a conf to training.json: a built-in program's settings, with every default. Pure."""

from __future__ import annotations

from dataclasses import replace

from varuna_core.records.training import Training
from vjob.jobs.conf.paths import split_blend
from vjob.jobs.conf.schema import BUILT_IN, MODELS, JobConf, Model
from vjob.jobs.conf.world_size import require_number


def build_training(conf: JobConf, replicas: int) -> Training | None:
    """Return the training settings; None for a user's own program."""
    model, data, train, parallel = conf.model, conf.data, conf.train, conf.parallel
    if conf.program.kind not in BUILT_IN:
        return None
    assert model is not None and data is not None, "check_program requires model and data"
    batch, micro = train.global_batch_size, require_number(train.micro_batch_size)
    pipeline = require_number(parallel.pipeline)
    blend = None
    if not data.synthetic and data.prefix:
        blend = tuple((float(weight), prefix) for weight, prefix in split_blend(data.prefix))
    return Training(
        program=conf.program.kind,
        model=name_model(model),
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        sequence=model.sequence,
        vocab=model.vocab,
        dropout=model.dropout,
        data=blend,
        split=data.split,
        vocabulary=data.vocab,
        steps=train.steps,
        global_batch_size=batch or micro * (replicas // parallel.context) * pipeline,
        micro_batch_size=micro,
        precision=train.precision,
        loss_scale=train.loss_scale,
        optimizer=train.optimizer.name,
        lr=train.optimizer.lr,
        weight_decay=train.optimizer.weight_decay,
        betas=train.optimizer.betas,
        fused=train.optimizer.fused,
        apex=train.optimizer.apex,
        offload=train.optimizer.offload,
        lr_schedule=train.schedule.kind,
        warmup_steps=train.schedule.warmup_steps,
        decay_steps=train.schedule.decay_steps or train.steps,
        min_lr=train.schedule.min_lr,
        clip_grad_norm=train.clip_grad_norm,
        seed=train.seed,
        log_every=train.log_every,
        evaluate_every=train.evaluate.every,
        evaluate_steps=train.evaluate.steps,
        compile=train.compile,
        cuda_graphs=train.cuda_graphs,
        checkpoint_folder=train.checkpoint.folder,
        checkpoint_every=train.checkpoint.every,
        checkpoint_keep=train.checkpoint.keep,
        checkpoint_local=train.checkpoint.local,
        saved=-1,
        recompute=parallel.recompute,
        schedule=parallel.schedule,
        partition=None if parallel.partition == "auto" else parallel.partition.spell(),
        pipeline=pipeline,
        zero=parallel.zero,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        timeline=conf.profile.timeline,
        llama=model.build_llama(),
        context=parallel.context,
    )


def name_model(model: Model) -> str:
    """Return the name of a model's shape, such as gpt2-xl, whatever the dropout; if the shape has
    no name, return its sizes as text."""
    for name, known in MODELS.items():
        if replace(model, dropout=known.dropout) == known:
            return name
    kind = "" if model.llama is None else "llama-"
    return f"{kind}{model.layers}x{model.hidden}"
