"""Compute the first lines of a report: what ran, its pace, the useful share of time, the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from varuna_core.facts.known import (
    Bounded,
    Evidence,
    Known,
    NotKnown,
    Sure,
    Value,
    Within,
    value_of,
)
from varuna_core.facts.sentences import describe_hang
from varuna_core.planner.profile.gpus import GpuProduct, list_gpus
from varuna_core.planner.profile.transformer import LAUNCH_S, Transformer, list_parts
from varuna_core.records.formatting import format_duration, format_pace, format_share
from varuna_core.records.training import Training
from vjob.reports.analysis.accounting import Accounting
from vjob.reports.analysis.readings import COUNTER, LOG, bound_share
from vjob.reports.analysis.step_times import Goodput, drop_first, name_times
from vjob.reports.load.tables import Job, RunState

LAYER_LAUNCH_S = LAUNCH_S
"""Seconds to launch the kernels of one layer's forward; the planner uses the same figure."""
MOST_GAPS = 3
"""If two samples are further apart than this many usual intervals, the time between them counts as
not sampled."""
LITTLE_HOURS = 0.1
"""Fewer rank-hours than this are not worth a line, unless they have a price."""
BACKWARD = 2
"""Operations of a backward for each operation of the forward, without a recompute."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Model FLOPs a second on GPUs of one kind, without recompute."""

    kind: str
    num_ranks: int
    tflops: float
    """TFLOP/s of each rank in the median step."""
    peak: float | None
    """The peak on the data sheet; None for a kind that is not in the table."""
    source: str
    """The source of the peak."""

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU)."""
        return self.tflops / self.peak if self.peak else None


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Figures of the whole run."""

    state: str
    nodes: int
    devices: Mapping[str, int]
    """The number of devices of each kind."""
    duration_s: Known[float]
    queued_s: Known[float]
    num_attempts: int
    last_step: Known[int]
    is_least: bool
    """True if later steps than `last_step` may have been done."""
    is_counted: bool
    """True if `last_step` counts optimizer steps because no line prints the program's number."""
    num_steps: Known[int]
    step_s: Known[float]
    """Seconds of the median step, without the first step of each attempt."""
    slower: str
    """The paces of a run whose steps became slower, as a phrase; empty if they did not."""
    left_s: Known[float]
    """Seconds left until the last step, at the median pace, or that of slow steps that last."""
    samples_per_s: Known[float]
    tokens_per_s: Known[float]
    goodput: Bounded[float]
    start: Bounded[float]
    """Share of the time since the first attempt's start that was spent on starting."""
    idle: Known[float]
    """Share of a step in which ranks wait for the work of other ranks."""
    rank_hours: Known[float]
    """Hours of all ranks from first start to end; if read by STEP_LINES, of the steps only."""
    cost: Known[float]
    """The cost in the currency of the conf's prices."""
    energy_kwh: Known[float]
    """Energy of the GPUs, from power samples; without processors and other parts."""
    speeds: tuple[Speed, ...]
    hung: str = ""
    """The longest hang, as a sentence; empty if nothing hung."""
    hung_hours: float = 0.0
    """Rank-hours of all hangs."""

    @property
    def has_gpus(self) -> bool:
        return any(kind.upper() != "CPU" for kind in self.devices)

    @property
    def unit(self) -> str:
        return "GPU-hours" if self.has_gpus else "rank-hours"

    @property
    def hung_cost(self) -> str:
        return f"{self.hung_hours:.2g} {self.unit}"


