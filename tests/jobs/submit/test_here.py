"""What a submit to this machine refuses, and what it says of the Python."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.errors import InputError
from vjob.jobs.programs.code.packages import describe_python
from vjob.jobs.submit import here


@pytest.mark.parametrize(
    ("python", "is_set_up", "says"),
    [
        (sys.executable, False, ""),
        ("python3", False, ""),
        ("missing/python", False, "does not exist or is not executable; give an interpreter, or"),
        ("python9.9", False, "does not exist or is not executable"),
        ("python9.9", True, ""),
        ("/bin/echo", False, "does not run as a Python"),
    ],
)
def test_an_interpreter_is_tried_before_a_run_here(python: str, is_set_up: bool, says: str) -> None:
    if not says:
        here.check_python(python, os.environ["PATH"], is_set_up=is_set_up)
        return
    with pytest.raises(InputError, match=says):
        here.check_python(python, os.environ["PATH"], is_set_up=is_set_up)


def test_more_ranks_than_a_machine_can_start_are_refused() -> None:
    plan = make_plan(make_group("a", 2, 2500))
    with pytest.raises(InputError, match="asks for 5000 ranks, but this machine has 2 processors"):
        here.check_ranks(plan, 2)
    here.check_ranks(plan, 128)


def test_the_folder_of_a_virtual_environment_is_its_python(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    text = "name: a\nprogram: {script: t.py, python: env}\n"
    conf = parse_conf(text, "c", tmp_path, environ={})
    assert conf.program.python == str(tmp_path / "env/bin/python")
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (site / "torch-2.13.0.dist-info").mkdir()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert describe_python(conf.program.python) == (
        f"{tmp_path}/env/bin/python ({version}, torch 2.13.0)"
    )
    assert describe_python("/nowhere/python") == "/nowhere/python"
