"""Read all files of a job into tables. Broken files are recorded and do not raise an error."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from varuna_core.facts.hang import Hang, parse_hang
from varuna_core.facts.partition import Partition
from varuna_core.facts.remedy import Context, context_of
from varuna_core.hang.signs import read_hang
from varuna_core.records.exits import parse_exits, read_reason
from varuna_core.records.files import read_bytes, read_json, read_text
from varuna_core.records.logs.progress import read_pattern
from varuna_core.records.logs.step_counts import StepCounts, parse_counts
from varuna_core.records.plan import Prediction, parse_prediction
from varuna_core.records.record import ENDED, REFUSED, format_commit, read_record
from varuna_core.records.record import read_events as read_history
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import Training, parse_partition, read_training
from vjob.reports.load.gpu_log import NodeFaults, read_gpus
from vjob.reports.load.log_settings import (
    MissingNodes,
    OtherJob,
    choose_job,
    find_missing,
    place_devices,
    place_nodes,
    place_ranks,
)
from vjob.reports.load.logged_calls import Places, read_calls
from vjob.reports.load.sources import AttemptSources, Sources, locate_sources, show_text
from vjob.reports.load.trace_file import NO_HEADER
from vjob.reports.load.trace_reader import Traces, read_events, read_traces
from vjob.reports.load.training_log import LogReader, LogTables

SHOWN = ("name", "layout", "pipeline", "data", "tensor", "partition", "stage_map", "planned")


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """A group of nodes of one kind."""

    name: str
    gpu_type: str
    """The type of GPU; empty if the conf does not name it."""
    count: int
    ranks: int
    """Ranks on each node."""
    gpus: int = 0
    """GPUs that each node gives; 0 if there are none, or their number is not known."""
    queue: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """Facts from plan.json; those that it lacks are empty or None."""

    shown: tuple[tuple[str, str], ...] = ()
    """The facts named in SHOWN, as text."""
    nodes: tuple[GroupFacts, ...] = ()
    pipeline: int | None = None
    tensor: int | None = None
    order: str = ""
    """Which ranks have neighbouring numbers: those of a stage (data) or of a replica (pipeline)."""
    layers: int | None = None
    """Layers of the model; None if the plan's program has none."""
    partition: Partition | None = None
    """Blocks of each stage, without embedding and head."""
    world: int | None = None
    """The number of ranks."""
    prediction: Prediction | None = None
    progress: str | None = None
    """The user's regular expression for lines about steps."""
    program: str = ""
    """The program of the ranks: script, megatron, ...; empty in plans of older versions."""
    scheduler: str = ""
    """The scheduler's name as plans spell it; empty without a plan."""

    @property
    def context(self) -> Context:
        """The kind of reader for whom remedies are worded in this run."""
        return context_of(self.scheduler)


def read_plan_facts(path: Path) -> PlanFacts:
    """Read the facts of a plan; all are empty if the file is missing or torn."""
    value, training = read_json(path), read_json(RunFolder(path.parent).training)
    layers = training.get("layers") if isinstance(training, dict) else None
    if not isinstance(value, dict):
        return PlanFacts()
    return parse_plan_facts(value, layers if isinstance(layers, int) else None)


def parse_plan_facts(plan: dict[str, Any], layers: int | None = None) -> PlanFacts:
    groups = plan.get("groups")
    pipeline, tensor = plan.get("pipeline"), plan.get("tensor")
    partition = Partition.find(str(plan.get("partition") or ""))
    if partition is not None:
        partition = partition.blocks(layers)
        plan = {**plan, "partition": partition.spell()}
    return PlanFacts(
        shown=tuple(
            (key, str(plan[key])[:200]) for key in SHOWN if plan.get(key) not in (None, "")
        ),
        nodes=_list_groups(groups) if isinstance(groups, list) else (),
        pipeline=pipeline if isinstance(pipeline, int) else None,
        tensor=tensor if isinstance(tensor, int) else None,
        order=str(plan.get("order") or ""),
        layers=layers,
        partition=partition,
        world=_count_ranks(groups) if isinstance(groups, list) else None,
        prediction=parse_prediction(plan.get("prediction")),
        progress=str(plan["progress"]) if plan.get("progress") else None,
        program=str(plan.get("program") or ""),
        scheduler=str(plan.get("scheduler") or ""),
    )


