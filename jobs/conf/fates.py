"""How each key of a conf affects a program that is not built in (the key's fate), above all a
script or a function of the user's own.

    reaches     its value is a variable of every rank (varuna_core/records/training.py), which
                `varuna_core.Varuna` takes as its default
    acts        it acts outside the program: on the cluster, the container, the monitor
    reference   the program gets it where `program.args` or `env` refer to it; else it would have
                no effect, and is refused where it is written

A key that is not named here has the fate of its section. Megatron-LM and DeepSpeed take most keys
as arguments and files of their own (jobs/programs); `ONLY_BY_REFERENCE` lists the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from typing import Any

from varuna_core.records.training import LAYOUT_VARIABLES, VARIABLES
from vjob.jobs.conf.parse import get_hints, get_section_class, list_conf_keys
from vjob.jobs.conf.references import find_value, list_referenced
from vjob.jobs.conf.schema import FUNCTION, OWN, OWN_MODEL, JobConf
from vjob.jobs.conf.yaml_tree import join_key
from vjob.jobs.errors import KeyProblem


class Fate(Enum):
    """How a conf key affects a script's run."""

    REACHES = "reaches"
    ACTS = "acts"
    REFERENCE = "by reference"


KEPT_COUNT = "train.checkpoint.keep"
"""Key that reaches a script whose conf sets train.checkpoint.folder, even at its default."""
OF_PROGRAMS = ("model", "data", "train", "parallel")
"""Sections that describe the training, so that only a program can act on them."""
ELSEWHERE = ("parallel.profile",)
"""Keys in the sections of OF_PROGRAMS that have an effect outside the program: `vjob plan` reads
the profile."""
ONLY_BY_REFERENCE: Mapping[str, tuple[str, ...]] = {
    "megatron": (
        "train.optimizer.fused",
        "train.optimizer.apex",
        "train.optimizer.offload",
        "train.checkpoint.keep",
        "parallel.sequence_parallel",
        "parallel.context",
    ),
    "deepspeed": (
        "model",
        "data.",
        "train.steps",
        "train.seed",
        "train.schedule.",
        "train.evaluate.",
        "train.compile",
        "train.cuda_graphs",
        "train.optimizer.apex",
        "train.optimizer.offload",
        "train.checkpoint.",
        "parallel.sequence_parallel",
        "parallel.context",
        "parallel.schedule",
    ),
}
"""Prefixes of keys that Megatron-LM and DeepSpeed receive only if `program.args` or `env` refers to
them."""
_MORPH_LIMITS = ("stop_s", "return_s", "manager_failures")
NEEDS: Mapping[str, tuple[str, ...]] = {
    **{
        f"container.{name}": ("container.image",)
        for name in ("workdir", "reuse", "writable", "remap_root", "scratch")
    },
    **{f"profile.{name}": ("profile.nsys", "profile.ncu") for name in ("ranks", "options")},
    **{
        f"morph.{name}": ("morph.enabled",)
        for name in ("mode", "min_nodes", "max_nodes", "warm", "look_s", *_MORPH_LIMITS)
    },
}
"""Keys that have an effect only together with another key, which enables them, such as
`morph.min_nodes` with `morph.enabled`: for each, the keys of which one is needed. The key is
allowed if one of those is set, even to disable the feature."""
_INDEX = re.compile(r"\[\d+\]")
MODEL = "model"
"""The whole `model` section: a reference to one of its keys counts for all."""


def judge_fate(key: str) -> Fate:
    """Return the fate of a key of the schema."""
    if find_variable(key) is not None:
        return Fate.REACHES
    is_its_own = key.partition(".")[0] in OF_PROGRAMS and key not in ELSEWHERE
    return Fate.REFERENCE if is_its_own else Fate.ACTS


def find_variable(key: str) -> str | None:
    """Return the variable by which a key reaches the ranks of a script; None if there is none."""
    return VARIABLES.get(key) or LAYOUT_VARIABLES.get(key)


def goes_by_reference(kind: str, key: str) -> bool:
    """Return True for a key that this kind of program receives only by reference."""
    if kind in OWN_MODEL:
        return judge_fate(key) is Fate.REFERENCE
    return key.startswith(ONLY_BY_REFERENCE.get(kind, ()))


