"""submitit's view of a rank: the rank's files, its position in the job, and its signal handlers.

`submitit.JobEnvironment()` finds `VjobJobEnvironment` by the entry point of an installed vjob, or
of `function.pyz` itself, where ranks have no vjob. Signals:

    USR1, USR2  rank 0: checkpoint() ─► function/submitted.pkl ─► stop.json: requeue ─► exit
                        after `vjob cancel`: the same, and the run is over
                others: wait; their agents end them
    TERM        rank 0: checkpoint() ─► function/submitted.pkl ─► exit, where the scheduler said so

submitit's rule decides whether a signal means a timeout, and how many timeouts a function may have.
A rank does not call Slurm: containers lack Slurm, and a requeue would kill unfinished ranks.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from submitit import helpers
from submitit.core import job_environment, logger, utils
from submitit.core.utils import DelayedSubmission, JobPaths

from varuna_core.agent.gpu.accelerator import choose_accelerator
from varuna_core.functions.pickles import write_pickle
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.nodes import read_reports
from varuna_core.records.plan import read_attempt_plan, read_plan
from varuna_core.records.record import is_cancel_asked
from varuna_core.records.requests import LEFT, REQUEUE, read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

MAY_REQUEUE = "VJOB_REQUEUE"
"""Variable set for ranks whose job the batch script may requeue."""
ASKED_TO_END = ("signal", "cancel")
"""Reasons for a stop after which a rank should save; after any other reason a rank has failed."""


class VjobPaths(JobPaths):
    """A run's files under submitit's attribute names; submitit's job folder is the run folder."""

    @property
    def _run(self) -> RunFolder:
        return RunFolder(self._folder)

    @property
    def submission_file(self) -> Path:
        return self._run.batch_script()

    @property
    def submitted_pickle(self) -> Path:
        return self._run.submitted_pickle

    @property
    def result_pickle(self) -> Path:
        return self._run.result_pickle(self.task_id)

    @property
    def stdout(self) -> Path:
        return self._locate_log("out")

    @property
    def stderr(self) -> Path:
        return self._locate_log("err")

    def _locate_log(self, kind: str) -> Path:
        """Return the log of this rank's node in the last attempt, or in attempt 0 if no attempt
        exists yet. Lines of this rank carry its number."""
        run = self._run
        attempts = run.attempts()
        attempt = attempts[-1] if attempts else run.attempt(0)
        plan = read_attempt_plan(run, attempt.number)
        return locate_output(attempt, plan, self.task_id, kind).path


class VjobJobEnvironment(job_environment.JobEnvironment):
    """`submitit.JobEnvironment` for a rank of a function or a script that runs under vjob."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "VJOB_JOB_ID",
        "num_tasks": "WORLD_SIZE",
        "num_nodes": "VJOB_NUM_NODES",
        "node": "NODE_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    def activated(self) -> bool:
        return "VJOB_RUN" in os.environ and os.environ.get("SUBMITIT_EXECUTOR", "") in ("", "vjob")

    @property
    def paths(self) -> VjobPaths:
        return VjobPaths(os.environ["VJOB_RUN"], job_id=self.job_id, task_id=self.global_rank)

    @property
    def array_job_id(self) -> str | None:
        job, line, _ = self.raw_job_id.partition("_")
        return job if line else None

    @property
    def array_task_id(self) -> str | None:
        return self.raw_job_id.partition("_")[2] or None

    @property
    def attempt(self) -> AttemptFolder:
        """Return the files of the current attempt."""
        return RunFolder(Path(os.environ["VJOB_RUN"])).attempt(int(os.environ["VJOB_ATTEMPT"]))

    @property
    def hostnames(self) -> Sequence[str]:
        """Hosts of the nodes, in the order of `node`.

        The first is where the ranks meet, given as an address if its name does not resolve to it.
        """
        run = RunFolder(Path(os.environ["VJOB_RUN"]))
        plan = read_plan(run.plan)
        if plan is not None and plan.scheduler == "local":  # the nodes are all this machine
            hosts = [self.hostname] * self.num_nodes
        else:
            reports = read_reports(self.attempt)
            hosts = [reports[index].host for index in sorted(reports)] or [self.hostname]
        if not _leads_there(hosts[0], is_alone=len(set(hosts)) == 1):
            hosts[0] = os.environ.get("MASTER_ADDR") or hosts[0]
        return hosts

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        Signals(self, paths, submission).listen()

    def _requeue(self, countdown: int) -> None:
        """Request a requeue: the agents end the ranks, then the batch script requeues the job."""
        left = "" if countdown < 0 else f" ({countdown} remaining timeouts)"
        self.leave(REQUEUE, f"rank {self.global_rank} asked for a requeue{left}")

    def leave(self, kind: str, reason: str) -> None:
        """End the attempt without an error, on all nodes."""
        write_stop(self.attempt, kind, 0, reason, rank=self.global_rank)
        logger.get_logger().info("%s", reason)


def _leads_there(host: str, *, is_alone: bool) -> bool:
    """Return True if, as far as this node can tell, other nodes can reach the host by its name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return is_alone or not all(str(item[4][0]).startswith(("127.", "::1")) for item in found)


