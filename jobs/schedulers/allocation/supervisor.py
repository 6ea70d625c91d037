"""Supervisor of a run inside a Slurm job.

    python -m vjob.jobs.schedulers.allocation.supervisor RUN JOB

The supervisor runs the batch script as a step on the job's first node, where sbatch would run it:

    supervisor ─► srun (first node, takes nothing) ─► batch.sh ─► srun (all nodes) ─► agents

A cancel ends only these two steps of the job. Slurm enforces the job's time limit; if the job ends
before the run, Slurm is asked how the job ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid

from varuna_core.agent.meeting.link import call_hub
from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import Value
from varuna_core.records.files import is_listed
from varuna_core.records.formatting import fold_names
from varuna_core.records.machine import clean_environment
from varuna_core.records.plan import Plan
from varuna_core.records.requests import write_signal, write_stop
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers.allocation.held_job import ask_held_job
from vjob.jobs.schedulers.allocation.scheduler import cancel_marker, name_allocation
from vjob.jobs.schedulers.base import FLOOR_S
from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.local.supervisor import MARGIN_S, LocalJob, main
from vjob.jobs.schedulers.slurm.commands import (
    build_scancel_command,
    build_shell_command,
    build_steps_command,
    parse_steps,
)
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

SETTLE_S = 300.0
"""Most seconds to wait for the final state of an ending job, which appears once its nodes are
free."""
ASK_S = 2.0
CANCELLED = 128 + signal.SIGTERM


class AllocationJob(LocalJob):
    """One run inside a job of Slurm, from start to end."""

    within = ""
    """Slurm's state of the enclosing job, if that job ended before the run."""
    _terms_at = float("inf")
    """Time (by time.monotonic()) after which srun gets a signal to end agents that have not
    exited."""

    def __init__(self, run: RunFolder, job: str, group: str | None, plan: Plan) -> None:
        super().__init__(run, job, group, plan)
        self.allocation = name_allocation(job)
        self._parts = [part.info for part in ask_held_job(self.allocation, floor_s=FLOOR_S)]
        counts = [group.count for group in plan.groups]
        self._nodes = [info.nodes[:count] for info, count in zip(self._parts, counts, strict=False)]

    def build_command(self) -> list[str]:
        """Return the command that runs the batch script on the run's first node."""
        script = [*super().build_command()]
        tool, *words = build_shell_command(self._parts[0], self._nodes[0][0], "", script, tty=False)
        name = f"--job-name={self.run.name}.batch"
        return [tool, name, "--input=/dev/null", "--unbuffered", *words]

    def build_environment(self) -> dict[str, str]:
        return {**clean_environment(os.environ), "VJOB_JOB_ID": self.job}

    def set_limits(self) -> None:
        left = SlurmScheduler().ask_time_left(self.allocation) if self.limits.warn_s else None
        if isinstance(left, Value):
            self.warn_at = time.monotonic() + left.value - self.limits.warn_s

    def warn(self) -> None:
        """Send the ranks the signal that warns of the job's time limit. The limit is read again
        first, and no signal is sent if somebody has extended it since the warning was scheduled."""
        self.set_limits()
        if self.warn_at < time.monotonic() + MARGIN_S:
            super().warn()

    def look(self, now: float) -> None:
        """Check for the file by which another host cancels; signal, through srun, agents that have
        not exited in time."""
        if self.asked is None and is_listed(cancel_marker(self.run, self.job)):
            self.asked = "CANCELLED"
            self.send(signal.SIGTERM)
        elif now > self._terms_at:
            self._terms_at = now + MARGIN_S
            super().send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks by a file: srun would signal their child processes too."""
        attempts = self.run.attempts()
        if number in (signal.SIGUSR1, signal.SIGUSR2) and attempts:
            write_signal(attempts[-1], number.name, f"supervisor-{uuid.uuid4().hex}")
        elif attempts and self._terms_at == float("inf"):
            # srun gives ranks Slurm's KillWait, agents the conf's grace_s.
            cause = EndCause.CANCELLED
            write_stop(attempts[-1], "cancel", CANCELLED, "cancelled", cause=cause)
            self._terms_at = time.monotonic() + self.plan.timing.grace_s + MARGIN_S
        else:
            super().send(number)
            return
        call_hub(attempts[-1].link)

    def kill_group(self) -> None:
        """Kill the batch script and the run's steps, whose processes are not children of this
        process."""
        env, names = clean_environment(os.environ), (self.run.name, f"{self.run.name}.batch")
        with contextlib.suppress(VjobError):
            text = process.run(build_steps_command(self.allocation), env=env).out
            for step in parse_steps(text, names):
                process.run(build_scancel_command(step), env=env)
        super().kill_group()

    def name_end(self, code: int) -> str:
        word = super().name_end(code)
        if word != "COMPLETED":
            info = self._settle()
            self.within = "" if info is None else info.native_word
        return word

    def _settle(self) -> SchedulerJob | None:
        """Wait for and return the end of the enclosing job; None if the job still runs or Slurm
        does not tell."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(VjobError):
                now = {self.allocation: time.time()}
                info = next(
                    iter(SlurmScheduler().poll(list(now), after=now)[self.allocation]), None
                )
                if info is None or info.state is JobState.RUNNING:
                    return None
                if info.state in OVER:
                    return info
            time.sleep(ASK_S)
        return None

    def spell_nodes(self) -> str:
        return ",".join(fold_names(names) for names in self._nodes)

    def list_more(self) -> dict[str, str]:
        return {"within": self.within}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], AllocationJob))
