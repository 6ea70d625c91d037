"""Commands on a run folder that belongs to another user: shown, never obeyed, never changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.command import PROGRAMS, Vjob
from varuna_core.records.runfolder import RunFolder

STRANGER = 65534
CONF = """
name: quick
program: {{script: {script}, args: ["0", "exit:0"]}}
cluster: {{scheduler: local, walltime_min: 1}}
"""
COMMANDS: dict[str, tuple[list[str], str]] = {
    "status": (["status", "{run}"], ""),
    "status as JSON": (["status", "{run}", "--json"], ""),
    "logs": (["logs", "{run}"], ""),
    "report": (["report", "{run}", "--text"], ""),
    "page": (["report", "{run}", "-o", "page.html"], ""),
    "compare": (["compare", "{run}", "{run}"], ""),
    "watch": (["watch", "{run}", "--for", "0"], ""),
    "watch and act": (["watch", "{run}", "--for", "0", "--on", "FAILING=cancel"], "belongs to"),
    "stacks": (["stacks", "{run}"], "belongs to"),
    "cancel": (["cancel", "{run}", "--now"], "belongs to"),
    "grow": (["grow", "{run}", "--count", "1"], "belongs to"),
    "shrink": (["shrink", "{run}", "--count", "1"], "belongs to"),
    "tend": (["tend", "{run}"], "belongs to"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vjob, RunFolder, Path]]:
    """A run that names programs of its owner wherever a run folder names one, and still runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    vjob = Vjob(tmp_path_factory.mktemp("hostile"))
    run = vjob.submit(CONF.format(script=PROGRAMS / "fail_as_told.py"))
    vjob.wait_over(run)
    trap, sprung = run.path / "trap.sh", vjob.folder / "sprung"
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\n")
    trap.chmod(0o755)
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps({**plan, "python": str(trap)}))
    conf = yaml.safe_load(run.resolved.read_text())
    conf["notify"] = {"command": str(trap)}
    run.resolved.write_text(yaml.safe_dump(conf))
    record = json.loads(run.record.read_text())
    run.record.write_text(json.dumps({**record, "state": "submitted"}))
    for path in run.path.rglob("*"):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    os.chown(run.path, STRANGER, STRANGER)
    yield vjob, run, sprung


def read_all(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_somebody_elses_run_obeys_nothing_in_it(
    name: str, hostile: tuple[Vjob, RunFolder, Path]
) -> None:
    vjob, run, sprung = hostile
    words, refusal = COMMANDS[name]
    before = read_all(run.path)
    done = vjob(*(word.format(run=run.path) for word in words), code=None, timeout_s=60)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert not sprung.exists(), said
    assert read_all(run.path) == before, said
    if refusal:
        assert done.returncode != 0 and refusal in said, said


ASK = """
import os, sys
from pathlib import Path
from vjob.jobs.errors import InputError
from vjob.jobs.runs.find import find_run
os.setuid({user})
try:
    find_run({path!r}, Path("/"))
except InputError as error:
    print(error)
"""


def test_a_closed_run_is_one_line(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(user=STRANGER, path=str(closed))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "you may not read" in done.stdout and done.stdout.count("\n") == 1