def check_effect(conf: JobConf, written: Collection[str]) -> Iterator[KeyProblem]:
    """Yield keys of the conf that would have no effect on its program."""
    kind = conf.program.kind
    places = "env" if kind == FUNCTION else "program.args or env"
    for key in list_ignored(conf, written):
        value = find_value(conf, key)
        message = f"has no effect with program.{kind}: remove it"
        if value is not None:
            shown = f"{key}.layers" if key == MODEL else key
            message += f", or pass it as ${{{shown}}} in {places}"
        yield key, vars(value) if key == MODEL else value, message
    for key, switches in NEEDS.items() if kind in OWN_MODEL else ():
        if key in written and not any(switch in written for switch in switches):
            yield key, find_value(conf, key), f"has no effect without {' or '.join(switches)}"


def list_ignored(conf: JobConf, written: Collection[str]) -> list[str]:
    """Return the given keys, which the conf writes, that would not reach the program."""
    referenced = list_referenced_leaves(conf)
    return [
        key
        for key in list_leaves()
        if goes_by_reference(conf.program.kind, key)
        and key in written
        and key not in referenced
        and not (find_value(conf, key) is None and find_default(key) is None)
    ]


def list_referenced_leaves(conf: JobConf) -> set[str]:
    """Return the keys to which the conf refers, without indices; `model` is added if the conf
    refers to any key of the model."""
    names = {_INDEX.sub("", name) for name in list_referenced(conf)}
    return names | ({MODEL} if any(name.startswith(f"{MODEL}.") for name in names) else set())


@cache
def list_leaves() -> tuple[str, ...]:
    """Return the keys of a conf that hold a value rather than other keys; `model` stands for all of
    its own keys."""
    keys = list_conf_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    return tuple(
        key for key in keys if key not in sections - {MODEL} and not key.startswith("model.")
    )


def build_variables(conf: JobConf, written: Collection[str]) -> dict[str, str]:
    """Return variables for the keys that a script's conf sets; a key set to null has none."""
    if conf.program.kind not in OWN_MODEL:
        return {}
    keys = set(written)
    if "train.checkpoint.folder" in keys:
        keys.add(KEPT_COUNT)
    values = {key: find_value(conf, key) for key in VARIABLES if key in keys}
    return {
        VARIABLES[key]: str(int(value)) if isinstance(value, bool) else str(value)
        for key, value in values.items()
        if value is not None
    }


def reaches(conf: JobConf, written: Collection[str], *keys: str) -> bool:
    """Return True if a script receives all of the given keys, through variables or references."""
    referenced = list_referenced_leaves(conf)
    return all(
        key in referenced or (key in written and judge_fate(key) is Fate.REACHES) for key in keys
    )


def count_micro_batches(conf: JobConf, written: Collection[str]) -> int | None:
    """Return the number of micro-batches in a global batch; None unless a script gets both batch
    sizes from its conf."""
    keys = ("train.global_batch_size", "train.micro_batch_size")
    if conf.program.arguments != "varuna" and not reaches(conf, written, *keys):
        return None
    batch, size = (int(find_value(conf, key, is_closed=True)) for key in keys)
    return -(-batch // size)


def list_changed(conf: JobConf) -> list[str]:
    """Return the keys that differ from their defaults; for a conf without a file, these count as
    the keys that were written."""
    known = [key for key in list_leaves() if "[]" not in key]
    return [key for key in known if find_value(conf, key) != find_default(key)]


def drop_unwritten(
    conf: JobConf, plain: dict[str, Any], written: Collection[str]
) -> dict[str, Any]:
    """Return the resolved conf without the keys that count only if they are written.

    Reading the result gives the same conf and variables, and no key is refused.
    """
    kind, leaves = conf.program.kind, set(list_leaves())
    kept = {*written, *list_referenced_leaves(conf)}

    def is_kept(key: str) -> bool:
        if key not in leaves or key in kept:
            return True
        is_variable = kind in OWN_MODEL and key in VARIABLES
        # A layout that is written counts for program.launch: auto, too.
        if kind in OWN and key.startswith("parallel."):
            return bool(find_value(conf, key) != find_default(key))
        return not is_variable and not goes_by_reference(kind, key)

    def take(value: Any, key: str) -> Any:
        if not isinstance(value, Mapping) or key in leaves:
            return value
        found = {}
        for name, inner in value.items():
            path = join_key(key, name)
            if is_kept(path):
                taken = take(inner, path)
                if taken != {} or inner == {}:
                    found[name] = taken
        return found

    taken = take(plain, "")
    assert isinstance(taken, dict)
    return taken


@cache
def find_default(key: str) -> Any:
    """Return the default of a key; MISSING if it has none."""
    cls: Any = JobConf
    *sections, last = key.split(".")
    for name in sections:
        cls = get_section_class(get_hints(cls)[name])
    field = next(field for field in fields(cls) if field.name == last)
    return field.default_factory() if field.default_factory is not MISSING else field.default
