"""All files of a job as tables, in one call; broken files are counted, not raised."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from varuna_core.records.exits import read_end
from varuna_core.records.files import read_json
from varuna_core.records.logs.progress import read_pattern
from varuna_core.records.plan import Prediction, parse_prediction
from varuna_core.records.record import format_commit, read_record
from varuna_core.records.record import read_events as read_history
from varuna_core.records.runfolder import AttemptFolder
from vjob.reports.load.gpu_log import read_gpus
from vjob.reports.load.kineto import fold_files
from vjob.reports.load.sources import AttemptSources, Sources, find_sources
from vjob.reports.load.trace_file import NO_HEADER
from vjob.reports.load.trace_reader import Traces, read_events, read_traces
from vjob.reports.load.training_log import LogReader, LogTables, build_log_events

SHOWN = ("name", "layout", "pipeline", "data", "tensor", "partition", "stage_map", "planned")


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan says; empty or None where it says nothing."""

    shown: tuple[tuple[str, str], ...] = ()
    """Of SHOWN, as text."""
    groups: tuple[tuple[str, str], ...] = ()
    """Each group of nodes by name, in words."""
    pipeline: int | None = None
    partition: str = ""
    world: int | None = None
    """The number of ranks."""
    prediction: Prediction | None = None
    progress: str | None = None
    """The user's own regular expression of lines about steps."""
    program: str = ""
    """What ranks run: script, megatron, ...; empty where an older version submitted."""


def read_plan_facts(path: Path) -> PlanFacts:
    """Empty where the file is missing or torn."""
    value = read_json(path)
    return parse_plan_facts(value) if isinstance(value, dict) else PlanFacts()


def parse_plan_facts(plan: dict[str, Any]) -> PlanFacts:
    groups = plan.get("groups")
    pipeline = plan.get("pipeline")
    return PlanFacts(
        shown=tuple(
            (key, str(plan[key])[:200]) for key in SHOWN if plan.get(key) not in (None, "")
        ),
        groups=_describe_groups(groups) if isinstance(groups, list) else (),
        pipeline=pipeline if isinstance(pipeline, int) else None,
        partition=str(plan.get("partition") or ""),
        world=_count_ranks(groups) if isinstance(groups, list) else None,
        prediction=parse_prediction(plan.get("prediction")),
        progress=str(plan["progress"]) if plan.get("progress") else None,
        program=str(plan.get("program") or ""),
    )


def _describe_groups(groups: list[Any]) -> tuple[tuple[str, str], ...]:
    rows = []
    for group in groups:
        if isinstance(group, dict) and {"name", "count", "ranks"} <= group.keys():
            text = f"{group['count']} x {group['ranks']} ranks"
            more = [str(group[key]) for key in ("gpu_type", "queue") if group.get(key)]
            rows.append((f"group {group['name']}", ", ".join([text, *more])[:200]))
    return tuple(rows)


def _count_ranks(groups: list[Any]) -> int | None:
    try:
        return sum(int(group["count"]) * int(group["ranks"]) for group in groups)
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


MOST_STEPS = 200
"""That anybody would look at one by one."""


@dataclass(kw_only=True)
class Job:
    """What is known of a job."""

    sources: Sources
    traces: Traces
    events: pd.DataFrame
    """Of the chosen steps, and of further ones where asked for: columns as of read_events."""
    chosen: dict[str, tuple[str, int]]
    """(attempt, step) of `first`, `median`, `slowest`, `last`."""
    logs: dict[str, pd.DataFrame]
    """iterations, memory, phases, timers_by_rank, timers_by_step, timer_calls."""
    job_info: dict[str, str]
    partitions: dict[str, str]
    """What the log of each attempt says of its own."""
    gpus: pd.DataFrame
    history: list[dict[str, Any]]
    """events*.jsonl in time order."""
    exits: pd.DataFrame
    outcomes: dict[str, str]
    """How each attempt ended, in words; an attempt without an outcome is not here."""
    plan: PlanFacts
    skipped: dict[str, str]
    """What of which file could not be read."""
    commit: str = ""
    """Commit of the user's code: `1a2b3c4d5e on main, dirty`."""

    def find_partition(self, attempt: str) -> str:
        """Layers of each stage in an attempt, where anything says so."""
        ranks = (trace for trace in self.traces.ranks if trace.attempt == attempt)
        said = next((trace.partition for trace in ranks if trace.partition), "")
        said = said or self.partitions.get(attempt, "")
        return said or (self.plan.partition or self.job_info.get("PARTITION", ""))


