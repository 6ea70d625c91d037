"""Supervisor of one local job, in the place of slurmd on a cluster.

    python -m vjob.jobs.schedulers.local.supervisor RUN JOB [GROUP]

The supervisor waits until the state files of the jobs that must end first show their end. Then it
runs the batch script with stand-ins for srun and scontrol first on PATH, passes signals on,
enforces the time limit, runs the script again after `scontrol requeue`, and writes its state
atomically.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from varuna_core.agent.setup.site import STOPPED, host_name
from varuna_core.agent.setup.world import STAND_INS
from varuna_core.launch.process import local_environment
from varuna_core.launch.ssh import keep_ssh_agent
from varuna_core.records.files import (
    NO_ROOM,
    read_json,
    reserve,
    write_atomic,
    write_json,
    write_reserved,
)
from varuna_core.records.machine import identify_machine, start_time
from varuna_core.records.morphing import add_joins, read_joins
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.record import is_cancel_asked
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers.local.scheduler import (
    find_failed,
    is_waiting,
    read_limits,
    read_machines,
    state_file,
)
from vjob.jobs.schedulers.local.srun import NODE_NAME, OFFSET

MARGIN_S = 10.0
"""Seconds that the stand-in for srun waits beyond the agents' grace before SIGKILL; the supervisor
waits as long again."""

WAIT_S = 0.5
"""Seconds between two polls of the jobs that must end first, or for free disk space."""
ROOM_S = 20.0
"""Most seconds to wait for disk space before the first state is written: less than START_S, after
which a job without a state counts as never started."""
MORE_ROOM_S = 600.0
"""Most seconds to wait for disk space before each later state is written."""

NOT_EXECUTABLE = 126
"""Exit code of a job whose stand-ins cannot be executed; a shell uses the same code."""
RESERVE_BYTES = 4096
"""Bytes reserved for the final state, in case the disk becomes full."""

STEP = "vjob.jobs.schedulers.local.srun"
WATCHED_LIST = "varuna_core.launch.watch"
"""Module that replaces srun on a list of machines if the run may morph."""
FIXED_LIST = "varuna_core.launch.step"
"""Module that replaces srun on a list of machines if the run may not morph."""


class LocalJob:
    """One local job from start to end."""

    def __init__(self, run: RunFolder, job: str, group: str | None, plan: Plan) -> None:
        self.run = run
        self.job = job
        self.group = group
        self.plan = plan
        self.restarts = 0
        self.asked: str | None = None
        """CANCELLED or TIMEOUT once the job has been asked to end; else None."""
        self.reason = ""
        """Why the job waits or did not start."""
        self.child: subprocess.Popen[bytes] | None = None
        self.warn_at = self.deadline = float("inf")
        """Times of time.monotonic() at which the batch script is warned and ended."""
        self.limits = read_limits(run, group)
        self._has_begun = False
        self._tools: Path | None = None
        self.kill_wait_s = plan.timing.grace_s + 2 * MARGIN_S
        if plan.machine_list is not None:
            # Agents are let go, then killed, and a machine that is lost has its own time to end.
            self.kill_wait_s = 2 * plan.timing.grace_s + 6 * MARGIN_S

    def main(self) -> int:
        """Run the batch script, again for each requeue that is requested; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._cancel)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._wait_for_others()
        code = 128 + signal.SIGTERM
        if self.asked is None and self.plan.machine_list is not None:
            write_atomic(self.run.master_pid, f"{os.getpid()}\n")
        while self.asked is None:
            code = self._run_once()
            if self.asked or not self._requeue_marker.exists():
                break
            self._requeue_marker.unlink()
            self.restarts += 1
        self.write_state(self.name_end(code), exit_code=f"{code}:0")
        return code

    def name_end(self, code: int) -> str:
        """Return the final state of a job whose batch script exited with `code`."""
        if self.asked is None and code == STOPPED and is_cancel_asked(self.run):
            return "CANCELLED"
        return self.asked or ("COMPLETED" if code == 0 else "FAILED")

    def _wait_for_others(self) -> None:
        """Wait until the job may start or is cancelled, by a user or because a job that it waits
        for failed."""
        state = read_json(state_file(self.run, self.group))
        after = state.get("after", {}) if isinstance(state, dict) else {}
        if is_waiting(after):
            self.reason = "Dependency"
            self.write_state("PENDING")
        while self.asked is None and is_waiting(after):
            time.sleep(WAIT_S)
        failed = find_failed(after)
        self.reason = ""
        if self.asked is None and failed:
            self.asked = "CANCELLED"
            self.reason = f"{failed}, which this job waited for, did not end well"

    @property
    def _requeue_marker(self) -> Path:
        return self.run.path / f"local-requeue.{self.job}"

    def _run_once(self) -> int:
        self.write_state("RUNNING")
        try:
            env = self.build_environment()
        except VjobError as error:
            print(f"vjob: {error}", file=sys.stderr, flush=True)
            self.reason = str(error)
            return NOT_EXECUTABLE
        self.child = process.start(self.build_command(), env=env)
        if self.asked:  # between the last look and the start
            self.send(signal.SIGTERM)
        self.set_limits()
        killed_at: float | None = None
        while True:
            try:
                code = self.child.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if now > self.warn_at:
                    self.warn()
                self.look(now)
                if self.asked and killed_at is None:
                    killed_at = now + self.kill_wait_s
                if killed_at is not None and now > killed_at:
                    self.kill_group()
        self.end_rest(self.child.pid)
        return 128 - code if code < 0 else code

    def build_command(self) -> list[str]:
        return ["bash", str(self.run.batch_script(self.group))]

    def set_limits(self) -> None:
        """Set `warn_at` and `deadline` for a batch script that starts now."""
        if self.limits.walltime_s is not None:
            self.deadline = time.monotonic() + self.limits.walltime_s
            self.warn_at = (
                self.deadline - self.limits.warn_s if self.limits.warn_s else self.warn_at
            )

    def warn(self) -> None:
        """Send the batch script SIGUSR1, since the time limit is near."""
        self.warn_at = float("inf")
        self.send(signal.SIGUSR1)

    def look(self, now: float) -> None:
        """End the job once its time limit is over; called each second."""
        if self.asked is None and now > self.deadline:
            self.asked = "TIMEOUT"
            self.send(signal.SIGTERM)

    def end_rest(self, group: int) -> None:
        """End processes that the batch script left behind, since no rank may outlive the job."""
        deadline = time.monotonic() + self.kill_wait_s
        number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(group, number)
                time.sleep(0.2)
                number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGCONT

    def build_environment(self) -> dict[str, str]:
        """Return the batch script's environment, with those variables of Slurm's that vjob's
        scripts read."""
        groups = [g for g in self.plan.groups if self.group in (None, g.name)]
        self._make_tools()
        names = [
            [self._name_node(group.first_node + i) for i in range(group.count)] for group in groups
        ]
        env = {
            **local_environment(os.environ),
            "SLURM_JOB_ID": self.job,
            "SLURM_JOB_NAME": self.plan.name,
            "SLURM_JOB_NODELIST": ",".join(names[0]),
            "SLURM_JOB_NUM_NODES": str(len(names[0])),
            "VJOB_LOCAL_FIRST_NODE": str(groups[0].first_node),
            "VJOB_LOCAL_KILL_WAIT_S": str(self.plan.timing.grace_s + MARGIN_S),
            "VJOB_LOCAL_REQUEUE": str(self._requeue_marker),
        }
        env["PATH"] = f"{self._tools}{os.pathsep}{env['PATH']}"
        if self.plan.num_nodes == 1 and not self.plan.morph and self.plan.machine_list is None:
            env[NODE_NAME] = self._name_node(0)
        if self.restarts:
            env["SLURM_RESTART_COUNT"] = str(self.restarts)
        if self.plan.machine_list is not None:
            env["SLURM_JOB_NUM_NODES"] = str(self._count_machines())
            env.update(keep_ssh_agent(os.environ))
        elif len(names) > 1:
            env["SLURM_HET_SIZE"] = str(len(names))
            for number, nodes in enumerate(names):
                env[f"{OFFSET}{number}"] = str(groups[number].first_node)
                env[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"] = ",".join(nodes)
        return env

    def _name_node(self, index: int) -> str:
        return host_name(self.plan, index, {}, os.uname().nodename)

    def _count_machines(self) -> int:
        """Return the number of machines that the run waits for at its start."""
        if not self.plan.morph:
            return self.plan.num_nodes
        try:
            return len(read_machines(self.plan.machine_list or ""))
        except VjobError as error:
            print(f"vjob: {error}", file=sys.stderr, flush=True)
            return self.plan.num_nodes

    def _make_tools(self) -> None:
        """Make the folder with the stand-ins where programs may be executed; otherwise the batch
        script would find the real srun further down PATH."""
        for above in (self.run.path, Path(tempfile.gettempdir())):
            self.remove_tools()
            self._tools = Path(tempfile.mkdtemp(prefix=f"{STAND_INS}{self.job}.", dir=above))
            self._fill_tools(self._tools)
            if os.access(self._tools / "srun", os.X_OK):
                return
        raise VjobError(
            f"programs cannot be executed in {self.run.path} or {above} (mounted noexec): set "
            "log_folder or TMPDIR to a folder that allows it"
        )

    def remove_tools(self) -> None:
        """Remove the stand-ins for srun and scontrol."""
        if self._tools is not None:
            shutil.rmtree(self._tools, ignore_errors=True)

    def _fill_tools(self, folder: Path) -> None:
        for name in ("srun", "scontrol"):
            module = STEP
            if name == "srun" and self.plan.machine_list is not None:
                module = WATCHED_LIST if self.plan.morph else FIXED_LIST
            words = process.build_own_command("-m", module, name)
            text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
            write_atomic(folder / name, text, mode=0o700)

    def write_state(self, word: str, exit_code: str = "") -> None:
        pid = os.getpid()
        state = {
            **asdict(self.limits),
            "job": self.job,
            "state": word,
            "pid": pid,
            "pid_start": start_time(pid),
            "machine": identify_machine(),
            "time": time.time(),
            "restarts": self.restarts,
            "exit_code": exit_code,
            "reason": self.reason,
            "nodes": self.spell_nodes(),
            **self.list_more(),
        }
        path = state_file(self.run, self.group)
        reserved = path.with_suffix(".reserve")
        deadline = time.monotonic() + (MORE_ROOM_S if self._has_begun else ROOM_S)
        while True:
            try:
                write_json(path, state)
                break
            except OSError as error:
                if error.errno not in NO_ROOM or time.monotonic() > deadline:
                    raise
            with contextlib.suppress(OSError):
                write_reserved(reserved, path, state)
                break
            time.sleep(WAIT_S)
        self._has_begun = True
        with contextlib.suppress(OSError):
            if word in ("PENDING", "RUNNING"):
                reserve(reserved, RESERVE_BYTES)
            else:
                reserved.unlink(missing_ok=True)

    def spell_nodes(self) -> str:
        """Return the names of the job's nodes, or the name of the machine list."""
        if self.plan.machine_list is not None:
            return Path(self.plan.machine_list).name
        if self.plan.num_nodes == 1:
            return self._name_node(0)
        groups = [g for g in self.plan.groups if self.group in (None, g.name)]
        return f"local[{groups[0].first_node}-{groups[-1].first_node + groups[-1].count - 1}]"

    def list_more(self) -> dict[str, str]:
        """Return additional fields for the state file."""
        return {}

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or "CANCELLED"
        self.send(signal.SIGTERM)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.send(signal.Signals(number))

    def send(self, number: signal.Signals) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def kill_group(self) -> None:
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)


def main(argv: list[str], kind: type[LocalJob] = LocalJob) -> int:
    """Supervise the job that the command line names; return its exit code."""
    run = RunFolder(Path(argv[0]))
    plan = read_plan(run.plan)
    if plan is None:
        print(f"vjob: {run.plan} cannot be read", file=sys.stderr)
        return 1
    group = argv[2] if len(argv) > 2 and argv[2] else None
    if group is not None:  # perhaps one that joins
        plan = add_joins(plan, read_joins(run.morph))
    job = kind(run, argv[1], group, plan)
    try:
        return job.main()
    finally:
        job.remove_tools()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