def summarise(
    job: Job, accounting: Accounting, goodput: Goodput, times: pd.DataFrame, idle: Known[float]
) -> Headline:
    """Compute the headline figures. `times` is the table of build_step_times."""
    step, is_counted = _find_last(goodput)
    total = goodput.attempts[-1].steps.total if is_counted else find_num_steps(job)
    judged = [one.steps for one in goodput.attempts]
    if is_counted and all(one.fit is None and one.other is None for one in judged):
        total = find_num_steps(job)  # the conf's: no line is about steps
    step_s, slowdown = measure_pace(times, goodput), goodput.slowdown
    goes_at = mean_s = step_s
    if slowdown is not None and isinstance(step_s, Value):
        mean_s = Value(slowdown.mean_s, step_s.evidence)
        goes_at = Value(slowdown.slow_s, step_s.evidence) if slowdown.lasts else step_s
    state = str(find_state(job))
    held = accounting.rows
    clock = Evidence("events and exits", Sure.MEASURED)
    no_clock = NotKnown(goodput.clock or "it is not known when the run began and ended", (clock,))
    hours: Known[float] = no_clock
    duration: Known[float] = no_clock
    queued: Known[float] = no_clock
    if len(held):
        first, last = accounting.attempts[0], accounting.attempts[-1]
        hours = Value(float((held["span_s"] - held["queue_s"]).sum()) / 3600, (clock,))
        now = job.state.at if job.state is not None and goes_on(job) else None
        duration = Value((now or last.ended) - first.since, (clock,))
        queued = Value(first.started - first.since, (clock,))
        kinds = [event.get("kind") for event in job.history]
        ends = [kind for kind in kinds if kind in ("started", "ended")]
        if has_ended_badly(job) and goodput.attempts[-1].ended is None and ends[-1:] != ["ended"]:
            hours = duration = NotKnown("no record says when the run ended", (clock,))
    elif world := _count_ranks(job):
        in_steps = float((times["took_s"] * times["covers"]).sum()) * world
        by_lines = Evidence(STEP_LINES, Sure.INFERRED, seen=int(times["covers"].sum()))
        hours = Value(in_steps / 3600, (by_lines,)) if in_steps else no_clock
    seconds, may = accounting.seconds.get("start", 0.0), accounting.may.get("start", 0.0)
    reason = goodput.reason if may else ""
    return Headline(
        state=state,
        nodes=_count_nodes(job),
        devices=_count_devices(job, accounting),
        duration_s=duration,
        queued_s=queued,
        num_attempts=len(goodput.attempts),
        last_step=step,
        is_least=any(one.is_least and one.step == step for one in judged),
        is_counted=is_counted,
        num_steps=total,
        step_s=step_s,
        slower="" if slowdown is None else slowdown.paces,
        left_s=_estimate_left(job, step, total, goes_at),
        samples_per_s=_compute_rate(job, "samples_per_s", mean_s),
        tokens_per_s=_compute_rate(job, "tokens_per_s", mean_s),
        goodput=goodput.share,
        start=bound_share(seconds, may, accounting.since_start_s, goodput.proof, reason),
        idle=idle,
        rank_hours=hours,
        cost=_compute_cost(job, hours),
        energy_kwh=measure_energy(job.gpus, _count_gpus(job)),
        speeds=tuple(_measure_speeds(job, value_of(mean_s))),
        hung=_describe_hangs(job),
        hung_hours=accounting.seconds.get("hung", 0.0) / 3600,
    )


def _describe_hangs(job: Job) -> str:
    """Describe the longest hang and count the others."""
    hangs = sorted(job.hangs.values(), key=lambda one: (one.until or one.seen_at) - one.since)
    more = f"; and {len(hangs) - 1} more" if len(hangs) > 1 else ""
    return describe_hang(hangs[-1]) + more if hangs else ""


STEP_LINES = "lines about steps"


def _count_ranks(job: Job) -> int:
    """Count the ranks of a folder without a run record; 0 means not known."""
    said = job.job_info.get("WORLD_SIZE", "")
    if said.isascii() and said.isdecimal():
        return int(said)
    return len({(trace.attempt, trace.rank) for trace in job.traces.ranks if trace.has_header})


LEAST_STEPS = 3
"""The number of timed steps from log lines that are needed for a pace."""


