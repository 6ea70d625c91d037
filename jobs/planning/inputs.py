"""Prepare the inputs of planning: numpy, a conf with an open layout, and the model's profile.

Nothing that needs numpy is imported here: a bare install gets advice, and a submit without planning
stays fast.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.records.training import name_profile_file
from vjob.jobs.conf.loading.check import check_conf, check_program
from vjob.jobs.conf.loading.check_bounds import check_numbers, locate
from vjob.jobs.conf.loading.check_cluster import check_groups
from vjob.jobs.conf.loading.load import ReadConf, load_conf, sort_problems
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import close_layout, is_open
from vjob.jobs.errors import ConfError, InputError, VjobError
from vjob.jobs.programs.training import name_model


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn the planner's errors into InputError, and refuse if numpy is missing.

    Import whatever needs numpy within this context.
    """
    if importlib.util.find_spec("numpy") is None:
        raise VjobError("planning needs numpy, which is not installed: pip install numpy")
    try:
        yield
    except PlanningError as error:
        raise InputError(str(error)) from None


PROFILE_FOLDER = "profiles"
"""Folder of profiles beside the conf."""


def read_open_conf(path: Path, overrides: Sequence[str], *, text: str | None = None) -> ReadConf:
    """Read a conf whose layout need not fit its nodes yet; ConfError if planning cannot start."""
    read = load_conf(path, overrides, text=text)
    conf = read.conf
    findings = [*check_numbers(conf), *check_groups(conf), *check_program(close_layout(conf))]
    if not findings:
        return read
    if is_open(conf):
        raise ConfError(sort_problems(locate(findings, read.lines)), is_first_round=True)
    problems = check_conf(conf, read.lines, base=read.base, environ=os.environ)
    raise ConfError(sort_problems(problems))


def find_profile(conf: JobConf, base: Path) -> Path | None:
    """Return the profile's file, or None; raise InputError if the conf names a missing one."""
    path = name_profile(conf, base)
    if path is None or path.exists():
        return path
    if conf.parallel.profile is not None:
        raise InputError(
            f"parallel.profile {path} does not exist: `vjob profile` writes it; or remove the key"
        )
    return None


def name_profile(conf: JobConf, base: Path) -> Path | None:
    """Return the file that `vjob profile` writes; None if the conf has neither model nor name."""
    if conf.parallel.profile is not None:
        return Path(conf.parallel.profile)
    if conf.model is None:
        return None
    return base / PROFILE_FOLDER / name_profile_file(name_model(conf.model))
