"""Stages hangs, and healthy runs that look like one; writes their part of results/hangs.md.

    python -m benchmarks.hangs [--on lab] [--only NAME ...] [--at-once 3]

A hang counts from the last optimizer step that any rank did before it to the first one after the
restart, by the counts that the ranks keep. The program reads real bytes; its last loss is compared
with that of a run without a fault. This is a stand-in for a cluster: one machine, gloo, no file
server, no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS
from varuna_core.facts.hang import Hang
from varuna_core.hang.signs import read_hang
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import read_json
from varuna_core.records.logs.step_counts import StepCounts, parse_counts
from varuna_core.records.runfolder import AttemptFolder, RunFolder

CONF = """
name: {name}
program: {{script: {script}, snapshot: none}}
env: {{FAULT: "{fault}", KIND: {kind}, STEPS: "{steps}"}}
cluster: {{scheduler: local, restarts: 2, nodes: [{{group: a, ranks: {ranks}}}]}}
log_folder: {folder}
"""
STEPS, AT, LIMIT_S = 130, 90, 560
NOTE = (
    "With three ranks DDP ends at 0.101834930 instead of 0.101834923, and sums of our own",
    "end equal: DDP's first step after a start probably adds in another order.",
)
"""Looked into once, with runs of both."""
KINDS = {"Stopped or in another collective": ("stopped", "mismatched"), "Silent": ("silent",)}


@dataclass(frozen=True)
class Case:
    name: str
    fault: str
    witness: str = ""
    """Empty for a healthy run, of which nothing is to be said or done."""
    rank: int | None = 1
    kind: str = "ddp"
    ranks: int = 2


def fault(name: str, rank: int = 1, step: int = AT) -> str:
    return f"{name}:{rank}:{step}"


CASES = [
    Case("stopped rank, DDP", fault("sigstop"), "stopped"),
    Case("stopped rank 0, DDP", fault("sigstop", 0), "stopped", 0),
    Case("stopped rank, own sums", fault("sigstop"), "stopped", kind="loop"),
    Case("stopped rank of three", fault("sigstop", 2), "stopped", 2, ranks=3),
    Case("all ranks stopped", fault("sigstop-all"), "stopped", 0),
    Case("another collective, DDP", fault("mismatch"), "mismatched"),
    Case("another collective, own sums", fault("mismatch"), "mismatched", kind="loop"),
    Case("another collective of three", fault("mismatch"), "mismatched", ranks=3),
    Case("a broadcast of its own", fault("broadcast"), "mismatched"),
    Case("a missed barrier, DDP", fault("barrier"), "mismatched"),
    Case("a missed barrier, own sums", fault("barrier"), "mismatched", kind="loop"),
    Case("another group", fault("group"), "silent"),
    Case("a rank that sleeps", fault("sleep"), "silent"),
    Case("a rank that reads an empty pipe", fault("pipe"), "silent"),
    Case("a data loader's worker that hangs", fault("worker"), "silent"),
    Case("stopped in the first step", fault("sigstop", step=1), "stopped"),
    Case("a rank is stopped for 15 s", fault("continued")),
    Case("a rank in a debugger for 100 s", fault("traced")),
    Case("a rank at pdb's prompt for 170 s", fault("prompt")),
    Case("a rank evaluates for 180 s", fault("evaluate-one")),
    Case("all ranks evaluate for 180 s", fault("evaluate")),
    Case("a rank pauses for 80 s", fault("pause-one")),
    Case("all ranks pause for 80 s", fault("pause")),
    Case("a rank waits 170 s for a program that it started", fault("child")),
    Case("a rank writes slowly for 170 s", fault("write")),
]


@dataclass(frozen=True)
class Result:
    case: Case
    hang: Hang | None
    seconds: float | None
    loss: str
    """The line of the last step."""
    attempts: int
    code: int | None

    @property
    def is_right(self) -> bool:
        if not self.case.witness:
            return self.hang is None and self.attempts == 1 and self.code == 0
        found = self.hang
        return found is not None and (found.witness, found.rank) == (
            self.case.witness,
            self.case.rank,
        )


def read_counts(attempt: AttemptFolder) -> list[StepCounts]:
    found = (parse_counts(path.read_bytes()) for path in attempt.list_steps().values())
    return [one for one in found if one is not None and one.count]


def read_last_loss(attempt: AttemptFolder) -> str:
    text = "".join(path.read_text() for path in attempt.path.glob("*.out"))
    return (re.findall(rf"step {STEPS}/{STEPS} (loss \S+)", text) or [""])[-1]


def stage(case: Case, folder: Path) -> Result:
    name = re.sub(r"\W+", "-", case.name)
    script = Path(__file__).with_name("train.py")
    conf = folder / f"{name}.yaml"
    values = {"fault": case.fault, "kind": case.kind, "steps": STEPS, "ranks": case.ranks}
    conf.write_text(CONF.format(name=name, script=script, folder=folder / name, **values))
    subprocess.run(
        [sys.executable, "-m", "vjob", "submit", str(conf)], check=True, stdout=subprocess.DEVNULL
    )
    run = RunFolder(Path(os.path.realpath(folder / name / name)))
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and str(
        (read_json(run.path / "local.json") or {}).get("state")
    ) not in ("COMPLETED", "FAILED", "CANCELLED"):
        time.sleep(1)
    attempts = run.attempts()
    hang = read_hang(attempts[0])
    seconds = None
    if len(attempts) > 1:
        before, after = read_counts(attempts[0]), read_counts(attempts[1])
        if before and after:
            seconds = min(x.first_at for x in after) - max(x.last_at for x in before)
    outcome = read_outcome(attempts[-1])
    return Result(
        case=case,
        hang=hang,
        seconds=seconds,
        loss=read_last_loss(attempts[-1]),
        attempts=len(attempts),
        code=None if outcome is None else outcome.code,
    )


def render(results: list[Result]) -> str:
    losses = {(x.case.kind, x.case.ranks): x.loss for x in results if not x.case.fault}
    results = [result for result in results if result.case.fault]
    rows = [
        "# Hangs",
        "",
        "Runs of two or three gloo ranks on one machine, by `python -m benchmarks.hangs`: a",
        "stand-in for a cluster. Seconds are from the last optimizer step before the hang to the",
        "first one after the restart, the program's start included.",
        "",
        "| staged | said | rank | s | named right | last loss as without |",
        "|---|---|---|---|---|---|",
    ]
    for one in (result for result in results if result.case.witness):
        said = one.hang.witness.value if one.hang else "nothing"
        rank = "" if one.hang is None or one.hang.rank is None else str(one.hang.rank)
        time_s = "" if one.seconds is None else f"{one.seconds:.0f}"
        right, same = (
            "yes" if x else "no"
            for x in (one.is_right, one.loss == losses[one.case.kind, one.case.ranks])
        )
        rows.append(f"| {one.case.name} | {said} | {rank} | {time_s} | {right} | {same} |")
    for name, words in KINDS.items():
        values = [x.seconds for x in results if x.case.witness in words and x.seconds]
        if values:
            rows += [
                "",
                f"{name}: median {statistics.median(values):.0f} s, worst {max(values):.0f} s.",
            ]
    rows += ["", *NOTE]
    rows += ["", "| healthy | attempts | said | left alone |", "|---|---|---|---|"]
    for one in (result for result in results if not result.case.witness):
        said = one.hang.witness.value if one.hang else "nothing"
        right = "yes" if one.is_right else "no"
        rows.append(f"| {one.case.name} | {one.attempts} | {said} | {right} |")
    return "\n".join(rows) + "\n"


def write_part(heading: str, rows: list[str]) -> None:
    """Replace one part of the page, and leave the other as its own command made it."""
    page = RESULTS / "hangs.md"
    begin, _, rest = page.read_text().partition(f"\n## {heading}\n")
    _, mark, after = rest.partition("\n## ")
    page.write_text(begin + "\n".join(["", f"## {heading}", "", *rows, ""]) + mark + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=("local", "lab"), default="local")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=3)
    options = parser.parse_args()
    if options.on == "lab":
        from benchmarks.hangs.lab import HEADING, stage_on_lab

        rows = stage_on_lab(options.only, options.at_once)
        print("\n".join(rows))
        if not options.only:
            write_part(HEADING, rows)
        return
    cases = [case for case in CASES if not options.only or case.name in options.only]
    with tempfile.TemporaryDirectory(prefix="hangs-") as text:
        folder = Path(text)
        kinds = sorted({(case.kind, case.ranks) for case in cases})
        plain = [Case(f"plain {kind} {ranks}", "", "", None, kind, ranks) for kind, ranks in kinds]
        with ThreadPoolExecutor(options.at_once) as pool:
            results = list(pool.map(lambda case: stage(case, folder), [*plain, *cases]))
    print(render(results))
    if not options.only:
        page = RESULTS / "hangs.md"
        _, mark, other = page.read_text().partition("\n## ")
        page.write_text(render(results) + mark + other)


if __name__ == "__main__":
    main()