def measure_pace(times: pd.DataFrame, goodput: Goodput) -> Known[float]:
    """Return the seconds of the median step; not known from fewer than LEAST_STEPS lines."""
    counted = [one.readings for one in goodput.attempts if one.readings and one.readings.step_s]
    if counted:
        of = f"{len(counted)} attempts' medians of " if len(counted) > 1 else ""
        num_timed = sum(one.seen - 1 for one in counted)
        text = f"about the median of {of}{num_timed:,} counted steps"
        median_s = float(pd.Series([one.step_s for one in counted]).median())
        return Value(median_s, tuple(replace(one, text=text) for one in goodput.proof))
    later, (proof,) = drop_first(times), goodput.proof
    num_steps = int(times["covers"].sum())
    evidence = (replace(proof, seen=num_steps),)
    if later.empty:
        return NotKnown("no time of a step was read", evidence)
    if goodput.source == LOG and num_steps < min(LEAST_STEPS, proof.expected or LEAST_STEPS):
        return NotKnown(f"{num_steps} of {proof.expected} steps have a time", evidence)
    evidence = (replace(evidence[0], text=f"the median of {name_times(later)}"),)
    return Value(float(later["took_s"].median()), evidence)


def _find_last(goodput: Goodput) -> tuple[Known[int], bool]:
    """Return the furthest step, and True if it is the number of counted steps because no line shows
    the program's own number."""
    found = [one.steps for one in goodput.attempts if isinstance(one.steps.step, Value)]
    numbered = [one.step for one in found if not one.is_counted]
    if numbered:
        return max(numbered, key=lambda step: value_of(step) or 0), False
    if len(goodput.attempts) == 1 and found:
        return found[0].step, True
    many = "the steps of several attempts were counted without their numbers"
    return NotKnown(many if found else "no step was read"), False


def _estimate_left(
    job: Job, step: Known[int], total: Known[int], step_s: Known[float]
) -> Known[float]:
    if has_ended_badly(job) or has_ended_well(job):
        return NotKnown("the run is over")
    if any(hang.until is None for hang in job.hangs.values()):
        return NotKnown("the ranks make no steps")
    for known in (step, total, step_s):
        if isinstance(known, NotKnown):
            return known
    evidence = tuple(replace(one, sure=Sure.ESTIMATED) for one in step_s.evidence)
    last, most, pace_s = value_of(step), value_of(total), value_of(step_s)
    return Value(max(0, (most or 0) - (last or 0)) * (pace_s or 0.0), evidence)


def _compute_rate(job: Job, name: str, step_s: Known[float]) -> Known[float]:
    """Return samples or tokens a second from the batch and the pace, or else from log lines."""
    iterations, training = job.logs["iterations"], job.training
    batch, pace_s = _find_batch(training, iterations), value_of(step_s)
    if name == "tokens_per_s" and batch:
        batch = batch * training.sequence if training is not None else None
    if batch and pace_s:
        proof = tuple(replace(one, sure=Sure.INFERRED) for one in step_s.evidence)
        return Value(batch / pace_s, proof)
    printed = pd.to_numeric(iterations.get(name, pd.Series(dtype=float)), errors="coerce").dropna()
    proof = (Evidence("lines", Sure.REPORTED, seen=len(printed)),)
    if len(printed):
        return Value(float(printed.median()), proof)
    return NotKnown("a step's time or its batch is not known", proof)


def find_num_steps(job: Job) -> Known[int]:
    """Return the number of steps of the whole training, from its log or else from the conf."""
    iterations = job.logs["iterations"]
    totals = iterations["num_steps"].dropna() if len(iterations) else iterations
    if len(totals):
        return Value(int(totals.iloc[-1]), (Evidence("lines", seen=len(totals)),))
    if job.training is not None:
        return Value(job.training.steps, (Evidence("conf"),))
    train = job.conf.get("train")  # of a script: keys that it is given
    steps = train.get("steps") if isinstance(train, dict) else None
    if isinstance(steps, int):
        return Value(steps, (Evidence("conf"),))
    return NotKnown("neither a line nor the conf has the number of steps")


class Fact(NamedTuple):
    """A figure formatted for people."""

    name: str
    value: str
    is_known: bool = True


