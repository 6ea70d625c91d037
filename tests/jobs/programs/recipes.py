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
