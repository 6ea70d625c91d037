"""Trains a tiny GPT by DeepSpeed, as a script of your own would; deepspeed.yaml starts it.

What it asks DeepSpeed for is in ds_config.json of the run folder, made of the conf and of ds.json.
"""

import argparse

import deepspeed
import torch
from deepspeed import checkpointing, comm
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 64, 32, 16


class Gpt(nn.Module):
    """Embedding, two causal blocks, a head; the loss comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens[:, :-1])
        hidden = hidden + self.places(torch.arange(LENGTH, device=tokens.device))
        ahead = torch.full((LENGTH, LENGTH), -torch.inf, device=tokens.device).triu(1)
        ahead = ahead.to(hidden.dtype)
        for block in self.blocks:
            if checkpointing.is_configured():  # by parallel.recompute: full
                hidden = checkpointing.checkpoint(block, hidden, ahead)
            else:
                hidden = block(hidden, ahead)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parse_arguments() -> argparse.Namespace:
    """Ours, and those that DeepSpeed's own launcher and `vjob` give: where we are, and its file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=0)
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def train(args: argparse.Namespace) -> tuple[deepspeed.DeepSpeedEngine, list[float]]:
    """On tokens that count up; the engine, and the loss of each step on this rank."""
    deepspeed.init_distributed()
    torch.manual_seed(7)  # every rank makes the same weights
    model = Gpt()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    starts = (comm.get_rank() * size + torch.arange(size))[:, None] * 7
    batch = ((starts + torch.arange(LENGTH + 1)) % VOCAB).to(engine.device)
    if "activation_checkpointing" in engine.config:
        checkpointing.configure(None, engine.config)
    losses = []
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()  # the optimizer's only after the last of them
        losses.append(loss.item())
        if comm.get_rank() == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return engine, losses


def main() -> None:
    """Train, and part in order."""
    train(parse_arguments())
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
