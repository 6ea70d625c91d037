"""The states of this process' random generators, for `RankPart.own`, and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def take_random_state() -> dict[str, Any]:
    """Of Python, of torch on the CPU and on the GPUs, and of numpy if it is loaded."""
    taken: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        taken["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        taken["numpy"] = [name, [int(key) for key in keys], *rest]
    return taken


def put_random_state(taken: dict[str, Any]) -> None:
    """What was taken; generators that this process lacks are passed over."""
    random.setstate(taken["python"])
    torch.set_rng_state(taken["torch"])
    if "cuda" in taken and torch.cuda.is_available():
        for device, state in enumerate(taken["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    if "numpy" in taken:
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_state(tuple(taken["numpy"]))
