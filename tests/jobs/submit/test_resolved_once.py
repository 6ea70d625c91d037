"""A submit reads its conf once and plans once: what is stored is what was parsed and what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests import ROOT
from tests.jobs.planning.test_plan_command import CONF, put_profile
from tests.jobs.submit.test_submit import FakeSlurm
from varuna_core.planner.result import refusal
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading import load
from vjob.jobs.submit import submit as submitting
from vjob.shelf.commands.cli import cli

NOW = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
OPEN = ("--set", "parallel.pipeline=auto")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    slurm = FakeSlurm(tmp_path / "tools")
    monkeypatch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(submitting.time, "localtime", lambda: NOW)
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    put_profile(tmp_path)
    return path


def invoke(*words: str) -> Result:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.output
    return done


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Sequence[Any]]:
    """The arguments of each call, which goes on as before."""
    calls: list[Sequence[Any]] = []
    whole = getattr(owner, name)

    def note(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return whole(*args, **more)

    monkeypatch.setattr(owner, name, note)
    return calls


@pytest.mark.parametrize("command", ["submit", "profile"])
@pytest.mark.parametrize("more", [(), OPEN])
def test_the_conf_is_read_and_parsed_once(
    conf: Path, command: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = count(monkeypatch, Path, "open")
    opens_as_bytes = count(monkeypatch, Path, "read_bytes")
    parses = count(monkeypatch, load, "parse_tree")
    invoke(command, str(conf), *more)
    reads = [args for args in (*opens, *opens_as_bytes) if args[0].resolve() == conf]
    assert [source for _, source in parses].count(str(conf)) == 1
    assert len(reads) <= 2, "read_bytes may open by itself"


def test_what_is_stored_is_what_was_parsed(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone saves the conf again while it is submitted."""
    whole = submitting.build_plan

    def build_plan(*args: Any) -> Any:
        conf.write_text(CONF.replace("steps: 1000", "steps: 2"))
        return whole(*args)

    monkeypatch.setattr(submitting, "build_plan", build_plan)
    invoke("submit", str(conf))
    run = RunFolder(conf.parent / "log/tiny-20260102-030405")
    assert "steps: 1000" in run.conf.read_text() and "steps: 1000" in run.resolved.read_text()


def test_a_name_that_is_taken_is_no_reason_to_plan_again(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = count(monkeypatch, refusal, "search_or_explain")
    (conf.parent / "log/tiny-20260102-030405").mkdir(parents=True)
    invoke("submit", str(conf), *OPEN)
    assert len(searches) == 1
    (record,) = conf.parent.glob("log/*-*/record.json")
    run = RunFolder(record.parent)
    plan = read_plan(run.plan)
    assert run.name.startswith("tiny-20260102-030405") and plan is not None
    assert plan.run == run.name != "tiny-20260102-030405"
    for text in (run.batch_script(None).read_text(), run.node_script.read_text()):
        assert f"/{run.name}" in text and "030405\n" not in text.replace(run.name, "")


COUNT = """
import json, sys
read = []
def note(event, args):
    if event == "open" and str(args[0]).endswith("/plan.json") and args[1] in (None, "r"):
        read.append(str(args[0]))
sys.addaudithook(note)
from vjob.shelf.commands.cli import cli
try:
    cli.main(sys.argv[1:], prog_name="vjob")
except SystemExit as error:
    assert not error.code, error.code
print(json.dumps(len(read)), file=sys.stderr)
"""


@pytest.mark.parametrize(("words", "most"), [([], 0), (["--follow"], 3)])
def test_a_submit_does_not_read_the_plan_that_it_wrote(
    words: list[str], most: int, tmp_path: Path
) -> None:
    """Followed, it reads it for the number of ranks, for the end, and for what ended it."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(2)\nprint('done')\n")
    (tmp_path / "conf.yaml").write_text(
        "name: once\nprogram: {script: train.py}\n"
        "cluster: {scheduler: local, walltime_min: 2, nodes: [{group: all, count: 1, ranks: 1}]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", COUNT, "submit", "conf.yaml", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stderr.splitlines()[-1]) <= most
