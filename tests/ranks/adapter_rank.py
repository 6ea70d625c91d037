"""A Llama with peft's LoRA: `tests.ranks.adapter_rank <folder>`, two ranks.

Trained in two layouts as plainly, over named parameters; the adapters alone are gathered and
saved by peft, and a training that peft's reader begins from them goes on in the other layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.foreign import build_llama, make_text
from tests.ranks.results import leave_results
from varuna_core import Varuna

LAYOUTS = {"replicas": "0,1;", "stages": "0;1;"}
BATCH, CHUNK, STEPS = 8, 2, 3


def build_base() -> nn.Module:
    torch.manual_seed(0)
    return build_llama()


def build() -> Any:
    import peft

    base = build_base()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)  # type: ignore[arg-type]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """By names, as recipes for adapters do: the second matrix learns faster."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    fast = [p for n, p in named.items() if "lora_B" in n]
    slow = [p for n, p in named.items() if "lora_B" not in n]
    return torch.optim.AdamW([{"params": slow}, {"params": fast, "lr": 0.03}], lr=0.01)


def train_plainly(model: Any, begin: int) -> list[float]:
    optimizer, losses = build_optimizer(model), []
    for number in range(begin, begin + STEPS):
        batch, total = make_text(BATCH, number), 0.0
        for start in range(0, BATCH, CHUNK):
            micro = {name: value[start : start + CHUNK] for name, value in batch.items()}
            loss = model(**micro).loss * (CHUNK / BATCH)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(model: Any, layout: str, begin: int) -> tuple[list[float], dict[str, Tensor] | None]:
    varuna = Varuna(model, LAYOUTS[layout], make_text(CHUNK), BATCH, CHUNK, device="cpu")
    optimizer = varuna.set_optimizer(build_optimizer(varuna))
    losses = []
    for number in range(begin, begin + STEPS):
        batch = {name: value[varuna.samples] for name, value in make_text(BATCH, number).items()}
        losses.append(varuna.step(batch, clip_grad_max_norm=1.0)[0].item())
        optimizer.step()
        varuna.zero_grad()
    state = varuna.gather_state_dict(only_trained=True)
    varuna.close()
    return losses, state


def main(folder: Path, rank: int) -> dict[str, Any]:
    import peft

    plain = build()
    told: dict[str, Any] = {"plain": train_plainly(plain, 0)}
    want = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    for layout in LAYOUTS:
        model = build()
        told[layout], state = train(model, layout, 0)
        if state is not None:
            told[f"{layout} same names"] = state.keys() == want.keys()
            told[f"{layout} apart"] = max(float((state[n] - want[n]).abs().max()) for n in want)
            model.save_pretrained(folder / layout, state_dict=state)
    dist.barrier()
    told["plain on"] = train_plainly(plain, STEPS)
    for saved, layout in zip(LAYOUTS, reversed(LAYOUTS), strict=True):
        base: Any = build_base()
        back = peft.PeftModel.from_pretrained(base, folder / saved, is_trainable=True)
        told[f"{layout} on"] = train(back, layout, STEPS)[0]
        told["files"] = sorted(path.name for path in (folder / saved).glob("*.safetensors"))
    return told


if __name__ == "__main__":
    leave_results(main)
