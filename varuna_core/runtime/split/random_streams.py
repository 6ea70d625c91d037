"""Seed random numbers independently of the layout: torch is seeded when a micro-batch enters a
segment.

The seed is derived from (seed, step, index of the micro-batch's first sample in the global batch,
segment), so any rank that runs the segment, or recomputes it, gets the same random numbers. Every
stage's forward starts with the stream of segment 0, since the stage also runs the code before it.

Python's `random` and numpy's global generator are seeded in the same way if the dry run used them,
or if a recompute might use them again. Generators that are attributes of modules are not seeded
(attributes.py).
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CPU = torch.device("cpu")
STRIDE, MASK = 0x9E3779B97F4A7C15, 2**63 - 1


def derive_seed(seed: int, name: str) -> int:
    """Derive a 63-bit seed for this name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def read_foreign_streams() -> tuple[Any, ...]:
    """Return the state of Python's `random` and, if numpy is imported, of its global generator."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def set_foreign_streams(state: tuple[Any, ...]) -> None:
    """Restore a state returned by `read_foreign_streams`."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy.random"].set_state(state[1])


def seed_all(seed: int) -> None:
    """Seed torch's generators, Python's `random` and numpy's global generator."""
    torch.manual_seed(seed)
    seed_foreign_streams(seed)


def seed_foreign_streams(derived: int) -> None:
    """Seed Python's `random` and numpy's global generator with a 63-bit number."""
    random.seed(derived)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(derived & 0xFFFFFFFF)


def build_seeder(
    seed: int,
    step: int,
    first_sample: int,
    device: torch.device = CPU,
    seeds_foreign: bool = False,
) -> Callable[[int], None]:
    """Return the function that a stage calls at the start of each segment.

    If `seeds_foreign`, this function also seeds Python's `random` and numpy's generator (20 us).

    The hash is computed once per micro-batch; an odd stride between segments makes all seeds
    differ. `torch.manual_seed` is avoided, since it formats a stack trace for missing devices,
    which takes 0.1 ms or more per call (torch 2.13).
    """
    base = derive_seed(seed, f"{step}/{first_sample}")
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])

    def start(segment: int) -> None:
        derived = (base + segment * STRIDE) & MASK
        for generator in generators:
            generator.manual_seed(derived)
        if seeds_foreign:
            seed_foreign_streams(derived)

    return start


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state at the end of the context, so that it has no later effect."""
    foreign = read_foreign_streams()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        set_foreign_streams(foreign)
