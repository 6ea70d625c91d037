"""The facts run on the node's Python, which may be as old as 3.8."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT


def find_python_3_8() -> str | None:
    """A Python 3.8 on the PATH or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(pyenv.glob("3.8*/bin/python3.8"))
    return str(kept[-1]) if kept else shutil.which("python3.8")


@pytest.mark.skipif(find_python_3_8() is None, reason="no Python 3.8 on this machine")
def test_every_module_of_the_facts_imports_on_python_3_8() -> None:
    python = find_python_3_8()
    assert python is not None
    files = sorted((ROOT / "varuna_core/facts").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    lines = [f"import {name.replace('.__init__', '')}" for name in names]
    done = subprocess.run(
        [python, "-B", "-c", "\n".join(lines)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
