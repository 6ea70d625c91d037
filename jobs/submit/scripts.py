"""Plan to scripts: the Jinja environment, and the sbatch options of each component.

Every value is shell-quoted by the environment's finalizer unless it is a `Raw`, so that a name or
path can never become shell text. An undefined name in a template is an error.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from varuna_core import __version__
from varuna_core.records.plan import ContainerPlan, GroupPlan, Plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup
from vjob.jobs.schedulers.slurm.commands import COMMENT_PREFIX

PER_COMPONENT = frozenset(
    {
        "batch",
        "constraint",
        "contiguous",
        "cores-per-socket",
        "cpu-freq",
        "exclusive",
        "extra-node-info",
        "hint",
        "mincpus",
        "nodefile",
        "nodelist",
        "oversubscribe",
        "prefer",
        "sockets-per-node",
        "switches",
        "threads-per-core",
        "tmp",
    }
)
"""sbatch options that hold for one component of a het job, not for all of them."""
ENTER_CONTAINER = """/bin/sh -c 'exec bash "$1"' node"""
"""Starts a step in a container: srun would run `bash` by its path on the host."""


class Raw(str):
    """Shell text that is already quoted; the finalizer leaves it as it is."""


LEAVE_S = 30
"""Beyond the ranks' grace: for the agents of a run that may morph to exit when it has ended."""


GRANTED_NODES = Raw('"$SLURM_JOB_NUM_NODES"')
"""The number of nodes of a job that asked for a range."""


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """The rendered scripts of a run, by file name."""

    batch: Mapping[str | None, str]
    """By group; None where one job holds all groups."""
    node: str


def render_scripts(conf: JobConf, plan: Plan, run: RunFolder) -> Scripts:
    """Render all scripts of a run."""
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

    The group of a job that joins is not in the conf: it gets the sbatch options of the group
    `like`.
    """
    groups = [group for group in plan.groups if only in (None, group.name)]
    confs = {group.group: group for group in conf.cluster.nodes}
    is_joining = plan.morph and only not in (None, plan.groups[0].name)
    min_nodes = None if is_joining else find_min_nodes(conf, plan)
    components = [
        build_component_options(group, confs[like or group.name], conf.cluster, min_nodes)
        for group in groups
    ]
    shared = build_shared_options(conf, plan, run, only)
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
            components=[
                [Raw(line) for line in ([*shared, *options] if index == 0 else options)]
                for index, options in enumerate(components)
            ],
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
            granted=GRANTED_NODES if min_nodes or plan.scheduler == "ssh" else None,
            leave_s=conf.cluster.grace_s + LEAVE_S,
            manager_failures=conf.morph.manager_failures,
            finish_s=conf.cluster.finish_s,
            over_ssh=plan.scheduler == "ssh",
            walltime_s=None if plan.scheduler == "ssh" else 60 * conf.cluster.walltime_min,
            may_requeue=conf.cluster.requeue,
            node_script=str(run.node_script),
            agent=str(run.agent),
        )
    )


def render_node(conf: JobConf, plan: Plan, run: RunFolder) -> str:
    """Render the script that srun starts once on each node."""
    inside = find_step_container(plan)
    is_over_ssh = plan.scheduler == "ssh"
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


def render_array(
    conf: JobConf, plan: Plan, run: RunFolder, name: str, size: int, at_most: int
) -> str:
    """Render the script of a Slurm array, whose element i runs the batch script of run `name`-i.

    `run` is one of them, and all are alike.
    """
    (group,), (asked,) = plan.groups, conf.cluster.nodes
    own = ("#SBATCH --output=", "#SBATCH --comment=")
    shared = [
        line for line in build_shared_options(conf, plan, run, None) if not line.startswith(own)
    ]
    elements = str(run.path.with_name(name))
    values = {
        "array": f"0-{size - 1}%{min(at_most, size)}",
        "comment": f"{COMMENT_PREFIX}{name}",
        "output": f"{elements}-%a/{run.scheduler_log().name}",
    }
    options = [*shared, *_render_options(values)]
    options += build_component_options(group, asked, conf.cluster)
    return (
        _environment()
        .get_template("array.sh.j2")
        .render(
            version=Raw(__version__),
            name=Raw(name),
            options=[Raw(line) for line in options],
            elements=elements,
            batch_script=run.batch_script().name,
        )
    )


def find_step_container(plan: Plan) -> ContainerPlan | None:
    """The container whose runtime srun itself starts, around the agent; None for other runtimes."""
    return next((container for container in plan.containers if container.step), None)


def build_exports(plan: Plan, container: ContainerPlan) -> list[Raw]:
    """`NAME=value` for each variable of the runtime; the step's --export names them."""
    asked = {name: plan.env.get(name, value) for name, value in container.defaults.items()}
    values = {**container.env, **asked}
    return [Raw(f"{name}={shlex.quote(value)}") for name, value in values.items()]


