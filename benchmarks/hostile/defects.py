"""Defects that were found once, each as a patch that takes its bound away again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.facts.catalogue import patterns
from varuna_core.records import files, secrets
from varuna_core.records.logs import tail, times
from vjob.jobs.conf.loading import check_cluster
from vjob.jobs.schedulers import node_names
from vjob.reports.load import sources
from vjob.shelf.web.server import Server


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One of the eight, or a part of one."""

    what: str
    patch: Callable[[], None]
    commands: str
    """Those that it concerns: a draw of another counts, and is not run."""

    says: str = ""
    """What a finding must say to be of this defect."""

    change: str = ""
    """The kind of change without which it does not show."""


def replace_everywhere(old: Any, new: Any) -> None:
    """In the module that defines it and in all that imported it by name."""
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        for name in [name for name, value in held.items() if value is old]:
            held[name] = new


def trust_patterns() -> None:
    replace_everywhere(patterns.count_steps, lambda pattern: 0)


def know_prefixes() -> None:
    replace_everywhere(secrets.withhold, lambda text, *_, **__: text)
    replace_everywhere(secrets.find_drawn, lambda text, *_, **__: ())
    replace_everywhere(secrets._is_password, lambda *_, **__: False)
    replace_everywhere(
        secrets.is_secret_name,
        lambda name: any(word in name.lower() for word in ("token", "secret", "password")),
    )


def keep_strangers() -> None:
    Server._drop_stranger = lambda self, least_s: False


def hold_files() -> None:
    times.PIECE_BYTES = 1 << 62


def read_from_the_start() -> None:
    skip = tail.Follower._skip_to_last
    tail.Follower._skip_to_last = lambda self, count, within_bytes: skip(self, count, 1 << 62)


def read_all_attempts() -> None:
    sources.MOST_ATTEMPTS = 1 << 62


def count_freely() -> None:
    check_cluster.MOST_RANKS = 1 << 62


def believe_slurm() -> None:
    node_names.MOST_NODES = 1 << 62
    vars(node_names)["as_whole"] = int


def name_temporary_files() -> None:
    def write(path: Path, text: str, mode: int = 0o600, *, lasts: bool = True) -> None:
        part = path.with_name(f".{path.name}.x.part")
        part.write_text(text)
        part.replace(path)

    replace_everywhere(files.write_atomic, write)


READERS = "status logs report compare watch list"
DEFECTS = {
    "pattern": Defect(
        what="1: a pattern of plan.json is not bounded", patch=trust_patterns, commands=READERS,
        change="pattern",
    ),
    "secrets": Defect(
        what="2: secrets known by three words alone", patch=know_prefixes, commands="share"
    ),
    "web": Defect(
        what="3: connections without the token are kept", patch=keep_strangers, commands="web"
    ),
    "times": Defect(
        what="4: a file of marks is held whole", patch=hold_files, commands=READERS,
        change="sparse",
    ),
    "logs": Defect(
        what="5: `logs -n 3` reads a log from its start", patch=read_from_the_start,
        commands="logs", change="sparse",
    ),
    "attempts": Defect(
        what="5: all attempts of a run are read", patch=read_all_attempts,
        commands="report compare", change="many",
    ),
    "ranks": Defect(
        what="6: ranks of a conf have no bound", patch=count_freely, commands="submit plan",
        change="numbers",
    ),
    "slurm": Defect(
        what="7: any list of nodes and any number", patch=believe_slurm,
        commands=f"{READERS} cancel share prune guard grow shrink stacks", change="table",
    ),
    "messages": Defect(
        what="8: a temporary file is named", patch=name_temporary_files,
        commands="report compare share cancel guard init grow shrink prune watch",
        says="temporary",
    ),
}  # fmt: skip
