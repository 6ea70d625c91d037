"""Trains a small GPT on train.bin and val.bin, which hold tokens as uint16.

$ python plain.py --data_dir=text --max_iters=100
"""

import math
import os
import sys
import time
from ast import literal_eval

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from varuna_core import Varuna, cut_before

# -----------------------------------------------------------------------------
# default config values; any of them may be given as --name=value
out_dir = "out"
data_dir = "text"
init_from = "scratch"  # or 'resume'
eval_interval = 10
eval_iters = 2
log_interval = 1
# data
gradient_accumulation_steps = 4
batch_size = 2  # the micro-batch size, if gradient_accumulation_steps > 1
block_size = 16
vocab_size = 64
# model
n_layer = 4
n_head = 2
n_embd = 32
dropout = 0.0
# adamw optimizer
learning_rate = 1e-2
max_iters = 20
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
# learning rate decay
warmup_iters = 2
lr_decay_iters = 20
min_lr = 1e-3
# -----------------------------------------------------------------------------
for arg in sys.argv[1:]:
    key, _, value = arg.removeprefix("--").partition("=")
    assert key in globals(), f"unknown config key: {key}"
    globals()[key] = value if isinstance(globals()[key], str) else literal_eval(value)
# -----------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        p = dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab_size, n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList([Block() for _ in range(n_layer)]),
                ln_f=nn.LayerNorm(n_embd),
            )
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)
        # a special scaled init for the projections onto the residual stream
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        _, t = idx.size()
        assert t <= block_size, f"cannot forward a sequence of {t}, block size is {block_size}"
        pos = torch.arange(t, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:  # only the very last position, for generation
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        # all weights of matmuls and embeddings decay, biases and layernorms do not
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
device = "cpu"  # of batches, which Varuna moves


def get_batch(split):
    # a new memmap every time, for an old one keeps its pages
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return x.to(device), y.to(device)


model = cut_before(GPT(), "transformer.h.*", "transformer.ln_f")
sample = torch.zeros(1, block_size, dtype=torch.long)
model = Varuna(model, dummy_inputs=[sample, sample])
optimizer = model.set_optimizer(model.module.configure_optimizers())
model.save_on_signal(out_dir)
iter_num, best_val_loss = model.load_checkpoint(out_dir, missing_ok=True), 1e9
if iter_num > 0:
    best_val_loss = model.user_state
    torch.set_rng_state(model.data_position)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:  # 1) linear warmup
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:  # 2) the minimum afterwards
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)  # 3) cosine in between
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


t0 = time.time()
while True:
    model.data_position = torch.get_rng_state()
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
        best_val_loss = min(best_val_loss, losses["val"])
        model.user_state = best_val_loss
        if iter_num > 0:
            model.checkpoint(out_dir)
    if iter_num >= max_iters:
        break

    lossf = 0.0
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        loss, _ = model.step([X[model.samples], Y[model.samples]], clip_grad_max_norm=grad_clip)
        loss = loss / gradient_accumulation_steps
        lossf += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {lossf:.6f}, time {dt * 1000:.2f}ms")
    iter_num += 1
