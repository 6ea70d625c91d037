"""Convert options of `vjob run` in Slurm's spellings to keys of the conf. Pure.

    -N 2 -p gpu --gpus-per-node a100:4 -t 2h   cluster: {walltime_min: 120, nodes: [..]}

Slurm counts tasks, and CPUs by task; the conf counts ranks and CPUs by node. A number that does not
divide evenly, or that would leave a choice to Slurm, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vjob.jobs.conf.quantities import MINUTES, parse_duration
from vjob.jobs.conf.schema import spell_gpus
from vjob.jobs.conf.slurm_words import (
    to_gigabytes,
    to_gpus,
    to_minutes,
    to_node_list,
    to_number,
    to_word,
)
from vjob.jobs.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SlurmOption:
    """An option as spelled by sbatch."""

    name: str
    help: str
    short: str = ""
    metavar: str = ""
    """Name of the value; empty for a switch."""
    is_for_slurm: bool = True
    """True if the option asks for a Slurm job; others also apply on this machine."""
    as_sbatch: bool = False
    """True if the option is passed to sbatch unchanged, by cluster.sbatch."""


def _own(name: str, short: str, metavar: str, help: str) -> SlurmOption:
    return SlurmOption(name=name, short=short, metavar=metavar, help=help)


def _here(name: str, short: str, metavar: str, help: str) -> SlurmOption:
    return SlurmOption(name=name, short=short, metavar=metavar, help=help, is_for_slurm=False)


def _passed(name: str, short: str, metavar: str, help: str) -> SlurmOption:
    return SlurmOption(name=name, short=short, metavar=metavar, help=help, as_sbatch=True)


OPTIONS = (
    _here("ntasks", "n", "N", "Total ranks; default: one per requested GPU, or one."),
    _here("gpus", "G", "[TYPE:]N", "Total GPUs, such as 4 or a100:4."),
    _here("job-name", "J", "NAME", "Name of the run; default: that of the program."),
    _own("nodes", "N", "N", "Nodes."),
    _own("partition", "p", "QUEUE", "Slurm's partition, or several with commas."),
    _own("time", "t", "TIME", "Time limit: 2h, 90 (minutes), 2:00:00, 1-12."),
    _own("account", "A", "NAME", "Account."),
    _own("qos", "q", "NAME", "Quality of service."),
    _own("ntasks-per-node", "", "N", "Ranks per node."),
    _own("gpus-per-node", "", "[TYPE:]N", "GPUs per node."),
    _own("gpus-per-task", "", "[TYPE:]N", "GPUs per rank."),
    _own("gres", "", "gpu[:TYPE]:N", "GPUs per node."),
    _own("cpus-per-task", "c", "N", "CPUs per rank."),
    _own("mem", "", "SIZE", "Memory per node: 64G, or in MB; 0 for all."),
    _own("exclude", "x", "NODES", "Nodes to avoid."),
    _own("requeue", "", "", "Start again after a node failure or a preemption."),
    _passed("nodelist", "w", "NODES", "Nodes to take."),
    _passed("constraint", "C", "FEATURES", "Features that nodes must have."),
    _passed("reservation", "", "NAME", "Reservation."),
    _passed("exclusive", "", "", "Do not share nodes with other jobs."),
    _passed("licenses", "L", "NAMES", "Licenses."),
    _passed("begin", "b", "TIME", "Start no earlier."),
    _passed("nice", "", "N", "Lower the job's priority."),
    _passed("mail-type", "", "TYPES", "Events for which Slurm sends mail."),
    _passed("mail-user", "", "ADDRESS", "Recipient of Slurm's mail."),
)
BY_NAME: Mapping[str, SlurmOption] = {option.name: option for option in OPTIONS}
Given = Mapping[str, str | bool]
"""Options with their values, by name; switches are True."""


def find_asked(given: Given) -> list[str]:
    """Return the given options that ask for a Slurm job, as spelled."""
    return [f"--{name}" for name in given if BY_NAME[name].is_for_slurm]


def build_cluster(given: Given) -> dict[str, Any]:
    """Return the section `cluster` without its scheduler; raise InputError for invalid values."""
    read = _Reader(given)
    group = {"group": "all", **_build_group(read)}
    cluster = {
        "walltime_min": read("time", _to_minutes, "a time such as 2h, 90 (minutes) or 2:00:00"),
        "account": read("account", to_word, "a name"),
        "qos": read("qos", to_word, "a name"),
        "exclude": read("exclude", to_node_list, "nodes such as n1,n[4-7]"),
        "requeue": True if "requeue" in given else None,
        "sbatch": {name: value for name, value in given.items() if BY_NAME[name].as_sbatch},
        "nodes": [group] if len(group) > 1 else [],
    }
    return {key: value for key, value in cluster.items() if value not in (None, {}, [])}


def _build_group(read: _Reader) -> dict[str, Any]:
    """Return the single group of nodes, without empty keys."""
    per_node = read("ntasks-per-node", to_number, "a number")
    tasks = read("ntasks", to_number, "a number of ranks")
    asked = read("nodes", to_number, "one number of nodes, not a range")
    gpus = _join(read, ["gres", "gpus-per-node"])
    count = asked or 1
    if asked is None and tasks and per_node:
        count = _divide(tasks, per_node, f"--ntasks {tasks}", f"--ntasks-per-node {per_node}")
    if tasks:
        ranks = _divide(tasks, count, f"--ntasks {tasks}", f"{count} nodes")
        if per_node not in (None, ranks):
            raise InputError(
                f"--ntasks {tasks} on {count} nodes is {ranks} per node, but --ntasks-per-node "
                f"is {per_node}: remove one of them"
            )
        per_node = ranks
    total = read("gpus", _to_type, "a number, or a type and a number such as a100:4")
    if total:
        kind, number = total
        each = _divide(number, count, f"--gpus {number}", f"{count} nodes")
        gpus = _agree(gpus, (kind, each), f"--gpus {number}")
    per_rank = read("gpus-per-task", _to_type, "a number, or a type and a number such as a100:1")
    if per_rank:
        kind, number = per_rank
        if per_node is None:
            raise InputError("--gpus-per-task needs the ranks: give --ntasks or --ntasks-per-node")
        gpus = _agree(gpus, (kind, number * per_node), f"--gpus-per-task {number}")
    if gpus and asked is None and per_node and per_node > gpus[1]:
        raise InputError(
            f"{per_node} ranks on the {gpus[1]} GPUs of one node: give the number of nodes with -N"
        )
    cpus = read("cpus-per-task", to_number, "a number of CPUs")
    found = {
        "count": count if count > 1 else None,
        "queue": read("partition", to_word, "a partition"),
        "gpus": None if gpus is None else spell_gpus(*gpus),
        "ranks": None if gpus and gpus[1] == per_node else per_node,
        "cpus": cpus and cpus * (per_node or (gpus[1] if gpus else 1)),
        "memory_gb": read("mem", to_gigabytes, "a size such as 64G, or a number of MB"),
    }
    return {key: value for key, value in found.items() if value is not None}


class _Reader:
    """Reads values of options; raises InputError for one of the wrong kind."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def __call__(self, name: str, convert: Callable[[str], Any], kind: str) -> Any:
        if name not in self._given:
            return None
        text = str(self._given[name])
        value = convert(text)
        if value is None:
            raise InputError(f"--{name} {text}: give {kind}")
        return value


