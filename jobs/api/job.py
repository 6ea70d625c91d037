"""`VjobJob`: a run as a Python object, submitit's Job with additional methods of vjob.

A job of submitit runs a function whose result is pickled. A run of a script has neither, nothing of
it is unpickled, and its results are None if it succeeded.
"""

from __future__ import annotations

import io
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from submitit.core.core import Job
from submitit.core.utils import FailedJobError, UncompletedJobError

from varuna_core.functions.environment import VjobPaths
from varuna_core.records import record as records
from varuna_core.records.exits import read_exits
from varuna_core.records.files import list_names, open_file, read_text
from varuna_core.records.logs.rank_output import RankOutput, locate_output
from varuna_core.records.plan import read_attempt_plan, read_plan
from varuna_core.records.record import RunRecord, read_record
from varuna_core.records.requests import LEFT, read_stop, write_signal
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.watcher import VjobInfoWatcher
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.cancel import call_agents, cancel_run
from vjob.jobs.runs.find import RunView, is_over, view_run

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import JobConf
    from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
    from vjob.jobs.monitor.stacks.group import Stacks
    from vjob.reports.export.tables import JobTables

R = TypeVar("R", covariant=True)
log = logging.getLogger(__name__)
SAVE_S = 60
"""Seconds that ranks have for a checkpoint after `cancel`."""
LAST_LINES = 40
"""Last lines of a rank's log that an exception shows."""
VERDICT_S = 60.0
"""Seconds to wait, after a rank has failed, until the others have ended and the run has a
verdict."""
LANDING_S = 15.0
"""Seconds to wait until a successful rank's result appears on a slow file system."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A snapshot of a job, and the verdict that the rules give on it."""

    snapshot: Snapshot
    verdict: Verdict
    """The job's health, the reason, and the evidence."""

    def as_dict(self) -> dict[str, Any]:
        """Return the status in the form of `vjob status --json`."""
        import json

        from vjob.jobs.monitor.model.text import render_json

        found: dict[str, Any] = json.loads(render_json(self.snapshot, self.verdict))
        return found

    def __str__(self) -> str:
        """Return the text of `vjob status --once`."""
        from vjob.jobs.monitor.model.text import render

        return render(self.snapshot, self.verdict, all_nodes=False)


