"""What a user does wrong, and what a cluster lacks: each an error that says what to do, and no job
that nobody knows of."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

import vjob
from tests.command import HOST, wait_for
from tests.jobs.api import functions
from tests.jobs.submit.test_submit import FakeSlurm
from tests.pythons import list_pythons
from vjob.jobs.api import job as jobs
from vjob.jobs.api.executor import VjobExecutor

LOCAL = {"cluster.scheduler": "local"}
LOCK = threading.Lock()


def use_lock() -> bool:
    return LOCK.locked()


def list_runs(here: Path) -> list[str]:
    log = here / "log"
    return sorted(path.name for path in log.iterdir()) if log.exists() else []


def refuse(here: Path, kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """The words of a submit that is refused, and leaves nothing."""
    with pytest.raises(kind) as caught:
        call(*args)
    assert list_runs(here) == []
    return str(caught.value)


# A function that cannot go.


def test_a_function_that_cannot_be_pickled_is_named(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    use_lock.__module__ = "__main__"  # pickled by value, as in a script
    try:
        said = refuse(here, vjob.InputError, executor.submit, use_lock)
    finally:
        use_lock.__module__ = __name__
    assert said.startswith(
        "use_lock cannot be pickled with its arguments: TypeError: cannot pickle"
    )
    assert "open files, locks and sockets inside the function" in said
    assert said.endswith("Nothing was submitted")


def test_arguments_that_cannot_be_pickled_take_back_the_whole_array(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    said = refuse(here, vjob.InputError, executor.map_array, functions.multiply, [1, LOCK], [1, 2])
    assert said.startswith("multiply cannot be pickled")


def test_a_pickle_that_is_too_large_says_what_to_do(here: Path) -> None:
    executor = submitit.AutoExecutor(here / "log", cluster="vjob", vjob_max_pickle_size_gb=1e-5)
    executor.update_parameters(vjob_set=LOCAL)
    said = refuse(here, RuntimeError, executor.submit, len, b"a" * 20_000)
    assert "len and its arguments take 1.88e-05 GB as a pickle" in said
    assert "write large data to a file, or raise it" in said and "vjob_max_pickle_size_gb" in said


def test_what_cannot_be_called_is_no_function(executor: submitit.AutoExecutor, here: Path) -> None:
    """As in submit(train(lr=1)), which submits what train returned."""
    said = refuse(here, vjob.InputError, executor.submit, functions.multiply(3))
    assert said.startswith("6 cannot be called: submit the function itself and its arguments")


# A conf that is wrong.


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        (3, "3 is not a conf: give the path of a conf.yaml, a dict, or what vjob.load returned"),
        ([{}], "[{}] is not a conf: give the path"),
        ("missing.yaml", "missing.yaml: cannot be read: No such file or directory"),
        ({"name": "x", "cluster": {"walltime_min": object()}}, "cluster.walltime_min = <object"),
    ],
    ids=["number", "list", "no-file", "object"],
)
def test_what_is_no_conf_is_said_to_be_none(here: Path, conf: Any, says: str) -> None:
    assert says in refuse(here, vjob.InputError, vjob.submit, conf)


BAD: dict[str, Any] = {
    "name": "bad",
    "program": {"script": "no_train.py"},
    "cluster": {"scheduler": "local", "walltime_min": 0, "nodes": [{"group": "a", "count": 0}]},
}


@pytest.mark.parametrize("kind", ["dict", "path", "typed"])
def test_every_problem_of_a_conf_is_told_at_once(here: Path, kind: str) -> None:
    conf: Any = BAD
    if kind == "path":
        conf = here / "conf.yaml"
        conf.write_text(
            "name: bad\nprogram: {script: no_train.py}\ncluster: {scheduler: local, "
            "walltime_min: 0, nodes: [{group: a, count: 0}]}\n"
        )
    if kind == "typed":
        (here / "train.py").touch()
        good = {**BAD, "program": {"script": str(here / "train.py")}, "cluster": LOCAL_CLUSTER}
        read = vjob.load(good)
        (group,) = read.cluster.nodes
        cluster = dataclasses.replace(
            read.cluster, walltime_min=0, nodes=(dataclasses.replace(group, count=0),)
        )
        program = dataclasses.replace(read.program, path="no_train.py")
        conf = dataclasses.replace(read, cluster=cluster, program=program)
    said = refuse(here, vjob.ConfError, vjob.submit, conf)
    for problem in (
        "3 problems in the conf",
        "program.script = ",
        ": is not a file",
        "cluster.walltime_min = 0: must be at least 1",
        "cluster.nodes[0].count = 0: must be at least 1",
    ):
        assert problem in said


LOCAL_CLUSTER = {"scheduler": "local", "nodes": [{"group": "a"}]}


def test_load_says_that_there_is_no_file(here: Path) -> None:
    with pytest.raises(vjob.ConfError, match=r"nofile.yaml: cannot be read: No such file"):
        vjob.load(here / "nofile.yaml")
    with pytest.raises(vjob.ConfError, match="is a folder, not a conf"):
        vjob.load(here)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cluster.walltme_min": 3}, 'cluster.walltme_min = 3: unknown key; did you mean "wall'),
        ({"cluster.walltime_min": {1, 2}}, "cluster.walltime_min = {1, 2}: a value of type set"),
        ({"cluster.nodes": [{"group": b"a"}]}, "cluster.nodes[0].group = b'a': a value of type b"),
        ({"cluster.nodes[3].count": 1}, "cluster.nodes has 1 entries, counted from 0"),
        (["a=b"], "set must be a dict, such as {'train.steps': 100}, and is ['a=b']"),
    ],
    ids=["unknown", "set", "bytes", "index", "list"],
)
def test_what_cannot_be_set_is_named_by_its_key(
    executor: submitit.AutoExecutor, here: Path, settings: Any, says: str
) -> None:
    executor.update_parameters(vjob_set=settings)
    assert says in refuse(here, vjob.InputError, executor.submit, functions.multiply, 1)
    conf = {**BAD, "cluster": LOCAL_CLUSTER}
    assert says in refuse(here, vjob.InputError, lambda: vjob.submit(conf, set=settings))


def test_a_variable_needs_a_name(executor: submitit.AutoExecutor, here: Path) -> None:
    executor.update_parameters(vjob_env={"A B": "1"})
    said = refuse(here, vjob.InputError, executor.submit, functions.multiply, 1)
    assert said == "env: 'A B' cannot be the name of a variable"


def test_a_parameter_of_the_executor_that_is_none_lists_all(here: Path) -> None:
    with pytest.raises(ValueError, match=r"Unavailable parameter\(s\): \['blub'\]") as caught:
        VjobExecutor(here / "log").update_parameters(blub=1)
    assert "- array_parallelism (default: 256)" in str(caught.value)


@pytest.mark.parametrize("at_most", [0, -1, "x"])
def test_an_array_of_which_none_may_run_is_refused(
    executor: submitit.AutoExecutor, at_most: Any
) -> None:
    with pytest.raises(vjob.InputError, match="may run at once, 1 or more"):
        executor.update_parameters(vjob_array_parallelism=at_most)


@pytest.mark.parametrize("name", ["file", "file/below", "col:on", "100%"])
def test_a_folder_that_cannot_be_used_is_named(here: Path, name: str) -> None:
    (here / "file").touch()
    executor = submitit.AutoExecutor(here / name, cluster="vjob")
    executor.update_parameters(vjob_set=LOCAL)
    for call in (executor.submit, lambda one, *args: executor.map_array(one, [*args])):
        with pytest.raises(vjob.VjobError, match="log_folder") as caught:
            call(functions.multiply, 1, 2)
        assert str(here / name) in str(caught.value)


def test_a_conf_for_functions_needs_neither_name_nor_program(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    cluster = {"scheduler": "local", "nodes": [{"group": "a", "ranks": 2}]}
    executor.update_parameters(vjob_conf={"program": "pretrain_gpt", "cluster": cluster})
    job = executor.submit(functions.multiply, 1)
    assert job.results() == [2, 2] and job.conf.name == "multiply"


# Slurm, and jobs that are not there.


@pytest.fixture
def slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm(here / "tools")
    monkeypatch.setenv("PATH", str(slurm.folder), prepend=os.pathsep)
    return slurm


def test_what_sbatch_refuses_is_told_in_its_words_with_the_remedy(
    here: Path, slurm: FakeSlurm
) -> None:
    slurm.say("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    executor = submitit.AutoExecutor(here / "log", cluster="vjob")
    with pytest.raises(vjob.VjobError, match="invalid partition specified: x") as caught:
        executor.submit(functions.multiply, 1)
    (folder,) = (here / "log").iterdir()
    assert str(folder) in str(caught.value) and "Traceback" not in str(caught.value)
    job = vjob.job(folder)
    assert job.state == "REFUSED" and job.done()
    with pytest.raises(UncompletedJobError, match="invalid partition specified: x"):
        job.result()
    with pytest.raises(vjob.VjobError, match="invalid partition"):
        executor.map_array(functions.multiply, [1, 2])
    assert {job.state for job in vjob.runs()} == {"REFUSED"}


def test_a_loop_of_submits_spares_slurm_as_submitit_does(here: Path, slurm: FakeSlurm) -> None:
    executor = VjobExecutor(here / "log")
    executor.submit(functions.multiply, 1)
    assert executor._last_job_submitted > 0
    waited: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_throttle", lambda: waited.append(executor._last_job_submitted))
        executor.submit(functions.multiply, 2)
    assert len(waited) == 1 and waited[0] > 0


def test_without_sbatch_slurm_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    executor = submitit.AutoExecutor(here / "log", cluster="vjob")
    executor.update_parameters(vjob_set={"cluster.scheduler": "slurm"})
    said = refuse(here, vjob.InputError, executor.submit, functions.multiply, 1)
    assert "sbatch is not on PATH" in said and "scheduler: local" in said


@pytest.mark.parametrize("which", ["999999", 999999, "no such", "last"])
def test_a_job_that_is_not_ours_is_said_to_be_unknown(here: Path, which: Any) -> None:
    with pytest.raises(vjob.InputError) as caught:
        vjob.job(which)
    assert "`vjob list` shows them" in str(caught.value) or "no run" in str(caught.value)


def test_a_submit_after_an_unknown_job_is_refused(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    executor.update_parameters(vjob_after="999999")
    said = refuse(here, vjob.InputError, executor.submit, functions.multiply, 1)
    assert "no run '999999' is known" in said


# What a node lacks.


def write_python(here: Path, *, hides: str) -> str:
    """A Python like ours that has not this module."""
    package = here / "hidden" / hides
    package.mkdir(parents=True)
    lacks = f"raise ModuleNotFoundError(\"No module named '{hides}'\", name='{hides}')\n"
    (package / "__init__.py").write_text(lacks)
    wrapper = here / "python-without"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{package.parent}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.mark.parametrize("hides", ["cloudpickle", "submitit"])
def test_a_python_of_the_nodes_without_what_a_function_needs_is_named(
    executor: submitit.AutoExecutor, here: Path, hides: str
) -> None:
    python = write_python(here, hides=hides)
    executor.update_parameters(vjob_set={**LOCAL, "program.python": python})
    job = executor.submit(functions.multiply, 1)
    with pytest.raises(FailedJobError) as caught:
        job.result()
    said = str(caught.value)
    assert f"No module named '{hides}'; a function needs submitit and cloudpickle in the" in said
    assert "change program.python" in said and said.count("No module named") == 1
    assert "Traceback" not in said.replace("as the Traceback", "") and len(said.splitlines()) == 2


def test_a_bare_venv_is_told_from_one_with_submitit(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", here / "venv"], check=True)
    executor.update_parameters(vjob_set={**LOCAL, "program.python": str(here / "venv/bin/python")})
    said = str(executor.submit(functions.multiply, 1).exception())
    assert "a function needs submitit and cloudpickle" in said and "venv/bin/python" in said


def test_a_module_that_the_function_imports_is_named_with_its_traceback(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    python = write_python(here, hides="torch")
    executor.update_parameters(vjob_set={**LOCAL, "program.python": python})
    said = str(executor.submit(functions.meet_by_torch).exception())
    assert "in meet_by_torch\n" in said and "No module named 'torch'" in said
    assert "or change program.python" in said


def test_another_version_of_python_is_refused_before_it_unpickles(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    others = [version for version in list_pythons() if version != sys.version_info[:2]]
    if not others:
        pytest.skip("one version of Python is here")
    version = others[-1]
    executor.update_parameters(vjob_set={**LOCAL, "program.python": list_pythons()[version]})
    job = executor.submit(functions.multiply, 1)
    said = str(job.exception())
    own, other = (".".join(map(str, one)) for one in (sys.version_info[:2], version))
    assert f"multiply was pickled by Python {own}, and Python {other} (" in said
    assert f"set program.python to a Python {own} of the nodes" in said
    assert said.count("was pickled by") == 1 and "Traceback" not in said


def test_a_python_that_is_not_there_is_found_before_the_ranks_start(
    executor: submitit.AutoExecutor,
) -> None:
    executor.update_parameters(vjob_set={**LOCAL, "program.python": "/no/python"})
    with pytest.raises(vjob.InputError, match="/no/python does not exist or is not executable"):
        executor.submit(functions.multiply, 1)


# Results that do not come.


def test_a_lost_result_is_said_to_be_lost(
    executor: submitit.AutoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LANDING_S", 0.0)
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(functions.multiply, 1)
    assert job.results() == [2, 2]
    job.task(1).paths.result_pickle.unlink()
    wait_for(lambda: job.state == "COMPLETED", 60)
    with pytest.raises(UncompletedJobError) as caught:
        job.results()
    said = str(caught.value)
    assert (
        f"rank 1 succeeded, but its result {job.task(1).paths.result_pickle} does not exist" in said
    )
    assert "log_folder that every node sees" in said
    assert job.task(0).result() == 2


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_signal(executor: submitit.AutoExecutor) -> None:
    def call() -> int:
        rank = submitit.JobEnvironment().global_rank
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(call)
    with pytest.raises(UncompletedJobError) as caught:
        job.results()
    said = str(caught.value)
    assert f"rank 1 on {HOST} was ended by SIGKILL" in said
    assert "its result" not in said and job.state == "FAILED"


def test_a_result_that_cannot_be_pickled_is_told_once(executor: submitit.AutoExecutor) -> None:
    said = str(executor.submit(threading.Lock).exception())
    assert said.count("returned a _thread.lock, which cannot be pickled") == 1
    assert "return plain values, and write large things to files" in said


def make_there() -> Any:
    module = types.ModuleType("only_there")
    sys.modules["only_there"] = module
    exec("class Thing: pass", module.__dict__)
    return module.Thing()


def test_a_result_of_a_module_that_is_not_here_is_told_with_the_remedy(
    executor: submitit.AutoExecutor,
) -> None:
    make_there.__module__ = "__main__"  # pickled by value
    job = executor.submit(make_there)
    for ask in (job.result, job.exception):
        with pytest.raises(vjob.VjobError) as caught:
            ask()
        said = str(caught.value)
        assert "cannot be unpickled in this process: ModuleNotFoundError: No module named" in said
        assert "add its folder to sys.path" in said


def test_a_damaged_result_is_said_to_be_so(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(functions.multiply, 1)
    job.wait()
    job.paths.result_pickle.write_bytes(job.paths.result_pickle.read_bytes()[:-5])
    with pytest.raises(vjob.VjobError, match=r"0\.result\.pkl is damaged"):
        job.result()


def test_a_run_folder_that_was_removed_is_missed(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(functions.multiply, 1)
    assert job.result() == 2
    wait_for(lambda: job.state == "COMPLETED", 60)
    shutil.rmtree(job.folder)
    for ask in (job.result, job.exception, job.done, job.wait):
        with pytest.raises(vjob.VjobError, match="does not exist"):
            ask()
    with pytest.raises(vjob.VjobError, match="was the run folder removed"):
        job.cancel()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["function", "function/0.result.pkl"])
def test_another_users_pickle_is_not_opened(
    executor: submitit.AutoExecutor, here: Path, what: str
) -> None:
    job = executor.submit(functions.multiply, 1)
    assert job.result() == 2
    wait_for(lambda: job.state == "COMPLETED", 60)
    copy = here / "copy"
    passing = shutil.ignore_patterns("local-bin.*")  # the supervisor removes it as it ends
    shutil.copytree(job.folder, copy, ignore=passing)
    os.chown(copy / what, 12345, -1)
    with pytest.raises(vjob.VjobError, match="belongs to another user and is not read"):
        vjob.job(copy).result()
