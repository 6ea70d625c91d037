"""Commands on a run folder that belongs to another user: shown, never obeyed, never changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests import ROOT
from tests.command import PROGRAMS, Vjob
from tests.documents import get_commands
from tests.second_user import STRANGER, Colleague, make_colleague, open_folder
from varuna_core.records.runfolder import RunFolder
from vjob.shelf.commands.cli import cli

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
    "shell": (["shell", "{run}", "--", "true"], "belongs to"),
    "cancel": (["cancel", "{run}", "--now"], "belongs to"),
    "grow": (["grow", "{run}", "--count", "1"], "belongs to"),
    "shrink": (["shrink", "{run}", "--count", "1"], "belongs to"),
    "tend": (["tend", "{run}"], "belongs to"),
    "guard": (["guard", "{run}", "pause"], "belongs to"),
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


NAMES_RUN = {
    "status": [["{run}"], ["{run}", "--json"]],
    "logs": [["{run}"], ["{run}", "--errors"], ["{run}", "--rank", "0"]],
    "report": [["{run}", "--text"], ["{run}", "-o", "{out}/page.html"]],
    "compare": [["{run}", "{run}"]],
    "watch": [["{run}", "--for", "0"], ["{run}", "--for", "0", "--on", "FAILING=cancel"]],
    "stacks": [["{run}", "--wait", "1"]],
    "shell": [["{run}", "--", "true"]],
    "cancel": [["{run}", "--now"]],
    "grow": [["{run}", "--count", "1"]],
    "shrink": [["{run}", "--count", "1"]],
    "tend": [["{run}"]],
    "guard": [["{run}", "pause"]],
    "share": [["{run}", "--group", "users"], ["{run}", "--private"]],
    "submit": [["--like", "{run}", "--dry-run"], ["{conf}", "--after", "{run}", "--dry-run"]],
    "prune": [["{log}", "--days", "0", "--delete"]],
}
"""What is typed of each command that takes a run or a folder of runs."""
NAMES_NONE = {
    "list", "init", "schema", "doctor", "completion", "run", "try", "plan", "profile",
    "data prepare",
    "container import", "container list",
    "container clean", "there",
}  # fmt: skip
"""The others: what they read is what their user names, and no run."""


def test_each_command_is_tried_here_or_takes_no_run() -> None:
    assert set(list_commands(cli)) == {*NAMES_RUN, *NAMES_NONE}


def list_commands(group: click.Group, before: str = "") -> Iterator[str]:
    for name, command in get_commands(group).items():
        if isinstance(command, click.Group):
            yield from list_commands(command, f"{before}{name} ")
        else:
            yield before + name


def run_all(run: Path, colleague: Colleague | None = None) -> list[dict[str, Any]]:
    """What each command says of this run, one after the other in one process."""
    with open_folder() as out:
        out.chmod(0o777)
        conf = out / "conf.yaml"
        conf.write_text(CONF.format(script=PROGRAMS / "fail_as_told.py"))
        places = {"run": run, "log": run.parent, "out": out, "conf": conf}
        words = [
            [name, *(word.format(**places) for word in words)]
            for name, many in NAMES_RUN.items()
            for words in many
        ]
        command = [sys.executable, str(PROGRAMS / "many_commands.py"), "60"]
        done = subprocess.run(
            command if colleague is None else colleague.build_command(*command),
            cwd=out,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XDG_STATE_HOME": str(out),
                "HOME": str(out),
            },
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        pages = [path.read_text(errors="replace") for path in out.glob("*.html")]
        return [
            *found,
            *({"words": ["page"], "code": 0, "text": page, "error": ""} for page in pages),
        ]


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\nnew\rline"
KEPT = {"state", "scheduler", "format", "layout", "order", "jobs", "id", "group"}
VICTIM = "only-the-victim-knows-this"


def add_escapes(value: Any, key: str = "") -> Any:
    """Every text of a file with what would move a terminal's cursor and set its title."""
    if isinstance(value, dict):
        return {name: add_escapes(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [add_escapes(item, key) for item in value]
    return value + ESCAPES if isinstance(value, str) and key not in KEPT else value


def write_escapes(path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(add_escapes(json.loads(path.read_text()))))
    elif path.suffix == ".jsonl":
        lines = map(json.loads, path.read_text().splitlines())
        path.write_text("".join(json.dumps(add_escapes(line)) + "\n" for line in lines))
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(add_escapes(yaml.safe_load(path.read_text()))))
    else:
        path.write_bytes(path.read_bytes() + ESCAPES.encode())
        path.rename(path.with_name(f"n{ESCAPES}{path.suffix}"))


def make_hostile(kind: str, path: Path, victim: Path) -> None:
    """One file of the run, as its owner may leave it."""
    if kind == "escapes":
        write_escapes(path)
    elif kind == "huge" and path.suffix in (".json", ".yaml", ".sh"):
        os.truncate(path, 1 << 40)
    elif kind in ("pipes", "links", "devices"):
        path.unlink()
        if kind == "pipes":
            os.mkfifo(path)
        else:
            path.symlink_to(victim if kind == "links" else "/dev/zero")


@pytest.mark.parametrize("kind", ["escapes", "pipes", "links", "devices", "huge", "folders"])
def test_no_command_trips_over_a_hostile_run(
    kind: str, hostile: tuple[Vjob, RunFolder, Path]
) -> None:
    """What its owner put there moves no cursor, is not followed, and costs no time or memory."""
    with open_folder() as folder:
        run, victim = folder / "log" / "hostile-1", folder / "victim" / "secret.out"
        shutil.copytree(hostile[1].path, run, symlinks=True)
        victim.parent.mkdir()
        victim.write_text(VICTIM + "\n")
        for path in [path for path in run.rglob("*") if path.is_file()]:
            if path != run / "record.json" or kind == "escapes":
                make_hostile(kind, path, victim)
        if kind == "folders":
            for name in ("attempt-0/ranks", "attempt-0/trace"):
                shutil.rmtree(run / name)
                (run / name).symlink_to(victim.parent)
            (run / "attempt-1").symlink_to(victim.parent)
        for path in [run, *run.rglob("*")]:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        said = run_all(run)
    errors = {" ".join(one["words"]): one["error"] for one in said if one["error"]}
    assert not errors, "\n".join(errors.values())
    unclean = [
        (one["words"], ascii(letter))
        for one in said
        for letter in set(one["text"])
        if not letter.isprintable() and letter not in "\n\t" and one["words"] != ["page"]
    ]
    assert not unclean
    assert not [one["words"] for one in said if VICTIM in one["text"]]
    assert not hostile[2].exists()


def test_of_a_run_that_is_not_shared_each_command_says_whom_to_ask() -> None:
    with make_colleague() as colleague, open_folder() as folder:
        run = folder / "log" / "closed-1"
        run.mkdir(mode=0o700, parents=True)
        (run / "record.json").write_text("{}")
        run.parent.chmod(0o711)
        for said in run_all(run, colleague):
            assert not said["error"], said["error"]
            if said["words"][0] != "prune":  # nobody may list the log folder
                ask = f"ask root to run: vjob share {run} --group"
                assert ask in said["text"] and said["text"].count("\n") == 1, said
            assert said["code"] == 2, said


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
