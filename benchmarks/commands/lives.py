"""Lives of jobs on the lab, and what Slurm and vjob say of them at the same moments.

    python -m benchmarks.commands.truth --lives [--only TEXT] [--minutes 20] [--write]

A life is one run, or two of a chain, to which things happen: it is held, requeued, preempted, its
limit is changed, its node drained. At each moment of it scontrol and sacct are asked, then `vjob
status --json`, `vjob list --json` and `vjob report --json`, then scontrol again; where Slurm's own
words changed in between there was no moment. A parser of this module reads Slurm's texts. Compared
are state, reason, limit, start, end, nodes, exit code, restarts, preemption, and what the life
itself knows of its reason to wait, its nodes and the causes of its requeues.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.lab import Lab
from tests.command import Vjob

PROGRAM = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(__file__).parent, int(os.environ.get("RANK", 0))
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
steps, pace, code = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
for step in range(1, steps + 1):
    time.sleep(pace)
    if rank == 0:
        print(f"step {step}/{steps} loss {1 / step:.4f}", flush=True)
    if stop:
        break
sys.exit(code if rank == 0 and int(os.environ.get("VJOB_ATTEMPT", 0)) == 0 else 0)
"""
CONF = """
name: {name}
program: {{script: work.py, snapshot: none, args: ["{steps}", "{pace}", "{code}"]}}
cluster:
  scheduler: slurm
  hetero: {hetero}
  walltime_min: {walltime_min}
  requeue: {requeue}
  restarts: {restarts}
  grace_s: 2
  join_s: 60
  sbatch: {{{sbatch}}}
  nodes:
{nodes}
"""
ONE = "    - {{group: all, count: 1, queue: {queue}, ranks: 1, cpus: 1, sbatch: {{{where}}}}}"
TWO = (
    "    - {{group: weak, count: 1, queue: gpu2, ranks: 1, cpus: 1}}\n"
    "    - {{group: strong, count: 1, queue: gpu1, ranks: 1, cpus: 1}}"
)
WAIT_S = 40.0
CLOCK_S = 2.0
"""Slurm's times are whole seconds."""
OVER = "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY DEADLINE BOOT_FAIL"
ENDED = ("DONE", "DEAD", "CANCELLED", "REFUSED")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Facts that must hold at one moment of a life and that Slurm does not print."""

    waiting: str = ""
    """A name of `Waiting`."""
    says: str = ""
    """Pattern that the verdict, its advice or a remark has."""
    earlier: tuple[str, ...] | None = None
    """Causes of the ends of its earlier starts."""
    health: str = ""
    state: str = ""
    """It holds only while Slurm has this state; others may have come since."""
    is_rest: bool = False
    """No moment is taken."""


ANY, REST = Wanted(), Wanted(is_rest=True)
Moments = Iterator[Wanted]


@dataclass(kw_only=True)
class Life:
    """A life under way."""

    name: str
    lab: Lab
    vjob: Vjob
    folder: Path | None = None
    jobs: tuple[str, ...] = ()
    differences: list[str] = field(default_factory=list)
    num_moments: int = 0
    num_moved: int = 0

    def submit(self, *, hetero: str = "auto", two: bool = False, queue: str = "gpu2",
               where: str = "", options: Sequence[str] = (), **words: Any) -> None:  # fmt: skip
        facts = {"steps": 400, "pace": 0.3, "code": 0, "walltime_min": 10, "requeue": "false",
                 "restarts": 0, "sbatch": "", **words}  # fmt: skip
        nodes = TWO.format() if two else ONE.format(queue=queue, where=where)
        text = CONF.format(name=self.name, hetero=hetero, nodes=nodes, **facts)
        conf = self.vjob.write(text, f"{self.name}.yaml")
        said = json.loads(self.vjob("submit", conf, "--json", *options).stdout)
        said = said[-1] if isinstance(said, list) else said  # of a sweep
        self.folder = Path(said["folder"])
        record = json.loads((self.folder / "record.json").read_text())
        self.jobs = tuple(job["id"] for job in record["jobs"])

    def slurm(self, *words: str) -> None:
        """A command of Slurm; {job} is the id of the first job."""
        self.lab.run([word.format(job=self.jobs[0]) for word in words], check=False)

    def shown(self) -> list[dict[str, str]]:
        return [row for job in self.jobs for row in show(self.lab, job)]

    def until(self, *states: str, timeout_s: float = WAIT_S, blocks: bool = False) -> Moments:
        """Let time pass until a job has one of these states, then a moment; `blocks` keeps all
        others waiting for a state that passes."""
        deadline = time.monotonic() + timeout_s
        while True:
            rows = self.shown()
            if any(row["JobState"] in states for row in rows):
                break
            is_over = bool(rows) and all(row["JobState"] in OVER.split() for row in rows)
            if is_over and not set(states) & set(OVER.split()):
                return  # it has passed already
            if time.monotonic() > deadline:
                self.differences.append(f"not staged: never {' or '.join(states)}")
                return
            if blocks:
                time.sleep(0.2)
            else:
                yield REST
        yield Wanted(state=states[0] if len(states) == 1 else "")

    def until_preempted(self) -> Moments:
        """Let time pass until Slurm has begun to take its nodes, which a busy controller does
        late."""
        deadline = time.monotonic() + WAIT_S
        while all(
            row["JobState"] == "RUNNING" and to_epoch(row.get("PreemptTime", "")) is None
            for row in self.shown()
        ):
            if time.monotonic() > deadline:
                self.differences.append("not staged: never preempted")
                return
            time.sleep(0.2)
        yield Wanted(says="for another job|preempt|requeued")

    def rest(self, seconds: float) -> Moments:
        """Let time pass while others have their moments."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield REST