def _list_groups(groups: list[Any]) -> tuple[GroupFacts, ...]:
    return tuple(
        GroupFacts(
            name=str(group.get("name") or "")[:80],
            gpu_type=str(group.get("gpu_type") or "")[:80],
            queue=str(group.get("queue") or "")[:80],
            count=group["count"],
            ranks=group["ranks"],
            gpus=group["gpus"] if isinstance(group.get("gpus"), int) else 0,
        )
        for group in groups
        if isinstance(group, dict)
        and isinstance(group.get("count"), int)
        and isinstance(group.get("ranks"), int)
    )


def _count_ranks(groups: list[Any]) -> int | None:
    try:
        return sum(int(group["count"]) * int(group["ranks"]) for group in groups)
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


MOST_REASON = 300
"""Characters kept of the reason for a run's state: the first and the last half of them."""
MOST_STEPS = 200
"""The most steps of `choose_more` whose events are read."""


@dataclass(frozen=True)
class RunState:
    """State of a run in one word of the scheduler or of the events, and the reason for it."""

    word: str
    reason: str = ""
    at: float | None = None
    """When the state was seen; None for the state in which the run ended."""

    def __str__(self) -> str:
        """Format the state, such as `COMPLETED: all 2 ranks exited 0`."""
        reason = " ".join(self.reason.split())
        if len(reason) > MOST_REASON:  # its end says what vjob did
            half = MOST_REASON // 2
            reason = f"{reason[:half]} ... {reason[-half:]}"
        return ": ".join(filter(None, (self.word, reason)))


@dataclass(kw_only=True)
class Job:
    """Everything that was read from a job's files."""

    sources: Sources
    traces: Traces
    events: pd.DataFrame
    """Events of the chosen steps, and of further steps if asked for; columns as in read_events."""
    chosen: dict[str, tuple[str, int]]
    """(attempt, step) of the steps `first`, `median`, `slowest`, `last`."""
    logs: dict[str, pd.DataFrame]
    """The tables iterations, memory, timers_by_rank, timers_by_step and timer_calls."""
    job_info: dict[str, str]
    partitions: dict[str, str]
    """The partition that the log of each attempt prints."""
    gpus: pd.DataFrame
    hardware: tuple[NodeFaults, ...]
    """Faults in the samples and what the samples could not read, one for each node and attempt."""
    history: list[dict[str, Any]]
    """The events of events*.jsonl in order of time."""
    exits: pd.DataFrame
    counts: dict[str, dict[int, StepCounts]]
    """Counted optimizer steps of each attempt's ranks; empty for built-in programs."""
    outcomes: dict[str, str]
    """Description of each attempt's end; attempts without a known outcome are missing."""
    plan: PlanFacts
    training: Training | None
    """What a built-in program trains: its model and batch."""
    conf: dict[str, Any]
    """Content of resolved.yaml; empty without this file."""
    hangs: dict[str, Hang]
    """Hangs that the agents of an attempt found."""
    suspected: dict[str, Hang]
    """Hangs that the agents of an attempt suspect, or suspected when it ended."""
    worlds: dict[str, int]
    """The number of ranks of each attempt that has its own plan."""
    skipped: dict[str, str]
    """Problems that were found while reading, by file."""
    commit: str = ""
    """Commit of the user's code: `1a2b3c4d5e on main, dirty`."""
    missing: MissingNodes | None = None
    """Nodes whose logs a bare folder lacks."""
    others: tuple[OtherJob, ...] = ()
    """Further jobs whose logs are in a bare folder."""
    nothing_to_do: str = ""
    """The log's line `nothing to do: ...`; empty where there is none."""
    state: RunState | None = None
    """The run's state and why, as `vjob list` shows them; None where no record says it."""

    chosen_partitions: Mapping[str, Partition] = field(default_factory=dict)
    """The partition, in segments, that Varuna chose for a script's model in each attempt."""

    def find_partition(self, attempt: str) -> Partition | None:
        """Return the blocks of an attempt's stages, counted as in its log; None if not known."""
        ranks = (trace for trace in self.traces.ranks if trace.attempt == attempt)
        said = next((trace.partition for trace in ranks if trace.partition), "")
        said = said or self.partitions.get(attempt, "")
        if not said and attempt in self.chosen_partitions:
            return self.chosen_partitions[attempt]
        if not said and self.plan.partition is not None:
            return self.plan.partition
        found = Partition.find(said or self.job_info.get("PARTITION", ""))
        return None if found is None else found.blocks(self.plan.layers)


