"""Confs that several tests share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from varuna_core.records.plan import Plan
from vjob.containers.runtime import ImageKind
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.programs.start import ProgramFiles
from vjob.jobs.submit.build_plan import PlanContext, build_plan

BASE = Path("/home/u/exp")

SINGLE = """
name: plain
program: {script: train.py, args: [--lr, "1e-4"]}
cluster:
  scheduler: slurm
  walltime_min: 90
  account: lab
  nodes:
    - {group: master, count: 2, queue: gpu1, gpus: "a100:4", cpus: 16, memory_gb: 0}
"""

MIXED = """
name: gpt2-xl
program: {script: train.py}
parallel: {pipeline: 8, data: 4}
cluster:
  scheduler: slurm
  hetero: %s
  walltime_min: 120
  qos: high
  signal_before_end_s: 120
  exclude: [n7, n8]
  sbatch: {reservation: week 7}
  nodes:
    - {group: master, count: 1, queue: gpu1, gpus: "a100:4"}
    - {group: slave, count: 7, queue: gpu2, gpus: "a10:4", cpus: 14, sbatch: {constraint: ib}}
env: {WANDB_API_KEY: abc, NOTE: "two words"}
setup: [module load cuda]
"""

HETJOB = MIXED % "hetjob"
SPLIT = MIXED % "split"

MORPH = """
name: elastic
program: pretrain_gpt
model: gpt2-small
data: {synthetic: true}
train: {steps: 100, global_batch_size: 64, checkpoint: {folder: ckpt, every: 10}}
parallel: {pipeline: 4}
cluster:
  scheduler: slurm
  walltime_min: 90
  requeue: true
  signal_before_end_s: 120
  nodes: [{group: all, count: 4, queue: gpu1, gpus: "a100:4"}]
morph: {enabled: true, min_nodes: 2}
setup: [module load cuda]
"""

TWO_QUEUES = """[
    {group: master, count: 1, queue: gpu1, gpus: "a100:4"},
    {group: slave, count: 3, queue: gpu2, gpus: "a10:4", cpus: 14},
  ]
"""
MORPH_HETJOB = MORPH.replace(
    '[{group: all, count: 4, queue: gpu1, gpus: "a100:4"}]\n', TWO_QUEUES
).replace("  walltime", "  hetero: hetjob\n  walltime")
MORPH_SPLIT = MORPH_HETJOB.replace("  hetero: hetjob", "  hetero: split")

MORPH_MACHINES = MORPH.replace("scheduler: slurm", "machine_list: machines").replace(
    "min_nodes: 2", "max_nodes: 6"
)

MACHINES = HETJOB.replace("scheduler: slurm", "machine_list: machines").replace(
    "  qos: high", "  restarts: 3"
)

IN_PYXIS = """
container:
  runtime: pyxis
  image: "nvcr.io#nvidia/pytorch:25.01-py3"
  mounts: ["my data:/data:ro"]
"""


def make_conf(text: str) -> JobConf:
    return parse_conf(text, "conf.yaml", BASE)


def make_plan(
    conf: JobConf,
    run: str = "plain-20260102-030405",
    scheduler: str = "slurm",
    image_kind: ImageKind = ImageKind.REFERENCE,
    written: Collection[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    found: ProgramFiles = ProgramFiles(),  # noqa: B008 # frozen
) -> Plan:
    here = PlanContext(
        run=run,
        scheduler=scheduler,
        python="/opt/vjob/bin/python",
        base=str(BASE),
        user_id=1000,
        environ=environ,
        folder=f"/log/{run}",
        image_kind=image_kind,
        written=written,
        found=found,
    )
    return build_plan(conf, here)
