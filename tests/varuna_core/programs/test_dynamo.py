"""torch's compiler stays out of a rank that compiles nothing, and is there as soon as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import ROOT
from tests.varuna_core.programs.trainings import GPT
from varuna_core.records.training import render_training

pytest.importorskip("torch", reason="torch is not installed")

TELL = """
def tell():
    print("loaded" if "torch._dynamo.eval_frame" in sys.modules else "spared")
"""
TRAIN = f"""
import sys
{TELL}
from varuna_core.programs import pretrain

assert pretrain.main([sys.argv[1]]) == 0
tell()
"""
COMPILE = f"""
import sys
{TELL}
from varuna_core.programs.dynamo import spare_dynamo

spare_dynamo()
import torch

with torch.device("meta"):
    torch.nn.init.normal_(torch.empty(2))
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
tell()
calls = []

def note(graph, inputs):
    calls.append(graph)
    return graph

torch.compile(layer, backend=note)(torch.ones(1, 2))
import torch._dynamo.config as config

assert len(calls) == 1 and config is torch._dynamo.config
assert "stand-in" not in torch._dynamo.__doc__ and "stand-in" not in (config.__doc__ or "")
optimizer.step()
tell()
"""


def run(code: str, *words: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line in ("loaded", "spared")]


def test_a_training_without_compile_does_not_load_it(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    path.write_text(render_training(replace(GPT, steps=1)))
    assert run(TRAIN, str(path)) == ["spared"]


def test_who_compiles_after_all_gets_the_real_one() -> None:
    assert run(COMPILE) == ["spared", "loaded"]
