"""Hangs staged on the real Slurm of tests/cluster: the whole path from `vjob submit` to the next
step, with the faults that a node can have.

Faults within a rank are those of faults.py; the others strike from outside once the ranks have
done `AT` steps: on processes of one node, on its link, or on the manager.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.hangs.held_mount import end_held, mount_held
from benchmarks.hangs.staging import (
    SCRIPTS,
    describe_staging,
    find_python,
    format_wait,
    note_staging,
)
from tests.cluster.lab import Lab
from tests.cluster.processes import find_in_namespace
from tests.command import Vjob
from tests.small_training import read_losses, write_slow_steps, write_text
from varuna_core.facts.hang import Hang
from varuna_core.hang.signs import read_hang
from varuna_core.records.files import read_json
from varuna_core.records.logs.step_counts import parse_counts
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder

HEADING = "On the Slurm lab"
STEPS, AT, LIMIT_S = 160, 90, 450
SAME = 2e-5
SCRIPT = """
name: {name}
program: {{script: {script}, snapshot: none, python: {python}}}
env: {{FAULT: "{fault}", KIND: {kind}, STEPS: "{steps}", BATCH: "96", OMP_NUM_THREADS: "1"{env}}}
{rest}
cluster:
  scheduler: slurm
  walltime_min: {walltime}
  grace_s: 5
  lost_s: 30
  join_s: 60
  {more}
  nodes: [{groups}]
log_folder: {folder}
"""
GROUP = "{{group: {name}, count: {count}, queue: gpu2, ranks: {ranks}, sbatch: {{{sbatch}}}}}"
BUILT_IN = """
program: pretrain_gpt
model: {layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}
data: {prefix: TEXT, split: "8,2,0"}
train:
  steps: STEPS
  global_batch_size: 8
  micro_batch_size: 2
  optimizer: {lr: 1.0e-2, weight_decay: 0.1}
  schedule: {warmup_steps: 2, min_lr: 1.0e-3}
  log_every: 1
  evaluate: {every: 0}
  checkpoint: {folder: FOLDER, every: 10, keep: 2}
parallel: {pipeline: 2}
env: {OMP_NUM_THREADS: "1", PYTHONPATH: CALM}
"""


@dataclass(frozen=True)
class Case:
    """A staged hang: `fault` within a rank, or `act` from outside, `and_then` a second one."""

    name: str
    fault: str = ""
    act: str = ""
    and_then: str = ""
    witness: str = ""
    rank: int | None = 1
    node: int | None = 1
    """Index of the node that is to be named."""
    do: str = "auto"
    morph: int = 0
    """Nodes that the attempts of a run which morphs have in the end; 0 for a fixed one."""
    nodes: int = 2
    ranks: int = 1
    kind: str = "ddp"
    """A program of this folder, or built-in."""
    more: str = "restarts: 2"
    ends: str = "done"
    """The end of the run: done, or hang."""
    without: bool = False
    """True where the next attempt is to leave the node out."""
    walltime: int = 12
    again: bool = False
    """True for a fault of each attempt."""
    after: int | None = None
    hetero: str = ""
    """Each node is a group of its own: hetjob or split."""
    ends_itself: bool = False
    """Its ranks fail, and are started again without the guard's doing."""

    @property
    def shape(self) -> tuple[int, int, str]:
        return self.nodes, self.ranks, self.kind

    @property
    def is_plain(self) -> bool:
        return not self.act and not self.fault


def fault(name: str, rank: int = 1, step: int = AT) -> str:
    return f"{name}:{rank}:{step}"


def elastic(case: Case, morph: int = 2) -> Case:
    return replace(case, name=f"{case.name}, morph", nodes=3, morph=morph, without=morph < 3)


