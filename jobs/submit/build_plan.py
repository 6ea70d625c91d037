"""Build a plan from a conf, as a pure function of conf, user, interpreter and environment.

Rank numbers follow the groups in order, node by node, as Slurm numbers a step over components. The
stage of a rank follows from the stage map (`varuna_core.records.rank_map.build_stages`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.records.plan import (
    ContainerPlan,
    GroupPlan,
    MorphPlan,
    Plan,
    Timing,
    TrackPlan,
)
from varuna_core.records.rank_map import build_stages, encode_stage_map
from varuna_core.records.secrets import withhold
from varuna_core.records.training import TrainingFacts
from vjob.containers.runtime import ImageKind, Mount, Request, Unsuitable
from vjob.jobs.conf.fates import (
    OF_PROGRAMS,
    build_variables,
    count_micro_batches,
    drop_unwritten,
    find_default,
    list_leaves,
    reaches,
)
from vjob.jobs.conf.redact import redact_value
from vjob.jobs.conf.references import fill_references
from vjob.jobs.conf.schema import BUILT_IN, FUNCTION, OWN, JobConf, Parallel, Track
from vjob.jobs.conf.world_size import build_groups, choose_order, require_number
from vjob.jobs.conf.write import resolve_conf
from vjob.jobs.conf.yaml_tree import join_key
from vjob.jobs.errors import InputError
from vjob.jobs.images.runtimes import list_runtimes
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.programs import start
from vjob.jobs.schedulers import choose as schedulers

BEAT_S = 5.0
"""Seconds between heartbeats of a node, more on a large run since each rewrites a file."""
NODES_PER_BEAT_S = 50
SAVE_S = 300
"""Seconds for the checkpoint before a morph, unless cluster.signal_before_end_s is set."""


NOT_SHOWN = ("env", "pass_env", "notify", "setup", "sbatch", "track")
"""Keys not passed to tracking tools: they are private, or do not concern the training."""


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """Inputs of a plan besides the conf."""

    run: str
    """Id of the run."""
    scheduler: str
    """slurm, local or ssh."""
    python: str
    """The interpreter that runs vjob."""
    base: str
    """The conf's folder."""
    user_id: int
    environ: Mapping[str, str]
    """The submitting shell's environment, for `pass_env`."""
    folder: str
    """The run folder."""
    image_kind: ImageKind = ImageKind.REFERENCE
    image_stamp: str = ""
    """Size and time of the image file."""
    found: start.ProgramFiles = field(default_factory=start.ProgramFiles)
    """Facts from the program's own files."""
    written: Collection[str] = ()
    """Keys that the conf writes; some reach a script only if they are written."""
    mounts: tuple[str, ...] = ()
    """Additional folders that containers see, at their own paths."""


