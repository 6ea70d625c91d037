"""Build node groups from a list of hosts, from #SBATCH and srun lines, or from the launcher's
counts."""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.agent.gpu.accelerator import list_variables
from varuna_core.records.secrets import redact_string
from vjob.jobs.conf.parse import find_text_problem
from vjob.jobs.conf.slurm_words import WORDS, explain_option, to_gigabytes, to_number
from vjob.jobs.errors import InputError
from vjob.jobs.programs.launchers import find_launcher
from vjob.shelf.importers.draft import Draft
from vjob.shelf.importers.launchers import Launch
from vjob.shelf.importers.script import JobBlock
from vjob.shelf.importers.values import (
    GROUP_OPTIONS,
    PYXIS,
    SRUN_REASONS,
    TOP_OPTIONS,
    to_devices,
    to_flag,
)

NODES = "cluster.nodes"
COUNTED = ("nnodes", "num_nodes", "nproc_per_node", "num_gpus", "gpus_per_node")
"""Options of launchers that count nodes, or the ranks of a node."""
NO_KEY: Mapping[str, str] = {
    "MASTER_ADDR": "rank 0 is on the first node of the first group",
    "MASTER_PORT": "each run chooses a free one",
    "NODE_RANK": "nodes are counted by group",
    "CONTAINER_NAME": "the unpacked image is named after the image",
    "CONTAINER_PATH": "images are unpacked below container.scratch",
    "GRES": "use gpus of the group",
}


AMOUNTS: Mapping[str, str] = {
    "nodes": "count", "ntasks": "ranks", "ntasks-per-node": "ranks", "tasks-per-node": "ranks",
    "ntasks-per-gpu": "ranks", "cpus-per-task": "cpus", "gpus": "gpus", "gpus-per-task": "gpus",
    "mem-per-cpu": "memory_gb", "mem-per-gpu": "memory_gb",
}  # fmt: skip
"""Options whose amount on a node depends on other options, with their keys."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """A node that a hostfile or --include names: number of GPUs, and indices of those to use."""

    slots: int | None
    devices: tuple[int, ...] | None


def build_nodes(draft: Draft, launch: Launch) -> None:
    """Build the groups from a list of hosts, a het job, or the jobs that the scripts submit."""
    hosts = _find_hosts(draft, launch)
    said = draft.found.variables.get("HOMOGENEOUS_CLUSTER")
    same = to_flag(said.value.strip()) if said is not None else None
    total, ranks = _find_counts(draft, launch)
    devices = _take_devices(launch)
    blocks = _join_srun(draft)
    if hosts and not any("nodes" in block.options for block in blocks):
        _build_host_groups(draft, hosts, ranks)
        return
    if launch.kind == "deepspeed" and ranks is None and devices is None and not _has_gpus(blocks):
        draft.note(
            f"{launch.command.where}: deepspeed without --num_gpus and --include uses all GPUs "
            f"of a node, but their number is not known here; set {NODES}[].gpus",
            is_first=True,
        )
    if not blocks and total is None and ranks is None and devices is None:
        return
    names, counts, chosen = _choose_blocks(draft, blocks, same, total)
    is_alone = bool(find_launcher([word.text for word in (launch.script, *launch.args)]))
    for name, count, block in zip(names, counts, chosen, strict=True):
        starts_ranks = launch.kind == "command" and is_alone  # those of its node
        is_single = launch.kind in ("python", "command") and not launch.command.is_step
        why = "as the script starts the program once" if is_single else ""
        why = "as the launcher counts the ranks" if ranks is not None or starts_ranks else why
        group = _build_group(draft, block, count, why)
        own = ranks
        if own is None and block is not None and launch.kind in ("python", "command"):
            tasks = _work_out(block.options, count)["ranks"] if launch.command.is_step else 1
            own = tasks if isinstance(tasks, int) else None
            if starts_ranks:
                own = None
        if devices is not None:
            own = len(devices) if own is None or own > len(devices) else own
            devices = devices[:own]
        if "gpus" not in group and ranks is not None:
            group["gpus"] = max(devices) + 1 if devices else ranks
            draft.note(
                f"no --gres was found for group {name}: it asks for {group['gpus']} GPUs "
                "of any type"
            )
        draft.groups.append(
            {"group": name, "count": count, **group, "ranks": own, "devices": devices}
        )
        asked = _get_count(block)
        if asked is not None and asked != count:
            draft.note(f"--nodes={asked} of group {name} differs from the launcher's {count}")
    _compare_reach(draft, launch, total)


def _compare_reach(draft: Draft, launch: Launch, total: int | None) -> None:
    """Note a launch that reaches fewer nodes in the script than in the conf; `total` is the
    launcher's own number of nodes."""
    count = sum(group["count"] for group in draft.groups)
    is_own = launch.kind in ("deepspeed", "varuna") and {"hostfile", "machine_list"} & {
        *launch.options
    }
    if count < 2 or (total or 1) > 1 or is_own:
        return
    where, command = launch.command.where, launch.command
    if not command.is_step:
        draft.note(
            f"{where}: the script starts it without srun, so on the first node of the job only; "
            f"the conf starts it on each of its {count} nodes",
            is_first=True,
        )
    elif launch.kind == "torch":
        draft.note(
            f"{where}: without --nnodes each torchrun is a training of its own; the conf starts "
            f"one on all {count} nodes",
            is_first=True,
        )
    elif (
        len(draft.groups) > 1
        and not any("het-group" in options for options, _ in draft.lines.wrapping.srun)
        and any(block.is_het for block in draft.found.blocks)
    ):
        draft.note(
            f"{where}: without --het-group srun starts it on the first component of the job only; "
            f"the conf starts it on all {count} nodes",
            is_first=True,
        )


