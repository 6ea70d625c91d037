"""submitit is as vjob takes it to be: the installed release, and both ends of the range."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import ROOT
from tests.jobs.api.contract import CHECKS, find_breaches
from tests.plugin import write_metadata

RANGE = re.search(
    r"^    submitit >=([\d.]+),<(\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE
)
PROGRAM = """
import submitit

def square(number):
    return submitit.__version__, submitit.JobEnvironment().global_rank, number * number

executor = submitit.AutoExecutor(folder="log/%j", cluster="vjob")
executor.update_parameters(tasks_per_node=2, vjob_set={"cluster.scheduler": "local"})
job = executor.submit(square, 5)
print(submitit.__version__, submitit.__file__, job.results())
"""


def test_the_installed_submitit_is_as_vjob_takes_it_to_be() -> None:
    assert len(CHECKS) > 10
    assert find_breaches() == []


def call(*words: str | Path, cwd: Path, path: str = "") -> str:
    env = {**os.environ, "XDG_STATE_HOME": str(cwd), "PYTHONPATH": path}
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(venv: Path, *wanted: str) -> Path:
    """The Python of a venv with this submitit, and all else as the tests have it; skips where no
    package index answers."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin/python"
    words = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    words += ["--disable-pip-version-check", "--retries=1", "--timeout=15", *wanted]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        pytest.skip(
            f"pip cannot install {' '.join(wanted)}: {done.stderr.strip().splitlines()[-1]}"
        )
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_both_ends_of_the_range_keep_the_contract_and_run_a_function(
    tmp_path: Path, end: str
) -> None:
    assert RANGE is not None
    oldest, below = RANGE.groups()
    wanted = f"submitit=={oldest}" if end == "oldest" else f"submitit>={oldest},<{below}"
    # submitit 1.5.3 looks for plugins by pkg_resources, which newer releases of setuptools lack.
    more = ["setuptools<81"] if end == "oldest" else []
    python = install(tmp_path / "venv", wanted, *more)
    write_metadata(tmp_path / "plugin")
    path = f"{tmp_path / 'plugin'}{os.pathsep}{ROOT}"
    said = call(python, "-m", "tests.jobs.api.contract", cwd=tmp_path, path=path)
    (tmp_path / "program.py").write_text(PROGRAM)
    version, file, results = call(python, "program.py", cwd=tmp_path, path=path).split(maxsplit=2)
    assert said.splitlines()[-1] == f"submitit {version} is as vjob takes it to be"
    assert version == oldest or end == "newest"
    assert file.startswith(str(tmp_path / "venv"))
    assert results.strip() == repr([(version, rank, 25) for rank in range(2)])
