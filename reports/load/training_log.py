"""Read the training lines of each node's standard output, in one pass over each log.

Only lines with a known word are parsed, so gigabytes of other lines cost little. Timers are summed
by rank and by step. The lists of begins and ends that the original Varuna's logs print for each
call are kept for four blocks of a log: the first, the slowest, and the last two.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.records.logs.literals import find_marks
from varuna_core.records.logs.progress import (
    MARKS,
    NO_STEP,
    clean,
    join_lines,
    parse_progress,
    parse_time,
    split_tag,
)
from varuna_core.records.logs.steps import LEARNED, LINE, StepReader, StepReading
from varuna_core.records.logs.tables import Tables
from varuna_core.records.logs.times import BAR_SLACK_S, MARK_S, MarkReader, count_left_out
from varuna_core.records.logs.training_log import (
    CHECKPOINT,
    EVALUATION,
    ITERATION_MARK,
    JOB_INFO,
    MEMORY_MARK,
    PHASE_MARKS,
    TIMER_CALLS,
    TIMER_NUMBERS,
    TIMERS_HEAD,
    TIMERS_MARK,
    Iteration,
    leave_out_first,
    parse_job_info,
    parse_mark,
    parse_memory,
    parse_validation,
)
from vjob.reports.load.blocks import MOST_ROWS, BlockReader, Thinned
from vjob.reports.load.trace_lines import Column

LOG_BLOCK_BYTES = 1 << 23
LARGEST_TIMERS = 1 << 26
"""Bytes read of one step's timers; the rest is cut."""
_JOB_INFO_MARK = b"NODE_RANK: "
_JOB_INFO_BYTES = 4096
_HEAD = re.compile(rb"iteration +\d+/")
"""The beginning of a Megatron line, whole or torn."""
PHASES = ("checkpoint_s", "evaluate_s", "pause_s")
RARE = ("samples_per_s", "tokens_per_s")
"""Columns that exist only if the log has them. A further one is `timed`: the number of steps over
which `time_ms` is a mean, if that follows from the times of writing."""
_NO_COLUMNS = (
    "losses", "others", "is_bar", "is_named", "epoch", "num_epochs", "is_from_zero", "is_least",
    "unit", "evaluations",
)  # fmt: skip
COLUMNS = tuple(
    name for name in Iteration.__dataclass_fields__ if name not in (*RARE, *_NO_COLUMNS)
)
_IDLE_MARK = b"nothing to do: "
_IDLE = re.compile(rb"^(?:\d+: )?(nothing to do: train\.steps is [^\r\n]{1,200})", re.MULTILINE)
"""The line that varuna_core/programs/lines.py prints if no steps are left."""
ACTION_TIMERS = (b"forward-compute", b"backward-compute")
_WORKS = ["attempt", "step", "rank", "work_s"]
_CALLS = ["attempt", "node", "step", "num_steps", "timer", "rank", "begin", "end"]
_MOST_IN_VAIN = 2000
"""Limit for lines with another trainer's words that are not about steps: once there are this many
more than ten times the lines about steps, the rest of the log is not searched for them."""


@dataclass(kw_only=True)
class _Timers:
    """The lines of one step's timers."""

    step: int
    time_ms: float
    num_steps: int
    """Steps since the previous line; 0 means not known."""
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


