"""Points of an attempt: numbers with a step, read from the logs of its nodes as they grow.

    <node>.out, .err    steps, validation, memory     streams that are ordered by step
    <node>.gpu.jsonl    GPUs, processors              ordered by time, at the step of that moment
    events*.jsonl       how many of each kind         likewise

Ranks that print lines about steps are on the first node (scripts) or the last one (pipelines), so
no others are read for them.
"""

from __future__ import annotations

import heapq
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from varuna_core.records.files import as_number, parse_object, read_json
from varuna_core.records.logs.progress import NO_STEP, read_pattern, split_tag
from varuna_core.records.logs.steps import StepReader, StepReading
from varuna_core.records.logs.tail import Follower
from varuna_core.records.logs.times import MarkReader
from varuna_core.records.logs.training_log import (
    Iteration,
    parse_mark,
    parse_memory,
)
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import VARIABLES, read_training

STEPS, LOSSES, VALIDATION, MEMORY = "steps", "losses", "validation", "memory"
SAMPLES, EVENTS = "samples", "events"
BY_STEP = (STEPS, LOSSES, VALIDATION, MEMORY)
"""Streams that are ordered by step, in which each step counts once; other streams are ordered by
time."""
MOST_NODES = 16
"""Most nodes whose samples are read."""
LOG_BYTES, FILE_BYTES = 256 * 1024, 64 * 1024
"""Bytes that are read at a time from a log, and from a file of samples or events."""
PIECE = 10_000
"""Number of values after which the points read so far are returned."""
NODE_FIELDS = {"cpu_percent": "cpu_percent", "memory_used_mb": "memory_used_mb"}
GPU_FIELDS = {
    "utilization": "utilization_percent",
    "memory_used_mb": "memory_used_mb",
    "power_w": "power_w",
    "temperature": "temperature_c",
}


@dataclass(frozen=True)
class Point:
    """Metrics of one moment, to be sent to the tracking tools."""

    stream: str
    step: int
    time: float
    values: Dict[str, float]
    attempt: int
    opened: float
    """Time at which the attempt was opened; an attempt that was set aside and opened again has
    another time."""
    place: float
    """Place of the point in its stream: it rises within an attempt, and is the same when the
    attempt is read again. Several points of one step or moment have different places."""
    text: str = ""
    """Description of an event; empty for other points."""

    @property
    def is_by_step(self) -> bool:
        return self.stream.partition(" ")[0] in BY_STEP


@dataclass(frozen=True)
class LogReading:
    """Numbers and step of one line of a log."""

    stream: str
    step: int
    at: Optional[float]
    """Time at which the line was written; None if not known."""
    values: Dict[str, float]
    reading: Optional[StepReading] = None
    """The step that the line reports; None if the line is not about a step."""


class LogPoints:
    """Reader of the points in one .out or .err log."""

    def __init__(
        self, path: Path, times: Path, pattern: Any, *, is_err: bool, saved: Any = None
    ) -> None:
        self.steps = StepReader(pattern)
        self._follower = Follower(path, read_bytes=LOG_BYTES)
        self._times = MarkReader(times, is_err=is_err, state=saved and saved["times"])
        if saved is not None:
            self._follower.go_on(saved["log"])
            self.steps.go_on(saved["steps"])

    def save(self) -> Dict[str, Any]:
        return {
            "log": self._follower.save(),
            "times": self._times.save(),
            "steps": self.steps.save(),
        }

    def read(self, *, final: bool = False) -> Iterator[LogReading]:
        """Read the new lines of the log; yield numbers and step of each line that has some."""
        self._times.look()
        for place, text in self._follower.read_placed(final=final):
            yield from self._parse(text, *self._times.find_exact(place))

    def _parse(self, text: str, at: Optional[float], slack_s: float) -> Iterator[LogReading]:
        if parse_mark(text) is not None:
            self.steps.pause()
        reading = self.steps.read(text, at, slack_s)
        if reading is not None:
            for one in (*reading.earlier, reading):
                yield LogReading(STEPS, one.line.step, one.at, {}, one)
        evaluated = self.steps.evaluated
        if evaluated is not None and not evaluated.is_bar:  # which shows the last ones for long
            step = self.steps.last if evaluated.step == NO_STEP else evaluated.step
            yield LogReading(VALIDATION, step or 0, at, _name_metrics(evaluated))
        if reading is not None:
            return
        memory = parse_memory(text) if "memory (MB)" in text else None
        if memory is not None:
            rank = memory.rank if memory.rank is not None else split_tag(text)[0] or 0
            found = {"max_allocated": memory.max_allocated, "allocated": memory.allocated}
            values = {
                f"memory/rank{rank}/{name}_mb": value
                for name, value in found.items()
                if value is not None
            }
            yield LogReading(f"{MEMORY} {rank}", memory.step, at, values)


