"""One seed of chaos on this machine; `python -m benchmarks.chaos` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.experiment import run_experiment
from benchmarks.chaos.faults import Fault, draw_faults
from benchmarks.chaos.testbed import Testbed

pytestmark = pytest.mark.slow
PATIENCE_S = 150.0


def run_and_check(testbed: Testbed, seed: int, faults: tuple[Fault, ...], name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    try:
        testbed.open()
        report = run_experiment(testbed, seed, faults, name, PATIENCE_S)
        report.write(testbed.folder / "report.json")
        said = "\n".join(str(one) for one in report.seen)
        assert report.problems == [], f"{testbed.folder / 'report.json'}\n{said}"
    finally:
        testbed.close(keep=True)


@pytest.mark.long
def test_on_this_machine(tmp_path: Path) -> None:
    kinds = ("damage newest", "freeze manager", "kill agent")
    run_and_check(Testbed(tmp_path), 5, draw_faults(5, 3, kinds), "local")