@dataclass(kw_only=True)
class LogTables:
    """Rows and settings read from all logs of a job."""

    iterations: Thinned = field(default_factory=Thinned)
    memory: Thinned = field(default_factory=Thinned)
    evaluations: Thinned = field(default_factory=Thinned)
    """Metrics of evaluations, with one row for each."""
    job_info: dict[str, str] = field(default_factory=dict)
    """Settings by name; if there are several values, the first."""
    partitions: dict[str, str] = field(default_factory=dict)
    """The partition printed by each attempt."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """For each log, the times at which its first line about a step and its last line about steps,
    saves or evaluations were written, the error of the time between them, and PHASES: the seconds
    of saves and evaluations, from their own lines or from the lines around them."""
    calls: list[pd.DataFrame] = field(default_factory=list)
    works: dict[tuple[str, int, int], dict[str, float]] = field(default_factory=dict)
    """Mean seconds of a step since the previous line, by (attempt, step, rank) and
    ACTION_TIMERS."""
    settings: dict[tuple[str, str], list[dict[str, str]]] = field(default_factory=dict)
    """For (attempt, node), each block of settings in its log."""
    timers_by_rank: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """For (timer, rank): count, sum and maximum, in ms."""
    timers_by_step: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """For (timer, step): minimum and maximum over all ranks, in ms."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of lines in each file that begin like a line of vjob but cannot be parsed."""
    nothing_to_do: str = ""
    """The line of a program that found all its steps done."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Bytes that each log lacks according to a note in the log itself, by file."""

    def build_tables(self) -> dict[str, pd.DataFrame]:
        by_rank = [
            {"timer": timer, "rank": rank, "count": count, "sum_ms": total, "max_ms": most}
            for (timer, rank), (count, total, most) in self.timers_by_rank.items()
        ]
        by_step = [
            {"timer": timer, "step": step, "min_ms": least, "max_ms": most}
            for (timer, step), (least, most) in self.timers_by_step.items()
        ]
        return {
            "iterations": pd.DataFrame(self.iterations.rows),
            "memory": pd.DataFrame(self.memory.rows),
            "evaluations": _drop_repeated(
                pd.DataFrame(self.evaluations.rows, columns=_EVALUATIONS)
            ),
            "spans": pd.DataFrame(
                self.spans,
                columns=["attempt", "node", "first_s", "last_s", "slack_s", *PHASES],
            ),
            "rank_works": pd.DataFrame(self._list_works(), columns=_WORKS),
            "timers_by_rank": pd.DataFrame(by_rank),
            "timers_by_step": pd.DataFrame(by_step),
            "timer_calls": pd.concat(self.calls, ignore_index=True)
            if self.calls
            else pd.DataFrame(columns=_CALLS),
        }

    def _list_works(self) -> list[tuple[str, int, int, float]]:
        return [
            (*key, sum(seconds.values()))
            for key, seconds in self.works.items()
            if len(seconds) == len(ACTION_TIMERS)
        ]


