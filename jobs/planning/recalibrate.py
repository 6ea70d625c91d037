"""`vjob plan --recalibrate JOB`: fit a profile to the times in a run's trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.facts.partition import Partition
from varuna_core.planner.profile.profile import Profile, Where
from varuna_core.planner.profile.profile_file import read_profile, write_profile
from varuna_core.planner.result.recalibrate import (
    MeasuredAction,
    Message,
    Recalibrated,
    recalibrate,
)
from varuna_core.records.files import read_text
from varuna_core.records.layout import decode_stage_map
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.record import read_record
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import Training, name_profile_file, name_shapes, read_training
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.errors import InputError
from vjob.jobs.planning.inputs import PROFILE_FOLDER, find_profile
from vjob.jobs.planning.question import CPU, estimate, match_kind
from vjob.jobs.reporting.report import check_libraries
from vjob.jobs.runs.find import find_run

if TYPE_CHECKING:
    from vjob.reports.analysis.action_times import ActionTime, MessageTime


def recalibrate_by_run(
    job: str, here: Path, profile_file: Path | None, output: Path | None
) -> tuple[Path, Recalibrated]:
    """Write the fitted profile beside the old one; InputError where the run has too few figures."""
    check_libraries()
    run = find_run(job, here)
    training, plan, base = _read_run(run)
    profile = _find_profile(run, training, plan, base, profile_file)
    actions, messages = _read_times(run, training.tensor)
    found = recalibrate(
        profile,
        list_works(actions, plan, training, profile),
        list_messages(messages, plan, training, profile),
        micro_batch=training.micro_batch_size,
        tensor=training.tensor,
        label=run.name,
    )
    name = name_profile_file(training.model).replace(".profile.json", ".recalibrated.json")
    target = output or base / PROFILE_FOLDER / name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_profile(target, found.profile)
    return target, found


def _read_run(run: RunFolder) -> tuple[Training, Plan, Path]:
    """The run's training, its plan, and the folder of its conf."""
    if not run.training.exists():
        raise InputError(
            f"{run.name} ran a program of your own: vjob does not know which segments its stages "
            "held; profile it with varuna_core.Profiler (docs/profiling.md)"
        )
    try:
        training = read_training(run.training)
    except ValueError as error:
        raise InputError(str(error)) from None
    plan, record = read_plan(run.plan), read_record(run)
    if plan is None:
        raise InputError(f"{run.plan} cannot be read by this version of vjob")
    if training.partition is None:
        raise InputError(
            f"{run.name} balanced its stages by itself, and its trace does not say how: run it "
            "with a parallel.partition, or with a profile next to the conf"
        )
    if training.zero > 1:
        raise InputError(
            f"{run.name} had zero {training.zero}: times of its actions hold sums and weights of "
            "other replicas; take a run with zero 0 or 1"
        )
    if len(decode_stage_map(plan.stage_map)) != Partition.parse(training.partition).num_stages:
        raise InputError(f"{run.name} had several stages a rank, which is not modelled")
    return training, plan, run.path if record is None else Path(record.conf).parent


def _find_profile(
    run: RunFolder, training: Training, plan: Plan, base: Path, given: Path | None
) -> Profile:
    """The profile that is given, else the conf's own, else an estimate."""
    conf = parse_conf(read_text(run.resolved), str(run.resolved), base)
    file = given or find_profile(conf, base)
    shapes = name_shapes(training)
    if file is not None:
        profile = read_profile(file)
        profile.check_is_of(replace(profile.model, digest=shapes), {})
        return profile
    profile, _ = estimate(conf, None)
    return replace(profile, model=replace(profile.model, digest=shapes))


def _read_times(run: RunFolder, tensor: int) -> tuple[list[ActionTime], list[MessageTime]]:
    from vjob.reports.analysis.action_times import read_times
    from vjob.reports.load.sources import SourceError

    try:
        actions, messages = read_times(run.path, tensor)
    except SourceError as error:
        raise InputError(str(error)) from None
    if not actions:
        raise InputError(f"{run.name} has no trace: it needs profile.timeline, and steps that ran")
    return actions, messages


def name_kind(plan: Plan, rank: int, profile: Profile) -> str:
    group = plan.node_of_rank(rank).group
    return match_kind(group.gpu_type or "", profile) if group.gpus else CPU


def list_works(
    actions: Sequence[ActionTime], plan: Plan, training: Training, profile: Profile
) -> list[MeasuredAction]:
    bounds = find_bounds(training, profile)
    # A recompute between the products that were kept says nothing of a whole one.
    left_out = "R" if training.recompute == "selective" else ""
    return [
        MeasuredAction(
            gpu=name_kind(plan, one.rank, profile),
            begin=bounds[one.stage],
            end=bounds[one.stage + 1],
            action=one.kind,
            seconds=one.seconds,
        )
        for one in actions
        if bounds[one.stage] < bounds[one.stage + 1] and one.kind != left_out
    ]


def list_messages(
    told: Sequence[MessageTime], plan: Plan, training: Training, profile: Profile
) -> list[Message]:
    """Messages with their bytes; between nodes the ranks of a tensor group send at once, and count
    together. Replicas that once waited for each other send at different times from then on."""
    bounds = find_bounds(training, profile)
    found = []
    for one in told:
        here, there = (plan.node_of_rank(rank).index for rank in (one.sender, one.receiver))
        where: Where = "intra" if here == there else "inter"
        kind = name_kind(plan, one.sender, profile)
        cell = profile.find_cell(kind, training.micro_batch_size, training.tensor)
        edge = bounds[one.stage + 1] if one.is_forward else bounds[one.stage]
        found.append(
            Message(
                sender=kind,
                receiver=name_kind(plan, one.receiver, profile),
                where=where,
                num_bytes=cell.output_bytes[edge - 1] * (1 if here == there else training.tensor),
                seconds=one.seconds,
            )
        )
    return found


def find_bounds(training: Training, profile: Profile) -> list[int]:
    """First segment of each stage, and the end of the last."""
    assert training.partition is not None, "a run without one is refused"
    partition = Partition.parse(training.partition)
    counts = partition.with_ends(profile.model.num_segments).counts
    return [0, *itertools.accumulate(counts)]


def render_factors(found: Recalibrated) -> str:
    """Format a line for each factor."""
    lines = [f"{factor.value:8.3f}  {factor.what}" for factor in found.factors]
    return "\n".join(["   times", *lines])
