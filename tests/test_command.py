"""Commands that are forked are those of a Python of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import Vjob, run_module

# timeit puts the current folder in front of what is there.
SHOW = "import os, sys; print(sys.path[1], os.getcwd(), os.environ.get('MINE'), os.nice(0))"


@pytest.mark.parametrize("words", [("--help",), ("status", "none"), ("init",), ("no-such",)])
def test_a_forked_command_says_and_ends_as_one_of_its_own(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A name that only a Python that starts reads makes it one of its own."""
    forked = Vjob(tmp_path)(*words, code=None)
    own = Vjob(tmp_path, {"PYTHONHASHSEED": "random"})(*words, code=None)
    assert isinstance(own.args, list) and own.args[0] != "vjob" == forked.args[0]
    said = [(done.returncode, done.stdout, done.stderr) for done in (forked, own)]
    assert said[0] == said[1]


def test_it_has_the_folder_the_environment_and_the_niceness_of_who_asks(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MINE": "my own"}
    done = run_module("timeit", ["-n1", "-r1", "-s", SHOW], tmp_path, env, 60)
    wanted = f"{tmp_path} {tmp_path} my own {os.getpriority(os.PRIO_PROCESS, 0)}"
    assert done.stdout.splitlines()[0] == wanted


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with pytest.raises(subprocess.TimeoutExpired):  # once it has ended
        run_module("timeit", ["-n1", "__import__('signal').pause()"], tmp_path, env, 0.2)
