"""Files of run folders that are changed, cut short or forged: no command ends with a traceback.

`python -m benchmarks.commands.mutation` calls every command after each of thousands of changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from tests import ROOT
from tests.command import PROGRAMS, Vjob, wait_for
from tests.shelf.commands.mutation import COMMANDS
from vjob.shelf.commands.cli import cli

SCRIPT = f"{PROGRAMS}/mutated_steps.py"
CLUSTER = "cluster: {scheduler: local, walltime_min: 2, grace_s: 2"
CONFS = {
    "plain": f"""
name: plain
program: {{script: {SCRIPT}, args: [""]}}
{CLUSTER}, nodes: [{{group: m, count: 1, ranks: 2}}]}}
""",
    "failed": f"""
name: failed
program: {{script: {SCRIPT}, args: ["0,1"]}}
{CLUSTER}, restarts: 1, nodes: [{{group: m, count: 2, ranks: 1}}]}}
""",
    "split": f"""
name: split
program: {{script: {SCRIPT}, args: [""]}}
{CLUSTER}, hetero: split, nodes: [{{group: a, count: 1, ranks: 1}},
  {{group: b, count: 1, ranks: 1}}]}}
""",
    "morphed": f"""
name: morphed
program: {{script: {SCRIPT}, args: ["0"]}}
{CLUSTER}, join_s: 20, nodes: [{{group: m, count: 2, ranks: 1}}]}}
morph: {{enabled: true, mode: world, min_nodes: 1, warm: false}}
""",
}
ROUNDS = 12
"""Of each kind of run, with three commands a round."""
NOT_READERS = {
    "run", "try", "submit", "plan", "profile", "init", "schema", "doctor", "completion",
    "container", "data", "there",
}  # fmt: skip
"""Commands that are given a conf, an image or data, and no run."""


def make_runs(folder: Path) -> None:
    """Real runs of each kind below `runs`, once as they ended and once as if they went on."""
    vjob = Vjob(folder)
    runs = {}
    for kind, text in CONFS.items():
        said = vjob("submit", vjob.write(text, f"{kind}.yaml"), "--json").stdout
        runs[kind] = Path(json.loads(said)["folder"])
    (folder / "runs").mkdir()
    for kind, path in runs.items():
        wait_for(partial(is_over, vjob, path), 120, lambda: "a run does not end")
        shutil.copytree(path, folder / "runs" / kind, symlinks=True)
        live = folder / "runs" / f"{kind}-going"
        shutil.copytree(path, live, symlinks=True)
        record = json.loads((live / "record.json").read_text())
        record.update(state="submitted", verdict="", message="")
        (live / "record.json").write_text(json.dumps(record))
        for pattern in ("state/outcome.json", "state/stop.json", "exit/*.json"):
            for found in live.glob(f"attempt-*/{pattern}"):
                found.unlink()
        for found in live.glob("morph/epochs/*.manager.json"):
            found.write_text(json.dumps({**json.loads(found.read_text()), "phase": "running"}))


def is_over(vjob: Vjob, path: Path) -> bool:
    vjob("status", str(path), "--json", code=None)
    return bool(json.loads((path / "record.json").read_text())["state"] == "ended")


def run_worker(folder: Path, first: int, end: int, per_round: int) -> dict[str, Any]:
    words = [folder, first, end, per_round]
    command = [sys.executable, "-m", "tests.shelf.commands.mutation", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def describe(defects: list[dict[str, Any]]) -> str:
    """One defect a place in the code."""
    places: dict[str, dict[str, Any]] = {}
    for one in defects:
        lines = [line for line in one["error"].splitlines() if line.strip()]
        where = [line.strip() for line in lines if line.strip().startswith("File ")][-1:]
        places.setdefault(f"{where}: {lines[-1][:200]}", one)
    return f"{len(defects)} defects at {len(places)} places\n" + "\n\n".join(
        f"{place}\n  {one['kind']} seed {one['seed']}: {one['command']}, {one['changed']}\n"
        f"{one['error'][-1500:]}"
        for place, one in places.items()
    )


def test_changed_files_of_a_run_are_no_traceback(tmp_path: Path) -> None:
    make_runs(tmp_path)
    found = run_worker(tmp_path, 0, ROUNDS, 3)
    assert not found["defects"], describe(found["defects"])
    assert found["rounds"] == ROUNDS * 2 * len(CONFS)


def test_every_command_that_reads_a_run_is_tried() -> None:
    assert isinstance(cli, click.Group)
    tried = {words[0] for words in COMMANDS.values()}
    known = set(cli.list_commands(click.Context(cli)))
    assert known <= tried | NOT_READERS
    assert tried <= known
