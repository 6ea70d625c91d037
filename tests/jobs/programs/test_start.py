"""The ends of first runs: what is missing is named, with what to do about it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.command import Vjob
from vjob.jobs.programs.start import describe_missing_module

CONF = """
name: first
program: {script: train.py}
cluster: {scheduler: local, walltime_min: 2, nodes: [{group: a, ranks: 1}]}
"""


def test_a_module_that_the_ranks_lack_is_named_with_their_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_package.part\n")
    vjob = Vjob(tmp_path)
    message = vjob.wait_over(vjob.submit(CONF))["message"]
    assert "No module named 'no_such_package'" in message
    assert f"-> install it for {sys.executable}, or change program.python" in message


@pytest.mark.parametrize("said", ["exited 1: ImportError: x", "no ModuleNotFoundError: was caught"])
def test_other_ends_are_not_taken_for_it(said: str) -> None:
    row = describe_missing_module("python3", in_container=True)
    assert not re.search(row.pattern, said)