class VjobJob(Job[R]):
    """A run: its job or jobs, its ranks, its files.

    `task(rank)` returns one rank of the run, with the same interface.
    """

    watcher = VjobInfoWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self.run = RunFolder(Path(folder))
        super().__init__(folder, job_id, tasks)
        self._paths = VjobPaths(folder, job_id, self.task_id)

    @classmethod
    def open(cls, run: RunFolder) -> VjobJob[Any]:
        """Return the job of a submitted run."""
        record = read_record(run)
        if record is None:
            raise InputError(f"{run.path} has no record.json that this vjob can read")
        plan = read_plan(run.plan)
        world = plan.world if plan is not None else 1
        job_id = record.jobs[0].id if record.jobs else run.name
        return cls(run.path, job_id, range(world))

    # Identity and records.

    @property
    def name(self) -> str:
        """Run id, which is also the name of the run folder."""
        return self.run.name

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run.path

    @property
    def record(self) -> RunRecord:
        """The run's record as last written, without a query to the scheduler."""
        record = read_record(self.run)
        if record is None:
            raise VjobError(f"{self.run.record} cannot be read; was the run folder removed?")
        return record

    @property
    def conf(self) -> JobConf:
        """The resolved conf without secrets."""
        from vjob.jobs.conf.loading.load import parse_conf

        text = read_text(self.run.resolved)
        return parse_conf(text, str(self.run.resolved), self.run.path)

    @property
    def has_function(self) -> bool:
        """True if the program is a pickled function."""
        return self.run.submitted_pickle.exists()

    def task(self, task_id: int) -> VjobJob[R]:
        """Return the job object of one rank of the run."""
        found = super().task(task_id)
        assert isinstance(found, VjobJob)
        return found

    def _register_in_watcher(self) -> None:
        """Register this job also if it is a single rank: a process may have unpickled only that
        rank."""
        self.watcher.register_run(self.job_id, self.run)

    # Progress.

    def done(self, force_check: bool = False) -> bool:
        """Return True once the run is over, or every rank of its function has left a result."""
        if not self.run.path.is_dir():
            raise VjobError(
                f"{self.run.path} does not exist: state and results of a run are kept in its "
                "folder; was it removed, or is it not mounted here?"
            )
        if self.watcher.is_done(self.job_id, mode="force" if force_check else "standard"):
            return True
        if not self.has_function:
            return False
        there = set(list_names(self.run.result_pickle(0).parent))
        return all(self.run.result_pickle(rank).name in there for rank in self._tasks)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the job is done; raise TimeoutError after `timeout_s`, if given."""
        begun = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - begun
            if timeout_s is not None and waited_s > timeout_s:
                raise TimeoutError(f"{self.name} is {self.state} after {timeout_s:g} s")
            time.sleep(min(1.0, max(0.1, waited_s / 10)))

    def status(self) -> JobStatus:
        """Return the job's present status with verdict and evidence, as `vjob status` does."""
        from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader

        if not hasattr(self, "_reader"):
            self._reader = JudgedReader(open_reader(str(self.run.path), self.run.path))
        snapshot, verdict = self._reader.read()
        return JobStatus(snapshot=snapshot, verdict=verdict)

    def follow(self, say: Callable[[str], object] = print) -> int:
        """Pass each new line of all ranks to `say` until the run ends; return 0 if it succeeded."""
        from vjob.jobs.monitor.log_lines.print_logs import follow_run

        return follow_run(self.run, say)

    def logs(
        self,
        *,
        rank: int | None = None,
        pattern: str | None = None,
        lines: int | None = None,
        errors: bool = False,
    ) -> str:
        """Return the lines of all ranks or of one, as `vjob logs` does; with `errors`, the
        verdict and the first error."""
        from vjob.jobs.monitor.log_lines import print_logs
        from vjob.jobs.monitor.readers.first_error import print_errors

        wanted = print_logs.LineFilter(
            ranks=() if rank is None else (rank,), pattern=pattern, raw=rank is not None
        )
        found: list[str] = []
        if errors:
            print_errors(self.run, found.append, wanted, attempt=None)
        else:
            print_logs.print_logs(self.run, found.append, wanted, attempt=None, num_lines=lines)
        return "\n".join(found)

    def stacks(self, *, native: bool = False) -> Stacks:
        """Return the Python stacks of all ranks, grouping equal stacks, as `vjob stacks` does."""
        from vjob.jobs.monitor.stacks.collect import collect_stacks

        return collect_stacks(view_run(self.run), native=native)

    def report(self, path: Path | str | None = None) -> Path:
        """Write the report's page, by default `report.html` in the run folder; return its path."""
        from vjob.jobs.reporting.report import ReportOutputs, write_report

        target = self.run.report if path is None else Path(path).expanduser().absolute()
        here = Path.cwd()
        write_report(str(self.run.path), here, log.info, ReportOutputs(output=target))
        return target

    @property
    def tables(self) -> JobTables:
        """DataFrames by name (docs/notebook.md), such as `job.tables.steps`; each access reads the
        files again.

        >>> tables = vjob.job("last").tables
        >>> tables.steps.took_s.median(), tables.losses.loss.min()
        """
        from vjob.jobs.reporting.report import load_tables

        return load_tables(self.run.path)

    # Actions.

    def cancel(self, check: bool = True, *, now: bool = False) -> None:
        """End the job. Ranks that can checkpoint are asked to do so first, unless `now` is true.

        With `check`, return once the job has ended or the scheduler has been asked to end it. A job
        that is already over is not changed.
        """
        record = self.record
        if record.state in (records.ENDED, records.REFUSED):
            return
        try:
            log.info(
                "%s", cancel_run(self.run, now=now, wait_s=SAVE_S if check else 0, say=log.info)
            )
        except InputError:  # it ended meanwhile
            pass
        except VjobError:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the ranks the signal of a preemption or a time limit, which submitit documents as
        the way to try a checkpoint(). submitit decides from the elapsed time which of the two it
        was."""
        attempts = self.run.attempts()
        if not attempts:
            raise InputError(f"{self.name} has not started its ranks yet")
        write_signal(attempts[-1], "USR2", f"interrupt-{uuid.uuid4().hex}")
        call_agents(self.run)

    def grow(self, count: int, *, queue: str | None = None) -> str:
        """Submit a job of `count` nodes that joins this run, which must be one that may morph;
        return the job's id."""
        from vjob.jobs.elastic import membership

        return membership.grow(self.run, count=count, queue=queue, walltime_min=None)[1]

    def shrink(self, count: int | None = None, *, nodes: Sequence[str] = ()) -> list[str]:
        """Release nodes at the next checkpoint; return sentences about what was requested."""
        from vjob.jobs.elastic import membership

        if (count is None) == (not nodes):
            raise InputError("give the number of nodes (count) or their names (nodes), not both")
        return membership.shrink(self.run, count=count, hosts=nodes)

    # Results.

    def results(self) -> list[R]:
        """Return the function's results by rank, or a None for each rank of a script; raise the
        run's failure."""
        self.wait()
        found = self._read_results() if self.has_function else None
        if found is not None:
            return found
        problem = self.exception()
        if problem is not None:
            raise problem
        if not self.has_function:
            return [None for _ in self._tasks]  # type: ignore[misc]  # R is None for scripts
        return [self._read_result(rank)[1] for rank in self._tasks]  # they came just now

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """Return an error with the culprit's traceback and verdict; None if the run succeeded."""
        self.wait()
        if self.has_function and self._read_results() is not None:
            return None
        view = self._look()
        failed = self._find_failed(view)
        if failed is None:
            return None
        view = self._wait_for_verdict(view)
        rank, trace = self._find_failed(view) or failed
        return self._build_error(view, rank, trace)

    def _wait_for_verdict(self, view: RunView) -> RunView:
        """Return the run's view once its end is recorded, or after VERDICT_S."""
        deadline = time.monotonic() + VERDICT_S
        while not self.watcher.is_done(self.job_id, mode="cache") and time.monotonic() < deadline:
            time.sleep(1)
            view = self._look()
        return view

    def _build_error(
        self, view: RunView, rank: int, trace: str
    ) -> UncompletedJobError | FailedJobError:
        """Build the exception for a rank of a failed run. It quotes `trace`, the traceback of the
        rank, or else the last lines of its output."""
        verdict = f"{self.name}: {view.record.message or view.state}"
        if view.record.state == records.REFUSED:
            return UncompletedJobError(verdict)
        where, hint = self._describe_rank(rank), self._hint(rank)
        if trace:
            trace = trace.rstrip()
            shown = "" if trace in verdict else f"{where}\n{trace}\n"  # a refusal is one sentence
            return FailedJobError(f"{verdict}\n{shown}{hint}")
        if self.has_function and self._ended_well(rank):
            return UncompletedJobError(f"{verdict}\n{self._explain_lost(rank)}\n{hint}")
        outputs = self._find_outputs(rank, "err")
        text = _decode(outputs[-1].read()) if outputs else ""
        last = "\n".join(text.splitlines()[-LAST_LINES:])
        shown = f"{where} it wrote last:\n{last}\n" if last else ""
        return UncompletedJobError(f"{verdict}\n{shown}{hint}")

    def _explain_lost(self, rank: int) -> str:
        return (
            f"rank {rank} succeeded, but its result {self.run.result_pickle(rank)} does not "
            "exist: it was removed, or log_folder is a different folder on the node. Submit "
            "again with a log_folder that every node sees"
        )

    def _find_failed(self, view: RunView) -> tuple[int, str] | None:
        """Return the rank to name and its traceback, if it left one; None if nothing failed.

        The verdict's culprit comes first, since the other ranks failed only because of it.
        """
        outcome = view.record.outcome
        is_bad = is_over(view) and view.record.verdict != "COMPLETED"
        culprit = outcome.culprit_rank if outcome is not None and outcome.code else None
        order = [rank for rank in (culprit,) if rank in self._tasks]
        order += [rank for rank in self._tasks if rank not in order]
        if self.has_function:
            unknown: tuple[int, str] | None = None
            for rank in order:
                kind, value = self._read_result(rank)
                if kind == "error":
                    return rank, str(value)
                if kind == "" and rank == culprit:
                    return rank, ""
                if kind == "" and unknown is None:
                    unknown = rank, ""
            return unknown
        return (order[0], "") if is_bad else None

    def _read_results(self) -> list[R] | None:
        """Return the results of all ranks; None if a rank failed or left no result."""
        values = []
        for rank in self._tasks:
            kind, value = self._read_result(rank)
            if kind != "success":
                return None
            values.append(value)
        return values

    def _read_result(self, rank: int) -> tuple[str, Any]:
        """Return `success` or `error`, and the value; an empty text if the rank left no result."""
        path = self.run.result_pickle(rank)
        deadline = time.monotonic() + (LANDING_S if self._ended_well(rank) else 0.0)
        while path.name not in list_names(path.parent):  # a listing makes NFS look again
            if time.monotonic() > deadline:
                return "", None
            time.sleep(0.5)
        kind, value = read_pickle(path)
        return kind, value

    def _ended_well(self, rank: int) -> bool:
        attempts = self.run.attempts()
        plan = read_attempt_plan(self.run, attempts[-1].number) if attempts else None
        if plan is None:
            return False
        found = read_exits(attempts[-1], plan.world).get(rank)
        stop = read_stop(attempts[-1])
        has_left = stop is not None and stop.get("kind") == LEFT  # with a checkpoint instead
        return found is not None and found.code == 0 and not has_left

    def _look(self) -> RunView:
        """Return the run's present view; an ended run is not queried again."""
        if not self.watcher.is_done(self.job_id, mode="cache"):
            self.watcher.get_info(self.job_id, mode="force")
        return self.watcher.view(self.job_id) or view_run(self.run)

    def _describe_rank(self, rank: int) -> str:
        from vjob.jobs.runs.outcome import read_node_names

        attempts = self.run.attempts()
        plan = read_attempt_plan(self.run, attempts[-1].number) if attempts else None
        if plan is None or not attempts:
            return "no rank had started"
        index = plan.node_of_rank(rank).index
        host = read_node_names(attempts[-1], plan).get(index, f"node {index}")
        return f"rank {rank} on {host}:"

    def _hint(self, rank: int) -> str:
        found = [self._find_outputs(rank, kind) for kind in ("out", "err")]
        if any(output.path.exists() for outputs in found for output in outputs):
            return f"All lines: vjob logs {self.run.path} --rank {rank}"
        return f"More: vjob status {self.run.path}"

    def _get_logs_string(self, name: str) -> str | None:
        """Return a rank's lines of all attempts: submitit's logs also continue after a requeue."""
        outputs = self._find_outputs(self.paths.task_id, name[3:])
        return _decode(b"".join(one.read() for one in outputs)) if outputs else None

    def _find_outputs(self, rank: int, kind: str) -> list[RankOutput]:
        """Return a rank's output files of all attempts, oldest first."""
        return [
            locate_output(one, read_attempt_plan(self.run, one.number), rank, kind)
            for one in self.run.attempts()
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}


def _decode(data: bytes) -> str:
    """Decode the text of a log."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace").read()


def read_pickle(path: Path) -> Any:
    """Unpickle a result; raise VjobError unless file and folder belong to the caller."""
    import pickle

    with open_file(path) as handle:
        owners = {os.fstat(handle.fileno()).st_uid, path.parent.stat().st_uid}
        if owners != {os.getuid()}:
            raise VjobError(
                f"{path} belongs to another user and is not read, because loading a pickle runs "
                "code; ask them for the result in another format"
            )
        try:
            return pickle.load(handle)
        except (EOFError, pickle.UnpicklingError) as error:
            raise VjobError(f"{path} is damaged ({error}): submit again") from error
        except Exception as error:  # unpickling runs code of the objects' own
            raise VjobError(
                f"{path} cannot be unpickled in this process: {type(error).__name__}: {error}; "
                "what the ranks could import must be importable here too (add its folder to "
                "sys.path, use the same Python), or let the function return plain values"
            ) from error
