"""The first lines of a report: what ran, how fast, how much of it was of use, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from varuna_core.facts.known import Known, Value
from varuna_core.planner.profile.gpus import GpuProduct, list_gpus
from varuna_core.planner.profile.transformer import LAUNCH_S, Transformer
from varuna_core.records.formatting import format_duration, format_seconds, format_share
from varuna_core.records.training import Training
from vjob.reports.analysis.accounting import Accounting
from vjob.reports.analysis.step_times import Goodput, drop_first
from vjob.reports.load.tables import Job

LAYER_LAUNCH_S = LAUNCH_S
"""What starting the kernels of a layer's forward takes, as the planner has it."""
BACKWARD = 2
"""Operations of a backward for each of the forward; a recompute is no work of the model."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What the GPUs of one kind do for the model; recomputing does not count."""

    kind: str
    num_ranks: int
    tflops: float
    """Of each rank, in the median step."""
    peak: float | None
    """The data sheet's, None for a kind that the table has not."""
    source: str
    """Whose figure the peak is."""

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU)."""
        return self.tflops / self.peak if self.peak else None


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Figures of the whole run; None where nothing tells."""

    state: str
    nodes: int
    devices: Mapping[str, int]
    """How many of each kind."""
    duration_s: float | None
    queued_s: float
    last_step: int | None
    num_steps: int | None
    step_s: float | None
    """The median, without each attempt's first."""
    samples_per_s: float | None
    tokens_per_s: float | None
    speeds: tuple[Speed, ...]
    goodput: Known[float]
    rank_hours: float
    """From the first start to the end, of all ranks."""
    cost: float | None
    """In the unit of the conf's prices."""

    @property
    def has_gpus(self) -> bool:
        return any(kind.upper() != "CPU" for kind in self.devices)


def summarise(job: Job, accounting: Accounting, goodput: Goodput, times: pd.DataFrame) -> Headline:
    """`times` as of build_step_times."""
    later = drop_first(times)
    step_s = float(later["took_s"].median()) if len(later) else None
    iterations = job.logs["iterations"]
    batch = _find_batch(job.training, iterations)
    samples = batch / step_s if batch and step_s else _find_mean(iterations, "samples_per_s")
    length = job.training.sequence if job.training is not None else None
    tokens = samples * length if samples and length else _find_mean(iterations, "tokens_per_s")
    seen = [span.last_step for span in goodput.attempts if span.last_step is not None]
    held = accounting.rows
    queued = accounting.attempts[0].started - accounting.attempts[0].since if len(held) else 0.0
    duration = accounting.attempts[-1].ended - accounting.attempts[0].since if len(held) else None
    hours = float((held["span_s"] - held["queue_s"]).sum()) / 3600
    return Headline(
        state=_describe_state(job),
        nodes=_count_nodes(job),
        devices=_count_devices(job, accounting),
        duration_s=duration,
        queued_s=queued,
        last_step=max(seen, default=None),
        num_steps=_find_num_steps(job),
        step_s=step_s,
        samples_per_s=samples,
        tokens_per_s=tokens,
        speeds=tuple(_measure_speeds(job, step_s)),
        goodput=goodput.share,
        rank_hours=hours,
        cost=_find_cost(job, hours),
    )


def _find_num_steps(job: Job) -> int | None:
    """The steps that the training is to take: by its lines, else by the conf."""
    iterations = job.logs["iterations"]
    told = iterations["num_steps"].dropna() if len(iterations) else iterations
    if len(told):
        return int(told.iloc[-1])
    if job.training is not None:
        return job.training.steps
    train = job.conf.get("train")  # of a script: keys that it is given
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None


def list_facts(found: Headline) -> Iterator[tuple[str, str]]:
    """(name, value) of what is known, as people write it."""
    yield "state", found.state
    nodes = f"{found.nodes} node{'s' if found.nodes != 1 else ''}"
    devices = ", ".join(f"{count} x {kind}" for kind, count in found.devices.items())
    yield "on", f"{nodes}, {devices}" if devices else nodes
    if found.duration_s is not None:
        queued = f", {format_duration(found.queued_s)} of it before the start"
        yield "took", format_duration(found.duration_s) + (queued if found.queued_s >= 1 else "")
    if found.last_step is not None:
        of = f" of {found.num_steps:,}" if found.num_steps else ""
        each = f", {format_seconds(found.step_s)} each" if found.step_s is not None else ""
        yield "steps", f"{found.last_step:,}{of}{each}"
    if found.tokens_per_s:
        yield "speed", f"{format_count(found.tokens_per_s)} tokens/s"
    elif found.samples_per_s:
        yield "speed", f"{format_count(found.samples_per_s)} samples/s"
    for speed in found.speeds:
        text = f"{speed.tflops:.3g} TFLOPS each"
        if speed.tflops < 0.1:
            text = f"{speed.tflops * 1000:.3g} GFLOPS each"
        if speed.utilization is not None:
            text += f", MFU {format_share(speed.utilization)} of {speed.peak:g} ({speed.source})"
        yield speed.kind, text
    if isinstance(found.goodput, Value):
        yield "goodput", f"{format_share(found.goodput.value)} of the time since the start"
    elif found.last_step is not None:
        yield "goodput", f"not known: {found.goodput.reason}"
    unit = "GPU-hours" if found.has_gpus else "rank-hours"
    cost = f", {found.cost:.2f} at the conf's prices" if found.cost is not None else ""
    yield "used", f"{found.rank_hours:.3g} {unit}{cost}"


