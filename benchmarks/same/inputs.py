"""What both commits read: confs, and run folders that the earlier commit made.

The folders are made once, by local runs of a few seconds, and each commit gets a copy at the same
path. Variants of them stand for what this machine cannot do: a job of Slurm's in every state, and
logs of the tests' recorded failures.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import ROOT
from tests.jobs.confs import IN_PYXIS
from tests.jobs.submit.test_scripts import LAYOUTS

DATA = ROOT / "tests/jobs/monitor/data"
STATES = (
    "PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "PREEMPTED", "NODE_FAIL",
    "BOOT_FAIL", "OUT_OF_MEMORY", "CANCELLED", "REVOKED",
)  # fmt: skip
REASONS = ("Resources", "JobHeldUser", "QOSMaxJobsPerUserLimit", "DependencyNeverSatisfied")
STEPS = """
import os, sys, time
for step in range(1, int(sys.argv[1]) + 1):
    print(f"step {step}/{sys.argv[1]} loss {3.0 / step:.4f}", flush=True)
    time.sleep(0.1)
if "fail" in sys.argv:
    time.sleep(0.5 if os.environ["RANK"] == "1" else 60)
    print("torch.cuda.OutOfMemoryError: CUDA out of memory.", file=sys.stderr, flush=True)
    raise ValueError("this is the end")
"""
RUN = """
name: {name}
program: {{script: {script}, args: {args}}}
cluster: {{scheduler: local, walltime_min: 5, nodes: [{{group: m, count: 2, ranks: 2}}]}}
"""
ELASTIC = """
name: elastic
program: pretrain_gpt
model: {layers: 2, hidden: 64, heads: 2, vocab: 512, sequence: 64}
data: {synthetic: true}
train: {steps: 12, global_batch_size: 4, micro_batch_size: 1, checkpoint: {folder: ckpt, every: 4}}
parallel: {pipeline: 2}
cluster: {scheduler: local, walltime_min: 9, nodes: [{group: all, count: 2, ranks: 1}]}
morph: {enabled: true, min_nodes: 1}
"""
PLANNED = """
name: planned
program: pretrain_gpt
model: {layers: 8, hidden: 1024, heads: 16, sequence: 1024, vocab: 50304}
data: {synthetic: true}
train: {micro_batch_size: auto, steps: 500, global_batch_size: 16, precision: fp16}
parallel: {pipeline: auto, data: auto, partition: auto}
cluster:
  scheduler: slurm
  nodes:
    - {group: strong, count: 1, queue: gpu1, gpus: "a100:1"}
    - {group: weak, count: 3, queue: gpu2, gpus: "a10:1"}
"""

Vjob = Callable[..., str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run folder to look at, and what Slurm's tools say meanwhile."""

    name: str
    folder: str
    """Its path below the folder of the runs."""
    slurm: Mapping[str, str] = field(default_factory=dict)


def write_confs(folder: Path) -> None:
    """The examples, the layouts of the golden scripts, and one for the planner."""
    shutil.copytree(ROOT / "examples", folder)
    for name in ("train.py", "machines"):
        (folder / name).write_text("n1\nn2\nn3\nn4\nn5\nn6\nn7\nn8\n" if name == "machines" else "")
    for name, text in LAYOUTS.items():
        (folder / f"layout-{name}.yaml").write_text(text)
    (folder / "layout-hetjob-container.yaml").write_text(LAYOUTS["hetjob"] + IN_PYXIS)
    (folder / "planned.yaml").write_text(PLANNED)


def make_runs(vjob: Vjob, folder: Path) -> list[Case]:
    """Run folders in `folder`/log by local runs of `vjob`, and every variant of them."""
    names = start_runs(vjob, folder)
    runs = {name: find_run(folder, name) for name in names}
    cases = [Case(name=name, folder=f"log/{run.name}") for name, run in runs.items()]

    def add(name: str, run: Path, state: str, reason: str = "None") -> None:
        facts = {
            "SAME_STATE": state,
            "SAME_REASON": reason,
            "SAME_CODE": "0:0" if state == "COMPLETED" else "1:0",
        }
        cases.append(Case(name=name, folder=f"log/{run.name}", slurm=facts))

    for base in ("ok", "fails", "asked"):
        on_slurm = copy(runs[base], f"{base}-slurm")
        turn_to_slurm(on_slurm)
        for state in STATES:
            add(f"{base}/{state}", on_slurm, state)
    lives = copy(folder / "log/ok-slurm", "lives-slurm")
    forget_the_end(lives)
    for state in STATES:
        add(f"lives/{state}", lives, state)
    waits = copy(lives, "waits-slurm")
    shutil.rmtree(waits / "attempt-0")
    (waits / "events.jsonl").unlink()
    for reason in REASONS:
        add(f"waits/{reason}", waits, "PENDING", reason)
    for log in sorted(DATA.glob("*.log")):
        told = copy(lives, f"log-{log.stem}")
        write_recorded(told / "attempt-0", log.read_text())
        for state in ("RUNNING", "FAILED"):
            add(f"{log.stem}/{state}", told, state)
    return cases


