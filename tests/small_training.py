"""A small training that tests submit: its tokens, steps slowed by waits, its losses and morphs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.command import read_out
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

DOCUMENTS = [[[(start + k) % 60 for k in range(40)]] for start in range(60)]
"""Counting tokens, so that there is something to learn."""
SLOW_GELU = """
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


def write_text(folder: Path) -> None:
    """Write the token files `text`."""
    from tests.varuna_core.data.tokens import write_tokens  # numpy: the caller has skipped without

    write_tokens(folder / "text", DOCUMENTS)


def write_slow_steps(folder: Path, seconds: float = PAUSE_S) -> None:
    """Make a folder for the PYTHONPATH of ranks, with a sitecustomize that slows their steps.

    A test that has to act on a run in time then needs few steps, and the processors stay free.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_GELU % seconds)


def read_losses(run: RunFolder) -> dict[int, float]:
    """Read the loss of each step that led to the final weights: of repeated steps the last."""
    found = {}
    for attempt in run.attempts():
        text = read_out(run, attempt.number)
        for step, loss in re.findall(r" iteration +(\d+)/.*? lm loss: (\S+)", text):
            found[int(step)] = float(loss)
    return found


def list_morphs(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["kind"] == "morph"]
