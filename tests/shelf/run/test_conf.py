"""The conf of a command line: its program, its Python, its environment, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vjob.jobs.conf.loading.load import parse_conf
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.errors import ConfError, InputError
from vjob.shelf.run.conf import (
    build_conf,
    choose_scheduler,
    find_python,
    list_notes,
    list_passed,
    set_keys,
)
from vjob.shelf.run.program import name_program, read_program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "job.sh", "train.yaml", "data.bin"):
        (tmp_path / name).write_text("x")
    for name, text in {"start": "#!/bin/sh\n", "binary": "\x7fELF", "tool": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pkg").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "program", "name"),
    [
        (["train.py"], {"script": "train.py"}, "train"),
        (
            ["train.py", "-n", "4", "--", "${x}", ""],
            {"script": "train.py", "args": ["-n", "4", "--", "$${x}", ""]},
            "train",
        ),
        (["./start", "x"], {"script": "./start", "args": ["x"]}, "start"),
        (["binary", "x"], {"command": ["./binary", "x"]}, "binary"),
        (["job.sh", "x"], {"command": ["bash", "job.sh", "x"]}, "job"),
        (["sh", "-c", "echo ${x}"], {"command": ["sh", "-c", "echo $${x}"]}, "sh"),
        (["-m", "pkg.train", "-n"], {"module": "pkg.train", "args": ["-n"]}, "pkg-train"),
        (["--", "no-such", "a.py"], {"command": ["no-such", "a.py"]}, "a"),
        (["--", "train.py", "--"], {"script": "train.py", "args": ["--"]}, "train"),
        (["--", "job.sh"], {"command": ["job.sh"]}, "job"),
    ],
    ids=str,
)
def test_words_name_a_program(
    folder: Path, words: list[str], program: dict[str, Any], name: str
) -> None:
    found = _read(folder, words)
    assert found == program
    assert name_program(found) == name


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nope.py", "no such file here, and no command of that name on PATH"),
        ("train.yaml", "is a conf, not a program: vjob submit train.yaml"),
        ("pkg", "is a folder: give a script in it, or a package with -m"),
        ("data.bin", "neither a Python script (.py) nor executable"),
        ("", "no program is given: vjob run train.py"),
    ],
)
def test_other_words_are_refused_with_what_to_do(folder: Path, word: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        _read(folder, [word])
    assert said in str(refused.value)


def _read(folder: Path, words: list[str]) -> dict[str, Any]:
    is_module, is_command = words[0] == "-m", words[0] == "--"
    return read_program(
        words[is_module or is_command :],
        is_module=is_module,
        is_command=is_command,
        base=folder,
        path="/usr/bin:/bin",
    )


def test_the_environment_is_the_shells_without_its_session(tmp_path: Path) -> None:
    session = {
        "PWD": "/",
        "SHLVL": "1",
        "_": "x",
        "SSH_AUTH_SOCK": "x",
        "TERM": "xterm",
        "PS1": "$",
    }
    others = {"RANK": "0", "SLURM_JOB_ID": "1", "PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
    others |= {"VJOB_HOST": "x", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "() {", "PATH": "x"}
    mine = {"HF_HOME": "x", "WANDB_API_KEY": "x", "PYTHONPATH": "x", "OMP_NUM_THREADS": "4"}
    assert list_passed({**session, **others, **mine}) == sorted(mine)


def test_the_python_is_that_of_the_active_environment(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").touch(mode=0o755)
    theirs_python = str(theirs / "bin/python")
    assert find_python({}, str(ours)) is None
    assert find_python({"VIRTUAL_ENV": str(ours)}, str(ours)) is None
    assert find_python({"VIRTUAL_ENV": str(theirs)}, str(ours)) == theirs_python
    assert find_python({"CONDA_PREFIX": str(theirs)}, str(ours)) == theirs_python
    assert find_python({"VIRTUAL_ENV": str(tmp_path)}, str(ours)) is None


@pytest.mark.parametrize(
    "program", [{"script": "train.py"}, {"module": "train"}, {"command": ["bash", "train.sh"]}]
)
@pytest.mark.parametrize(
    ("given", "scheduler", "snapshot"),
    [({"ntasks": "2"}, "local", "none"), ({"time": "2h"}, "slurm", "auto")],
)
def test_a_run_here_takes_the_files_as_they_are(
    given: dict[str, str], scheduler: str, snapshot: str, program: dict[str, Any], folder: Path
) -> None:
    made = build_conf(program, given, environ={}, prefix="/")
    conf = parse_conf(dump_yaml(made), "x", folder)
    assert (conf.cluster.scheduler, conf.program.snapshot) == (scheduler, snapshot)
    assert conf.name == "train"


@pytest.mark.parametrize(
    ("given", "has_slurm", "num_gpus", "said"),
    [
        ({}, False, 0, []),
        ({}, False, 1, []),
        ({}, True, 0, ["runs on this machine; an option such as -p QUEUE submits it to Slurm"]),
        ({}, False, 4, ["one process sees all 4 GPUs; --gpus 4 starts a rank for each"]),
        ({"gpus": "4"}, False, 4, []),
        ({"ntasks": "2"}, False, 4, []),
        ({"partition": "gpu"}, True, 4, []),
    ],
    ids=str,
)
def test_a_choice_that_may_surprise_is_said(
    given: dict[str, str], has_slurm: bool, num_gpus: int, said: list[str], folder: Path
) -> None:
    made = build_conf({"script": "train.py"}, given, environ={}, prefix="/")
    conf = parse_conf(dump_yaml(made), "x", folder)
    notes = list_notes(conf, given, has_slurm=has_slurm, num_gpus=num_gpus)
    assert list(notes) == said


@pytest.mark.parametrize(
    ("given", "inside", "new_job", "scheduler"),
    [
        ({}, "", False, "local"),
        ({}, "", True, "slurm"),
        ({"nodes": "2"}, "", False, "slurm"),
        ({}, "allocation", False, "allocation"),
        ({"nodes": "2"}, "allocation", False, "allocation"),
        ({}, "allocation", True, "slurm"),
    ],
    ids=str,
)
def test_the_place_is_the_job_around_then_what_options_ask_for(
    given: dict[str, str], inside: str, new_job: bool, scheduler: str
) -> None:
    assert choose_scheduler(given, inside=inside, new_job=new_job) == scheduler


def test_keys_that_are_set_keep_their_text() -> None:
    text = dump_yaml({"name": "a", "program": {"script": "a.py", "args": ["1e-5", "on", "12:30"]}})
    overrides = ["train.steps=3", "cluster.walltime_min=1:30:00", "program.args[0]='2'", "name=b"]
    written = set_keys(text, overrides)
    assert parse_conf(written, "x", Path("/")) == parse_conf(text, "x", Path("/"), overrides)
    with pytest.raises(ConfError, match=r"program\.args has 3 entries"):
        set_keys(text, ["program.args[7]=x"])