def _find_counts(draft: Draft, launch: Launch) -> tuple[int | None, int | None]:
    """Return the number of nodes and of ranks on each, from the launcher's options."""
    total = ranks = None
    options = launch.options
    where = launch.command.where
    for name in COUNTED[:2]:
        word = options.get(name)
        if word is None:
            continue
        total = None if word.is_open else to_number(word.text.rpartition(":")[2])
        if ":" in word.text:
            draft.note(
                f"{where}: --{name} {word.text}: the maximum is requested; fewer need morph.enabled"
            )
        _record_count(draft, f"{where}: --{name} {word.text}", total, f"{NODES}[0].count")
    for name in COUNTED[2:]:
        word = options.get(name)
        if word is not None:
            ranks = None if word.is_open else to_number(word.text)
            _record_count(draft, f"{where}: --{name} {word.text}", ranks, f"{NODES}[0].ranks")
    return total, ranks


def _record_count(draft: Draft, said: str, value: int | None, key: str) -> None:
    if value is None:
        draft.note(f"{said} is not known; set {key}")
    else:
        draft.record(said, key)


def _find_hosts(draft: Draft, launch: Launch) -> list[Hosts]:
    """Return the nodes that a hostfile, machine list, --include and --exclude select."""
    options = launch.options
    hosts: dict[str, Hosts] = {}
    file = find_host_file(launch)
    name = posixpath.basename(file)
    written = [one.written[name] for one in draft.found.recordings if one.written.get(name)]
    for text in [*written, draft.files.get(name)][:1]:
        if text is None or not name:
            continue
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            said = re.fullmatch(r"slots=(\d{1,4})", words[1]) if len(words) > 1 else None
            if words:
                hosts[words[0]] = Hosts(slots=int(said[1]) if said else None, devices=None)
        draft.record(f"{file}: {len(hosts)} hosts", f"{NODES}[].count")
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
    exclude = options.get("exclude")
    if exclude is not None and exclude.text and not exclude.is_open:
        _exclude(hosts, exclude.text)
        draft.record(f"--exclude {exclude.text}", f"{NODES}[].devices")
    most = options.get("num_nodes")
    return list(hosts.values())[: to_number(most.text) if most is not None else None]


