"""Stages hangs, and healthy runs that look like one; writes their part of results/hangs.md.

    python -m benchmarks.hangs [--on lab] [--only WORD ...] [--at-once 2] [--minutes 60]
                               [--folder FOLDER]

Rows whose runs in FOLDER are over are read, with the commit and the load that they were staged at,
so that a call goes on where the one before it ended.

A hang counts from the last optimizer step that any rank did before it to the first one after the
restart, by the counts that the ranks keep. The program reads real bytes; its last loss is compared
with that of a run without a fault. This is a stand-in for a cluster: one machine, gloo, no file
server, no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.hangs.held_mount import end_held, mount_held
from benchmarks.hangs.staging import (
    SCRIPTS,
    describe_staging,
    find_python,
    format_wait,
    note_staging,
    write_part,
)
from varuna_core.facts.hang import Hang
from varuna_core.hang.signs import read_hang
from varuna_core.records.exits import read_outcome
from varuna_core.records.files import read_json
from varuna_core.records.logs.step_counts import StepCounts, parse_counts
from varuna_core.records.runfolder import AttemptFolder, RunFolder

CONF = """
name: {name}
program: {{script: {script}, snapshot: none, python: {python}}}
env: {{FAULT: "{fault}", KIND: {kind}, STEPS: "{steps}", OMP_NUM_THREADS: "1"{env}}}
cluster: {{scheduler: local, restarts: 2, nodes: [{{group: a, ranks: {ranks}}}]}}
{more}
log_folder: {folder}
"""
FRAMEWORKS = {
    "fsdp2": "FSDP2",
    "lightning": "Lightning",
    "trainer": "HF Trainer",
    "accelerate": "Accelerate",
}
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
    more: str = ""
    """More lines of the conf."""
    ends_itself: bool = False
    """Its ranks fail, and are started again without the guard's doing."""


def fault(name: str, rank: int = 1, step: int = AT) -> str:
    return f"{name}:{rank}:{step}"


def list_framework_cases() -> list[Case]:
    found = []
    for kind, words in FRAMEWORKS.items():
        found += [
            Case(f"stopped rank, {words}", fault("sigstop"), "stopped", kind=kind),
            Case(f"another collective, {words}", fault("mismatch"), "mismatched", kind=kind),
            Case(f"a native call that holds Python, {words}", fault("native-held"), "silent",
                 kind=kind),
        ]  # fmt: skip
    return found


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
    Case("a worker that is stopped", fault("worker-stopped"), "stopped"),
    Case("a native call that never returns", fault("native"), "silent"),
    Case("a native call that holds Python", fault("native-held"), "silent"),
    Case("a lock that nobody gives back", fault("thread"), "silent"),
    Case("a rank that spins", fault("spin"), "spinning"),
    Case("another collective in step 3", fault("mismatch", step=3), "mismatched"),
    Case("a rank that sleeps in step 3", fault("sleep", step=3), "silent"),
    Case("a rank that never joins", fault("join"), "silent"),
    Case("a file server that is gone, one reads", fault("nfs"), "silent"),
    Case("a file server that is gone, all read", fault("nfs-all"), "silent", None),
    Case("a link that is cut, of sockets of their own", fault("cut"), "silent", None),
    Case("a worker is killed", fault("worker-dies"), ends_itself=True),
    *list_framework_cases(),
    Case("stopped in the first step", fault("sigstop", step=1), "stopped"),
    Case("a rank at pdb's prompt for 170 s", fault("prompt")),
    Case("a file server is gone for 60 s", fault("nfs-pause")),
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
    staged: str
    """The commit and the load that it was staged at."""

    @property
    def is_right(self) -> bool:
        if self.case.ends_itself:
            return self.hang is None and self.attempts == 2 and self.code == 0
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


def stage(
    case: Case,
    folder: Path,
    steps: int = STEPS,
    env: Mapping[str, str] | None = None,
    until: float = math.inf,
) -> Result | None:
    """Stage a case, or read its run where the folder has one that is over; None after `until`."""
    name = re.sub(r"\W+", "-", case.name)
    run = RunFolder(Path(os.path.realpath(folder / name / name)))
    if is_over(run):
        return read_result(case, run)
    if time.monotonic() > until:
        return None
    script = Path(__file__).with_name(SCRIPTS.get(case.kind, "train.py"))
    conf, env = folder / f"{name}.yaml", dict(env or {})
    mount = mount_held(folder / f"{name}.data", env) if case.fault.startswith("nfs") else None
    values = {"fault": case.fault, "kind": case.kind, "steps": steps, "ranks": case.ranks}
    values["env"] = "".join(f", {name}: '{value}'" for name, value in env.items())
    values |= {"more": case.more, "python": find_python(case.kind)}
    conf.write_text(CONF.format(name=name, script=script, folder=folder / name, **values))
    subprocess.run(
        [sys.executable, "-m", "vjob", "submit", str(conf)], check=True, stdout=subprocess.DEVNULL
    )
    run = RunFolder(Path(os.path.realpath(folder / name / name)))
    last = time.monotonic() + LIMIT_S
    while time.monotonic() < last and not is_over(run):
        time.sleep(1)
    if mount is not None:
        end_held(mount, env)
    note_staging(folder / name)
    return read_result(case, run)


