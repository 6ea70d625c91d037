"""Trains a tiny GPT by DeepSpeed, as a script of your own would; deepspeed.yaml starts it.

What it asks DeepSpeed for is in ds_config.json of the run folder, made of the conf and of ds.json.
"""

import argparse

import deepspeed
import torch
from deepspeed import comm
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
        for block in self.blocks:
            hidden = block(hidden, src_mask=ahead.to(hidden.dtype), is_causal=True)
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
    losses = []
    for _ in range(args.steps * engine.gradient_accumulation_steps()):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()  # of the optimizer only after the last micro-batch of a step
        losses.append(loss.item())
    return engine, losses[:: engine.gradient_accumulation_steps()]


def main() -> None:
    """Rank 0 says how it goes."""
    _, losses = train(parse_arguments())
    if comm.get_rank() == 0:
        for step, loss in enumerate(losses, start=1):
            print(f"step {step} loss {loss:.4f}", flush=True)
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
