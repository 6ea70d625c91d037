"""`vjob compare SWEEP`, from runs on this machine to a table, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for

SCRIPT = """\
import os, sys
from varuna_core.records.logs.training_log import Iteration, format_iteration
rate = float(os.environ["RATE"])
if rate > 1:
    sys.exit("too large a rate")
for step in (1, 2):
    value = Iteration(step, 2, time_ms=12.0, losses={"lm loss": abs(rate - 0.01) + 1 / step})
    print(format_iteration(value), flush=True)
"""
CONF = """
name: tune
program: {script: tune.py}
env: {RATE: "1"}
cluster: {scheduler: local, walltime_min: 2, nodes: [{group: m, ranks: 1}]}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    vjob = Vjob(tmp_path)
    root = vjob.env["PYTHONPATH"]
    (tmp_path / "tune.py").write_text(f"import sys\nsys.path.insert(0, {root!r})\n{SCRIPT}")
    vjob("submit", vjob.write(CONF), "--sweep", "env.RATE=0.1,0.01,10", "--sweep-name", "rates")
    wait_for(lambda: not going(vjob), 60, lambda: vjob("list", "--sweep", "rates").stdout)
    return vjob


def going(vjob: Vjob) -> bool:
    rows = json.loads(vjob("list", "--sweep", "rates", "--json").stdout)
    return any(row["state"] not in ("COMPLETED", "FAILED") for row in rows)


def test_a_sweep_is_compared_by_its_final_figures(vjob: Vjob) -> None:
    lines = vjob("compare", "rates").stdout.splitlines()
    assert lines[0].split() == ["RUN", "RATE", "STATE", "STEP", "LOSS", "S/STEP"]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["rates-2", "0.01", "COMPLETED", "2", "0.5"],
        ["rates-1", "0.1", "COMPLETED", "2", "0.59"],
        ["rates-3", "10", "FAILED", "-", "-"],
    ]
    assert lines[3].endswith("exited 1: too large a rate")
    said = json.loads(vjob("compare", "rates", "--json").stdout)
    assert said["sweeps"] == ["rates"]
    assert [run["swept"]["env.RATE"] for run in said["runs"]] == ["0.01", "0.1", "10"]
    assert "wrote rates.html" in vjob("compare", "rates", "-o", "rates.html").stdout
    assert "Over env.RATE" in (vjob.folder / "rates.html").read_text()
    # A run of the conf as it stands, beside those of the sweep.
    other = vjob.submit(CONF)
    vjob.wait_over(other)
    rows = json.loads(vjob("compare", "rates", other.name, "--json").stdout)["runs"]
    assert {run["name"]: run["swept"]["env.RATE"] for run in rows}[other.name] == "1"
    # A word that is a JOB too is the JOB.
    assert len(vjob("compare", "rates-1", "rates-2", "--json").stdout) > 10
    assert "no run 'rate'" in vjob("compare", "rate", code=2).stderr
