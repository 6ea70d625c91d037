"""Checks of a conf's cluster: node groups, port, and sbatch options that vjob sets itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup
from vjob.jobs.conf.slurm_words import WORDS, answer_word, explain_option, spell, to_gpus
from vjob.jobs.errors import KeyProblem

# Linux hands these out to outgoing connections (net.ipv4.ip_local_port_range).
EPHEMERAL = (32768, 60999)
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
GPUS = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*:)?[1-9][0-9]{0,3}")
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_.:,@^=-]{1,128}")
_WORD = re.compile(r"[^\s,\x00-\x1f\x7f]+")
_QUEUES = re.compile(r"[^\s\x00-\x1f\x7f]+")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")

MOST_RANKS = 200_000
MOST_GROUPS = 2_000


def check_groups(conf: JobConf) -> Iterator[KeyProblem]:
    """Check each node group by itself, except numbers, whose bounds are in the schema."""
    if not conf.cluster.nodes:
        yield "cluster.nodes", (), "must have at least one group, such as {group: master}"
    total = sum(group.count * (group.ranks or 1) for group in conf.cluster.nodes)
    if total > MOST_RANKS or len(conf.cluster.nodes) > MOST_GROUPS:
        asked = f"{len(conf.cluster.nodes)} groups, {total} ranks"
        yield "cluster.nodes", asked, f"the limits are {MOST_GROUPS} groups and {MOST_RANKS} ranks"
    seen: dict[str, int] = {}
    for index, group in enumerate(conf.cluster.nodes):
        key = f"cluster.nodes[{index}]"
        if not _GROUP.fullmatch(group.group):
            allowed = "must be at most 64 letters, digits, - and _, a letter or digit first"
            yield f"{key}.group", group.group, allowed
        if group.group in seen:
            first = seen[group.group]
            message = f"must be unique; cluster.nodes[{first}] has this name too"
            yield f"{key}.group", group.group, message
        seen.setdefault(group.group, index)
        yield from _check_gpus(group, key)
        if not _INTERFACE.fullmatch(group.interface):
            yield f"{key}.interface", group.interface, "must be auto or an interface such as eth0"
        if group.queue is not None and not _QUEUES.fullmatch(group.queue):
            yield f"{key}.queue", group.queue, "must be a Slurm partition, without spaces"


def _check_gpus(group: NodeGroup, key: str) -> Iterator[KeyProblem]:
    gpus, devices = group.gpus, group.devices
    if isinstance(gpus, str) and (not GPUS.fullmatch(gpus) or gpus.startswith("gpu:")):
        message = "must be a type and a number such as a100:4, a number, or null"
        meant = to_gpus(gpus) or (f"{gpus}:1" if _TYPE.fullmatch(gpus) else None)
        yield f"{key}.gpus", gpus, message + (f"; write `gpus: {spell(meant)}`" if meant else "")
        return
    if isinstance(gpus, int) and not 0 <= gpus < 10_000:
        yield f"{key}.gpus", gpus, "must be at least 0"
        return
    if devices is None:
        return
    if not devices:
        yield f"{key}.devices", devices, "must list at least one GPU; null takes them all"
    if len(set(devices)) != len(devices):
        yield f"{key}.devices", devices, "must not list a GPU twice"
    for position, device in enumerate(devices):
        limit = group.num_gpus if gpus is not None else None
        if device < 0 or (limit is not None and device >= limit):
            allowed = f"must be 0 to {limit - 1}, as gpus is {gpus}" if limit else "is not there"
            yield f"{key}.devices[{position}]", device, allowed
    if devices and group.ranks is not None and group.ranks != len(devices):
        message = f"must be {len(devices)}, one for each of devices; or leave it out"
        yield f"{key}.ranks", group.ranks, message


def check_cluster(conf: JobConf) -> Iterator[KeyProblem]:
    cluster = conf.cluster
    if cluster.hetero != "auto" and len(cluster.nodes) == 1:
        message = "needs several groups in cluster.nodes, but there is one; leave it at auto"
        yield "cluster.hetero", cluster.hetero, message
    is_split = cluster.hetero == "split" and len(cluster.nodes) > 1
    if conf.on_hang.do == "requeue" and not cluster.requeue:
        yield "on_hang.do", "requeue", "requeue needs cluster.requeue: true"
    if cluster.requeue and is_split and not conf.morph.enabled:
        message = (
            "conflicts with cluster.hetero: split, whose jobs would be requeued one by one; use "
            "hetero: hetjob, or requeue: false"
        )
        yield "cluster.requeue", True, message
    if cluster.restart_same and not cluster.restarts:
        yield "cluster.restart_same", True, "needs cluster.restarts, such as 3"
    for name, word in (("account", cluster.account), ("qos", cluster.qos)):
        if word is not None and not _WORD.fullmatch(word):
            yield f"cluster.{name}", word, "must be a name without spaces, or null for the default"
    for index, node in enumerate(cluster.exclude):
        if not _QUEUES.fullmatch(node):
            yield (
                f"cluster.exclude[{index}]",
                node,
                "must be a node name such as n060 or n[060-067]",
            )
    yield from _check_machines(cluster, may_morph=conf.morph.enabled)
    yield from _check_port(cluster.port)
    yield from _check_sbatch("cluster.sbatch", cluster.sbatch)
    for index, group in enumerate(cluster.nodes):
        yield from _check_sbatch(f"cluster.nodes[{index}].sbatch", group.sbatch)


def _check_machines(cluster: Cluster, *, may_morph: bool) -> Iterator[KeyProblem]:
    """Check the keys of a run on a list of machines, and the address of the first machine."""
    listed = cluster.machine_list
    if cluster.address is not None and may_morph:
        message = "conflicts with morph, where any node may come first; remove it"
        yield "cluster.address", cluster.address, message
    if cluster.scheduler == "machines" and listed is None:
        message = "needs cluster.machine_list, a file with one host per line"
        yield "cluster.scheduler", cluster.scheduler, message
    if listed is None:
        if cluster.ssh_config is not None:
            yield "cluster.ssh_config", cluster.ssh_config, "needs cluster.machine_list"
        return
    if cluster.scheduler not in ("auto", "machines"):
        message = f"conflicts with cluster.scheduler: {cluster.scheduler}; remove cluster.scheduler"
        yield "cluster.machine_list", listed, message
    if len(cluster.nodes) > 1 and may_morph:
        message = f"needs one group in cluster.nodes with morph, not {len(cluster.nodes)}"
        yield "cluster.machine_list", listed, message
    if len(cluster.nodes) > 1 and cluster.hetero == "split":
        message = "is for Slurm: one job starts all machines of cluster.machine_list; remove it"
        yield "cluster.hetero", cluster.hetero, message


def _check_port(port: int | str) -> Iterator[KeyProblem]:
    if not isinstance(port, int):
        return
    low, high = EPHEMERAL
    if not 1024 <= port <= 65535:
        yield "cluster.port", port, "must be 1024 to 65535, or auto"
    elif low <= port <= high:
        message = (
            f"is within {low} to {high}, the ports that Linux gives to outgoing connections, so "
            "it may be in use; choose auto or a port outside"
        )
        yield "cluster.port", port, message


def _check_sbatch(parent: str, options: Mapping[str, object]) -> Iterator[KeyProblem]:
    for name, value in options.items():
        key = f"{parent}.{name}"
        if not _OPTION.fullmatch(name):
            bare = name.strip().lstrip("-").lower().replace("_", "-")
            hint = f', such as "{bare}"' if _OPTION.fullmatch(bare) else ""
            yield key, value, f"must be an option's long name, without leading dashes{hint}"
        elif name in WORDS:
            text = None if value is None else spell(value)
            yield key, value, f"cannot be given here: {answer_word(parent, name, text)}"
        elif whole := next((own for own in WORDS if own.startswith(name)), ""):
            # sbatch takes any beginning of an option that fits no other one.
            yield (
                key,
                value,
                f"sbatch may read it as {whole}, which cannot be given here: "
                f"{explain_option(whole)}; write the full name of another option",
            )
        elif value is None:
            yield key, value, "must have a value; true for an option that takes no value"
        elif not isinstance(value, str | int | float) or not str(value).isprintable():
            yield key, value, "must be a single value on one line"
