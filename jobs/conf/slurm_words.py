"""Map Slurm's options to keys of a conf, with values respelled.

A key of the conf has one spelling. A user who writes Slurm's name gets an answer to paste, never a
guess: `partition: gpu1` in `cluster` becomes `queue: gpu1` in a group of `cluster.nodes`. An option
without a key belongs in `cluster.sbatch`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*))?:(?P<count>[1-9][0-9]{0,3})")
_TIME = re.compile(r"(?:(?P<d>\d{1,4})-)?(?P<a>\d{1,6})(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MEMORY = re.compile(r"(?P<number>\d{1,9})(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
_SIGNAL = re.compile(r"(?:[A-Z]+:)?[A-Z0-9]+@(?P<seconds>\d{1,6})", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_./@+-]+", re.ASCII)
_GROUP = re.compile(r"cluster\.nodes\[\d+\]")


def to_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def to_gpus(text: str) -> str | int | None:
    """Convert Slurm's `gpu:a100:4` or `gpu:4` to a value of `gpus`; None for other text."""
    match = _GRES.fullmatch(f"{text}:1" if text == "gpu" else text)
    if match is None:
        return None
    return f"{match['type']}:{match['count']}" if match["type"] else int(match["count"])


def to_minutes(text: str) -> int | None:
    """Convert a time of Slurm (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s) to minutes; seconds round
    up. None for zero and for other texts."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:
        seconds = ((int(match["d"]) * 24 + first) * 60 + second) * 60 + third
    elif match["c"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) or None


def to_gigabytes(text: str, many: int = 1) -> int | None:
    """Return so many times an amount of memory in GiB, rounded up; None for other texts."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        return None
    return -int(-int(match["number"]) * many * _UNITS[match["unit"].upper()] // 1)


def to_name(text: str) -> str | None:
    """Return a job's name as a run's name; None for `last` and numbers, which mean other things."""
    if re.fullmatch(r"last|L?\d+", text):
        return None
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) else None


def to_node_list(text: str) -> list[str] | None:
    """Split a list of node names at commas outside brackets; None if the text is not one."""
    names = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]\s])+", text)
    return names if names and ",".join(names) == text else None


def to_word(text: str) -> str | None:
    return text if re.fullmatch(r"[\w.,-]+", text, re.ASCII) else None


def _to_text(text: str) -> str | None:
    return text if text.isprintable() and text else None


def _to_seconds(text: str) -> int | None:
    match = _SIGNAL.fullmatch(text)
    return int(match["seconds"]) if match else None


def _to_gpu_count(text: str) -> str | int | None:
    return to_gpus(text if text.startswith("gpu") else f"gpu:{text}")


@dataclass(frozen=True)
class SlurmWord:
    """The conf's counterpart of an sbatch option."""

    key: str
    """The conf's key; empty if there is none."""
    respell: Callable[[str], Any] | None = None
    """Function from sbatch's value to the key's, None if there is no equivalent. Without a
    function, the two count in different units."""
    note: str = ""
    """The key's unit if it differs from sbatch's, or advice if there is no key."""
    outside: str = ""
    """A shorter key to use outside a group of nodes."""


