"""The tables of a job as people get them: their names, and each column's type, unit and meaning.

docs/notebook.md is made from this (`render_columns`), and every table is brought to it
(`fit_table`): a table has the same columns and types whatever the job left, and may be empty.
"""

from __future__ import annotations

import re
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
"""Words of the documents, and pandas' types. Not known is <NA>, NaN, NaT, or an empty text."""


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    type: str
    """A word of TYPES."""
    doc: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """One table."""

    doc: str
    columns: tuple[Column, ...]
    more: str = ""
    """What further columns hold, all of them numbers; empty where there are none."""


KIND_COLUMNS = {
    "F": ("forward_s", "forward"),
    "f": ("forward_only_s", "forward that keeps its inputs alone, to be recomputed"),
    "R": ("recompute_s", "recompute"),
    "B": ("backward_s", "backward"),
    "I": ("backward_inputs_s", "backward of inputs"),
    "W": ("backward_weights_s", "backward of weights"),
    "O": ("offload_s", "copies of graphs out of memory"),
    "L": ("load_s", "copies of graphs back"),
    "compute": ("compute_s", "compute of a script or a profile"),
    "send": ("send_s", "sends of messages"),
    "all-reduce": ("all_reduce_s", "sums over replicas"),
    "communication": ("communication_s", "communication of a script or a profile"),
    "optimizer": ("optimizer_s", "optimizer"),
    "checkpoint": ("checkpoint_s", "checkpoints"),
    "data": ("data_s", "fetching of data"),
    "evaluate": ("evaluate_s", "evaluation"),
    "memcpy": ("memcpy_s", "copies to and from a GPU, of a profile"),
    "idle": ("idle_s", "GPU without work, of a profile"),
    "other": ("other_s", "a script's spans with names of their own"),
}
"""By the trace's kind: the column of its work, and what it is."""

_ATTEMPT = Column("attempt", "text", "start of the ranks: `0`, `0.earlier-1`; empty without a run")
_STEP = Column("step", "int", "number of the step")
_RANK = Column("rank", "int", "number of the rank")
_NODE = Column("node", "text", "name of the node, as its files have it")
_STAGE = Column("stage", "int", "stage of the pipeline; the first where a rank has several")
_REPLICA = Column("replica", "int", "data-parallel copy")

