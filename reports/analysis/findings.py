"""Write the figures as findings: a number, its evidence, and the conf key that changes it.

A bad end of the run comes first, then problems, then everything else; within each group the
findings are sorted by the share of time that they concern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.facts.hang import HangAction
from varuna_core.facts.hardware import is_grave
from varuna_core.facts.known import Evidence, NotKnown, Value, Within, value_of
from varuna_core.facts.not_covered import describe_lack
from varuna_core.facts.remedy import SPELLINGS, Action, Context, Remedy, Target, render
from varuna_core.facts.sentences import describe_fault, describe_hang
from varuna_core.plugins import list_plugins, load_plugin
from varuna_core.plugins.installed import warn_once
from varuna_core.records.exits import count_ends
from varuna_core.records.formatting import format_duration, format_pace
from varuna_core.records.formatting import format_seconds as in_units
from varuna_core.records.formatting import format_share as percent
from varuna_core.records.record import read_pause_s
from vjob.reports.analysis.balance import LEAST_PACED
from vjob.reports.analysis.headline import (
    LAYER_LAUNCH_S,
    find_state,
    format_bounded,
    goes_on,
    has_ended_badly,
    has_ended_well,
    is_waiting,
)
from vjob.reports.analysis.measures import Analysis, Curves, find_conflict
from vjob.reports.analysis.readings import TRACE
from vjob.reports.analysis.slowdown import list_changes
from vjob.reports.analysis.step_times import AttemptSpan
from vjob.reports.analysis.trend import measure_trend
from vjob.reports.load.tables import Job


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statement of the report, with the number and the evidence behind it."""

    rule: str = ""
    """Stable name of the observation; it stays the same if the words change."""
    weight: float
    """The share of time that the finding concerns; 1 or more for what must be read first."""
    sentence: str
    evidence: str
    """The source of the number."""
    key: str
    """The conf key to change; empty where no key helps."""
    cause: str = ""
    """A member of CAUSES if the finding is about a problem; such findings are listed first."""
    lost_s: float = 0.0
    """Rank-seconds that the problem costs: the most that a change can save."""
    cost: str = ""
    """`lost_s` as hours, and as money if there are prices."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The numbers and names in the sentence, as plain JSON values."""


GROUP = "vjob.findings"
OWN_PROGRAMS = ("script", "module", "command", "function", "deepspeed")
OWN_TRACE = "a script writes a trace with varuna_core.trace (the documentation's page on scripts)"
DOUBTFUL_NS = 1_000_000
"""Errors of the clocks below this are too small to mention."""


def name_saves_key(job: Job) -> str:
    """Return the conf key for the interval of saves; empty if the program itself decides it."""
    return "" if job.plan.program in OWN_PROGRAMS else "train.checkpoint.every"


