"""The short confs of `vjob init --minimal` and `--for KIND`, with the nodes that the cluster has.

Each can be submitted once the files that its first lines name are there; nothing else in it needs
an edit. Layout only: what the cluster has comes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vjob.jobs.conf.schema import NodeGroup
from vjob.jobs.conf.write import dump_yaml

MOST_OTHERS = 8
"""Further kinds of nodes that are named."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A conf for one kind of program."""

    needs: tuple[str, ...]
    """Files that must be there, with the key that names each."""
    keys: str
    """All of the conf but its name and nodes."""
    ranks: int = 1
    """On a node without GPUs."""
    restarts: int = 0


STARTERS: Mapping[str, Starter] = {
    "minimal": Starter(
        needs=("train.py (program.script)",),
        keys="program: {script: train.py}\n",
    ),
    "script": Starter(
        needs=("train.py (program.script)",),
        keys="""\
program:
  script: train.py                 # every rank runs it
  args: --lr 1.5e-4                # one text, or a list
env: {OMP_NUM_THREADS: "1"}        # of every rank
# setup: [module load cuda]        # shell lines run on each node first
# pass_env: [HF_TOKEN]             # from the shell that submits
""",
    ),
    "gpt": Starter(
        needs=(),
        keys="""\
program: pretrain_gpt
model: gpt2-small                  # or {layers: 12, hidden: 768, heads: 12, sequence: 1024}
data: {synthetic: true}            # random tokens; yours: {prefix: data/wiki_text_document}
train:
  steps: 100
  micro_batch_size: 1
  optimizer: {lr: 3.0e-4}
  # checkpoint: {folder: checkpoints, every: 500}
parallel: {pipeline: 1}            # stages; `vjob plan` finds the fastest layout
""",
    ),
    "ddp": Starter(
        needs=("train.py (program.script), which calls init_process_group",),
        keys="""\
program:
  script: train.py                 # RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR as under torchrun
  args: []
""",
        ranks=2,
        restarts=3,
    ),
    "deepspeed": Starter(
        needs=("train.py (program.deepspeed), which calls deepspeed.initialize",),
        keys="""\
program: {deepspeed: train.py, args: []}   # config: ds.json, and what it says wins
train:
  micro_batch_size: 1
  global_batch_size: 8
  optimizer: {lr: 3.0e-4}
parallel: {zero: 2}
""",
        ranks=2,
    ),
    "megatron": Starter(
        needs=(
            "Megatron-LM (program.megatron), a checkout",
            "data/wiki_text_document.bin and .idx (data.prefix)",
        ),
        keys="""\
program: {megatron: Megatron-LM, args: []}
model: gpt2-small                  # or {layers: 12, hidden: 768, heads: 12, sequence: 1024}
data: {prefix: data/wiki_text_document}
train:
  steps: 100
  micro_batch_size: 1
  optimizer: {lr: 3.0e-4}
parallel: {pipeline: 1, tensor: 1}
""",
    ),
}


def render_starter(kind: str, groups: Sequence[NodeGroup], note: str = "") -> str:
    """A short conf; `groups` are what the cluster has, the likeliest first, none without Slurm."""
    return "".join(f"{line}\n" for line in _list_lines(kind, groups, note))


def _list_lines(kind: str, groups: Sequence[NodeGroup], note: str) -> Iterator[str]:
    starter = STARTERS[kind]
    if starter.needs:
        yield "# Have these beside this file, or change the keys that name them:"
        yield from (f"#   {need}" for need in starter.needs)
    yield "# `vjob submit conf.yaml --dry-run` shows what it makes; all keys: docs/conf.md."
    yield f"name: my-{'run' if kind in ('minimal', 'script') else kind}"
    yield from starter.keys.splitlines()
    yield "cluster:"
    if groups:
        yield "  walltime_min: 1h"
    if starter.restarts:
        yield f"  restarts: {starter.restarts}                      # as torchrun's --max-restarts"
    if note:
        yield f"  # {note}"
    yield "  nodes:"
    first, *others = groups or [NodeGroup(group="main", ranks=starter.ranks)]
    yield f"    - {_spell(first, starter)}"
    for group in others[:MOST_OTHERS]:
        yield f"    # also: {_spell(group, starter, is_whole=True)}"


def _spell(group: NodeGroup, starter: Starter, *, is_whole: bool = False) -> str:
    keys: dict[str, object] = {"group": group.group, "count": group.count if is_whole else 1}
    if group.queue is not None:
        keys["queue"] = group.queue
    if group.gpus is not None:
        keys["gpus"] = group.gpus
    else:
        keys["ranks"] = starter.ranks
    return dump_yaml(keys, one_line=True).strip()
