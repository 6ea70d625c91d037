"""Render a plan's scripts from Jinja templates.

The environment's finalizer shell-quotes every value unless it is a `Raw`, so that a name or path
can never become shell text. An undefined name in a template is an error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from varuna_core import __version__
from varuna_core.records.files import PRIVATE_FOLDER, locate_cache
from varuna_core.records.plan import ContainerPlan, GroupPlan, Plan
from varuna_core.records.record import JobLimits
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.base import Capabilities, ScriptRequest

ENTER_CONTAINER = """/bin/sh -c 'exec bash "$1"' node"""
"""Starts a step inside a container, where srun would run `bash` by its path on the host."""


class Raw(str):
    """Shell text that is already quoted; the finalizer leaves it as it is."""


LEAVE_S = 30
"""Seconds beyond the ranks' grace for agents of a morphing run to exit when it has ended."""


GRANTED_NODES = Raw('"$SLURM_JOB_NUM_NODES"')
"""The number of nodes of a job that asked for a range, as shell text."""


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """The rendered scripts of a run, by file name."""

    batch: Mapping[str | None, str]
    """Batch scripts by group; None if one job holds all groups."""
    node: str


def render_scripts(conf: JobConf, plan: Plan, run: RunFolder) -> Scripts:
    groups: Sequence[str | None] = [None]
    if plan.layout == "split":
        groups = [group.name for group in plan.groups]
    return Scripts(
        batch={group: render_batch(conf, plan, run, group) for group in groups},
        node=render_node(conf, plan, run),
    )


def render_batch(
    conf: JobConf, plan: Plan, run: RunFolder, only: str | None = None, like: str | None = None
) -> str:
    """Render the batch script; for a split run that of the group `only`.

    The group of a job that joins is not in the conf, and gets the sbatch options of the group
    `like`.
    """
    groups = [group for group in plan.groups if only in (None, group.name)]
    confs = {group.group: group for group in conf.cluster.nodes}
    is_joining = plan.morph and only not in (None, plan.groups[0].name)
    min_nodes = None if is_joining else find_min_nodes(conf, plan)
    scheduler = schedulers.get_scheduler(plan.scheduler)
    asked = ScriptRequest(
        run=plan.run,
        name=f"{plan.name}-{only}" if only else plan.name,
        output=run.scheduler_log(only).name,
        groups=groups,
        nodes=[confs[like or group.name] for group in groups],
        cluster=conf.cluster,
        morph=bool(plan.morph),
        min_nodes=min_nodes,
    )
    inside = find_step_container(plan)
    kind = "joining" if is_joining else "elastic" if plan.morph else choose_fixed(plan)
    return (
        _environment()
        .get_template(f"batch_{kind}.sh.j2")
        .render(
            version=Raw(__version__),
            run_id=Raw(plan.run),
            run=str(run.path),
            group=only or "",
            components=[_as_raw(lines) for lines in scheduler.render_header(asked)],
            prologue=_as_raw(scheduler.render_prologue(asked)),
            step_options=_as_raw(scheduler.list_step_options(asked)),
            python=plan.python,
            inside=[] if inside is None else [_quote_whole(word) for word in inside.step],
            exports=[] if inside is None else build_exports(plan, inside),
            start=Raw(ENTER_CONTAINER if inside else "bash"),
            steps=[
                build_step_options(group, index, groups, GRANTED_NODES if min_nodes else None)
                for index, group in enumerate(groups)
            ],
            tend=plan.morph and (conf.morph.grow == "auto" or conf.morph.leave_slow),
            vjob=str(process.ENTRY),
            # Where local jobs are found (jobs/schedulers/run_index.py).
            state=os.environ.get("XDG_STATE_HOME", ""),
            granted=GRANTED_NODES if min_nodes or scheduler.can.remote_shell else None,
            leave_s=conf.cluster.grace_s + LEAVE_S,
            manager_failures=conf.morph.manager_failures,
            finish_s=conf.cluster.finish_s,
            over_ssh=scheduler.can.remote_shell,
            inside_job=scheduler.can.inside_job,
            walltime_s=find_limit_s(conf, scheduler.can),
            may_requeue=conf.cluster.requeue,
            may_return=is_joining or (conf.cluster.requeue and not plan.morph),
            node_script=str(run.node_script),
            agent=str(run.agent),
        )
    )


def render_node(conf: JobConf, plan: Plan, run: RunFolder) -> str:
    """Render the script that srun starts once on each node."""
    inside = find_step_container(plan)
    is_over_ssh = schedulers.get_scheduler(plan.scheduler).can.remote_shell
    kind = "fixed" if not plan.morph else "machines" if is_over_ssh else "elastic"
    # The interpreter that runs vjob may be there in a container, and not run.
    pythons = [plan.python, "python3"] if inside is None else ["python3", "/usr/bin/python3"]
    return (
        _environment()
        .get_template(f"node_{kind}.sh.j2")
        .render(
            version=Raw(__version__),
            run_id=Raw(plan.run),
            run=str(run.path),
            agent=str(run.agent),
            tethered=is_over_ssh,
            give_back=Raw("scontrol requeue" if conf.cluster.requeue else "scancel"),
            workdir=plan.workdir if inside is None else inside.workdir,
            setup=[Raw(line) for line in conf.setup],
            pythons=Raw(shlex.join(pythons)),
        )
    )


