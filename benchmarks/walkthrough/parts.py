"""Parts of the walkthrough, with the confs that the user writes.

The confs are the quickstart's with the lab's queues, and small enough for it. The lab's GPUs are
Slurm's alone: jobs that run ask for ranks, and what asks for GPUs is only planned."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.walkthrough.session import Session
from tests.cluster.lab import Lab

UNIFORM = """
name: uniform
program: pretrain_gpt
model: {layers: 8, hidden: 64, heads: 4, sequence: 32, vocab: 500}
data: {synthetic: true}
train:
  steps: 5000
  global_batch_size: 16
  micro_batch_size: 2
  log_every: 5
  evaluate: {every: 0}
  checkpoint: {folder: checkpoints/uniform, every: 20}
parallel: {pipeline: 2}
cluster:
  walltime_min: 20
  signal_before_end_s: 60
  grace_s: 1
  nodes:
    - {group: all, count: 2, queue: gpu1, ranks: 1, cpus: 4}
env: {OMP_NUM_THREADS: "1"}
"""
MIXED = (
    UNIFORM.replace("uniform", "mixed")
    .replace("{pipeline: 2}", "{pipeline: 4, partition: auto}")
    .replace("grace_s: 1", "grace_s: 1\n  hetero: split\n  lost_s: 15")
    .replace(
        "    - {group: all, count: 2, queue: gpu1, ranks: 1, cpus: 4}",
        "    - {group: strong, count: 1, queue: gpu1, ranks: 1, cpus: 4}\n"
        "    - {group: weak, count: 3, queue: gpu2, ranks: 1, cpus: 4}",
    )
    + "morph: {enabled: true, min_nodes: 2, max_nodes: 6}\n"
)
WITH_GPUS = """
name: gpus
program: pretrain_gpt
model: gpt2-small
data: {synthetic: true}
train: {steps: 1000, global_batch_size: 64, micro_batch_size: 4, precision: bf16}
cluster:
  scheduler: slurm
  nodes:
    - {group: strong, count: 1, queue: gpu1, gpus: "a100:4"}
    - {group: weak, count: 3, queue: gpu2, gpus: "a10:4"}
