"""Render the short confs of `vjob init --minimal` and `--for KIND`, with the cluster's nodes.

Each can be submitted once the files named in its first lines exist, without other edits. The nodes
of the cluster are passed in. A recipe is a folder of examples/recipes with a conf and a program
that trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vjob.jobs.conf.schema import NodeGroup
from vjob.jobs.conf.write import dump_yaml
from vjob.recipes import FOLDER

MOST_OTHERS = 8
"""Maximum number of further kinds of nodes that a starter conf names."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A starter conf for one kind of program."""

    needs: tuple[str, ...]
    """Files that must exist, with the key that names each."""
    keys: str
    """The conf without its name and nodes."""
    ranks: int = 1
    """Ranks on a node without GPUs."""
    notes: tuple[str, ...] = ()
    """Comments placed above the conf."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files of the recipe's program, by their path beside the conf."""


STARTERS: Mapping[str, Starter] = {
    "minimal": Starter(
        needs=("train.py (program.script)",),
        keys="program: {script: train.py}\n",
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


KINDS = tuple(
    sorted({*STARTERS, *(path.parent.name for path in FOLDER.glob("*/conf.yaml"))} - {"minimal"})
)
"""Names accepted by `vjob init --for`."""


def load_starter(kind: str) -> Starter:
    """Return the starter of a kind; a recipe's is read from its folder."""
    if kind in STARTERS:
        return STARTERS[kind]
    folder = FOLDER / kind
    above, keys, cluster = re.split(
        r"^name: .*\n|^cluster:", (folder / "conf.yaml").read_text(), flags=re.MULTILINE
    )
    files = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "conf.yaml" and "__pycache__" not in path.parts
    }
    (ranks,) = re.findall(r"ranks: (\d+)", cluster)
    return Starter(
        needs=tuple(files),
        keys=keys,
        ranks=int(ranks),
        notes=tuple(above.splitlines()),
        files=files,
    )


def render_starter(
    kind: str, groups: Sequence[NodeGroup], note: str = "", *, is_alone: bool = True
) -> str:
    """Render a short conf. `groups` are the cluster's node groups, likeliest first; empty without
    Slurm.

    `is_alone` is False if the program's files are written beside the conf.
    """
    return "".join(f"{line}\n" for line in _list_lines(kind, groups, note, is_alone))


def _list_lines(kind: str, groups: Sequence[NodeGroup], note: str, is_alone: bool) -> Iterator[str]:
    starter = load_starter(kind)
    yield from starter.notes
    if is_alone and starter.needs:
        yield "# Put these beside this file, or change the keys that name them:"
        yield from (f"#   {need}" for need in starter.needs)
    if is_alone and starter.files:
        yield f"# `vjob init --for {kind} FOLDER` also writes them, with a program that trains."
    yield "# `vjob submit conf.yaml --dry-run` shows what it makes; all keys: docs/conf.md."
    yield f"name: my-{'run' if kind == 'minimal' else kind}"
    yield from starter.keys.splitlines()
    yield "cluster:"
    if groups:
        yield "  walltime_min: 1h"
    yield from (f"  # {line}" for line in note.splitlines())
    if note and not groups:
        yield "  scheduler: local"
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