def build_shared_options(conf: JobConf, plan: Plan, run: RunFolder, group: str | None) -> list[str]:
    """sbatch options that a het job takes from its first component: account, time, output, ..."""
    cluster = conf.cluster
    name = f"{plan.name}-{group}" if group else plan.name
    values: dict[str, Any] = {
        "job-name": name,
        "comment": f"{COMMENT_PREFIX}{plan.run}",
        "output": run.scheduler_log(group).name,
        "open-mode": "append",
        "time": None if plan.scheduler == "ssh" else cluster.walltime_min,
        "account": cluster.account,
        "qos": cluster.qos,
        **({"no-kill": True} if plan.morph else {}),  # a lost node does not end the job
        "requeue" if cluster.requeue else "no-requeue": True,
    }
    if cluster.signal_before_end_s:
        values["signal"] = f"B:USR1@{cluster.signal_before_end_s}"  # the batch script passes it on
    return [*_render_options(values), *_render_options(_pick(cluster.sbatch, per_component=False))]


def choose_fixed(plan: Plan) -> str:
    return "restarts" if plan.restarts else "fixed"


def find_min_nodes(conf: JobConf, plan: Plan) -> int | None:
    """The fewest nodes that the job may start with; None where it must have all.

    A range holds for the first start too, so it is asked for only where the conf names a minimum.
    """
    min_nodes = conf.morph.min_nodes
    if not plan.morph or plan.layout != "single" or min_nodes is None:
        return None
    return min_nodes if min_nodes < plan.groups[0].count else None


def build_component_options(
    group: GroupPlan, conf: NodeGroup, cluster: Cluster, min_nodes: int | None = None
) -> list[str]:
    """sbatch options of one component of a het job."""
    memory = (
        None
        if group.memory_gb is None
        else ("0" if group.memory_gb == 0 else f"{group.memory_gb}G")
    )
    gpus = None
    if group.gpus:
        gpus = f"gpu:{group.gpu_type}:{group.gpus}" if group.gpu_type else f"gpu:{group.gpus}"
    return [
        *_render_options(
            {
                "partition": group.queue,
                "nodes": group.count if min_nodes is None else f"{min_nodes}-{group.count}",
                # With it Slurm gives of a range the min_nodes, on an idle queue too (22.05).
                "ntasks-per-node": 1 if min_nodes is None else None,
                "cpus-per-task": group.cpus,
                "gres": gpus,
                "mem": memory,
                "exclude": ",".join(cluster.exclude) or None,
            }
        ),
        *_render_options({**_pick(cluster.sbatch, per_component=True), **conf.sbatch}),
    ]


def _pick(options: Mapping[str, Any], *, per_component: bool) -> dict[str, Any]:
    return {k: v for k, v in options.items() if (k in PER_COMPONENT) is per_component}


def build_step_options(
    group: GroupPlan, index: int, groups: Sequence[GroupPlan], granted: Raw | None = None
) -> dict[str, Any]:
    """srun options of one component of the step."""
    return {
        "het_group": index if len(groups) > 1 else None,
        "nodes": group.count if granted is None else granted,
        "cpus": group.cpus,
        "name": Raw(group.name),
    }


def _render_options(values: Mapping[str, Any]) -> list[str]:
    """Format `#SBATCH` lines; None leaves an option out, True makes it a flag."""
    lines = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={_quote(value)}")
    return lines


def _quote(value: Any) -> str:
    """Quote a value for an `#SBATCH` line, whose rules are sbatch's own."""
    text = str(value)
    if re.fullmatch(r"[\w./:,@%+=\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quote_whole(text: str) -> Raw:
    """Quote always: shellcheck takes a bare comma in an array for a mistake."""
    return Raw("'" + text.replace("'", "'\\''") + "'")


def _finalize(value: Any) -> str:
    return str(value) if isinstance(value, Raw) else shlex.quote(str(value))


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
    )