KILL = "kill-manager"
CASES = [
    # Fixed runs.
    Case("stopped rank", act="stop-rank", witness="stopped"),
    Case("stopped rank, two a node", act="stop-rank", witness="stopped", rank=3, ranks=2),
    Case("stopped in the first step", fault("sigstop", step=1), witness="stopped"),
    Case("another collective", fault("mismatch"), witness="mismatched"),
    Case("a missed barrier", fault("barrier"), witness="mismatched"),
    Case("a data loader's worker that hangs", fault("worker"), witness="silent"),
    Case("a rank that sleeps", fault("sleep"), witness="silent"),
    Case("a rank that computes for ever", fault("spin"), witness="spinning"),
    Case("a native call that holds Python", fault("native-held"), witness="silent"),
    Case("a native call that never returns", fault("native"), witness="silent"),
    Case("a file server that is gone, one reads", fault("nfs"), witness="silent"),
    Case(
        "a file server that is gone, all read",
        fault("nfs-all"),
        witness="silent",
        rank=None,
        node=None,
    ),
    Case("a worker is killed", fault("worker-dies"), ends_itself=True),
    Case("stopped rank, het job", act="stop-rank", witness="stopped", hetero="hetjob"),
    Case("another collective, het job", fault("mismatch"), witness="mismatched", hetero="hetjob"),
    Case("stopped rank, split job", act="stop-rank", witness="stopped", hetero="split"),
    Case(
        "stopped agent and rank", act="stop-agent", and_then="stop-rank", witness="lost", rank=None
    ),
    Case("stopped node", act="stop-node", witness="lost", rank=None),
    Case("stopped node 0", act="stop-node", witness="lost", rank=None, node=0),
    Case("link cut, requeue", act="cut", rank=None, more="requeue: true"),
    Case("a rank that never joins", fault("join"), witness="silent"),
    Case("a dataset that never loads", fault("load"), witness="silent", after=90),
    Case("stopped rank, built-in", act="stop-rank", witness="stopped", nodes=4, kind="built-in"),
    *(
        Case(f"{name}, {words}", what, act, witness=witness, kind=kind)
        for kind, words in (("fsdp2", "FSDP2"), ("lightning", "Lightning"))
        for name, what, act, witness in (
            ("stopped rank", "", "stop-rank", "stopped"),
            ("another collective", fault("mismatch"), "", "mismatched"),
        )
    ),
    # What is done about it.
    Case("stopped rank, stop", act="stop-rank", witness="stopped", do="stop", ends="hang"),
    Case(
        "stopped rank, report to the limit",
        act="stop-rank",
        witness="stopped",
        do="report",
        more="signal_before_end_s: 60",
        ends="hang",
        walltime=3,
    ),
    Case(
        "stopped rank, requeue",
        act="stop-rank",
        witness="stopped",
        do="requeue",
        more="requeue: true",
    ),
    Case("comes back", fault("mismatch"), witness="mismatched", again=True, ends="hang"),
    # Runs that morph, of three nodes.
    elastic(Case("stopped rank", act="stop-rank", witness="stopped")),
    elastic(Case("stopped rank 0", act="stop-rank", witness="stopped", rank=0, node=0)),
    elastic(Case("another collective", fault("mismatch"), witness="mismatched"), 3),
    elastic(Case("a rank that sleeps", fault("sleep"), witness="silent"), 3),
    elastic(
        Case(
            "stopped agent and rank",
            act="stop-agent",
            and_then="stop-rank",
            witness="lost",
            rank=None,
        )
    ),
    elastic(Case("stopped node", act="stop-node", rank=None)),
    elastic(Case("link cut", act="cut", witness="lost", rank=None)),
    elastic(
        Case("stopped rank, manager killed", act="stop-rank", and_then=KILL, witness="stopped")
    ),
    elastic(Case("link cut, manager killed", act="cut", and_then=KILL, witness="lost", rank=None)),
    replace(
        elastic(
            Case("stopped rank, built-in", act="stop-rank", witness="stopped", kind="built-in")
        ),
        nodes=4,
    ),
]


@dataclass(frozen=True)
class Result:
    """The outcome of a staged case."""

    case: Case
    hang: Hang | None
    node: str
    """The node on which the fault struck."""
    seconds: float | None
    loss: str
    attempts: int
    without: bool
    end: str
    staged: str
    """The commit and the load that it was staged at."""

    @property
    def named_right(self) -> bool:
        found, case = self.hang, self.case
        if case.ends_itself:
            return found is None and self.attempts == 2
        if not case.witness:
            return found is None
        if found is None or found.witness.value != case.witness or found.rank != case.rank:
            return False
        return case.node is None or found.node == self.node