def is_over(run: RunFolder) -> bool:
    state = (read_json(run.path / "local.json") or {}).get("state")
    return state in ("COMPLETED", "FAILED", "CANCELLED")


def read_result(case: Case, run: RunFolder) -> Result:
    attempts = run.attempts()
    hang = read_hang(attempts[0])
    seconds = None
    if len(attempts) > 1:
        before, after = read_counts(attempts[0]), read_counts(attempts[1])
        if after and (before or hang):
            begun = max((x.last_at for x in before), default=hang.since if hang else 0.0)
            seconds = min(x.first_at for x in after) - begun
    outcome = read_outcome(attempts[-1])
    return Result(
        case=case,
        hang=hang,
        seconds=seconds,
        loss=read_last_loss(attempts[-1]),
        attempts=len(attempts),
        code=None if outcome is None else outcome.code,
        staged=describe_staging(run.path.parent),
    )


def render(results: list[Result]) -> str:
    losses = {(x.case.kind, x.case.ranks): x.loss for x in results if not x.case.fault}
    results = [result for result in results if result.case.fault]
    rows = [
        "# Hangs",
        "",
        "Runs of two or three gloo ranks on one machine, by `python -m benchmarks.hangs`: a",
        "stand-in for a cluster. Seconds are from the last optimizer step before the hang, or from",
        "the begin of the hang where there was none, to the first one after the restart, the",
        "program's start included; before them those to the action.",
        "",
        "| staged | said | rank | acted | s | named right | last loss as without | commit, load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in (result for result in results if result.case.witness or result.case.ends_itself):
        said = one.hang.witness.value if one.hang else "nothing"
        rank = "" if one.hang is None or one.hang.rank is None else str(one.hang.rank)
        time_s = "" if one.seconds is None else f"{one.seconds:.0f}"
        right, same = (
            "yes" if x else "no"
            for x in (one.is_right, one.loss == losses[one.case.kind, one.case.ranks])
        )
        cells = (one.case.name, said, rank, format_wait(one.hang), time_s, right, same, one.staged)
        rows.append(f"| {' | '.join(cells)} |")
    for name, words in KINDS.items():
        values = [x.seconds for x in results if x.case.witness in words and x.seconds]
        if values:
            rows += [
                "",
                f"{name}: median {statistics.median(values):.0f} s, worst {max(values):.0f} s.",
            ]
    if any(one.case.ranks == 3 for one in results):
        rows += ["", *NOTE]
    rows += [
        "",
        "| healthy | attempts | said | left alone | commit, load |",
        "|---|---|---|---|---|",
    ]
    for one in (x for x in results if not x.case.witness and not x.case.ends_itself):
        said = one.hang.witness.value if one.hang else "nothing"
        right = "yes" if one.is_right else "no"
        rows.append(f"| {one.case.name} | {one.attempts} | {said} | {right} | {one.staged} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", choices=("local", "lab"), default="local")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="no case begins later")
    parser.add_argument("--folder", type=Path, help="keep the runs there, or go on with them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hangs-") as text:
        folder = options.folder or Path(text)
        folder.mkdir(exist_ok=True)
        if options.on == "lab":
            from benchmarks.hangs.lab import HEADING, stage_on_lab

            rows = stage_on_lab(options.only, options.at_once, options.minutes, folder)
            write_part(HEADING, rows)
            return
        until = time.monotonic() + 60 * options.minutes
        cases = [x for x in CASES if not options.only or any(w in x.name for w in options.only)]
        kinds = sorted({(case.kind, case.ranks) for case in cases})
        plain = [Case(f"plain {kind} {ranks}", "", "", None, kind, ranks) for kind, ranks in kinds]
        with ThreadPoolExecutor(options.at_once) as pool:
            found = pool.map(lambda case: stage(case, folder, until=until), [*plain, *cases])
            results = [one for one in found if one is not None]
    print(render(results))
    page = RESULTS / "hangs.md"
    _, mark, other = page.read_text().partition("\n## ")
    page.write_text(render(results) + mark + other)


if __name__ == "__main__":
    main()
