"""Shell completion of keys and values of `--set`, nodes, queues, groups and actions.

bash splits words at `=`; `BashWords` joins them again, so that `--set parallel.schedule=gp` is one
word here, as in zsh and fish. If the values cannot be determined, nothing is offered and no error
is printed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
)

Complete = Callable[[click.Context, click.Parameter, str], list[str]]
_INDEX = re.compile(r"\[\d+\]")
_BOOLS = ("true", "false")


class BashWords(BashComplete):
    """click's bash completion, with the words joined at `=` as the user typed them."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == *= ]] && compopt -o nospace 2>/dev/null\n"
        "    return 0\n",
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        is_open = False
        for word in [*args, incomplete]:
            is_value = word == "=" and bool(words)
            if is_value or is_open:
                words[-1] += word
            else:
                words.append(word)
            is_open = is_value
        *args, incomplete = words
        self._before = incomplete[: incomplete.rfind("=") + 1]
        return args, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        return f"{item.type},{str(item.value).removeprefix(self._before)}"


class ZshWords(ZshComplete):
    """click's zsh completion, without a space after a key that needs a value."""

    source_template = ZshComplete.source_template.replace(
        "        compadd -U -V unsorted -a completions\n",
        "        compadd -S '' -U -V unsorted -- ${(M)completions:#*=}\n"
        "        compadd -U -V unsorted -- ${completions:#*=}\n",
    )


class FishWords(FishComplete):
    """click's fish completion, which also accepts commas in descriptions."""

    source_template = FishComplete.source_template.replace(
        'string split "," $completion', 'string split --max 1 "," $completion'
    )


def register_shells() -> None:
    """Replace click's own completion classes with ours."""
    for shell in (BashWords, FishWords, ZshWords):
        add_completion_class(shell)


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete `KEY=VALUE`: first the keys of the conf, then the values of the key."""
    key, equals, _ = incomplete.partition("=")
    words = (f"{key}={value}" for value in list_values(key)) if equals else list_keys()
    return [word for word in words if word.startswith(incomplete)]


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete `KEY=A,B` of a sweep; values after the first comma are not completed."""
    return [] if "," in incomplete else complete_set(ctx, param, incomplete)


def list_keys() -> Iterator[str]:
    """Yield the keys that hold a value, each with `=`; in lists, the key of the first element."""
    from vjob.jobs.conf.fates import list_leaves
    from vjob.jobs.conf.parse import OWN_KEYS, PROGRAM_KEYS

    own = {name for names in (*PROGRAM_KEYS.values(), *OWN_KEYS.values()) for name in names}
    for key in list_leaves():
        if key == "program":
            yield from (f"program.{name}=" for name in [*PROGRAM_KEYS, *sorted(own)])
        else:
            yield f"{key.replace('[]', '[0]')}="


def list_values(key: str) -> Iterable[str]:
    """Return the words that are valid values of a key; empty for numbers and free text."""
    from varuna_core.plugins import list_plugins
    from vjob.jobs.conf.parse import find_plugin_group, get_hints, get_members
    from vjob.jobs.conf.schema import BUILT_IN, MODELS, JobConf, Program

    if key == "model":
        return MODELS
    if key == "program":
        return BUILT_IN
    if _INDEX.sub("[]", key) == "cluster.nodes[].queue":
        return list_queues()
    hint: Any = Program if key.startswith("program.") else JobConf
    for name in _INDEX.sub("", key.removeprefix("program.")).split("."):
        inner = [
            get_args(member)[0] if get_origin(member) is tuple else member
            for member in get_members(hint)
        ]
        cls = next((one for one in inner if is_dataclass(one) and isinstance(one, type)), None)
        hint = None if cls is None else get_hints(cls).get(name)
    words: list[str] = []
    for member in get_members(hint):
        if get_origin(member) is Literal:
            words += map(str, get_args(member))
        elif find_plugin_group(member):
            words += list_plugins(find_plugin_group(member))
        elif member is bool:
            words += _BOOLS
    return words


def list_queues() -> list[str]:
    """Return the queues of all schedulers that have queues."""
    from vjob.jobs.schedulers import choose as schedulers

    return [name for one in schedulers.list_with_queue() for name in one.list_queues()]


def complete_queue(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _begin(list_queues(), incomplete)


def complete_node(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a node of the JOB that precedes it on the command line."""
    from varuna_core.records.plan import read_plan
    from vjob.jobs.errors import VjobError
    from vjob.jobs.runs.find import find_run
    from vjob.jobs.runs.outcome import read_node_names

    # click leaves the words aside where an option still lacks its value.
    words = [word for word in ctx.args if not word.startswith("-")]
    with contextlib.suppress(VjobError, OSError, ValueError):
        run = find_run(str(ctx.params.get("job") or (words or ["last"])[0]), Path.cwd())
        plan, attempts = read_plan(run.plan), run.attempts()
        if plan is not None and attempts:
            return _begin(read_node_names(attempts[-1], plan).values(), incomplete)
    return []


def complete_group(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete one of the user's groups."""
    import grp
    import os

    names = []
    for number in {os.getegid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return _begin(names, incomplete)


def complete_action(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete `VERDICT=ACTION` of `vjob watch --on`."""
    from vjob.jobs.monitor.model.snapshot import Health
    from vjob.shelf.watch.desk import CANCEL, EXCLUDE, REQUEUE

    words = [f"{one.value}={verb}" for one in Health for verb in (CANCEL, REQUEUE, EXCLUDE)]
    if "=" not in incomplete:
        words = [f"{one.value}=" for one in Health]
    return [word for word in words if word.startswith(incomplete)]


def _begin(words: Iterable[str], incomplete: str) -> list[str]:
    return sorted({word for word in words if word.startswith(incomplete)})