def start_runs(vjob: Vjob, folder: Path) -> list[str]:
    """Local runs, all over; their names."""
    (folder / "steps.py").write_text(STEPS)
    (folder / "traced.py").write_text((ROOT / "tests/programs/traced_steps.py").read_text())
    confs = {
        "ok": write_run(folder, "ok", "steps.py", "8"),
        "traced": write_run(folder, "traced", "traced.py", "12"),
        "fails": write_run(folder, "fails", "steps.py", "4", "fail"),
        "asked": write_run(folder, "asked", "steps.py", "600"),
        "elastic": folder / "elastic.yaml",
    }
    confs["elastic"].write_text(ELASTIC)
    for conf in confs.values():
        vjob("submit", conf.name)
    asked = find_run(folder, "asked")
    wait(lambda: "step 8/" in read_logs(asked))
    vjob("cancel", str(asked))
    for name in confs:
        state = find_run(folder, name) / "local.json"
        wait(partial(is_over, state))
    return list(confs)


def is_over(state: Path) -> bool:
    """True when the supervisor of a local run has written its last word."""
    return json.loads(state.read_text())["state"] not in ("PENDING", "RUNNING")


def find_run(folder: Path, name: str) -> Path:
    return next(folder.glob(f"log/{name}-*"))


def write_run(folder: Path, name: str, script: str, *args: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RUN.format(name=name, script=script, args=json.dumps(args)))
    return path


def wait(is_so: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("a local run of the earlier commit did not get as far as it should")
        time.sleep(0.1)


def read_logs(run: Path) -> str:
    return "".join(path.read_text() for path in run.glob("attempt-0/*.out"))


def copy(run: Path, name: str) -> Path:
    """Another run of the same files, with their times."""
    target = run.parent / name
    shutil.copytree(run, target)
    for path in target.rglob("*"):
        if path.suffix in (".json", ".yaml", ".jsonl"):
            change(path, lambda text: text.replace(run.name, name))
    return target


def change(path: Path, edit: Callable[[str], str]) -> None:
    stat = path.stat()
    path.write_text(edit(path.read_text()))
    os.utime(path, (stat.st_atime, stat.st_mtime))


def turn_to_slurm(run: Path) -> None:
    """As if Slurm had run it: job 4711, whose end vjob has not recorded yet."""
    (run / "local.json").unlink()

    def edit(text: str) -> str:
        return text.replace('"scheduler": "local"', '"scheduler": "slurm"').replace('"L', '"')

    def record(text: str) -> str:
        value = json.loads(edit(text))
        value.update(state="submitted", message="", verdict="", outcome=None)
        value["jobs"] = [{"id": "4711", "group": None}]
        return json.dumps(value, indent=1)

    change(run / "record.json", record)
    change(run / "plan.json", edit)


def forget_the_end(run: Path) -> None:
    """The same run in its last step, with all ranks alive."""
    attempt = run / "attempt-0"
    for path in [*attempt.glob("exit/*"), *attempt.glob("state/outcome.json")]:
        path.unlink()
    for path in attempt.glob("beat/*"):
        change(path, lambda text: text.replace('"done"', '"running"'))
    change(run / "events.jsonl", lambda text: re.sub(r'.*"kind": "ended".*\n', "", text))


def write_recorded(attempt: Path, text: str) -> None:
    """A recorded log (`n061 3 err | line`) as output of the two nodes, after what is there."""
    nodes: list[str] = []
    for node, rank, stream, line in re.findall(r"(\S+) (\d+|-) (out|err) \| ?(.*)", text):
        if node not in nodes:
            nodes.append(node)
        here = nodes.index(node) % 2
        path = attempt / f"local{here}.{stream}"
        words = line if rank == "-" else f"{2 * here + int(rank) % 2}: {line}"
        with path.open("a") as file:
            file.write(words.replace(node, f"local{here}") + "\n")