def list_facts(found: Headline) -> Iterator[Fact]:
    """List the known figures, and the reason for a goodput or pace that is not known."""
    each = found.slower
    if (step_s := value_of(found.step_s)) is not None and not each:
        each = f"{format_pace(step_s)} each ({found.step_s.evidence[0].text})"
    yield Fact("state", found.state)
    if found.hung:
        lost = f"{found.hung_cost} lost: " if found.hung_hours else ""
        yield Fact("hung", lost + found.hung)
    nodes = f"{found.nodes} node{'s' if found.nodes != 1 else ''}"
    devices = ", ".join(f"{count} x {kind}" for kind, count in found.devices.items())
    yield Fact("on", f"{nodes}, {devices}" if devices else nodes)
    if isinstance(found.duration_s, Value):
        queued_s = value_of(found.queued_s) or 0.0
        queued = f", {format_duration(queued_s)} of it before the start" if queued_s >= 1 else ""
        yield Fact("took", format_duration(found.duration_s.value) + queued)
    if isinstance(found.last_step, Value):
        total = value_of(found.num_steps)
        of = f" of {total:,}" if total and found.last_step.value <= total else ""
        counted = " (at least)" * found.is_least + " counted" * found.is_counted
        steps = f"{found.last_step.value:,}{counted}{of}"
        yield Fact("steps", f"{steps}, {each}" if each else steps)
        if isinstance(found.step_s, NotKnown):
            yield Fact("pace", f"not known: {found.step_s.reason}", is_known=False)
    elif isinstance(found.step_s, Value) and found.step_s.evidence[0].source == COUNTER:
        num_steps = f"{found.step_s.evidence[0].seen:,} counted"  # no line has their numbers
        if found.num_attempts > 1:
            num_steps += f" in {found.num_attempts} attempts, some steps perhaps twice"
        yield Fact("steps", f"{num_steps}, {each}")
    if left_s := value_of(found.left_s):
        yield Fact("left", format_duration(left_s))
    mean = " (the mean of slow and usual steps)" if found.slower else ""
    if tokens := value_of(found.tokens_per_s):
        yield Fact("speed", f"{format_count(tokens)} tokens/s{mean}")
    elif samples := value_of(found.samples_per_s):
        yield Fact("speed", f"{format_count(samples)} samples/s{mean}")
    for speed in found.speeds:
        text = f"{speed.tflops:.3g} TFLOPS each"
        if speed.tflops < 0.1:
            text = f"{speed.tflops * 1000:.3g} GFLOPS each"
        if speed.utilization is not None:
            text += f", MFU {format_share(speed.utilization)} of {speed.peak:g} ({speed.source})"
        yield Fact(speed.kind, text)
    if isinstance(found.goodput, NotKnown):
        yield Fact("goodput", f"not known: {found.goodput.reason}", is_known=False)
    else:
        yield Fact("goodput", f"{format_bounded(found.goodput)} of the time since the start")
    if isinstance(found.rank_hours, Value):
        cost = value_of(found.cost)
        price = f", {cost:.2f} at the conf's prices" if cost is not None else ""
        proof = found.rank_hours.evidence[0]
        if proof.source == STEP_LINES:
            price = f" in {proof.seen:,} steps; when the ranks began and ended is not known"
        if isinstance(found.energy_kwh, Value):
            price += f", {found.energy_kwh.value:.3g} kWh for the GPUs only"
        if found.rank_hours.value >= LITTLE_HOURS or price:
            yield Fact("used", f"{found.rank_hours.value:.3g} {found.unit}{price}")
    else:
        yield Fact("used", f"not known: {found.rank_hours.reason}", is_known=False)


def format_bounded(share: Value[float] | Within[float]) -> str:
    """Format a share such as `61 %`, or bounds such as `28 % to 33 %`."""
    if isinstance(share, Value):
        return format_share(share.value)
    low, high = format_share(share.low), format_share(share.high)
    return low if low == high else f"{low} to {high}"


