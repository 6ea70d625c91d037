"""Functions as whole runs on this machine: real agents, real ranks, real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from tests.command import read_out, read_rank, wait_for
from tests.varuna_core.agent.local_run import is_running
from tests.varuna_core.functions import rank_functions as functions
from tests.varuna_core.functions.function_run import CONF, Functions, read_result
from varuna_core.records.exits import read_outcome
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.submit.submit import submit

HET = "[{group: a, count: 1, ranks: 2}, {group: b, count: 2, ranks: 1}]"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Functions:
    return Functions(tmp_path, monkeypatch)


def wait_for_count(runs: Functions, run: RunFolder, attempt: int = 0, ranks: int = 4) -> None:
    """Until each rank has counted to 1 at least."""
    names = [runs.folder / f"{attempt}.{rank}" for rank in range(ranks)]
    wait_for(lambda: all(name.exists() for name in names), 60, lambda: runs.vjob.explain(run))


def test_every_rank_returns_its_own_result(runs: Functions) -> None:
    run = runs.submit(functions.describe_rank)
    record = runs.wait(run)
    assert record["verdict"] == "COMPLETED", runs.vjob.explain(run)
    for rank in range(4):
        kind, told = read_result(run, rank)
        assert kind == "success"
        assert told["cluster"] == "vjob" and told["job_id"] == record["jobs"][0]["id"]
        assert (told["num_tasks"], told["num_nodes"]) == (4, 2)
        assert (told["global_rank"], told["node"], told["local_rank"]) == (
            rank,
            rank // 2,
            rank % 2,
        )
        assert told["hostnames"] == [socket.gethostname()] * 2
        assert told["env"]["RANK"] == str(rank) and told["env"]["WORLD_SIZE"] == "4"
        assert told["pickle"] == str(run.submitted_pickle)
        plan = read_plan(run.plan)
        assert told["stdout"] == str(locate_output(run.attempt(0), plan, rank, "out").path)
        assert f"global_rank={rank}(4)" in told["text"]


@pytest.mark.parametrize("hetero", ["hetjob", "split"])
def test_ranks_of_several_groups_have_one_job_id(runs: Functions, hetero: str) -> None:
    options = {"cluster.nodes": HET, "cluster.hetero": hetero, "cluster.requeue": "false"}
    run = runs.submit(functions.describe_rank, **options)
    record = runs.wait(run)
    assert record["verdict"] == "COMPLETED", runs.vjob.explain(run)
    told = [read_result(run, rank)[1] for rank in range(4)]
    assert {item["job_id"] for item in told} == {record["jobs"][0]["id"]}
    assert [item["node"] for item in told] == [0, 0, 1, 2]
    assert {item["num_nodes"] for item in told} == {3}


def test_pickles_are_readable_by_their_owner_alone(runs: Functions) -> None:
    old = os.umask(0)
    try:
        run = runs.submit(functions.describe_rank)
    finally:
        os.umask(old)
    runs.wait(run)
    folder = run.submitted_pickle.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_an_exception_is_told_by_rank_and_host_and_in_the_users_own_frames(runs: Functions) -> None:
    run = runs.submit(functions.fail_on, 2, "the data are gone")
    record = runs.wait(run)
    assert record["verdict"] == "FAILED"
    assert "rank 2 on local1 exited 1: ValueError: the data are gone" in record["message"]
    kind, text = read_result(run, 2)
    lines = text.splitlines()
    assert kind == "error" and lines[0] == "Traceback (most recent call last):"
    assert "in fail_on" in lines[1] and lines[-1] == "ValueError: the data are gone"
    assert not run.result_pickle(0).exists()


def test_a_result_that_cannot_be_pickled_is_an_error_that_names_its_type(runs: Functions) -> None:
    run = runs.submit(functions.return_lock)
    record = runs.wait(run)
    found = [rank for rank in range(4) if run.result_pickle(rank).exists()]  # the rest was ended
    kind, text = read_result(run, found[0])
    assert kind == "error"
    assert "TypeError: the function returned a _thread.lock, which cannot be pickled" in text
    assert "returned a _thread.lock" in record["message"]


def test_an_exit_of_the_function_keeps_its_code(runs: Functions) -> None:
    run = runs.submit(functions.leave_by_exit, 7)
    assert runs.wait(run)["outcome"]["code"] == 7
    found = [rank for rank in range(4) if run.result_pickle(rank).exists()]
    assert read_result(run, found[0])[1].splitlines()[-1] == "SystemExit: 7"


def test_a_function_may_use_the_runtime(runs: Functions) -> None:
    run = runs.submit(functions.find_runtime)
    runs.wait(run)
    path = f"{run.function}/varuna_core/schedule/registry.py"
    assert read_result(run, 3) == ("success", f"{path}c")


def test_submitits_torch_environment_is_that_of_the_ranks(runs: Functions) -> None:
    nodes = "[{group: a, count: 1, ranks: 2, devices: [4, 6]}, {group: b, count: 1, ranks: 1}]"
    run = runs.submit(functions.meet_by_torch, **{"cluster.nodes": nodes})
    assert runs.wait(run)["verdict"] == "COMPLETED", runs.vjob.explain(run)
    told = [read_result(run, rank)[1] for rank in range(3)]
    assert [(item["rank"], item["world_size"], item["total"]) for item in told] == [
        (0, 3, 3),
        (1, 3, 3),
        (2, 3, 3),
    ]
    assert [item["local_world_size"] for item in told] == [2, 2, 1]
    assert [item["devices"] for item in told] == ["4", "6", "0"]
    assert all(item["master"] == item["env"] for item in told)


def send(run: RunFolder, name: str) -> None:
    """A signal to the batch script, as Slurm sends it before the time limit."""
    supervisor = int(re.search(r'"pid": (\d+)', (run.path / "local.json").read_text())[1])  # type: ignore[index]
    os.kill(supervisor, signal.Signals[name])


@pytest.mark.parametrize("kind", [functions.Counter, functions.Meeting])
@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGUSR2", marks=pytest.mark.long)])
def test_a_counter_goes_on_where_it_was_after_a_requeue(
    runs: Functions, kind: type[functions.Counter], name: str
) -> None:
    last = 1_000_000 if kind is functions.Meeting else 50
    run = runs.submit(kind(str(runs.folder), last))
    wait_for_count(runs, run)
    send(run, name)
    (runs.folder / "pid").unlink(missing_ok=True)
    wait_for_count(runs, run, attempt=1)
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and outcome.code == 0
    assert outcome.reason == (
        "rank 0 checkpointed the function; the job is requeued (3 more timeouts allowed)"
    )
    assert not [path for path in run.submitted_pickle.parent.glob("*.result.pkl")]
    if kind is functions.Meeting:
        runs.vjob("cancel", "--now", run.name)
        return
    (runs.folder / "go").touch()
    assert runs.wait(run)["verdict"] == "COMPLETED", runs.vjob.explain(run)
    for rank in range(4):
        kind_of, told = read_result(run, rank)
        assert kind_of == "success" and told["count"] == 50 and told["saves"] == 1
        assert told["begin"] > 0


def test_a_timeout_counts_and_the_last_one_is_an_error(runs: Functions) -> None:
    runs.timeout_min, runs.num_timeouts = 1, 0
    run = runs.submit(functions.Counter(str(runs.folder), 50))
    wait_for_count(runs, run)
    send(run, "SIGUSR1")
    record = runs.wait(run)
    assert "Job not requeued because: timed-out too many times." in record["message"]
    kind, text = read_result(run, 0)
    assert kind == "error" and "UncompletedJobError: Job not requeued because" in text


def test_without_requeue_in_the_conf_the_error_names_the_key(runs: Functions) -> None:
    run = runs.submit(functions.Counter(str(runs.folder), 50), **{"cluster.requeue": "false"})
    wait_for_count(runs, run)
    send(run, "SIGUSR1")
    assert "cluster.requeue is false; set it to true, " in runs.wait(run)["message"]


@pytest.mark.parametrize("hetero", ["hetjob", "split"])
def test_cancel_checkpoints_and_requeues_nothing(runs: Functions, hetero: str) -> None:
    options = {"cluster.nodes": HET, "cluster.hetero": hetero, "cluster.requeue": "false"}
    run = runs.submit(functions.Counter(str(runs.folder), 50), **options)
    wait_for_count(runs, run)
    before = run.submitted_pickle.read_bytes()
    said = runs.vjob("cancel", run.name).stdout
    assert "asking" in said and "saved and left" in said
    record = runs.wait(run)
    assert record["verdict"] == "CANCELLED" and not run.attempt(1).path.exists()
    assert record["message"] == (
        "cancelled with vjob cancel: rank 0 checkpointed the function and left"
    )
    assert run.submitted_pickle.read_bytes() != before


def test_cancel_of_a_function_without_checkpoint_ends_it(runs: Functions) -> None:
    run = runs.submit(functions.fail_on, 9, "")
    wait_for(lambda: read_out(run).count("here") == 4, 30, lambda: runs.vjob.explain(run))
    assert "is cancelled" in runs.vjob("cancel", run.name).stdout


def test_a_scheduler_that_ends_the_job_leaves_time_to_checkpoint(runs: Functions) -> None:
    run = runs.submit(functions.Counter(str(runs.folder), 50))
    wait_for_count(runs, run)
    before = run.submitted_pickle.read_bytes()
    runs.vjob("cancel", "--now", run.name)
    assert runs.wait(run)["verdict"] == "CANCELLED"
    assert run.submitted_pickle.read_bytes() != before


def test_a_child_of_rank_0_saves_nothing_and_ends_with_it(runs: Functions) -> None:
    run = runs.submit(functions.Forking(str(runs.folder), 50))
    wait_for_count(runs, run)
    child = int((runs.folder / "child.0").read_text())
    runs.vjob("cancel", "--now", run.name)
    runs.wait(run)
    out = read_rank(run, 0)
    assert out.count("Calling checkpoint method") == 1
    assert not is_running(child)
    assert "left behind" not in run.scheduler_log().read_text()


def test_a_failing_rank_spoils_no_state(runs: Functions) -> None:
    """Rank 0 is ended because another failed: what it would save may be half a step."""
    run = runs.submit(functions.Counter(str(runs.folder), 50))
    wait_for_count(runs, run)
    before = run.submitted_pickle.read_bytes()
    victim = find_rank(run, 3)
    os.kill(victim, signal.SIGKILL)
    record = runs.wait(run)
    assert "rank 3 on local1 was ended by SIGKILL" in record["message"]
    assert run.submitted_pickle.read_bytes() == before


def find_rank(run: RunFolder, rank: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                env = (entry / "environ").read_bytes()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            marks = (f"VJOB_RUN={run.path}\0", f"\0RANK={rank}\0")
            if b"function.pyz" in words and all(mark.encode() in env for mark in marks):
                return int(entry.name)
    raise AssertionError(f"no rank {rank}")


def test_another_python_is_refused_before_it_unpickles(runs: Functions) -> None:
    def spoil(run: RunFolder) -> None:
        text = run.function_facts.read_text()
        run.function_facts.write_text(re.sub(r'"python": "[^"]+"', '"python": "3.99"', text))

    runs.spoil = spoil
    run = runs.submit(functions.describe_rank)
    message = runs.wait(run)["message"]
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"describe_rank was pickled by Python 3.99, and Python {here} (" in message
    assert "set program.python to a Python 3.99" in message


@pytest.mark.parametrize("missing", ["submitit", "cloudpickle"])
def test_a_python_without_submitit_says_what_to_install(runs: Functions, missing: str) -> None:
    broken = runs.folder / "broken" / missing
    broken.mkdir(parents=True)
    lacks = f"raise ModuleNotFoundError(\"No module named '{missing}'\")\n"
    (broken / "__init__.py").write_text(lacks)
    run = runs.submit(
        functions.describe_rank, conf=CONF.replace("PYTHONPATH: ", f"PYTHONPATH: {broken.parent}:")
    )
    message = runs.wait(run)["message"]
    assert f"ModuleNotFoundError: No module named '{missing}'" in message
    assert "change program.python" in message
    results = [rank for rank in range(4) if run.result_pickle(rank).exists()]
    kind, text = read_result(run, results[0])
    assert kind == "error" and "needs submitit and cloudpickle in the Python of its ranks" in text
    assert "Traceback" not in text


def test_a_module_that_the_node_lacks_is_named(runs: Functions) -> None:
    """The function is pickled by reference, and its module is not there on the nodes."""
    run = runs.submit(
        functions.describe_rank,
        conf=CONF.split("env:")[0].replace("count: 2, ranks: 2", "ranks: 1"),
    )
    message = runs.wait(run)["message"]
    assert "ModuleNotFoundError: No module named 'tests'; describe_rank cannot be unpickled" in (
        message
    )
    kind, text = read_result(run, 0)
    assert kind == "error" and text.startswith("ModuleNotFoundError: No module named 'tests'")


def test_a_resolved_conf_names_a_function_and_does_not_hold_it(runs: Functions) -> None:
    run = runs.submit(functions.describe_rank)
    runs.wait(run)
    conf = str(run.resolved)
    for words in (["submit", conf], ["submit", conf, "--dry-run"]):
        said = runs.vjob(*words, code=2).stderr
        assert "a function is submitted from Python: docs/python.md" in said
    with pytest.raises(InputError, match="from Python"):
        submit(resolve_conf(run.resolved, []))


def test_a_restart_in_the_same_job_begins_with_the_last_state(runs: Functions) -> None:
    """It was requeued with a state before; the state outlives what comes of the next attempt."""
    run = runs.submit(functions.Counter(str(runs.folder), 50), **{"cluster.restarts": 1})
    wait_for_count(runs, run)
    send(run, "SIGUSR1")
    wait_for_count(runs, run, attempt=1)
    os.kill(find_rank(run, 3), signal.SIGKILL)
    wait_for_count(runs, run, attempt=2)
    (runs.folder / "go").touch()
    assert runs.wait(run)["verdict"] == "COMPLETED", runs.vjob.explain(run)
    for rank in range(4):
        kind, told = read_result(run, rank)
        assert kind == "success" and told["begin"] > 0 and told["saves"] == 1
