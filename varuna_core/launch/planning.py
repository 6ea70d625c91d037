"""Arguments to plan: who runs what. Pure."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_core.launch.layout import Layout
from varuna_core.records.plan import GroupPlan, Plan, Timing, escape_placeholders

BEAT_S = 5.0
"""Between two signs of life; more on a large run, for each is a file written anew."""
NODES_PER_BEAT_S = 50


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every rank runs."""

    python: str
    code_dir: str
    script: str
    args: Sequence[str]
    env: Mapping[str, str]
    is_on_gpus: bool


def build_plan(run: str, layout: Layout, program: Program) -> Plan:
    """The plan of one run over ssh."""
    groups: list[GroupPlan] = []
    first_node = first_rank = 0
    for count, ranks in layout.nodes:
        groups.append(
            _build_group(f"g{len(groups)}", count, ranks, program, first_node, first_rank)
        )
        first_node += count
        first_rank += count * ranks
    beat_s = max(BEAT_S, layout.machines / NODES_PER_BEAT_S)
    return Plan(
        run=run,
        name=name_run(program.script),
        scheduler="ssh",
        layout="single",
        morph=False,
        groups=tuple(groups),
        pipeline=layout.stages,
        data=layout.replicas,
        tensor=1,
        order="pipeline",
        partition=None,
        stage_map=layout.stage_map,
        command=build_command(program, layout),
        python=program.python,
        workdir=program.code_dir,
        env=dict(program.env),
        containers=(),
        remedies=(),
        must_exist=(program.code_dir, os.path.join(program.code_dir, program.script)),
        port=None,
        timing=Timing(grace_s=20, join_s=120, prepare_s=0, beat_s=beat_s, lost_s=120, sample_s=10),
    )


def build_command(program: Program, layout: Layout) -> tuple[str, ...]:
    """As Varuna's launcher did it: its own arguments first, so that the user's come last."""
    start = map(escape_placeholders, (program.python, "-u", program.script))
    own = (
        "--rank=%{rank}",
        "--local_rank=%{local_rank}",
        f"--stage_to_rank_map={layout.stage_map}",
        f"--chunk_size={layout.chunk}",
        f"--batch-size={layout.share}",
    )
    return (*start, *own, *map(escape_placeholders, program.args))


def name_run(script: str) -> str:
    """A name for folders, from the script's."""
    stem = os.path.splitext(os.path.basename(script))[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem).strip("-") or "run"


def _build_group(
    name: str, count: int, ranks: int, program: Program, first_node: int, first_rank: int
) -> GroupPlan:
    return GroupPlan(
        name=name,
        count=count,
        queue=None,
        gpu_type=None,
        gpus=ranks if program.is_on_gpus else 0,
        devices=None,
        cpus=None,
        memory_gb=None,
        interface=None,
        ranks=ranks,
        env={},
        first_node=first_node,
        first_rank=first_rank,
    )