def load_job(
    path: Path,
    say: Callable[[str], object] = lambda text: None,
    *,
    more_events: int = 0,
) -> Job:
    """Read a job's files. Raise SourceError if there is nothing to read. `say` is called with
    progress.

    `more_events` asks for the events of further steps, about that many, in addition to the chosen
    ones.
    """
    sources = locate_sources(path)
    others: tuple[OtherJob, ...] = ()
    if sources.run is None:
        bare, others = choose_job(sources.attempts[0])
        sources = replace(sources, attempts=(bare,))
    skipped: dict[str, str] = {}
    if sources.num_left_out:
        skipped["older attempts"] = f"{sources.num_left_out} attempts: only the newest are read"
    for attempt in sources.attempts:
        if attempt.num_left_out:
            skipped[f"{attempt.label}/*".lstrip("/")] = (
                f"{attempt.num_left_out:,} files were not read: there are too many"
            )
    paths = [(attempt.label, path) for attempt in sources.attempts for path in attempt.traces]
    say(f"{len(paths)} traces")
    traces = read_traces(paths)
    for trace in traces.ranks:
        if trace.skipped:
            count = f"{trace.skipped} line{'s' if trace.skipped > 1 else ''} skipped"
            skipped[f"{trace.attempt}/trace/{trace.path.name}".lstrip("/")] = count
        if trace.trouble and (trace.trouble != NO_HEADER or trace.skipped):
            skipped[f"{trace.attempt}/trace/{trace.path.name}".lstrip("/")] = trace.trouble
    chosen = choose_steps(list_whole_steps(traces), measure_steps(traces.steps)["took_s"])
    held = {*chosen.values(), *choose_more(traces, more_events)}
    tables = LogTables()
    plan = read_plan_facts(sources.run.plan) if sources.run is not None else PlanFacts()
    pattern = read_pattern(plan.progress, sources.run.path if sources.run is not None else None)
    for attempt in sources.attempts:
        readers: list[LogReader] = []
        for node, log in attempt.logs:
            say(f"{log.name}")
            readers.append(LogReader(tables, attempt.label, node, log, pattern))
            readers[-1].read()
        _read_errors(tables, attempt, readers, pattern)
    skipped |= {name: f"{count} lines skipped" for name, count in tables.skipped.items()}
    for name, lost in tables.left_out.items():
        skipped[name] = f"{lost} bytes were not written to the log (cluster.log_limit_mb)"
    gpus: list[dict[str, Any]] = []
    hardware: list[NodeFaults] = []
    for attempt in sources.attempts:
        for node, samples in attempt.gpus:
            hardware.append(NodeFaults(attempt.label, node))
            rows, bad = read_gpus(samples, hardware[-1])
            gpus += rows
            if bad:
                skipped[f"{attempt.label}/{samples.name}".lstrip("/")] = f"{bad} lines skipped"
    logs, samples_of_gpus = tables.build_tables(), pd.DataFrame(gpus)
    events, exits = read_events(traces, held), _read_exits(sources)
    settings = _list_settings(plan, sources) | tables.job_info
    printed = {node: blocks for (_, node), blocks in tables.settings.items()}
    nodes = place_nodes(printed) if sources.run is None else {}
    if events.empty:
        hosts = place_ranks(nodes, settings) | {
            rank: str(node)
            for rank, node in exits[["rank", "node"]].itertuples(index=False)
            if isinstance(rank, int) and node
        }
        places = Places(
            hosts=hosts,
            devices=place_devices(hosts, samples_of_gpus),
            logs={(one.label, node): log for one in sources.attempts for node, log in one.logs},
        )
        found = read_calls(logs, settings, places)
        if found is not None:
            logged, logged_events = found
            events = logged_events if len(logged_events) else events
            traces = logged if traces.steps.empty else traces
            chosen = _choose_logged(events) if len(events) else chosen
    return Job(
        sources=sources,
        traces=traces,
        events=events,
        chosen=chosen,
        logs=logs,
        job_info=tables.job_info,
        partitions=tables.partitions,
        chosen_partitions=_read_partitions(sources),
        gpus=samples_of_gpus,
        hardware=tuple(hardware),
        history=read_history(sources.run) if sources.run is not None else [],
        exits=exits,
        counts=read_counts(sources),
        outcomes=_read_outcomes(sources),
        plan=plan,
        training=_read_training(sources),
        conf=_read_conf(sources),
        hangs=_read_hangs(sources, read_hang),
        suspected=_read_hangs(sources, lambda attempt: parse_hang(read_json(attempt.hanging))),
        worlds=_read_worlds(sources),
        skipped=skipped,
        commit=_read_commit(sources),
        missing=find_missing(sources.attempts[0], printed, settings)
        if sources.run is None and path.is_dir() and not sources.attempts[0].num_left_out
        else None,
        others=others,
        nothing_to_do=tables.nothing_to_do,
        state=_read_state(sources),
    )