def find_host_file(launch: Launch) -> str:
    """Return the launcher's file with the names of the hosts; empty if it has none."""
    found = (launch.options.get(name) for name in ("hostfile", "machine_list"))
    return next((word.text for word in found if word is not None), "")


def _exclude(hosts: dict[str, Hosts], text: str) -> None:
    for part in text.split("@"):
        host, _, listed = part.partition(":")
        slots = hosts[host].slots if host in hosts else None
        if not listed:
            hosts.pop(host, None)
        elif slots is not None:
            gone = to_devices(listed) or ()
            left = tuple(one for one in range(slots) if one not in gone)
            hosts[host] = Hosts(slots=slots, devices=left)


def _take_devices(launch: Launch) -> list[int] | None:
    given = launch.command.env
    for name in list_variables():
        if name in given and not given[name].is_open:
            found = to_devices(given[name].text)
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
    """Return the job blocks, with options added that only srun's lines have."""
    blocks = [replace(block, options=dict(block.options)) for block in draft.found.blocks]
    for options, command in draft.lines.wrapping.srun:
        own = [block for block in blocks if block.file == command.file] or blocks[-1:]
        if not own:
            own = [JobBlock(file=command.file)]
            blocks += own
        component = to_number(options["het-group"].text) if "het-group" in options else None
        if component is not None and component < len(own):
            own = [own[component]]
        for name, word in options.items():
            said = f"{command.where}: srun --{name}={word.text}".rstrip("=")
            if name.startswith("container-") and name in PYXIS:
                continue
            if name in ("output", "error") and word.is_open:
                said = f"{command.where}: srun --{name}"
            elif word.is_open:
                why = "known only in the job" if word.shell else "not given"
                draft.note(f"{said} is left out: its value is {why}")
                continue
            if name in GROUP_OPTIONS:
                values = {block.options[name][0] for block in own if name in block.options}
                if not values:
                    own[-1].options[name] = (word.text, command.line)
                    draft.record(said, NODES)
                elif word.text in values or (name == "gres" and word.text == own[-1].gres):
                    draft.record(said, f"{NODES}, as #SBATCH says")
                else:
                    draft.note(f"{said} is not used: #SBATCH says {', '.join(sorted(values))}")
            elif name in AMOUNTS:
                if name not in own[-1].options:
                    own[-1].options[name] = (word.text, command.line)
            elif name == "het-group" and len(blocks) > 1:
                draft.record(said, NODES)
            elif name in ("verbose", "quiet"):
                continue  # of srun's own messages
            elif name in ("output", "error", "wait", "label", "unbuffered", "kill-on-bad-exit"):
                why = "lines are kept by node and rank, and ranks are ended together"
                draft.record(said, f"no key of the conf, as {why}")
            else:
                reason = SRUN_REASONS.get(name) or explain_option(name) or "vjob starts the steps"
                draft.note(f"{said} is left out: {reason}")
    return blocks