def _name_metrics(line: Iteration) -> Dict[str, float]:
    """Name the metrics of an evaluation: `validation/loss`, `test/acc`."""
    return {
        f"{'validation' if split == 'val' else split}/{name}": value
        for split, metrics in line.evaluations.items()
        for name, value in metrics.items()
        if split != "train"
    }


Item = Tuple[float, str, Any]
"""A time, the name of a log or host, and what was read there: a LogReading, a sample or an
event."""


class AttemptPoints:
    """Points of one attempt. Each call reads the new lines, and returns about PIECE values at
    most."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        attempt: AttemptFolder,
        opened: float,
        *,
        is_last: bool,
        saved: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """`is_last` is True for the run's last attempt, with which the run's events are read.
        `saved` is the saved position of another reader of this attempt, from which this reader
        continues."""
        self._run, self._plan, self._attempt, self.opened = run, plan, attempt, opened
        self._is_last = is_last
        self._pattern = read_pattern(plan.progress)
        self._batch, self._sequence = _find_sizes(run, plan, attempt)
        self._saved = saved or {}
        self._logs: Dict[str, LogPoints] = {}
        self._samples: Dict[str, Follower] = {}
        self._events: Dict[str, Follower] = {}
        self._chosen: str = self._saved.get("chosen", "")
        """Name of the log whose steps count."""
        self._step: int = self._saved.get("step", 0)
        self._counts: Dict[str, Tuple[float, int, List[str]]] = {
            stream: (base, num, names)
            for stream, (base, num, names) in self._saved.get("counts", {}).items()
        }
        """The last step or moment of each stream, how many points it had, and their names."""
        self._num_events: Dict[str, int] = dict(self._saved.get("num_events", {}))
        self._look: Optional[Iterator[Item]] = None
        """Items that existed at the last look at the files and were not returned yet."""
        self._is_final = False

    def read(self, *, final: bool = False) -> Tuple[List[Point], bool]:
        """Return the next points in the order of writing, of about PIECE values, and True if there
        are no more; with `final` also those of lines without an end."""
        points: List[Point] = []
        num_values = 0
        while num_values < PIECE:
            if self._look is None:
                self._look, self._is_final = self._begin_look(final), final
            item = next(self._look, None)
            if item is None:
                self._look = None
                if self._is_final or not final:
                    return points, True
                continue
            point = self._make_point(*item)
            if point is not None:
                points.append(point)
                num_values += count_values(point)
        return points, False

    def save(self) -> Dict[str, Any]:
        """Return the reader's position in each file, as JSON. Call it after `read` has said that
        there is no more: points that were read and not returned yet would be lost."""
        files = {**self._samples, **self._events}
        return {
            "chosen": self._chosen,
            "step": self._step,
            "counts": {stream: list(one) for stream, one in self._counts.items()},
            "num_events": dict(self._num_events),
            "logs": {name: log.save() for name, log in self._logs.items()},
            "files": {name: follower.save() for name, follower in files.items()},
        }

    def _begin_look(self, final: bool) -> Iterator[Item]:
        self._find_nodes()
        now = time.time()
        sources = [self._read_log(name, now, final) for name in self._logs]
        sources += [self._read_objects(one, host, final) for host, one in self._samples.items()]
        if self._is_last:
            for path in self._run.all_events():
                if path.name not in self._events:
                    self._events[path.name] = self._follow(path.name, path)
            sources += [self._read_objects(one, "", final) for one in self._events.values()]
        # What belongs to one step may be in two files: a bar in one, its loss in the other.
        return heapq.merge(*sources, key=lambda item: item[0])

    def _follow(self, name: str, path: Path) -> Follower:
        follower = Follower(path, read_bytes=FILE_BYTES)
        if name in self._saved.get("files", {}):
            follower.go_on(self._saved["files"][name])
        return follower

    def _find_nodes(self) -> None:
        """Begin to read the files of nodes whose names are known, once they have reported."""
        last = self._plan.node_of_rank(self._plan.world - 1).index
        indices = [*range(min(self._plan.num_nodes, MOST_NODES)), last]
        for index in indices:
            host = self._host(index) if len(self._samples) < len(set(indices)) else None
            if host is None or host in self._samples:
                continue
            path = self._attempt.node_log
            self._samples[host] = self._follow(host, path(host, "gpu.jsonl"))
            if index in (0, last):
                for kind in ("out", "err"):
                    name = f"{host}.{kind}"
                    self._logs[name] = LogPoints(
                        path(host, kind),
                        path(host, "times"),
                        self._pattern,
                        is_err=kind == "err",
                        saved=self._saved.get("logs", {}).get(name),
                    )

    def _host(self, index: int) -> Optional[str]:
        report = read_json(self._attempt.node_report(index))
        host = report.get("host") if isinstance(report, dict) else None
        return host if isinstance(host, str) and re.fullmatch(r"[\w-]+", host) else None

    def _read_log(self, name: str, now: float, final: bool) -> Iterator[Item]:
        for one in self._logs[name].read(final=final):
            yield (now if one.at is None else one.at), name, one

    def _read_objects(self, follower: Follower, host: str, final: bool) -> Iterator[Item]:
        """Yield a node's samples, or events, for which `host` is empty."""
        for text in follower.read(final=final):
            value = parse_object(text)
            moment = as_number(value.get("time"))
            if moment is not None:
                yield moment, host, value

    def _make_point(self, moment: float, name: str, one: Any) -> Optional[Point]:
        if not name:
            return self._make_event(moment, one)
        if not isinstance(one, LogReading):
            values = self._list_sample(name, one)
            return self._point(f"{SAMPLES} {name}", self._step, moment, values) if values else None
        if one.reading is None:
            return self._point(one.stream, one.step, moment, one.values)
        if one.step == NO_STEP:
            return self._point(LOSSES, self._step, moment, self._list_values(one.reading.line))
        if self._is_chosen(name):
            self._step = one.step
            return self._point(STEPS, one.step, moment, self._list_values(one.reading.line))
        return None

    def _is_chosen(self, name: str) -> bool:
        """Return True for the log whose steps count: the first log with steps, until another log
        has more reliable steps."""
        log, chosen = self._logs[name], self._logs.get(self._chosen)
        if chosen is None or log.steps.strength > chosen.steps.strength:
            self._chosen = name
        return self._chosen == name

    def _list_values(self, line: Iteration) -> Dict[str, float]:
        time_s = None if line.time_ms is None else line.time_ms / 1000
        samples, tokens = line.samples_per_s, line.tokens_per_s
        if samples is None and self._batch and time_s:
            samples = self._batch / time_s
        if tokens is None and self._sequence and samples is not None:
            tokens = samples * self._sequence
        first, *others = line.losses.items() or [("", None)]
        found = {
            "loss": first[1],
            **{f"loss/{name}": value for name, value in others},
            "learning_rate": line.learning_rate,
            "grad_norm": line.grad_norm,
            "loss_scale": line.loss_scale,
            "step_time_s": time_s,
            "samples_per_s": samples,
            "tokens_per_s": tokens,
            "consumed_samples": line.consumed_samples,
            "epoch": line.epoch,
            "steps": line.num_steps,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _list_sample(self, host: str, sample: Dict[str, Any]) -> Dict[str, float]:
        """List numbers of a sample by name; all samples share the texts of the names."""
        found: Dict[str, float] = {}
        gpus = sample.get("gpus")
        parts = [(f"node/{host}", sample, NODE_FIELDS)]
        for gpu in gpus if isinstance(gpus, list) else []:
            if isinstance(gpu, dict):
                parts.append((f"gpu/{host}/{gpu.get('index')}", gpu, GPU_FIELDS))
        for begin, part, fields in parts:
            for field, name in fields.items():
                value = as_number(part.get(field))
                if value is not None:
                    found[sys.intern(f"{begin}/{name}")] = value
        return found

    def _make_event(self, moment: float, event: Dict[str, Any]) -> Optional[Point]:
        kind = str(event.get("kind"))
        self._num_events[kind] = self._num_events.get(kind, 0) + 1
        values = {f"events/{kind}": float(self._num_events[kind])}
        facts = {name: value for name, value in event.items() if name not in ("time", "kind")}
        text = " ".join([kind, *(f"{name}={value}" for name, value in facts.items())])
        return self._point(EVENTS, self._step, moment, values, text)

    def _point(
        self, stream: str, step: int, moment: float, values: Dict[str, float], text: str = ""
    ) -> Optional[Point]:
        """Build a point; return None if another rank has given all of its values for the step."""
        is_by_step = stream.partition(" ")[0] in BY_STEP
        is_once = is_by_step and stream != LOSSES
        base = float(step) if is_by_step else moment
        last, num, named = self._counts.get(stream, (None, 0, []))
        if last != base:
            num, named = 0, []
        else:
            if is_once:
                values = {name: value for name, value in values.items() if name not in named}
                if not values:
                    return None
            num += 1
        self._counts[stream] = base, num, [*named, *values] if is_once else []
        place = base + num * (1e-3 if is_by_step else 1e-6)
        number = self._attempt.number
        return Point(stream, step, moment, values, number, self.opened, place, text)


def count_values(point: Point) -> int:
    """Return the weight of a point in a bounded list: one more than its values."""
    return 1 + len(point.values)


def _find_sizes(
    run: RunFolder, plan: Plan, attempt: AttemptFolder
) -> Tuple[Optional[float], Optional[float]]:
    """Return samples per step and tokens per sample, if the run folder has them."""
    for path in (attempt.training, run.training):
        try:
            training = read_training(path)
        except ValueError:
            continue
        return training.global_batch_size, training.sequence
    batch = plan.env.get(VARIABLES["train.global_batch_size"], "")
    return (float(batch) if batch.isdecimal() else None), None