def load_job(
    path: Path, say: Callable[[str], object] = lambda text: None, *, more_events: int = 0
) -> Job:
    """Read all; SourceError where there is nothing. `say` hears of the progress.

    `more_events` asks for further steps' events, about so many, to look at beside the chosen ones.
    """
    sources = find_sources(path)
    skipped: dict[str, str] = {}
    paths = [(attempt.label, path) for attempt in sources.attempts for path in attempt.traces]
    say(f"{len(paths)} traces")
    traces = _read_with_profiles(sources, paths, skipped, say)
    for trace in traces.ranks:
        if trace.skipped:
            count = f"{trace.skipped} line{'s' if trace.skipped > 1 else ''} skipped"
            skipped[f"{trace.attempt}/trace/{trace.path.name}".lstrip("/")] = count
        if trace.trouble and (trace.trouble != NO_HEADER or trace.skipped):
            skipped[f"{trace.attempt}/trace/{trace.path.name}".lstrip("/")] = trace.trouble
    chosen = choose_steps(list_whole_steps(traces), _measure_steps(traces.steps))
    held = {*chosen.values(), *choose_more(traces, more_events)}
    tables = LogTables()
    plan = read_plan_facts(sources.run.plan) if sources.run is not None else PlanFacts()
    pattern = read_pattern(plan.progress)
    for attempt in sources.attempts:
        readers: list[LogReader] = []
        for node, log in attempt.logs:
            say(f"{log.name}")
            readers.append(LogReader(tables, attempt.label, node, log, pattern))
            readers[-1].read()
        _read_errors(tables, attempt, readers, pattern)
    skipped |= {name: f"{count} lines skipped" for name, count in tables.skipped.items()}
    gpus: list[dict[str, Any]] = []
    for attempt in sources.attempts:
        for node, samples in attempt.gpus:
            rows, bad = read_gpus(attempt.label, node, samples)
            gpus += rows
            if bad:
                skipped[f"{attempt.label}/{samples.name}".lstrip("/")] = f"{bad} lines skipped"
    logs = tables.build_tables()
    events = read_events(traces, held)
    if events.empty:
        found = build_log_events(logs["timer_calls"], tables.job_info)
        if found is not None:
            events, chosen = found, _choose_logged(found)
    return Job(
        sources=sources,
        traces=traces,
        events=events,
        chosen=chosen,
        logs=logs,
        job_info=tables.job_info,
        partitions=tables.partitions,
        gpus=pd.DataFrame(gpus),
        history=read_history(sources.run) if sources.run is not None else [],
        exits=_read_exits(sources),
        outcomes=_read_outcomes(sources),
        plan=plan,
        skipped=skipped,
        commit=_read_commit(sources),
    )


def _read_with_profiles(
    sources: Sources,
    paths: list[tuple[str, Path]],
    skipped: dict[str, str],
    say: Callable[[str], object],
) -> Traces:
    """The traces, and for ranks without one their files of torch.profiler."""
    if not any(attempt.profiles for attempt in sources.attempts):
        return read_traces(paths)
    folder = Path(tempfile.mkdtemp(prefix="vjob-profiles-"))
    folded = []
    for number, attempt in enumerate(sources.attempts):
        say(f"{len(attempt.profiles)} files of torch.profiler")
        taken = {int(path.stem) for path in attempt.traces if path.stem.isdigit()}
        files, bad = fold_files(attempt.profiles, taken, folder / str(number))
        folded += [(attempt.label, path) for path in files]
        skipped |= {f"{attempt.label}/{name}".lstrip("/"): why for name, why in bad.items()}
    traces = read_traces([*paths, *folded])
    traces.is_sample = bool(folded) and not paths
    # Events are read from these files later, some only for an export.
    weakref.finalize(traces, shutil.rmtree, folder, ignore_errors=True)
    return traces


