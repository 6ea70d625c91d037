"""Progress that vjob reads out of a log: by its lines alone, and as `vjob status` does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.formats.log import START, Log
from varuna_core.records.logs.steps import StepReader, count_epochs, find_total
from varuna_core.records.logs.times import MARK_S, format_mark
from varuna_core.records.logs.training_log import Iteration
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.readers.node_files import NodeFiles, find_loss, find_progress

KINDS = ("out", "err")
TAIL_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The figures; None where vjob says that it does not know."""

    step: int | None = None
    total: int | None = None
    unit: str = "step"
    """`epoch` where vjob says that it counts epochs."""
    loss: float | None = None
    val_loss: float | None = None
    """Loss of the last evaluation; only the reader of lines has it."""


def read_lines(log: Log) -> Reading:
    """Read each stream with a StepReader; take the stream with the most reliable lines. What one
    stream says of the training helps to read the other, as in `vjob status`."""
    readers = {kind: StepReader() for kind in KINDS}
    trains = any(_read(log, kind, StepReader()).reader.trains for kind in KINDS)
    for reader in readers.values():
        reader.trains = trains
    streams = [_read(log, kind, reader) for kind, reader in readers.items()]
    found = [one for one in streams if one.reader.last is not None and one.reader.doubt is None]
    others = [one.loss for one in streams if one.loss is not None]
    val_losses = [one.val_loss for one in streams if one.val_loss is not None]
    loss, val_loss = next(iter(others), None), next(iter(val_losses), None)
    if not found:
        shares = next((one.shares for one in streams if one.shares), None)
        if shares is None:
            return Reading(loss=loss, val_loss=val_loss)
        steps, total, unit = count_epochs(shares, readers.values())
        return Reading(step=steps[-1], total=total, unit=unit, loss=loss, val_loss=val_loss)
    best = max(found, key=lambda one: (one.reader.strength, one.reader.last, one.has_step_loss))
    total = best.reader.num_steps
    if total is None and best.unit == "step" and best.reader.last is not None:
        total = find_total(best.reader.last, [one.reader for one in streams if one is not best])
    return Reading(
        step=best.reader.last, total=total, unit=best.unit,
        loss=best.loss if best.loss is not None else loss, val_loss=val_loss,
    )  # fmt: skip


@dataclass(kw_only=True)
class _Stream:
    """Standard output or error, as it was read."""

    reader: StepReader
    loss: float | None = None
    val_loss: float | None = None
    has_step_loss: bool = False
    unit: str = "step"
    shares: list[float] = field(default_factory=list)


def _read(log: Log, kind: str, reader: StepReader) -> _Stream:
    stream = _Stream(reader=reader)
    for line in log.lines:
        if line.kind != kind:
            continue
        text = f"{line.rank}: {line.text}"
        reading = reader.read(text, START.timestamp() + line.at_s, MARK_S)
        stream.val_loss = _find_val_loss(reader.evaluated) or stream.val_loss
        if reading is None:
            continue
        if reading.line.loss is not None:
            stream.loss = reading.line.loss
        if reading.line.step >= 0:
            stream.has_step_loss, stream.unit = reading.line.loss is not None, reading.line.unit
        elif "epoch" in reading.line.others:
            stream.shares.append(reading.line.others["epoch"])
    return stream


def _find_val_loss(found: Iteration | None) -> float | None:
    evaluations = {} if found is None else found.evaluations
    others = (one for name, one in evaluations.items() if name != "train")
    return next((one[name] for one in others for name in one if "loss" in name), None)


def read_status(log: Log) -> Reading:
    """By the files of a node, as `vjob status` reads them at its first look."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(log, Path(folder))
        node = NodeFiles("node", files, Classifier(), TAIL_BYTES, 50)
        node.poll()
        progress = find_progress([node])
    loss = find_loss([node])
    if progress is None:
        return Reading(loss=None if loss is None else loss.loss)
    return Reading(
        step=progress.step, total=progress.num_steps, unit=progress.unit, loss=progress.loss
    )


def write_files(log: Log, folder: Path) -> dict[str, str]:
    """node.out, node.err and node.times as the agent writes them; paths by kind."""
    texts = {kind: b"" for kind in KINDS}
    marks = []
    marked_s = -MARK_S
    for line in log.lines:
        if line.at_s - marked_s >= MARK_S:
            marked_s = line.at_s
            sizes = (len(texts["out"]), len(texts["err"]))
            marks.append(format_mark(START.timestamp() + line.at_s, *sizes))
        texts[line.kind] += f"{line.rank}: {line.text}\n".encode()
    (folder / "node.times").write_bytes(b"".join(marks))
    ends = {kind: _find_end(log, kind) for kind in KINDS}
    for kind, text in texts.items():
        path = folder / f"node.{kind}"
        path.write_bytes(text)
        os.utime(path, (ends[kind], ends[kind]))
    return {kind: str(folder / f"node.{kind}") for kind in KINDS}


def _find_end(log: Log, kind: str) -> float:
    times: Iterable[float] = (line.at_s for line in log.lines if line.kind == kind)
    return START.timestamp() + max(times, default=0.0)