def list_gaps(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield findings on missing traces and details, doubtful clocks, and truncated files."""
    is_own = job.plan.program in OWN_PROGRAMS  # the conf's keys for traces do not reach it
    yield from _list_gaps_of_logs(job)
    if job.traces.is_log:
        has_calls = len(job.events) > 0
        yield Finding(
            rule="timers only",
            weight=0.0,
            sentence="No rank wrote a trace: events are the calls of Megatron's timers, which "
            "wait for the GPU at every call and so slow each step."
            if has_calls
            else "No rank wrote a trace: Megatron's timers say how long ranks worked, not when.",
            evidence="timers' begins and ends in the log" if has_calls else "times across ranks",
            key="profile.timeline",
        )
    elif not job.traces.ranks:
        yield Finding(
            rule="no trace",
            weight=0.0,
            sentence="No rank wrote a trace: bubbles, stages and stragglers are not known.",
            evidence=f"no trace/node-<index>.jsonl{f'; {OWN_TRACE}' if is_own else ''}",
            key="" if is_own else "profile.timeline",
        )
    elif not analysis.steps:
        yield Finding(
            rule="no details",
            weight=0.0,
            sentence="The traces hold no details of any step.",
            evidence="step totals only" + ("; details need trace.start(every=1)" if is_own else ""),
            key="" if is_own else "train.log_every",
        )
    for step in analysis.steps[:1]:
        has_conflict = find_conflict(job, step.attempt, step.step) is not None
        if step.trouble and _is_pipeline(job) and not has_conflict:
            yield Finding(
                rule="step apart",
                values={"step": step.step},
                weight=0.0,
                sentence=f"Step {step.step} cannot be analysed: {step.trouble}.",
                evidence="its events",
                key="",
            )
    if analysis.missing_ranks:
        missing = ", ".join(map(str, analysis.missing_ranks[:8]))
        more = len(analysis.missing_ranks) - 8
        yield Finding(
            rule="missing traces",
            values={"ranks": list(analysis.missing_ranks)},
            weight=1.0,
            sentence=f"Rank{'s' if len(analysis.missing_ranks) > 1 else ''} {missing}"
            + (f" and {more} more" if more > 0 else "")
            + " wrote no trace.",
            evidence="plan.json has more ranks than trace/",
            key="",
        )
    shifted = [trace for trace in job.traces.ranks if trace.shifted_ns]
    if shifted:
        worst = max(shifted, key=lambda trace: abs(trace.shifted_ns))
        others = sorted({trace.host for trace in shifted} - {worst.host, ""})
        way = "the steps' ends"
        evidence = f"{len(shifted)} traces without measured offsets"
        if job.traces.is_log:
            way = f"the bounds from messages, to within {in_units((worst.residual_ns or 0) / 1e9)}"
            evidence = "calls that begin before their input was sent"
        yield Finding(
            rule="clock wrong",
            values={"host": worst.host, "shifted_s": worst.shifted_ns / 1e9, "others": others},
            weight=CLOCKS_WRONG,
            sentence=f"The clock of {worst.host or f'rank {worst.rank}'} is "
            f"{'behind' if worst.shifted_ns > 0 else 'ahead'} by "
            f"{in_units(abs(worst.shifted_ns) / 1e9)}; times were corrected by {way}."
            + (f" The clocks of {_name_some(others)} are wrong too." if others else ""),
            evidence=evidence,
            key="",
        )
    hosts = {trace.host for trace in job.traces.ranks if trace.has_header}
    residuals = [trace.residual_ns for trace in job.traces.ranks if trace.has_header and trace.rank]
    known = [residual for residual in residuals if residual is not None]
    if len(hosts) > 1 and len(known) < len(residuals):  # rank 0's is what the others' are held to
        yield Finding(
            rule="clocks not compared",
            weight=0.3,
            sentence="The nodes' clocks were not compared: times across nodes are only as "
            "accurate as these clocks.",
            evidence="traces without offsets",
            key="",
        )
    elif known and max(known) > DOUBTFUL_NS and not (shifted and job.traces.is_log):
        yield Finding(
            rule="clocks",
            values={"within_s": max(known) / 1e9},
            weight=0.1,
            sentence=f"Clocks of nodes agree to within {in_units(max(known) / 1e9)}.",
            evidence="bounds from the times of messages"
            if job.traces.is_log
            else "the worst of the offsets in the traces",
            key="",
        )
    if job.skipped:
        yield Finding(
            rule="files skipped",
            values={"files": dict(job.skipped)},
            weight=0.0,
            sentence=f"{len(job.skipped)} file{'s were' if len(job.skipped) > 1 else ' was'} "
            "not read completely.",
            evidence="; ".join(f"{name}: {why}" for name, why in list(job.skipped.items())[:5]),
            key="",
        )


def _list_gaps_of_logs(job: Job) -> Iterator[Finding]:
    """Yield findings on missing logs, another job's logs, cut lists of calls, and wrong clocks."""
    missing = job.missing
    if missing is not None:
        many = len(missing.indices)
        which = _name_some(missing.names) if missing.names else "NODE_RANK "
        which += "" if missing.names else _name_some(missing.indices)
        ranks = f", ranks {_name_runs(missing.ranks)}" if missing.ranks else ""
        yield Finding(
            rule="missing logs",
            values={"nodes": list(missing.names or missing.indices), "ranks": list(missing.ranks)},
            weight=LOGS_MISSING,
            sentence=f"{many} of {missing.num_nodes} nodes left no log here: {which}{ranks}.",
            evidence=f"NNODES: {missing.num_nodes}, and the NODE_RANK of each log",
            key="",
        )
    for other in job.others:
        yield Finding(
            rule="other job",
            values={"master": other.master, "nodes": list(other.nodes)},
            weight=LOGS_MISSING,
            sentence="The folder has logs of another job too, which are ignored: "
            f"{_name_some(other.nodes)}, with the master {other.master}.",
            evidence="MASTER_ADDR and NODE_RANK of each log",
            key="",
        )
    for cut in job.traces.left_out:
        whole = f"{cut.num_whole} of {cut.num_ranks} ranks have all calls"
        yield Finding(
            rule="cut steps",
            values={"file": cut.file, "first": cut.first, "last": cut.last},
            weight=STEPS_CUT,
            sentence=f"{_name_steps(cut.first, cut.last)} left out: {cut.file} does not have all "
            f"of {'its' if cut.first == cut.last else 'their'} calls.",
            evidence=f"the lists of starts and ends: {whole}",
            key="",
        )
    for conflict in job.traces.conflicts[:1]:
        more = len(job.traces.conflicts) - 1
        yield Finding(
            rule="clocks contradict",
            values={"first": conflict.first, "last": conflict.last, "seconds": conflict.seconds},
            weight=CLOCKS_WRONG,
            sentence=f"{_name_steps(conflict.first, conflict.last)} not compared across ranks: "
            f"calls begin {in_units(conflict.seconds)} before their input was sent, "
            "which no difference between the nodes' clocks explains.",
            evidence="times of messages and sums" + (f"; {more} more stretches" if more else ""),
            key="",
        )


def _name_steps(first: int, last: int) -> str:
    return f"Step {last} is" if first == last else f"Steps {first} to {last} are"


def _name_some(names: Sequence[object]) -> str:
    """Join names for a sentence, such as `n1, n2 and 3 more`."""
    shown = ", ".join(map(str, names[:MOST_NAMED]))
    return shown + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def _name_runs(numbers: Sequence[int]) -> str:
    """Format numbers with consecutive ones joined, such as `8 to 11, 20`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return _name_some([" to ".join(map(str, run)) for run in runs])


MOST_NAMED = 8
MOST_PACE = 0.9
"""Weight of a finding on the stage that sets the pace, below the findings on its causes."""
CLOCKS_WRONG, STEPS_CUT, LOGS_MISSING = 0.95, 0.96, 0.97
"""Weights of doubts about the data: read before every finding that is not a cause."""
MUST = 9.0
"""Weight of findings that are read before all others."""
MUCH_BUBBLE = 0.05
"""A bubble this much above its ideal gets a finding; so do other losses of this share."""
TIGHT = 0.92
"""If more than this fraction of the memory is in use, the next batch may not fit."""
BUSY = 0.9
"""If processors are in use for more than this fraction of the time, ranks wait for them."""
MOST_STRAGGLERS = 5
MUCH_IMBALANCE = 0.1
"""A partition that saves this fraction of the slowest stage's time is worth a change."""


def find_all(job: Job, analysis: Analysis) -> list[Finding]:
    """Return all findings on a run, sorted for the report; none before its first attempt."""
    if is_waiting(job):
        return []
    found = [finding for make in MAKERS for finding in make(job, analysis)]
    found += _ask_plugins(job, analysis)
    found += find_causes(job, analysis, found)
    found = [_price(finding, analysis) for finding in found]
    if job.sources.run is None and (job.traces.is_log or not job.traces.ranks):
        # There is no conf whose keys could be changed.
        found = [replace(finding, key="") for finding in found]
    return sorted(found, key=lambda item: (not item.cause and item.weight < 1, -item.weight))


def _ask_plugins(job: Job, analysis: Analysis) -> list[Finding]:
    """Return the findings of plug-ins. A plug-in that fails is skipped with a warning."""
    found: list[Finding] = []
    for name in list_plugins(GROUP):
        make = load_plugin(GROUP, name)
        try:
            made = [] if make is None else list(make(job, analysis))
            found += [finding for finding in made if isinstance(finding, Finding)]
        except Exception as error:  # whatever another's code raises
            warn_once(f"plug-in {name} of {GROUP} is ignored: {type(error).__name__}: {error}")
    return found


def _price(finding: Finding, analysis: Analysis) -> Finding:
    """Return the finding with its `cost` filled in."""
    head = analysis.headline
    hours, cost = value_of(head.rank_hours), value_of(head.cost)
    if finding.lost_s <= 0 or not hours:
        return finding
    share = min(1.0, finding.lost_s / 3600 / hours)
    unit = "GPU-hours" if head.has_gpus else "rank-hours"
    text = f"{finding.lost_s / 3600:.2g} of {hours:.3g} {unit} ({percent(share)})"
    if cost is not None:
        text += f", {cost * share:.2f} of {cost:.2f} at the conf's prices"
    weight = finding.weight if finding.weight >= MUST else share
    return replace(finding, weight=weight, cost=text)


def _on_hardware(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield findings on faults in the samples, and on GPUs that could not be sampled."""
    found = [(one, fault) for one in job.hardware for fault in one.faults.values()]
    found.sort(key=lambda item: (not is_grave(item[1]), float(item[1].values["since"])))
    for one, fault in found[:MOST_NAMED]:
        since = float(fault.values["since"])
        longer = _compute_growth(job, analysis, since)
        effect = "; its cost is not known"
        if longer > 1 + MUCH:
            effect = f"; steps took {longer:.2f} times as long from then on"
        elif longer > 0:
            effect = "; steps took no longer from then on"
        yield Finding(
            rule="hardware",
            values={"node": one.node, "fault": fault.rule, **fault.values},
            weight=MUST if is_grave(fault) else 0.5,
            sentence=f"{describe_fault(fault, one.node)}, first seen at "
            f"{_format_time(since)} UTC{effect}.",
            evidence=_quote(fault.evidence[0]),
            key=_spell_exclude(job, one.node) if is_grave(fault) else "",
            # A little more than the finding on the slow node, which it explains and precedes.
            lost_s=1.03 * max(0.0, 1 - 1 / longer) * analysis.accounting.stepping_s
            if longer > 1
            else 0.0,
        )
    more = len(found) - MOST_NAMED
    if more > 0:
        yield Finding(
            rule="more faults", weight=0.0, sentence=f"{more} more hardware faults.",
            evidence="as above", key="",
        )  # fmt: skip
    unread = [one for one in job.hardware if one.unread]
    nodes = sorted({one.node for one in unread})
    total = sum((Counter(one.unread) for one in unread), Counter[str]())
    if nodes:
        (reason, _), count = total.most_common(1)[0], sum(total.values())
        yield Finding(
            rule="GPUs not read",
            values={"nodes": nodes, "reason": reason, "samples": count},
            weight=0.0,
            sentence=f"The GPUs of {_name_some(nodes)} were not read in {count} "
            f"{'sample' if count == 1 else 'samples'}, so nothing is known of them there: "
            f"{reason}.",
            evidence="the samples of these nodes" if len(nodes) > 1 else "the samples of that node",
            key="",
        )


def _on_processors(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding if more ranks compute on a node's processors than there are processors, all
    of them busy."""
    for node, (own, busy) in _find_busy(job, analysis).items():
        here = job.exits[job.exits["node"] == node]
        ranks = int(here.groupby("attempt")["rank"].nunique().max()) if len(here) else 0
        cpus = own["num_cpus"].astype(float).max()
        if not ranks > cpus:
            continue
        yield Finding(
            rule="more ranks than processors",
            values={"node": str(node), "ranks": ranks, "processors": int(cpus)},
            weight=1.0,
            sentence=f"{node} ran {ranks} ranks on {int(cpus)} processors, which were "
            f"{busy:.0f} % busy: the ranks share them, so steps and stages take longer than their "
            "own work.",
            evidence=f"{len(own)} samples of that node",
            key="fewer ranks on a node",
        )


def _find_busy(job: Job, analysis: Analysis) -> dict[str, tuple[pd.DataFrame, float]]:
    """Return, for each node whose ranks compute on processors that are all busy, its samples and
    the mean load of the processors in per cent. Whether a rank waits there for another rank or for
    a processor is not known."""
    samples = job.gpus[job.gpus["gpu"] == "cpu"] if len(job.gpus) else job.gpus
    if samples.empty or analysis.headline.has_gpus:
        return {}
    shares = {
        str(node): (own, float(own["cpu_percent"].astype(float).mean()))
        for node, own in samples.groupby("node")
    }
    return {node: found for node, found in shares.items() if found[1] >= 100 * BUSY}


def _quote(evidence: Evidence) -> str:
    return f"{evidence.source}: {evidence.text}" if evidence.text else evidence.source


def _on_pipeline(job: Job, analysis: Analysis) -> Iterator[Finding]:
    step = analysis.find_step("median")
    if step is None or not step.bubbles or step.pipelines[0].schedule.num_stages < 2:
        return
    count = len(step.bubbles)
    measured = sum(bubble.measured for bubble in step.bubbles) / count
    ideal = sum(bubble.ideal for bubble in step.bubbles) / count
    even = sum(bubble.ideal_even for bubble in step.bubbles) / count
    where = f"step {step.step}, of the steps with details the nearest to the median step"
    shares, all_steps = analysis.bubbles["bubble_share"].dropna(), ""
    if len(shares) > 1:
        all_steps = f" ({percent(float(shares.median()))} in the median of {len(shares)} steps)"
    pipeline = step.pipelines[0]
    many = pipeline.schedule.num_microbatches
    floor = min(ideal, measured)
    equal = f"and {percent(even)} if the stages also took equal times"
    if even >= floor:
        equal = "and no less if the stages also took equal times"
    key = "train.global_batch_size or parallel.schedule" if even > MUCH_BUBBLE else ""
    if ideal - even > max(even, MUCH_BUBBLE):  # most of it is the difference between the stages
        is_known = analysis.paces is not None and analysis.paces.is_known
        key = _advise_partition(job, analysis) if is_known else ""
    yield Finding(
        rule="idle",
        values={"step": step.step, "share": measured, "ideal": ideal, "even": even},
        weight=measured,
        sentence=(
            f"Ranks are idle for {percent(measured)} of a step's pipeline{all_steps}. With the "
            f"same schedule it would be {percent(floor)} if messages took no time, {equal}."
        ),
        evidence=f"{where}: {many} micro-batches, {pipeline.schedule.num_stages} stages",
        key="" if _find_busy(job, analysis) and measured - ideal > ideal else key,
    )


def _on_pace(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding on the stage that sets the pace, or on why it is not known."""
    step, found = analysis.find_step("median"), analysis.paces
    if step is None or not step.bubbles or found is None or len(found.work_s) < 2:
        return
    mean, (low_s, work_s, high_s) = sum(found.work_s) / len(found.work_s), found.rank_s
    length = sum(piece.seconds for piece in step.path)
    if not length or not mean:
        return
    who = f"its rank {found.rank}" if work_s > 1.02 * found.work_s[found.stage] else "it"
    steps = f"{found.num_longest} of {found.num_steps} steps"
    works = (
        f"{in_units(work_s)} per step, the median of {found.num_steps} (half of them "
        f"{in_units(low_s)} to {in_units(high_s)})"
    )
    above, key = work_s / mean - 1, ""
    share = sum(p.seconds for p in step.path if (p.what, p.stage) == ("work", found.stage)) / length
    if found.is_known:
        said = (
            f"Stage {found.stage} sets the pace: {who} works {works}, {percent(above)} more than "
            f"the mean stage, and the stage is {percent(share)} of the critical path of step "
            f"{step.step}."
        )
        is_slow = any(
            (x.attempt, x.rank) == (step.attempt, found.rank) for x in analysis.stragglers
        )
        if found.work_s[found.stage] / mean - 1 > MUCH_BUBBLE and not is_slow:
            key = _advise_partition(job, analysis)
    elif found.num_steps < LEAST_PACED:
        said = f"Too few steps ({found.num_steps}) to know which stage sets the pace."
    else:
        said = (
            "Which stage sets the pace is not known, for the steps disagree: stage "
            f"{found.stage} works longest in only {steps}, {works}."
        )
    yield Finding(
        rule="pace",
        values={
            "step": step.step,
            "stage": found.stage,
            "rank": found.rank,
            "above": above,
            "share": share,
            "steps": found.num_steps,
            "longest": found.num_longest,
        },
        weight=min(above, MOST_PACE) if above > 0.02 and found.is_known else 0.0,
        sentence=said,
        evidence=f"sums of the traces: the stage works longest in {steps}",
        key=key,
    )


def _advise_partition(job: Job, analysis: Analysis) -> str:
    """Return the conf key, and how to set it, for a more even partition; empty if the partition was
    planned for these stages, or the conf asks for others."""
    promised = job.plan.prediction
    is_planned = promised is not None and promised.covers(len(analysis.partition))
    if is_planned or not _is_asked(job, analysis):
        return ""
    if analysis.suggestion is not None:
        return "parallel.partition"
    return "parallel.partition, by `vjob plan CONF --set parallel.partition=auto --profile FILE`"


def _is_asked(job: Job, analysis: Analysis) -> bool:
    """Return True if the run had the stages that its conf asks for, False after a loss."""
    asked, found = job.plan.pipeline, len(analysis.partition)
    return asked is None or not found or asked == found


def _on_balance(job: Job, analysis: Analysis) -> Iterator[Finding]:
    found = analysis.suggestion
    if found is None or found.gain < 0.02:
        return
    now = "-".join(map(str, analysis.partition))
    yield Finding(
        rule="partition",
        values={"partition": str(found), "gain": found.gain},
        weight=found.gain,
        sentence=(
            f"With the partition {found} in place of {now} the slowest stage would take "
            f"{in_units(found.slowest_then_s)} instead of {in_units(found.slowest_now_s)} a step, "
            f"{percent(found.gain)} less."
        ),
        evidence="all layers are assumed to be alike, and to cost on each stage what they now cost "
        "there; "
        + (
            "the head counts by its operations, the embedding not at all"
            if job.training is not None
            else "no layer is taken from the first or the last stage"
        )
        + (", without the slow ranks" if analysis.stragglers else ""),
        key=f"parallel.partition: {found}" if _is_asked(job, analysis) else "",
        cause="imbalance" if found.gain >= MUCH_IMBALANCE else "",
        lost_s=found.gain * analysis.stepping_s if found.gain >= MUCH_IMBALANCE else 0,
    )


def _has_orders(job: Job) -> bool:
    """Return True if the order of ranks matters: there are several replicas on several nodes."""
    ranks = [trace for trace in job.traces.ranks if trace.has_header]
    return len({one.replica for one in ranks}) > 1 and len({one.host for one in ranks}) > 1


def _is_pipeline(job: Job) -> bool:
    """Return False for a script without a pipeline, on which the layout's keys have no effect."""
    return job.plan.program not in OWN_PROGRAMS or (job.plan.pipeline or 1) > 1


def _on_stragglers(job: Job, analysis: Analysis) -> Iterator[Finding]:
    for found in analysis.stragglers[:MOST_STRAGGLERS]:
        plural = "s" if found.num_peers > 1 else ""
        yield Finding(
            rule="straggler",
            values={
                "rank": found.rank,
                "node": found.host,
                "stage": found.stage,
                "ratio": found.ratio,
            },
            weight=found.ratio - 1,
            sentence=(
                f"Rank {found.rank} on {found.host or 'an unknown node'} takes {found.ratio:.2f} "
                f"times as long as its {found.num_peers} peer{plural} of stage {found.stage}, in "
                f"{percent(found.share_of_steps)} of "
                f"{f'{found.num_steps} steps in a row' if found.num_steps else 'the steps'}."
            ),
            evidence=f"{f'attempt {found.attempt}: ' if found.attempt else ''}work of a step, same "
            f"stage, {'same GPU' if found.device else 'kinds of GPU not known'}",
            key=_spell_exclude(job, found.host),
            cause="slow node",
            lost_s=(1 - 1 / found.ratio) * found.share_of_steps * analysis.stepping_s,
        )
    more = len(analysis.stragglers) - MOST_STRAGGLERS
    if more > 0:
        yield Finding(
            rule="more stragglers",
            weight=0.0,
            sentence=f"{more} more ranks are slow too.",
            evidence="as above",
            key="",
        )


def _on_outliers(job: Job, analysis: Analysis) -> Iterator[Finding]:
    if not analysis.outliers:
        return
    total = float((analysis.times["took_s"] * analysis.times["count"]).sum())
    excess = sum((one.took_s - one.median_s) * one.num_steps for one in analysis.outliers)
    worst = analysis.outliers[0]
    cause = f", most of the difference from {worst.kind} of rank {worst.rank}" if worst.kind else ""
    count = len(analysis.outliers)
    is_single = all(found.num_steps == 1 for found in analysis.outliers)
    left_out = analysis.goodput.source != TRACE and not analysis.curves.evaluations.empty
    what, which = "step" if is_single else "line", f"step {worst.step}, took"
    if worst.num_steps > 1:
        which = f"the mean of the {worst.num_steps:,} steps up to step {worst.step}, is"
    yield Finding(
        rule="outliers",
        values={"steps": [found.step for found in analysis.outliers], "excess_s": excess},
        weight=excess / total if total else 0.0,
        sentence=(
            f"{count} {what}{'s stand' if count > 1 else ' stands'} out; the slowest of them, "
            f"{which} {in_units(worst.took_s)} against {in_units(worst.median_s)}, the median of "
            f"{worst.source}{cause}."
        ),
        evidence=f"{'' if is_single else 'lines of '}steps "
        f"{_name_some([found.step for found in analysis.outliers])}"
        + ("; lines with an evaluation left out" if left_out else ""),
        key={"checkpoint": name_saves_key(job), "data": "data"}.get(worst.kind, ""),
    )


def _on_slowdown(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding on steps that became slower, with what changed at that time."""
    found = analysis.goodput.slowdown
    if found is None:
        return
    changes = list_changes(found, job.gpus, job.traces.steps, job.logs["iterations"])
    first, many = found.stretches[0], len(found.stretches)
    begun = "" if first.begin_at is None else f" ({_format_time(first.begin_at)} UTC)"
    about = "about " if first.doubt else ""
    took = f"{format_pace(found.before_s)} each before, {format_pace(found.slow_s)} then"
    if found.is_gradual:
        said = "Steps grew slower and slower"
        took = f"{format_pace(found.before_s)} each at first, {format_pace(found.slow_s)} at last"
    elif found.lasts and many == 1:
        said = (
            f"Steps became {found.ratio:.1f} times slower from {about}step {first.first:,}{begun} "
        )
        said += "on, and stayed slow"
    else:
        said = f"{many} stretches of steps were" if many > 1 else "A stretch of steps was"
        said += (
            f" {found.ratio:.1f} times slower, the first from {about}step {first.first:,}{begun} "
        )
        said += f"to {first.last:,}"
    num_samples = int(len(job.gpus) and job.gpus["time"].nunique())
    why = "; the cause is not known" if not changes else "; at the same time " + ", ".join(
        one.text for one in changes[:MOST_CHANGES]
    )  # fmt: skip
    looked = f"{num_samples} samples of the nodes" if num_samples else "no samples of the nodes"
    looked += ", traces" if len(job.traces.steps) else ", no traces"
    yield Finding(
        rule="slower",
        values={
            "ratio": found.ratio,
            "before_s": found.before_s,
            "slow_s": found.slow_s,
            "lost_s": found.lost_s,
            "lasts": found.lasts,
            "is_gradual": found.is_gradual,
            "stretches": [asdict(one) for one in found.stretches],
            "changes": [asdict(one) for one in changes],
        },
        weight=found.share,
        sentence=f"{said}: {took}{why}.",
        evidence=f"times of the steps; possible causes that were checked: {looked}",
        key="",
        cause="slowdown",
        lost_s=found.lost_s * max(analysis.accounting.rows["rank"].nunique(), 1),
    )


MOST_CHANGES = 3


def _format_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%H:%M:%S}"


def _on_training(job: Job, analysis: Analysis) -> Iterator[Finding]:
    curves = analysis.curves
    is_own = job.plan.program in OWN_PROGRAMS
    table = curves.table
    loss = pd.to_numeric(table["loss"], errors="coerce") if len(table) else table["loss"]
    if curves.nan:
        said, evidence = f"in {curves.nan} steps", "number of nan iterations in the log"
        if curves.first_nan is not None:
            said = f"in at least {curves.nan} steps, first printed at step {curves.first_nan:,}"
            evidence = "lines with a loss; the losses of steps between two lines are not known"
        yield Finding(
            rule="not a number",
            values={"iterations": int(curves.nan), "first_printed": curves.first_nan},
            weight=2.0,
            sentence=f"The loss was not a number {said}.",
            evidence=evidence,
            key="the script's learning rate or precision"
            if is_own
            else "train.optimizer.lr or train.precision",
        )
    steps = int(table["step"].max()) if len(table) else 0
    if curves.skipped and steps:
        share = min(1.0, curves.skipped / steps)
        yield Finding(
            rule="skipped steps",
            values={"skipped": int(curves.skipped), "steps": steps},
            weight=share,
            sentence=f"{curves.skipped} of {steps} steps were skipped ({percent(share)}): "
            "gradients overflowed.",
            evidence="number of skipped iterations in the log",
            key="train.loss_scale or train.precision" if share > 0.02 and not is_own else "",
        )
    known = [value for value in loss.dropna() if np.isfinite(value)]
    if len(known) > 1:
        yield Finding(
            rule="loss",
            values={**asdict(measure_trend(known)), "best": min(known)},
            weight=0.0,
            sentence=f"The loss{', where it was a number,' if curves.nan else ''} "
            f"{_describe_trend(known)}, at best {min(known):.4g}.",
            evidence=f"{len(known)} lines of the log",
            key="",
        )
    yield from _on_evaluations(curves)


def _describe_trend(values: Sequence[float]) -> str:
    """Return text such as `went from 9.5 to 8.25` if the change exceeds the noise."""
    found = measure_trend(values)
    if found.is_clear:
        of = f" (medians of the first and last {found.width} lines)" if found.width > 1 else ""
        return f"went from {found.first:.4g} to {found.last:.4g}{of}"
    said = f"was {found.first:.4g} at first and {found.last:.4g} at last"
    if found.is_clear is None:
        return said
    of = f" (medians of {found.width} lines)" if found.width > 1 else ""
    return f"shows no clear change: it {said}{of}, which may be noise"


def _on_evaluations(curves: Curves) -> Iterator[Finding]:
    for split, metric, rows in curves.list_evaluated():
        known = rows.dropna(subset=["value"])
        known = rows if known.empty else known
        values = [float(value) for value in known["value"]]
        best = min(values)
        at = known.iloc[values.index(best)]
        said = ", where it was a number, " if len(known) < len(rows) else " "
        said += _describe_trend(values) if len(values) > 1 else f"was {best:.4g}"
        if np.isnan(best):
            said = f" was not a number in {'any line' if len(rows) > 1 else 'its one line'}"
        elif "loss" in metric and len(values) > 1:
            said += f", at best {best:.4g}"
            of = "" if at["is_own"] else "the line of "
            said += f" after {of}{at['unit']} {int(at['step'])}" if pd.notna(at["step"]) else ""
        yield Finding(
            rule="evaluation",
            values={"split": split, "metric": metric, **asdict(measure_trend(values))},
            weight=0.0,
            sentence=f"The {split} {metric}{said}.",
            evidence=f"{len(values)} line{'s' if len(values) > 1 else ''} of the log",
            key="",
        )


def _on_memory(job: Job, analysis: Analysis) -> Iterator[Finding]:
    table = analysis.memory
    if table.empty:
        return
    worst = table.loc[table["used_mb"].idxmax()]
    share = worst["used_mb"] / worst["total_mb"] if worst["total_mb"] else float("nan")
    of = f" of {worst['total_mb']:.0f}" if share == share else ""
    least = float(table["used_mb"].min())
    yield Finding(
        rule="memory",
        values={"who": str(worst["who"]), "used_mb": float(worst["used_mb"])},
        weight=0.5 if share > TIGHT else 0.0,
        sentence=f"{worst['who']} uses the most memory: {worst['used_mb']:.0f}{of} MB; the "
        f"lowest use is {least:.0f} MB.",
        evidence=f"{len(table)} ranks and GPUs: memory from the log and from samples",
        key="parallel.recompute or train.micro_batch_size" if share > TIGHT else "",
    )


def _on_goodput(job: Job, analysis: Analysis) -> Iterator[Finding]:
    goodput = analysis.goodput
    share = goodput.share
    is_paced = isinstance(analysis.headline.step_s, Value)
    if goodput.wall_s is not None and analysis.times.empty and not is_paced:
        yield _explain_no_steps(job, analysis, goodput.wall_s)
    if isinstance(share, NotKnown) or goodput.wall_s is None:
        return
    repeated = sum(attempt.repeated_s for attempt in goodput.attempts)
    restarts = len(goodput.attempts) - 1
    sentence = f"{format_bounded(share)} of {format_duration(goodput.wall_s)} went to useful steps"
    values: dict[str, Any] = {"repeated_s": repeated, "restarts": restarts}
    if isinstance(share, Value):
        sentence += f" ({in_units(goodput.useful_s)})"
        values["share"] = share.value
    else:
        sentence += f": {goodput.reason}" if goodput.reason else ""
        values |= {"low": share.low, "high": share.high}
    plural = "s" if restarts > 1 else ""
    events = [event for event in job.history if event.get("kind") == "morph"]
    pauses = [pause_s for event in events if (pause_s := read_pause_s(event)) is not None]
    if pauses and len(pauses) == restarts:  # as `vjob status` counts them: to the first step
        sentence += (
            f"; {restarts} morph{plural} cost {in_units(repeated)} of steps done again and paused "
            f"the training for {in_units(sum(pauses))}"
        )
    elif restarts:
        about = "about " * (repeated > 0 and _is_doubtful(goodput.attempts))
        sentence += (
            f"; {restarts} restart{plural} cost {about}{in_units(repeated)} of steps "
            f"done again and {in_units(goodput.between_s)} between attempts"
        )
    yield Finding(
        rule="goodput",
        values=values,
        weight=1 - (share.high if isinstance(share, Within) else share.value),
        sentence=sentence + ".",
        evidence=f"{restarts + 1} attempt{'s' if restarts else ''}, first start to last end",
        key=name_saves_key(job) if repeated > MUCH_BUBBLE * goodput.wall_s else "",
    )


def _is_doubtful(attempts: Sequence[AttemptSpan]) -> bool:
    """Return True if the first step of a later attempt is known only from lines that skip steps."""
    return any(one.origin is not None and one.origin.doubt for one in attempts[1:])


def _on_resume(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding on attempts that resumed from a step, and on repeated steps."""
    known = [one for one in analysis.goodput.attempts if one.origin and one.last_step is not None]
    said: list[str] = []
    rows: list[dict[str, Any]] = []
    reached, again = -1, 0
    for one in known:
        origin, last = one.origin, one.last_step
        assert origin is not None and last is not None
        if origin.is_resumed or one is not known[0]:
            who = f"attempt {one.label}" if len(analysis.goodput.attempts) > 1 else "the run"
            about = "about " if origin.doubt else ""
            said.append(f"{who} continued at {about}step {origin.step:,} ({origin.source})")
        twice = max(reached + 1 - origin.step, 0)
        again, reached = again + twice, max(reached, last)
        rows.append({"attempt": one.label, "from": origin.step, "to": last, "again": twice})
    if not said:
        return
    done = reached + 1 - min(row["from"] for row in rows)
    sentence = "; ".join(said)
    sentence += f"; {done:,} different step{'s were' if done != 1 else ' was'} done"
    if again:
        about = "about " * _is_doubtful(known)
        sentence += f", and {about}{again:,} steps were repeated, which is lost work"
    yield Finding(
        rule="resumed",
        values={"attempts": rows, "done": done, "again": again},
        weight=0.0,
        sentence=sentence[0].upper() + sentence[1:] + ".",
        evidence=f"{len(known)} of {len(analysis.goodput.attempts)} attempts",
        key="",
    )


def _explain_no_steps(job: Job, analysis: Analysis, wall_s: float) -> Finding:
    """Return a finding that explains why the steps, or their times, are not known."""
    many = len(analysis.goodput.attempts)
    ran = f"The run took {in_units(wall_s)}" + (f" in {many} attempts" if many > 1 else "")
    ends = job.exits[["code", "stopped"]].itertuples(index=False)
    if words := count_ends((int(code), bool(stopped)) for code, stopped in ends):
        ran += f"; {len(job.exits)} rank{'s' if len(job.exits) > 1 else ''}: {words}"
    table = analysis.curves.table
    is_counted = analysis.headline.is_counted
    if len(table):
        what = f"the last step in its lines is {int(table['step'].max())}, but neither a line "
        what += "nor the time of writing shows how long a step took"
    else:
        what = "no line of its logs was recognized as a step"
        if not is_counted:
            what += ", so nothing is said about steps"
    is_helped = job.plan.program in OWN_PROGRAMS and not len(table) and not is_counted
    if is_helped and has_ended_badly(job):  # it may have ended before its first step
        is_helped, what = False, "no step was seen before the end, neither in a line of its logs "
        what += "nor in a count of optimizer steps"
    return Finding(
        rule="steps not known",
        weight=0.0,
        sentence=f"{ran}; {what}.",
        evidence="exit/node-<index>.json, and the logs of the nodes",
        key="progress, if it prints its steps" if is_helped else "",
    )


def _on_prediction(job: Job, analysis: Analysis) -> Iterator[Finding]:
    promised = job.plan.prediction
    later = analysis.times[analysis.times.duplicated("attempt")]
    median = value_of(analysis.headline.step_s)
    if promised is None or not promised.step_s or later.empty or median is None:
        return
    ratio = median / promised.step_s
    band = ""
    if len(promised.band_s) == 2:
        low_s, high_s = promised.band_s
        where = "within" if low_s <= median <= high_s else "outside"
        band = f", {where} the plan's range of {format_pace(low_s)} to {format_pace(high_s)}"
    lacks = "".join(f"; {describe_lack(one)}" for one in promised.not_covered)
    yield Finding(
        rule="prediction",
        values={"step_s": median, "promised_s": promised.step_s},
        weight=abs(ratio - 1) if abs(ratio - 1) > MUCH_BUBBLE else 0.0,
        sentence=f"A step takes {format_pace(median)}; the plan predicted "
        f"{format_pace(promised.step_s)} ({ratio:.2f} times{band}{lacks}).",
        evidence=f"median of {len(later)} steps against plan.json",
        key="",
    )


SILENCE_S = 60.0
"""Seconds without a step before the end after which a run is reported as stalled."""
MUCH_SILENCE = 3
"""A silence is a stall if it is this many times longer than any other gap between lines."""


def _on_end(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding on a run that failed or had nothing to do."""
    state = analysis.headline.state
    if has_ended_badly(job):
        advice = ""
        if job.sources.run is not None and find_state(job).word != "CANCELLED":
            advice = f"; see `vjob logs {job.sources.name} --errors`"
        yield Finding(
            rule="ended badly",
            values={"state": state},
            weight=4.0,
            sentence=f"The run ended as {state.rstrip('.')}{advice}.",
            evidence="its record" if job.state else "its events",
            key="",
        )
    elif job.nothing_to_do and analysis.times.empty:
        yield Finding(
            rule="nothing to do",
            weight=4.0,
            sentence=f"The run had {job.nothing_to_do}.",
            evidence="its log",
            key="train.steps or train.checkpoint.folder",
        )


def _on_silence(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding on a long time without a step at the end: ranks hung or waited."""
    attempts, times = analysis.accounting.attempts, analysis.times
    if not attempts or not has_ended_badly(job) or not analysis.goodput.tells_silence:
        return
    label, ended = attempts[-1].label, attempts[-1].ended
    own, spans = times[times["attempt"] == label], job.logs["spans"]
    traced = (own["begin_s"] + own["took_s"]).dropna() + job.traces.zero_ns / 1e9
    traced = traced.iloc[:0] if job.traces.is_log else traced
    written = spans[spans["attempt"] == label]["last_s"].dropna()
    seen = [float(column.max()) for column in (traced, written) if len(column)]
    usual_s = float((own["took_s"] * own["count"]).max()) if len(own) else 0.0
    if not seen or ended - max(seen) < max(SILENCE_S, MUCH_SILENCE * usual_s):
        return
    since = datetime.fromtimestamp(max(seen), timezone.utc)
    yield Finding(
        rule="silence",
        values={"since": max(seen), "silent_s": ended - max(seen)},
        weight=3.0,
        sentence=f"No step since {since:%H:%M} UTC, {format_duration(ended - max(seen))} before "
        "the end.",
        evidence="the last step of the traces and the last line about a step",
        key="",
    )


MAKERS = (
    _on_end,
    _on_hardware,
    _on_processors,
    _on_silence,
    _on_pipeline,
    _on_pace,
    _on_balance,
    _on_stragglers,
    _on_outliers,
    _on_slowdown,
    _on_training,
    _on_memory,
    _on_goodput,
    _on_resume,
    _on_prediction,
    list_gaps,
)
"""Functions that yield findings, in any order: findings are sorted by weight."""


# What is wrong, in the manner of jobstats: a rule each, with what it costs.

CAUSES = (
    "hang",
    "slow node",
    "slowdown",
    "imbalance",
    "input",
    "micro-batch",
    "checkpoint",
    "GPU idle",
    "throttle",
    "communication",
    "restarts",
    "start",
    "swap",
    "memory",
    "limit",
)
MUCH = 0.1
"""Waits for data or saves are a problem above this fraction of the steps' time."""
MUCH_COMMUNICATION = 0.2
MUCH_SAVING = 0.05
HELPFUL_SAVING = 0.02
"""The fraction of time that saves cost at a suggested interval."""
LONG_START_S = 60.0
"""A start shorter than this leaves nothing worth saving."""
LAUNCHES = 0.25
"""If fixed costs take more than this fraction of a forward, the micro-batch is too small."""
ROOMY = 0.6
"""Below this fraction of memory in use, there is room for more samples at once."""
BARE = 0.2
"""Below this fraction of memory in use on every GPU, the job fits on fewer or smaller GPUs."""
IDLE_GPU = 0.5
HOT_C = 88.0
HELD_DOWN = ("sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
"""The driver's reasons for a lowered clock, except a power cap, which is usual."""
HELD_PART = 0.1
"""Fraction of a GPU's samples with a lowered clock above which the GPU is reported as throttled."""
SWAPPED_MB = 512
MUCH_LIMIT = 5.0
LONG_LIMIT_S = 3600.0
LONG_QUEUE_S = 60.0
"""Seconds in the queue above which a shorter time limit may be worth suggesting."""
LEAST_STEPS = 3
"""Steps needed both before and after an event to say that steps became longer."""


def find_causes(job: Job, analysis: Analysis, before: Sequence[Finding]) -> list[Finding]:
    """List the findings of all rules. Low use of GPUs is reported only for the time that neither
    these findings nor those of `before` explain."""
    found = [finding for rule in RULES for finding in rule(job, analysis)]
    explained_s = sum(finding.lost_s for finding in (*before, *found) if finding.cause)
    found += _on_gpu_use(job, analysis, explained_s)
    if not any(finding.cause == "micro-batch" for finding in found):  # that fills the memory
        found += _on_unused_memory(job, analysis)
    return found


def _has(job: Job, target: Target) -> bool:
    """Return True if whoever started this run can set the target of a remedy: by a key of the
    conf, an option of sbatch, and so on."""
    return job.plan.context in SPELLINGS[target]


def _spell_exclude(job: Job, host: str) -> str:
    """Return the conf key that excludes a node; empty on one machine."""
    if job.plan.context is Context.CONF:
        return f"cluster.exclude: [{host}]" if host else "cluster.exclude"
    return render(Remedy(Action.EXCLUDE, Target.NODE, value=host), job.plan.context)


def _on_data(job: Job, analysis: Analysis) -> Iterator[Finding]:
    waited = analysis.accounting.seconds.get("data", 0.0)
    stepping = analysis.accounting.stepping_s
    if not stepping or waited / stepping < MUCH:
        return
    samples = _during_steps(job, analysis)
    busy = samples["cpu_percent"].astype(float).mean() if len(samples) else float("nan")
    is_own = job.plan.program in OWN_PROGRAMS
    first = "more workers in the script's DataLoader" if is_own else "data.prefix on a faster disk"
    more = ", or cluster.nodes[].cpus" if _has(job, Target.CPUS) else ""
    yield Finding(
        rule="data",
        values={"share": waited / stepping},
        weight=waited / stepping,
        sentence=f"Ranks wait for data {percent(waited / stepping)} of their steps' time"
        + (f"; the processors are {busy:.0f} % busy." if busy == busy else "."),
        evidence="spans of the kind `data` in the traces" + (", samples" if busy == busy else ""),
        key=first + more,
        cause="input",
        lost_s=waited,
    )


def _on_saves(job: Job, analysis: Analysis) -> Iterator[Finding]:
    saved, stepping = (
        analysis.accounting.seconds.get("checkpoint", 0.0),
        analysis.accounting.stepping_s,
    )
    share = saved / stepping if stepping else 0.0
    if share < MUCH_SAVING:
        return
    every = job.training.checkpoint_every if job.training is not None else 0
    many = f"every {every} steps " if every else ""
    key = name_saves_key(job)
    if key and every:
        key += f": {_round_up(every * share / HELPFUL_SAVING)}"
    yield Finding(
        rule="saves",
        values={"share": share, "every": every},
        weight=share,
        sentence=f"Checkpoints {many}take {percent(share)} of the steps' time.",
        evidence="spans of saves in the traces, or the lines about saves",
        key=key,
        cause="checkpoint",
        lost_s=saved * (1 - HELPFUL_SAVING / share),
    )


def _round_up(number: float) -> int:
    """Round up to one or two significant digits: 237 becomes 240, and 2361 becomes 2400."""
    size = 10 ** max(0, len(str(int(number))) - 2)
    return int(-(-number // size) * size)


def _on_exposed(job: Job, analysis: Analysis) -> Iterator[Finding]:
    spent = analysis.accounting.seconds.get("communication", 0.0)
    stepping = analysis.accounting.stepping_s
    if not stepping or spent / stepping < MUCH_COMMUNICATION:
        return
    has_network = len({trace.host for trace in job.traces.ranks if trace.has_header}) != 1
    pace = "the network sets the pace"
    if not has_network:
        pace = "the ranks share one machine, so the network is not the cause"
    keys = ["cluster.nodes[].interface"] if has_network else []
    busy = _find_busy(job, analysis)
    if busy:
        pace = (
            f"the processors of {_name_some([*busy])} were all busy, and ranks that wait for a "
            "processor keep the others waiting too: how much of the time that takes is not known"
        )
        keys = []
    elif _is_pipeline(job):
        keys += ["more micro-batches a step (train.global_batch_size)"]
        keys += ["parallel.order"] if _has_orders(job) else []
    else:
        keys += ["more samples a step"]
    *others, last = keys or [""]
    of_all = percent(analysis.accounting.shares["communication"])
    yield Finding(
        rule="exposed",
        values={"share": spent / stepping},
        weight=spent / stepping,
        sentence=f"Communication holds up the ranks for {percent(spent / stepping)} of the time "
        f"of all steps, {of_all} of the whole run: {pace}.",
        evidence="waits for messages, and all-reduces not hidden by work, since all ranks joined",
        key=", ".join([*others, f"or {last}" if others else last]),
        cause="" if busy else "communication",
        lost_s=0.0 if busy else spent,
    )


def _on_hang(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield findings on hangs: what hung, since when, what was done, and what it cost."""
    rows = analysis.accounting.rows
    for label, hang in job.hangs.items():
        held = float(rows.loc[rows["attempt"] == label, "hung_s"].sum())
        num_ranks = max(int((rows["attempt"] == label).sum()), 1)
        span = f"hung from about {_format_time(hang.since)} UTC on"
        if held or not goes_on(job):
            span += f", for {format_duration(held / num_ranks)}"
        done = {
            HangAction.RESTART: "vjob ended the ranks and started them again",
            HangAction.STOP: "vjob ended the run",
            HangAction.REPORT: "vjob did nothing about it",
        }[hang.action]
        until = hang.until or 0.0
        has_recovered = hang.action is HangAction.REPORT and until > hang.seen_at
        if has_recovered:
            done = f"the steps continued by {_format_time(until)} UTC, without an action by vjob"
        yield Finding(
            rule="hang",
            values=hang.as_json(),
            weight=MUST,
            sentence=f"Attempt {label} {span}: {describe_hang(hang)}; {done}.",
            evidence="processes, stacks and collectives of its ranks (attempt-N/hang)",
            key="on_hang" if hang.action is HangAction.REPORT and not has_recovered else "",
            cause="hang",
            lost_s=held,
        )
    for label, hang in job.suspected.items():
        if label not in job.hangs:
            may = "may hang" if goes_on(job) else "may have hung"
            yield Finding(
                rule="suspected hang",
                values=hang.as_json(),
                weight=MUST,
                sentence=f"Attempt {label} {may}, from about {_format_time(hang.since)} UTC on: "
                f"{describe_hang(hang)}.",
                evidence="the agents suspected a hang (attempt-N/state/hanging.json)",
                key="",
                cause="hang",
            )


def _on_restarts(job: Job, analysis: Analysis) -> Iterator[Finding]:
    rows, attempts = analysis.accounting.rows, analysis.accounting.attempts
    total = float((rows["span_s"] - rows["queue_s"]).sum())
    if len(attempts) < 3:
        return
    later = rows[rows["attempt"] != attempts[0].label]
    lost = float(rows["lost_s"].sum() + later["start_s"].sum())
    if not total or lost < MUCH * total:
        return
    reasons = Counter(
        str(event.get("reason", ""))[:160]
        for event in job.history
        if event.get("kind") == "ended" and event.get("code")
    )
    reason, count = next(iter(reasons.most_common(1)), ("", 0))
    why = f" {count} ended with: {reason}." if reason else ""
    yield Finding(
        rule="restarts",
        values={"restarts": len(attempts) - 1, "share": lost / total},
        weight=lost / total,
        sentence=f"{len(attempts) - 1} restarts cost {percent(lost / total)} of the time: starts, "
        f"steps done again, and the time until a fault was noticed.{why}",
        evidence=f"{len(attempts)} attempts, their events and steps",
        key=" and ".join(filter(None, ("cluster.restarts", name_saves_key(job))))
        + ", once the error is fixed",
        cause="restarts",
        lost_s=lost,
    )


def _on_start(job: Job, analysis: Analysis) -> Iterator[Finding]:
    rows, attempts = analysis.accounting.rows, analysis.accounting.attempts
    if not attempts or not isinstance(analysis.headline.start, Value):
        return  # the first step that was read may not be the first
    first = rows[rows["attempt"] == attempts[0].label]
    took = float(first["start_s"].mean())
    total = float((rows["span_s"] - rows["queue_s"]).sum())
    if took < LONG_START_S or first["start_s"].sum() < MUCH * total:
        return
    own = job.exits[job.exits["attempt"] == attempts[0].label]["started"]
    begun = pd.to_numeric(own, errors="coerce").dropna()
    parts = ""
    if len(begun):
        before = min(max(float(begun.mean()) - attempts[0].started, 0.0), took)
        parts = f": {in_units(before)} before the ranks ran (checks, container), "
        parts += f"{in_units(took - before)} in the program"
    yield Finding(
        rule="start",
        values={"start_s": took},
        weight=float(first["start_s"].sum()) / total,
        sentence=f"The first step began {in_units(took)} after the start of the job{parts}.",
        evidence="the started event, the ranks' starts, and the first step of each",
        key="container.image on a local disk, fewer imports, or a smaller checkpoint to load",
        cause="start",
        lost_s=float(first["start_s"].sum()),
    )


def _on_small_pieces(job: Job, analysis: Analysis) -> Iterator[Finding]:
    step, training = analysis.find_step("median"), job.training
    if step is None or training is None or not step.pipelines:
        return
    if not analysis.headline.has_gpus:  # what starting a kernel takes is known of GPUs
        return
    events = job.events[(job.events["attempt"] == step.attempt) & (job.events["step"] == step.step)]
    forwards = events[events["kind"].isin(["F", "f"])]
    schedule = step.pipelines[0].schedule
    micros, stages = schedule.num_microbatches, schedule.num_stages
    took = (forwards["end_s"] - forwards["ready_s"]).astype(float).median()
    fixed = LAYER_LAUNCH_S * max(1, training.layers // stages)
    table = analysis.memory.dropna()
    share = float((table["used_mb"] / table["total_mb"]).max()) if len(table) else float("nan")
    if not took > 0 or fixed / took < LAUNCHES or micros < 2 * stages or share > ROOMY:
        return
    overhead = min(0.9, fixed / took)
    room = f", and the fullest GPU holds {percent(share)} of its memory" if share == share else ""
    size = training.micro_batch_size
    yield Finding(
        rule="small pieces",
        values={"micro_batch": size, "forward_s": took, "launch_s": fixed},
        weight=overhead,
        sentence=f"A micro-batch of {size} is small: its forward takes {in_units(took)} per "
        f"stage, of which starting the kernels takes about {in_units(fixed)}{room}.",
        evidence=f"step {step.step}: {micros} micro-batches, {training.layers} layers on "
        f"{stages} stages, 0.2 ms per layer as the planner assumes",
        key=f"train.micro_batch_size: {2 * size}",
        cause="micro-batch",
        lost_s=overhead / 2 * analysis.accounting.seconds.get("compute", 0.0),
    )


def _on_heat(job: Job, analysis: Analysis) -> Iterator[Finding]:
    samples = _during_steps(job, analysis)
    samples = samples[samples["gpu"] != "cpu"] if len(samples) else samples
    if samples.empty:
        return
    held = samples["throttle"].fillna("").str.contains("|".join(HELD_DOWN))
    hot = held | (samples["temperature"].astype(float) > HOT_C)
    parts = hot.groupby([samples["node"], samples["gpu"]]).mean()
    bad = parts[parts > HELD_PART].sort_values(ascending=False)
    if bad.empty:
        return
    (node, gpu), share = bad.index[0], float(bad.iloc[0])
    own = samples[(samples["node"] == node) & (samples["gpu"] == gpu)]
    words = sorted({word for text in own["throttle"] for word in str(text).split(", ") if word})
    hottest = float(own["temperature"].astype(float).max())
    bad_nodes = set(bad.index.get_level_values(0))
    slower = [item.ratio for item in analysis.stragglers if item.host in bad_nodes]
    # All wait for it. By how much its ranks lag, where others tell, else a quarter while held.
    lost = (1 - 1 / max(slower)) if slower else 0.25 * share
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    yield Finding(
        rule="throttle",
        values={"gpu": str(gpu), "node": str(node), "share": share},
        weight=lost,
        sentence=f"GPU {gpu} of {node}{others} ran with its clock held down in {percent(share)} of "
        f"its samples, at up to {hottest:.0f} °C" + (f" ({', '.join(words)})." if words else "."),
        evidence=f"{len(own)} samples during the steps",
        key=f"{_spell_exclude(job, node)}; tell the administrators"
        if _has(job, Target.NODE)
        else "the cooling of this machine, or the power limit of its GPUs",
        cause="throttle",
        lost_s=1.01 * lost * analysis.accounting.stepping_s,  # it is why its node is slow
    )


def _on_swap(job: Job, analysis: Analysis) -> Iterator[Finding]:
    samples = _during_steps(job, analysis)
    swapped = samples["swap_mb"].astype(float) if len(samples) else pd.Series(dtype=float)
    grown = (
        swapped.groupby(samples["node"]).agg(lambda own: own.max() - own.iloc[0])
        if len(swapped.dropna())
        else swapped
    )
    if grown.empty or not grown.max() > SWAPPED_MB:
        return
    node = str(grown.idxmax())
    own = samples[samples["node"] == node]
    begun = own[own["swap_mb"] > own["swap_mb"].iloc[0] + SWAPPED_MB]["time"].min()
    slower = [item.ratio for item in analysis.stragglers if item.host == node]
    longer = _compute_growth(job, analysis, float(begun))
    effect = f"; its ranks take {max(slower):.2f} times as long as others" if slower else ""
    if not slower and longer > 1 + MUCH:
        effect = f"; steps took {longer:.2f} times as long from then on"
    ratio = max([*slower, longer, 1.0])
    yield Finding(
        rule="swap",
        values={"node": str(node), "moved_mb": float(grown.max())},
        weight=0.05,
        sentence=f"{node} moved {grown.max() / 1024:.1f} GiB of memory to swap during the steps"
        f"{effect}.",
        evidence=f"{len(own)} samples of its memory",
        key=("cluster.nodes[].memory_gb, or " if _has(job, Target.MEMORY) else "")
        + "fewer data workers",
        cause="swap",
        lost_s=1.02 * (1 - 1 / ratio) * analysis.accounting.stepping_s,  # why its node is slow
    )


def _compute_growth(job: Job, analysis: Analysis, since: float) -> float:
    """Return the median step after the time `since` over that before; 0 if steps are too few."""
    later = analysis.times[analysis.times.duplicated("attempt")]
    is_after = later["begin_s"].astype(float) + job.traces.zero_ns / 1e9 > since
    if min(is_after.sum(), (~is_after).sum()) < LEAST_STEPS:
        return 0.0
    before = float(later["took_s"][~is_after].median())
    return float(later["took_s"][is_after].median()) / before if before else 0.0


def _on_unused_memory(job: Job, analysis: Analysis) -> Iterator[Finding]:
    table = analysis.memory.dropna()
    table = table[table["total_mb"] > 0]
    shares = table["used_mb"] / table["total_mb"]
    stepping = analysis.accounting.stepping_s
    if not stepping or not analysis.headline.has_gpus or shares.empty or shares.max() > BARE:
        return
    fullest = table.loc[shares.idxmax()]
    names = ("bubble", "communication")
    waited = sum(analysis.accounting.seconds.get(name, 0.0) for name in names)
    waits = f", and waiting for each other takes {percent(waited / stepping)} of the steps' time"
    size = job.training.micro_batch_size if job.training is not None else 0
    depth = job.plan.pipeline or 1
    more = f"train.micro_batch_size: {2 * size}" if size else "more samples at once in the script"
    yield Finding(
        rule="unused memory",
        values={"used_mb": float(fullest["used_mb"])},
        weight=0.01,
        sentence=f"The fullest GPU never held more than {fullest['used_mb'] / 1024:.1f} of "
        f"{fullest['total_mb'] / 1024:.0f} GiB ({percent(float(shares.max()))})"
        f"{waits if waited else ''}: the job fits on fewer or smaller GPUs.",
        evidence=f"{len(table)} GPUs, the highest values of their samples",
        key=f"parallel.pipeline: {depth // 2}, or {more}"
        if depth > 1
        else f"{more}, or GPUs with less memory",
        cause="memory",
        lost_s=waited,
    )


def _on_limit(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Yield a finding that suggests a shorter time limit for a job that waited in a queue."""
    asked = job.conf.get("cluster")
    limit = asked.get("walltime_min") if isinstance(asked, dict) else None
    attempts = analysis.accounting.attempts
    if not isinstance(limit, (int, float)) or not attempts or not _has(job, Target.QUEUE):
        return
    ran = attempts[-1].ended - attempts[0].started
    if ran <= 0 or not has_ended_well(job) or limit * 60 < max(MUCH_LIMIT * ran, LONG_LIMIT_S):
        return
    waited = value_of(analysis.headline.queued_s) or 0.0
    has_waited = waited >= LONG_QUEUE_S
    yield Finding(
        rule="limit",
        values={"limit_s": limit * 60, "ran_s": ran},
        weight=0.01 if has_waited else 0.0,
        sentence=f"The time limit was {in_units(limit * 60)}, {limit * 60 / ran:.0f} times the "
        f"{in_units(ran)} of the run"
        + (f", which waited {in_units(waited)} in the queue" if has_waited else "")
        + ": with a shorter limit the run may start sooner.",
        evidence="the conf, and the first start to the last end",
        key=f"cluster.walltime_min: {max(10, _round_up(1.5 * ran / 60))}",
        cause="limit" if has_waited else "",
        cost=f"part of the {in_units(waited)} in the queue" if has_waited else "",
    )


def _on_gpu_use(job: Job, analysis: Analysis, explained_s: float) -> Iterator[Finding]:
    """Yield a finding, as jobstats does, on low use of GPUs that no other cause explains."""
    samples = _during_steps(job, analysis)
    samples = samples[samples["gpu"] != "cpu"] if len(samples) else samples
    used = samples["utilization"].astype(float).dropna() / 100 if len(samples) else None
    if used is None or used.empty:
        return
    by_gpu = used.groupby([samples["node"], samples["gpu"]]).mean()
    unused = int((by_gpu < 0.01).sum())
    mean, stepping = float(by_gpu.mean()), analysis.accounting.stepping_s
    if not stepping or (mean >= IDLE_GPU and not (unused and len(by_gpu) > 1)):
        return
    lost = (1 - mean) * stepping
    is_explained = explained_s > 0.4 * lost
    some = f"; {unused} of {len(by_gpu)} GPUs were not used at all" if unused else ""
    yield Finding(
        rule="gpu idle",
        values={"share": mean},
        weight=0.0 if is_explained else 1 - mean,
        sentence=f"GPUs were busy for {percent(mean)} of the time of the steps{some}.",
        evidence=f"{len(used)} samples of {len(by_gpu)} GPUs",
        key="cluster.nodes[].ranks: as many as GPUs, or fewer cluster.nodes[].gpus"
        if unused
        else "train.micro_batch_size, or what the script does between the steps",
        cause="" if is_explained else "GPU idle",
        lost_s=0.0 if is_explained else lost,
    )


def _during_steps(job: Job, analysis: Analysis) -> pd.DataFrame:
    """Return the samples between an attempt's first and last step, if these times are known."""
    samples = job.gpus
    if samples.empty or not analysis.goodput.covers:
        return samples.iloc[:0]
    found = {one.label: one.readings for one in analysis.goodput.attempts if one.readings}
    first = {label: one.first_at for label, one in found.items()}
    last = {label: one.last_at for label, one in found.items()}
    at, label = samples["time"].astype(float), samples["attempt"]
    since, until = label.map(first).astype(float), label.map(last).astype(float)
    return samples[(at >= since) & (at <= until) | at.isna()]


RULES = (
    _on_hang,
    _on_data,
    _on_saves,
    _on_exposed,
    _on_restarts,
    _on_start,
    _on_small_pieces,
    _on_heat,
    _on_swap,
    _on_limit,
)
