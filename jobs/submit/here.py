"""Check, before a local run, what its conf names, while the user waits.

On a cluster, nodes check the same before the ranks start (`varuna_core/agent/checks`).
"""

from __future__ import annotations

import os
import shutil

from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
from varuna_core.facts.known import Value
from varuna_core.records.plan import Plan
from vjob.jobs import process
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.errors import InputError, VjobError

MOST_RANKS = 64
"""The most ranks for each processor; more are a mistake, and would stall the machine."""
PYTHON_S = 20.0
"""Seconds for an interpreter to prove that it is one."""


def check_here(conf: JobConf, plan: Plan) -> None:
    """Raise InputError if this machine cannot run the plan."""
    check_gpus(conf)
    check_ranks(plan, len(os.sched_getaffinity(0)))
    if plan.workdir == conf.workdir and not os.path.isdir(plan.workdir):  # else a copy to be made
        raise InputError(f"workdir {plan.workdir}: there is no such folder on this machine")
    check_command(conf, plan)
    if not plan.containers and conf.program.python is not None:
        path = {**os.environ, **conf.env}.get("PATH")
        check_python(conf.program.python, path, is_set_up=bool(conf.setup))


def check_gpus(conf: JobConf) -> None:
    """Raise InputError if the conf asks for GPUs and this machine has none, since the checks before
    the start would then fail. If the number of GPUs is not known, leave the decision to those
    checks."""
    if not any(group.num_gpus for group in conf.cluster.nodes):
        return
    counted = count_visible(choose_accelerator(), {**os.environ, **conf.env})
    if isinstance(counted, Value) and counted.value == 0:
        raise InputError(
            f"cluster.nodes has gpus, but this machine has none ({counted.evidence[0].source}): "
            "leave out gpus and give ranks: N"
        )


def check_command(conf: JobConf, plan: Plan) -> None:
    """Raise InputError if a run on this machine would not find its command."""
    word = plan.command[0].replace("%{percent}", "%")
    if conf.program.kind != "command" or plan.containers or conf.setup or "PATH" in plan.env:
        return
    place = os.path.join(plan.workdir, word) if "/" in word else word
    if "/" in word and not os.path.isdir(os.path.dirname(place)):
        return  # in a copy of the code that is yet to be made: the preflight looks
    if shutil.which(place, path=plan.read_path(os.environ)) is None:
        where = f"on PATH or beside {plan.python}" if place == word else "there"
        raise InputError(
            f"program.command: {word} is not {where}, or not executable: install it, give its "
            "path, or set program.python to an interpreter in the same folder"
        )


def check_ranks(plan: Plan, processors: int) -> None:
    if plan.world > MOST_RANKS * processors:
        raise InputError(
            f"cluster.nodes asks for {plan.world} ranks, but this machine has {processors} "
            f"processors: lower ranks to at most {MOST_RANKS * processors}"
        )


def check_python(python: str, path: str | None, *, is_set_up: bool) -> None:
    """Raise InputError unless this is an interpreter; `setup` lines may put a bare name on PATH."""
    found = shutil.which(python, path=path)
    if found is None and is_set_up and "/" not in python:
        return
    advice = "give an interpreter, or the folder of a virtual environment"
    if found is None:
        raise InputError(f"program.python {python} does not exist or is not executable; {advice}")
    try:
        done = process.run([found, "-c", "import sys; print(sys.hexversion)"], timeout_s=PYTHON_S)
        is_one = done.code == 0 and done.out.strip().isdecimal()
    except VjobError:
        is_one = False
    if not is_one:
        raise InputError(f"program.python {python}: does not run as a Python; {advice}")
