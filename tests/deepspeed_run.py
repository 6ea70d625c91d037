"""A real DeepSpeed run on CPU by `vjob submit`, shared by local and lab tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest

from tests.command import PROGRAMS, Vjob, read_out
from varuna_core.records.runfolder import RunFolder

CONF = f"""
name: ds
program:
  deepspeed: {PROGRAMS / "deepspeed_gpt.py"}
  config: ds.json
  args: [--steps, "5"]
  python: {{python}}
train: {{{{micro_batch_size: 2, global_batch_size: 4, optimizer: {{{{lr: 0.01}}}}}}}}
parallel: {{{{zero: {{stage}}, recompute: full}}}}
cluster:
  scheduler: {{scheduler}}
  walltime_min: 5
  join_s: 120
  nodes: [{{{{group: pair, count: {{count}}, ranks: {{ranks}}}}}}]
env: {{{{TORCH_EXTENSIONS_DIR: "{os.environ["TORCH_EXTENSIONS_DIR"]}"}}}}
"""
"""With what `make` compiled for DeepSpeed, which would otherwise be compiled in the user's home."""


@functools.cache
def find_python() -> str:
    """Find an interpreter that has DeepSpeed; skip the test without one."""
    python = os.environ.get("VJOB_DEEPSPEED_PYTHON", sys.executable)
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('deepspeed')))"
    done = subprocess.run([python, "-c", code], check=False, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"{python} has no DeepSpeed; VJOB_DEEPSPEED_PYTHON may name one that has")
    return python


def check_runs(vjob: Vjob, run: RunFolder, stage: int) -> None:
    """Check that two ranks trained together, with the conf's settings and the user's file."""
    record = vjob.wait_over(run, timeout_s=240)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines() if line.startswith("{")]
    assert sorted(row["rank"] for row in rows) == [0, 1]
    for row in rows:
        assert (row["world"], row["stage"], row["batch"]) == (2, stage, 4)
        assert (row["bucket"], row["optimizer"]) == (5000, "AdamW")
        assert row["losses"][-1] < 0.8 * row["losses"][0]
