"""vjob's word against Slurm's own record, on the lab: layouts x faults x phases.

    python -m benchmarks.commands.truth [--lives] [--only TEXT] [--again] [--write]

A cell is one run of a program without torch that a fault hits as it starts, trains, or has done
its last step; or one that Slurm lets wait, for a reason that passes or never does. Cells of one
fault run beside each other, and so do faults that hit their own run alone. Then `vjob status
JOB`, `vjob status`, `vjob list`, `vjob report JOB` and `vjob.job(JOB)` are held against `scontrol
show job`, `squeue` and `sacct` until they agree, or a deadline has passed: the state of the run,
the verdict and its exit code, the words for the fault, and one command against the next. What is
done is kept in truth.json: a second call goes on where the first one was cut off. `--lives` does
the second part, lives.py, and keeps it in truth_lives.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import RESULTS
from benchmarks.commands import lives
from tests.cluster.lab import Lab
from tests.command import Vjob
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.slurm.commands import (
    build_sacct_command,
    build_squeue_command,
    parse_sacct_output,
    parse_show_job_output,
    parse_squeue_output,
)

RESULT, TABLE = RESULTS / "truth.md", RESULTS / "truth.json"
LIVES_TABLE = RESULTS / "truth_lives.json"
LAYOUTS = ("plain", "het", "split", "morph")
PHASES = ("start", "training", "end")
AT_ONCE = 8
"""Runs beside each other: the first node of each queue has room for eight."""
PROGRAM = """
import os, pathlib, sys, time

folder, rank = pathlib.Path(__file__).parent, int(os.environ["RANK"])


def wait(name):
    while not (folder / name).exists():
        if rank == 1 and (folder / "fail").exists() and not (folder / "failed").exists():
            (folder / "failed").touch()
            print("ValueError: this is the end", file=sys.stderr, flush=True)
            sys.exit(7)
        time.sleep(0.2)


print("ready", flush=True)
wait("training")
for step in range(1, 6):
    print(f"step {step}/9 loss {1 / step:.4f}", flush=True)
    time.sleep(0.2)
wait("end")
print("step 9/9 loss 0.1", flush=True)
wait("leave")
"""
CONF = """
name: {name}
program: {{script: work.py, snapshot: none}}
{morph}
cluster:
  scheduler: slurm
  hetero: {hetero}
  walltime_min: {walltime_min}
  requeue: {requeue}
  grace_s: 3
  join_s: 120
  lost_s: {lost_s}
  sbatch: {{{sbatch}}}
  nodes:
{nodes}
"""
GROUPS = {
    "plain": (
        "auto",
        "    - {{group: all, count: 2, queue: {b}, ranks: 1, cpus: 1, sbatch: {{{where}}}}}",
    ),
    "het": (
        "hetjob",
        "    - {{group: weak, count: 1, queue: {b}, ranks: 1, cpus: 1, sbatch: {{{where}}}}}\n"
        # A node of another kind also where the queue has all.
        "    - {{group: strong, count: 1, queue: {a}, ranks: 1, cpus: 1, "
        "sbatch: {{constraint: a100}}}}",
    ),
}
GROUPS["split"] = ("split", GROUPS["het"][1])
GROUPS["morph"] = GROUPS["plain"]
MORPH = "morph: {enabled: true, mode: world, min_nodes: 1, warm: false}"
API = """
import json, sys, vjob

job = vjob.job(sys.argv[1])
found = job.status().as_dict()["verdict"]
keys = ("health", "reason", "exit_code")
print(json.dumps({"state": job.state, "is_done": job.done(), **{key: found[key] for key in keys}}))
"""
READY_S, AGREE_S = 180.0, 150.0
LIVE = "STARTING RUNNING HEALTHY SLOW STALLED CHECKPOINTING MORPHING REQUEUED"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: its layout, its fault, and when."""

    layout: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.fault}, {self.phase}"


