"""Small trainings that several tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from varuna_core.records.training import Llama, Training

GPT = Training(
    program="pretrain_gpt", model="tiny", layers=4, hidden=16, heads=2, sequence=8, vocab=64,
    dropout=0.0, data=None, split="8,2,0", vocabulary=None, steps=6, global_batch_size=8,
    micro_batch_size=2, precision="fp32", loss_scale="dynamic", optimizer="adamw", lr=1e-2,
    weight_decay=0.1, betas=(0.9, 0.95), fused=True, apex=False, offload=False,
    lr_schedule="cosine", warmup_steps=2, decay_steps=6, min_lr=1e-3, clip_grad_norm=0.5, seed=11,
    log_every=2, evaluate_every=0, evaluate_steps=1, compile=False, cuda_graphs=False,
    checkpoint_folder=None, checkpoint_every=0, checkpoint_keep=3, checkpoint_local=None,
    saved=-1,
    recompute="none", schedule="1f1b", partition=None, pipeline=1, zero=0,
    tensor=1, sequence_parallel=False, timeline=False,
)  # fmt: skip
BERT = replace(GPT, program="pretrain_bert", sequence=16)

LLAMA = replace(
    GPT,
    heads=4,
    llama=Llama(
        inner=24, kv_heads=2, head_size=6, tied=False, qkv_bias=True, qk_norm=True, norm_eps=1e-5,
        rope_base=100.0, rope_scaling=(4.0, 1.0, 4.0, 8.0),
    ),
)  # fmt: skip


def shape(training: Training) -> dict[str, Any]:
    names = ("layers", "hidden", "heads", "sequence", "vocab", "dropout")
    return {name: getattr(training, name) for name in names}


def write_vocabulary(path: Path, size: int) -> str:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{number}" for number in range(size - len(words))]
    path.write_text("\n".join(words) + "\n")
    return str(path)