def show(lab: Lab, job: str) -> list[dict[str, str]]:
    """A job's words by scontrol, one dictionary a component; by sacct once it is forgotten."""
    text = lab.run(["scontrol", "-o", "show", "job", job], check=False).stdout
    rows = []
    for line in text.splitlines():
        words = dict(re.findall(r"(?:^|\s)([A-Z][\w/:-]*)=(\S*)", line))
        if "JobId" in words:
            rows.append(words)
    return rows


def show_history(lab: Lab, job: str) -> list[list[str]]:
    """Rows of sacct: all starts, the last one too."""
    fields = "JobID,State,ExitCode,Start,End,Timelimit"
    text = lab.run(["sacct", "-n", "-P", "-X", "-D", "-j", job, "-o", fields], check=False).stdout
    return [line.split("|") for line in text.splitlines()]


# A moment.


def take_moment(life: Life, wanted: Wanted) -> None:
    """Compare once; Slurm is asked before and after."""
    forget(life.vjob)
    before = life.shown()
    path = str(life.folder)
    status = json.loads(life.vjob("status", path, "--json", code=None).stdout)
    listed = next(
        row for row in json.loads(life.vjob("list", "--json").stdout) if row["folder"] == path
    )
    done = life.vjob("report", path, "--json", code=None)
    report = json.loads(done.stdout) if done.stdout else {}
    history = [row for job in life.jobs for row in show_history(life.lab, job)]
    after = life.shown()
    if [pick(row) for row in before] != [pick(row) for row in after]:
        life.num_moved += 1
        return
    life.num_moments += 1
    found = [
        *compare_jobs(before, history, status),
        *compare_commands(status, listed, report),
    ]
    states = ",".join(row["JobState"] for row in before) or "forgotten"
    if wanted.state in ("", *states.split(",")):
        found += compare_wanted(wanted, status)
    life.differences += [f"{states}: {text}" for text in found]


def forget(vjob: Vjob) -> None:
    """Drop the answers that vjob shares for some seconds, so that it asks about this moment."""
    shutil.rmtree(Path(vjob.env["XDG_STATE_HOME"]) / "vjob/scheduler", ignore_errors=True)


PICKED = "JobState Reason TimeLimit StartTime EndTime NodeList ExitCode Restarts PreemptTime"