TABLES = {
    "attempts": Table(
        "A row a start of the ranks, in order.",
        (
            _ATTEMPT,
            Column("started", "time", "first sign of it"),
            Column("ended", "time", "last sign of it, so far where it runs"),
            Column("first_step", "int", "first step that is known of it"),
            Column("last_step", "int", "last one"),
            Column("steps_s", "float", "in steps", "s"),
            Column("repeated_s", "float", "of that, in steps that a later attempt did again", "s"),
            Column("partition", "text", "layers of each stage, `3-4-5`"),
            Column("outcome", "text", "how it ended; empty while it runs, or if nothing says"),
        ),
    ),
    "accounting": Table(
        "A row a rank and attempt: all of its time, from the submit or the end of the attempt "
        "before, by what it was for. The classes less `overlap_s` add up to `span_s`.",
        (
            _ATTEMPT,
            _RANK,
            Column("span_s", "float", "all of its time", "s"),
            *(Column(f"{name}_s", "float", doc, "s") for name, doc in CLASSES.items()),
            Column("overlap_s", "float", "claimed by two classes: an error of clocks", "s"),
        ),
    ),
    "steps": Table(
        "A row a step. Where no rank wrote a trace, a row a line of the log, which may be the mean "
        "of several steps. The times are those of the report.",
        (
            _ATTEMPT,
            _STEP,
            Column("begin", "time", "the first rank began it; missing without a trace"),
            Column("took_s", "float", "of the slowest rank; the mean of `num_steps`", "s"),
            Column("num_steps", "int", "steps that the row is about, the last of which is `step`"),
            Column("pipeline_s", "float", "first action to last, the mean of replicas", "s"),
            Column("bubble_share", "float", "of `pipeline_s`: ranks without work", "0 to 1"),
            Column("is_repeated", "bool", "true if a later attempt did the step again"),
        ),
    ),
    "rank_steps": Table(
        "A row a rank and step of the traces. A step that ran twice in an attempt is there as it "
        "ran last.",
        (
            _ATTEMPT,
            _RANK,
            _STAGE,
            _REPLICA,
            _STEP,
            Column("begin", "time", "begin of the step on rank 0's clock"),
            Column("took_s", "float", "begin to end", "s"),
            Column("first", "time", "begin of its first action of the schedule"),
            Column("last", "time", "end of its last action"),
            Column("wait_s", "float", "actions waited for their messages", "s"),
            Column("work_s", "float", "actions worked", "s"),
            *(Column(name, "float", f"work: {doc}", "s") for name, doc in KIND_COLUMNS.values()),
        ),
    ),
    "events": Table(
        "A row an event of the traces: an action of the schedule, or what ran beside it. Without "
        "traces, the calls of Megatron's timers. Beyond two million, steps evenly apart; an "
        "export has all.",
        (
            _ATTEMPT,
            _RANK,
            _REPLICA,
            _STAGE,
            _STEP,
            Column("microbatch", "int", "micro-batch; missing where it is none's"),
            Column("kind", "text", "kind of the trace: `F`, `B`, `send`, ... (docs/report.md)"),
            Column("what", "text", "name within the kind; of a script's span its own"),
            Column("begin", "time", "begin on rank 0's clock; missing for Megatron's timers"),
            Column("begin_s", "float", "the same, since the job's first step", "s"),
            Column("wait_s", "float", "waits first, for its message", "s"),
            Column("work_s", "float", "then works", "s"),
            Column("bytes", "int", "size of what was sent; 0 for others", "bytes"),
        ),
    ),
    "ranks": Table(
        "A row a rank and attempt that left a trace, counted steps or an exit.",
        (
            _ATTEMPT,
            _RANK,
            _NODE,
            _STAGE,
            _REPLICA,
            Column("device", "text", "what it computes on"),
            Column("num_events", "int", "events in its trace"),
            Column("clock_doubt_s", "float", "most that its clock may be off rank 0's", "s"),
            Column("steps", "int", "optimizer steps that were counted"),
            Column("steps_s", "float", "what they took, pauses left out", "s"),
            Column("pauses_s", "float", "pauses between them, as a checkpoint or evaluation", "s"),
            Column("started", "time", "its process started"),
            Column("ended", "time", "its process ended; missing while it runs"),
            Column("exit_code", "int", "code it ended with; missing for a signal"),
            Column("signal", "int", "signal that ended it"),
            Column("was_stopped", "bool", "true if it was ended because another one failed"),
            Column("last_error", "text", "last line of an error that it wrote"),
        ),
    ),
    "nodes": Table(
        "A row a node and attempt.",
        (
            _ATTEMPT,
            _NODE,
            Column("index", "int", "its place in the plan"),
            Column("group", "text", "its group of the conf"),
            Column("num_ranks", "int", "ranks that left a trace or an exit there"),
            Column("num_gpus", "int", "GPUs of its samples"),
            Column("gpu_name", "text", "their names"),
            Column("log_bytes", "int", "standard output and error", "bytes"),
        ),
    ),
    "gpus": Table(
        "A row a GPU and sample, at most 20 000 rows a node, evenly spread.",
        (
            _ATTEMPT,
            _NODE,
            Column("time", "time", "when it was read; missing in gpustat's text without a date"),
            Column("gpu", "text", "its index; `cpu` for the processors of a node without GPUs"),
            Column("name", "text", "its model"),
            Column("temperature_c", "float", "temperature", "°C"),
            Column("busy_percent", "float", "time in which a kernel ran", "%"),
            Column("memory_used_mb", "float", "memory in use, by any process", "MiB"),
            Column("memory_total_mb", "float", "memory of the GPU", "MiB"),
            Column("power_w", "float", "power", "W"),
        ),
    ),
    "losses": Table(
        "A row a step about which a log has a line: what the training says of itself.",
        (
            _ATTEMPT,
            _NODE,
            _STEP,
            Column("time", "time", "when the line was written, or its own date"),
            Column("num_steps", "int", "steps that the training is to take"),
            Column("loss", "float", "the first loss of the line"),
            Column("grad_norm", "float", "norm of the gradients"),
            Column("learning_rate", "float", "learning rate"),
            Column("loss_scale", "float", "factor of fp16"),
            Column("num_skipped", "int", "steps skipped since the line before, for an overflow"),
            Column("num_nan", "int", "steps with a NaN since the line before"),
            Column("consumed_samples", "int", "samples so far"),
            Column("global_batch_size", "int", "samples a step"),
            Column("step_s", "float", "a step's time by the line or its writing", "s"),
            Column("samples_per_s", "float", "as printed", "1/s"),
            Column("tokens_per_s", "float", "as printed: of all devices or of one", "1/s"),
        ),
        more="whatever else the lines say in numbers, by its label there: `lm loss`, `accuracy`",
    ),
    "memory": Table(
        "A row a memory line of Megatron's kind in a log, as torch counts.",
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
        "A row a line that a rank wrote; of large logs the last megabytes. `vjob logs` and the "
        "files have all.",
        (
            _ATTEMPT,
            _NODE,
            Column("stream", "text", "`out` or `err`"),
            Column("offset", "int", "where in its file the line begins", "bytes"),
            Column("time", "time", "when it was written, within a quarter of a second"),
            Column("rank", "int", "rank that wrote it; missing where none did"),
            Column("text", "text", "the line; of a progress bar its last state"),
        ),
    ),
    "history": Table(
        "A row an event in the life of the run; docs/events.md lists the kinds.",
        (
            Column("time", "time", "when it happened"),
            Column("kind", "text", "what happened"),
            _ATTEMPT,
            Column("facts", "text", "all else that is known of it, as JSON"),
        ),
    ),
    "findings": Table(
        "A row a finding, in the order of the report.",
        (
            Column("sentence", "text", "the finding"),
            Column("evidence", "text", "where its number comes from"),
            Column("key", "text", "key of the conf to change; empty where none helps"),
            Column("cause", "text", "one word of what is wrong; empty for what is just said"),
            Column("lost_s", "float", "what it costs, of all ranks together", "s"),
            Column("cost", "text", "the same in hours, and in money where prices are given"),
        ),
    ),
    "timers": Table(
        "A row a timer of Megatron and rank, over all logged steps.",
        (
            Column("timer", "text", "its name"),
            _RANK,
            Column("count", "int", "steps in which it was printed"),
            Column("sum_ms", "float", "their sum", "ms"),
            Column("max_ms", "float", "their most", "ms"),
        ),
    ),
    "timers_by_step": Table(
        "A row a timer of Megatron and step.",
        (
            Column("timer", "text", "its name"),
            _STEP,
            Column("min_ms", "float", "least of all ranks", "ms"),
            Column("max_ms", "float", "most of all ranks", "ms"),
        ),
    ),
    "timer_calls": Table(
        "A row a call of a timer whose begin and end were printed; of up to four blocks a log.",
        (
            _NODE,
            _STEP,
            Column("timer", "text", "its name"),
            _RANK,
            Column("begin", "float", "as printed", "s"),
            Column("end", "float", "as printed", "s"),
        ),
    ),
    "phases": Table(
        "A row a dated line of Megatron, such as `[after training is done]`.",
        (
            _ATTEMPT,
            _NODE,
            Column("phase", "text", "its words"),
            Column(
                "time", "time", "its date, which names no zone: taken as of the machine that reads"
            ),
        ),
    ),
    "not_read": Table(
        "A row a file that was not read whole.",
        (Column("file", "text", "its name"), Column("why", "text", "what is missing of it")),
    ),
}


