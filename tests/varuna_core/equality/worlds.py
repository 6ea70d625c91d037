"""Worlds of ranks that stand ready, and the draws handed to them.

A draw has one or two legs: the training, and where another layout takes up its checkpoint, the
last step of that. A leg needs a world of its size; so many run at a time. A world in which a rank
failed, or refused while others wait, is ended and another forked.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.ranks.start import OWN_ENVIRONMENT, Rank, build_order, start_rank
from tests.varuna_core.equality.spec import Layout, Spec, dump

HANG_S = 40.0
MOST_LEGS = 25
"""Of a world, before another takes its place: groups leave a little behind."""

REFUSALS = ("SplitError", "LeakError", "ValueError", "RuntimeError", "NotImplementedError")
NAMES = re.compile(
    r"'[^']+'|cut \d|CutPoint|zero=|tensor|recompute|partition|batch_size|chunk_size|hook|stage \d"
)
REMEDY = re.compile(
    r"\b(use|say|give|choose|pass|keep|make|leave|let|add|name|want|wants|must|register|set|return"
    r"|remove|put|share|move|wrap)\b"
)


@dataclass(kw_only=True)
class Verdict:
    """What came of a draw."""

    status: str
    """equal, refused, void (the plain model itself overflows), or a failure: differs, raised,
    hangs, ends, unclear (refused in words that do not help)."""

    message: str = ""
    ratio: float = 0.0
    where: str = ""
    leg: int = 0
    trace: str = ""

    @property
    def is_failure(self) -> bool:
        return self.status not in ("equal", "refused", "void")

    @property
    def kind(self) -> str:
        """Its message without names and numbers."""
        said = self.message.partition("\n")[0]
        return re.sub(r"'[^']*'|\[[^\]]*\]|\d[\d.e+-]*", "_", said)[:160]


@dataclass(kw_only=True)
class _Task:
    number: int
    spec: Spec
    leg: int = 0
    folder: Path

    @property
    def size(self) -> int:
        layout: Layout | None = self.spec.other if self.leg else self.spec.layout
        assert layout is not None
        return layout.world_size


@dataclass(kw_only=True)
class _World:
    """Ranks that wait for orders."""

    size: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="world")))
    ranks: list[Rank] = field(default_factory=list)
    lines: list[Connection] = field(default_factory=list)
    task: _Task | None = None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    began: float = 0.0
    legs: int = 0

    def start(self) -> None:
        listener = Listener(str(self.folder / "orders"), backlog=8)
        for rank in range(self.size):
            words = [str(self.folder), str(rank), str(self.size)]
            module = "tests.ranks.equality_rank"
            environment = {**os.environ, **OWN_ENVIRONMENT}
            self.ranks.append(start_rank(build_order(module, words, environment)))
        found = {}
        for _ in range(self.size):
            line = listener.accept()
            found[line.recv()] = line
        listener.close()
        self.lines = [found[rank] for rank in range(self.size)]

    def give(self, task: _Task, defect: str | None) -> None:
        self.task, self.reports, self.began = task, {}, time.monotonic()
        self.legs += 1
        order = {
            "spec": dump(task.spec),
            "leg": task.leg,
            "store": str(task.folder),
            "defect": defect,
        }
        for line in self.lines:
            line.send(order)

    def read_said(self) -> str:
        said = [
            f"--- rank {rank}\n" + (self.folder / f"said.{rank}").read_text()[-1500:]
            for rank in range(self.size)
            if (self.folder / f"said.{rank}").exists()
        ]
        return "\n".join(said)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for rank in self.ranks:
            rank.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Worlds:
    """Runs draws; a context, so that no rank is left."""

    def __init__(self, at_once: int = 2, hang_s: float = HANG_S) -> None:
        self.at_once, self.hang_s = at_once, hang_s
        self.idle: dict[int, list[_World]] = {}
        self.busy: list[_World] = []
        self._ratios: dict[int, Verdict] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        for world in [*self.busy, *(w for held in self.idle.values() for w in held)]:
            world.close()
        self.busy, self.idle = [], {}

    def run(
        self, specs: Sequence[Spec], defect: str | None = None
    ) -> Iterator[tuple[int, Spec, Verdict]]:
        """The verdicts, as they come."""
        todo: deque[_Task] = deque(
            _Task(number=number, spec=spec, folder=Path(tempfile.mkdtemp(prefix="store")))
            for number, spec in enumerate(specs)
        )
        try:
            while todo or self.busy:
                while todo and len(self.busy) < self.at_once:
                    self._start(todo.popleft(), defect)
                for world in self._wait():
                    task, verdict = world.task, self._judge(world)
                    assert task is not None
                    if verdict.status == "equal" and not task.leg and task.spec.other is not None:
                        todo.appendleft(
                            _Task(number=task.number, spec=task.spec, leg=1, folder=task.folder)
                        )
                        self._ratios[task.number] = verdict
                        continue
                    before = self._ratios.pop(task.number, None)
                    if before is not None and before.ratio > verdict.ratio and not verdict.message:
                        verdict = before
                    shutil.rmtree(task.folder, ignore_errors=True)
                    yield task.number, task.spec, verdict
        finally:
            for task in todo:
                shutil.rmtree(task.folder, ignore_errors=True)

    def _start(self, task: _Task, defect: str | None) -> None:
        held = self.idle.setdefault(task.size, [])
        world = held.pop() if held else _World(size=task.size)
        if not world.lines:
            world.start()
        world.give(task, defect)
        self.busy.append(world)

    def _wait(self) -> list[_World]:
        """Worlds that are done, one way or another."""
        lines = {line: (w, r) for w in self.busy for r, line in enumerate(w.lines)}
        open_lines = [line for line, (w, r) in lines.items() if r not in w.reports]
        for line in wait(open_lines, timeout=1.0):
            assert isinstance(line, Connection)
            world, rank = lines[line]
            try:
                world.reports[rank] = line.recv()
            except (EOFError, ConnectionError):
                world.reports[rank] = {"status": "ended"}
        done = []
        for world in self.busy:
            reports = [*world.reports.values()]
            late = time.monotonic() - world.began > self.hang_s
            failed = any(r["status"] in ("raised", "ended") and not is_echo(r) for r in reports)
            if len(reports) == world.size or late or failed:
                done.append(world)
        return done

    def _judge(self, world: _World) -> Verdict:
        self.busy.remove(world)
        task, reports = world.task, world.reports
        assert task is not None
        verdict = read_reports(reports, world.size)
        verdict.leg = task.leg
        is_usable = verdict.status in ("equal", "differs", "void") or (
            world.size == 1 and verdict.status == "refused"
        )
        if verdict.status in ("hangs", "ends"):
            verdict.trace = world.read_said()
        if is_usable and len(reports) == world.size and world.legs < MOST_LEGS:
            self.idle[world.size].append(world)
        else:
            with suppress(OSError):
                world.close()
        return verdict


def is_echo(report: dict[str, Any]) -> bool:
    """A rank's error because of another's, which is yet to come."""
    return report["status"] == "raised" and report["message"].startswith("RankFailed")


def read_reports(reports: dict[int, dict[str, Any]], size: int) -> Verdict:
    """What the ranks' reports say together: the first failure that is not another's echo."""
    raised = [report for report in reports.values() if report["status"] == "raised"]
    raised.sort(key=is_echo)
    if raised:
        first = raised[0]
        kind = first["message"].partition(":")[0]
        message = first["message"].partition(": ")[2]
        if first["phase"] == "make" and kind in REFUSALS:
            helps = NAMES.search(message) and REMEDY.search(message)
            status = "refused" if helps else "unclear"
            return Verdict(status=status, message=message, trace=first["trace"])
        told = f"{first['phase']}: {first['message']}"
        return Verdict(status="raised", message=told, trace=first["trace"])
    if any(report["status"] == "ended" for report in reports.values()):
        return Verdict(status="ends", message="a rank ended")
    if len(reports) < size:
        missing = sorted(set(range(size)) - reports.keys())
        return Verdict(status="hangs", message=f"ranks {missing} did not come to an end")
    return Verdict(
        status=reports[0]["status"],
        message=reports[0]["message"],
        ratio=reports[0]["ratio"],
        where=reports[0]["where"],
    )
