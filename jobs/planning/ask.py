"""The thin shell around a question: the conf's file, the profile's, sinfo, what is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.profile.profile_file import read_profile
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.errors import VjobError
from vjob.jobs.planning.conf_file import find_profile, read_open_conf
from vjob.jobs.planning.question import Question, build_question, keep_known
from vjob.jobs.process import run
from vjob.jobs.schedulers.slurm_nodes import build_sinfo_nodes_command, parse_sinfo_nodes


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says besides the conf."""

    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    is_estimated: bool = False
    """Whatever profile is there."""
    link_gb_s: float | None = None
    prices: Mapping[str, float]
    from_slurm: bool = False
    queue: str | None = None


def ask(path: Path, asked: Asked) -> tuple[JobConf, Question]:
    """The conf, with the nodes that are planned for, and the question."""
    conf, lines = read_open_conf(path, asked.overrides)
    base = path.resolve().parent
    if not asked.from_slurm:
        return conf, ask_about(conf, lines.keys(), base, asked)
    _, profile = find_figures(conf, base, asked)
    nodes, left_out = keep_known(find_nodes(asked.queue), profile)
    conf = replace(conf, cluster=replace(conf.cluster, nodes=tuple(nodes)))
    question = ask_about(conf, lines.keys(), base, asked)
    return conf, replace(question, notes=(*question.notes, *left_out))


def find_figures(conf: JobConf, base: Path, asked: Asked) -> tuple[Path | None, Profile | None]:
    """The profile to plan by; None for an estimate."""
    file = asked.profile or find_profile(conf, base)
    return file, None if file is None or asked.is_estimated else read_profile(file)


def ask_about(conf: JobConf, fixed: Collection[str], base: Path, asked: Asked) -> Question:
    """`fixed` are the keys that count; `base` is the conf's folder."""
    file, profile = find_figures(conf, base, asked)
    return build_question(
        conf,
        fixed,
        profile=profile,
        basis=describe_basis(file, profile),
        prices=asked.prices,
        software=find_software(conf),
        link_gb_s=asked.link_gb_s,
    )


def find_nodes(queue: str | None) -> list[NodeGroup]:
    """As sinfo shows them now."""
    command = build_sinfo_nodes_command(queue)
    result = run(command)
    if result.code != 0:
        raise VjobError(f"sinfo failed: {result.err.strip() or f'exit code {result.code}'}")
    return parse_sinfo_nodes(result.out)


def describe_basis(file: Path | None, profile: Profile | None) -> str:
    if file is None or profile is None:
        return ""
    versions = ", ".join(f"{name} {text}" for name, text in sorted(profile.software.items()))
    return f"profile {file}" + (f" ({versions})" if versions else "")


def find_software(conf: JobConf) -> dict[str, str]:
    """Versions that the ranks will have; nothing where they have a Python of their own."""
    if conf.container.image is not None or conf.program.python is not None:
        return {}
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return {}