@dataclass(frozen=True, kw_only=True)
class ArrayShape:
    """An array of runs; element i is the run NAME-i."""

    name: str
    size: int
    first: int = 0
    at_most: int | None = None
    """The most runs at the same time; None for all."""

    def spell(self) -> str:
        limit = "" if self.at_most is None else f"%{min(self.at_most, self.size)}"
        return f"{self.first}-{self.first + self.size - 1}{limit}"


def render_array_header(
    conf: JobConf, plan: Plan, run: RunFolder, shape: ArrayShape, job_name: str
) -> list[str]:
    """Render an array's scheduler options; runs with equal options can be one array."""
    (group,), (asked,) = plan.groups, conf.cluster.nodes
    request = ScriptRequest(
        run=shape.name,
        name=job_name,
        output=f"{run.path.with_name(shape.name)}-%a/{run.scheduler_log().name}",
        groups=[group],
        nodes=[asked],
        cluster=conf.cluster,
        array=shape.spell(),
    )
    (options,) = schedulers.get_scheduler(plan.scheduler).render_header(request)
    return options


def render_array(
    conf: JobConf, plan: Plan, run: RunFolder, shape: ArrayShape, job_name: str
) -> str:
    """Render the script of a Slurm array, whose element i runs the batch script of run `name`-i.

    `run` is one of the runs, whose header is valid for all.
    """
    options = render_array_header(conf, plan, run, shape, job_name)
    return (
        _environment()
        .get_template("array.sh.j2")
        .render(
            version=Raw(__version__),
            name=Raw(shape.name),
            first=Raw(shape.first),
            second=Raw(shape.first + 1),
            options=_as_raw(options),
            elements=str(run.path.with_name(shape.name)),
            batch_script=run.batch_script().name,
        )
    )


def build_limits(conf: JobConf, scheduler: str) -> JobLimits:
    """Return the limits with which a job of this conf is submitted."""
    cluster, limit_s = conf.cluster, find_limit_s(conf, schedulers.get_capabilities(scheduler))
    return JobLimits(
        walltime_s=None if limit_s is None else float(limit_s),
        warn_s=float(cluster.signal_before_end_s),
        may_requeue=cluster.requeue,
    )


def find_limit_s(conf: JobConf, can: Capabilities) -> int | None:
    """Return the time limit of the run's jobs; None if there is none."""
    limit_min = conf.cluster.walltime_min
    return None if limit_min is None or not can.time_limit else 60 * limit_min


def _as_raw(lines: Sequence[str]) -> list[Raw]:
    return [Raw(line) for line in lines]


def find_step_container(plan: Plan) -> ContainerPlan | None:
    """Return the container that srun itself starts around the agent; None for other runtimes."""
    return next((container for container in plan.containers if container.step), None)


def build_exports(plan: Plan, container: ContainerPlan) -> list[Raw]:
    """Return `NAME=value` for each variable of the runtime, for the step's --export."""
    asked = {name: plan.env.get(name, value) for name, value in container.defaults.items()}
    values = {**container.env, **asked}
    return [Raw(f"{name}={shlex.quote(value)}") for name, value in values.items()]


def choose_fixed(plan: Plan) -> str:
    return "restarts" if plan.restarts else "fixed"


def find_min_nodes(conf: JobConf, plan: Plan) -> int | None:
    """Return the fewest nodes with which the job may start; None if it needs all.

    A range applies to the first start too, so it is used only if the conf names a minimum.
    """
    min_nodes = conf.morph.min_nodes
    if not plan.morph or plan.layout != "single" or min_nodes is None:
        return None
    return min_nodes if min_nodes < plan.groups[0].count else None


def build_step_options(
    group: GroupPlan, index: int, groups: Sequence[GroupPlan], granted: Raw | None = None
) -> dict[str, Any]:
    """Return the srun options of one component of the step."""
    return {
        "het_group": index if len(groups) > 1 else None,
        "nodes": group.count if granted is None else granted,
        "cpus": group.cpus,
        "name": Raw(group.name),
    }


def _quote_whole(text: str) -> Raw:
    """Quote in all cases, since shellcheck takes a bare comma in an array for a mistake."""
    return Raw("'" + text.replace("'", "'\\''") + "'")


def _finalize(value: Any) -> str:
    return str(value) if isinstance(value, Raw) else shlex.quote(str(value))


class _CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Compiled templates in ~/.cache/vjob/templates, since compiling takes a tenth of a submit."""

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):  # a home that is full, or of somebody else
            Path(self.directory).mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            super().dump_bytecode(bucket)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("vjob.templates", ""),
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_CompiledTemplates(str(locate_cache("templates")), f"{__version__}-%s"),
    )
