"""Applies a schedule of faults to a run, and reports what was done and the problems found."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault_actions import LAB_ACTIONS, LOCAL_ACTIONS, NO_TARGET, Pause
from benchmarks.chaos.faults import Fault, count_steps
from benchmarks.chaos.history import check_history, check_losses, read_spans
from benchmarks.chaos.invariants import Monitor
from benchmarks.chaos.testbed import Testbed
from varuna_core.records.files import read_json, write_json
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

ACTIONS = {**LOCAL_ACTIONS, **LAB_ACTIONS}
POLL_S = 0.3
NO_TARGET_S = 20.0
"""How long to retry a fault that finds nothing to hit."""
OVER = ("ended", "refused")
"""States of a run's record after its end."""


@dataclass(kw_only=True)
class Report:
    """Everything needed to repeat an experiment: `python -m benchmarks.chaos --replay FILE`."""

    seed: int
    testbed: str
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
    """Read the faults of a report."""
    return tuple(Fault(**one) for one in json.loads(path.read_text())["faults"])


def run_experiment(
    testbed: Testbed, seed: int, faults: Sequence[Fault], name: str, patience_s: float
) -> Report:
    """Run one schedule; `patience_s` bounds the wait for each new checkpoint and for the end."""
    report = Report(
        seed=seed,
        testbed=name,
        faults=[asdict(fault) for fault in faults],
        folder=str(testbed.folder),
    )
    begun = time.monotonic()
    run = testbed.submit(count_steps(faults))
    experiment = Experiment(testbed, run, patience_s)
    experiment.run_to_end(faults)
    report.seconds = round(time.monotonic() - begun, 1)
    report.verdict = str(read_json(run.record).get("verdict"))
    report.problems, report.seen = experiment.monitor.problems, experiment.monitor.seen
    report.attempts = len(run.attempts())
    report.morphs = [event for event in read_events(run) if event["kind"] == "morph"]
    return report


def apply_fault(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Apply the fault; retry while there is nothing to hit, as between two attempts."""
    deadline = time.monotonic() + NO_TARGET_S
    while True:
        said = ACTIONS[fault.kind](testbed, fault, pause)
        if not said.startswith(NO_TARGET) or time.monotonic() > deadline:
            return said
        pause(POLL_S)


class Experiment:
    """One run from its start to its end."""

    def __init__(self, testbed: Testbed, run: RunFolder, patience_s: float) -> None:
        self.testbed, self.run, self.patience_s = testbed, run, patience_s
        self.monitor = Monitor(testbed)

    def run_to_end(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if not self._wait_for(fault.at):
                break
            self.monitor.note("apply", **asdict(fault))
            said = apply_fault(self.testbed, fault, self._pause)
            if fault.kind == "damage newest":
                self.monitor.expect_damage()
            self.monitor.note("applied", kind=fault.kind, said=said)
            self.monitor.progress_at = time.monotonic()
        self._wait_for(None)
        self._check_outcome(faults)

    def _wait_for(self, iteration: int | None) -> bool:
        """Wait until the iteration is saved; False if the run is over or hangs."""
        record_at = 0.0
        while True:
            self.monitor.poll()
            if iteration is not None and self.monitor.best >= iteration:
                return True
            now = time.monotonic()
            if now - record_at > 2.0:
                record_at = now
                self.testbed.vjob("status", str(self.run.path), "--json", code=None)
                if read_json(self.run.record).get("state") in OVER:
                    return False
            if now - self.monitor.progress_at > self.patience_s:
                self.monitor.add_problem(f"nothing new for {self.patience_s:g} s: it hangs")
                return False
            time.sleep(POLL_S)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.monitor.poll()
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))

    def _check_outcome(self, faults: Sequence[Fault]) -> None:
        monitor, record = self.monitor, read_json(self.run.record)
        monitor.poll()
        for text in check_history(self.run):
            monitor.add_problem(text)
        if record.get("state") not in OVER:
            return  # it hangs, and that is reported already
        if record.get("verdict") != "COMPLETED":
            monitor.add_problem(f"it ended as {record.get('verdict')}: {record.get('message')}")
        else:
            kinds = {fault.kind for fault in faults}
            lines_may_lack = "fill run" in kinds
            found = check_losses(self.run, lines_may_lack=lines_may_lack)[0]
            if not lines_may_lack:
                found += read_spans(self.run, read_training(self.run.training).global_batch_size)[1]
            for text in found:
                monitor.add_problem(text)
        deadline = time.monotonic() + 30
        while (left := self.testbed.list_leftovers()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if left:
            monitor.add_problem(f"{len(left)} processes are left: {left[:3]}")
