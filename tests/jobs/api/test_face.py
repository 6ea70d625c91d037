"""`import vjob`: what it loads, confs of every kind, and the examples of its docstrings."""

from __future__ import annotations

import doctest
import enum
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from submitit.core.core import PicklingExecutor

import vjob
from tests import ROOT
from tests.jobs.submit.test_submit import FakeSlurm
from vjob.jobs.api.confs import read_source, simplify, spell_override
from vjob.jobs.api.watcher import VjobInfoWatcher
from vjob.jobs.runs import find as runs
from vjob.shelf.commands.cli import cli

CONF = """\
name: conf
program: {script: train.py}
cluster:
  scheduler: local
  nodes: [{group: all, count: 2}]
"""
GPT = """\
name: gpt
program: pretrain_gpt
model: gpt2-small
data: {synthetic: true}
train: {global_batch_size: 64, micro_batch_size: auto}
parallel: {pipeline: auto}
cluster:
  nodes: [{group: all, count: 2, gpus: "a100:4"}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "gpt.yaml").write_text(GPT)
    (tmp_path / "train.py").write_text("print('step 1/1 loss 2.0')\n")
    return tmp_path


def test_importing_vjob_loads_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import vjob; dir(vjob); "
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(tops - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['vjob']"


def test_every_public_name_is_there_and_none_is_a_part() -> None:
    for name in vjob.__all__:
        assert getattr(vjob, name).__doc__, name
    assert not {"shelf", "jobs", "templates", "reports", "containers"} & set(vjob.__all__)
    with pytest.raises(AttributeError, match="no attribute 'submitt'"):
        vjob.submitt  # noqa: B018


def test_the_examples_of_the_docstrings_are_true(folder: Path) -> None:
    """In this order, for they speak of each other's runs."""
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    for name in ("load", "plan", "submit", "job", "runs", "compare"):
        (example,) = finder.find(getattr(vjob, name), name, globs={"vjob": vjob})
        assert example.examples, name
        assert runner.run(example).failed == 0, name


def test_a_conf_is_a_path_a_dict_or_typed(folder: Path) -> None:
    by_path = vjob.load("conf.yaml")
    assert vjob.load(folder / "conf.yaml") == by_path
    as_dict: dict[str, Any] = {
        "name": "conf",
        "program": {"script": Path("train.py")},
        "cluster": {"scheduler": "local", "nodes": ({"group": "all", "count": 2},)},
    }
    assert vjob.load(as_dict) == by_path and vjob.load(by_path) == by_path
    changed = vjob.load(by_path, set={"train.seed": 5, "setup": ["a: b", "echo 'x'"]})
    assert changed.train.seed == 5 and changed.setup == ("a: b", "echo 'x'")


def test_all_problems_of_a_dict_are_told_at_once(folder: Path) -> None:
    with pytest.raises(vjob.ConfError) as error:
        vjob.load({"name": "x", "program": {"scrip": "t.py"}, "cluster": {"nodes": [{"cout": 1}]}})
    assert "scrip" in str(error.value) and "cout" in str(error.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (100, "k=100"),
        (1e-5, "k=1.0e-05"),
        (True, "k=true"),
        (None, "k=null"),
        ("a: b", "k='a: b'"),
        ("007", "k='007'"),
        ([1, "x"], "k=[1, x]"),
        ({"a": {"b": 1}}, "k={a: {b: 1}}"),
        (Path("a/b"), "k=a/b"),
    ],
)
def test_values_of_python_are_spelled_as_an_override(value: object, text: str) -> None:
    assert spell_override("k", value) == text


def test_numbers_of_numpy_and_enums_are_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")

    class Kind(str, enum.Enum):
        LINEAR = "linear"

    found = simplify({"a": numpy.float32(0.5), "b": numpy.int64(3), "c": Kind.LINEAR})
    assert found == {"a": 0.5, "b": 3, "c": "linear"}
    assert [type(value) for value in found.values()] == [float, int, str]
    with pytest.raises(vjob.InputError, match="cannot stand in a conf"):
        simplify({"a": object()})


