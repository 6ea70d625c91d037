"""A chosen layout as a file: what `vjob plan --write` leaves and `vjob submit --plan` takes.

{"vjob_plan": 1, "of": "conf.yaml", "set": {"parallel.pipeline": "8", ...}, "prediction": {...},
 "layout": "Et*6|t*6|...", "why": "..."}

`set` holds conf keys with their values as YAML: they count as if given with --set, before those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from varuna_core.planner.result.plan import LayoutPlan, UsedNode, join_alike, list_used_nodes
from varuna_core.records.files import write_atomic
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.write import resolve_conf
from vjob.jobs.errors import InputError
from vjob.jobs.planning.layout_choice import FORMAT


def build_settings(conf: JobConf, plan: LayoutPlan) -> dict[str, str]:
    """The conf keys that make a run of this plan."""
    option = plan.candidate.option
    nodes = join_alike(list_used_nodes(plan.candidate.placed, option.shape.tensor))
    groups = regroup(conf.cluster.nodes, nodes)
    settings = {
        "train.micro_batch_size": str(option.shape.micro_batch),
        "parallel.pipeline": str(len(plan.counts)),
        "parallel.data": str(option.shape.replicas),
        "parallel.tensor": str(option.shape.tensor),
        "parallel.zero": str(option.shape.zero),
        "parallel.schedule": option.schedule,
        "parallel.recompute": option.recompute,
        "parallel.order": "data",
        "parallel.partition": json.dumps(plan.partition),
    }
    if option.schedule == "varuna":
        # It recomputes whatever the conf says.
        settings["parallel.recompute"] = "full"
    held = replace(conf, cluster=replace(conf.cluster, nodes=tuple(groups)))
    settings["cluster.nodes"] = json.dumps(resolve_conf(held)["cluster"]["nodes"])
    return settings


def regroup(groups: Sequence[NodeGroup], nodes: Sequence[UsedNode]) -> list[NodeGroup]:
    """The conf's groups in the plan's order; one that is used in several ways becomes several."""
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


def render_plan_file(conf_path: Path, conf: JobConf, plan: LayoutPlan, why: str) -> str:
    fields = {
        "vjob_plan": FORMAT,
        "of": str(conf_path),
        "why": why,
        "set": build_settings(conf, plan),
        "prediction": plan.build_prediction().as_json(),
        "partition": plan.partition,
        "layout": spell_layout(plan.counts),
    }
    return json.dumps(fields, indent=1) + "\n"


def write_plan_file(path: Path, conf_path: Path, conf: JobConf, plan: LayoutPlan, why: str) -> None:
    write_atomic(path, render_plan_file(conf_path, conf, plan, why))


def spell_layout(counts: Sequence[int]) -> str:
    """As Megatron-Core's --pipeline-model-parallel-layout has it: `Et*3|t*4||t*2L`."""
    from vjob.jobs.programs.megatron import spell_layout as spell

    inner = list(counts)
    inner[0] -= 1
    inner[-1] -= 1
    if min(inner[0], inner[-1]) < 0:
        raise InputError(
            "Megatron-Core's layout has the embedding on the first stage and the head on the last"
        )
    return spell(inner)
