"""`vjob run`: programs run to their ends on this machine, and the confs that they stand for."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.conf.references import fill_references
from vjob.shelf.commands.run import explain_unknown

SHOW = """
import os, sys
print(sys.argv[1:], os.environ.get("LEAK_OF_THE_SHELL"), os.getcwd(), __file__)
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("END", "0")))
"""
WAIT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *given: sys.exit("the end"))
pathlib.Path("ready").touch()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    found = Vjob(tmp_path, {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""})
    found.write(SHOW, "show.py")
    return found


def test_a_script_runs_as_its_user_would_start_it(vjob: Vjob) -> None:
    """Its words, the shell's variables, this folder, its own file; its output as it is."""
    words = ["-n", "3", "--set", "a=b", "-m", "--", "--help", "${x} %{rank}", ""]
    done = vjob("run", "show.py", *words)
    here = vjob.folder
    assert done.stdout == f"{words} leaked {here} {here / 'show.py'}\n"
    assert "to stderr\n" in done.stderr and "Ctrl-C ends the run" in done.stderr
    run = next(path.parent for path in here.glob("log/show-*/record.json"))
    conf = read_conf(run / "conf.yaml", environ=vjob.env, require_paths=False)
    assert fill_references(conf).program.args == tuple(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "pkg.show", "-n", "-m"], "python -n -m none"),
        (["./start", "a b"], "sh a b none"),
        (["job.sh", "--", "x"], "sh -- x none"),
        (["--", "sh", "start", "${x}"], "sh ${x} none"),
        (["sh", "start"], "sh none"),
        (["-n", "1", "sh", "start"], "sh none"),
    ],
    ids=str,
)
def test_any_program_is_one_plain_process(vjob: Vjob, words: list[str], said: str) -> None:
    (vjob.folder / "pkg").mkdir()
    vjob.write(
        "import os, sys; print('python', *sys.argv[1:], os.environ.get('RANK', 'none'))",
        "pkg/show.py",
    )
    for name in ("start", "job.sh"):
        vjob.write('#!/bin/sh\necho sh "$@" ${RANK-none}\n', name)
    (vjob.folder / "start").chmod(0o755)
    assert vjob("run", *words).stdout == f"{said}\n"


def test_the_exit_code_is_the_programs(vjob: Vjob) -> None:
    vjob.env["END"] = "41"
    assert "exited 41" in vjob("run", "show.py", code=41).stderr


def test_ranks_are_labelled(vjob: Vjob) -> None:
    vjob.write("import os; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])", "r.py")
    lines = vjob("run", "-n", "2", "r.py").stdout.splitlines()
    assert sorted(line.partition(" | ")[2] for line in lines) == ["0: rank 0 2", "1: rank 1 2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it(vjob: Vjob, number: signal.Signals, code: int) -> None:
    """The lines that the program writes at its end are shown."""
    vjob.write(WAIT, "wait.py")
    shown = vjob.folder / "shown"
    with shown.open("w") as out:
        started = vjob.start("run", "--json", "wait.py", stdout=out)
    wait_for((vjob.folder / "ready").exists, 60, lambda: "the program did not start")
    started.send_signal(number)
    assert started.wait(timeout=120) == code
    assert json.loads(shown.read_text().splitlines()[-1])["text"] == "the end"
    ended = vjob.status("last")
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert ended["state"] == "CANCELLED" and f"cancelled with {name}" in str(ended), ended


def test_json_is_an_object_a_line(vjob: Vjob) -> None:
    lines = vjob("run", "--json", "show.py", "x").stdout.splitlines()
    first, *others = map(json.loads, lines)
    assert first["format"] == 1 and first["jobs"] == ["L1"]
    assert {one["text"] for one in others if one["is_err"]} == {"to stderr"}


def test_a_detached_run_goes_on(vjob: Vjob) -> None:
    said = json.loads(vjob("run", "-d", "--json", "show.py").stdout)
    assert Path(said["folder"]).name.startswith("show-")


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "2"],
        ["-N", "2", "-p", "gpu", "--gres=gpu:a100:4", "-t", "1-0", "-C", "ib", "-J", "mine"],
        ["--set", "env.X='1:30'", "--set", "cluster.grace_s=5"],
    ],
    ids=" ".join,
)
def test_the_printed_conf_is_that_of_the_run(vjob: Vjob, options: list[str]) -> None:
    words = ["show.py", "--lr", "1e-5", "12:30", "a b", "${x}"]
    text = vjob("run", *options, "--print-conf", *words).stdout
    vjob.write(text, "printed.yaml")
    shown = json.loads(vjob("run", *options, "--dry-run", "--json", *words).stdout)
    again = json.loads(vjob("submit", "printed.yaml", "--dry-run", "--json").stdout)
    for found in (shown, again):
        run = found.pop("run")
        assert run.startswith(("show-", "mine-"))
        found["text"] = json.dumps([found.pop("files"), found.pop("plan")]).replace(run, "RUN")
        found.pop("folder")
    assert shown == again


def test_a_conf_and_a_script_are_told_apart(vjob: Vjob) -> None:
    vjob.write("echo hi", "job.sh")
    for name in ("show.py", "job.sh"):
        assert f"`vjob run {name}` runs it" in vjob("submit", name, code=2).stderr
    vjob.write("name: a\nprogram: {script: show.py}\n")
    assert "vjob submit conf.yaml" in vjob("run", "conf.yaml", code=2).stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lr", "--set cluster.sbatch.lr=VALUE"),
        ("--output", "sbatch's --output: use `log_folder`"),
    ],
)
def test_an_unknown_option_may_be_the_programs_or_sbatchs(option: str, said: str) -> None:
    text = explain_unknown(option)
    assert said in text and "the program's own options follow its name" in text