def list_processes(lab: Lab, run: RunFolder, node: str) -> dict[int, tuple[bytes, bytes]]:
    """Command and environment of the run's processes on a node, by pid."""
    found, mark = {}, os.fsencode(run.path)
    for process in find_in_namespace(lab.paths.namespace(node)):
        folder = Path("/proc", str(process.pid))
        try:
            line, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark in line or mark in environ:
            found[process.pid] = (line, environ)
    return found


def strike(lab: Lab, run: RunFolder, act: str, node: str, rank: int | None) -> None:
    """Do what is to happen from outside; without a rank to all ranks of the node."""
    held = list_processes(lab, run, node)
    if act == "stop-rank":
        pids = [pid for pid, (_, environ) in held.items() if is_rank(environ.split(b"\0"), rank)]
    elif act == "stop-agent":
        pids = [pid for pid, (line, _) in held.items() if is_agent(line)]
    elif act == "stop-node":
        pids = [pid for pid, (line, _) in held.items() if b"batch" not in line]
    elif act == "kill-manager":
        pids = [pid for pid, (line, _) in held.items() if b"\0manage\0" in line]
    elif act == "cut":
        lab.cut_link(node)
        return
    else:
        raise ValueError(act)
    assert pids, f"nothing to {act} on {node}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL if act.startswith("kill") else signal.SIGSTOP)


def read_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def is_rank(words: list[bytes], rank: int | None) -> bool:
    if rank is None:
        return any(word.startswith(b"RANK=") for word in words)
    return b"RANK=%d" % rank in words


def is_agent(line: bytes) -> bool:
    words = line.split(b"\0")
    return any(word.endswith(b"agent.pyz") for word in words) and b"node" in words