def export_torch(
    self: helpers.TorchDistributedEnvironment,
    set_cuda_visible_devices: bool = True,
    overwrite: bool = False,
) -> helpers.TorchDistributedEnvironment:
    """Replace `TorchDistributedEnvironment.export` in a rank of a function.

    submitit's own version raises an error if RANK and similar variables are already set, since they
    might belong to another job; here they belong to this job and are kept. submitit also assumes
    equally many ranks on each node, and numbers GPUs from 0 whichever GPUs the rank may see.
    """
    self.master_addr = os.environ["MASTER_ADDR"]
    self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if set_cuda_visible_devices:
        variable = choose_accelerator().visible_variable
        seen = [name for name in os.environ.get(variable, "").split(",") if name]
        own = seen[self.local_rank : self.local_rank + 1] or [str(self.local_rank)]
        os.environ[variable] = own[0]
    return self


class Left(SystemExit):
    """Raised in a function to end its rank after the state was saved."""


class Signals(job_environment.SignalHandler):
    """Signal handlers of one rank, from `listen` to the end of its function."""

    def __init__(
        self, env: VjobJobEnvironment, paths: JobPaths, submission: DelayedSubmission
    ) -> None:
        super().__init__(env, paths, submission)
        self.vjob_env = env
        self.exit_code: int | None = None
        """Exit code of a rank that raised `Left`, even if its function catches the exception."""
        self._is_leaving = False
        self._pid = os.getpid()
        function = submission.function
        self._can_save = any(
            hasattr(function, name) for name in ("checkpoint", "__submitit_checkpoint__")
        )

    def listen(self) -> None:
        """Install the handlers.

        Without a checkpoint(), the rank handles only USR2, and TERM ends the rank at once: `vjob
        cancel` asks only ranks that handle USR1 to save, and waits for them.
        """
        calls = {self.vjob_env._usr_sig()}
        if self._can_save:
            calls |= {signal.SIGUSR1, signal.SIGUSR2}
            if self.vjob_env.global_rank == 0:
                signal.signal(signal.SIGTERM, self.save_and_end)
        for number in calls:
            signal.signal(number, self.checkpoint_and_try_requeue)

    def finish(self) -> None:
        """Ignore further signals: the function has ended, and its result is being written."""
        self._is_leaving = True

    def checkpoint_and_try_requeue(self, signum: int, frame: Any = None) -> None:
        """Save and request a requeue; after a cancel by the user, save and end."""
        if os.getpid() != self._pid or self._is_leaving:
            return
        rank = self.vjob_env.global_rank
        if rank != 0:
            self._logger.info("rank %d leaves the checkpoint to rank 0", rank)
            return
        self._is_leaving = True
        try:
            if is_cancel_asked(RunFolder(Path(os.environ["VJOB_RUN"]))):
                reason = self._save(self._delayed._timeout_countdown)
                self.vjob_env.leave(LEFT, reason or "rank 0 checkpointed the function and left")
            else:
                self._try_requeue()
        except BaseException:
            self._is_leaving = False
            raise
        self._leave(0)

    def save_and_end(self, signum: int, frame: Any = None) -> None:
        """Save without a requeue: the scheduler that ends the job decides about a restart."""
        if os.getpid() != self._pid:  # a child that was forked from us, such as a data loader
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if self._is_leaving:
            return
        self._is_leaving = True
        stop = read_stop(self.vjob_env.attempt)
        if stop is None or stop.get("kind") in ASKED_TO_END:
            self._save(self._delayed._timeout_countdown)
        self._leave(128 + signum)

    def _try_requeue(self) -> None:
        timed_out = self.has_timed_out()
        countdown = self._delayed._timeout_countdown - timed_out
        refusal = ""
        if self._can_save:
            refusal = self._save(countdown)
        elif timed_out:
            refusal = "timed-out and not checkpointable"
        if countdown < 0:
            refusal = "timed-out too many times"
        elif not refusal and MAY_REQUEUE not in os.environ:
            refusal = "cluster.requeue is false; set it to true, and no cluster.hetero: split"
        if refusal:
            raise utils.UncompletedJobError(f"Job not requeued because: {refusal}.")
        saved = "checkpointed the function" if self._can_save else "starts from the beginning"
        times = f"{countdown} more timeout{'' if countdown == 1 else 's'}"
        self.vjob_env.leave(REQUEUE, f"rank 0 {saved}; the job is requeued ({times} allowed)")

    def _save(self, countdown: int) -> str:
        """Write the function with its new state; return the reason if it is not, else ""."""
        self._logger.info("Calling checkpoint method.")
        saved = self._delayed._checkpoint_function()
        if saved is None:
            return "checkpoint function returned None"
        saved.set_timeout(self._delayed._timeout_min, countdown)
        write_pickle(self._job_paths.submitted_pickle, saved)
        return ""

    def _leave(self, code: int) -> None:
        self.exit_code = code
        raise Left(code)
