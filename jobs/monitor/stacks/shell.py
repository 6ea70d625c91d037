"""`vjob shell`: a shell, or a command, on a node of a running job, in the ranks' container.

The run's own agent starts it there (varuna_core/agent/shell.py): by a step beside the job's on
Slurm, over ssh on a machine of a list, directly on this one.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence

from varuna_core.launch.machines import parse_machine
from varuna_core.launch.ssh import build_ssh_command, keep_ssh_agent
from varuna_core.records.files import read_json
from varuna_core.records.machine import clean_environment
from varuna_core.records.plan import Plan, read_plan
from vjob.jobs import process
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.stacks.collect import PICK_PYTHON, expect_here, find_running, list_hosts
from vjob.jobs.runs.find import RunView, view_run
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import SchedulerJob


def open_shell(view: RunView, node: str | None, words: Sequence[str]) -> int:
    """Run a shell, or `words`, on a node with this terminal; return its exit code."""
    expect_ours(view.run, "vjob runs a program from the run's folder to start a shell")
    plan, attempt = find_running(view, "a shell")
    index, host = choose_node(list_hosts(plan, attempt), node)
    agent = [plan.python, str(view.run.agent), "shell", "--run", str(view.run.path)]
    agent += ["--attempt", str(attempt.number), "--node", str(index), "--", *words]
    command = ["sh", "-c", PICK_PYTHON, "sh", *agent]
    env = {**clean_environment(os.environ), **keep_ssh_agent(os.environ)}
    return process.hand_over(build_way(view, plan, index, host, command), env=env)


def choose_node(hosts: dict[int, str], wanted: str | None) -> tuple[int, str]:
    """Return index and name of the wanted node, given by either; the first node by default."""
    if wanted is None:
        return 0, hosts[0]
    for index, host in hosts.items():
        if wanted in (host, str(index)):
            return index, host
    raise InputError(f"--node {wanted}: the nodes, from 0, are {', '.join(hosts.values())}")


def build_way(
    view: RunView, plan: Plan, index: int, host: str, command: Sequence[str]
) -> list[str]:
    """Return the local command that runs `command` on the node."""
    scheduler = schedulers.get_scheduler(plan.scheduler)
    if scheduler.can.starts_steps:
        return build_step(view, plan, index, host, command)
    expect_here(view)
    if scheduler.can.remote_shell:
        return build_over_ssh(view, host, command)
    return list(command)


def build_step(
    view: RunView, plan: Plan, index: int, host: str, command: Sequence[str]
) -> list[str]:
    """Build a step beside the job's own that takes none of the job's resources."""
    info = _find_job(view, host)
    if info is None:  # what Slurm said last may be older than the job's start
        info = _find_job(view_run(view.run, after=time.time()), host)
    if info is None:
        raise InputError(f"{host} is not in any job of the run now")
    group, scheduler = plan.node(index).group.name, schedulers.get_scheduler(plan.scheduler)
    return scheduler.build_shell(info, host, group, command, tty=sys.stdin.isatty())


def _find_job(view: RunView, host: str) -> SchedulerJob | None:
    """Return the job, or the component of a job, that has the node; None if there is none."""
    infos = (*view.infos, *view.joined)
    return next((info for info in infos if host in info.nodes), None)


def build_over_ssh(view: RunView, host: str, command: Sequence[str]) -> list[str]:
    plan, spelled = read_plan(view.run.plan), read_json(view.run.machines)
    machine = parse_machine(str(spelled.get(host, "")) if isinstance(spelled, dict) else "")
    if plan is None or isinstance(machine, str):
        raise InputError(f"{view.run.machines} does not say where {host} is")
    if machine.is_local:
        return list(command)
    tool, _, *words = build_ssh_command(machine, plan.ssh_config)[:-1]
    return [tool, "-t" if sys.stdin.isatty() else "-T", *words, shlex.join(command)]
