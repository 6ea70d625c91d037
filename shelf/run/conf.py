"""The conf that a `vjob run` stands for: the keys that a person would write for it, and no more.

on this machine   one plain process with all GPUs, as when its user starts it, unless -n or --gpus
                  ask for ranks; files are used in place, and it starts at once
on Slurm          only if an option of Slurm's is given: one rank for each GPU, else one rank
inside a job      if the shell is in a job of Slurm, the run uses that job, unless --new-job is set
environment       this shell's, except variables of the session or of another launcher
Python            the active virtual or conda environment's, else the one that runs vjob
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from varuna_core.agent.setup.world import is_of_launcher
from varuna_core.records.machine import KEPT
from vjob.jobs.api.confs import ConfText, resolve
from vjob.jobs.conf.loading.check import list_own_env
from vjob.jobs.conf.loading.load import apply_overrides
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.conf.yaml_tree import Items, Node, Scalar, parse_tree
from vjob.jobs.errors import ConfError
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.schedulers.choose import LOCAL
from vjob.shelf.run.program import name_program
from vjob.shelf.run.slurm_options import Given, build_cluster, find_asked

FROM_WORDS = Path("<vjob run>")
"""Name of the conf in messages; relative paths in it start at the current folder."""
ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that name an active environment, the most recently activated kind first."""
RESOLVER = yaml.resolver.Resolver()
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_PASSED = re.compile(
    # The shell, its terminal and its login.
    r"_$|PWD$|OLDPWD$|SHLVL$|PS\d$|PROMPT|HIST|LESS|LS_COLORS$|COLUMNS$|LINES$|TERM|COLORTERM$|"
    r"TMUX|STY$|WINDOW|VTE_|DISPLAY$|WAYLAND_|XAUTHORITY$|DBUS_|DESKTOP_|GNOME_|KDE_|GPG_|SSH_|PIP_|"
    r"XDG_(SESSION|RUNTIME|SEAT|VTNR|CURRENT|MENU|GREETER)|MAIL$|EDITOR$|VISUAL$|PAGER$|INVOCATION_"
    # What Python and Slurm's commands would take for their own.
    r"|PYTHON(HOME|STARTUP|EXECUTABLE)$|__PYVENV|VIRTUAL_ENV_PROMPT$|VJOB_|SBATCH_|SRUN_|SALLOC_"
)


def build_conf(
    program: Mapping[str, Any],
    given: Given,
    *,
    environ: Mapping[str, str],
    prefix: str,
    python: str | None = None,
    inside: str = "",
    new_job: bool = False,
) -> dict[str, Any]:
    """Build the conf of a program and its options. `prefix` is sys.prefix, `inside` the scheduler
    of the job around this shell, if there is one."""
    place = choose_scheduler(given, inside=inside, new_job=new_job)
    cluster = build_cluster(given)
    found = python or find_python(environ, prefix)
    more: dict[str, Any] = {}
    if found is not None:
        more["python"] = found
    if place == LOCAL:
        more["snapshot"] = "none"
    conf = {
        "name": str(given.get("job-name") or name_program(program)),
        "program": {**program, **more},
        "pass_env": list_passed(environ),
        "cluster": {"scheduler": place, **cluster},
    }
    return {key: value for key, value in conf.items() if value not in (None, [])}


def choose_scheduler(given: Given, *, inside: str, new_job: bool) -> str:
    """Return the scheduler: the job around this shell, else Slurm if an option asks for it, else
    this machine, even if it has sbatch."""
    if inside and not new_job:
        return inside
    return "slurm" if find_asked(given) or new_job else LOCAL


def resolve_made(
    made: Mapping[str, Any], overrides: Sequence[str], *, require_env: bool
) -> Resolved:
    """Check the conf with the keys of `--set`, which also go into the run's conf.yaml."""
    text = dump_yaml(made)
    source = ConfText(path=FROM_WORDS, text=text, overrides=tuple(overrides))
    resolved = resolve(source, require_env=require_env)
    return replace(resolved, text=set_keys(text, overrides) if overrides else text)


def list_notes(conf: JobConf, given: Given, *, has_slurm: bool, num_gpus: int) -> Iterator[str]:
    """Yield notes on choices made for the user, each with the option that changes it."""
    if find_asked(given) or conf.cluster.scheduler != LOCAL:
        return
    if has_slurm:
        yield "runs on this machine; an option such as -p QUEUE submits it to Slurm"
    if num_gpus > 1 and not {"ntasks", "gpus"} & given.keys():
        yield f"one process sees all {num_gpus} GPUs; --gpus {num_gpus} starts a rank for each"


def find_python(environ: Mapping[str, str], prefix: str) -> str | None:
    """Return the active environment's Python; None if none is active, or if it runs vjob."""
    for name in ENVIRONMENTS:
        folder = environ.get(name)
        path = os.path.join(folder, "bin", "python") if folder else ""
        if path and os.path.realpath(folder or "") != os.path.realpath(prefix):
            if os.access(path, os.X_OK):
                return path
        elif path:
            return None
    return None


def list_passed(environ: Mapping[str, str]) -> list[str]:
    """Return names of this shell's variables to pass on, besides those that any job has."""
    set_by_us: Collection[str] = {*KEPT, *list_own_env()}
    return sorted(
        name
        for name in environ
        if _NAME.fullmatch(name)
        and name not in set_by_us
        and not _NOT_PASSED.match(name)
        and not is_of_launcher(name)
    )


def set_keys(text: str, overrides: Sequence[str]) -> str:
    """Return the conf's text with the keys of `--set`; raise ConfError for a misplaced one."""
    tree, problems = parse_tree(text, str(FROM_WORDS))
    tree, more = apply_overrides(tree, overrides)
    if problems or more:
        raise ConfError([*problems, *more])
    return str(
        yaml.serialize(_to_yaml(tree), Dumper=yaml.SafeDumper, allow_unicode=True, width=100)
    )


def _to_yaml(node: Node) -> yaml.Node:
    """Convert a node for PyYAML: innermost lists and mappings on one line, texts unchanged."""
    if isinstance(node, Scalar):
        tag = RESOLVER.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, node.text, (node.plain, not node.plain)
        )
        return yaml.ScalarNode(str(tag), node.text, style=None if node.plain else '"')
    if isinstance(node, Items):
        items = [_to_yaml(item) for item in node.items]
        is_inner = all(map(_fits_line, items))
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=is_inner)
    pairs = [
        (_to_yaml(Scalar(text=key, plain=True, where="")), _to_yaml(entry.node))
        for key, entry in node.entries.items()
    ]
    is_inner = all(_fits_line(value) for _, value in pairs)
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=is_inner)


def _fits_line(node: yaml.Node) -> bool:
    """Return True for a value that may be written within brackets unchanged, unlike `1:30`."""
    return isinstance(node, yaml.ScalarNode) and (node.style is not None or ":" not in node.value)
