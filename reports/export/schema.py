"""Describe a job's exported tables: their names, and the type, unit and meaning of each column.

docs/notebook.md lists them, and `fit_table` brings every table to its schema: a table always has
the same columns and types, and may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from vjob.reports.analysis.accounting import CLASSES

TYPES = {
    "text": "string",
    "int": "Int64",
    "float": "float64",
    "bool": "boolean",
    "time": "datetime64[ns, UTC]",
}
"""Types as named in the docs and in pandas. A missing value is <NA>, NaN, NaT, or an empty text."""


@dataclass(frozen=True)
class Column:
    """A column of an exported table."""

    name: str
    type: str
    """A key of TYPES."""
    doc: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """An exported table."""

    doc: str
    columns: tuple[Column, ...]
    more: str = ""
    """Description of further numeric columns; empty if there are none."""


KIND_COLUMNS = {
    "F": ("forward_s", "forward"),
    "f": ("forward_only_s", "forward that keeps only its inputs, to be recomputed"),
    "R": ("recompute_s", "recompute"),
    "B": ("backward_s", "backward"),
    "I": ("backward_inputs_s", "backward of inputs"),
    "W": ("backward_weights_s", "backward of weights"),
    "O": ("offload_s", "offloaded activations: copies from GPU to host memory"),
    "L": ("load_s", "offloaded activations: copies back"),
    "compute": ("compute_s", "computation, as a script marks it"),
    "send": ("send_s", "sends of messages"),
    "all-reduce": ("all_reduce_s", "sums over replicas"),
    "communication": ("communication_s", "communication, as a script marks it"),
    "optimizer": ("optimizer_s", "optimizer"),
    "checkpoint": ("checkpoint_s", "checkpoints"),
    "data": ("data_s", "fetching of data"),
    "evaluate": ("evaluate_s", "evaluation"),
    "other": ("other_s", "spans with names of the script's own"),
}
"""For each kind in the trace, the column of its work and a description."""

_ATTEMPT = Column("attempt", "text", "start of the ranks: `0`, `0.earlier-1`; empty without a run")
_STEP = Column("step", "int", "number of the step")
_RANK = Column("rank", "int", "number of the rank")
_NODE = Column("node", "text", "name of the node, as in its file names")
_STAGE = Column("stage", "int", "stage of the pipeline; the first where a rank has several")
_REPLICA = Column("replica", "int", "data-parallel copy")

TABLES = {
    "attempts": Table(
        "One row per start of the ranks, in order.",
        (
            _ATTEMPT,
            Column("started", "time", "when it was first seen"),
            Column("ended", "time", "when the attempt was last seen"),
            Column("first_step", "int", "first known step"),
            Column("last_step", "int", "last one"),
            Column("steps_s", "float", "in steps", "s"),
            Column("repeated_s", "float", "part in steps that a later attempt repeated", "s"),
            Column("partition", "text", "layers of each stage, `3-4-5`"),
            Column("outcome", "text", "how the attempt ended; empty while it runs or if unknown"),
        ),
    ),
    "accounting": Table(
        "One row per rank and attempt: all of its time, from the submit or the end of the "
        "attempt before, divided by purpose. The classes less `overlap_s` add up to `span_s`.",
        (
            _ATTEMPT,
            _RANK,
            Column("span_s", "float", "all of its time", "s"),
            *(Column(f"{name}_s", "float", doc, "s") for name, doc in CLASSES.items()),
            Column("overlap_s", "float", "counted in two classes, as clocks differ", "s"),
        ),
    ),
    "steps": Table(
        "One row per step. If no rank wrote a trace, one row per line of the log, which may be "
        "the mean of several steps. The times are those of the report.",
        (
            _ATTEMPT,
            _STEP,
            Column(
                "begin",
                "time",
                "end of the step before, or else begin on all ranks; missing if not known",
            ),
            Column(
                "took_s",
                "float",
                "time until the step ends on all ranks; mean over `num_steps`",
                "s",
            ),
            Column("num_steps", "int", "steps that the row is about, the last of which is `step`"),
            Column(
                "pipeline_s",
                "float",
                "from the first action to the last; mean over the replicas",
                "s",
            ),
            Column("bubble_share", "float", "part of `pipeline_s` without work", "0 to 1"),
            Column("is_repeated", "bool", "true if a later attempt did the step again"),
        ),
    ),
    "rank_steps": Table(
        "One row per rank and step of the traces. Of a step that ran twice in an attempt, the "
        "last run is kept. Work in the pause before a step is in its sums, not in `took_s`.",
        (
            _ATTEMPT,
            _RANK,
            _STAGE,
            _REPLICA,
            _STEP,
            Column("begin", "time", "begin of the step on rank 0's clock"),
            Column("took_s", "float", "begin to end", "s"),
            Column("first", "time", "begin of the rank's first action of the schedule"),
            Column("last", "time", "end of the rank's last action"),
            Column("wait_s", "float", "time that actions waited for messages", "s"),
            Column("work_s", "float", "actions worked", "s"),
            *(Column(name, "float", f"work: {doc}", "s") for name, doc in KIND_COLUMNS.values()),
        ),
    ),
    "events": Table(
        "One row per event of the traces: an action of the schedule, or what ran beside it. "
        "Without traces, the calls of Megatron's timers. Beyond two million, evenly spaced "
        "steps; an export has all.",
        (
            _ATTEMPT,
            _RANK,
            _REPLICA,
            _STAGE,
            _STEP,
            Column("microbatch", "int", "micro-batch; missing if the event belongs to none"),
            Column("kind", "text", "kind of the trace: `F`, `B`, `send`, ... (docs/report.md)"),
            Column(
                "what",
                "text",
                "name of the span, unique within its kind; a script names its own spans",
            ),
            Column("begin", "time", "begin on rank 0's clock; missing for Megatron's timers"),
            Column("begin_s", "float", "begin, counted from the job's first step", "s"),
            Column("wait_s", "float", "time that the action waits for its message", "s"),
            Column("work_s", "float", "work after the wait", "s"),
            Column("bytes", "int", "size of the message; 0 for other events", "bytes"),
        ),
    ),
    "ranks": Table(
        "One row per rank and attempt with a trace, counted steps or an exit.",
        (
            _ATTEMPT,
            _RANK,
            _NODE,
            _STAGE,
            _REPLICA,
            Column("device", "text", "device on which it computes"),
            Column("num_events", "int", "events in its trace"),
            Column(
                "clock_doubt_s", "float", "largest error of the rank's clock against rank 0's", "s"
            ),
            Column("steps", "int", "optimizer steps that were counted"),
            Column("steps_s", "float", "time of the steps without pauses", "s"),
            Column("pauses_s", "float", "pauses between steps, as for a checkpoint", "s"),
            Column("started", "time", "its process started"),
            Column("ended", "time", "when the rank's process ended; missing while it runs"),
            Column("exit_code", "int", "exit code of the rank's process; missing after a signal"),
            Column("signal", "int", "signal that ended it"),
            Column("was_stopped", "bool", "true if the rank was ended because another rank failed"),
            Column("last_error", "text", "last line of an error that the rank wrote"),
        ),
    ),
    "nodes": Table(
        "One row per node and attempt.",
        (
            _ATTEMPT,
            _NODE,
            Column("index", "int", "its place in the plan"),
            Column("group", "text", "its group of the conf"),
            Column("num_ranks", "int", "ranks that left a trace or an exit on the node"),
            Column("num_gpus", "int", "GPUs of its samples"),
            Column("gpu_name", "text", "their names"),
            Column("log_bytes", "int", "standard output and error", "bytes"),
        ),
    ),
    "gpus": Table(
        "One row per GPU and sample, at most 20 000 rows per node, evenly spread.",
        (
            _ATTEMPT,
            _NODE,
            Column("time", "time", "time of the sample; missing in gpustat's text without a date"),
            Column(
                "gpu", "text", "index of the GPU; `cpu` for the processors of a node without GPUs"
            ),
            Column("name", "text", "its model"),
            Column("temperature_c", "float", "temperature", "°C"),
            Column("busy_percent", "float", "time in which a kernel ran", "%"),
            Column("memory_used_mb", "float", "memory in use, by any process", "MiB"),
            Column("memory_total_mb", "float", "memory of the GPU", "MiB"),
            Column("power_w", "float", "power", "W"),
        ),
    ),
    "losses": Table(
        "One row per step that a log line reports: the figures that the training prints.",
        (
            _ATTEMPT,
            _NODE,
            _STEP,
            Column("time", "time", "when the line was written, or its own date"),
            Column("num_steps", "int", "steps that the training is to take"),
            Column("loss", "float", "the first loss in the line"),
            Column("grad_norm", "float", "norm of the gradients"),
            Column("learning_rate", "float", "learning rate"),
            Column("loss_scale", "float", "factor of fp16"),
            Column(
                "num_skipped", "int", "steps skipped since the line before, because of an overflow"
            ),
            Column("num_nan", "int", "steps with a NaN since the line before"),
            Column("consumed_samples", "int", "samples so far"),
            Column("global_batch_size", "int", "samples a step"),
            Column("step_s", "float", "step time, from the line or the times of lines", "s"),
            Column("samples_per_s", "float", "as printed", "1/s"),
            Column("tokens_per_s", "float", "as printed, for all devices or for one", "1/s"),
        ),
        more="all other numbers of the lines, by their labels: `lm loss`, `accuracy`",
    ),
    "memory": Table(
        "One row per memory line in Megatron's format, with torch's counts.",
        (
            _ATTEMPT,
            _NODE,
            _RANK,
            _STEP,
            Column("allocated_mb", "float", "of tensors", "MiB"),
            Column("max_allocated_mb", "float", "most so far", "MiB"),
            Column("reserved_mb", "float", "held by torch", "MiB"),
            Column("max_reserved_mb", "float", "most so far", "MiB"),
        ),
    ),
    "logs": Table(
        "One row per line that a rank wrote; of large logs the last megabytes. `vjob logs` and "
        "the files have all.",
        (
            _ATTEMPT,
            _NODE,
            Column("stream", "text", "`out` or `err`"),
            Column("offset", "int", "where in its file the line begins", "bytes"),
            Column("time", "time", "time of writing, accurate to a quarter of a second"),
            Column("rank", "int", "rank that wrote the line; missing if unknown"),
            Column("text", "text", "the line; of a progress bar its last state"),
        ),
    ),
    "history": Table(
        "One row per event in the life of the run; docs/events.md lists the kinds.",
        (
            Column("time", "time", "when it happened"),
            Column("kind", "text", "what happened"),
            _ATTEMPT,
            Column("facts", "text", "other facts about the event, as JSON"),
        ),
    ),
    "findings": Table(
        "One row per finding, in the order of the report.",
        (
            Column("sentence", "text", "the finding"),
            Column("evidence", "text", "where the finding's number comes from"),
            Column("key", "text", "key of the conf to change; empty if no key helps"),
            Column("cause", "text", "name of the problem; empty for a mere observation"),
            Column("lost_s", "float", "time that it costs, summed over all ranks", "s"),
            Column("cost", "text", "that time in hours, and its price if prices are given"),
        ),
    ),
    "timers": Table(
        "One row per Megatron timer and rank, over all logged steps.",
        (
            Column("timer", "text", "its name"),
            _RANK,
            Column("count", "int", "steps in which the timer was printed"),
            Column("sum_ms", "float", "their sum", "ms"),
            Column("max_ms", "float", "their most", "ms"),
        ),
    ),
    "timers_by_step": Table(
        "One row per timer of Megatron and step.",
        (
            Column("timer", "text", "its name"),
            _STEP,
            Column("min_ms", "float", "least of all ranks", "ms"),
            Column("max_ms", "float", "most of all ranks", "ms"),
        ),
    ),
    "not_read": Table(
        "One row per file that was not read completely.",
        (Column("file", "text", "its name"), Column("why", "text", "what is missing of the file")),
    ),
}


def fit_table(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with the table's columns and types; missing columns are filled in."""
    table = TABLES[name]
    unknown = pd.Series(None, index=frame.index, dtype=object)
    columns = {c.name: _convert(frame.get(c.name, unknown), c.type) for c in table.columns}
    if table.more:
        for label in frame.columns:
            if label not in columns:
                columns[str(label)] = _convert(frame[label], "float")
    return pd.DataFrame(columns, index=frame.index).reset_index(drop=True)


