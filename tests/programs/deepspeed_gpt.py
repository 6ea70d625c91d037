"""A tiny GPT trained by DeepSpeed for a few steps, as a user's script would; says what it did."""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
from deepspeed import comm
from torch import nn

VOCAB, WIDTH, LENGTH = 64, 32, 16


class TinyGpt(nn.Module):
    """Embedding, two causal blocks, a head; the loss comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.tokens(tokens[:, :-1]) + self.places(torch.arange(LENGTH))
        logits = self.head(self.blocks(hidden, mask=ahead, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--local_rank", type=int, required=True)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(7)
    # Its sums through shared memory are compiled on first use, which takes minutes: gloo has them.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.init_distributed("gloo")
    model = TinyGpt()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, world = comm.get_rank(), comm.get_world_size()
    batches = torch.randint(0, VOCAB, (world, engine.train_micro_batch_size_per_gpu(), LENGTH + 1))
    losses = []
    for _ in range(args.steps):
        loss = engine(batches[rank])  # the same each time: it must learn it
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    said = {
        "rank": rank,
        "world": world,
        "local_rank": args.local_rank,
        "stage": engine.zero_optimization_stage(),
        "batch": engine.train_batch_size(),
        "bucket": engine.zero_reduce_bucket_size(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "losses": losses,
    }
    print(json.dumps(said), flush=True)
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