def pick(row: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(row.get(key) for key in PICKED.split())


def compare_jobs(
    shown: Sequence[Mapping[str, str]],
    history: Sequence[Sequence[str]],
    status: Mapping[str, Any],
) -> Iterator[str]:
    """Each job, fact by fact."""
    rows = {row["id"]: row for row in status["scheduler"]["jobs"]}
    for words in shown:
        job = name_component(words)
        row = rows.pop(job, None)
        if row is None:
            yield f"job: Slurm has {job}, vjob {sorted(rows) or 'none'}"
            continue
        for fact, slurm, ours in list_facts(words, row):
            if not is_same(slurm, ours):
                yield f"{fact}: Slurm {slurm}, vjob {ours}"
    for job in rows if shown else ():
        yield f"job: vjob has {job}, Slurm not"
    if not rows and not shown:
        yield "job: none is shown"
    is_known = {row[0]: row for row in history}
    for words in shown:
        kept = is_known.get(name_component(words))
        over = words["JobState"] in OVER.split()
        if over and kept is not None and not kept[1].startswith(words["JobState"]):
            yield f"accounting: sacct {kept[1]}, scontrol {words['JobState']}"
    limits = [to_seconds(words.get("TimeLimit", "")) for words in shown]
    if limits and status["walltime_s"] not in limits:
        yield f"walltime_s: Slurm {limits}, vjob {status['walltime_s']}"


def name_component(words: Mapping[str, str]) -> str:
    if "HetJobOffset" in words:
        return f"{words['HetJobId']}+{words['HetJobOffset']}"
    if words.get("ArrayTaskId", "").isdigit():
        return f"{words['ArrayJobId']}_{words['ArrayTaskId']}"
    return words["JobId"]


def list_facts(words: Mapping[str, str], row: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name of a fact, Slurm's word for it, and vjob's."""
    state = words["JobState"]
    over = state in OVER.split()
    started = state not in ("PENDING", "REQUEUED", "CONFIGURING")
    yield "state", state, row["word"].partition(" ")[0]
    reason = words.get("Reason", "").replace("_", " ")
    if state != "RUNNING":
        yield "reason", "" if reason == "None" else reason, row["reason"]
    yield "limit", to_seconds(words.get("TimeLimit", "")), row["limit_s"]
    if started:
        yield "start", to_epoch(words.get("StartTime", "")), row["started"]
        yield "end", to_epoch(words.get("EndTime", "")), row["ends"]
    elif row["start"]:  # one that will not start as it is has none
        yield "expected start", to_epoch(words.get("StartTime", "")), to_epoch(row["start"])
    yield "nodes", words.get("NodeList", "").replace("(null)", ""), row["nodes"]
    if over:
        yield "exit code", words.get("ExitCode"), row["exit_code"]
    yield "restarts", int(words.get("Restarts", 0)), row["restarts"]
    preempted = to_epoch(words.get("PreemptTime", ""))
    if started and not over:
        yield "preempted", preempted, row["preempted"]


def is_same(slurm: Any, ours: Any) -> bool:
    if isinstance(slurm, float) and isinstance(ours, (int, float)):
        return abs(slurm - ours) <= CLOCK_S
    return bool(slurm == ours)


def to_epoch(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def to_seconds(text: str) -> float | None:
    """`1-02:03:04` or `02:03:04`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def compare_commands(
    status: Mapping[str, Any], listed: Mapping[str, Any], report: Mapping[str, Any]
) -> Iterator[str]:
    """One command against the next."""
    verdict = status["verdict"]
    if listed["state"] != status["state"]:
        yield f"list: {listed['state']}, status {status['state']}"
    if not report:
        return
    is_over = verdict["health"] in ENDED
    if is_over is bool(report["is_partial"]):
        yield f"report: is_partial {report['is_partial']}, status {verdict['health']}"


def compare_wanted(wanted: Wanted, status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the expected facts of this moment that the status does not show."""
    verdict, jobs = status["verdict"], status["scheduler"]["jobs"]
    words = " | ".join((verdict["reason"], verdict["advice"], *verdict["remarks"]))
    if wanted.waiting and jobs and jobs[0]["waiting"] != wanted.waiting:
        yield f"waiting: {wanted.waiting}, vjob {jobs[0]['waiting'] or 'nothing'}"
    if wanted.says and not re.search(wanted.says, words):
        yield f"not said: {wanted.says}, but {words}"
    if wanted.health and verdict["health"] not in wanted.health.split():
        yield f"health: {wanted.health}, vjob {verdict['health']}: {verdict['reason']}"
    if wanted.earlier is not None and jobs and tuple(jobs[0]["earlier"]) != wanted.earlier:
        yield f"causes of requeues: {wanted.earlier}, vjob {jobs[0]['earlier']}"


# Lives. Each yields at its moments.


def plain(life: Life) -> Moments:
    life.submit(steps=40)
    yield ANY
    yield from life.until("RUNNING")
    yield ANY
    yield from life.until("COMPLETED")
    yield Wanted(health="DONE")
    yield Wanted(health="DONE")


def fails(life: Life) -> Moments:
    life.submit(steps=40, code=7)
    yield from life.until("RUNNING")
    yield from life.until("FAILED")
    yield Wanted(health="DEAD", says="exited 7")
    yield Wanted(health="DEAD")


def restarts(life: Life) -> Moments:
    life.submit(steps=40, code=7, restarts=1)
    yield from life.until("RUNNING")
    for _ in range(3):
        yield ANY
    yield from life.until("COMPLETED")
    yield Wanted(health="DONE")


def het(life: Life) -> Moments:
    life.submit(hetero="hetjob", two=True, steps=40)
    yield ANY
    yield from life.until("RUNNING")
    yield ANY
    yield from life.until("COMPLETED")
    yield Wanted(health="DONE")


def het_cancelled(life: Life) -> Moments:
    life.submit(hetero="hetjob", two=True)
    yield from life.until("RUNNING")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield Wanted(health="CANCELLED")


def split(life: Life) -> Moments:
    life.submit(hetero="split", two=True, steps=40)
    yield ANY
    yield from life.until("RUNNING")
    yield ANY
    yield from life.until("COMPLETED")
    yield from life.rest(3)
    yield Wanted(health="DONE")


def held(life: Life) -> Moments:
    life.submit(sbatch="hold: true", steps=40)
    for _ in range(2):
        yield Wanted(waiting="held-by-user", says=f"scontrol release {life.jobs[0]}")
    life.slurm("scontrol", "release", "{job}")
    yield from life.until("RUNNING")
    yield from life.until("COMPLETED")
    yield ANY


def held_by_admin(life: Life) -> Moments:
    life.submit(sbatch="begin: now+1hour")
    yield Wanted(waiting="begin-time")
    life.slurm("scontrol", "update", "jobid={job}", "priority=0")
    for _ in range(2):
        yield Wanted(waiting="held-by-admin", says="ask an admin to release it")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield Wanted(health="CANCELLED")


def begins_later(life: Life) -> Moments:
    life.submit(sbatch="begin: now+1hour", steps=40)
    for _ in range(2):
        yield Wanted(waiting="begin-time", says="expected to start")
    life.slurm("scontrol", "update", "jobid={job}", "starttime=now")
    yield from life.until("RUNNING")
    yield from life.until("COMPLETED")
    yield ANY


def depends(life: Life) -> Moments:
    other = sleep_job(life.lab, "--time=5")
    life.submit(sbatch=f"dependency: 'afterok:{other}'", steps=40)
    for _ in range(2):
        yield Wanted(waiting="dependency", says=f"afterok:{other}")
    life.lab.run(["scancel", other])
    yield from life.rest(4)
    yield Wanted(waiting="dependency", says="will not start")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield ANY


def chain(life: Life) -> Moments:
    first = Life(name=f"{life.name}-1", lab=life.lab, vjob=life.vjob)
    first.submit(steps=40)
    life.submit(steps=40, options=("--after", str(first.folder)))
    yield Wanted(waiting="dependency", says=f"{first.folder.name if first.folder else ''} to end")
    yield from first.until("RUNNING")
    yield from life.until("COMPLETED")
    yield Wanted(health="DONE")


def broken_chain(life: Life) -> Moments:
    first = Life(name=f"{life.name}-1", lab=life.lab, vjob=life.vjob)
    first.submit(steps=40, code=3)
    life.submit(steps=40, options=("--after", str(first.folder)))
    yield Wanted(waiting="dependency")
    yield from life.until("CANCELLED")
    yield Wanted(health="CANCELLED", says="did not end well")


def requeued(life: Life) -> Moments:
    life.submit(requeue="true")
    yield from life.until("RUNNING")
    yield from life.rest(2)
    life.slurm("scontrol", "requeue", "{job}")
    yield from life.until("PENDING", blocks=True)
    yield Wanted(state="PENDING", earlier=("requeued",), says="requeued once")
    yield from life.until("RUNNING")
    yield Wanted(earlier=("requeued",))
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield Wanted(earlier=("requeued",))


def requeue_held(life: Life) -> Moments:
    life.submit(requeue="true")
    yield from life.until("RUNNING")
    life.slurm("scontrol", "requeuehold", "{job}")
    yield from life.until("PENDING", "REQUEUE_HOLD", blocks=True)
    yield from life.rest(3)
    yield Wanted(says=f"scontrol release {life.jobs[0]}", earlier=("requeued",))
    life.slurm("scontrol", "release", "{job}")
    yield from life.until("RUNNING")
    yield ANY


def limit_raised(life: Life) -> Moments:
    life.submit(walltime_min=2, steps=2000)
    yield from life.until("RUNNING")
    yield from life.rest(6)
    yield Wanted(says="the job will not finish: .* its time limit ends it", state="RUNNING")
    life.slurm("scontrol", "update", "jobid={job}", "timelimit=20")
    yield Wanted(health="HEALTHY STARTING RUNNING", state="RUNNING")
    yield from life.rest(2)
    yield Wanted(health="HEALTHY STARTING RUNNING", state="RUNNING")


def limit_lowered(life: Life) -> Moments:
    life.submit(steps=2000)
    yield from life.until("RUNNING")
    life.slurm("scontrol", "update", "jobid={job}", "timelimit=2")
    yield from life.rest(6)
    for _ in range(2):
        yield Wanted(says="time limit ends (it|the job)", state="RUNNING")


def limit_of_waiting(life: Life) -> Moments:
    life.submit(sbatch="hold: true")
    yield ANY
    life.slurm("scontrol", "update", "jobid={job}", "timelimit=3")
    yield ANY


def time_limit(life: Life) -> Moments:
    life.submit(walltime_min=1)
    yield from life.until("RUNNING")
    yield from life.rest(30)
    yield Wanted(says="time limit ends (it|the job)", state="RUNNING")
    yield from life.until("TIMEOUT", timeout_s=90)
    yield Wanted(health="DEAD", says="time limit was reached")


def drained(life: Life) -> Moments:
    life.submit(where="nodelist: b2")
    yield from life.until("RUNNING")
    life.lab.run(["scontrol", "update", "nodename=b2", "state=drain", "reason=ECC GPU2"])
    for _ in range(2):
        yield Wanted(says="drains node b2: ECC GPU2", health="HEALTHY STARTING RUNNING")
    life.lab.run(["scontrol", "update", "nodename=b2", "state=resume"])
    yield ANY


def drained_before(life: Life) -> Moments:
    life.lab.run(["scontrol", "update", "nodename=b3", "state=drain", "reason=fan"])
    life.submit(where="nodelist: b3", steps=40)
    yield from life.rest(3)
    yield Wanted(waiting="nodes-down", says="sinfo -R")
    life.lab.run(["scontrol", "update", "nodename=b3", "state=resume"])
    yield from life.until("COMPLETED")


def set_down(life: Life) -> Moments:
    life.submit(where="nodelist: b4")
    yield from life.until("RUNNING")
    life.lab.run(["scontrol", "update", "nodename=b4", "state=down", "reason=burnt"])
    yield from life.until("NODE_FAIL", "FAILED")
    yield Wanted(health="DEAD")
    life.slurm("scontrol", "update", "nodename=b4", "state=resume")


def power_cut(life: Life) -> Moments:
    life.submit(where="nodelist: b1")
    yield from life.until("RUNNING")
    yield from life.rest(3)
    life.lab.crash_node("b1")
    yield ANY
    yield from life.until("NODE_FAIL", timeout_s=90)
    yield Wanted(health="DEAD", says="b1|node")
    yield Wanted(health="DEAD")
    life.lab.restore_node("b1")


def preempted(life: Life) -> Moments:
    life.submit(queue="low", where="nodelist: a2", requeue="true")
    yield from life.until("RUNNING")
    yield from life.rest(2)
    other = sleep_job(life.lab, "--partition=gpu1", "--nodelist=a2", "--exclusive")
    yield from life.until_preempted()
    yield from life.until("PENDING", blocks=True)
    yield Wanted(state="PENDING", earlier=("preempted",), says="preempted by another job")
    life.lab.run(["scancel", other])
    yield from life.until("RUNNING")
    yield Wanted(earlier=("preempted",))


def preempted_for_good(life: Life) -> Moments:
    life.submit(queue="low", where="nodelist: a1")
    yield from life.until("RUNNING")
    yield from life.rest(2)
    other = sleep_job(life.lab, "--partition=gpu1", "--nodelist=a1", "--exclusive")
    yield from life.until("PREEMPTED", "FAILED")
    yield Wanted(says="preempt", health="DEAD")
    life.lab.run(["scancel", other])


def deadline(life: Life) -> Moments:
    life.submit(sbatch="deadline: now+70, hold: true", walltime_min=1)
    yield Wanted(waiting="held-by-user")
    yield from life.rest(15)
    life.slurm("scontrol", "release", "{job}")
    yield from life.until("DEADLINE")
    yield Wanted(says="deadline")


def cancelled(life: Life) -> Moments:
    life.submit()
    yield from life.until("RUNNING")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield Wanted(health="CANCELLED", says="root")


def cancelled_by_vjob(life: Life) -> Moments:
    life.submit()
    yield from life.until("RUNNING")
    life.vjob("cancel", str(life.folder), "--now", code=None)
    yield from life.until("CANCELLED", "FAILED", "COMPLETED")
    yield Wanted(health="CANCELLED", says="vjob cancel")


def cancelled_waiting(life: Life) -> Moments:
    life.submit(sbatch="begin: now+1hour")
    yield ANY
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    yield Wanted(health="CANCELLED")


def batch_killed(life: Life) -> Moments:
    life.submit()
    yield from life.until("RUNNING")
    yield from life.rest(3)
    life.slurm("scancel", "--batch", "--signal=KILL", "{job}")
    yield from life.until("FAILED", timeout_s=90)
    yield Wanted(state="FAILED", health="DEAD")


def suspended(life: Life) -> Moments:
    life.submit()
    yield from life.until("RUNNING")
    life.slurm("scontrol", "suspend", "{job}")
    yield from life.until("SUSPENDED")
    yield Wanted(state="SUSPENDED", says="suspended", health="PENDING")
    life.slurm("scontrol", "resume", "{job}")
    yield from life.until("RUNNING")


def license_used(life: Life) -> Moments:
    other = sleep_job(life.lab, "--licenses=matlab@srv:1")
    life.submit(sbatch="licenses: 'matlab@srv:1'", steps=40)
    yield from life.rest(2)
    yield Wanted(waiting="licenses", says="licence")
    life.lab.run(["scancel", other])
    yield from life.until("COMPLETED")


def reserved(life: Life) -> Moments:
    make = ["scontrol", "create", "reservation", f"reservationname={life.name}", "users=root"]
    life.lab.run([*make, "starttime=now+10minutes", "duration=60", "nodes=b4", "flags=ignore_jobs"])
    life.submit(sbatch=f"reservation: {life.name}")
    for _ in range(2):
        yield Wanted(waiting="reservation")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    life.lab.run(["scontrol", "delete", f"reservationname={life.name}"])


def maintenance(life: Life) -> Moments:
    make = ["scontrol", "create", "reservation", f"reservationname={life.name}", "users=root"]
    flags = "flags=maint,ignore_jobs"
    life.lab.run([*make, "starttime=now+2minutes", "duration=60", "nodes=b3", flags])
    life.submit(where="nodelist: b3", walltime_min=30)
    yield from life.rest(2)
    for _ in range(2):
        yield Wanted(says="reserved|maintenance|kept", health="PENDING")
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")
    life.lab.run(["scontrol", "delete", f"reservationname={life.name}"])


def in_maintenance(life: Life) -> Moments:
    life.submit(where="nodelist: b3")
    yield from life.until("RUNNING")
    make = ["scontrol", "create", "reservation", f"reservationname={life.name}", "users=root"]
    flags = "flags=maint,ignore_jobs"
    life.lab.run([*make, "starttime=now", "duration=60", "nodes=b3", flags])
    deadline = time.monotonic() + WAIT_S
    while "MAINT" not in life.lab.run(["scontrol", "show", "node", "b3"]).stdout:
        if time.monotonic() > deadline:
            life.differences.append("not staged: no maintenance on node b3")
            return
        yield REST
    yield Wanted(says="maintenance on node b3")
    life.lab.run(["scontrol", "delete", f"reservationname={life.name}"])


def array(life: Life) -> Moments:
    life.submit(steps=40, options=("--sweep", "env.X=1,2", "--at-most", "1"))
    yield ANY
    yield from life.until("RUNNING", timeout_s=120)
    yield ANY
    yield from life.until("COMPLETED", timeout_s=120)
    yield Wanted(health="DONE")


def no_accounting(life: Life) -> Moments:
    """A site without slurmdbd: nothing tells why it was requeued."""
    with life.lab.without_accounting():
        life.submit(requeue="true", steps=60)
        yield from life.until("RUNNING")
        life.slurm("scontrol", "requeue", "{job}")
        yield from life.until("PENDING", blocks=True)
        yield Wanted(state="PENDING", earlier=(), says="requeued once")
        yield from life.until("RUNNING")
        yield from life.until("COMPLETED")
        yield Wanted(health="DONE")


def queue_closed(life: Life) -> Moments:
    life.lab.run(["scontrol", "update", "partitionname=gpu1", "state=down"])
    life.submit(queue="gpu1", steps=40)
    yield Wanted(waiting="queue-closed")
    life.lab.run(["scontrol", "update", "partitionname=gpu1", "state=up"])
    yield from life.until("COMPLETED")


def too_long(life: Life) -> Moments:
    life.lab.run(["scontrol", "update", "partitionname=gpu1", "MaxTime=5"])
    life.submit(queue="gpu1", walltime_min=30)
    yield Wanted(waiting="queue-limit", says="will not start")
    life.lab.run(["scontrol", "update", "partitionname=gpu1", "MaxTime=INFINITE"])
    life.slurm("scancel", "{job}")
    yield from life.until("CANCELLED")


def no_room(life: Life) -> Moments:
    other = sleep_job(life.lab, "--partition=gpu1", "--nodes=2", "--exclusive", seconds=60)
    life.submit(queue="gpu1", steps=40)
    yield from life.rest(3)
    for _ in range(2):
        yield Wanted(health="PENDING", says="no nodes are free|higher priority")
    life.lab.run(["scancel", other])
    yield from life.until("COMPLETED")


def controller_away(life: Life) -> Moments:
    """Its end is known to accounting, and read while the controller is away."""
    life.submit(steps=3)
    while not any(row["JobState"] == "COMPLETED" for row in life.shown()):
        yield REST
    life.lab.stop_controller()
    try:
        forget(life.vjob)
        life.vjob("list", code=None)
        status = life.vjob.status(str(life.folder))
        life.num_moments += 1
        found = (status["state"], status["verdict"]["health"])
        if found != ("COMPLETED", "DONE"):
            life.differences.append(f"controller away: {found}: {status['verdict']['reason']}")
    finally:
        life.lab.start_controller()
    yield Wanted(health="DONE")


LIVES: Mapping[str, Callable[[Life], Moments]] = {
    name.replace("_", " "): life
    for name, life in list(globals().items())
    if getattr(life, "__annotations__", {}).get("return") == "Moments"
}
"""In the order of this file."""
ALONE = (
    *("no accounting", "set down"),
    *("controller away", "too long", "queue closed", "no room", "power cut"),
    *("preempted for good", "preempted"),
)
"""They change what others' nodes or queues are."""
AT_ONCE, TWICE = 9, 2
NOT_STAGED = (
    "a job cancelled by another user who may (an operator); here root cancelled",
    "a reboot of a node: the lab has no RebootProgram",
    "an enforced QOS and PrivateData: Slurm's words are recorded in the tests, no run was made",
    "federations, burst buffers, GANG, other versions of Slurm than the lab's",
)


def sleep_job(lab: Lab, *options: str, seconds: int = 300) -> str:
    """A job that vjob takes for another user's."""
    command = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap=sleep {seconds}"]
    return lab.run(command).stdout.strip()


def live(lab: Lab, names: Sequence[str], folder: Path) -> dict[str, Life]:
    """Let these lives go on beside each other, a moment of each in turn."""
    (folder / "work.py").write_text(PROGRAM)
    vjob = Vjob(folder, lab.env)
    lives = {name: Life(name=name.replace(" ", "-"), lab=lab, vjob=vjob) for name in names}
    going = {name: LIVES[name](life) for name, life in lives.items()}
    while going:
        for name, moments in list(going.items()):
            life = lives[name]
            try:
                wanted = next(moments)
                for _ in range(0 if wanted.is_rest else TWICE):
                    take_moment(life, wanted)
            except StopIteration:
                del going[name]
                lab.run(["scancel", *life.jobs], check=False) if life.jobs else None
            except Exception as error:
                life.differences.append(f"broke off: {error!r:.300}")
                del going[name]
        time.sleep(0.2)
    return lives


def build_batches(names: Sequence[str]) -> list[list[str]]:
    """Lives beside each other; some are alone."""
    together = [name for name in names if name not in ALONE]
    groups = [together[at : at + AT_ONCE] for at in range(0, len(together), AT_ONCE)]
    return [*groups, *([name] for name in names if name in ALONE)]


def render_lives(found: Mapping[str, Mapping[str, Any]], version: str) -> list[str]:
    """The section of the page."""
    done = [name for name in LIVES if name in found]
    moments = sum(found[name]["moments"] for name in done)
    bad = [name for name in done if found[name]["differences"]]
    lines = [
        "## Lives",
        "",
        "Made by `python -m benchmarks.commands.truth --lives --write`: at each moment of a life "
        "scontrol and sacct were asked, then `vjob status --json`, `vjob list --json` and `vjob "
        "report --json`, then scontrol again. State, reason, limit, start, end, nodes, exit code, "
        "restarts, preemption, the kind of the wait, causes of requeues and what one command says "
        f"against the next were compared. {version}.",
        "",
        f"{len(done)} of {len(LIVES)} lives, {moments} moments; {len(done) - len(bad)} lives "
        "without a difference. Of an earlier run at load 33 one difference is not explained: a "
        "limit was not known after the controller was away; it did not come again in nine tries. "
        "On 2026-11-29 ten of 32 lives differed at a load of 12 to 19: nine jobs were over, one "
        "had not begun, when the life came to its moment. Repeated at a load of 4, none differed.",
        "",
        "| life | of | moments | differences |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['of']} | {row['moments']} | {len(row['differences'])} |"
            for name, row in ((name, found[name]) for name in done)
        ),
    ]
    if bad:
        lines += ["", "### Differences", ""]
        for name in bad:
            for text in dict.fromkeys(found[name]["differences"]):
                lines.append(f"- {name}: {' '.join(text.split())[:300]}")
    return [*lines, "", "### Not staged", "", *(f"- {text}" for text in NOT_STAGED)]
