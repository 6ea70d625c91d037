"""Plays a schedule of faults on a stage and reports what was done, seen and found wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import Fault, count_steps
from tests.chaos.lab_stage import LAB_STRIKES
from tests.chaos.stage import Stage
from tests.chaos.strikes import NOBODY, STRIKES
from tests.chaos.watching import Watch, judge_losses
from varuna_core.records.events import read_events
from varuna_core.records.files import read_json, write_json
from varuna_core.records.runfolder import RunFolder

STRIKES_OF_ALL = {**STRIKES, **LAB_STRIKES}
LOOK_S = 0.3
MISS_S = 20.0
OVER = ("ended", "refused")


@dataclass(kw_only=True)
class Report:
    """What a person needs to see it again; `python -m tests.chaos --replay FILE` does it."""

    seed: int
    stage: str
    faults: list[dict[str, Any]]
    folder: str
    verdict: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    attempts: int = 0
    morphs: list[dict[str, Any]] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Of a report."""
    return tuple(Fault(**one) for one in json.loads(path.read_text())["faults"])


def play(stage: Stage, seed: int, faults: Sequence[Fault], name: str, patience_s: float) -> Report:
    """`patience_s`: for the next new checkpoint, whatever was done to the run, and for the end."""
    report = Report(
        seed=seed, stage=name, faults=[asdict(fault) for fault in faults], folder=str(stage.folder)
    )
    begun = time.monotonic()
    run = stage.submit(count_steps(faults))
    player = Player(stage, run, patience_s)
    player.play(faults)
    report.seconds = round(time.monotonic() - begun, 1)
    report.verdict = str(read_json(run.record).get("verdict"))
    report.problems, report.seen = player.watch.problems, player.watch.seen
    report.attempts = len(run.attempts())
    report.morphs = [event for event in read_events(run) if event["kind"] == "morph"]
    return report


class Player:
    """One run from its start to its end."""

    def __init__(self, stage: Stage, run: RunFolder, patience_s: float) -> None:
        self.stage, self.run, self.patience_s = stage, run, patience_s
        self.watch = Watch(stage)

    def play(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if not self._wait_for(fault.at):
                break
            self.watch.note("strike", **asdict(fault))
            said = self._strike(fault)
            if fault.kind == "damage newest":
                self.watch.expect_damage()
            self.watch.note("struck", kind=fault.kind, said=said)
            self.watch.progress_at = time.monotonic()
        self._wait_for(None)
        self._judge(faults)

    def _strike(self, fault: Fault) -> str:
        """Again until there is something to hit, between two attempts there may be nothing."""
        deadline = time.monotonic() + MISS_S
        while True:
            said = STRIKES_OF_ALL[fault.kind](self.stage, fault, self._pause)
            if not said.startswith(NOBODY) or time.monotonic() > deadline:
                return said
            self._pause(LOOK_S)

    def _wait_for(self, iteration: int | None) -> bool:
        """Until it is saved, or the run is over; whether to go on."""
        record_at = 0.0
        while True:
            self.watch.look()
            if iteration is not None and self.watch.best >= iteration:
                return True
            now = time.monotonic()
            if now - record_at > 2.0:
                record_at = now
                self.stage.vjob("status", str(self.run.path), "--json", code=None)
                if read_json(self.run.record).get("state") in OVER:
                    return False
            if now - self.watch.progress_at > self.patience_s:
                self.watch.blame(f"nothing new for {self.patience_s:g} s: it hangs")
                return False
            time.sleep(LOOK_S)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch.look()
            time.sleep(min(LOOK_S, max(0.0, end - time.monotonic())))

    def _judge(self, faults: Sequence[Fault]) -> None:
        watch, record = self.watch, read_json(self.run.record)
        watch.look()
        if record.get("state") not in OVER:
            return  # it hangs, and that is said already
        if record.get("verdict") != "COMPLETED":
            watch.blame(f"it ended as {record.get('verdict')}: {record.get('message')}")
        else:
            kinds = {fault.kind for fault in faults}
            for text in judge_losses(self.run, lines_may_lack="fill run" in kinds)[0]:
                watch.blame(text)
        deadline = time.monotonic() + 30
        while (left := self.stage.list_left()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if left:
            watch.blame(f"{len(left)} processes are left: {left[:3]}")