def format_count(number: float) -> str:
    """`812`, `12,345`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def has_ended_well(job: Job) -> bool:
    """True where record or events say so."""
    return _describe_state(job).startswith(("COMPLETED", "ended well"))


BADLY = {
    *("FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"),
    *("DEADLINE", "REFUSED", "failed"),
}
"""Words of states in which a run is over and did not end well."""


def has_ended_badly(job: Job) -> bool:
    """False too where it goes on, or nothing says how it ended."""
    return _describe_state(job).partition(":")[0] in BADLY


def _describe_state(job: Job) -> str:
    """The run's own record is followed; without one, as of a folder of logs, its events are."""
    if job.state:
        return job.state
    ends = [event for event in job.history if event.get("kind") == "ended"]
    starts = [event for event in job.history if event.get("kind") == "started"]
    if not starts and not ends:
        return "not known" if job.outcomes == {} else next(reversed(job.outcomes.values()))
    if not ends or (starts and float(starts[-1]["time"]) > float(ends[-1]["time"])):
        return "running, or ended without a word"
    reason = str(ends[-1].get("reason", ""))[:300]
    word = "failed" if ends[-1].get("code") else "ended well"
    return f"{word}: {reason}" if reason else word


def _count_nodes(job: Job) -> int:
    """While a run goes on some nodes have printed nothing, and none has left exit codes."""
    found = {node for attempt in job.sources.attempts for node, _ in (*attempt.logs, *attempt.gpus)}
    found |= {str(node) for node in job.exits["node"] if node}
    return max(len(found), len({trace.host for trace in job.traces.ranks if trace.host}))


def _count_devices(job: Job, accounting: Accounting) -> dict[str, int]:
    """GPUs that samples name, else what the ranks say that they run on."""
    gpus = job.gpus
    if len(gpus) and (gpus["gpu"] != "cpu").any():
        own = gpus[gpus["gpu"] != "cpu"].drop_duplicates(["node", "gpu"])
        return {str(kind): int(count) for kind, count in own["name"].value_counts().items()}
    first = accounting.attempts[0].label if accounting.attempts else ""
    named = {t.rank: t.device for t in job.traces.ranks if t.attempt == first and t.device}
    return dict(Counter(named.values()))


def _find_batch(training: Training | None, iterations: pd.DataFrame) -> float | None:
    """Samples a step."""
    if training is not None:
        return float(training.global_batch_size)
    sizes = iterations["global_batch_size"].dropna() if len(iterations) else iterations
    return float(sizes.iloc[-1]) if len(sizes) else None


def _find_mean(iterations: pd.DataFrame, name: str) -> float | None:
    numbers = pd.to_numeric(iterations.get(name, pd.Series(dtype=float)), errors="coerce").dropna()
    return float(numbers.median()) if len(numbers) else None


def _measure_speeds(job: Job, step_s: float | None) -> Iterator[Speed]:
    """Each kind's share of the model by the layers of its stages, in the last attempt."""
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
    model = Transformer(
        name=training.model,
        layers=training.layers,
        hidden=training.hidden,
        heads=training.heads,
        length=training.sequence,
        vocabulary=training.vocab,
    )
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
    """The one product that it may be; of several sizes the peaks are alike."""
    found = list_gpus(kind)
    return found[0] if len({gpu.half_tflops for gpu in found}) == 1 else None


def _find_cost(job: Job, hours: float) -> float | None:
    """By the conf's prices of a node-hour, of each group by its GPU's type or its own name."""
    prices = job.conf.get("prices")
    if not isinstance(prices, Mapping) or not prices or not job.plan.nodes:
        return None
    known = {str(kind).casefold(): price for kind, price in prices.items()}
    cost, ranks = 0.0, 0
    for group in job.plan.nodes:
        kind = group.gpu_type.casefold()
        names = (kind, kind.partition("-")[0], group.name.casefold())
        price = next((known[name] for name in names if name in known), None)
        if not isinstance(price, (int, float)):
            return None
        cost += price * group.count
        ranks += group.count * group.ranks
    return hours * cost / ranks if ranks else None
