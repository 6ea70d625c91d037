"""A few seeds of chaos, for every run of the tests; `python -m tests.chaos` plays more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Fault, draw
from tests.chaos.play import play
from tests.chaos.stage import Stage

pytestmark = pytest.mark.slow
PATIENCE_S = 150.0


def play_well(stage: Stage, seed: int, faults: tuple[Fault, ...], name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    try:
        stage.open()
        report = play(stage, seed, faults, name, PATIENCE_S)
        report.write(stage.folder / "report.json")
        said = "\n".join(str(one) for one in report.seen)
        assert report.problems == [], f"{stage.folder / 'report.json'}\n{said}"
    finally:
        stage.close(keep=True)


def test_on_this_machine(tmp_path: Path) -> None:
    kinds = ("damage newest", "freeze manager", "kill agent")
    play_well(Stage(tmp_path), 5, draw(5, 3, kinds), "local")