def _read_commit(sources: Sources) -> str:
    record = None if sources.run is None else read_record(sources.run)
    return "" if record is None else format_commit(record.code)


def _read_state(sources: Sources) -> RunState | None:
    """Return the state of a run that is over; None for a running one."""
    record = None if sources.run is None else read_record(sources.run)
    if record is None or record.state not in (ENDED, REFUSED):
        return None
    word = record.verdict if record.state == ENDED else record.state.upper()
    return RunState(word, record.message)


def _read_errors(
    tables: LogTables,
    attempt: AttemptSources,
    readers: list[LogReader],
    pattern: re.Pattern[str] | None,
) -> None:
    """Read steps from standard error if standard output has none; as a last resort, read them from
    progress bars."""
    errors: dict[str, list[LogReader]] = {}
    if not any(reader.has_steps for reader in readers):
        for node, log in attempt.errors:
            reader = LogReader(tables, attempt.label, node, log, pattern)
            reader.read_steps()
            errors.setdefault(node, []).append(reader)
    found = [own for node in errors.values() for own in node]
    if not any(reader.has_steps for reader in (*readers, *found)):
        for reader in readers:
            reader.close(errors.pop(reader.node, ()))
        for first, *others in errors.values():  # nothing was printed but bars
            first.close(others)


def measure_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Return begin_s and took_s of each step of the traces, by (attempt, step).

    A step lasts until its last rank ends it, and from the time at which the last rank began it,
    which is the end of the step before unless there was a pause. A step whose predecessor is not
    known lasts from its first rank's begin. No two steps of an attempt overlap.
    """
    grouped = steps.assign(end_s=steps["begin_s"] + steps["took_s"]).groupby(["attempt", "step"])
    table = grouped.agg(
        first_s=("begin_s", "min"), last_s=("begin_s", "max"), end_s=("end_s", "max")
    )
    table = table.sort_values("end_s").reset_index()
    before = table.groupby("attempt")[["step", "end_s"]].shift()
    begin = table["last_s"].where(before["step"] == table["step"] - 1, table["first_s"])
    table["begin_s"] = np.fmax(begin, before["end_s"])
    table["took_s"] = table["end_s"] - table["begin_s"]
    return table.set_index(["attempt", "step"])[["begin_s", "took_s"]]


def list_whole_steps(traces: Traces) -> list[tuple[str, int]]:
    """Return the steps for which all ranks have details, or the largest number of an attempt's
    ranks that any step has: killed ranks lose what they had not yet written."""
    ranks = Counter(trace.attempt for trace in traces.ranks if trace.has_header)
    seen = traces.steps.groupby(["attempt", "step"])["rank"].nunique()
    shares = {pair: int(seen[pair]) / ranks[pair[0]] for pair in traces.detailed_steps}
    most = max(shares.values(), default=0.0)
    return [pair for pair, share in shares.items() if share == most]


def choose_steps(detailed: list[tuple[str, int]], took: pd.Series) -> dict[str, tuple[str, int]]:
    """Choose the steps to show closely among those with details. The median is the detailed step
    closest to the median of all steps, since detailed steps may be slower than others."""
    if not detailed:
        return {}
    # The first step warms up: it is no measure of the others.
    later = sorted(detailed[1:] or detailed, key=lambda pair: (float(took[pair]), pair))
    all_later = took.drop(detailed[0]) if len(took) > 1 else took
    usual = float(all_later.quantile(0.5, interpolation="lower"))
    median = min(later, key=lambda pair: abs(float(took[pair]) - usual))
    chosen = {"first": detailed[0], "median": median}
    return {**chosen, "slowest": later[-1], "last": detailed[-1]}


def _list_settings(plan: PlanFacts, sources: Sources) -> dict[str, str]:
    """Return a run's settings under the names that scripts of a Megatron checkout print."""
    train = _read_conf(sources).get("train")
    train = train if isinstance(train, dict) else {}
    found = {
        "WORLD_SIZE": plan.world,
        "PIPELINE_MP_SIZE": plan.pipeline,
        "TENSOR_MP_SIZE": plan.tensor,
        "ORDER": plan.order,
        "MICRO_BATCH_SIZE": train.get("micro_batch_size"),
        "GLOBAL_BATCH_SIZE": train.get("global_batch_size"),
    }
    return {name: str(value) for name, value in found.items() if value}


