"""Node groups: of a list of hosts, of #SBATCH and srun lines, or of counts in variables."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.agent.gpu.accelerator import list_variables
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.redact import redact_string
from vjob.jobs.conf.slurm_words import WORDS, explain_option, to_number
from vjob.shelf.importers.draft import Draft, spell
from vjob.shelf.importers.launchers import Launch
from vjob.shelf.importers.shell import JobBlock
from vjob.shelf.importers.values import (
    GROUP_OPTIONS,
    PYXIS,
    SRUN_REASONS,
    TOP_OPTIONS,
    to_devices,
)

NODES = "cluster.nodes"
COUNTS = ("NNODES", "NUM_NODES", "DLWS_NUM_WORKER")
RANKS = ("NPROC_PER_NODE", "GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "DLWS_NUM_GPU_PER_WORKER")
NO_KEY: Mapping[str, str] = {
    "MASTER_ADDR": "is not needed: it is the first node of the first group",
    "NODE_RANK": "is not needed: nodes are counted by group",
    "RANK": "is not needed: each rank gets its own",
    "LOCAL_RANK": "is not needed: each rank gets its own",
    "CONTAINER_NAME": "is not needed: the unpacked image is named after the image",
    "CONTAINER_PATH": "is not known: images are unpacked below container.scratch",
    "GRES": "is gpus of the group",
}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Nodes that a hostfile or an include names: of each, its GPUs and which of them."""

    slots: int | None
    devices: tuple[int, ...] | None


def build_nodes(draft: Draft, launch: Launch | None) -> None:
    """Node groups: of a list of hosts, of a het job, or the master's and the slaves'."""
    hosts = _find_hosts(draft, launch)
    same = draft.take_flag("HOMOGENEOUS_CLUSTER", NODES)
    total, ranks = _find_counts(draft, launch)
    if "WORLD_SIZE" in draft.left and draft.left["WORLD_SIZE"].value is None:
        world = None
    else:
        world = draft.take_number("WORLD_SIZE", NODES)
    for key in NO_KEY:
        assignment = draft.left.pop(key, None)
        if assignment is not None and key == "GRES":
            draft.record(spell(assignment), f"{NODES}[].gpus")
        elif assignment is not None:
            if key == "MASTER_ADDR":
                draft.note(f"{key} {NO_KEY[key]}")
                draft.record(spell(assignment), "no key: found when the run starts")
            else:
                draft.note(f"line {assignment.line}: {spell(assignment)}: {key} {NO_KEY[key]}")
    draft.comments.pop(NODES, None)
    devices = _take_devices(draft)
    blocks = _join_srun(draft)
    if hosts and not any("nodes" in block.options for block in blocks):
        _build_host_groups(draft, hosts, ranks)
        return
    names, counts, chosen = _choose_blocks(draft, blocks, same, total)
    for name, count, block in zip(names, counts, chosen, strict=True):
        group = _build_group(draft, block)
        if devices is not None:
            ranks = len(devices) if ranks is None or ranks > len(devices) else ranks
            devices = devices[:ranks]
        if "gpus" not in group and ranks is not None:
            group["gpus"] = max(devices) + 1 if devices else ranks
            draft.note(
                f"no --gres was found for group {name}: it asks for {group['gpus']} GPUs "
                "of any type"
            )
        draft.groups.append(
            {"group": name, "count": count, **group, "ranks": ranks, "devices": devices}
        )
        asked = _get_count(block)
        if asked is not None and asked != count:
            draft.note(f"--nodes={asked} of group {name} is not the {count} that NNODES leaves")
    have = sum(counts) * (ranks or 1)
    if world is not None and ranks is not None and world != have:
        draft.note(f"WORLD_SIZE is {world}, but the nodes have {have} ranks")


def _find_counts(draft: Draft, launch: Launch | None) -> tuple[int | None, int | None]:
    """Nodes and ranks of each, by the launcher, else by variables."""
    total = ranks = None
    options = launch.options if launch is not None else {}
    where = f"line {launch.command.line}" if launch is not None else ""
    for name in ("nnodes", "num_nodes"):
        word = options.get(name)
        if word is None:
            continue
        total = to_number(word.text.rpartition(":")[2])
        if ":" in word.text:
            draft.note(
                f"{where}: --{name} {word.text}: the most are asked for; fewer need morph.enabled"
            )
        _record_count(draft, f"{where}: --{name} {word.text}", total, f"{NODES}[0].count")
    for name in ("nproc_per_node", "num_gpus", "gpus_per_node"):
        word = options.get(name)
        if word is not None:
            ranks = to_number(word.text)
            _record_count(draft, f"{where}: --{name} {word.text}", ranks, f"{NODES}[0].gpus")
    for name in COUNTS:
        if total is None or name not in draft.used:
            total = draft.take_number(name, NODES) if total is None else total
    for name in RANKS:
        if ranks is None or name not in draft.used:
            ranks = draft.take_number(name, NODES) if ranks is None else ranks
    return total, ranks


def _record_count(draft: Draft, said: str, value: int | None, key: str) -> None:
    if value is None:
        draft.note(f"{said} is not known; write {key}")
    else:
        draft.record(said, key)