Gpus = tuple[str, int]
"""Type of GPU, empty for any, and number."""


def _join(read: _Reader, names: list[str]) -> Gpus | None:
    forms = {
        "gres": (_to_gres, "GPUs, such as gpu:4 or gpu:a100:4; set other resources with --set"),
        "gpus-per-node": (_to_type, "a number, or a type and a number such as a100:4"),
    }
    found: Gpus | None = None
    for name in names:
        gpus = read(name, *forms[name])
        if gpus is not None:
            found = _agree(found, gpus, f"--{name}")
    return found


def _agree(gpus: Gpus | None, other: Gpus, said: str) -> Gpus:
    """Return two equal requests for GPUs as one; either may have the type."""
    if gpus is None:
        return other
    types = {kind for kind, _ in (gpus, other)} - {""}
    if gpus[1] != other[1] or len(types) > 1:
        raise InputError(
            f"{said} is {spell_gpus(*other)} GPUs per node, but another option says "
            f"{spell_gpus(*gpus)}: remove one of them"
        )
    return "".join(types), gpus[1]


def _to_gres(text: str) -> Gpus | None:
    return _to_type(text[4:] or "1") if f"{text}:".startswith("gpu:") else None


def _to_type(text: str) -> Gpus | None:
    found = to_gpus(f"gpu:{text}")
    if found is None:
        return None
    kind, _, number = str(found).rpartition(":")
    return kind, int(number)


def _to_minutes(text: str) -> int | None:
    """Parse a time in one of Slurm's formats, or a number with a unit such as `2h`; return minutes
    rounded up, None if the text is no time or the time is zero."""
    minutes = to_minutes(text)
    if minutes is None and (seconds := parse_duration(text)):
        minutes = -(-int(seconds) // MINUTES.size)
    return minutes or None


def _divide(number: int, by: int, said: str, among: str) -> int:
    if number % by:
        raise InputError(f"{said} cannot be divided by {among}: every node gets the same number")
    return number // by
