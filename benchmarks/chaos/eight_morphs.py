"""Leads trainings of 300 steps through eight morphs each, on the Slurm lab.

    python -m benchmarks.chaos.eight_morphs plain het split --reports FOLDER --write

Without names it runs all three (benchmarks/chaos/scenarios.py), five minutes each. Exit code 0:
each came to its end through all of its morphs, with the losses of the undisturbed training, and in
the history that leads to the final weights every sample was read once. `--write` makes the table of
all reports in the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.chaos.experiment import OVER
from benchmarks.chaos.history import check_history, check_losses, read_losses, read_spans
from benchmarks.chaos.invariants import Monitor
from benchmarks.chaos.scenarios import BATCH, SCENARIOS, STEPS, Change, Scenario, ScenarioTestbed
from varuna_core.records.files import read_json, write_json
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

CHANGE_S = 150.0
END_S = 400.0
POLL_S = 0.3
STATUS_S = 5.0
RESULT = RESULTS / "eight_morphs.md"


@dataclass(kw_only=True)
class Report:
    """The outcome of one scenario."""

    name: str
    folder: str
    run: str = ""
    batch: int = BATCH
    problems: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    morphs: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    seconds: float = 0.0
    final_loss: float | None = None
    undisturbed_loss: float | None = None
    worst: float | None = None
    """Largest relative difference of a loss from the undisturbed one."""


class ScenarioRunner:
    """Leads one run through its scenario."""

    def __init__(self, testbed: ScenarioTestbed, scenario: Scenario, report: Report) -> None:
        self.testbed, self.scenario, self.report = testbed, scenario, report
        self.run = testbed.submit(STEPS)
        self.monitor = Monitor(testbed)
        self._attempt = -1
        self._status_at = 0.0

    def run_to_end(self) -> None:
        start = Change(what="submitted", do=lambda it: None, members=self.scenario.members)
        for change in (start, *self.scenario.changes):
            begun, iteration = time.monotonic(), self.monitor.best
            change.do(self.testbed)
            if not self._wait_for(change, begun + CHANGE_S):
                break
            plan = read_attempt_plan(self.run, self._attempt)
            assert plan is not None
            facts = {
                "what": change.what,
                "iteration": max(iteration, 0),
                "attempt": self._attempt,
                "nodes": change.members,
                "shape": f"{plan.pipeline} x {plan.data}",
                "seconds": round(time.monotonic() - begun, 1),
            }
            self.report.changes.append(facts)
            print(facts, flush=True)
        deadline = time.monotonic() + END_S
        while not self._is_over():
            self.monitor.poll()
            if time.monotonic() > deadline:
                self.monitor.add_problem(f"not over in {END_S:g} s")
                break
            time.sleep(POLL_S)
        self.report.problems = self.monitor.problems

    def _wait_for(self, change: Change, deadline: float) -> bool:
        """Wait until ranks on that many nodes have saved a checkpoint; False if they never do."""
        while True:
            self.monitor.poll()
            state = self.testbed.read_state()
            attempt, saved, base = (state.get(word, -1) for word in ("attempt", "saved", "base"))
            assert isinstance(attempt, int) and isinstance(saved, int) and isinstance(base, int)
            is_there = len(self.testbed.read_members()) == change.members and saved > base
            if state.get("phase") == "running" and attempt > self._attempt and is_there:
                self._attempt = attempt
                return True
            if self._is_over():
                self.monitor.add_problem(f"the run was over before: {change.what}")
                return False
            if time.monotonic() > deadline:
                self.monitor.add_problem(
                    f"not {change.members} nodes in {CHANGE_S:g} s: {change.what}"
                )
                return False
            time.sleep(POLL_S)

    def _is_over(self) -> bool:
        if time.monotonic() - self._status_at > STATUS_S:
            self.testbed.vjob("status", str(self.run.path), "--json", code=None)
            self._status_at = time.monotonic()
        return read_json(self.run.record).get("state") in OVER


def check_outcome(report: Report) -> None:
    """Complete the report from the files of the run."""
    run = RunFolder(Path(report.run))
    report.verdict = str(read_json(run.record).get("verdict"))
    problems = [] if report.verdict == "COMPLETED" else [f"it ended as {report.verdict}"]
    report.morphs = [event for event in read_events(run) if event["kind"] == "morph"]
    spans, wrong = read_spans(run, report.batch)
    report.spans = [asdict(span) for span in spans]
    kept = sum(span.last - span.first + 1 for span in spans)
    if kept != STEPS:
        problems.append(f"{kept} of {STEPS} steps lead to the final weights")
    losses, _ = read_losses(run)
    found, expected = check_losses(run, lines_may_lack=False)
    report.final_loss, report.undisturbed_loss = losses.get(STEPS), expected[STEPS]
    report.worst = max(abs(losses[step] / expected[step] - 1) for step in losses)
    report.problems += [*problems, *wrong, *found, *check_history(run)]


def run_scenario(name: str, folder: Path) -> Report:
    """Run one scenario on the lab, which is started if it is not up."""
    scenario = SCENARIOS[name]
    testbed = ScenarioTestbed(folder, scenario.cluster)
    report = Report(name=name, folder=str(folder))
    begun = time.monotonic()
    try:
        testbed.open()
        runner = ScenarioRunner(testbed, scenario, report)
        report.run = str(runner.run.path)
        runner.run_to_end()
        write_json(folder / "seen.json", runner.monitor.seen)
    finally:
        testbed.close(keep=True)
    report.seconds = round(time.monotonic() - begun, 1)
    return report


HEAD = """\
# Eight morphs: trainings of 300 steps that never have their nodes for long

