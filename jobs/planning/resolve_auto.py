"""`auto` at submit: what the planner chooses for a conf before it runs, or why it chooses nothing.

    pipeline or micro_batch_size auto   a whole search over the conf's nodes: it may leave some
    partition auto, a profile is there  cuts (schedule, recompute where auto) of the conf's layout,
                                        and with morph the best layouts of other nodes than all
    else                                nothing: the runtime balances stages by counted work

Cheap where nothing is to be planned: numpy is not loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.records.plan import Prediction
from vjob.jobs.conf.layout import is_open
from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.planning.layout_choice import Chosen

if TYPE_CHECKING:
    from varuna_core.planner.profile.profile import Profile
    from varuna_core.planner.result.plan import LayoutPlan

log = logging.getLogger(__name__)

LIMIT_S = 20.0
"""Of a search at submit."""
KEYS = (
    "parallel.pipeline",
    "parallel.data",
    "parallel.tensor",
    "parallel.zero",
    "train.micro_batch_size",
)
"""They count whether the conf writes them or not: a submit keeps defaults."""


def choose(path: Path, overrides: Sequence[str], chosen: Chosen | None) -> tuple[Chosen, list[str]]:
    """What was chosen before or is now, and all keys that are set besides the conf's: a person's
    count over a file's, what is planned for them comes last."""
    from vjob.jobs.planning.conf_file import read_open_conf

    words = list(overrides)
    if chosen is not None:
        if chosen.is_last:
            return chosen, [*words, *chosen.overrides]
        words = [*chosen.overrides, *words]
        if not is_open(read_open_conf(path, words)[0]):
            return chosen, words
    planned = settle(path, words)
    return planned, [*words, *planned.overrides]


def leave(conf: JobConf) -> Chosen:
    """Nothing is planned: an open layout is closed so that every rank has a place."""
    settings = {}
    if is_open(conf):
        settings = {
            "parallel.pipeline": "1",
            "parallel.data": "auto",
            "parallel.partition": "auto",
            "train.micro_batch_size": "1",
            "train.global_batch_size": "null",
        }
    return Chosen(settings=settings, prediction=None, why="as the conf has it", is_last=True)


def settle(path: Path, overrides: Sequence[str]) -> Chosen:
    """InputError where the layout is open and nothing fits."""
    from vjob.jobs.planning.conf_file import find_profile, read_open_conf

    conf, _ = read_open_conf(path, overrides)
    if is_open(conf):
        return _search(path, conf)
    reason = _find_reason(conf)
    if reason:
        return Chosen(settings={}, prediction=None, why=reason)
    file = find_profile(conf, path.resolve().parent)
    if file is None:
        return Chosen(settings={}, prediction=None, why=BY_RUNTIME + ": there is no profile")
    try:
        return _cut(conf, file)
    except VjobError as error:
        log.warning("%s is not used: %s", file, error)
        return Chosen(settings={}, prediction=None, why=f"{BY_RUNTIME}: {error}")


BY_RUNTIME = "the runtime balances stages by counted work"


def _find_reason(conf: JobConf) -> str:
    """Why cuts are not planned; empty if they may be."""
    parallel = conf.parallel
    if parallel.partition != "auto":
        return "the conf gives the partition"
    if conf.program.kind not in BUILT_IN:
        return "the program cuts its model itself"
    if conf.train.global_batch_size is None:
        return f"{BY_RUNTIME}: train.global_batch_size is not set"
    if parallel.order == "pipeline" and parallel.data != 1:
        return f"{BY_RUNTIME}: parallel.order pipeline is not modelled"
    if parallel.zero > 1 or parallel.schedule in ("interleaved", "zbv"):
        return f"{BY_RUNTIME}: its schedule or zero is not modelled"
    return ""


def _search(path: Path, conf: JobConf) -> Chosen:
    from vjob.jobs.planning.errors import explain_errors

    with explain_errors():
        from varuna_core.planner.model.tables import Tables
        from varuna_core.planner.result.plan import build_plan
        from varuna_core.planner.result.refusal import search_or_explain
        from vjob.jobs.planning.ask import Asked, ask_about
        from vjob.jobs.planning.plan_file import build_settings

        if conf.program.kind == "script":
            raise InputError(
                "parallel.pipeline or train.micro_batch_size is auto, and vjob does not know the "
                "script's model: set numbers; `vjob plan` helps to choose them"
            )
        question = ask_about(conf, KEYS, path.resolve().parent, Asked(prices={}))
        searched = search_or_explain(
            question.profile,
            question.training,
            question.cluster,
            question.wishes,
            limit_s=LIMIT_S,
        )
        tables = Tables(question.profile, question.training)
        plan = build_plan(tables, question.cluster, searched.best, question.wishes.least)
        proof = f"gap {100 * searched.gap:.1f} %" if searched.gap else "proved fastest of its space"
        return Chosen(
            settings=build_settings(conf, plan),
            prediction=_predict(conf, plan, question.profile),
            why=f"planned at submit by {question.basis}; {proof}",
        )


def _predict(conf: JobConf, plan: LayoutPlan, profile: Profile) -> Prediction:
    """With the kind of GPU it is of, where the conf names none and a node may have another."""
    prediction = plan.build_prediction()
    if any(group.num_gpus and group.gpu_type is None for group in conf.cluster.nodes):
        (gpu,) = profile.gpus
        return replace(prediction, gpu=gpu)
    return prediction


def _cut(conf: JobConf, file: Path) -> Chosen:
    from vjob.jobs.planning.errors import explain_errors

    with explain_errors():
        from vjob.jobs.planning.ask import Asked, ask_about
        from vjob.jobs.planning.fixed_layout import plan_given, plan_others

        question = ask_about(conf, KEYS, file.parent, Asked(prices={}, profile=file))
        plan = plan_given(question, conf)
        option = plan.candidate.option
        may_change = conf.morph.enabled and conf.parallel.order != "pipeline"
        others = plan_others(question, conf, plan) if may_change else None
    settings = {
        "parallel.partition": plan.partition,
        "parallel.schedule": option.schedule,
        "parallel.recompute": option.recompute,
    }
    return Chosen(
        settings=settings,
        prediction=_predict(conf, plan, question.profile),
        why=f"stages cut at submit by {question.basis}",
        layouts=None if others is None else others.layouts,
        layout_steps=None if others is None else others.steps,
    )