class LogReader:
    """Reader of one log. `close` adds rows for steps that only progress bars show, and for losses
    without a step."""

    def __init__(
        self,
        tables: LogTables,
        attempt: str,
        node: str,
        path: Path,
        pattern: re.Pattern[str] | None = None,
    ) -> None:
        """`pattern` is the user's regular expression for lines about steps."""
        self.tables, self.attempt, self.node, self.path = tables, attempt, node, path
        self.has_steps = False
        """True once a line was about a step; progress bars are then ignored."""
        self.bars = Thinned()
        """Iterations from progress bars, with the times at which their lines were written."""
        self.losses = Thinned()
        """Iterations from lines without a step, with the times at which these were written."""
        self._step, self._time_ms = -1, 0.0
        self._opening: str | None = None
        """The first line of a start, kept until the second one is read."""
        self._num_steps = 0
        """Steps between the last two lines; 0 means not known."""
        self._open: _Timers | None = None
        self._kept: dict[str, _Timers] = {}
        self._slowest_ms = -1.0
        self._skipped = 0
        self._is_megatron = False
        self._held: Iteration | None = None
        """Another trainer's iteration, held until no more lines about its step follow."""
        self._line_at: float | None = None
        """The time at which the current line was written."""
        self._held_at: float | None = None
        self._num_timed: int | None = None
        self._pause_s = 0.0
        """Time between lines around a checkpoint or an evaluation whose length no line gives."""
        self._bar: Iteration | None = None
        self._evaluated: Mapping[str, Mapping[str, float]] = {}
        self._unit = "step"
        self._in_vain = 0
        self._pattern, self._steps = pattern, StepReader(pattern)
        self._marks = MARKS if pattern is None else find_marks(pattern.pattern)
        self._offset = 0
        """Offset in the file of the block being read."""
        self._times: MarkReader | None = None
        self._has_times = False
        """True if lines give the durations of steps, so times of writing are not needed."""
        self._read_to = 0
        """End, within the block, of the latest line about a step."""
        self._places: list[int] = []
        """Places in the file of the first and the last line about a step."""
        self._phases: list[tuple[int, str, bool]] = []
        """Places of lines about saves and evaluations, and True if one begins there."""
        self._is_timed = path.with_suffix(".times").exists()

    def read(self) -> None:
        blocks = BlockReader(self.path, LOG_BLOCK_BYTES)
        for offset, block in blocks:
            self._note_cut(block)
            self._offset = offset
            self._read_block(block)
            self._find_phases(block)
            if _IDLE_MARK in block and (idle := _IDLE.search(block)) is not None:
                self.tables.nothing_to_do = idle[1].decode("utf-8", "replace")
            if not self._is_megatron:
                self._read_others(offset, block)
        self._flush()
        self._close_timers()
        self._add_span()
        kept = {id(timers): timers for timers in self._kept.values()}
        for timers in kept.values():
            self._read_calls(timers)
        skipped = self._skipped + blocks.skipped
        if skipped:
            self.tables.skipped[f"{self.attempt}/{self.path.name}".lstrip("/")] = skipped

    def read_steps(self) -> None:
        """Read only lines about steps, for standard error, whose other lines are not records."""
        for offset, block in BlockReader(self.path, LOG_BLOCK_BYTES):
            self._note_cut(block)
            self._read_others(offset, block)
        self._flush()
        self._add_span()

    def _note_place(self, place: int) -> None:
        self._places = [*self._places[:1], place]

    def _find_phases(self, block: bytes) -> None:
        """Find saves and evaluations, which are timed only by when their lines were written."""
        if not self._is_timed or len(self._phases) > MOST_ROWS:
            return
        seen = -1
        for begin, end in _find_lines(block, PHASE_MARKS):
            if begin > seen:
                seen = begin
                text = block[begin : min(end, begin + 4096)].decode("utf-8", "replace")
                if (found := parse_mark(split_tag(text)[1])) is not None:
                    self._phases.append((self._offset + begin, *found))

    def _add_span(self) -> None:
        """Record when the first and last steps were printed, if the log tells."""
        if not self._places:
            return
        marks = MarkReader(self.path.with_suffix(".times"), is_err=self.path.suffix == ".err")
        first = self._places[0]
        phases = [phase for phase in sorted(self._phases) if phase[0] >= first]
        last = max(self._places[-1], phases[-1][0] if phases else 0)
        found: dict[int, float] = {}
        slack: dict[int, float] = {}
        for place in sorted({first, last, *(place for place, _, _ in phases)}):
            at, slack[place] = marks.find_exact(place)
            found[place] = float("nan") if at is None else at
        took = {CHECKPOINT: 0.0, EVALUATION: 0.0}
        begun: dict[str, float] = {}
        for place, name, begins in phases:
            if begins:
                begun[name] = found[place]
            elif name in begun and name in took:
                seconds = found[place] - begun.pop(name)
                took[name] += max(seconds, 0.0) if seconds == seconds else 0.0
        self.tables.spans.append(
            {
                "attempt": self.attempt,
                "node": self.node,
                "first_s": found[first],
                "last_s": found[last],
                "slack_s": slack[first] + slack[last],
                "checkpoint_s": took[CHECKPOINT],
                "evaluate_s": took[EVALUATION],
                "pause_s": max(self._pause_s - sum(took.values()), 0.0),
            }
        )

    def _note_cut(self, block: bytes) -> None:
        if lost := count_left_out(block):
            self.tables.left_out[f"{self.attempt}/{self.path.name}".lstrip("/")] = lost

    def _read_block(self, block: bytes) -> None:
        start = seen = 0
        for place, mark in _find_marks(block):
            if place < seen and mark == ITERATION_MARK:  # `elapsed time per iteration (ms)`
                continue
            begin = block.rfind(b"\n", 0, place) + 1
            end = block.find(b"\n", place)
            end = len(block) if end < 0 else end
            line = block[begin : min(end, begin + 65536)]
            if mark == TIMERS_MARK:
                if not TIMERS_HEAD.search(line):
                    continue
                self._add(block[start:begin])
                self._close_timers()
                self._open = _Timers(
                    step=self._step, time_ms=self._time_ms, num_steps=self._num_steps
                )
                start = end
            elif mark == ITERATION_MARK:
                seen = end
                if self._read_iteration(line, self._offset + begin):
                    self._note_place(self._offset + begin)
                    self._add(block[start:begin])
                    self._close_timers()
                    start = end
            elif mark == _JOB_INFO_MARK:
                self._read_job_info(block[begin : begin + _JOB_INFO_BYTES])
            else:
                self._read_memory(line.decode("utf-8", "replace"))
        self._add(block[start:])

    def _read_iteration(self, line: bytes, place: int) -> bool:
        """Read a line about a step; return False if the line is about something else."""
        if self._pattern is not None:
            return False
        text = line.decode("utf-8", "replace")
        if self._is_megatron and (validation := parse_validation(text)) is not None:
            at, _ = self._find_written(text, place)
            self._add_evaluation(validation[0], {validation[1]: validation[2]}, at)
        if not _HEAD.search(line):
            return False
        found = parse_progress(text)
        if found is None:
            self._skipped += 1
            return False
        self._find_time(text, place)
        self._is_megatron = self.has_steps = True
        self._num_steps = max(0, found.step - self._step) if self._step >= 0 else 0
        if self._step < 0 or found.step < self._step:
            self._opening = text
        elif self._opening is not None:
            found, self._opening = leave_out_first(self._opening, text, found), None
        if found.step <= self._step:  # another start: its calls alone are looked at
            self._close_timers()
            self._kept, self._slowest_ms = {}, -1.0
        self._step, self._time_ms = found.step, found.time_ms or 0.0
        self._add_row(found, self._line_at)
        return True

    def _read_others(self, offset: int, block: bytes) -> None:
        """Read lines of trainers whose format differs from Megatron's.

        If a log has Megatron's lines, these lines are not searched for: a search for every other
        trainer's words would take longer than all else.
        """
        if self._in_vain > _MOST_IN_VAIN:
            return
        self._read_to = 0
        lines = _find_lines(block, self._marks)
        if self._pattern is None and (self._steps.has_table or _has_header(block, lines)):
            lines = sorted({*lines, *(row.span() for row in _ROW.finditer(block))})
        for begin, end in lines:
            if self._in_vain > _MOST_IN_VAIN:
                return
            text = block[begin : min(end, begin + 65536)].decode("utf-8", "replace")
            text = text.rstrip("\r").rpartition("\r")[2]
            reading = self._steps.read(text, *self._find_time(text, offset + begin))
            found = self._steps.evaluated
            if found is not None and not (found.is_bar and found.evaluations == self._evaluated):
                self._evaluated = found.evaluations  # a bar shows the same ones for long
                is_own = found.step != NO_STEP and found.epoch is None and not found.is_bar
                step = found.step if is_own else self._steps.last
                unit = self._unit if reading is None else reading.line.unit
                is_own = is_own or reading is not None
                self._add_evaluation(step, found.evaluations, self._line_at, unit, is_own)
            if self._pattern is None:
                self._in_vain += 1 if reading is None else -10
            if reading is not None:
                self._unit = reading.line.unit
                # Where lines have times, one without is no step: an evaluation after the last.
                if reading.line.time_ms is not None or not self._has_times:
                    self._note_place(offset + begin)
                between, written = block[self._read_to : begin], self._line_at
                for one in reading.earlier:
                    self._line_at = one.at
                    self._note(one, between)
                self._line_at = written
                self._note(reading, between)
                self._read_to = end

    def _add_evaluation(
        self,
        step: int | None,
        metrics: Mapping[str, Mapping[str, float]],
        at: float | None,
        unit: str = "step",
        is_own: bool = True,
    ) -> None:
        """Record metrics of an evaluation by split; `unit` is `epoch` or `sample` where
        `step` is one. Without `is_own` the step is that of an earlier line."""
        row = {
            "attempt": self.attempt, "node": self.node, "step": step, "unit": unit, "written": at,
            "is_own": is_own,
        }  # fmt: skip
        for split, named in metrics.items():
            for metric, value in named.items():
                self.tables.evaluations.append(
                    {**row, "split": split, "metric": metric, "value": value}
                )

    def _find_time(self, text: str, place: int) -> tuple[float | None, float]:
        """Return the earliest time at which a line was written, and its possible delay."""
        at, slack_s = self._find_written(text, place)
        self._line_at = at
        return (None, 0.0) if self._has_times else (at, slack_s)

    def _find_written(self, text: str, place: int) -> tuple[float | None, float]:
        if self._times is None:
            is_err = self.path.suffix == ".err"
            self._times = MarkReader(self.path.with_suffix(".times"), is_err=is_err)
        at, slack_s = self._times.find_exact(place)
        if at is None:
            return parse_time(split_tag(text)[1], self._year), MARK_S
        return at, max(slack_s, BAR_SLACK_S) if "%|" in text else slack_s

    @cached_property
    def _year(self) -> int:
        try:
            return time.gmtime(self.path.stat().st_mtime).tm_year
        except OSError:
            return time.gmtime().tm_year

    def _note(self, reading: StepReading, between: bytes) -> None:
        """Record a line about a step; `between` is the text since the previous such line."""
        found = reading.line
        if self._steps.is_slow(reading) and any(mark in between for mark in PHASE_MARKS):
            self._pause_s += (found.time_ms or 0.0) * (reading.num_timed or 1) / 1000
            found = replace(found, time_ms=None)
        if found.step == NO_STEP:
            if self._bar is None:
                self.losses.append({"line": found, "at": reading.at})
            else:  # its step is that of the bar above
                self._hold(join_lines(self._bar, replace(found, step=self._bar.step)), None)
        elif found.unit != "step":  # an epoch is no step
            if "train" not in self._evaluated:
                self._add_evaluation(found.step, {"train": found.losses}, reading.at, found.unit)
        elif reading.strength < LINE and reading.strength != LEARNED:
            self._bar = found
            self.bars.append({"line": found, "at": reading.at, "timed": reading.num_timed})
        else:
            self.has_steps = True
            self._has_times = reading.num_timed is None and found.time_ms is not None
            self._hold(found, reading.num_timed)

    def close(self, others: Iterable[LogReader] = ()) -> None:
        """Add rows from bars of this log or the node's `others`, with the losses between them."""
        sources = [self, *others]
        source = next((reader for reader in sources if reader.bars.rows), None)
        if source is None or any(reader.has_steps for reader in sources):
            return
        source._steps.trains = any(reader._steps.trains for reader in sources)
        if source._steps.doubt is not None:
            return
        rows = source.bars.rows
        by_step: dict[int, tuple[Iteration, float | None, int | None]] = {}
        for row in rows:
            by_step[row["line"].step] = row["line"], row["at"], row["timed"]
        known = [row for row in rows if row["at"] is not None]
        ats = [row["at"] for row in known]
        steps = [row["line"].step for row in known]
        for row in (row for reader in sources for row in reader.losses.rows):
            # Before the first and after the last state of a bar the step is not known.
            if known and row["at"] is not None and ats[0] <= row["at"] + MARK_S <= ats[-1] + 1:
                step = round(float(np.interp(row["at"], ats, steps)))
                line = replace(row["line"], step=step)
                bar, at, timed = by_step.get(step, (line, row["at"], None))
                by_step[step] = join_lines(bar, line), at, timed
        for step in sorted(by_step):
            self._add_row(*by_step[step])

    def _hold(self, found: Iteration, num_timed: int | None) -> None:
        """Merge several lines about one step into one row."""
        if self._held is not None and self._held.step == found.step:
            self._held = join_lines(self._held, found)
            self._num_timed = num_timed or self._num_timed
            return
        self._flush()
        self._held, self._held_at, self._num_timed = found, self._line_at, num_timed

    def _flush(self) -> None:
        if self._held is not None:
            self._add_row(self._held, self._held_at, self._num_timed)
            self._held = None

    def _add_row(
        self, found: Iteration, written: float | None, num_timed: int | None = None
    ) -> None:
        row = {name: getattr(found, name) for name in COLUMNS}
        row |= {"attempt": self.attempt, "node": self.node, "loss": found.loss}
        row["written"] = written
        if found.samples_per_s is not None:
            row["samples_per_s"] = found.samples_per_s
        if found.is_least:
            row["is_least"] = True
        if num_timed is not None:
            row["timed"] = num_timed
        if found.tokens_per_s is not None:
            row["tokens_per_s"] = found.tokens_per_s
        for label, value in list({**found.losses, **found.others}.items())[:16]:
            row.setdefault(label, value)  # some print a label with the name of a column
        self.tables.iterations.append(row)

    def _read_memory(self, text: str) -> None:
        memory = parse_memory(text)
        if memory is None:
            self._skipped += "(after " in text
        else:
            row = {name: getattr(memory, name) for name in memory.__dataclass_fields__}
            self.tables.memory.append({"attempt": self.attempt, "node": self.node, **row})

    def _read_job_info(self, text: bytes) -> None:
        own: dict[str, str] = {}
        self.tables.settings.setdefault((self.attempt, self.node), []).append(own)
        for line in text.decode("utf-8", "replace").splitlines()[: 2 * len(JOB_INFO)]:
            found = parse_job_info(line)
            if found is not None:
                name, value = found
                own.setdefault(name, value)
                self.tables.job_info.setdefault(name, value)
                if name == "PARTITION":
                    self.tables.partitions.setdefault(self.attempt, value)

    # Timers.

    def _add(self, piece: bytes) -> None:
        if self._open is not None and piece:
            self._open.pieces.append(piece)
            self._open.size += len(piece)
            if self._open.size > LARGEST_TIMERS:
                self._close_timers()

    def _close_timers(self) -> None:
        timers, self._open = self._open, None
        if timers is None:
            return
        data = b"".join((b"\n", *timers.pieces, b"\n"))
        timers.pieces = [data]
        self._add_up(timers.step, data)
        if b" time lst:" not in data:
            return
        self._kept["before"] = self._kept.get("last", timers)
        self._kept["last"] = timers
        if "first" not in self._kept:
            self._kept["first"] = timers
        elif timers.time_ms > self._slowest_ms:
            self._slowest_ms = timers.time_ms
            self._kept["slowest"] = timers

    def _add_up(self, step: int, data: bytes) -> None:
        by_rank, by_step = self.tables.timers_by_rank, self.tables.timers_by_step
        name, values = "", list[float]()
        is_full = False

        def add(timer: str, least: float, most: float) -> None:
            seen = by_step.setdefault((timer, step), [least, most])
            seen[0], seen[1] = min(seen[0], least), max(seen[1], most)

        for heading, rank, value, other, low, high, alone in TIMER_NUMBERS.findall(data):
            if rank:
                ms = _read_float(value) if name and not is_full else None
                if ms is None:
                    self._skipped += 1
                    continue
                values.append(ms)
                if name.encode() in ACTION_TIMERS:
                    key = (self.attempt, step, int(rank))
                    self.tables.works.setdefault(key, {})[name] = ms / 1000
                found = by_rank.get((name, int(rank)))
                if found is None:
                    by_rank[name, int(rank)] = [1, ms, max(0.0, ms)]
                else:
                    found[0] += 1
                    found[1] += ms
                    found[2] = max(found[2], ms)
                continue
            if values:
                add(name, min(values), max(values))
                values = []
            is_full = len(by_step) > MOST_ROWS or len(by_rank) > MOST_ROWS
            if heading:
                name = heading.decode()
                continue
            least, most = _read_float(low or alone), _read_float(high or alone)
            if is_full or least is None or most is None:
                self._skipped += 1
            else:
                add(other.decode(), least, most)
        if values:
            add(name, min(values), max(values))

    def _read_calls(self, timers: _Timers) -> None:
        """Read the lists of begins and ends, with a row for each call."""
        name, rank, starts = "", -1, np.empty(0)
        heads: list[tuple[str, int]] = []
        calls: list[tuple[Column, Column]] = []
        for match in TIMER_CALLS.finditer(timers.pieces[0]):
            named, word, times = match.group(2), match.group(3), match.group(4)
            if not named:
                rank, starts = int(match.group(1)), np.empty(0)
            elif word == b"start":
                name, starts = named.decode(), _read_floats(times)
            else:
                ends = _read_floats(times)
                if named.decode() != name or rank < 0:
                    self._skipped += 1
                    continue
                count = min(len(starts), len(ends))  # a call that goes on has no end yet
                heads += [(name, rank)] * count
                calls.append((starts[:count], ends[:count]))
        if heads:
            columns = {
                "attempt": self.attempt,
                "node": self.node,
                "step": timers.step,
                "num_steps": timers.num_steps,
                "timer": [name for name, _ in heads],
                "rank": [rank for _, rank in heads],
                "begin": np.concatenate([begin for begin, _ in calls]),
                "end": np.concatenate([end for _, end in calls]),
            }
            self.tables.calls.append(pd.DataFrame(columns))


