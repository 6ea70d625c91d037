"""apptainer for real: what only it has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.containers.real import Tools
from tests.containers.request import make_request
from tests.containers.test_behaviour import Box
from varuna_core.agent.setup.container import ENTRY_COMMAND, build_entry
from vjob.containers.apptainer import LIBRARIES, Apptainer

pytestmark = pytest.mark.apptainer


@pytest.fixture(scope="module")
def sif(tools: Tools, image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools.need("apptainer")
    if os.geteuid() != 0 and not os.access("/dev/fuse", os.W_OK):
        pytest.skip("/dev/fuse is not for ordinary users here")
    sif = tmp_path_factory.mktemp("sif") / "small.sif"
    build = ["apptainer", "--silent", "build", sif, image.parent / "root"]
    subprocess.run(build, check=True, capture_output=True)
    return sif


@pytest.mark.parametrize("writable", [True, False])
def test_a_sif_file_runs_as_it_is(
    writable: bool, tools: Tools, tmp_path: Path, sif: Path, scratch: Path
) -> None:
    box = Box("apptainer", tmp_path, str(sif), scratch, tools.path)
    rows = box.look(f"  writable: {str(writable).lower()}\n")
    assert {row["writes_root"] for row in rows} == {writable}
    assert not list(scratch.iterdir()), "nothing is unpacked"


def test_the_drivers_libraries_are_found_in_a_tree_that_is_written(
    tools: Tools, tmp_path: Path, image: Path, scratch: Path
) -> None:
    """With --writable apptainer makes no folder for them, and it sets no path in a foreign tree."""
    tools.need("apptainer")
    pretend_driver(tmp_path)
    request = make_request(image, scratch, writable=True, gpus=True)
    commands = Apptainer().plan(request)
    env = {**os.environ, **commands.env, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(commands.prepare[0], env=env, check=True)
    given = {"LD_LIBRARY_PATH": "/mine"}
    env[commands.enter_as] = build_entry(given, "/", reads_image=commands.reads_image)
    look = ("sh", "-c", f'ls {LIBRARIES}; echo "$LD_LIBRARY_PATH"')
    done = subprocess.run(
        [*commands.start, *ENTRY_COMMAND, *look],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["libcuda.so.1", f"/mine:{LIBRARIES}"], done.stderr


def pretend_driver(folder: Path) -> None:
    """An ldconfig that lists one library of a driver, which apptainer asks for them."""
    source = Path(shutil.which("true") or "/bin/true")  # any file of this machine's kind
    shutil.copy(source.resolve(), folder / "libcuda.so.1")
    script = folder / "ldconfig"
    line = f"\\tlibcuda.so.1 (libc6,x86-64) => {folder}/libcuda.so.1\\n"
    script.write_text(f"#!/bin/sh\nprintf '1 libs found in cache\\n{line}'\n")
    script.chmod(0o755)
