"""A rank as submitit sees it, by variables and files."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import DelayedSubmission

from tests.pythons import list_pythons
from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.agent.bundle import write_function
from varuna_core.functions.environment import Signals, VjobJobEnvironment, VjobPaths
from varuna_core.functions.runner import main
from varuna_core.records.files import write_json
from varuna_core.records.nodes import NodeReport, write_report
from varuna_core.records.plan import write_plan
from varuna_core.records.requests import read_stop, write_stop
from varuna_core.records.runfolder import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with the variables of its rank 0."""
    run = RunFolder(tmp_path)
    run.attempt(0).make()
    run.submitted_pickle.parent.mkdir()
    write_json(run.attempt(0).master, {"time": 1.0})
    write_plan(run.plan, make_plan(make_group("a", 2, 2), scheduler="slurm"))
    facts = {"VJOB_RUN": run.path, "VJOB_ATTEMPT": 0, "VJOB_JOB_ID": "4711", "RANK": 0}
    for name, value in facts.items():
        monkeypatch.setenv(name, str(value))
    for name in ("SUBMITIT_EXECUTOR", "VJOB_REQUEUE"):
        monkeypatch.delenv(name, raising=False)
    return run


@pytest.mark.parametrize(("executor", "is_ours"), [("", True), ("vjob", True), ("slurm", False)])
def test_a_rank_of_ours_is_known_by_its_variables(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, executor: str, is_ours: bool
) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
    assert VjobJobEnvironment().activated() is is_ours
    monkeypatch.delenv("VJOB_RUN")
    assert not VjobJobEnvironment().activated()


@pytest.mark.parametrize(
    ("told", "array", "task"), [("4711", None, None), ("4711_3", "4711", "3"), ("L4", None, None)]
)
def test_a_task_of_an_array_knows_both_numbers(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, told: str, array: str | None, task: str | None
) -> None:
    monkeypatch.setenv("VJOB_JOB_ID", told)
    env = VjobJobEnvironment()
    assert (env.job_id, env.array_job_id, env.array_task_id) == (told, array, task)


def test_hosts_come_in_the_order_of_nodes(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    for index, host in ((1, "a1"), (0, "no-such-host.invalid")):
        report = NodeReport(index, host, "a", "10.0.0.1", None, None, None, 1.0, True, (), ())
        write_report(run.attempt(0), report)
    assert VjobJobEnvironment().hostnames == ["10.0.0.1", "a1"]  # where the ranks meet


def test_paths_are_those_of_the_run(run: RunFolder) -> None:
    paths = VjobPaths(run.path, "4711", 3)
    assert paths.folder == run.path and paths.submission_file == run.path / "batch.sh"
    assert paths.result_pickle == run.path / "function/3.result.pkl"
    run.attempt(1).make()
    assert paths.stderr == run.path / "attempt-1/ranks/3.err"
    assert VjobJobEnvironment().paths.submitted_pickle == run.submitted_pickle


class Saving:
    """Has a state to save."""

    def __init__(self, state: int = 0, *, again: bool = True) -> None:
        self.state, self.again = state, again

    def __call__(self) -> int:
        return self.state

    def checkpoint(self) -> DelayedSubmission | None:
        return DelayedSubmission(Saving(self.state + 1)) if self.again else None


def listen(
    function: Saving, timeout_min: int = 600, num_timeouts: int = 2
) -> tuple[Signals, DelayedSubmission]:
    env = VjobJobEnvironment()
    delayed = DelayedSubmission(function)
    delayed.set_timeout(timeout_min, num_timeouts)
    return Signals(env, env.paths, delayed), delayed


def test_a_preemption_does_not_count_and_a_timeout_does(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VJOB_REQUEUE", "1")
    for timeout_min, left in ((600, 2), (1, 1)):
        run.attempt(0).stop.unlink(missing_ok=True)
        signals, _ = listen(Saving(), timeout_min)
        with pytest.raises(SystemExit):
            signals.checkpoint_and_try_requeue(signal.SIGUSR1)
        saved = DelayedSubmission.load(run.submitted_pickle)
        assert (saved.function.state, saved._timeout_countdown) == (1, left)
        stop = read_stop(run.attempt(0))
        assert stop is not None and (stop["kind"], stop["code"]) == ("requeue", 0)
        assert signals.exit_code == 0


def test_a_checkpoint_that_returns_nothing_ends_the_job(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VJOB_REQUEUE", "1")
    signals, _ = listen(Saving(again=False))
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="returned None"):
        signals.checkpoint_and_try_requeue(signal.SIGUSR2)
    assert read_stop(run.attempt(0)) is None and signals.exit_code is None


@pytest.mark.parametrize(("kind", "saves"), [("signal", True), ("rank", False), (None, True)])
def test_a_rank_that_is_ended_saves_unless_another_failed(
    run: RunFolder, kind: str | None, saves: bool
) -> None:
    if kind is not None:
        write_stop(run.attempt(0), kind, 1, "why")
    signals, _ = listen(Saving())
    with pytest.raises(SystemExit) as caught:
        signals.save_and_end(signal.SIGTERM)
    assert caught.value.code == 143 and run.submitted_pickle.exists() is saves
    signals.save_and_end(signal.SIGTERM)  # the second one finds it on its way


def test_what_a_killed_rank_left_half_written_is_in_nobodys_way(run: RunFolder) -> None:
    (run.submitted_pickle.parent / ".submitted.pkl.part").write_bytes(b"half")
    signals, _ = listen(Saving())
    with pytest.raises(SystemExit):
        signals.save_and_end(signal.SIGTERM)
    assert DelayedSubmission.load(run.submitted_pickle).function.state == 1


def test_a_rank_without_its_pickle_says_that_the_folder_is_not_seen(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("varuna_core.functions.runner.LANDING_S", 0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([str(run.path)]) == 1
    assert "log_folder must be a folder that every node sees" in capsys.readouterr().err


@pytest.mark.parametrize("version", sorted(list_pythons()))
def test_every_python_says_what_a_rank_lacks(run: RunFolder, version: tuple[int, int]) -> None:
    """A node's own python3 may be old, and have nothing installed (-S: not even what it has)."""
    write_function(run.function)
    argv = [list_pythons()[version], "-S", "-u", str(run.function), str(run.path)]
    env = {"VJOB_RUN": str(run.path), "VJOB_ATTEMPT": "0", "RANK": "0", "VJOB_NODE": "n0"}
    done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("ModuleNotFoundError: No module named 'submitit'; a function ")
    assert pickle.loads(run.result_pickle(0).read_bytes()) == ("error", done.stderr)


def test_submitit_finds_our_environment_in_the_archive_alone(tmp_path: Path) -> None:
    """In a container there is no vjob but the archive; its metadata is on sys.path with it."""
    archive = tmp_path / "function.pyz"
    write_function(archive)
    code = (
        "import sys, json, importlib.metadata as m\n"
        f"sys.path.insert(0, {str(archive)!r})\n"
        "found = [e for d in m.distributions(path=sys.path[:1]) for e in d.entry_points]\n"
        "print(json.dumps([(e.group, e.name, e.value, e.load().__name__) for e in found]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=True
    )
    value = "varuna_core.functions.environment:VjobJobEnvironment"
    assert json.loads(done.stdout) == [["submitit", "job_environment", value, "VjobJobEnvironment"]]
    names = zipfile.ZipFile(archive).namelist()
    assert "varuna_core/schedule/registry.py" in names
