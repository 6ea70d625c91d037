"""A conf whose layout may still be open, and the profile that belongs to it. No numpy here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varuna_core.records.training import name_profile_file
from vjob.jobs.conf.layout import close_layout
from vjob.jobs.conf.loading.check import check_numbers, check_program, locate
from vjob.jobs.conf.loading.check_cluster import check_groups
from vjob.jobs.conf.loading.load import parse_conf_lines, read_text, sort_problems
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import ConfError, InputError
from vjob.jobs.programs.training import name_model

PROFILE_FOLDER = "profiles"
"""Next to the conf."""


def read_open_conf(path: Path, overrides: Sequence[str]) -> tuple[JobConf, dict[str, str]]:
    """A conf whose layout need not fit its nodes yet, and the keys that it writes."""
    text = read_text(path, str(path))
    conf, lines = parse_conf_lines(text, str(path), path.resolve().parent, overrides)
    findings = [*check_numbers(conf), *check_groups(conf), *check_program(close_layout(conf))]
    if findings:
        raise ConfError(sort_problems(locate(findings, lines)))
    return conf, lines


def find_profile(conf: JobConf, base: Path) -> Path | None:
    """None if there is none; InputError where the conf names one that is not there."""
    path = name_profile(conf, base)
    if path is None or path.exists():
        return path
    if conf.parallel.profile is not None:
        raise InputError(
            f"parallel.profile {path} is not there: `vjob profile` writes it, or leave the key out"
        )
    return None


def name_profile(conf: JobConf, base: Path) -> Path | None:
    """Where `vjob profile` puts it; None where nothing says."""
    if conf.parallel.profile is not None:
        return Path(conf.parallel.profile)
    if conf.model is None:
        return None
    return base / PROFILE_FOLDER / name_profile_file(name_model(conf.model))