@dataclass(kw_only=True)
class Case:
    """A cell at work."""

    cell: Cell
    vjob: Vjob
    run: RunFolder
    jobs: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    """Problems that only the moment of the fault shows."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What Slurm and each command say of one run at one time."""

    slurm: tuple[SchedulerJob, ...]
    status: Mapping[str, Any]
    code: int
    row: Mapping[str, Any]
    listed: Mapping[str, Any]

    @property
    def verdict(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.status["verdict"]
        return found


@dataclass(frozen=True, kw_only=True)
class More:
    """What else Slurm and vjob have to say of one run, in the same state."""

    squeue: tuple[SchedulerJob, ...]
    sacct: tuple[SchedulerJob, ...]
    api: Mapping[str, Any]
    """Of the Python interface."""
    report: str
    """The state in the header of the report, which a run that has not begun may not have."""


T = TypeVar("T")
S = TypeVar("S")
Do = Callable[[Lab, Sequence[Case]], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run, and what every command has to say then."""

    do: Do
    """All cases of a batch at once."""
    states: str
    """Words of Slurm that may follow; where it says another one, the lab did not do its part."""
    healths: str
    says: str = ""
    """Pattern that the verdict's reason has."""
    never: str = r"vjob cancel|somebody ended|SIGTERM from the scheduler|slurmstepd"
    """Pattern that it has not."""
    code: int | None = None
    queues: tuple[str, str] = ("gpu1", "gpu2")
    requeue: bool = False
    walltime_min: int = 10
    sbatch: str = ""
    where: str = "constraint: a10"
    """Option of sbatch for the first group's nodes."""
    lost_s: int = 15
    waits: bool = False
    """It waits in the queue for good: there are no phases."""
    goes_on: str = ""
    """Healths of a run that may morph, which the fault does not end."""
    is_alone: bool = False
    """It hits its own run and nothing else of the cluster."""
    around: Callable[[Lab], contextlib.AbstractContextManager[None]] | None = None
    """What the cluster is like from the submit on."""


# Faults of runs.


def scancel(lab: Lab, cases: Sequence[Case]) -> None:
    lab.run(["scancel", *(job for case in cases for job in case.jobs)])


def cancel(lab: Lab, cases: Sequence[Case]) -> None:
    run_all(lambda case: case.vjob("cancel", str(case.run.path), "--now", code=None), cases)


def cancel_away(lab: Lab, cases: Sequence[Case]) -> None:
    """vjob cancel fails as the controller is away; later somebody runs scancel."""
    lab.stop_controller()
    try:
        run_all(cancel_in_vain, cases)
    finally:
        lab.start_controller()
    scancel(lab, cases)


def cancel_in_vain(case: Case) -> None:
    done = case.vjob("cancel", str(case.run.path), "--now", code=None)
    if done.returncode != 1 or "is not cancelled" not in done.stderr:
        case.notes.append(f"a cancel in vain exits {done.returncode}: {done.stderr.strip()[:200]}")
    found = case.vjob.status(str(case.run.path))["verdict"]
    if found["health"] not in f"{LIVE} UNKNOWN".split():
        case.notes.append(f"with the controller away it is {found['health']}: {found['reason']}")


def requeue(lab: Lab, cases: Sequence[Case]) -> None:
    for case in cases:
        for job in case.jobs:
            lab.run(["scontrol", "requeue", job])


def preempt(lab: Lab, cases: Sequence[Case]) -> None:
    lab.run(["sbatch", "--partition=all", "--exclusive", f"--nodes={len(lab.nodes)}",
             "--output=/dev/null", "--wrap=sleep 600"])  # fmt: skip


def lose_node(lab: Lab, cases: Sequence[Case]) -> None:
    lab.crash_node(VICTIM)


def fail(lab: Lab, cases: Sequence[Case]) -> None:
    for case in cases:
        (case.vjob.folder / "fail").touch()


def remove_folder(lab: Lab, cases: Sequence[Case]) -> None:
    """Looked at while the jobs go on."""
    run_all(lambda case: remove_one(lab, case), cases)


def remove_one(lab: Lab, case: Case) -> None:
    """What a command says counts if the job goes on until then."""
    # Renamed first: whoever still writes into it would keep a part of it.
    shutil.rmtree(case.run.path.rename(case.vjob.folder / "removed"), ignore_errors=True)
    words = ("last", case.cell.layout, "")
    for word, (problem, is_over) in zip(
        words, run_all(lambda word: look_for_removed(lab, case, word), words), strict=True
    ):
        if is_over:
            case.notes.append(f"the job ended before `vjob status {word}` had answered")
        elif problem:
            case.notes.append(problem)


def look_for_removed(lab: Lab, case: Case, word: str) -> tuple[str, bool]:
    """What is wrong with the answer, and whether the job was over then."""
    done = case.vjob("status", *([word] if word else []), "--json", code=None)
    problem = ""
    if word and (
        done.returncode != 2 or not done.stderr.strip().endswith(f"scancel {' '.join(case.jobs)}")
    ):
        problem = f"status {word} exits {done.returncode}: {done.stderr[-300:]}"
    if not word and [row["jobs"] for row in json.loads(done.stdout)] != [list(case.jobs)]:
        problem = f"the table has {done.stdout}"
    return problem, all(info.state in OVER for info in ask_slurm(lab, case.jobs))


def nothing(lab: Lab, cases: Sequence[Case]) -> None:
    pass


VICTIM = "b1"


@contextlib.contextmanager
def partitions(lab: Lab, change: str, back: str) -> Iterator[None]:
    for queue in ("gpu1", "gpu2"):
        lab.run(["scontrol", "update", f"partitionname={queue}", change])
    try:
        yield
    finally:
        for queue in ("gpu1", "gpu2"):
            lab.run(["scontrol", "update", f"partitionname={queue}", back])


@contextlib.contextmanager
def drained(lab: Lab) -> Iterator[None]:
    names = f"nodename={','.join(lab.nodes)}"
    lab.run(["scontrol", "update", names, "state=drain", "reason=truth"])
    try:
        yield
    finally:
        lab.run(["scontrol", "update", names, "state=resume"])


@contextlib.contextmanager
def occupied(lab: Lab) -> Iterator[None]:
    job = lab.run(["sbatch", "--parsable", "--partition=all", "--exclusive", "--output=/dev/null",
                   f"--nodes={len(lab.nodes)}", "--wrap=sleep 600"]).stdout.strip()  # fmt: skip
    try:
        wait_until(lambda: "RUNNING" in lab.run(["scontrol", "show", "job", job]).stdout, 60)
        yield
    finally:
        lab.run(["scancel", job])


def waiting(reason: str, *, never: bool = False, **more: Any) -> Fault:
    """A job that pends: Slurm's reason is shown, and the exit code says if it passes."""
    return Fault(do=nothing, states="PENDING", healths="PENDING", says=reason,
                 never="stopped|dead", code=12 if never else 0, waits=True, **more)  # fmt: skip


FAULTS: Mapping[str, Fault] = {
    "scancel": Fault(
        do=scancel, states="CANCELLED", healths="CANCELLED", says="cancel", code=16, is_alone=True
    ),
    "vjob cancel": Fault(
        do=cancel, states="CANCELLED", healths="CANCELLED", says="vjob cancel", code=16,
        never="somebody ended|slurmstepd", is_alone=True,
    ),
    "cancel in vain, then scancel": Fault(
        do=cancel_away, states="CANCELLED", healths="CANCELLED", says="cancel", code=16
    ),
    "time limit": Fault(
        do=nothing, states="TIMEOUT", healths="DEAD", says="time limit", code=10, walltime_min=1,
        is_alone=True,
    ),
    "requeue": Fault(
        do=requeue, states="PENDING REQUEUED CONFIGURING RUNNING", healths=LIVE, requeue=True,
        is_alone=True,
    ),
    "preemption": Fault(
        do=preempt, states="PENDING REQUEUED", healths="REQUEUED", requeue=True,
        queues=("low", "low"),
    ),
    "lost node": Fault(
        do=lose_node, states="NODE_FAIL FAILED", healths="DEAD", says=rf"{VICTIM} was lost",
        code=10, goes_on=LIVE, where=f"nodelist: {VICTIM}",
    ),
    "failed rank": Fault(
        do=fail, states="FAILED", healths="DEAD", says=r"rank 1 on \S+ exited 7", code=10,
        goes_on=LIVE, is_alone=True,
    ),
    # The agents end their ranks after lost_s: no command has answered by then on a busy machine.
    "deleted folder": Fault(do=remove_folder, states="", healths="", lost_s=300, is_alone=True),
    "waits: resources": waiting("Resources|Priority", around=occupied),
    "waits: begin time": waiting("BeginTime", sbatch="begin: now+1hour", is_alone=True),
    "waits: queue down": waiting(
        "PartitionDown", around=lambda lab: partitions(lab, "state=down", "state=up")
    ),
    "waits: nodes drained": waiting("sinfo -R", around=drained),
    "never: held": waiting("JobHeldUser", never=True, sbatch="hold: true", is_alone=True),
    "never: account": waiting(
        "account not permitted.*cluster.account|AccountNotAllowed", never=True,
        around=lambda lab: partitions(lab, "AllowAccounts=nobody", "AllowAccounts=ALL"),
    ),
    "never: time": waiting(
        "walltime_min", never=True,
        around=lambda lab: partitions(lab, "MaxTime=1", "MaxTime=INFINITE"),
    ),
    "never: nodes": waiting(
        "lower count", never=True,
        around=lambda lab: partitions(lab, "MaxNodes=0", "MaxNodes=UNLIMITED"),
    ),
}  # fmt: skip


PREEMPTED = replace(
    FAULTS["preemption"], states="PREEMPTED FAILED", healths="DEAD", says="preempt", code=10,
    never="vjob cancel|somebody ended|slurmstepd", requeue=False,
)  # fmt: skip
"""Of a split run, whose jobs do not come again one by one. Slurm calls a job FAILED whose batch
script ended within the queue's GraceTime."""
REFUSED = ("split", "requeue")
"""A conf with both is refused."""


def find_fault(cell: Cell) -> Fault:
    is_split = (cell.layout, cell.fault) == ("split", "preemption")
    return PREEMPTED if is_split else FAULTS[cell.fault]


def list_cells() -> list[Cell]:
    """All cells, every fault in training first."""
    places = [
        (fault, phase)
        for phase in ("training", "start", "end")
        for fault, facts in FAULTS.items()
        if not facts.waits
    ]
    waits = [(fault, "queue") for fault, facts in FAULTS.items() if facts.waits]
    first = len(FAULTS) - len(waits)
    return [
        Cell(layout=layout, fault=fault, phase=phase)
        for fault, phase in [*places[:first], *waits, *places[first:]]
        for layout in LAYOUTS
        if (layout, fault) != REFUSED
    ]


def build_batches(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells to run beside each other: of one fault, or of faults that hit their run alone."""
    alike: dict[str, list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        alike.setdefault("" if FAULTS[cell.fault].is_alone else cell.fault, []).append(cell)
    return [
        found[begin : begin + AT_ONCE]
        for found in alike.values()
        for begin in range(0, len(found), AT_ONCE)
    ]


# A batch.


def run_cells(lab: Lab, cells: Sequence[Cell], folder: Path) -> dict[Cell, list[str]]:
    """The problems of cells beside each other, of one fault where it hits the cluster."""
    facts = FAULTS[cells[0].fault]
    with facts.around(lab) if facts.around is not None else contextlib.nullcontext():
        cases = [case for case in run_all(lambda cell: submit(lab, cell, folder), cells) if case]
        found = {cell: ["not submitted"] for cell in cells}
        try:
            ready = run_all(lambda case: bring_to_phase(lab, case), cases)
            for case, problem in zip(cases, ready, strict=True):
                found[case.cell] = [problem] if problem else []
            cases = [case for case in cases if not found[case.cell]]
            for fault in dict.fromkeys(case.cell.fault for case in cases):
                FAULTS[fault].do(lab, [case for case in cases if case.cell.fault == fault])
            problems_by_case = run_all(lambda case: await_agreement(lab, case), cases)
            for case, problems in zip(cases, problems_by_case, strict=True):
                found[case.cell] = [*case.notes, *problems]
        finally:
            jobs = [job for case in cases for job in case.jobs]
            lab.run(["scancel", *jobs], check=False)
    return found


def run_all(do: Callable[[T], S], items: Iterable[T]) -> list[S]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(do, items))


def wait_until(is_so: Callable[[], object], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def submit(lab: Lab, cell: Cell, folder: Path) -> Case | None:
    """None where the submit failed, which is printed."""
    facts = find_fault(cell)
    own = folder / re.sub(r"\W+", "-", str(cell))
    own.mkdir()
    (own / "work.py").write_text(PROGRAM)
    hetero, groups = GROUPS[cell.layout]
    vjob = Vjob(own, lab.env)
    text = CONF.format(
        name=cell.layout,
        hetero=hetero,
        nodes=groups.format(a=facts.queues[0], b=facts.queues[1], where=facts.where),
        morph=MORPH if cell.layout == "morph" else "",
        requeue=str(facts.requeue).lower(),
        walltime_min=facts.walltime_min,
        lost_s=facts.lost_s,
        sbatch=facts.sbatch,
    )
    try:
        run = vjob.submit(text)
    except AssertionError as error:
        print(f"{cell}: {error}", file=sys.stderr, flush=True)
        return None
    jobs = tuple(str(job["id"]) for job in read_json(run.record)["jobs"])
    return Case(cell=cell, vjob=vjob, run=run, jobs=jobs)


def bring_to_phase(lab: Lab, case: Case) -> str:
    """A problem where it did not get there."""
    if case.cell.phase == "queue":
        return ""
    for phase in PHASES[1 : 1 + PHASES.index(case.cell.phase)]:
        (case.vjob.folder / phase).touch()
    mark = {"start": "ready", "training": "step 5/9", "end": "step 9/9"}[case.cell.phase]

    def is_there() -> bool:
        logs = list(case.run.attempt(0).path.glob("*.out"))
        return sum(mark in path.read_text(errors="replace") for path in logs) == 2

    if wait_until(is_there, READY_S):
        return ""
    return f"did not come to its {case.cell.phase}: {case.vjob.explain(case.run)[:1500]}"


def await_agreement(lab: Lab, case: Case) -> list[str]:
    """No problem as soon as all agree; those of the last look else."""
    deadline, reason = time.monotonic() + AGREE_S, ""
    while find_fault(case.cell).healths:
        try:
            seen = look(lab, case)
            reason = f"{seen.verdict['health']}: {seen.verdict['reason']}"
            problems = find_problems(case.cell, seen)
            if not problems:
                problems = find_more_problems(case.cell, seen, look_further(lab, case))
        except (ValueError, KeyError, StopIteration) as error:
            problems = [f"a command printed no answer: {error!r}"]
        if not problems or time.monotonic() > deadline:
            print(f"      {case.cell}: {reason}", flush=True)
            return problems
        time.sleep(3.0)
    return []


def look(lab: Lab, case: Case) -> Seen:
    """Slurm is asked before and after: what changed in between is looked at again."""
    while True:
        before = ask_slurm(lab, case.jobs)
        done = case.vjob("status", str(case.run.path), "--json", code=None)
        rows = json.loads(case.vjob("status", "--json").stdout)
        listed = json.loads(case.vjob("list", "--json").stdout)
        if [x.state for x in ask_slurm(lab, case.jobs)] == [x.state for x in before]:
            return Seen(slurm=tuple(before), status=json.loads(done.stdout),
                        code=done.returncode, row=rows[-1], listed=listed[-1])  # fmt: skip


def look_further(lab: Lab, case: Case) -> More:
    """What takes longer: asked once the rest agrees."""
    vjob, path = case.vjob, str(case.run.path)
    queue = parse_squeue_output(lab.run(build_squeue_command(os.getuid())).stdout)
    history = parse_sacct_output(lab.run(build_sacct_command(case.jobs)).stdout)
    said = subprocess.run([sys.executable, "-c", API, path], cwd=vjob.folder, env=vjob.env,
                          capture_output=True, text=True, timeout=150, check=False)  # fmt: skip
    report = vjob("report", path, "--json", code=None)
    return More(
        squeue=tuple(info for job in case.jobs for info in queue if info.leader == job),
        sacct=tuple(info for job in case.jobs for info in history if info.leader == job),
        api=json.loads(said.stdout or json.dumps({"said": said.stderr[-500:]})),
        report=json.loads(report.stdout)["headline"]["state"] if report.stdout else report.stderr,
    )


def ask_slurm(lab: Lab, jobs: Sequence[str]) -> list[SchedulerJob]:
    """As the controller says; what it has forgotten, as accounting does."""
    found = []
    for job in jobs:
        shown = lab.run(["scontrol", "-o", "show", "job", job], check=False).stdout
        infos = parse_show_job_output(shown)
        if not infos:
            infos = parse_sacct_output(lab.run(build_sacct_command([job])).stdout)
        found += infos
    return found


def find_problems(cell: Cell, seen: Seen) -> list[str]:
    """What disagrees; a verdict's words are those of the single view."""
    facts, verdict = find_fault(cell), seen.verdict
    health, reason = verdict["health"], verdict["reason"]
    goes_on = cell.layout == "morph" and bool(facts.goes_on)
    problems = []
    words = {info.state for info in seen.slurm}
    wanted = f"{facts.states} RUNNING" if goes_on else facts.states
    if not any(word.value in wanted.split() for word in words):
        problems.append(f"Slurm says {sorted(x.value for x in words)}, not {facts.states}")
    if seen.status["state"] not in list_states(cell, seen.slurm):
        problems.append(
            f"state {seen.status['state']}, Slurm {[x.native_word for x in seen.slurm]}"
        )
    if health not in (facts.goes_on if goes_on else facts.healths).split():
        problems.append(f"verdict {health}: {reason}")
    if facts.says and not goes_on and not re.search(facts.says, reason):
        problems.append(f"not said: {facts.says}, but: {reason}")
    if re.search(facts.never, reason):
        problems.append(f"said: {reason}")
    if facts.code is not None and not goes_on and seen.code != facts.code:
        problems.append(f"exit code {seen.code}")
    if seen.code != verdict["exit_code"]:
        problems.append(f"exit code {seen.code}, in the JSON form {verdict['exit_code']}")
    if seen.row["state"] != health:
        problems.append(f"the table says {seen.row['state']}, status {health}")
    if not goes_on and not agree(seen.row["message"], reason):
        problems.append(f"the table: {seen.row['message']!r}; status: {reason!r}")
    if seen.listed["state"] != seen.status["state"]:
        problems.append(f"list says {seen.listed['state']}, status {seen.status['state']}")
    pends = [info for info in seen.slurm if info.state is JobState.PENDING]
    if facts.waits and not any(info.reason_text in reason for info in pends):
        problems.append(f"Slurm's reason {[x.reason_text for x in pends]}, shown: {reason}")
    return problems


def find_more_problems(cell: Cell, seen: Seen, more: More) -> list[str]:
    """What disagrees with those who agree so far."""
    state, verdict = seen.status["state"], seen.verdict
    problems = []
    for name, infos in (("squeue", more.squeue), ("sacct", more.sacct)):
        if infos and state not in list_states(cell, infos):
            problems.append(f"state {state}, {name} {[x.native_word for x in infos]}")
    if not more.squeue and not more.sacct:
        problems.append("neither squeue nor sacct knows the job")
    is_over = all(info.state in OVER for info in seen.slurm)
    wanted = {"state": state, "is_done": is_over} | {
        key: verdict[key] for key in ("health", "exit_code")
    }
    for key, value in wanted.items():
        if more.api.get(key) != value:
            problems.append(f"the Python interface: {key} {more.api.get(key)}, not {value}")
    goes_on = cell.layout == "morph" and bool(find_fault(cell).goes_on)
    if not goes_on and not agree(str(more.api.get("reason")), verdict["reason"]):
        problems.append(f"the Python interface: {more.api.get('reason')!r}")
    word, _, reason = more.report.partition(": ")
    has_begun = cell.phase != "queue"
    if has_begun and word != state:
        problems.append(f"the report says {more.report}, status {state}")
    if has_begun and is_over and reason.strip() != seen.listed["message"].strip():
        problems.append(f"the report says {reason}, list {seen.listed['message']}")
    return problems


def list_states(cell: Cell, infos: Sequence[SchedulerJob]) -> set[str]:
    """Words that are right for a run of these jobs: one that is over has that of its first job that
    did not end well, one that goes on has that of a job that does."""
    if all(info.state in OVER for info in infos):
        bad = [info.state.value for info in infos if info.state is not JobState.COMPLETED]
        return set(bad[:1]) or {"COMPLETED"}
    return {info.state.value for info in infos if info.state not in OVER}


def agree(one: str, other: str) -> bool:
    """One of them may say more, as a table reads no logs of runs that are over; and is older."""
    first, second = (re.sub(r"[\d.]+ (ms|s|min|h)\b", "T", text) for text in (one, other))
    return first.startswith(second) or second.startswith(first)


# The page.


def render(found: Mapping[str, Sequence[str]], version: str) -> str:
    cells = list_cells()
    done = [cell for cell in cells if str(cell) in found]
    bad = [cell for cell in done if found[str(cell)]]
    lines = [
        "# vjob's word against Slurm's record",
        "",
        "Made by `python -m benchmarks.commands.truth --write`: for each cell a run on the lab, "
        "and `vjob status JOB`, `vjob status`, `vjob list`, `vjob report JOB` and `vjob.job(JOB)` "
        f"held against scontrol, squeue and sacct. {version}.",
        "",
        f"{len(done)} of {len(cells)} cells done, {len(done) - len(bad)} agree.",
        "",
        "| fault | phase | " + " | ".join(LAYOUTS) + " |",
        "|---|---|" + "---|" * len(LAYOUTS),
    ]
    for fault, facts in FAULTS.items():
        for phase in ("queue",) if facts.waits else PHASES:
            words = []
            for layout in LAYOUTS:
                problems = found.get(str(Cell(layout=layout, fault=fault, phase=phase)))
                if (layout, fault) == REFUSED:
                    words.append("refused by submit")
                    continue
                words.append("-" if problems is None else "no" if problems else "agree")
            lines.append(f"| {fault} | {phase} | {' | '.join(words)} |")
    if bad:
        lines += ["", "## What disagrees", ""]
        for cell in bad:
            said = "; ".join(" ".join(problem.split())[:300] for problem in found[str(cell)])
            lines.append(f"- {cell}: {said}")
    return "\n".join(lines) + "\n"


def run_lives(options: argparse.Namespace) -> None:
    """The second part, in batches."""
    found: dict[str, Any] = read_json(LIVES_TABLE) or {}
    names = [
        name
        for name in lives.LIVES
        if re.search(options.only, name)
        if options.again or name not in found or (options.failed and found[name]["differences"])
    ]
    lab, end = Lab.start(), time.monotonic() + 60 * options.minutes
    try:
        found["version"] = lab.run(["sinfo", "--version"]).stdout.strip()
        lab.run([*ADD_LICENSE.split(), "cluster=vjoblab"], check=False)
        for batch in lives.build_batches(names)[: options.most]:
            if time.monotonic() > end:
                break
            lab.repair()
            with tempfile.TemporaryDirectory(
                prefix="vjob-lives-", ignore_cleanup_errors=True
            ) as folder:
                for name, life in lives.live(lab, batch, Path(folder)).items():
                    differences = list(dict.fromkeys(life.differences))
                    found[name] = {
                        "of": time.strftime("%Y-%m-%d"),
                        "moments": life.num_moments,
                        "differences": differences,
                    }
                    print(f"{life.num_moments:3} moments, {life.num_moved} moved: {name}")
                    print(*(f"     {text}" for text in differences), sep="\n", flush=True)
            LIVES_TABLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        lab.repair()
    finally:
        if lab.started_here:
            lab.stop()


ADD_LICENSE = (
    "sacctmgr -i add resource name=matlab count=1 server=srv servertype=flexlm type=license "
    "percentallowed=100"
)


def write_page() -> None:
    """Both parts of the page; a part that was not run is left out."""
    cells, known = read_json(TABLE) or {}, read_json(LIVES_TABLE) or {}
    version = str(known.pop("version", "")) or "slurm-wlm"
    page = render(cells, version)
    if known:
        page += "\n" + "\n".join(lives.render_lives(known, version)) + "\n"
    RESULT.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name has this pattern")
    parser.add_argument("--again", action="store_true", help="cells that are done, too")
    parser.add_argument("--failed", action="store_true", help="those that disagreed, again")
    parser.add_argument("--most", type=int, default=1000, help="batches at most")
    parser.add_argument("--minutes", type=float, default=600.0, help="then no batch begins")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--lives", action="store_true", help="the second part: staged lives")
    options = parser.parse_args()
    if options.lives:
        run_lives(options)
        if options.write:
            write_page()
        return
    found: dict[str, list[str]] = read_json(TABLE) or {}
    cells = [
        cell
        for cell in list_cells()
        if re.search(options.only, str(cell))
        if options.again or str(cell) not in found or (options.failed and found[str(cell)])
    ]
    batches = build_batches(cells)
    lab = Lab.start()
    end = time.monotonic() + 60 * options.minutes
    try:
        for batch in batches[: options.most]:
            if time.monotonic() > end:
                break
            lab.repair()
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(
                prefix="vjob-truth-", ignore_cleanup_errors=True
            ) as folder:
                results = run_cells(lab, batch, Path(folder))
                for cell, problems in results.items():
                    print(
                        f"{'no   ' if problems else 'agree'} {cell}  {problems or ''}", flush=True
                    )
            print(f"      {time.monotonic() - begun:.0f} s", flush=True)
            found.update({str(cell): problems for cell, problems in results.items()})
            # Also of a run that is cut off.
            TABLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        lab.repair()
    finally:
        if lab.started_here:
            lab.stop()
    if options.write:
        write_page()
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