def build_plan(conf: JobConf, here: PlanContext) -> Plan:
    asked, conf = conf, fill_references(conf)
    starter, launch = start.get_starter(conf), start.choose_launch(asked, here.found, here.written)
    groups = tuple(
        replace(group, env={**starter.build_group_env(node), **group.env})
        for group, node in zip(build_groups(conf.cluster.nodes), conf.cluster.nodes, strict=True)
    )
    parallel = conf.parallel
    if launch.name == "srun" and not schedulers.get_capabilities(here.scheduler).starts_steps:
        raise InputError(
            f"program.launch srun: this run does not go through Slurm ({here.scheduler}), whose "
            "variables the ranks would read: use torchrun"
        )
    if launch.name == "node":
        groups, parallel = join_ranks(groups), Parallel()
    world = sum(group.count * group.ranks for group in groups)
    pipeline = require_number(parallel.pipeline)
    share = pipeline * parallel.tensor
    data = world // share if parallel.data == "auto" else parallel.data
    order = choose_order(conf, data)
    workdir = conf.workdir or here.base
    beat_s = max(BEAT_S, sum(group.count for group in groups) / NODES_PER_BEAT_S)
    containers = build_containers(conf, here, workdir)
    python = get_python(conf, containers, here.python)
    return Plan(
        run=here.run,
        name=conf.name,
        scheduler=here.scheduler,
        layout=choose_layout(conf),
        morph=conf.morph.enabled,
        groups=groups,
        pipeline=pipeline,
        data=data,
        tensor=parallel.tensor,
        order=order,
        partition=None if parallel.partition == "auto" else parallel.partition.spell(),
        stage_map=encode_stage_map(build_stages(pipeline, data, order)),
        command=start.build_command(conf, here.found, here.folder, python),
        python=here.python,
        workdir=workdir,
        env={
            **starter.build_env(conf),
            **build_variables(conf, here.written),
            # A missing one was refused, but in a dry run, which may be on another machine.
            **{name: here.environ[name] for name in conf.pass_env if name in here.environ},
            **conf.env,
        },
        containers=containers,
        modules=starter.list_modules(conf),
        must_exist=tuple(find_needed_paths(conf, workdir, containers)),
        port=None if conf.cluster.port == "auto" else conf.cluster.port,
        timing=Timing(
            grace_s=conf.cluster.grace_s,
            join_s=conf.cluster.join_s,
            prepare_s=conf.cluster.prepare_s,
            beat_s=beat_s,
            lost_s=max(conf.cluster.lost_s, 3 * beat_s),
            sample_s=conf.cluster.sample_s,
        ),
        prefix=start.build_profiler_prefix(conf, marks_steps=starter.marks_steps(conf, here.found)),
        prefixed=None if conf.profile.ranks == "all" else conf.profile.ranks,
        morphing=build_morphing(asked, here.written) if conf.morph.enabled else None,
        restarts=conf.cluster.restarts,
        restart_same=conf.cluster.restart_same,
        hang_do=conf.on_hang.do,
        hang_after_s=conf.on_hang.after,
        log_limit_mb=conf.cluster.log_limit_mb or None,
        progress=conf.progress,
        machine_list=conf.cluster.machine_list,
        ssh_config=conf.cluster.ssh_config,
        address=conf.cluster.address,
        program=conf.program.kind,
        launch=launch.name,
        path="%{path}" if containers else choose_path(conf, here, python),
        track=build_track(conf, here, python),
        timeline=conf.profile.timeline
        and "profile.timeline" in here.written
        and conf.program.kind not in BUILT_IN,
        count_steps=conf.profile.count_steps and conf.program.kind not in BUILT_IN,
    )


def join_ranks(groups: Sequence[GroupPlan]) -> tuple[GroupPlan, ...]:
    """Return groups with one process on each node, which itself starts the node's ranks."""
    return tuple(
        replace(group, ranks=1, first_rank=group.first_node, inner_ranks=group.ranks)
        for group in groups
    )


def list_known_lines(python: str, containers: Sequence[ContainerPlan]) -> tuple[KnownLine, ...]:
    """Return the known lines that a node needs: for its possible runtimes, and for Python."""
    runtimes = [container.runtime for container in containers]
    rows = load_catalogue().rows(Scope.CONTAINER, runtimes) if runtimes else ()
    return (start.describe_missing_module(python, in_container=bool(containers)), *rows)


def get_python(conf: JobConf, containers: Sequence[ContainerPlan], own: str) -> str:
    """Return the interpreter of the ranks; `own` is the one that runs vjob."""
    return conf.program.python or ("python3" if containers else own)


def choose_path(conf: JobConf, here: PlanContext, python: str) -> str:
    """Return PATH for a program that Python does not start. The folder of the ranks' Python comes
    first if the conf names that Python, or if it is on PATH here and no `setup` lines choose
    another; else it comes last."""
    if start.get_starter(conf).build_interpreter(conf, here.found, python) or "/" not in python:
        return "%{path}"
    folder = os.path.dirname(python)
    is_usual = folder in here.environ.get("PATH", "").split(os.pathsep) and not conf.setup
    leads = conf.program.python is not None or is_usual
    return f"{folder}:%{{path}}" if leads else f"%{{path}}:{folder}"


