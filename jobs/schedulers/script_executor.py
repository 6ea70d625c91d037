"""Submit batch scripts through submitit's executor, which runs the submit command and reads the job
id.

    batch.sh of the run folder ─► PicklingExecutor._submit_command ─► sbatch, or our own supervisor

Every job of vjob is submitted here. Importing submitit takes a tenth of a second, so only a submit
imports this module.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
from pathlib import Path
from typing import Any

from submitit.core.core import Job, PicklingExecutor
from submitit.core.utils import FailedJobError, JobPaths

from varuna_core.records.files import read_text
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.base import Scheduler, Submission


class ScriptPaths(JobPaths):
    """submitit's paths for a run folder, which already contains its batch script."""

    def move_temporary_file(
        self, tmp_path: Path | str, name: str, keep_as_symlink: bool = False
    ) -> None:
        """Remove submitit's copy of the script; sbatch read the run folder's own."""
        if name != "submission_file":
            super().move_temporary_file(tmp_path, name, keep_as_symlink)
        else:
            os.unlink(tmp_path)


class ScriptJob(Job[None]):
    """Job of submitit of which only the id is used."""

    def __init__(self, folder: Path | str, job_id: str, tasks: tuple[int, ...] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = ScriptPaths(folder, job_id, self.task_id)


class ScriptExecutor(PicklingExecutor):
    """Executor that submits the batch scripts of runs to their scheduler."""

    job_class: type[Job[Any]] = ScriptJob
    _submission: Submission
    _scheduler: Scheduler

    def submit_script(self, submission: Submission, scheduler: str) -> str:
        """Submit a script and return the new job's id; raise UncertainError if the job may exist
        although the submit failed."""
        bound = copy.copy(self)
        bound.folder = submission.run.path
        bound.job_class = ScriptJob  # a run may have several of them
        bound._submission = submission
        bound._scheduler = schedulers.get_scheduler(scheduler)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what we explain
                job = bound._submit_command(str(submission.script))
        except FailedJobError as error:
            raise bound._explain(error) from None
        return str(job.job_id)

    def _explain(self, error: FailedJobError) -> VjobError:
        cause = error.__cause__
        if not isinstance(cause, subprocess.CalledProcessError):
            return self._scheduler.explain_failure(1, str(error))
        said = f"{cause.stderr or ''}\n{cause.output or ''}"
        return self._scheduler.explain_failure(cause.returncode, said)

    # The hooks of a submitit plugin; underscored, and its documented interface all the same.

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return read_text(self._submission.script)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self._scheduler.make_command(self._submission)

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]  # static there
        return self._scheduler.parse_job_id(string if isinstance(string, str) else string.decode())

    def _num_tasks(self) -> int:
        return 1
