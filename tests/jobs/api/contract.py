"""What vjob uses of submitit, held against the installed release; a module to be run, too.

Imports neither pytest nor vjob: it runs in a venv that has submitit alone.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import submitit
from submitit.core import core, job_environment, logger, plugins, utils

PARAMETERS: dict[Callable[..., Any], str] = {
    # What vjob calls.
    submitit.AutoExecutor.__init__: "self folder cluster kwargs",
    core.PicklingExecutor.__init__: "self folder max_num_timeout max_pickle_size_gb",
    core.PicklingExecutor._submit_command: "self command",
    core.PicklingExecutor._throttle: "self",
    core.InfoWatcher.__init__: "self delay_s",
    core.InfoWatcher.register_job: "self job_id",
    core.Job.__init__: "self folder job_id tasks",
    core.Job.task: "self task_id",
    utils.JobPaths.__init__: "self folder job_id task_id",
    utils.JobPaths.get_first_id_independent_folder: "folder",
    utils.DelayedSubmission.__init__: "self function args kwargs",
    utils.DelayedSubmission.set_timeout: "self timeout_min max_num_timeout",
    utils.DelayedSubmission.load: "filepath",
    utils.DelayedSubmission.result: "self",
    utils.DelayedSubmission._checkpoint_function: "self",
    job_environment.SignalHandler.__init__: "self env job_paths delayed",
    job_environment.SignalHandler.has_timed_out: "self",
    job_environment.JobEnvironment._usr_sig: "",
    logger.get_logger: "",
    # What vjob overrides.
    core.Executor.submit: "self fn args kwargs",
    core.Executor.affinity: "",
    core.Executor._valid_parameters: "",
    core.Executor._internal_update_parameters: "self kwargs",
    core.PicklingExecutor._internal_process_submissions: "self delayed_submissions",
    core.PicklingExecutor._make_submission_file_text: "self command uid",
    core.PicklingExecutor._make_submission_command: "self submission_file_path",
    core.PicklingExecutor._get_job_id_from_submission_command: "string",
    core.PicklingExecutor._num_tasks: "self",
    core.InfoWatcher.get_state: "self job_id mode",
    core.InfoWatcher.get_info: "self job_id mode",
    core.InfoWatcher.is_done: "self job_id mode",
    core.InfoWatcher.update_if_long_enough: "self mode",
    core.InfoWatcher.update: "self",
    core.Job._register_in_watcher: "self",
    core.Job.done: "self force_check",
    core.Job.wait: "self",
    core.Job.cancel: "self check",
    core.Job.results: "self",
    core.Job.exception: "self",
    core.Job._get_logs_string: "self name",
    core.Job.__getstate__: "self",
    utils.JobPaths.move_temporary_file: "self tmp_path name keep_as_symlink",
    job_environment.JobEnvironment.activated: "self",
    job_environment.JobEnvironment._handle_signals: "self paths submission",
    job_environment.JobEnvironment._requeue: "self countdown",
    job_environment.SignalHandler.checkpoint_and_try_requeue: "self signum frame",
    submitit.helpers.TorchDistributedEnvironment.export: (
        "self set_cuda_visible_devices overwrite"
    ),
}
PROPERTIES: dict[type, str] = {
    core.Job: "job_id paths num_tasks task_id state",
    utils.JobPaths: ("folder submission_file submitted_pickle result_pickle stdout stderr"),
    job_environment.JobEnvironment: (
        "paths hostname hostnames job_id raw_job_id array_job_id array_task_id num_tasks num_nodes "
        "node global_rank local_rank"
    ),
}
SHARED = {
    "name": str,
    "timeout_min": int,
    "mem_gb": float,
    "nodes": int,
    "cpus_per_task": int,
    "gpus_per_node": int,
    "tasks_per_node": int,
    "stderr_to_stdout": bool,
}


def find_breaches() -> list[str]:
    """A sentence for each thing that is not as vjob takes it to be."""
    found = []
    for function, wanted in PARAMETERS.items():
        names = " ".join(inspect.signature(function).parameters)
        if names != wanted:
            found.append(f"{function.__qualname__} takes ({names}), not ({wanted})")
    for owner, words in PROPERTIES.items():
        for name in words.split():
            if not isinstance(inspect.getattr_static(owner, name, None), property):
                found.append(f"{owner.__name__}.{name} is no property")
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            found.append(f"{check.__name__[6:].replace('_', ' ')}: {error!r}")
    return found


class Paths(utils.JobPaths):
    """Writes down what is moved."""

    moved: ClassVar[list[tuple[str, bool]]] = []

    def move_temporary_file(self, tmp_path: Any, name: str, keep_as_symlink: bool = False) -> None:
        self.moved.append((name, keep_as_symlink))
        os.unlink(tmp_path)


class Own(core.Job[Any]):
    """A job of the executor below."""

    watcher = core.InfoWatcher()

    def __init__(self, folder: Any, job_id: str, tasks: Any = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = Paths(folder, job_id, self.task_id)


class Executor(core.PicklingExecutor):
    """Submits nothing; its command prints an id, or fails."""

    job_class = Own

    def __init__(self, folder: Any, code: str = "print('id 7')") -> None:
        super().__init__(folder)
        self.command = [sys.executable, "-c", code]
        self.asked: list[Any] = []

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        self.asked.append(("text", command))
        return "the script"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self.asked.append(("command", Path(submission_file_path).read_text()))
        return self.command

    @staticmethod
    def _get_job_id_from_submission_command(string: Any) -> str:
        return str(string).split()[-1]

    def _num_tasks(self) -> int:
        return 2

    def _internal_process_submissions(self, delayed_submissions: Any) -> list[Any]:
        self.asked.append(("submissions", [one.args for one in delayed_submissions]))
        return [Own(self.folder, f"8_{number}") for number, _ in enumerate(delayed_submissions)]


def check_a_submission_calls_the_hooks_in_this_order() -> None:
    with tempfile.TemporaryDirectory() as folder:
        executor = Executor(folder)
        Paths.moved.clear()
        job = executor._submit_command("words")
        assert executor.asked == [("text", "words"), ("command", "the script")], executor.asked
        assert (job.job_id, job._tasks, len(job._sub_jobs)) == ("7", (0, 1), 2)
        assert job.task(1).task_id == 1 and job.task_id is None
        assert Paths.moved == [("submission_file", True)], Paths.moved
        assert list(Path(folder).iterdir()) == []


def check_a_failed_command_has_its_output_in_the_cause() -> None:
    code = "import sys; print('out'); print('why', file=sys.stderr); sys.exit(3)"
    with tempfile.TemporaryDirectory() as folder:
        executor = Executor(folder, code)
        try:
            executor._submit_command("words")
        except utils.FailedJobError as error:
            cause = error.__cause__
            assert isinstance(cause, subprocess.CalledProcessError)
            assert (cause.returncode, cause.output, cause.stderr) == (3, "out", "why")
        else:
            raise AssertionError("it did not fail")
    assert issubclass(utils.FailedJobError, utils.UncompletedJobError)


def check_functions_arrays_and_batches_come_as_submissions() -> None:
    executor = Executor("/nowhere")
    executor.submit(print, 1)
    executor.map_array(print, [1, 2], [3, 4])
    executor.submit_array([print])
    with executor.batch():
        job = executor.submit(print, 5)
    assert executor.asked == [
        ("submissions", [(1,)]),
        ("submissions", [(1, 3), (2, 4)]),
        ("submissions", [()]),
        ("submissions", [(5,)]),
    ], executor.asked
    assert type(job) is Own and job.job_id == "8_0"
    assert executor.folder == Path("/nowhere") and executor.parameters == {}
    assert executor._throttling > 0 and executor._last_job_submitted == 0.0


def check_the_shared_parameters_are_these() -> None:
    assert submitit.AutoExecutor._typed_parameters() == SHARED


def check_a_watcher_keeps_these_fields() -> None:
    watcher = core.InfoWatcher(30)
    watcher.register_job("7")
    assert (watcher._delay_s, watcher._registered, watcher._finished) == (30, {"7"}, set())
    assert (watcher._info_dict, watcher._num_calls, watcher.num_calls) == ({}, 0, 0)
    assert watcher._start_time > 0 and watcher._last_status_check == float("-inf")


def check_a_watcher_updates_when_it_is_asked() -> None:
    class Watcher(core.InfoWatcher):
        calls = 0

        def update(self) -> None:
            self.calls += 1
            self._last_status_check = __import__("time").time()

    watcher = Watcher(30)
    for mode, calls in (("cache", 0), ("standard", 1), ("standard", 1)):
        watcher.get_info("7", mode)
        assert watcher.calls == calls, (mode, watcher.calls)


def check_a_submission_has_these_fields() -> None:
    class Saving:
        def __call__(self, number: int) -> int:
            return number

        def checkpoint(self, number: int) -> utils.DelayedSubmission:
            return utils.DelayedSubmission(self, number + 1)

    delayed = utils.DelayedSubmission(Saving(), 4)
    delayed.set_timeout(60, 3)
    assert (delayed._timeout_min, delayed._timeout_countdown) == (60, 3)
    assert (delayed.args, delayed.kwargs, delayed.result()) == ((4,), {}, 4)
    again = delayed._checkpoint_function()
    assert again is not None and again.args == (5,)


def check_a_signal_handler_keeps_these_fields() -> None:
    env, paths = object(), utils.JobPaths("/nowhere", "7", 0)
    delayed = utils.DelayedSubmission(print)
    delayed.set_timeout(60, 3)
    handler = job_environment.SignalHandler(env, paths, delayed)  # type: ignore[arg-type]
    assert (handler.env, handler._job_paths, handler._delayed) == (env, paths, delayed)
    assert handler._logger is logger.get_logger() and handler.has_timed_out() is False


def check_a_folder_with_a_pattern_has_a_part_without() -> None:
    folder = utils.JobPaths.get_first_id_independent_folder("/a/b/%j/c")
    assert folder == Path("/a/b")
    assert utils.JobPaths("/a", "7", 2).task_id == 2 and utils.JobPaths("/a")._folder == Path("/a")


def check_an_environment_is_read_by_its_table() -> None:
    class OwnJobEnvironment(job_environment.JobEnvironment):
        _env: ClassVar[dict[str, str]] = {
            "job_id": "A_JOB",
            "num_tasks": "A_WORLD",
            "global_rank": "A_RANK",
        }

    os.environ.update({"A_JOB": "7", "A_WORLD": "4", "A_RANK": "3"})
    env = OwnJobEnvironment()
    assert (env.name(), env.job_id, env.num_tasks, env.global_rank) == ("own", "7", 4, 3)


def check_torch_finds_its_place_by_the_environment() -> None:
    class Env:
        hostnames = ("first", "second")
        job_id, global_rank, num_tasks, local_rank, num_nodes = "7", 3, 4, 1, 2

    found = plugins.get_job_environment
    plugins.get_job_environment = Env  # type: ignore[assignment]  # as a rank does
    try:
        torch = submitit.helpers.TorchDistributedEnvironment()
    finally:
        plugins.get_job_environment = found
    place = (torch.master_addr, torch.rank, torch.world_size, torch.local_rank)
    assert place == ("first", 3, 4, 1) and torch.local_world_size == 2 and torch.master_port > 0


def check_plugins_are_found_by_these_entry_points() -> None:
    source = inspect.getsource(plugins)
    assert all(word in source for word in ('"submitit"', '"executor"', '"job_environment"'))
    assert {"slurm", "local", "debug"} <= set(plugins.get_executors())


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    breaches = find_breaches()
    print("\n".join(breaches) or f"submitit {submitit.__version__} is as vjob takes it to be")
    sys.exit(1 if breaches else 0)