_NODES = "cluster.nodes[]."
_RANKS = SlurmWord(f"{_NODES}ranks", to_number)
_GPUS = SlurmWord(f"{_NODES}gpus", _to_gpu_count, "of one node")
_MEMORY_GB = SlurmWord(f"{_NODES}memory_gb", None, "of a whole node")
_ENV = SlurmWord("env", None, "for values to set, and pass_env for names of variables to pass on")
_SWEEP = SlurmWord("", None, "a run is one job; `vjob submit --sweep KEY=A,B` submits several")
_GROUPS = SlurmWord("", None, "use several groups in cluster.nodes")
_ELSEWHERE = SlurmWord("", None, "submit on that cluster's own login node")
_OURS = SlurmWord("", None, "vjob sets it itself")
WORDS: Mapping[str, SlurmWord] = {
    "job-name": SlurmWord("name", to_name),
    "output": SlurmWord("log_folder"),
    "error": SlurmWord("log_folder"),
    "nodes": SlurmWord(f"{_NODES}count", to_number, outside="cluster.nodes"),
    "ntasks": SlurmWord(f"{_NODES}ranks", None, "of one node"),
    "ntasks-per-node": _RANKS,
    "tasks-per-node": _RANKS,
    "ntasks-per-gpu": SlurmWord(
        f"{_NODES}ranks", None, "the number of ranks on a node; default: one per GPU"
    ),
    "partition": SlurmWord(f"{_NODES}queue", to_word),
    "gres": SlurmWord(f"{_NODES}gpus", to_gpus),
    "gpus": _GPUS,
    "gpus-per-node": SlurmWord(_GPUS.key, _to_gpu_count),
    "gpus-per-task": SlurmWord(_GPUS.key, None, "the number of GPUs of a node; each rank gets one"),
    "cpus-per-task": SlurmWord(f"{_NODES}cpus", None, "for all ranks of one node together"),
    "mem": SlurmWord(_MEMORY_GB.key, to_gigabytes),
    "mem-per-cpu": _MEMORY_GB,
    "mem-per-gpu": _MEMORY_GB,
    "time": SlurmWord("cluster.walltime_min", to_minutes),
    "account": SlurmWord("cluster.account", to_word),
    "qos": SlurmWord("cluster.qos", to_word),
    "exclude": SlurmWord("cluster.exclude", to_node_list),
    "requeue": SlurmWord("cluster.requeue", lambda text: True if text in ("", "true") else None),
    "no-requeue": SlurmWord(
        "cluster.requeue", lambda text: False if text in ("", "true") else None
    ),
    "signal": SlurmWord("cluster.signal_before_end_s", _to_seconds),
    "export": _ENV,
    "export-file": _ENV,
    "get-user-env": _ENV,
    "chdir": SlurmWord("workdir", _to_text),
    "container": SlurmWord("container.image", _to_text),
    "container-image": SlurmWord("container.image", _to_text),
    "container-mounts": SlurmWord("container.mounts", lambda text: text.split(",")),
    "container-workdir": SlurmWord("container.workdir", _to_text),
    "input": _OURS,
    "open-mode": _OURS,
    "comment": SlurmWord("", None, "vjob finds its jobs by their comment"),
    "array": _SWEEP,
    "hetjob": _GROUPS,
    "het-group": _GROUPS,
    "no-kill": SlurmWord("", None, "a run cannot continue without all its nodes"),
    "cluster": _ELSEWHERE,
    "clusters": _ELSEWHERE,
    "wait": SlurmWord("", None, "use `vjob submit --follow`"),
    "test-only": SlurmWord("", None, "use `vjob submit --test-only`"),
    **dict.fromkeys(("wrap", "parsable", "quiet", "verbose", "help", "usage", "version"), _OURS),
}
"""Options of sbatch that `cluster.sbatch` refuses: a conf key covers them, or vjob sets them."""
PASSED_ON = frozenset({
    "acctg-freq", "bb", "bbf", "begin", "cluster-constraint", "constraint", "contiguous",
    "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot",
    "dependency", "distribution", "exclusive", "extra-node-info", "gpu-bind", "gpu-freq",
    "gres-flags", "hint", "hold", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user",
    "mcs-label", "mem-bind", "mincpus", "network", "nice", "nodefile", "nodelist",
    "ntasks-per-core", "ntasks-per-socket", "overcommit", "oversubscribe", "power", "prefer",
    "priority", "propagate", "reboot", "reservation", "segment", "sockets-per-node",
    "spread-job", "switches", "thread-spec", "threads-per-core", "time-min", "tmp",
    "tres-per-task", "use-min-nodes", "wait-all-nodes", "wckey", "x11",
})  # fmt: skip
"""Options of sbatch that `cluster.sbatch` passes on unchanged."""
_CLUSTER = "cluster"
_PLACES = ("", _CLUSTER)


def answer_word(parent: str, name: str, text: str | None, *, is_set: bool = False) -> str:
    """Return the line of a conf to write in place of an option in Slurm's spelling; empty for other
    words.

    `text` is the word's value; None if there is no single value, or one that must not be shown.
    With `is_set`, the answer is for `--set`.
    """
    option = name.strip().lstrip("-").lower().replace("_", "-")
    group = parent if _GROUP.fullmatch(parent) else ""
    if not (group or parent in _PLACES or parent.endswith("sbatch")):
        return ""
    word = WORDS.get(option)
    if word is None:
        if option not in PASSED_ON or parent.endswith("sbatch"):
            return ""
        value = spell("VALUE" if text is None else text)
        if is_set:
            return f"write {_spell_set(f'{parent or _CLUSTER}.sbatch.{option}', value)}"
        place = "" if parent else " in cluster"
        return f"it is an option of sbatch: write `sbatch: {{{option}: {value}}}`{place}"
    if not word.key:
        return word.note if word is not _OURS or parent.endswith("sbatch") else ""
    found = word.respell(text) if word.respell is not None and text is not None else None
    key = word.outside if word.outside and not group else word.key
    answer = _answer(key, None if found is None else spell(found), parent, group, is_set=is_set)
    if found is not None and option == "time" and re.fullmatch(r"\d+:\d+", text or ""):
        answer += f" (Slurm reads {text} as minutes and seconds)"
    return f"{answer}, {word.note}" if word.note else answer


def _answer(full: str, value: str | None, parent: str, group: str, *, is_set: bool) -> str:
    """Return the key to use, with its value if known, and its section."""
    section, _, key = full.rpartition(".")
    if is_set and value is not None:
        full = full.replace("cluster.nodes[]", group or "cluster.nodes[0]")
        return f"write {_spell_set(full, value)}"
    answer = f"use `{key}`" if value is None else f"write `{key}: {value}`"
    if section == "cluster.nodes[]":
        if group:
            return answer
        example = f", such as `nodes: [{{{key}: {value}}}]`" if value is not None else ""
        return f"{answer} in a group of cluster.nodes{example}"
    if section == parent:
        return answer
    return f"{answer} in {section}" if section else f"{answer} at the top of the conf"


def _spell_set(key: str, value: str) -> str:
    return f"`--set {shlex.quote(f'{key}={value}')}`"


def explain_option(name: str) -> str:
    """Explain why `cluster.sbatch` refuses an option, whatever its value."""
    return answer_word("cluster.sbatch", name, None)


def spell(value: Any) -> str:
    """Spell a value as in a one-line conf, quoted unless it is a plain word."""
    if isinstance(value, list):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