Made by `python -m benchmarks.chaos.eight_morphs --reports FOLDER --write` on
[the lab](../../docs/lab.md): six nodes of one rank each on two CPUs, 6 layers, no two samples
alike, a checkpoint every 5 steps. Each row is one thing that was done to the run, and the attempt
that it came to; seconds are until that attempt's first checkpoint, on a machine that others used
too. Held besides, as in [chaos](chaos.md): no complete checkpoint was lost, no two managers were
seen.
"""
COLUMNS = {
    "iteration": "after step",
    "what": "what happened",
    "attempt": "attempt",
    "nodes": "nodes used",
    "shape": "pipeline x data",
    "seconds": "seconds",
}


def render(reports: list[dict[str, Any]]) -> str:
    lines = HEAD.splitlines()
    for one in reports:
        lines += ["", f"## {one['name']}", "", f"| {' | '.join(COLUMNS.values())} |"]
        lines += ["|---" * len(COLUMNS) + "|"]
        for change in one["changes"]:
            lines.append(f"| {' | '.join(str(change[word]) for word in COLUMNS)} |")
        kept = sum(span["last"] - span["first"] + 1 for span in one["spans"])
        again = sum(span["done"] - span["last"] for span in one["spans"])
        steps = ", ".join(f"{s['first']} to {s['last']} by {s['attempt']}" for s in one["spans"])
        lines += [
            "",
            f"- Ended as {one['verdict']} after {one['seconds']:.0f} s; problems: "
            f"{'; '.join(one['problems']) or 'none'}.",
            f"- Loss of step {STEPS}: {one['final_loss']:.6E}, undisturbed "
            f"{one['undisturbed_loss']:.6E}; the largest relative difference of all is "
            f"{one['worst']:.1e}.",
            f"- {kept} steps lead to the final weights, with {kept * one['batch']} samples in "
            f"batches of {one['batch']}, each read once; {again} steps were done again. "
            f"By attempt: {steps}.",
        ]
    return "\n".join([*lines, ""])


def main(words: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.eight_morphs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=" or ".join(SCENARIOS))
    parser.add_argument("--reports", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument(
        "--only", choices=("run", "check", "table"), help="only `run` needs the lab"
    )
    parser.add_argument("--write", action="store_true", help=f"writes {RESULT.name}")
    options = parser.parse_args(words)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    is_good = True
    for name in () if options.only == "table" else options.scenarios or SCENARIOS:
        path = options.reports / f"eight-{name}.json"
        if options.only == "check":
            report = Report(**json.loads(path.read_text()))
        else:
            report = run_scenario(name, Path(tempfile.mkdtemp(prefix=f"eight-{name}-")))
        if options.only != "run":
            check_outcome(report)
        write_json(path, asdict(report))
        print(f"{name}: {report.verdict}, {report.seconds:.0f} s, {len(report.changes) - 1} morphs")
        for text in report.problems:
            print(f"problem: {text}", file=sys.stderr)
        if report.problems:
            is_good = False
            print(f"kept: {report.folder}", file=sys.stderr)
        elif options.only != "run":
            shutil.rmtree(report.folder)
    if options.write:
        found = [options.reports / f"eight-{name}.json" for name in SCENARIOS]
        RESULT.write_text(render([json.loads(path.read_text()) for path in found if path.exists()]))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
