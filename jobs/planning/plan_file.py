"""Read and write a planned layout: `vjob plan --write` writes it, `submit --plan` reads it.

{"vjob_plan": 1, "of": "conf.yaml", "set": {"parallel.pipeline": "8", ...}, "prediction": {...},
"layout": "Et*6|t*6|...", "why": "..."}

`set` has conf keys with YAML values, which count as if given with --set before other overrides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records.files import parse_json, read_bytes, write_atomic
from varuna_core.records.plan import Plan, Prediction, parse_prediction
from vjob.jobs.conf.references import find_value
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.write import resolve_conf
from vjob.jobs.errors import InputError
from vjob.jobs.programs import megatron

if TYPE_CHECKING:
    from varuna_core.planner.result.plan import ShapePlan, UsedNode

FORMAT = 1
"""Format of the file."""
SETTINGS = (
    "train.micro_batch_size",
    "parallel.pipeline",
    "parallel.data",
    "parallel.tensor",
    "parallel.zero",
    "parallel.schedule",
    "parallel.recompute",
    "parallel.order",
    "parallel.partition",
    "cluster.nodes",
)
"""The conf keys that a plan sets."""


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A layout that `vjob plan` chose earlier."""

    settings: Mapping[str, str]
    """Conf keys with their values as YAML."""
    why: str
    """The origin of the layout, in a sentence."""
    prediction: Prediction | None

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]


def read_plan_file(path: Path, overrides: Sequence[str] = ()) -> PlanFile:
    """Read a plan's file; raise InputError if it is not one.

    If `overrides` change the layout, its prediction is dropped.
    """
    try:
        fields = parse_json(read_bytes(path))
    except OSError as error:
        raise InputError(f"plan {path} cannot be read: {error.strerror}") from None
    if fields is None:
        raise InputError(f"plan {path} is not JSON")
    if not isinstance(fields, dict) or fields.get("vjob_plan") != FORMAT:
        raise InputError(
            f"{path} is not a plan of this vjob; `vjob plan CONF --write FILE` writes one"
        )
    settings = fields.get("set")
    if not isinstance(settings, dict) or not all(isinstance(v, str) for v in settings.values()):
        raise InputError(f'plan {path}: the value of "set" is not a mapping of conf keys to text')
    changed = [word.partition("=")[0] for word in overrides]
    is_changed = any(_overlap(key, other) for key in settings for other in changed)
    return PlanFile(
        settings=settings,
        prediction=None if is_changed else parse_prediction(fields.get("prediction")),
        why=f"plan {path.name}, {fields.get('why', '')}",
    )


def _overlap(key: str, other: str) -> bool:
    """Return True if keys are equal or nested: cluster.nodes, cluster.nodes[0].count."""
    short, long = sorted((key, other), key=len)
    return long.startswith(short) and long[len(short) : len(short) + 1] in ("", ".", "[")


def describe_promise(plan: Plan) -> str:
    """Describe a new run's predicted step time and its basis; empty without a prediction."""
    if plan.prediction is None:
        return ""
    took = plan.prediction.step_s
    words = "" if took is None else f"{took:.4g} s a step with "
    return f"{words}partition {plan.partition}: {plan.planned}"


def describe_partition(conf: JobConf) -> str:
    """Describe how many layers each stage has if the partition also counts the embedding and the
    head; empty if it counts only layers."""
    partition = conf.parallel.partition
    if conf.model is None or partition == "auto":
        return ""
    blocks = partition.blocks(conf.model.layers)
    if blocks == partition:
        return ""
    layers = conf.model.layers
    return f"partition {partition} has embedding and head; its layers are {blocks} of {layers}"


def apply_plan(conf: JobConf, plan: ShapePlan) -> JobConf:
    """Return the conf with the plan's layout, on the nodes that it uses."""
    from varuna_core.planner.result.plan import join_alike, list_used_nodes  # needs numpy

    option = plan.candidate.option
    nodes = join_alike(list_used_nodes(plan.candidate))
    conf = apply_cuts(conf, plan)
    parallel = replace(
        conf.parallel,
        pipeline=len(plan.candidate.placed.sites),
        data=option.shape.replicas,
        tensor=option.shape.tensor,
        zero=option.shape.zero,  # type: ignore[arg-type]  # 0 to 3
        order="data",
    )
    return replace(
        conf,
        train=replace(conf.train, micro_batch_size=option.shape.micro_batch),
        parallel=parallel,
        cluster=replace(conf.cluster, nodes=tuple(regroup(conf.cluster.nodes, nodes))),
    )


def apply_cuts(conf: JobConf, plan: ShapePlan) -> JobConf:
    """Return the conf with the plan's partition, schedule and recompute."""
    option = plan.candidate.option
    parallel = replace(
        conf.parallel,
        partition=plan.partition,
        schedule=option.schedule,  # type: ignore[arg-type]  # one of the planner's
        recompute=option.recompute,
    )
    return replace(conf, parallel=parallel)


def regroup(groups: Sequence[NodeGroup], nodes: Sequence[UsedNode]) -> list[NodeGroup]:
    """Return the conf's groups in the plan's order, split where nodes are used in several ways."""
    known = {group.group: group for group in groups}
    pieces: dict[str, int] = {}
    made = []
    for node in nodes:
        group = known[node.kind]
        pieces[node.kind] = number = pieces.get(node.kind, 0) + 1
        several = sum(1 for other in nodes if other.kind == node.kind) > 1
        changed = replace(
            group,
            group=f"{group.group}-{number}" if several else group.group,
            count=node.count,
        )
        if node.ranks != group.num_ranks:
            devices = None if group.devices is None else group.devices[: node.ranks]
            changed = replace(changed, ranks=node.ranks, devices=devices)
        made.append(changed)
    return made


def write_plan_file(path: Path, conf_path: Path, conf: JobConf, plan: ShapePlan, why: str) -> None:
    fields = {
        "vjob_plan": FORMAT,
        "of": str(conf_path),
        "why": why,
        "set": render_settings(apply_plan(conf, plan)),
        "prediction": plan.build_prediction().as_json(),
        "partition": plan.partition.spell(),
        "layout": spell_layout(plan.counts),
    }
    write_atomic(path, json.dumps(fields, indent=1) + "\n")


def render_settings(conf: JobConf) -> dict[str, str]:
    """Render the keys that a plan has set in this conf as YAML."""
    found = {key: str(find_value(conf, key)) for key in SETTINGS}
    nodes = resolve_conf(conf)["cluster"]["nodes"]
    partition = json.dumps(str(conf.parallel.partition))  # 7 would be a number
    return {**found, "parallel.partition": partition, "cluster.nodes": json.dumps(nodes)}


def spell_layout(counts: Sequence[int]) -> str:
    """Format for Megatron-Core's --pipeline-model-parallel-layout: `Et*3|t*4||t*2L`."""
    inner = list(counts)
    inner[0] -= 1
    inner[-1] -= 1
    if min(inner[0], inner[-1]) < 0:
        raise InputError(
            "Megatron-Core's layout has the embedding on the first stage and the head on the last"
        )
    return megatron.spell_layout(inner)