def _choose_logged(events: pd.DataFrame) -> dict[str, tuple[str, int]]:
    grouped = events.groupby(["attempt", "step"])
    took = grouped["end_s"].max() - grouped["begin_s"].min()
    return choose_steps([(str(attempt), int(step)) for attempt, step in took.index], took)


def choose_more(traces: Traces, most_events: int) -> set[tuple[str, int]]:
    """Choose the last step of each attempt and further steps at even distances, with about
    `most_events` events in all."""
    detailed = traces.detailed_steps
    count = sum(trace.num_events for trace in traces.ranks)
    most = min(most_events * len(detailed) // count, MOST_STEPS) if count else 0
    if not most:
        return set()
    last = list({attempt: (attempt, step) for attempt, step in detailed}.values())[-most:]
    apart = -(-len(detailed) // max(1, most - len(last)))
    return {*last, *detailed[::apart]} if most > len(last) else set(last)


def read_counts(sources: Sources) -> dict[str, dict[int, StepCounts]]:
    """Return counted optimizer steps by attempt and rank; attempts without counts are missing."""
    found: dict[str, dict[int, StepCounts]] = {}
    for attempt in sources.attempts:
        for rank, path in attempt.counts:
            with contextlib.suppress(OSError):
                counts = parse_counts(read_bytes(path))
                if counts is not None and counts.count:
                    found.setdefault(attempt.label, {})[rank] = counts
    return found


def _read_exits(sources: Sources) -> pd.DataFrame:
    names = ["rank", "node", "code", "signal", "stopped"]
    names += ["started", "ended", "last_error", "exception", "unwritten"]
    rows = []
    for attempt in sources.attempts:
        for path in attempt.exits:
            for one in parse_exits(read_json(path)):
                cells = [getattr(one, name) for name in names]
                shown = [show_text(cell) if isinstance(cell, str) else cell for cell in cells]
                rows.append([attempt.label, *shown])
    names.insert(0, "attempt")
    return pd.DataFrame(rows, columns=names, dtype=object)  # numbers would make NaN of no signal


def _read_training(sources: Sources) -> Training | None:
    folders = [AttemptFolder(attempt.folder, 0).training for attempt in sources.attempts[-1:]]
    folders += [sources.run.training] if sources.run is not None else []
    for path in folders:
        with contextlib.suppress(ValueError):
            return read_training(path)
    return None


def _read_conf(sources: Sources) -> dict[str, Any]:
    if sources.run is None:
        return {}
    try:
        value = yaml.load(read_text(sources.run.resolved, most=MOST_CONF), _LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


MOST_CONF = 1 << 20
"""Bytes of a resolved conf; a larger file is not one that vjob wrote, and is not read."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _read_worlds(sources: Sources) -> dict[str, int]:
    plans = {
        attempt.label: read_plan_facts(AttemptFolder(attempt.folder, 0).plan).world
        for attempt in sources.attempts
    }
    return {label: world for label, world in plans.items() if world}


def _read_partitions(sources: Sources) -> dict[str, Partition]:
    files = {one.label: AttemptFolder(one.folder, 0).partition for one in sources.attempts}
    found = {label: parse_partition(read_json(path)) for label, path in files.items()}
    return {label: partition for label, partition in found.items() if partition is not None}


def _read_hangs(sources: Sources, read: Callable[[AttemptFolder], Hang | None]) -> dict[str, Hang]:
    found = {one.label: AttemptFolder(one.folder, 0) for one in sources.attempts if sources.run}
    hangs = {label: read(attempt) for label, attempt in found.items()}
    return {label: hang for label, hang in hangs.items() if hang is not None}


def _read_outcomes(sources: Sources) -> dict[str, str]:
    found = {}
    for attempt in sources.attempts:
        reason = read_reason(AttemptFolder(attempt.folder, 0))
        if reason is not None:
            found[attempt.label] = reason
    return found