def build_track(conf: JobConf, here: PlanContext, python: str) -> TrackPlan | None:
    """Return the tracking tools; None if the conf names none."""
    track = conf.track
    if track == Track():
        return None
    mark = hashlib.sha256(f"{here.folder}\0{here.run}".encode()).hexdigest()[:8]
    return TrackPlan(
        id=f"{here.run}-{mark}",
        python=python,
        config=build_config(conf, here.written),
        wandb=None if track.wandb is None else dict(asdict(track.wandb), tags=[*track.wandb.tags]),
        mlflow=None if track.mlflow is None else asdict(track.mlflow),
        tensorboard=track.tensorboard,
        openmetrics=track.openmetrics,
    )


def build_config(conf: JobConf, written: Collection[str]) -> dict[str, Any]:
    """Return the conf by dotted keys for tracking tools, without environment and secrets."""
    plain = redact_value(drop_unwritten(conf, resolve_conf(conf), written))
    found: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if name not in NOT_SHOWN:
                    add(join_key(key, name), inner)
        elif isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
            for index, inner in enumerate(value):
                add(f"{key}[{index}]", inner)
        elif isinstance(value, list | tuple):
            if value:
                found[key] = withhold(" ".join(map(str, value)))
        elif value is not None and (key.startswith(OF_PROGRAMS) or not is_default(key, value)):
            found[key] = withhold(value) if isinstance(value, str) else value

    def is_default(key: str, value: Any) -> bool:
        return key in list_leaves() and value == find_default(key)

    add("", plain)
    return found


def build_morphing(conf: JobConf, written: Collection[str] = ()) -> MorphPlan:
    """Return the limits of a morph, by default from one node to all that the conf asks for."""
    nodes = sum(group.count for group in conf.cluster.nodes)
    limits = MorphPlan(
        min_nodes=conf.morph.min_nodes or 1,
        max_nodes=conf.morph.max_nodes or nodes,
        requeue=conf.cluster.requeue,
        save_s=float(conf.cluster.signal_before_end_s or SAVE_S),
        warm=conf.morph.warm and conf.program.kind in BUILT_IN,
        finish_s=float(conf.cluster.finish_s),
        stop_s=float(conf.morph.stop_s),
        return_s=float(conf.morph.return_s),
    )
    if conf.program.kind not in OWN:
        return limits
    return replace(limits, facts=build_facts(conf, written))


def build_facts(conf: JobConf, written: Collection[str]) -> TrainingFacts:
    """Return facts about the training from a script's conf. `conf` still contains its references,
    since a value that a script gets by reference counts as written."""
    train, partition = conf.train, conf.parallel.partition
    layers = None if conf.model is None else conf.model.layers
    return TrainingFacts(
        program=conf.program.kind,
        layers=layers if partition == "auto" else sum(partition.counts),
        micro_batches=count_micro_batches(conf, written),
        schedule=conf.parallel.schedule,
        steps=train.steps if reaches(conf, written, "train.steps") else None,
        checkpoint_folder=train.checkpoint.folder,
        layout=conf.morph.mode,
        is_even=conf.program.arguments == "varuna",
    )


def reserve_spare_nodes(plan: Plan) -> Plan:
    """Add a group for machines that may still join a run on a list of machines."""
    limits = plan.morphing
    if limits is None or plan.machine_list is None or limits.max_nodes <= plan.num_nodes:
        return plan
    first, more = plan.groups[0], limits.max_nodes - plan.num_nodes
    group = replace(
        first,
        name=f"{first.name}-more",
        count=more,
        first_node=plan.num_nodes,
        first_rank=plan.world,
    )
    return replace(plan, groups=(*plan.groups, group), morphing=replace(limits, joined=more))


