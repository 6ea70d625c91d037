"""Resolve a conf file to the conf that runs: read it, replace each `auto` by a plan, check it.

    pipeline or micro_batch_size auto   a whole search over the conf's nodes: it may leave some
    partition auto, a profile is there  cuts (schedule, recompute where auto) of the conf's layout,
                                        and with morph the best layouts of other nodes than all
      no profile, several GPU types     the same by an estimate from data sheets; the runtime
                                        chooses what to recompute
    else                                nothing: the runtime balances stages by counted work

If there is nothing to plan, this is fast: numpy is not loaded.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records.plan import Prediction
from vjob.jobs.conf.fates import count_micro_batches
from vjob.jobs.conf.loading.choose_queue import choose_queues
from vjob.jobs.conf.loading.load import ReadConf, load_conf, require_valid
from vjob.jobs.conf.loading.site import NO_SITE, Site
from vjob.jobs.conf.references import find_value, may_change_layout
from vjob.jobs.conf.schema import BUILT_IN, OWN_MODEL, JobConf
from vjob.jobs.conf.world_size import is_open
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.planning.inputs import explain_errors, find_profile, read_open_conf
from vjob.jobs.planning.plan_file import SETTINGS, PlanFile, apply_cuts, apply_plan
from vjob.jobs.schedulers import choose as schedulers

if TYPE_CHECKING:
    from varuna_core.planner.profile.profile import Profile
    from varuna_core.planner.result.plan import ShapePlan
    from vjob.jobs.planning.question import Question

log = logging.getLogger(__name__)

LIMIT_S = 20.0
"""Time limit of a search at submit, in seconds."""
KEYS = (
    "parallel.pipeline",
    "parallel.data",
    "parallel.tensor",
    "parallel.zero",
    "train.micro_batch_size",
)
"""Keys that a search at submit keeps even if the conf does not write them, with their default
values."""
LIMIT = "cluster.walltime_min"
BY_RUNTIME = "the runtime balances stages by counted work"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A layout chosen for a conf, and the reason for this layout."""

    conf: JobConf
    """The conf with the layout."""
    why: str
    """The origin of the layout, in a sentence; empty for a script without a pipeline."""
    prediction: Prediction | None = None
    layouts: Mapping[str, tuple[int, int, str]] | None = None
    """Layouts for other nodes of a run that may morph: see records/plan.py."""
    layout_steps: Mapping[str, float] | None = None
    """Seconds of a step with those layouts."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A conf that may be submitted."""

    path: Path
    """Absolute path of the conf."""
    text: str
    """Text of the file, as parsed."""
    chosen: Chosen
    written: Collection[str] = ()
    """Keys set by the conf, --set or the chosen plan."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """Places of the written keys."""
    site: Site = NO_SITE
    queues: Mapping[str, str] = field(default_factory=dict)
    """Reason for the queue of each group that left the choice to vjob, keyed by group."""

    @property
    def conf(self) -> JobConf:
        return self.chosen.conf


def resolve_conf(
    path: Path,
    overrides: Sequence[str],
    *,
    plan: PlanFile | None = None,
    text: str | None = None,
    require_env: bool = True,
) -> Resolved:
    """Read, plan and check a conf. `overrides` take precedence over a plan's file; `text` is the
    text of a conf that is not in a file.

    Raise ConfError, or InputError if the layout is open and nothing fits.
    """
    read = read_open_conf(path, [*(plan.overrides if plan else ()), *overrides], text=text)
    if plan is None or is_open(read.conf):
        chosen = choose_layout(read)
    else:
        chosen = Chosen(conf=read.conf, why=plan.why, prediction=plan.prediction)
    return _check(read, chosen, require_env=require_env)


def resolve_unplanned(
    path: Path, overrides: Sequence[str], *, require_env: bool = True
) -> Resolved:
    """Read and check a conf without planning; a layout that is to be planned is replaced by a
    single stage."""
    read = load_conf(path, overrides)
    conf = read.conf
    if is_open(conf):
        require_valid(read, require_env=require_env)
        conf = replace(
            conf,
            parallel=replace(conf.parallel, pipeline=1, data="auto", partition="auto"),
            train=replace(conf.train, micro_batch_size=1, global_batch_size=None),
        )
    return _check(read, Chosen(conf=conf, why="as the conf says"), require_env=require_env)


def _check(read: ReadConf, chosen: Chosen, *, require_env: bool) -> Resolved:
    """Check the conf with its layout; planned keys have no line in the file."""
    keys = ("train.global_batch_size", *SETTINGS)
    changed = [key for key in keys if find_value(read.conf, key) != find_value(chosen.conf, key)]
    read = read.change(chosen.conf, changed)
    require_valid(read, require_env=require_env)
    written = frozenset(read.lines)
    of_site = {key for key in written if read.site.find_origin(read.lines[key])}
    cluster = schedulers.settle_cluster(chosen.conf.cluster, written - of_site)
    site, lines = read.site, dict(read.lines)
    if LIMIT in of_site and schedulers.choose_for(cluster).can.one_host:
        # A site's limit is for its queues.
        cluster, site = replace(cluster, walltime_min=None), site.leave_out(LIMIT)
        del lines[LIMIT]
    conf, queues = choose_queues(replace(chosen.conf, cluster=cluster), site.queues)
    return Resolved(
        path=read.path.resolve(),
        text=read.text,
        chosen=replace(chosen, conf=conf),
        written=frozenset(lines),
        lines=lines,
        site=site,
        queues=queues,
    )


def choose_layout(read: ReadConf) -> Chosen:
    """Plan what is `auto`; raise InputError if the layout is open and nothing fits."""
    conf, base = read.conf, read.path.resolve().parent
    if is_open(conf):
        return _search(base, conf)
    reason = _find_reason(conf)
    if reason is not None:
        chosen = _add_script_layouts(Chosen(conf=conf, why=reason), base, read.lines)
        if conf.parallel.profile is not None and not chosen.layouts:
            log.warning(
                "parallel.profile has no effect on this submit%s: `vjob plan CONF --write PLAN` "
                "uses it, then `vjob submit CONF --plan PLAN`",
                reason and f" ({reason})",
            )
        return chosen
    file = find_profile(conf, base)
    if file is None and not has_unlike_gpus(conf):
        return Chosen(conf=conf, why=BY_RUNTIME + ": there is no profile")
    try:
        return _cut(conf, base, file)
    except VjobError as error:
        log.warning("%s is not used: %s", file or "the estimate from data sheets", error)
        return Chosen(conf=conf, why=f"{BY_RUNTIME}: {error}")


def _add_script_layouts(chosen: Chosen, base: Path, written: Collection[str]) -> Chosen:
    """Add the layouts of a morphing script for other numbers of nodes, if a profile or the data
    sheets of several GPU types tell how fast they are."""
    conf = chosen.conf
    parallel = conf.parallel
    if not may_change_layout(conf) or conf.morph.mode == "world" or parallel.order == "pipeline":
        return chosen
    from varuna_core.schedule.registry import has_one_stage_a_rank  # slow: as below
    from vjob.jobs.planning.script_layouts import plan_by_data_sheets

    file = find_profile(conf, base)
    is_cut = parallel.partition != "auto" and has_unlike_gpus(conf)
    if not has_one_stage_a_rank(parallel.schedule) or not (file or is_cut):
        return chosen
    try:
        with explain_errors():
            if file is not None:
                from vjob.jobs.planning.fixed_layout import plan_by_profile

                layouts, steps = plan_by_profile(conf, KEYS, base, file)
            else:
                layouts = plan_by_data_sheets(conf, count_micro_batches(conf, written))
                steps = {}
    except VjobError as error:
        log.warning("layouts for other numbers of nodes are not chosen by speed: %s", error)
        return chosen
    return replace(chosen, layouts=layouts, layout_steps=steps)


def has_unlike_gpus(conf: JobConf) -> bool:
    """Return True if node groups name several types of GPU.

    Equal stages would wait for the slowest, so cuts by data sheets are better than counted work.
    """
    groups = conf.cluster.nodes
    return len({group.gpu_type for group in groups if group.num_gpus} - {None}) > 1


def _find_reason(conf: JobConf) -> str | None:
    """Return the reason why the partition is not planned; None if it may be planned, and an empty
    text if there is nothing to divide."""
    parallel = conf.parallel
    if parallel.partition != "auto":
        return "the conf gives the partition"
    if conf.program.kind not in BUILT_IN:
        return "" if parallel.pipeline == 1 else "the program splits its model itself"
    if conf.train.global_batch_size is None:
        return f"{BY_RUNTIME}: train.global_batch_size is not set"
    if parallel.context > 1:
        return f"{BY_RUNTIME}: parallel.context is not modelled"
    if parallel.order == "pipeline" and parallel.data != 1:
        return f"{BY_RUNTIME}: parallel.order pipeline is not modelled"
    return None


# The planner is imported in the two functions below: it needs numpy, which a submit with nothing to
# plan does without, and `explain_errors` says where it is missing.


def _search(base: Path, conf: JobConf) -> Chosen:
    with explain_errors():
        from varuna_core.planner.model.tables import Tables
        from varuna_core.planner.result.plan import build_plan, explain_simpler
        from varuna_core.planner.result.refusal import search_or_explain
        from varuna_core.planner.search.deadline import within
        from vjob.jobs.planning.question import PlanOptions, load_question

        if conf.program.kind in OWN_MODEL:
            raise InputError(
                "parallel.pipeline or train.micro_batch_size is auto, and vjob does not know the "
                f"{conf.program.kind}'s model: set numbers; `vjob plan` helps to choose them"
            )
        question = load_question(conf, KEYS, base, PlanOptions(prices={}))
        question = _leave_to_runtime(conf, question)
        searched = search_or_explain(
            question.profile,
            question.training,
            question.cluster,
            question.wishes,
            deadline=within(LIMIT_S),
            may_have_zero_3=question.may_have_zero_3,
        )
        tables = Tables(question.profile, question.training)
        plan = build_plan(tables, question.cluster, searched.chosen, question.wishes.least)
        proof = f"gap {searched.gap:.1%}" if searched.gap else "proved fastest"
        names = itertools.chain.from_iterable(
            one.schedules for one in searched.classes if one.bound_s is not None
        )
        proof += f" of {', '.join(dict.fromkeys(names))}"
        if searched.simpler is not None:
            proof = explain_simpler(searched)
        return Chosen(
            conf=_keep_recompute(conf, apply_plan(conf, plan), question),
            why=f"planned at submit by {question.basis}; {proof}",
            prediction=_predict(conf, plan, question.profile),
        )


def _cut(conf: JobConf, base: Path, file: Path | None) -> Chosen:
    with explain_errors():
        from vjob.jobs.planning.fixed_layout import plan_fixed_layout, plan_other_nodes
        from vjob.jobs.planning.question import PlanOptions, load_question

        question = load_question(conf, KEYS, base, PlanOptions(prices={}, profile=file))
        question = _leave_to_runtime(conf, question)
        plan = plan_fixed_layout(question, conf)
        may_change = conf.morph.enabled and conf.parallel.order != "pipeline"
        may_change = may_change and plan.candidate.stages_per_rank == 1
        layouts, steps = plan_other_nodes(question, conf, plan) if may_change else (None, None)
    return Chosen(
        conf=_keep_recompute(conf, apply_cuts(conf, plan), question),
        why=f"stages cut at submit by {question.basis}",
        prediction=_predict(conf, plan, question.profile),
        layouts=layouts,
        layout_steps=steps,
    )


def _leave_to_runtime(conf: JobConf, question: Question) -> Question:
    """For an estimate, leave `recompute: auto` to the runtime, since only the runtime or a profile
    measures graphs; the search then uses only the modes `none`, `full` and `auto`."""
    if not _keeps_auto(conf, question):
        return question
    ways = tuple(way for way in ("none", "full", "auto") if way in question.training.recomputes)
    return replace(question, training=replace(question.training, recomputes=ways))


def _keep_recompute(conf: JobConf, planned: JobConf, question: Question) -> JobConf:
    if not _keeps_auto(conf, question):
        return planned
    return replace(planned, parallel=replace(planned.parallel, recompute="auto"))


def _keeps_auto(conf: JobConf, question: Question) -> bool:
    return conf.parallel.recompute == "auto" and question.is_estimate


def _predict(conf: JobConf, plan: ShapePlan, profile: Profile) -> Prediction:
    """Return the plan's prediction; if a node group of the conf names no GPU type, add the
    profile's, since the nodes may differ from it."""
    prediction = plan.build_prediction()
    if any(group.num_gpus and group.gpu_type is None for group in conf.cluster.nodes):
        (gpu,) = profile.gpus
        return replace(prediction, gpu=gpu)
    return prediction