def _read_commit(sources: Sources) -> str:
    record = None if sources.run is None else read_record(sources.run)
    return "" if record is None else format_commit(record.code)


def _read_errors(
    tables: LogTables,
    attempt: AttemptSources,
    readers: list[LogReader],
    pattern: re.Pattern[str] | None,
) -> None:
    """Steps of standard error where standard output has none, and of bars where neither has any."""
    errors: dict[str, list[LogReader]] = {}
    if not any(reader.has_steps for reader in readers):
        for node, log in attempt.errors:
            reader = LogReader(tables, attempt.label, node, log, pattern)
            reader.read_steps()
            errors.setdefault(node, []).append(reader)
    found = [own for node in errors.values() for own in node]
    if not any(reader.has_steps for reader in (*readers, *found)):
        for reader in readers:
            reader.close(errors.get(reader.node, ()))


def _measure_steps(steps: pd.DataFrame) -> pd.Series:
    """What each step took, by (attempt, step)."""
    return steps.groupby(["attempt", "step"])["took_s"].max()


def list_whole_steps(traces: Traces) -> list[tuple[str, int]]:
    """Steps with details of all ranks, or of as large a part of an attempt's as there is: who is
    killed takes with it what it has not written yet."""
    ranks = Counter(trace.attempt for trace in traces.ranks if trace.has_header)
    seen = traces.steps.groupby(["attempt", "step"])["rank"].nunique()
    shares = {pair: int(seen[pair]) / ranks[pair[0]] for pair in traces.detailed_steps}
    most = max(shares.values(), default=0.0)
    return [pair for pair, share in shares.items() if share == most]


def choose_steps(detailed: list[tuple[str, int]], took: pd.Series) -> dict[str, tuple[str, int]]:
    """The steps to look at closely, of those that have details."""
    if not detailed:
        return {}
    # The first step warms up: it is no measure of the others.
    later = sorted(detailed[1:] or detailed, key=lambda pair: (float(took[pair]), pair))
    chosen = {"first": detailed[0], "median": later[(len(later) - 1) // 2]}
    return {**chosen, "slowest": later[-1], "last": detailed[-1]}


def _choose_logged(events: pd.DataFrame) -> dict[str, tuple[str, int]]:
    grouped = events.groupby(["attempt", "step"])
    took = grouped["end_s"].max() - grouped["begin_s"].min()
    return choose_steps([(str(attempt), int(step)) for attempt, step in took.index], took)


def choose_more(traces: Traces, most_events: int) -> set[tuple[str, int]]:
    """The last step of each attempt, and others evenly apart, about so many events in all."""
    detailed = traces.detailed_steps
    count = sum(trace.num_events for trace in traces.ranks)
    most = min(most_events * len(detailed) // count, MOST_STEPS) if count else 0
    if not most:
        return set()
    last = list({attempt: (attempt, step) for attempt, step in detailed}.values())[-most:]
    apart = -(-len(detailed) // max(1, most - len(last)))
    return {*last, *detailed[::apart]} if most > len(last) else set(last)


def _read_exits(sources: Sources) -> pd.DataFrame:
    names = ["attempt", "rank", "node", "code", "signal", "stopped"]
    names += ["started", "ended", "last_error"]
    rows = []
    for attempt in sources.attempts:
        for path in attempt.exits:
            value = read_json(path)
            if isinstance(value, dict):
                rows.append({"attempt": attempt.label, **{n: value.get(n) for n in names[1:]}})
    return pd.DataFrame(rows, columns=names, dtype=object)  # numbers would make NaN of no signal


def _read_outcomes(sources: Sources) -> dict[str, str]:
    found = {}
    for attempt in sources.attempts:
        reason = read_end(AttemptFolder(attempt.folder, 0))
        if reason is not None:
            found[attempt.label] = reason
    return found