def _find_hosts(draft: Draft, launch: Launch | None) -> list[Hosts]:
    """Nodes by a hostfile, an include, or a machine list."""
    options = launch.options if launch is not None else {}
    hosts: dict[str, Hosts] = {}
    for name in ("hostfile", "machine_list"):
        word = options.get(name)
        if word is None:
            continue
        text = draft.files.get(posixpath.basename(word.text))
        if text is None:
            continue
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            said = re.fullmatch(r"slots=(\d{1,4})", words[1]) if len(words) > 1 else None
            if words:
                hosts[words[0]] = Hosts(slots=int(said[1]) if said else None, devices=None)
        draft.record(f"{word.text}: {len(hosts)} hosts", f"{NODES}[].count")
    include = options.get("include")
    if include is not None and include.text and not include.is_open:
        chosen: dict[str, Hosts] = {}
        for part in include.text.split("@"):
            host, _, listed = part.partition(":")
            devices = to_devices(listed)
            slots = hosts[host].slots if host in hosts else None
            chosen[host] = Hosts(slots=slots, devices=devices)
        hosts = chosen
        draft.record(f"--include {include.text}", f"{NODES}[].devices")
    return list(hosts.values())


def _take_devices(draft: Draft) -> list[int] | None:
    for name in list_variables():
        for launch in draft.lines.launches:
            for given in launch.command.env:
                if given.name == name:
                    draft.left[name] = given
        if name in draft.left:
            found = draft.take(name, f"{NODES}[].devices", to_devices)
            return list(found) if found is not None else None
    return None


def _build_host_groups(draft: Draft, hosts: list[Hosts], ranks: int | None) -> None:
    kinds: list[tuple[Hosts, int]] = []
    for host in hosts:
        if kinds and kinds[-1][0] == host:
            kinds[-1] = (host, kinds[-1][1] + 1)
        else:
            kinds.append((host, 1))
    for index, (host, count) in enumerate(kinds):
        devices = host.devices
        gpus = host.slots or (max(devices) + 1 if devices else ranks)
        num_ranks = len(devices) if devices else ranks or gpus
        draft.groups.append({
            "group": "master" if index == 0 else f"nodes{index}", "count": count, "gpus": gpus,
            "ranks": num_ranks, "devices": list(devices) if devices else None,
        })  # fmt: skip


def _choose_blocks(
    draft: Draft, blocks: list[JobBlock], same: bool | None, total: int | None
) -> tuple[list[str], list[int], list[JobBlock | None]]:
    chosen: list[JobBlock | None]
    if any(block.is_het for block in blocks):
        chosen = list(blocks)
        names = ["master", *(f"group{index}" for index in range(1, len(blocks)))]
        return names, [_get_count(block) or 1 for block in blocks], chosen
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
            draft.note(f"a pasted job script is not used: {shown}")
    return names, counts, chosen


def _join_srun(draft: Draft) -> list[JobBlock]:
    """Job blocks, with what only srun's lines say."""
    blocks = [replace(block, options=dict(block.options)) for block in draft.found.blocks]
    for options, command in draft.lines.wrapping.srun:
        draft.used |= command.uses
        own = [block for block in blocks if block.file == command.file] or blocks
        if not own:
            own = [JobBlock(file=command.file)]
            blocks += own
        for name, word in options.items():
            said = f"line {command.line}: srun --{name}={word.text}".rstrip("=")
            if name.startswith("container-") and name in PYXIS:
                continue
            if word.is_open:
                draft.note(f"{said} is left out: its value is known in the job alone")
            elif name in GROUP_OPTIONS:
                values = {block.options[name][0] for block in own if name in block.options}
                if not values:
                    own[-1].options[name] = (word.text, command.line)
                    draft.record(said, NODES)
                elif word.text in values or (name == "gres" and word.text == own[-1].gres):
                    draft.record(said, f"{NODES}, as #SBATCH says")
                else:
                    draft.note(f"{said} is not used: #SBATCH says {', '.join(sorted(values))}")
            elif name in ("ntasks", "ntasks-per-node"):
                draft.record(said, f"{NODES}[].ranks")
            else:
                reason = SRUN_REASONS.get(name) or explain_option(name) or "vjob starts the steps"
                draft.note(f"{said} is left out: {reason}")
    return blocks


def _build_group(draft: Draft, block: JobBlock | None) -> dict[str, Any]:
    group: dict[str, Any] = {}
    if block is None:
        return group
    options = dict(block.options)
    if "gres" not in options and block.gres is not None:
        options["gres"] = (block.gres, 0)
    elif block.gres is not None and options["gres"][0] != block.gres:
        draft.note(f"GRES={block.gres} is not used: --gres is {options['gres'][0]}")
    for name, (text, line) in options.items():
        place = f"line {line}: --" if line else ""
        said = f"{place}{name}={redact_string(text)}".rstrip("=")
        if name in ("nodes", "ntasks-per-node") or (name == "ntasks" and "nodes" in options):
            key = "count" if name == "nodes" else "ranks"
            draft.record(said, f"{NODES}[].{key}")
        elif name in GROUP_OPTIONS or name in TOP_OPTIONS:
            key, convert = {**GROUP_OPTIONS, **TOP_OPTIONS}[name]
            value = convert(text)
            if value is None:
                draft.note(f"{said} cannot be used")
            elif name in GROUP_OPTIONS:
                group.setdefault(key, value)
                draft.record(said, f"{NODES}[].{key}")
            else:
                draft.put(key, value, said)
        elif name in WORDS:
            draft.note(f"line {line}: --{name} is left out: {explain_option(name)}")
        elif find_text_problem(text) or not text.isprintable():
            draft.note(f"line {line}: --{name} is left out: its value is not printable")
        else:
            sbatch = draft.values.setdefault("cluster.sbatch", {})
            sbatch.setdefault(name, text or True)
            draft.record(said, "cluster.sbatch")
    return group


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