def test_env_goes_to_the_ranks_and_a_bad_name_is_refused() -> None:
    source = read_source({"name": "x"}, env={"TOKEN": "a=b: c", "N": 3})  # type: ignore[dict-item]
    assert source.overrides == ("env.TOKEN='a=b: c'", "env.N='3'")
    with pytest.raises(vjob.InputError, match="cannot be the name of a variable"):
        read_source({"name": "x"}, env={"A B": "x"})


def test_the_command_line_submits_through_submitits_own_submission(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(folder / "tools")
    monkeypatch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
    called: list[list[str]] = []
    whole = PicklingExecutor._submit_command

    def note(self: PicklingExecutor, command: str) -> Any:
        called.append([type(self).__name__, Path(command).name])
        return whole(self, command)

    monkeypatch.setattr(PicklingExecutor, "_submit_command", note)
    groups = "[{group: a, queue: gpu1}, {group: b, queue: gpu2}]"
    more = ["--set", f"cluster.nodes={groups}", "--set", "cluster.scheduler=slurm"]
    for hetero in ("hetjob", "split"):
        done = CliRunner().invoke(
            cli, ["submit", "conf.yaml", *more, "--set", f"cluster.hetero={hetero}"]
        )
        assert done.exit_code == 0, done.output
    assert called == [["VjobExecutor", name] for name in ("batch.sh", "batch.a.sh", "batch.b.sh")]
    left = [path.name for path in folder.glob("log/*/*submission*")]
    assert not left, "the run folder's own batch.sh is what was submitted"


USE = """
import vjob

job = vjob.submit({"name": "x"}, set={"train.steps": 3}, after=["a", vjob.job("b")])
reveal_type(vjob.load("x").train.steps)
reveal_type(job.results())
reveal_type(job.status().verdict.reason)
reveal_type(job.task(1))
vjob.submitt
"""


def test_a_type_checker_knows_it_all_and_finds_a_typo(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    words = ["mypy", "--strict", "--no-error-summary", f"--cache-dir={tmp_path}", "use.py"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    found = [text for where, _, text in lines if where.startswith("use.py:")]
    assert found == [
        'note: Revealed type is "int"',
        'note: Revealed type is "list[None]"',
        'note: Revealed type is "str"',
        'note: Revealed type is "vjob.jobs.api.job.VjobJob[None]"',
        'error: Module has no attribute "submitt"; maybe "submit"?  [attr-defined]',
    ], done.stdout + done.stderr


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


def test_a_hundred_runs_are_looked_at_together_and_not_too_often(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval begins at 2 s and grows; a run that ended is asked for no more."""
    jobs = [vjob.submit("conf.yaml", name=f"n{number}") for number in range(2)]
    for job in jobs:
        job.wait()
    looks: list[int] = []

    def look(asked: list[Any]) -> list[Any]:
        looks.append(len(asked))
        return []

    clock, watcher = Clock(), VjobInfoWatcher()
    monkeypatch.setattr("vjob.jobs.api.watcher.view_runs", look)
    monkeypatch.setattr("vjob.jobs.api.watcher.time", clock)
    monkeypatch.setattr("submitit.core.core._time", clock)
    for number in range(100):
        watcher.register_run(str(number), jobs[0].run)
    for _ in range(600):
        clock.now += 0.1
        assert not any(watcher.is_done(str(number)) for number in range(100))
    assert looks == [100] * len(looks) and len(looks) <= 7, "2, 2, 3, 4.5, 7, 10, 15 s apart"
    watcher.get_info("1", mode="force")
    assert len(looks) <= 8
    assert runs.view_runs([jobs[0].run])


def test_one_rank_of_a_job_is_known_in_another_process(folder: Path) -> None:
    job = vjob.submit("conf.yaml")
    code = (
        "import pickle, sys; job = pickle.loads(sys.stdin.buffer.read()); job.wait(); "
        "print(job.state, job.results())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, input=pickle.dumps(job.task(1)),
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout == b"COMPLETED [None]\n", done.stderr.decode()
