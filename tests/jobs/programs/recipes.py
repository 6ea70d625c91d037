"""Confs that say what hand-written shell files said, for the golden lists."""

from __future__ import annotations

DATA = "/data/train/nist02-32k_text_sentence"

# A 345M GPT on GPUs 4 and 5 of one machine, by Megatron-LM 1.1.5.
ONE_MACHINE = f"""
name: gpt2-345m
program:
  megatron: Megatron-LM
  args: [--vocab-file, /data/train/vocab.json, --merge-file, /data/train/bpe32k,
         --lr-decay-iters, "320000", --warmup, "0.01"]
model: gpt2-medium
data: {{prefix: {DATA}, split: "900,50,50"}}
train:
  steps: 500
  micro_batch_size: 8
  precision: fp16
  optimizer: {{lr: 0.00015, weight_decay: 0.01}}
  schedule: {{kind: cosine, min_lr: 0.00001}}
  checkpoint: {{folder: /data/MLM, every: 10000}}
parallel: {{recompute: full}}
cluster:
  port: 6000
  nodes: [{{group: all, count: 1, gpus: 8, devices: [4, 5]}}]
"""

# The same on two machines, a script called on each.
TWO_MACHINES = ONE_MACHINE.replace("count: 1", "count: 2")

GPT_OPTIONS = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --train-iters 500 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --distributed-backend nccl --lr 1.5e-4 --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --clip-grad 1.0 --warmup 0.01 --log-interval 10 --eval-interval 1000 "
    "--eval-iters 10 --fp16"
)
DEEPSPEED_OPTIONS = (
    f"--model-parallel-size 4 --batch-size 9 {GPT_OPTIONS} --save /data/MLM --load /data/MLM "
    f"--data-path {DATA} --vocab-file /data/train/vocab.json --merge-file /data/train/bpe32k "
    "--data-impl mmap --split 900,50,50 --save-interval 10 --tensorboard-dir tensorboard_data "
    "--zero-stage 0 --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000 "
    "--zero-contigious-gradients --zero-reduce-scatter --checkpoint-activations "
    "--checkpoint-num-layers 1 --partition-activations --synchronize-each-layer "
    "--contigious-checkpointing"
)
_ARGS = ", ".join(f'"{word}"' for word in DEEPSPEED_OPTIONS.split())

# DeepSpeed's copy of Megatron-LM on four GPUs of one machine.
DEEPSPEED_ONE = f"""
name: ds-gpt2
program: {{deepspeed: Megatron-LM/pretrain_gpt2.py, config: ds_zero_stage_2_config.json,
  args: [{_ARGS}]}}
train:
  micro_batch_size: 9
  global_batch_size: 9
  precision: fp16
  optimizer: {{lr: 0.00015}}
parallel: {{tensor: 4, recompute: full}}
cluster:
  port: 6000
  nodes: [{{group: all, count: 1, gpus: 4}}]
"""

# The same on GPUs 4 and 5 of two machines, with a hostfile.
DEEPSPEED_TWO = (
    DEEPSPEED_ONE.replace("count: 1, gpus: 4", "count: 2, gpus: 8, devices: [4, 5]")
    .replace("tensor: 4", "tensor: 2")
    .replace('"--model-parallel-size", "4"', '"--model-parallel-size", "2"')
    .replace("global_batch_size: 9", "global_batch_size: 18")
)
HOSTS = ("10.10.10.102", "10.10.10.105")
DEEPSPEED_CONFIG = {
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 50000000, "cpu_offload": False},
    "fp16": {"enabled": True, "initial_scale_power": 16},
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 24},
    "gradient_accumulation_steps": "auto",
}

# GPT-2 XL over 8 x 4 GPUs, stages of unlike size, with every kind of option that today's has.
TODAY = """
name: gpt2-xl
program: {megatron: Megatron-LM}
model: gpt2-xl
data: {prefix: xl/my-gpt2_text_document}
train:
  steps: 50
  global_batch_size: 64
  precision: fp16
  checkpoint: {folder: ckpt}
parallel: {pipeline: 8, data: 4, zero: 1, recompute: full, partition: 0-11-8-8-8-8-5-0}
profile: {nsys: true, ranks: [0, 31]}
cluster: {nodes: [{group: a10, count: 8, gpus: "a10:4"}]}
"""
TODAY_FORMS = {
    "uneven": TODAY,
    "empty-stage": TODAY.replace("0-11-8-8-8-8-5-0", "9-0-8-8-8-8-7-2"),
    "units": TODAY.replace("0-11-8-8-8-8-5-0", "7-6-6-6-6-6-6-7"),
    "interleaved": TODAY.replace(
        "0-11-8-8-8-8-5-0", "2-3-3-3-3-3-3-3-3-3-3-4-4-4-2-2, schedule: interleaved"
    ),
    "tensor": TODAY.replace("pipeline: 8, data: 4", "pipeline: 4, data: 4, tensor: 2")
    .replace(", partition: 0-11-8-8-8-8-5-0", ", order: pipeline")
    .replace("model: gpt2-xl", "model: gpt2-8.3b"),
    "even-interleaved": TODAY.replace(
        "partition: 0-11-8-8-8-8-5-0", "schedule: interleaved"
    ).replace("precision: fp16", "precision: fp16\n  loss_scale: 4096"),
    "sgd": TODAY.replace(
        "steps: 50", "steps: 50\n  optimizer: {name: sgd}\n  evaluate: {every: 10}"
    ),
    "even-bf16": TODAY.replace(", partition: 0-11-8-8-8-8-5-0", "").replace("fp16", "bf16"),
    "blend": TODAY.replace("prefix: xl/my-gpt2_text_document", "prefix: 0.7 xl/a 3 xl/b").replace(
        "steps: 50", "steps: 50\n  schedule: {kind: linear, warmup_steps: 5, decay_steps: 40}"
    ),
    "llama": TODAY.replace(
        "model: gpt2-xl",
        "model: {layers: 48, hidden: 1600, heads: 32, llama: {inner: 4000, kv_heads: 8, "
        "head_size: 64, qkv_bias: true, qk_norm: true, rope_scaling: [8, 1, 4, 8192]}}",
    ),
    "mock": TODAY.replace("prefix: xl/my-gpt2_text_document", "synthetic: true"),
}