def choose_layout(conf: JobConf) -> str:
    """Return the job layout: one group is a plain job; several are a het job, or split.

    A run that may morph is split unless the conf says hetjob, since Slurm ends all components of a
    het job if a node of one fails, which would leave nothing to continue with.
    """
    if len(conf.cluster.nodes) == 1:
        return "single"
    if conf.cluster.hetero == "auto":
        return "split" if conf.morph.enabled else "hetjob"
    return conf.cluster.hetero


def find_needed_paths(
    conf: JobConf, workdir: str, containers: Sequence[ContainerPlan]
) -> list[str]:
    """Return the paths that must exist where a node's agent runs."""
    container, bare = conf.container, not containers
    program = [path for path in (conf.program.path, conf.program.config) if path]
    if conf.program.kind == FUNCTION:
        program = []
    if any(item.step for item in containers):  # the agent is inside, and sees what ranks see
        targets = [parse_mount(mount).target for mount in container.mounts]
        return list(dict.fromkeys([*targets, *program, container.workdir or workdir]))
    if bare:
        found = program
    else:
        found = [parse_mount(mount).source for mount in container.mounts]
        if container.image and container.image.startswith("/"):
            found.append(container.image)
    if bare or container.workdir is None:
        found.append(workdir)
    return list(dict.fromkeys(found))


def build_containers(conf: JobConf, here: PlanContext, workdir: str) -> tuple[ContainerPlan, ...]:
    """Return commands for each runtime that can run the image; a node uses the first that works."""
    container = conf.container
    if container.image is None or container.runtime == "none":
        return ()
    request = build_request(conf, here, container.image, workdir)
    known = list_runtimes().values()
    kinds = [kind for kind in known if container.runtime in ("auto", kind.name)]
    able = [kind for kind in kinds if request.kind in kind.kinds]
    if container.runtime == "auto":  # srun starts it, or a daemon: asked for by name only
        able = [kind for kind in able if kind.is_automatic]
    if not able:
        takers = [kind.name for kind in known if request.kind in kind.kinds]
        raise InputError(
            f"container.image {container.image} is a {request.kind.value}, which "
            f"{container.runtime} does not run; these do: {', '.join(takers) or 'none'}"
        )
    commands, problems = [], []
    for kind in able:
        try:
            commands.append(kind().plan(request))
        except Unsuitable as problem:
            problems.append(f"{kind.name}: {problem}")
    if not commands:
        raise InputError(f"container: {'; '.join(problems)}")
    can = schedulers.get_capabilities(here.scheduler)
    if not can.starts_steps and any(item.step for item in commands):
        raise InputError(
            f"container.runtime {container.runtime}: srun starts the container, and this run does "
            "not go through Slurm; use another runtime, such as enroot, or scheduler: slurm"
        )
    return tuple(commands)


def build_request(conf: JobConf, here: PlanContext, image: str, workdir: str) -> Request:
    """Return the container request, which mounts the run folder and the working directory."""
    container = conf.container
    seen = [] if container.workdir else dict.fromkeys([workdir, *here.mounts])
    inner = f"{here.folder}/"  # of a copy that is seen with the run folder
    paths = [*(path for path in seen if not path.startswith(inner)), here.folder]
    own = {path: Mount(source=path, target=path) for path in paths}
    named = {mount.target: mount for mount in map(parse_mount, container.mounts)}
    # One a place, as podman and docker refuse the second; the run folder is always ours.
    mounts = {**own, **named, here.folder: own[here.folder]}
    return Request(
        run=here.run,
        image=image,
        kind=here.image_kind,
        mounts=tuple(mounts.values()),
        workdir=container.workdir or workdir,
        writable=container.writable,
        remap_root=container.remap_root,
        reuse=container.reuse,
        gpus=any(group.num_gpus for group in conf.cluster.nodes),
        user_id=here.user_id,
        scratch=container.scratch,
        stamp=here.image_stamp,
    )


def parse_mount(text: str) -> Mount:
    """Parse `source:target` or `source:target:ro`, already checked with the conf."""
    read_only = text.endswith(":ro")
    source, _, target = text.removesuffix(":ro").partition(":")
    return Mount(source=source, target=target, read_only=read_only)
