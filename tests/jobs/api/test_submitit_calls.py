"""submitit's calls, as its documentation and its docstrings make them, with cluster="vjob".

Each row of the table "submitit's calls" in docs/python.md is named by the mark of a test, here or
in tests/cluster/test_submitit_calls.py. The jobs run on this machine.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from operator import add
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core.core import DelayedJob
from submitit.core.utils import FailedJobError, UncompletedJobError

import vjob
from tests import ROOT
from tests.command import wait_for
from tests.jobs.api import functions
from vjob.jobs.api.job import VjobJob

PAGE = (ROOT / "docs/python.md").read_text()
TABLE = PAGE.partition("## submitit's calls\n")[2].partition("\n## ")[0]
TESTS = (Path(__file__), ROOT / "tests/cluster/test_submitit_calls.py")


def read_rows() -> list[str]:
    return re.findall(r"^\| (.+?) \| (?:yes|no|differs) \| .*\|$", TABLE, re.MULTILINE)


def test_each_row_of_the_table_has_its_test() -> None:
    """Calls that work as submitit says have a test and no row."""
    marked = set()
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
                marked |= {ast.literal_eval(word) for word in node.args}
    rows = read_rows()
    assert len(rows) == len(set(rows)) == TABLE.count("\n| ") - 1
    assert marked >= set(rows)


@pytest.mark.row('`AutoExecutor(folder="log/%j")`')
def test_the_executor_is_found_and_leaves_a_pattern_out_of_its_folder(here: Path) -> None:
    executor = submitit.AutoExecutor(folder=here / "log/%j", cluster="vjob")
    executor.update_parameters(vjob_set={"cluster.scheduler": "local"})
    assert executor.cluster == "vjob" and executor.folder == here / "log"
    job = executor.submit(add, 5, 7)
    print(job.job_id)
    assert job.result() == 12
    assert job.paths.folder.parent == here / "log"


@pytest.mark.row("`AutoExecutor(folder)` without a cluster")
def test_vjob_is_never_chosen_by_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # no srun
    assert submitit.AutoExecutor(folder=here).cluster == "local"
    (here / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    assert submitit.AutoExecutor(folder=here).cluster == "slurm"


@pytest.mark.row('`cluster="debug"`, `cluster="local"`')
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # debug's logs
@pytest.mark.parametrize("cluster", ["debug", "local"])
def test_submitits_own_executors_work_as_they_did(here: Path, cluster: str) -> None:
    executor = submitit.AutoExecutor(folder=here / "log", cluster=cluster)
    executor.update_parameters(timeout_min=1, vjob_conf="ignored.yaml")
    job = executor.submit(functions.describe_place)
    assert job.result()["num_tasks"] == 1
    assert not isinstance(job, VjobJob)
    if cluster == "local":
        assert job.paths.stdout.parent == here / "log"


@pytest.mark.row("`update_parameters(...)` of the shared parameters")
def test_shared_parameters_are_keys_of_the_conf(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(
        name="shared",
        timeout_min=60,
        vjob_timeout_min=4,  # for this cluster alone
        mem_gb=1.5,
        nodes=2,
        cpus_per_task=3,
        tasks_per_node=2,
        stderr_to_stdout=True,
    )
    job = executor.submit(add, 5, 7)
    (group,) = job.conf.cluster.nodes
    assert (group.count, group.ranks, group.cpus, group.memory_gb) == (2, 2, 6, 2)
    assert job.conf.name == "shared" and job.conf.cluster.walltime_min == 4
    assert job.results() == [12] * 4


@pytest.mark.row("`update_parameters(slurm_partition=..., slurm_setup=...)`")
def test_parameters_of_other_clusters_are_ignored(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(
        slurm_partition="dev",
        slurm_setup=["module load nothing"],
        slurm_additional_parameters={"qos": "high"},
        slurm_timeout_min=1,
    )
    job = executor.submit(add, 5, 7)
    assert job.conf.cluster.nodes[0].queue is None and job.conf.cluster.walltime_min == 5
    job.cancel()


@pytest.mark.row("`update_parameters(...)` with a wrong name")
def test_a_wrong_name_is_an_error_that_lists_the_right_ones(
    executor: submitit.AutoExecutor,
) -> None:
    with pytest.raises(NameError, match="Unknown argument 'cnof' for executor 'vjob'") as caught:
        executor.update_parameters(vjob_cnof="conf.yaml")
    for name in ("conf", "set", "env", "after", "array_parallelism"):
        assert name in str(caught.value).splitlines()[0]
    with pytest.raises(NameError, match="Parameter 'blublu' need to be prefixed"):
        executor.update_parameters(blublu=12)
    with pytest.raises(AssertionError, match='"nodes" expected type'):
        executor.update_parameters(nodes="two")


@pytest.mark.row("`submit(function, *args, **kwargs)`")
@pytest.mark.row("`job.job_id`, `job.result()`, `job.exception()`")
@pytest.mark.row("`job.submission()`")
@pytest.mark.row("`job.paths.stdout` and the other paths")
def test_a_function_of_any_kind_is_a_job(executor: submitit.AutoExecutor) -> None:
    factor = 3

    class Own:
        value = 7

    jobs = [
        executor.submit(functions.multiply, 4, second=factor),
        executor.submit(lambda number: number * factor, 5),
        executor.submit(functools.partial(functions.multiply, 6)),
        executor.submit(Own),
    ]
    assert [job.result() for job in jobs[:3]] == [12, 15, 12]
    assert jobs[3].result().value == 7
    assert len({job.job_id for job in jobs}) == 4 and jobs[0].exception() is None
    assert all(isinstance(job.job_id, str) for job in jobs)
    asked = jobs[0].submission()
    assert (asked.args, asked.kwargs) == ((4,), {"second": 3})
    assert asked.function is functions.multiply and asked.result() == 12
    paths = jobs[0].paths
    assert paths.folder.is_dir() and paths.submission_file.read_text().startswith("#!")
    assert pickle.loads(paths.result_pickle.read_bytes()) == ("success", 12)
    assert paths.submitted_pickle.exists()


@pytest.mark.row("`FailedJobError` of `job.result()`")
def test_an_error_has_the_functions_own_traceback(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(functions.divide, 1, 0)
    with pytest.raises(FailedJobError) as caught:
        job.result()
    text = str(caught.value)
    assert "Traceback (most recent call last)" in text and "in divide\n" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "about to divide" in job.stderr()
    error = job.exception()
    assert isinstance(error, FailedJobError) and isinstance(error, UncompletedJobError)
    assert job.done() and job.state == "FAILED"


@pytest.mark.row("`job.done()`, `job.wait()`, `job.state`, `job.get_info()`, `repr(job)`")
def test_a_job_tells_how_far_it_is(executor: submitit.AutoExecutor, here: Path) -> None:
    job = executor.submit(functions.wait_for_file, str(here / "go"), 1)
    wait_for(lambda: job.state == "RUNNING", 60)
    assert not job.done() and not job.done(force_check=True)
    assert repr(job) == f'VjobJob<job_id={job.job_id}, task_id=0, state="RUNNING">'
    (here / "go").touch()
    job.wait()
    assert job.done()
    wait_for(lambda: job.get_info(mode="force")["State"] == "COMPLETED", 60)
    assert job.state == "COMPLETED" and job.watcher.num_calls > 0


@pytest.mark.row("concurrent jobs, `sum(job.done() for job in jobs)`")
@pytest.mark.row("`submitit.helpers.as_completed(jobs)`")
def test_jobs_run_at_once_and_come_as_they_are_completed(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    jobs = [executor.submit(functions.wait_for_file, str(here / "go"), 0)]
    jobs += [executor.submit(functions.multiply, number, 1) for number in (1, 2)]
    wait_for(lambda: sum(job.done() for job in jobs) == 2, 60)
    order = []
    for job in submitit.helpers.as_completed(jobs, timeout=100, poll_frequency=0.1):
        order.append(job)
        if len(order) == 2:
            (here / "go").touch()
    assert order[-1] is jobs[0]
    assert sorted(job.result() for job in order) == [0, 1, 2]


@pytest.mark.row("`job.cancel()`")
@pytest.mark.row("`job.cancel_at_deletion()`")
def test_a_job_is_cancelled_by_word_or_with_its_object(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    job = executor.submit(functions.wait_for_file, str(here / "never"), 0)
    job.cancel()
    with pytest.raises(UncompletedJobError, match="cancelled with vjob cancel"):
        job.result()
    assert job.state == "CANCELLED"
    job = executor.submit(functions.wait_for_file, str(here / "never"), 1).cancel_at_deletion()
    other = VjobJob.open(job.run)
    del job
    other.wait()
    assert other.state == "CANCELLED"


@pytest.mark.row("`update_parameters(tasks_per_node=3, nodes=2)`, `job.results()`")
@pytest.mark.row("`job.task(i)`, `job.num_tasks`")
@pytest.mark.row("`job.stdout()`, `job.stderr()`")
def test_each_task_has_its_own_result_and_output(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(tasks_per_node=3, nodes=2, timeout_min=1)
    job = executor.submit(functions.say, "word")
    assert job.num_tasks == 6
    assert job.task(2).result() == 2
    assert job.task(2).stdout() == "word of 2\n" and job.task(2).stderr() == "no word of 2\n"
    assert job.results() == list(range(6))
    assert all(f"word of {rank}\n" in job.stdout() for rank in range(6))
    assert all(f"no word of {rank}\n" in job.stderr() for rank in range(6))
    with pytest.raises(AssertionError, match="You should use `results\\(\\)`"):
        job.result()
    with pytest.raises(ValueError, match="must be between 0 and 5"):
        job.task(6)


@pytest.mark.row("`submitit.JobEnvironment()` and its fields")
def test_a_rank_knows_its_place(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(tasks_per_node=2, nodes=2)
    job = executor.submit(functions.describe_place)
    for rank, told in enumerate(job.results()):
        assert told == {
            "job_id": job.job_id,
            "num_tasks": 4,
            "num_nodes": 2,
            "node": rank // 2,
            "global_rank": rank,
            "local_rank": rank % 2,
        }


@pytest.mark.row("`executor.map_array(function, *iterables)`")
@pytest.mark.row("`update_parameters(slurm_array_parallelism=2)`")
def test_an_array_is_a_list_of_jobs(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(slurm_array_parallelism=2, vjob_array_parallelism=2)
    jobs = executor.map_array(add, [1, 2, 3, 4], [10, 20, 30, 40])
    assert [job.result() for job in jobs] == [11, 22, 33, 44]
    assert len({job.job_id for job in jobs}) == 4
    with pytest.warns(UserWarning, match="empty job array"):
        assert executor.map_array(add, [], []) == []


@pytest.mark.row("`with executor.batch():`")
def test_a_batch_is_submitted_at_its_end(executor: submitit.AutoExecutor) -> None:
    jobs = []
    with executor.batch():
        for number in range(2):
            jobs.append(executor.submit(functions.multiply, number, second=5))
        with pytest.raises(RuntimeError, match="within batch context"):
            executor.update_parameters(timeout_min=1)
        assert type(jobs[0]) is DelayedJob
        with pytest.raises(AttributeError, match="forbidden within"):
            print(jobs[0].job_id)
    assert [type(job) for job in jobs] == [VjobJob, VjobJob]
    assert [job.result() for job in jobs] == [0, 5]


def test_an_error_in_a_batch_submits_nothing(executor: submitit.AutoExecutor, here: Path) -> None:
    with pytest.raises(ZeroDivisionError), executor.batch():
        executor.submit(functions.multiply, 1)
        raise ZeroDivisionError
    with pytest.warns(RuntimeWarning, match="No submission"), executor.batch():
        pass
    assert not (here / "log").exists()


@pytest.mark.row("`with executor.batch(allow_implicit_submissions=True):`")
def test_a_batch_is_submitted_as_soon_as_a_job_is_asked(executor: submitit.AutoExecutor) -> None:
    with executor.batch(allow_implicit_submissions=True):
        first = executor.submit(functions.multiply, 3)
        assert first.result() == 6
        second = executor.submit(functions.multiply, 4)
        assert type(second) is DelayedJob
    assert second.result() == 8


@pytest.mark.row("`executor.submit_array(functions)`")
def test_functions_without_arguments_are_an_array(executor: submitit.AutoExecutor) -> None:
    jobs = executor.submit_array([functools.partial(add, one, 10) for one in (1, 2)])
    assert [job.result() for job in jobs] == [11, 12]


@pytest.mark.row("`submitit.helpers.monitor_jobs(jobs)`")
def test_jobs_are_monitored_to_their_end(
    executor: submitit.AutoExecutor, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [executor.submit(functions.wait_for_file, str(here / "go"), 1)]
    jobs.append(executor.submit(functions.divide, 4, 0))

    def look(begin: float, num_jobs: int, states: dict[str, set[int]]) -> None:
        if states["FAILED"] and states["DONE"] == {1} and num_jobs == 2:
            (here / "go").touch()

    submitit.helpers.monitor_jobs(jobs, 0.1, test_mode=True, custom_logging=look)
    said = capsys.readouterr().out
    assert f"Monitoring 2 jobs from job arrays {jobs[0].job_id}, {jobs[1].job_id}" in said
    assert "All jobs finished, jobs with indices [1] failed" in said


@pytest.mark.row("`await job.awaitable().result()`, `.results()`, `.wait()`")
@pytest.mark.row("`asyncio.as_completed([j.awaitable().result() for j in jobs])`")
@pytest.mark.row("`job.awaitable().results_as_completed()`")
def test_jobs_are_awaited(executor: submitit.AutoExecutor) -> None:
    async def use() -> None:
        job = executor.submit(functions.multiply, 10, 2)
        assert await job.awaitable().result() == 20
        jobs = [executor.submit(functions.multiply, number) for number in (1, 2)]
        found = [await one for one in asyncio.as_completed([j.awaitable().result() for j in jobs])]
        assert sorted(found) == [2, 4]
        executor.update_parameters(tasks_per_node=2)
        job = executor.submit(functions.say, "word")
        assert await job.awaitable().results() == [0, 1]
        # submitit's own ends with one more, which asks a job of several tasks for one result.
        results = job.awaitable().results_as_completed(poll_interval=0.1)
        assert sorted([await next(results), await next(results)]) == [0, 1]
        await job.awaitable().wait()

    asyncio.run(use())


@pytest.mark.row("`submitit.helpers.CommandFunction([...])`")
def test_a_command_is_a_function(executor: submitit.AutoExecutor, here: Path) -> None:
    function = submitit.helpers.CommandFunction(["which", "python"])
    job = executor.submit(function)
    cwd = submitit.helpers.CommandFunction(["pwd"], cwd=here, verbose=False)
    variable = submitit.helpers.CommandFunction(["/bin/sh", "-c", "echo $A"], env={"A": "b"})
    bad = submitit.helpers.CommandFunction([sys.executable, "-c", "import sys; sys.exit('no use')"])
    jobs = [executor.submit(one) for one in (cwd, variable, bad)]
    jobs.append(executor.submit(submitit.helpers.CommandFunction(["echo"]), "pip", key="word"))
    assert Path(job.result()).name == "python"
    assert jobs[0].result() == str(here) and jobs[1].result() == "b"
    assert jobs[3].result() == "pip --key=word"
    with pytest.raises(FailedJobError, match="no use"):
        jobs[2].result()


@pytest.mark.row("`submitit.helpers.FunctionSequence()`")
def test_a_sequence_goes_on_behind_what_it_has_computed(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    sequence = submitit.helpers.FunctionSequence(verbose=True)
    sequence.add(functions.multiply, 3)
    sequence.add(functions.wait_for_file, str(here / "go"), 4)
    sequence.add(functions.multiply, 5, second=1)
    job = executor.submit(sequence)
    wait_for((here / "go.4.seen").exists, 60)
    job._interrupt()
    wait_for(lambda: "Starting from 1/3" in (job.stdout() or ""), 60)
    (here / "go").touch()
    assert job.result() == [6, 4, 5]


@pytest.mark.row("`submitit.helpers.Checkpointable`, `job._interrupt()`")
def test_an_interrupted_callable_goes_on_with_its_state(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    job = executor.submit(functions.Stages(), str(here), model_path=str(here / "model"))
    while job.state != "RUNNING":
        time.sleep(0.1)
    wait_for((here / "prepared.1").exists, 60)
    job._interrupt()
    assert job.result() == ["load", "prepare", "fitted in start 2"]
    assert (here / "model").read_text() == "fitted in start 2"
    lines = [line for line in job.stdout().splitlines() if not line.startswith("submitit ")]
    assert lines == ["stage load", "stage prepare", "checkpoint after prepare", "fit"]
    # A start has files of its own: the log of the rank's node, where lines have its number.
    assert job.paths.stdout.read_text() == "0: fit\n"


@pytest.mark.row("`job._interrupt(timeout=True)`, `slurm_max_num_timeout=1`")
def test_a_timeout_may_come_so_often(here: Path) -> None:
    """submitit tells a timeout by the time that was asked for: a minute is always over."""
    executor = submitit.AutoExecutor(
        here / "log", cluster="vjob", slurm_max_num_timeout=3, vjob_max_num_timeout=0
    )
    executor.update_parameters(timeout_min=1, vjob_set={"cluster.scheduler": "local"})
    job = executor.submit(functions.Turns(again=1), str(here), 0)
    wait_for((here / "turn.0").exists, 60)
    job._interrupt(timeout=True)
    with pytest.raises(FailedJobError, match="not requeued because: timed-out too many times"):
        job.result()


@pytest.mark.row("a `checkpoint()` that returns a `DelayedSubmission` with other arguments")
def test_a_checkpoint_may_submit_something_else(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    job = executor.submit(functions.Turns(again=5), str(here), 0)
    wait_for((here / "turn.0").exists, 60)
    job._interrupt(timeout=False)
    assert job.result() == 5
    assert job.submission().kwargs == {"number": 5}


@pytest.mark.row("a `checkpoint()` that returns `None`")
def test_a_checkpoint_may_end_the_job(executor: submitit.AutoExecutor, here: Path) -> None:
    job = executor.submit(functions.Turns(again=None), str(here), 0)
    wait_for((here / "turn.0").exists, 60)
    job._interrupt()
    with pytest.raises(UncompletedJobError, match="checkpoint function returned None"):
        job.result()


@pytest.mark.row("`TorchDistributedEnvironment().export()`")
def test_ranks_meet_by_torch(executor: submitit.AutoExecutor) -> None:
    pytest.importorskip("torch")
    executor.update_parameters(nodes=2, tasks_per_node=2)
    assert executor.submit(functions.meet_by_torch).results() == [6.0] * 4


@pytest.mark.row("`with submitit.helpers.clean_env():`")
def test_a_job_has_nothing_of_the_job_that_submits_it(
    executor: submitit.AutoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_MARK", "SUBMITIT_MARK", "MARK"):
        monkeypatch.setenv(name, "1")
    with submitit.helpers.clean_env(extra_names=("MARK",)):
        assert "MARK" not in os.environ and "SLURM_MARK" not in os.environ
        job = executor.submit(functions.list_variables)
    assert os.environ["SLURM_MARK"] == "1"
    names = job.result()
    assert not [name for name in names if "MARK" in name]


@pytest.mark.row("`with submitit.helpers.RsyncSnapshot(folder):`")
@pytest.mark.skipif(shutil.which("rsync") is None, reason="submitit's snapshots need rsync")
def test_a_job_of_a_snapshot_runs_in_it(
    executor: submitit.AutoExecutor, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = here / "source"
    source.mkdir()
    (source / "shot.py").write_text("def tell():\n    return 'as it was'\n")
    for words in (["init", "-q"], ["add", "shot.py"], ["commit", "-q", "-m", "one"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=source, check=True)
    monkeypatch.chdir(source)
    monkeypatch.syspath_prepend(str(source))
    import shot  # type: ignore[import-not-found]

    with submitit.helpers.RsyncSnapshot(snapshot_dir=here / "shot"):
        job = executor.submit(shot.tell)
        place = executor.submit(os.getcwd)
    (source / "shot.py").write_text("def tell():\n    return 'edited'\n")
    assert job.result() == "as it was" and place.result() == str(here / "shot")


@pytest.mark.row("`pickle.dumps(job)`, and the job in another process")
def test_a_pickled_job_is_the_same_job_elsewhere(
    executor: submitit.AutoExecutor, here: Path
) -> None:
    executor.update_parameters(tasks_per_node=2)
    job = executor.submit(functions.say, "word")
    (here / "job.pkl").write_bytes(pickle.dumps(job))
    code = (
        "import pickle, sys; job = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(job.job_id, job.results(), job.task(1).stdout().strip())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, here / "job.pkl"], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{job.job_id} [0, 1] word of 1\n", done.stderr


@pytest.mark.row("`submitit.SlurmJob(folder, job_id)`, to find a job again")
def test_a_job_is_found_again_by_its_id(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(functions.multiply, 4)
    again = vjob.job(job.job_id)
    assert again.job_id == job.job_id and again.result() == 8


@pytest.mark.row("`submit` and `result` in an optimizer's loop (nevergrad)")
def test_an_executor_serves_an_optimizer(executor: submitit.AutoExecutor) -> None:
    """As nevergrad's `minimize(function, executor=executor)`: submit, done, result; no more."""

    class Optimizer:
        def __init__(self, budget: int) -> None:
            self.random, self.budget = random.Random(0), budget
            self.told: dict[int, int] = {}

        def minimize(self, function: Any, executor: submitit.Executor) -> int:
            running = []
            for _ in range(self.budget):
                candidate = self.random.randint(1, 9)
                running.append((candidate, executor.submit(function, candidate, second=2)))
            while running:
                for one in [one for one in running if one[1].done()]:
                    self.told[one[0]] = one[1].result()
                    running.remove(one)
                time.sleep(0.1)
            return min(self.told, key=lambda candidate: self.told[candidate])

    optimizer = Optimizer(budget=2)
    best = optimizer.minimize(functions.multiply, executor=executor)
    assert optimizer.told[best] == 2 * best == min(optimizer.told.values())


@pytest.mark.row("`executor.register_dev_folders([...])`")
def test_dev_folders_are_ignored_as_on_slurm(executor: submitit.AutoExecutor) -> None:
    with pytest.warns(UserWarning, match="Ignoring dev folder registration"):
        executor.register_dev_folders([ROOT / "vjob"])
