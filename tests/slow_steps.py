"""A sitecustomize that slows the steps of a training by waits.

A test that has to act on a run in time then needs few steps, and the processors stay free."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """
import time
import torch.nn.functional as functional

plain = functional.gelu


def gelu(*values, **options):
    time.sleep(%s)
    return plain(*values, **options)


functional.gelu = gelu
"""
PAUSE_S = 0.01
"""Seconds in each layer, for each micro-batch."""


def write_slow_steps(folder: Path, seconds: float = PAUSE_S) -> None:
    """Make a folder for the PYTHONPATH of ranks."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PROGRAM % seconds)