def read_times(attempt: AttemptFolder, world: int) -> tuple[float, float, int] | None:
    """Times of the first and the last step that any rank did, and the last step's count."""
    counts = [parse_counts(p.read_bytes()) for p in attempt.list_steps().values()]
    known = [one for one in counts if one is not None and one.count]
    if known:
        first = min(one.first_at for one in known)
        return first, max(one.last_at for one in known), max(one.count for one in known)
    times = []
    for path in attempt.path.glob("trace/*.jsonl"):
        origin = None
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last one may be cut
                value = json.loads(line)
                if isinstance(value, dict) and "origin" in value:
                    origin = value["origin"]
                elif isinstance(value, dict) and "step" in value and origin is not None:
                    times.append((origin + value["begin"] + value["took"]) / 1e9)
    return (min(times), max(times), len(times) // max(world, 1)) if times else None


def read_hosts(run: RunFolder, attempt: int) -> list[str]:
    """Host names of an attempt's nodes, by index."""
    plan = read_attempt_plan(run, attempt)
    count = plan.num_nodes if plan is not None else 0
    reports = [read_json(run.attempt(attempt).node_report(index)) for index in range(count)]
    return [str((report or {}).get("host", "")) for report in reports]


def describe_end(run: RunFolder) -> str:
    attempts = run.attempts()
    found = read_json(attempts[-1].path / "state" / "end.json") if attempts else None
    return str((found or {}).get("cause", ""))


class Stage:
    """One lab with its cases."""

    def __init__(self, lab: Lab, folder: Path, minutes: float) -> None:
        self.lab, self.folder = lab, folder
        self.until = time.monotonic() + 60 * minutes
        self.vjob = Vjob(folder, lab.env)
        self._submits = threading.Lock()

    def try_stage(self, case: Case) -> Result | None:
        """The others go on where a case cannot be staged; none begins once the time is over."""
        try:
            result = self.stage(case)
        except (AssertionError, OSError, subprocess.SubprocessError):
            traceback.print_exc()
            return None
        if result is not None:
            print(render_row(result, ""), flush=True)
        return result

    def stage(self, case: Case) -> Result | None:
        """Stage a case, or read its folder where it has been staged there and is over."""
        name = re.sub(r"\W+", "-", case.name)
        run = RunFolder(Path(os.path.realpath(self.folder / name / name)))
        if run.attempts() and describe_end(run):
            return self.read_result(case, run)
        if time.monotonic() > self.until:
            return None
        env: dict[str, str] = {}
        held = self.hold_files(self.folder / f"{name}.data", env) if "nfs" in case.fault else []
        try:
            return self.stage_conf(case, name, env)
        finally:
            for mount, enter in held:
                end_held(mount, env, enter)

    def hold_files(
        self, folder: Path, env: dict[str, str]
    ) -> list[tuple[subprocess.Popen[str], list[str]]]:
        """Mount a file system that can be held on each node, which has mounts of its own."""
        found = []
        for node in self.lab.nodes:
            daemons = find_in_namespace(self.lab.paths.namespace(node))
            pid = next(one.pid for one in daemons if read_name(one.pid) == "slurmd")
            enter = ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]
            found.append((mount_held(folder, env, enter), enter))
        return found

    def stage_conf(self, case: Case, name: str, env: dict[str, str]) -> Result:
        conf = self.folder / f"{name}.yaml"
        conf.write_text(self.write_conf(case, name, env))
        with self._submits:
            said = self.vjob("submit", str(conf), "--json").stdout
        run = RunFolder(Path(json.loads(said)["folder"]))
        until = time.monotonic() + LIMIT_S
        node, struck = "", False
        while time.monotonic() < until and not self.is_over(run):
            hosts = read_hosts(run, 0)
            if not struck and hosts and self.count_steps(run) >= AT:
                struck = True
                node = hosts[case.node or 0]
                for act in filter(None, (case.act, case.and_then)):
                    target = hosts[0] if act == "kill-manager" else node
                    strike(self.lab, run, act, target, case.rank)
            time.sleep(0.5)
        if not self.is_over(run):
            self.vjob("cancel", str(run.path), "--now", code=None)
        if case.act == "cut":
            self.lab.mend_link(node)
        note_staging(self.folder / name)
        return self.read_result(case, run)

    def write_conf(self, case: Case, name: str, env: dict[str, str]) -> str:
        after = "" if case.after is None else f", after: {case.after}"
        rest = f"on_hang: {{do: {case.do}{after}}}\n"
        if case.morph:
            rest += "morph: {enabled: true, min_nodes: 1, warm: false}"
        names = [f"g{at}" for at in range(case.nodes)] if case.hetero else ["all"]
        count = case.nodes // len(names)
        # What strikes a whole node is to strike no other run.
        sbatch = "exclusive: true" if case.act in ("cut", "stop-node") else ""
        groups = [
            GROUP.format(name=one, count=count, ranks=case.ranks, sbatch=sbatch) for one in names
        ]
        text = SCRIPT.format(
            name=name,
            script=Path(__file__).with_name(SCRIPTS.get(case.kind, "train.py")),
            python=find_python(case.kind),
            kind=case.kind,
            fault=case.fault,
            env="".join(f", {word}: '{value}'" for word, value in env.items()),
            steps=STEPS,
            rest=rest,
            walltime=case.walltime,
            more=case.more,
            groups=", ".join(groups),
            folder=self.folder / name,
        )
        if case.hetero:
            text = text.replace("scheduler: slurm", f"scheduler: slurm\n  hetero: {case.hetero}")
        if case.again:
            text = text.replace("env: {", 'env: {AGAIN: "1", ')
        if case.kind != "built-in":
            return text
        text = re.sub(r"program: .*\nenv: .*\n", "", text)
        own = BUILT_IN.replace("TEXT", str(self.folder / "text"))
        own = own.replace("STEPS", str(STEPS)).replace("FOLDER", str(self.folder / name / "ckpt"))
        return text + own.replace("CALM", str(self.folder / "calm"))

    def is_over(self, run: RunFolder) -> bool:
        job = read_json(run.record)["jobs"][0]["id"]
        said = self.lab.run(["squeue", "-h", "-j", str(job), "-o", "%T"], check=False)
        if said.returncode:  # a controller that does not answer knows nothing
            return "Invalid job id" in said.stderr
        return not said.stdout.strip()

    @staticmethod
    def count_steps(run: RunFolder) -> int:
        attempt = run.attempt(0)
        found = read_times(attempt, 1)
        return 0 if found is None else found[2]

    def read_result(self, case: Case, run: RunFolder) -> Result:
        attempts, hosts = run.attempts(), read_hosts(run, 0)
        node = hosts[case.node or 0] if hosts else ""
        hang = read_hang(attempts[0]) if attempts else None
        seconds, without = None, False
        trained = [one for one in attempts[1:] if read_times(one, 1)]
        if attempts and trained:
            before, after = read_times(attempts[0], 1), read_times(trained[0], 1)
            if after and before:
                seconds = after[0] - before[1]
            elif after and hang:
                seconds = after[0] - hang.since
            without = node not in read_hosts(run, trained[0].number)
        if case.kind == "built-in":
            loss = str(read_losses(run).get(STEPS, ""))
        else:
            text = "".join(p.read_text() for p in attempts[-1].path.glob("*.out"))
            last = re.findall(rf"step {STEPS}/{STEPS} loss (\S+)", text)
            loss = (re.findall(r"end loss (\S+)", text) or last or [""])[-1]
        return Result(
            case=case,
            hang=hang,
            node=node,
            seconds=seconds,
            loss=loss,
            attempts=len(attempts),
            without=without,
            end=describe_end(run),
            staged=describe_staging(run.path.parent),
        )