def format_count(number: float) -> str:
    """Format a count with separators: `812`, `12,345`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def has_ended_well(job: Job) -> bool:
    """Return True if the run record or the events say that the run ended well."""
    return find_state(job).word in ("COMPLETED", "ended well")


BADLY = {
    *("FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"),
    *("DEADLINE", "REFUSED", "failed"),
}
"""Scheduler states of a run that is over and did not end well."""


def has_ended_badly(job: Job) -> bool:
    """Return True if the run ended badly; False also if it goes on or its end is not known."""
    return find_state(job).word in BADLY


def goes_on(job: Job) -> bool:
    """Return True if the scheduler's state says that the job has not ended; False also if no
    scheduler was asked, as for a folder of logs."""
    return job.state is not None and job.state.word in ("RUNNING", "COMPLETING", "SUSPENDED")


def is_waiting(job: Job) -> bool:
    """Return True if the run waits in the queue and none of its attempts has started."""
    has_started = any(event.get("kind") == "started" for event in job.history)
    return job.state is not None and job.state.word == "PENDING" and not has_started


def find_state(job: Job) -> RunState:
    """Return the state from the run record or, without one, from the events."""
    if job.state is not None:
        return job.state
    ends = [event for event in job.history if event.get("kind") == "ended"]
    starts = [event for event in job.history if event.get("kind") == "started"]
    if not starts and not ends:
        return RunState("", next(reversed(job.outcomes.values()), "not known"))
    if not ends or (starts and float(starts[-1]["time"]) > float(ends[-1]["time"])):
        return RunState("", "running, or ended without a record")
    word = "failed" if ends[-1].get("code") else "ended well"
    return RunState(word, str(ends[-1].get("reason", "")))


def _count_nodes(job: Job) -> int:
    """Count the nodes in all files, since some nodes may not have printed lines yet."""
    found = {node for attempt in job.sources.attempts for node, _ in (*attempt.logs, *attempt.gpus)}
    found |= {str(node) for node in job.exits["node"] if node}
    return max(len(found), len({trace.host for trace in job.traces.ranks if trace.host}))


def _count_devices(job: Job, accounting: Accounting) -> dict[str, int]:
    """Count the devices by kind: GPUs named in samples, or else the devices that ranks report."""
    gpus = job.gpus
    if len(gpus) and (gpus["gpu"] != "cpu").any():
        own = gpus[gpus["gpu"] != "cpu"].drop_duplicates(["node", "gpu"])
        return {str(kind): int(count) for kind, count in own["name"].value_counts().items()}
    first = accounting.attempts[0].label if accounting.attempts else ""
    named = {t.rank: t.device for t in job.traces.ranks if t.attempt == first and t.device}
    return dict(Counter(named.values()))


def _find_batch(training: Training | None, iterations: pd.DataFrame) -> float | None:
    """Return the number of samples in a step; None if not known."""
    if training is not None:
        return float(training.global_batch_size)
    sizes = iterations["global_batch_size"].dropna() if len(iterations) else iterations
    return float(sizes.iloc[-1]) if len(sizes) else None


def _describe_model(training: Training) -> Transformer:
    return Transformer(
        name=training.model,
        layers=training.layers,
        hidden=training.hidden,
        heads=training.heads,
        length=training.sequence,
        vocabulary=training.vocab,
        **list_parts(training.llama),
    )


def count_head(training: Training) -> float:
    """Return how many layers have as many operations as the head."""
    model = _describe_model(training)
    return model.head_flops / model.block_flops


def _measure_speeds(job: Job, step_s: float | None) -> Iterator[Speed]:
    """Yield the model FLOPs a second of each kind of GPU in the last attempt, from the step time
    `step_s` and the layers that its ranks hold."""
    training, traces = job.training, [t for t in job.traces.ranks if t.has_header]
    if training is None or not step_s or not traces:
        return
    attempt = traces[-1].attempt
    ranks = {trace.rank: trace for trace in traces if trace.attempt == attempt}
    cuts = job.find_partition(attempt)
    partition = (training.layers,) if cuts is None else cuts.counts
    stages = {stage for trace in ranks.values() for stage in trace.stages}
    if len(partition) != len(stages) or stages != set(range(len(partition))):
        return
    model = _describe_model(training)
    holders = Counter(stage for trace in ranks.values() for stage in trace.stages)
    found: dict[str, list[float]] = {}
    for trace in ranks.values():
        flops = 0.0
        for stage in trace.stages:
            own = partition[stage] * model.block_flops
            own += model.head_flops if stage == len(partition) - 1 else 0.0
            flops += own / holders[stage]
        flops *= training.global_batch_size * (1 + BACKWARD)
        found.setdefault(trace.device or "device", []).append(flops / step_s / 1e12)
    for kind, tflops in found.items():
        product = _find_product(kind)
        # Of fp8 the linear layers alone are faster than half precision.
        precision = "bf16" if training.precision == "fp8" else training.precision
        is_half = precision in ("fp16", "bf16")
        peak = None if product is None else product.half_tflops
        peak = product.single_tflops if product is not None and not is_half else peak
        yield Speed(
            kind=kind,
            num_ranks=len(tflops),
            tflops=sum(tflops) / len(tflops),
            peak=peak,
            source="" if product is None else f"{product.name}'s data sheet, {precision}",
        )


def _find_product(kind: str) -> GpuProduct | None:
    """Return the product of this kind; None if several products with different peaks match."""
    found = list_gpus(kind)
    return found[0] if len({gpu.half_tflops for gpu in found}) == 1 else None


def measure_energy(samples: pd.DataFrame, num_gpus: int) -> Known[float]:
    """Add up the power of the job's GPUs over the time between samples.

    Time without samples, as between two attempts or while a driver did not answer, is left out; the
    evidence has the seconds of GPUs that samples cover, and those from the first sample to the last
    of each attempt.
    """
    source = "GPU samples"
    rows = samples[samples["gpu"] != "cpu"] if len(samples) else samples
    rows = rows.dropna(subset=["time", "power_w"]) if len(rows) else rows
    if rows.empty:
        return NotKnown("no sample contains a power reading of a GPU", (Evidence(source),))
    if not num_gpus:
        reason = "it is not known how many of the sampled GPUs belong to the job"
        return NotKnown(reason, (Evidence(source, Sure.MEASURED),))
    if rows.groupby("attempt")[["node", "gpu"]].apply(_count_rows).max() > num_gpus:
        reason = "the samples have GPUs of other jobs too"
        return NotKnown(reason, (Evidence(source, Sure.MEASURED),))
    joules, seen_s, span_s = 0.0, 0.0, 0.0
    for _, own in rows.groupby(["attempt", "node", "gpu"]):
        own = own.sort_values("time")
        times, power = own["time"].to_numpy(float), own["power_w"].to_numpy(float)
        gaps = np.diff(times)
        if not len(gaps):
            continue
        is_near = gaps <= MOST_GAPS * np.median(gaps)
        joules += float((gaps * (power[:-1] + power[1:]) / 2)[is_near].sum())
        seen_s += float(gaps[is_near].sum())
        span_s += float(times[-1] - times[0])
    if not seen_s:
        return NotKnown("there is one sample of each GPU", (Evidence(source),))
    evidence = Evidence(source, Sure.MEASURED, seen=round(seen_s), expected=round(span_s))
    return Value(joules / 3.6e6, (evidence,))


def _count_gpus(job: Job) -> int:
    """Count the GPUs of the plan's nodes; 0 where a group does not say how many it has."""
    counts = [group.count * group.gpus for group in job.plan.nodes]
    return sum(counts) if all(counts) else 0


def _count_rows(table: pd.DataFrame) -> int:
    return len(table.drop_duplicates())


def _compute_cost(job: Job, hours: Known[float]) -> Known[float]:
    """Compute the cost from the conf's prices of a node-hour, by GPU type or name of the group."""
    proof = (Evidence("the conf's prices", Sure.INFERRED),)
    unknown = NotKnown("the conf has no prices for all of its nodes", proof)
    prices = job.conf.get("prices")
    if isinstance(hours, NotKnown):
        return hours
    if not isinstance(prices, Mapping) or not prices or not job.plan.nodes:
        return unknown
    known = {str(kind).casefold(): price for kind, price in prices.items()}
    cost, ranks = 0.0, 0
    for group in job.plan.nodes:
        kind = group.gpu_type.casefold()
        names = (kind, kind.partition("-")[0], group.name.casefold())
        price = next((known[name] for name in names if name in known), None)
        if not isinstance(price, (int, float)):
            return unknown
        cost += price * group.count
        ranks += group.count * group.ranks
    return Value(hours.value * cost / ranks, proof) if ranks else unknown