"""
LAPTOP = """
name: first
program: pretrain_gpt
model: {layers: 4, hidden: 64, heads: 4, sequence: 32, vocab: 500}
data: {synthetic: true}
train: {steps: 3, global_batch_size: 4, checkpoint: {folder: checkpoints/first}}
parallel: {pipeline: 1}
cluster: {scheduler: local, walltime_min: 5, nodes: [{group: all, count: 1, ranks: 1}]}
env: {OMP_NUM_THREADS: "1"}
"""
NO_CLUSTER = ("SLURM_CONF",)


def run_uniform(session: Session) -> None:
    """Run the quickstart on Slurm."""
    session.write("conf.yaml", UNIFORM)
    session.run("doctor", r"^ok +slurm version")
    session.run("submit conf.yaml --dry-run", "^#SBATCH --partition=gpu1")
    session.run("submit conf.yaml --test-only", "to start at")
    session.run("submit conf.yaml", "as job .*slurm")
    session.wait_for("last", r"checkpoint of step \d+", 120)
    session.wait_for("last", "RUNNING +HEALTHY", 60)
    said = session.run("status last --json", r'"health": ?"\w+"')
    assert json.loads(said)["progress"]["num_steps"] == 5000
    session.watch_screen("last", r"HEALTHY")
    session.run("logs last -n 3", "lm loss")
    session.run("stacks last", "2 of 2 ranks")
    session.run("cancel last", "saved and left")
    said = session.run("status last --once", "cancelled with vjob cancel: .* at step", code=16)
    more = int(re.findall(r"at step (\d+)", said)[0]) + 20
    session.run(f"submit conf.yaml --set train.steps={more}", "as job")
    session.wait_for("last", "COMPLETED +DONE", 180)
    session.run("logs last --grep resumed", "resumed from iteration")
    session.run("report last --text", "went to useful steps")
    session.run("report last", "wrote .*report.html")


def run_mixed(session: Session, lab: Lab) -> None:
    """Run on two kinds of nodes, one of which loses its power."""
    session.write("gpus.yaml", WITH_GPUS)
    session.run("plan gpus.yaml --write plan.json", "certificate, for this cost model")
    session.run("submit gpus.yaml --plan plan.json --dry-run", "^#SBATCH --partition=gpu2")
    session.write("mixed.yaml", MIXED)
    session.run("profile mixed.yaml --sizes 2 --follow", "written to .*profile.json")
    session.run("plan mixed.yaml", "certificate, for this cost model")
    session.run("submit mixed.yaml", "as job")
    session.wait_for("last", r"checkpoint of step \d+", 120)
    said = session.run("status last --json", r'"health": ?"\w+"')
    hosts = [node["name"] for node in json.loads(said)["nodes"]]
    start = time.monotonic()
    lab.crash_node(next(host for host in reversed(hosts) if host.startswith("b")))
    session.note("(a node of `gpu2` loses its power)", start, "")
    session.watch_screen("last", "MORPHING|since the morph")
    session.wait_for("last", r"morphed from 4 x 1 to \d x \d", 120)
    session.wait_for("last", r"RUNNING +HEALTHY", 120)
    session.run("grow last --count 1 --queue gpu1", "brings a node")
    session.wait_for("last", r"morphed 2 times, last from", 120)
    session.wait_for("last", r"RUNNING +HEALTHY", 120)
    session.run("shrink last --count 1", "asked to leave")
    session.wait_for("last", r"morphed 3 times, last from", 120)
    session.wait_for("last", r"RUNNING +HEALTHY", 120)
    session.run("cancel last", "saved and left")
    session.run("report last --text", "^MORPHS")


def run_compared(session: Session) -> None:
    """Compare the mixed run with the uniform one."""
    session.run("compare uniform mixed", "median step")


def run_mistakes(session: Session) -> None:
    """Make the usual mistakes, and check the advice that is printed."""
    session.write("conf.yaml", UNIFORM)
    typo = UNIFORM.replace("sequence", "sequense").replace("pipeline", "pipline")
    for name, text in (
        ("typo", typo),
        ("queue", UNIFORM.replace("gpu1", "gpu9")),
        ("many", UNIFORM.replace("count: 2", "count: 8").replace("layers: 8", "layers: 16")),
        ("other", UNIFORM.replace("ranks: 1", 'gpus: "h100:1"')),
        ("gpus", UNIFORM.replace("ranks: 1", 'gpus: "a100:1"').replace("uniform", "gpus")),
    ):
        text = text.replace("pipeline: 2", "pipeline: 8") if name == "many" else text
        session.write(f"{name}.yaml", text)
    session.run("submit typo.yaml", 'did you mean "sequence"', code=2)
    session.run("submit queue.yaml", "sinfo -s", code=1)
    session.run("submit many.yaml", "will not start: .*lower count")
    session.run("status last --once", "lower count", code=12)
    session.run("cancel last", "cancelled")
    session.run("submit other.yaml", "sinfo -o", code=1)
    session.run("submit conf.yaml", "scheduler to local", code=1, without=NO_CLUSTER, shows=(
        "`vjob submit conf.yaml` without a cluster"))  # fmt: skip
    session.run("status nope", "`vjob list` shows them", code=2)
    session.run("submit gpus.yaml --follow", "torch .* finds no GPU: ", code=None)
    session.run("status last --once", "FAILED +DEAD", code=10)
    session.run("cancel last", "is over already", code=2)
    session.run("stacks last", "needs a running job", code=2)
    session.run("grow last --count 1", "morph: {enabled: true}", code=2)


def run_queue(session: Session, lab: Lab) -> None:
    """Submit a job that waits because the nodes are taken."""
    session.write("waits.yaml", UNIFORM.replace("uniform", "waits"))
    words = ["sbatch", "--parsable", "--output=/dev/null", "-pgpu1", "-N2", "--exclusive"]
    held = lab.run([*words, "--wrap=sleep 300"])
    session.run("submit waits.yaml", "as job")
    session.wait_for("last", "no nodes are free for the job yet|higher priority", 60)
    session.run("status last --once", "PENDING +PENDING")
    session.run("cancel last", "cancelled")
    lab.run(["scancel", held.stdout.strip()])


def run_disk(session: Session, disk: Path) -> None:
    """Run out of disk for the checkpoint, on this machine: the lab's nodes have no small disk."""
    session.write("full.yaml", LAPTOP.replace("checkpoints/first", str(disk / "ckpt")))
    session.run("submit full.yaml", "as job")
    session.wait_for("last", "a save waits, .*no room in ", 90)
    session.run("status last --once", "make room there", code=15)
    session.run("cancel last", "cancelled")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte; needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "vjob", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