def _build_group(
    draft: Draft, block: JobBlock | None, count: int, other_ranks: str
) -> dict[str, Any]:
    """Build a group of `count` nodes from a job's options; `other_ranks` is why the job's tasks are
    not its ranks, empty if they are."""
    group: dict[str, Any] = {}
    if block is None:
        return group
    options = dict(block.options)
    if "gres" not in options and block.gres is not None:
        options["gres"] = (block.gres, 0)
    amounts = _work_out(options, count)
    is_by_node = bool({"gres", "gpus-per-node"} & {*options})
    is_spread = amounts["count"] is None and count == 1 and not is_by_node
    for name, (text, line) in options.items():
        where = f"{block.file}:{line}: " if line else ""
        said = f"{where}--{name}={redact_string(text)}".rstrip("=")
        key, convert = {**GROUP_OPTIONS, **TOP_OPTIONS}.get(name, ("", None))
        if name in AMOUNTS:
            amount = amounts.get(AMOUNTS[name])
            if other_ranks and AMOUNTS[name] == "ranks":
                draft.record(said, f"no key of the conf, {other_ranks}")
            elif amount is None and AMOUNTS[name] == "gpus" and is_by_node:
                draft.record(said, "no key of the conf, as another option counts a node's GPUs")
            elif amount is None:
                draft.note(f"{said} is left out: its amount per node is not known; set "
                           f"{NODES}[].{AMOUNTS[name]}")  # fmt: skip
            else:
                draft.record(said, f"{NODES}[].{AMOUNTS[name]}")
                if name == "gpus" and amount != 1 and is_spread:
                    draft.note(f"{said}: the conf asks for them on one node; sbatch without "
                               "--nodes may spread them over several")  # fmt: skip
        elif convert is not None:
            value = convert(text)
            if value is None:
                draft.note(f"{said} is left out: {key} cannot hold it")
            elif name in GROUP_OPTIONS:
                group.setdefault(key, value)
                draft.record(said, f"{NODES}[].{key}")
            elif name == "signal" and (why := _explain_signal(draft, text)):
                draft.note(f"{said} {why}")
                if not _find_trap(draft, text):
                    draft.values.setdefault(key, value)
            else:
                draft.put(key, value, said)
        elif name in ("output", "error"):
            draft.record(said, "no key of the conf, as all lines are in the run folder")
        elif name in WORDS:
            draft.note(f"{said} is left out: {explain_option(name)}")
        elif find_text_problem(text) or not text.isprintable():
            draft.note(f"{where}--{name} is left out: its value is not printable")
        else:
            sbatch = draft.values.setdefault("cluster.sbatch", {})
            sbatch.setdefault(name, text or True)
            draft.record(said, "cluster.sbatch")
    for key, amount in amounts.items():
        if amount is not None and key not in ("count", "ranks"):
            group.setdefault(key, amount)
    if amounts["cpus"] is not None and "cpus-per-task" not in options:
        draft.record("one CPU a task, as no option says otherwise", f"{NODES}[].cpus")
    return group


def _explain_signal(draft: Draft, text: str) -> str:
    """Explain what a signal before the time limit does otherwise here; empty if it does the
    same."""
    if where := _find_trap(draft, text):
        return (
            f"is left out: the trap of {where} acts on it, in the batch script; "
            "cluster.signal_before_end_s sends SIGUSR1 to each rank, and cluster.requeue requeues"
        )
    to, _, name = text.partition("@")[0].rpartition(":")
    is_same = not to and _name_signal(name) == "USR1"
    return "" if is_same else "is not the same here: each rank gets SIGUSR1 instead"


def _find_trap(draft: Draft, text: str) -> str:
    """Return the place of the trap that handles the signal of `--signal`; empty if none does."""
    name = _name_signal(text.partition("@")[0].rpartition(":")[2])
    for command in draft.found.setup:
        words = command.texts
        if words[0] == "trap" and words[1:2] != ["-"] and name in map(_name_signal, words[2:]):
            return command.where
    return ""


def _name_signal(text: str) -> str:
    """Return a signal's name without SIG; its number counts as this machine's."""
    if text.isdecimal() and int(text) in set(signal.Signals):
        text = signal.Signals(int(text)).name
    return text.upper().removeprefix("SIG")