_EVALUATIONS = ["attempt", "node", "step", "unit", "written", "is_own", "split", "metric", "value"]


def _drop_repeated(table: pd.DataFrame) -> pd.DataFrame:
    """Drop rows that several ranks or bars repeat. A row without a step number repeats an earlier
    one of equal value, as a line at the end that names the best evaluation once more."""
    names = ["attempt", "split", "metric"]
    is_stepless = table["step"].isna() & table.duplicated([*names, "value"])
    return table[~(is_stepless | (table.duplicated([*names, "step"]) & table["step"].notna()))]


def _find_lines(block: bytes, marks: Collection[bytes]) -> list[tuple[int, int]]:
    """Return begin and end of the lines that contain one of the marks, in order; of all lines if
    there are no marks."""
    if not marks:
        ends = list(accumulate(len(line) + 1 for line in block.split(b"\n")))
        return [(begin, end - 1) for begin, end in zip([0, *ends], ends, strict=False)]
    found = set()
    for mark in marks:
        place = block.find(mark)
        while place >= 0:
            begin, end = block.rfind(b"\n", 0, place) + 1, block.find(b"\n", place)
            end = len(block) if end < 0 else end
            found.add((begin, end))
            place = block.find(mark, end)
    return sorted(found)


_ROW = re.compile(rb"^[\d \t.,:|%+\-/eE\x1b[\];mskKMG]{3,400}$", re.MULTILINE)
"""A row of a table, which has none of the marks."""
_MOST_HEADS = 32


def _has_header(block: bytes, lines: list[tuple[int, int]]) -> bool:
    """Return True if one of the first lines names the columns of a table."""
    texts = (block[begin:end].decode("utf-8", "replace") for begin, end in lines[:_MOST_HEADS])
    return any(Tables().read_header(split_tag(clean(text))[1]) for text in texts)


def _find_marks(block: bytes) -> list[tuple[int, bytes]]:
    """Return the positions of lines with known words, in order."""
    found = []
    for mark in (ITERATION_MARK, MEMORY_MARK, TIMERS_MARK, _JOB_INFO_MARK):
        place = block.find(mark)
        while place >= 0:
            found.append((place, mark))
            place = block.find(mark, place + len(mark))
    return sorted(found)


def _read_float(word: bytes) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _read_floats(text: bytes) -> Column:
    values = []
    for word in text.split():
        value = _read_float(word)
        if value is None:
            break  # torn
        values.append(value)
    return np.array(values)