def stage_on_lab(names: list[str], at_once: int, minutes: float, folder: Path) -> list[str]:
    """Lines of the page: the rows of the named cases, or all."""
    folder.chmod(0o755)
    cases = [case for case in CASES if not names or case.name in names]
    shapes = sorted({case.shape for case in cases})
    plain = [
        Case(f"plain {nodes} {ranks} {kind}", nodes=nodes, ranks=ranks, kind=kind)
        for nodes, ranks, kind in shapes
    ]
    if not (folder / "calm").exists():
        write_text(folder)
        write_slow_steps(folder / "calm", 0.02)
    lab = Lab.start()
    try:
        with ThreadPoolExecutor(at_once) as pool:
            found = pool.map(Stage(lab, folder, minutes).try_stage, [*plain, *cases])
            return render_rows([one for one in found if one is not None])
    finally:
        if lab.started_here:
            lab.stop()


def describe_difference(loss: str, other: str) -> str:
    """Equal to the last digit, or by how much not: fewer ranks add in another order."""
    if not loss or not other:
        return "no"
    apart = abs(float(loss) - float(other))
    return "yes" if apart == 0 else f"to {apart:.0e}" if apart < SAME else "no"


def render_row(one: Result, plain: str) -> str:
    """One row of the page; `plain` is the last loss of the undisturbed run."""
    said = one.hang.witness.value if one.hang else "nothing"
    who = "" if one.hang is None else f"{one.hang.rank}, {one.hang.node}"
    then = f"{one.attempts} attempts" + (", without it" if one.without else "")
    then += "" if one.end == "completed" else f", {one.end}"
    same = describe_difference(one.loss, plain) if one.end == "completed" else ""
    seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
    right = "yes" if one.named_right else "no"
    wait = format_wait(one.hang)
    cells = (one.case.name, one.case.do, said, who, wait, seconds, right, then, same, one.staged)
    return f"| {' | '.join(cells)} |"


def render_rows(results: list[Result]) -> list[str]:
    plain = {x.case.shape: x.loss for x in results if x.case.is_plain}
    staged = [x for x in results if not x.case.is_plain]
    acted = [x for x in staged if x.seconds and not x.case.ends_itself]
    rows = [
        "Jobs on virtual nodes of a real Slurm, by `python -m benchmarks.hangs --on lab`. Seconds",
        "count as above. Processors and memory are those of one machine.",
        "",
        "| staged | do | said | rank, node | acted | s | named right | then | last loss as without "
        "| commit, load |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(render_row(one, plain.get(one.case.shape, "")) for one in staged),
    ]
    sure = ("stopped", "dead", "mismatched")
    for is_sure, what in ((True, "Stopped, dead or mismatched"), (False, "Where nobody can tell")):
        values = [x.seconds or 0 for x in acted if (x.case.witness in sure) == is_sure]
        if values:
            middle = statistics.median(values)
            rows += ["", f"{what}: median {middle:.0f}, worst {max(values):.0f} s."]
    return rows