def fit_table(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The table's columns in their order and types; what the frame lacks is missing in all rows."""
    table = TABLES[name]
    unknown = pd.Series(None, index=frame.index, dtype=object)
    columns = {c.name: _convert(frame.get(c.name, unknown), c.type) for c in table.columns}
    if table.more:
        for label in frame.columns:
            if label not in columns:
                columns[str(label)] = _convert(frame[label], "float")
    return pd.DataFrame(columns, index=frame.index).reset_index(drop=True)


def _convert(values: pd.Series, kind: str) -> pd.Series:
    """Anything to one of TYPES; a value that is none of the type is missing."""
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
    """Seconds since 1970 as timestamps, to the microsecond that a float of today can hold."""
    numbers = seconds.astype("float64")
    is_time = np.isfinite(numbers) & (numbers.abs() < 9e9)
    whole = np.rint(numbers.where(is_time, 0.0) * 1e6).astype("int64") * 1000
    return pd.to_datetime(whole, utc=True, unit="ns").where(is_time, pd.NaT).astype(TYPES["time"])


def add_seconds(zero_ns: int, seconds: pd.Series) -> pd.Series:
    """Timestamps to the nanosecond: seconds of a job counted from `zero_ns` since 1970."""
    numbers = seconds.astype("float64")
    is_time = np.isfinite(numbers) & (numbers.abs() < 9e9 - abs(zero_ns) / 1e9)
    whole = np.rint(numbers.where(is_time, 0.0) * 1e9).astype("int64") + zero_ns
    return pd.to_datetime(whole, utc=True, unit="ns").where(is_time, pd.NaT).astype(TYPES["time"])


def render_columns() -> str:
    """Every table with its columns as Markdown, for docs/notebook.md."""
    lines = ["| table | a row is | columns |", "|---|---|---|"]
    for name, table in TABLES.items():
        columns = ", ".join(f"`{column.name}`" for column in table.columns)
        more = f", and {table.more}" if table.more else ""
        row = re.split(r"[.:;] |\.$", table.doc)[0].removeprefix("A row ")
        lines.append(f"| `{name}` | {row} | {columns}{more} |")
    return "\n".join(lines) + "\n"
