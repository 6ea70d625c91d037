"""A GPT as a DeepSpeed pipeline on CPUs: `deepspeed_checkpoints.py save|load FOLDER...`.

Its layers have the names of Megatron-DeepSpeed's. `save` fills the layers of this rank's stage and
writes FOLDER; `load` reads each FOLDER in one process and writes the logits to its logits.pt.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 4, 32, 4, 16, 64
TOKENS = torch.randint(VOCAB, (3, SEQUENCE), generator=torch.Generator().manual_seed(4))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        out: Tensor = self.word_embeddings(tokens) + self.position_embeddings(places)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        packed = self.query_key_value(x).view(size, length, HEADS, 3, -1)  # by heads
        query, key, value = packed.permute(3, 0, 2, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.dense(seen.transpose(1, 2).reshape(size, length, -1))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.dense_4h_to_h = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def find_logits(embedding: Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.word_embeddings.weight)


def measure(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def build(stages: int) -> tuple[PipelineModule, Any]:
    layers = [
        lambda tokens: tokens,
        TiedLayerSpec("embed", Embedding, tied_weight_attr=["word_embeddings.weight"]),
        *(LayerSpec(Block) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec(
            "embed", Embedding, forward_fn=find_logits, tied_weight_attr=["word_embeddings.weight"]
        ),
    ]
    net = PipelineModule(layers, num_stages=stages, loss_fn=measure, partition_method="uniform")
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=list(net.parameters()), config=config
    )
    return net, engine


def save(folder: Path) -> None:
    net, engine = build(dist.get_world_size())
    with torch.no_grad():
        for index, layer in enumerate(net.forward_funcs, net._local_start):
            for number, weight in enumerate(getattr(layer, "parameters", list)()):
                seed = 100 * index + number
                generator = torch.Generator().manual_seed(seed)
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator) + (index == 6))
        for tied in net.tied_modules.values():
            for number, weight in enumerate(tied.parameters()):
                weight.copy_(
                    0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
                )
    args = argparse.Namespace(num_attention_heads=HEADS, hidden_size=HIDDEN, swiglu=False)
    engine.global_steps = 9
    engine.save_checkpoint(
        str(folder), client_state={"args": args, "checkpoint_version": 3.0, "iteration": 9}
    )


def load(folders: list[Path]) -> None:
    net, engine = build(1)
    for folder in folders:
        engine.load_checkpoint(str(folder), load_module_only=True, load_optimizer_states=False)
        with torch.no_grad():
            torch.save(net(TOKENS), folder / "logits.pt")


torch.set_num_threads(1)
# Its sums through shared memory are compiled on first use, which takes minutes: gloo has them.
vars(deepspeed.ops)["__compatible_ops__"] = {}
deepspeed.init_distributed("gloo")
torch.serialization.add_safe_globals([argparse.Namespace])
if sys.argv[1] == "save":
    save(Path(sys.argv[2]))
else:
    load([Path(word) for word in sys.argv[2:]])
dist.barrier()
dist.destroy_process_group()
