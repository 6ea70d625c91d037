"""Trainings whose steps wait rather than compute: a test that does something to a run in time needs
few steps, and the processors are meanwhile for what starts."""

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
"""In each layer, for each micro-batch."""


def write_pauses(folder: Path, seconds: float = PAUSE_S) -> None:
    """A folder for the PYTHONPATH of ranks."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PROGRAM % seconds)
