"""Progress that vjob reads out of a log: by its lines alone, and as `vjob status` does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.formats.log import START, Log
from varuna_core.records.logs.progress import parse_line
from varuna_core.records.logs.steps import StepReader
from varuna_core.records.logs.times import MARK_S, format_mark
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
    """Read each stream with a StepReader; take the stream with the most reliable lines."""
    found: list[tuple[int, int, bool, StepReader, float | None, str]] = []
    losses: list[float | None] = []
    val_loss = None
    for kind in KINDS:
        reader = StepReader()
        step_loss = loss = None
        unit = "step"
        for line in log.lines:
            if line.kind != kind:
                continue
            text = f"{line.rank}: {line.text}"
            val_loss = _find_val_loss(text) or val_loss
            reading = reader.read(text, START.timestamp() + line.at_s, MARK_S)
            if reading is None:
                continue
            loss = reading.line.loss if reading.line.loss is not None else loss
            if reading.line.step >= 0:
                step_loss, unit = reading.line.loss, reading.line.unit
        if reader.last is not None and reader.doubt is None:
            found.append((reader.strength, reader.last, step_loss is not None, reader, loss, unit))
        losses.append(loss)
    others = [other for other in losses if other is not None]
    if not found:
        return Reading(loss=next(iter(others), None), val_loss=val_loss)
    _, step, _, reader, loss, unit = max(found, key=lambda item: item[:3])
    loss = loss if loss is not None else next(iter(others), None)
    total = reader.num_steps
    return Reading(step=step, total=total, unit=unit, loss=loss, val_loss=val_loss)


def _find_val_loss(text: str) -> float | None:
    found = parse_line(text)
    evaluations = {} if found is None else found.evaluations
    others = (one for name, one in evaluations.items() if name != "train")
    return next((one["loss"] for one in others if "loss" in one), None)


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