def _work_out(
    options: Mapping[str, tuple[str, int]], count: int | None = None
) -> dict[str, int | str | None]:
    """Compute the resources asked of one node; Slurm counts them by task, CPU, GPU or job.

    GPUs of a job whose options do not say how many nodes it has are shared by `count` nodes.
    """

    def number(name: str) -> int | None:
        return to_number(options[name][0]) if name in options else None

    nodes = number("nodes")
    tasks, each = number("ntasks"), number("ntasks-per-node") or number("tasks-per-node")
    if each is None and tasks is not None and nodes is not None and tasks % nodes == 0:
        each = tasks // nodes
    if each is None and tasks is None and "ntasks-per-gpu" not in options:
        each = 1
    if nodes is None and tasks is not None and each is not None and tasks % each == 0:
        nodes = tasks // each
    elif nodes is None and tasks == 1:
        nodes, each = 1, 1
    name = "gpus" if "gpus" in options else "gpus-per-task"
    kind, _, amount = options.get(name, ("", 0))[0].rpartition(":")
    gpus = to_number(amount)
    shared = nodes if nodes is not None else count
    if gpus is not None and name == "gpus":
        gpus = gpus // shared if shared is not None and gpus % shared == 0 else None
    elif gpus is not None:
        gpus = gpus * each if each is not None else None
    all_gpus = _count_gpus(options, gpus)
    per_gpu = number("ntasks-per-gpu")
    if each is None and tasks is None and per_gpu is not None and all_gpus is not None:
        each = per_gpu * all_gpus
    is_whole = "exclusive" in options and not options["exclusive"][0]
    per = 1 if _count_by_task(options) and not is_whole else number("cpus-per-task")
    cpus = per * each if per is not None and each is not None else None
    found: dict[str, int | str | None] = {"count": nodes, "ranks": each, "cpus": cpus}
    found["gpus"] = f"{kind}:{gpus}" if kind and gpus is not None else gpus
    allocated = None if is_whole else cpus
    for name, many in (("mem-per-cpu", allocated), ("mem-per-gpu", all_gpus)):
        gigabytes = to_gigabytes(options[name][0], many) if name in options and many else None
        if gigabytes is not None:
            found["memory_gb"] = gigabytes
    return found


def _count_by_task(options: Mapping[str, tuple[str, int]]) -> bool:
    """Return True if a job's CPUs follow from its tasks, by Slurm's default of one CPU for each,
    and the conf must say so: the job has several tasks, or asks for memory by CPU. Return False for
    a job with GPUs, as a site may have a default number of CPUs for a GPU."""
    has_gpus = any(name in options for name in _GPU_OPTIONS)
    tasks = [to_number(options[name][0]) for name in ("ntasks", "ntasks-per-node", "tasks-per-node")
             if name in options]  # fmt: skip
    matters = "mem-per-cpu" in options or any(one is not None and one > 1 for one in tasks)
    return "cpus-per-task" not in options and not has_gpus and matters


def _count_gpus(options: Mapping[str, tuple[str, int]], gpus: int | None) -> int | None:
    for name in ("gres", "gpus-per-node"):
        if name in options:
            return to_number(options[name][0].rpartition(":")[2])
    return gpus


_GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")


def _has_gpus(blocks: Sequence[JobBlock]) -> bool:
    return any(
        block.gres or any(name in block.options for name in _GPU_OPTIONS) for block in blocks
    )


def _get_count(block: JobBlock | None) -> int | None:
    count = _work_out(block.options)["count"] if block is not None else None
    return count if isinstance(count, int) else None


def _choose_same(blocks: list[JobBlock], total: int | None) -> JobBlock | None:
    """Return the job with as many nodes as the launcher has; InputError if none of several fits."""
    fitting = [block for block in blocks if _get_count(block) == total]
    files = sorted({block.file for block in blocks})
    if total is not None and not fitting and len(files) > 1:
        raise InputError(
            f"the launcher counts {total} nodes, but no job has as many; choose one of the "
            f"scripts: {', '.join(files)}"
        )
    return next(iter(fitting or blocks), None)


def _choose_mixed(blocks: list[JobBlock], total: int | None) -> list[JobBlock | None]:
    """Return two jobs, each None if there is none: that of the master, which has one node, and that
    of the slaves, which have the other nodes of the launcher's `total`."""
    master = next((block for block in blocks if _get_count(block) == 1), None)
    others = [block for block in blocks if block is not master]
    if master is None and len(others) > 1:
        master, *others = others
    fitting = [block for block in others if total and _get_count(block) == total - 1]
    return [master, next(iter(fitting or others), None)]


def _count_slaves(chosen: list[JobBlock | None], total: int | None) -> int:
    return total - 1 if total is not None else _get_count(chosen[1]) or 1
