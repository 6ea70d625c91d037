"""For how much of its steps a training waits for data; a part of `benchmarks.data`.

One process of `pretrain_gpt` reads token files, as a user's would, and the trace says what each
step spent on data. Small models are the hard case: their steps are short, and the data are read
ahead while one runs. The first step reads its own batch and is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from varuna_core.data.indexed import bin_path, idx_path, write_index
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.programs.start import Found, build_files

SHAPES = {
    "the demo's GPT": ("{layers: 8, hidden: 64, heads: 4, sequence: 64, vocab: 1000}", 200),
    "4 layers of 128, sequence 256": (
        "{layers: 4, hidden: 128, heads: 4, sequence: 256, vocab: 1000}",
        40,
    ),
}
"""Model and number of steps."""
CONF = """
name: waiting
program: pretrain_gpt
model: {model}
data: {{prefix: tokens}}
train: {{steps: {steps}, global_batch_size: 16, micro_batch_size: 4, evaluate: {{every: 0}}}}
"""
DOCUMENTS, LENGTH = 20_000, 500


def measure_waiting(folder: Path) -> list[str]:
    """A row for each shape."""
    random = np.random.default_rng(0)
    random.integers(0, 1000, DOCUMENTS * LENGTH).astype("<u2").tofile(bin_path(folder / "tokens"))
    with open(idx_path(folder / "tokens"), "wb") as file:
        lengths = np.full(DOCUMENTS, LENGTH)
        write_index(file, np.dtype("<u2"), lengths, np.arange(DOCUMENTS + 1))
    return [_measure(folder, name) for name in SHAPES]


def _measure(folder: Path, name: str) -> str:
    model, num_steps = SHAPES[name]
    conf = parse_conf(CONF.format(model=model, steps=num_steps), "conf.yaml", folder)
    for file, text in build_files(conf, Found(), str(folder)).items():
        (folder / file).write_text(text)
    trace = folder / "trace.jsonl"
    trace.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "varuna_core.programs.pretrain", folder / "training.json"],
        env={**os.environ, "VJOB_TRACE": str(trace), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = map(json.loads, trace.read_text().splitlines())
    _, *steps = [line for line in lines if isinstance(line, dict) and "step" in line]
    waited = sum(step["sums"]["data"][2] for step in steps)
    took = sum(step["took"] for step in steps)
    mean = took / len(steps) / 1e6
    return f"| {name} | 1 % | {waited / took:.2%} | {mean:.0f} ms |"
