"""The one line of `vjob submit` about a conf that was tried: once for each change, else nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Vjob
from varuna_core.records.runfolder import RunFolder

CONF = """
name: brief
program: {{script: brief.py, args: ["{word}"]}}
cluster: {{scheduler: local, walltime_min: {minutes}, nodes: [{{group: all, count: 1, ranks: 1}}]}}
"""
SCRIPT = "for step in (1, 2):\n    print(f'step {step}/2 loss 1.0', flush=True)\n"


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    (tmp_path / "brief.py").write_text(SCRIPT)
    return Vjob(tmp_path)


def submit(vjob: Vjob, word: str = "a", minutes: int = 5) -> str:
    vjob.write(CONF.format(word=word, minutes=minutes))
    return vjob("submit", "conf.yaml").stderr


def try_out(vjob: Vjob, word: str = "a", code: int = 0) -> None:
    vjob.write(CONF.format(word=word, minutes=5))
    vjob("try", "conf.yaml", code=code)


def test_who_never_tried_hears_nothing(vjob: Vjob) -> None:
    assert "try" not in submit(vjob)
    (vjob.folder / "brief.py").write_text(SCRIPT * 2)
    assert "try" not in submit(vjob)
    assert not (vjob.folder / "state/vjob/tried").exists()


def test_a_change_since_the_last_healthy_try_is_named_once(vjob: Vjob) -> None:
    try_out(vjob)
    assert "tried" not in submit(vjob)
    assert "tried" not in submit(vjob, minutes=50)
    (vjob.folder / "brief.py").write_text(SCRIPT * 2)
    assert "not tried since brief.py changed: vjob try conf.yaml" in submit(vjob)
    assert "tried" not in submit(vjob)
    assert "not tried since the conf changed" in submit(vjob, word="b")
    try_out(vjob, word="b")
    assert "tried" not in submit(vjob, word="b")


def test_a_run_that_ended_well_counts_as_a_try(vjob: Vjob) -> None:
    try_out(vjob)
    run = RunFolder(Path(vjob("submit", "conf.yaml", "--set", "program.args=[b]").stdout
                         .partition("files   ")[2].split()[0]))  # fmt: skip
    vjob.wait_over(run)
    state = next((vjob.folder / "state/vjob/tried").iterdir())
    state.write_text(state.read_text().replace('"hinted"', '"hinted before"'))
    said = vjob("submit", "conf.yaml", "--set", "program.args=[b]").stderr
    assert "tried" not in said


def test_a_try_that_found_something_is_called_to_mind(vjob: Vjob) -> None:
    (vjob.folder / "brief.py").write_text("import nowhere_to_be_found\n")
    try_out(vjob, code=1)
    assert "its last try found something" in submit(vjob)
