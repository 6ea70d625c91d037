"""The range of every number of a conf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import KeyProblem

# Smallest and largest allowed value; a bound given as a string is excluded itself.
BOUNDS: Mapping[str, tuple[float | str | None, float | str | None]] = {
    "train.steps": (1, None),
    "train.global_batch_size": (1, None),
    "train.micro_batch_size": (1, None),
    "train.loss_scale": ("0", None),
    "train.optimizer.lr": (0, None),
    "train.optimizer.weight_decay": (0, None),
    "train.schedule.warmup_steps": (0, None),
    "train.schedule.min_lr": (0, None),
    "train.schedule.decay_steps": (1, None),
    "train.clip_grad_norm": ("0", None),
    "train.seed": (0, 2**63 - 1),
    "train.log_every": (1, None),
    "train.evaluate.every": (0, None),
    "train.evaluate.steps": (1, None),
    "train.checkpoint.every": (0, None),
    "train.checkpoint.keep": (1, None),
    "train.checkpoint.memory_every": (0, None),
    "parallel.pipeline": (1, None),
    "parallel.data": (1, None),
    "parallel.tensor": (1, None),
    "cluster.walltime_min": (1, None),
    "cluster.grace_s": (1, None),
    "cluster.join_s": (1, None),
    "cluster.prepare_s": (1, None),
    "cluster.finish_s": (0, None),
    "cluster.signal_before_end_s": (0, None),
    "cluster.lost_s": (15, None),
    "cluster.sample_s": (1, None),
    "morph.min_nodes": (1, None),
    "morph.max_nodes": (1, None),
    "morph.look_s": (1, None),
    "model.layers": (1, None),
    "model.hidden": (1, None),
    "model.heads": (1, None),
    "model.sequence": (1, None),
    "model.vocab": (1, None),
    "model.dropout": (0, "1"),
}


def get_value(conf: object, key: str) -> object:
    """The value of a dotted key without indices; None where a section is missing."""
    value = conf
    for name in key.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def check_numbers(conf: JobConf) -> Iterator[KeyProblem]:
    for key, (low, high) in BOUNDS.items():
        value = get_value(conf, key)
        if not isinstance(value, int | float):
            continue
        if low is not None and (
            value < float(low) or (isinstance(low, str) and value == float(low))
        ):
            yield key, value, f"must be {'more than' if isinstance(low, str) else 'at least'} {low}"
        if high is not None and (
            value > float(high) or (isinstance(high, str) and value == float(high))
        ):
            yield (
                key,
                value,
                f"must be {'less than' if isinstance(high, str) else 'at most'} {high}",
            )
    for index, beta in enumerate(conf.train.optimizer.betas):
        if not 0 <= beta < 1:
            yield f"train.optimizer.betas[{index}]", beta, "must be at least 0 and less than 1"