def _convert(values: pd.Series, kind: str) -> pd.Series:
    """Convert values to one of TYPES; values that cannot be converted become missing."""
    if str(values.dtype) == TYPES[kind]:
        return values
    if kind == "text":
        return values.map(lambda value: "" if _is_missing(value) else str(value)).astype("string")
    if kind == "time":
        return to_times(pd.to_numeric(values, errors="coerce"))
    if kind == "bool":
        return values.map(lambda value: value if isinstance(value, bool) else None).astype(
            "boolean"
        )
    if kind == "int" and values.dtype.kind in "iu":
        return values.astype("Int64")
    numbers = pd.to_numeric(values, errors="coerce").astype("float64")
    if kind == "float":
        return numbers
    whole = np.isfinite(numbers) & (numbers == np.rint(numbers)) & (numbers.abs() < 2**62)
    return numbers.where(whole, 0.0).astype("int64").astype("Int64").where(whole, pd.NA)


def _is_missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def to_times(seconds: pd.Series) -> pd.Series:
    """Convert seconds since 1970 to timestamps, rounded to a float's precision, a microsecond."""
    numbers = seconds.astype("float64")
    is_time = np.isfinite(numbers) & (numbers.abs() < 9e9)
    whole = np.rint(numbers.where(is_time, 0.0) * 1e6).astype("int64") * 1000
    return pd.to_datetime(whole, utc=True, unit="ns").where(is_time, pd.NaT).astype(TYPES["time"])


def add_seconds(zero_ns: int, seconds: pd.Series) -> pd.Series:
    """Return timestamps, exact to the nanosecond, from seconds after `zero_ns` since 1970."""
    numbers = seconds.astype("float64")
    is_time = np.isfinite(numbers) & (numbers.abs() < 9e9 - abs(zero_ns) / 1e9)
    whole = np.rint(numbers.where(is_time, 0.0) * 1e9).astype("int64") + zero_ns
    return pd.to_datetime(whole, utc=True, unit="ns").where(is_time, pd.NaT).astype(TYPES["time"])
