"""The groups of nodes of an old shell conf: one, or a master's and its slaves'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vjob.jobs.conf.loading.check_cluster import OWN_SBATCH
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import redact_string
from vjob.jobs.conf.shell_import.assignments import JobBlock
from vjob.jobs.conf.shell_import.values import (
    Translator,
    to_gigabytes,
    to_gpus,
    to_minutes,
    to_name,
    to_node_list,
    to_number,
    to_word,
)


def build_nodes(
    translator: Translator, sbatch: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups of nodes, and what the #SBATCH lines say for all of them."""
    key = "cluster.nodes"
    same = translator.take_flag("HOMOGENEOUS_CLUSTER", key)
    total = translator.take_number("NNODES", key)
    ranks = translator.take_number("NPROC_PER_NODE", key)
    world = translator.take_number("WORLD_SIZE", key)
    translator.left.pop("GRES", None)
    if translator.left.pop("MASTER_ADDR", None) is not None:
        translator.note("MASTER_ADDR is not needed: it is the first node of the first group")
    translator.comments.pop(key, None)
    blocks = translator.found.blocks
    chosen: list[JobBlock | None]
    mixed = same is False or (same is None and len(blocks) > 1)
    if mixed and (total or 2) > 1:
        chosen = _choose_mixed(blocks, total)
        counts = [1, _count_slaves(chosen, total)]
        names = ["master", "slave"]
    else:
        chosen = [_choose_same(blocks, total)]
        counts = [total or _get_count(chosen[0]) or 1]
        names = ["master"]
    for block in blocks:
        if not any(block is other for other in chosen):
            shown = ", ".join(f"--{name}={value}" for name, (value, _) in block.options.items())
            shown = redact_string(shown) or f"GRES={block.gres}"
            translator.note(f"a pasted job script is not used: {shown}")
    groups: list[dict[str, Any]] = []
    top: dict[str, Any] = {}
    for name, count, script in zip(names, counts, chosen, strict=True):
        group = _build_group(translator, script, top, sbatch)
        if "gpus" not in group and ranks is not None:
            group["gpus"] = ranks
            message = f"no --gres was found for group {name}: it asks for {ranks} GPUs of any type"
            translator.note(message)
        groups.append({"group": name, "count": count, **group, "ranks": ranks})
        asked = _get_count(script)
        if asked is not None and asked != count:
            message = f"--nodes={asked} of group {name} is not the {count} that NNODES leaves"
            translator.note(message)
    have = sum(counts) * (ranks or 1)
    if world is not None and ranks is not None and world != have:
        translator.note(f"WORLD_SIZE is {world}, but the nodes have {have} ranks")
    return groups, top


def _get_count(block: JobBlock | None) -> int | None:
    value = block.options.get("nodes") if block is not None else None
    return to_number(value[0]) if value is not None else None


def _choose_same(blocks: list[JobBlock], total: int | None) -> JobBlock | None:
    fitting = [block for block in blocks if _get_count(block) == total]
    return next(iter(fitting or blocks), None)


def _choose_mixed(blocks: list[JobBlock], total: int | None) -> list[JobBlock | None]:
    """The master's job script, of one node, and the slaves'."""
    master = next((block for block in blocks if _get_count(block) == 1), None)
    others = [block for block in blocks if block is not master]
    if master is None and len(others) > 1:
        master, *others = others
    fitting = [block for block in others if total and _get_count(block) == total - 1]
    return [master, next(iter(fitting or others), None)]


def _count_slaves(chosen: list[JobBlock | None], total: int | None) -> int:
    return total - 1 if total is not None else _get_count(chosen[1]) or 1


def _build_group(
    translator: Translator, block: JobBlock | None, top: dict[str, Any], sbatch: dict[str, Any]
) -> dict[str, Any]:
    group: dict[str, Any] = {}
    if block is None:
        return group
    options = dict(block.options)
    if "gres" not in options and block.gres is not None:
        options["gres"] = (block.gres, 0)
    makers: Mapping[str, tuple[dict[str, Any], str, Callable[[str], Any]]] = {
        "partition": (group, "queue", to_word),
        "gres": (group, "gpus", to_gpus),
        "cpus-per-task": (group, "cpus", to_number),
        "mem": (group, "memory_gb", to_gigabytes),
        "job-name": (top, "name", to_name),
        "time": (top, "walltime_min", to_minutes),
        "account": (top, "account", to_word),
        "qos": (top, "qos", to_word),
        "exclude": (top, "exclude", to_node_list),
        "requeue": (top, "requeue", lambda text: True),
        "no-requeue": (top, "requeue", lambda text: False),
    }
    for name, (text, line) in options.items():
        if name in ("nodes", "ntasks-per-node") or (name == "ntasks" and "nodes" in options):
            continue  # counts and ranks come from NNODES and NPROC_PER_NODE
        if name in makers:
            section, key, convert = makers[name]
            value = convert(text)
            if value is None:
                place = f"line {line}: --" if line else ""
                translator.note(f"{place}{name}={redact_string(text)} cannot be used")
            else:
                section.setdefault(key, value)
        elif name in OWN_SBATCH:
            translator.note(f"line {line}: --{name} is left out: {OWN_SBATCH[name]}")
        elif find_text_problem(text) or not text.isprintable():
            translator.note(f"line {line}: --{name} is left out: its value is not printable")
        else:
            sbatch.setdefault(name, text or True)
    return group
