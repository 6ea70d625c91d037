"""What the stranger writes: the quickstart's confs with the lab's queues, and small enough for it.

The lab's GPUs are Slurm's alone: jobs that run ask for ranks, what asks for GPUs is planned.
"""

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
