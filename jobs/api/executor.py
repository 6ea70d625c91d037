"""`VjobExecutor`: submitit's executor for vjob, which the command line uses too.

    a function ─► conf with program.function ─┐
    conf.yaml, a dict ────────────────────────┴► resolve_conf ─► submit ─► ScriptExecutor ─► sbatch
                                                                    └─ fill: function/submitted.pkl

`submitit.AutoExecutor(folder, cluster="vjob")` finds the executor by its entry point. The conf is
`vjob_conf`; submitit's shared parameters override its keys, and `vjob_set` overrides both. Without
a conf, the shared parameters define a conf with one group of nodes.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit.core.core import Job
from submitit.core.utils import DelayedSubmission, JobPaths

from varuna_core.functions.facts import write_facts
from varuna_core.functions.pickles import write_pickle
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.confs import (
    ConfLike,
    ConfText,
    find_written,
    read_source,
    resolve,
    spell_override,
)
from vjob.jobs.api.job import VjobJob
from vjob.jobs.conf.schema import FUNCTION
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.script_executor import ScriptExecutor
from vjob.jobs.submit import submit as submitting
from vjob.jobs.submit.array import submit_array
from vjob.jobs.submit.chain import NO_RUNS, AfterRuns, find_after

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import JobConf
    from vjob.jobs.planning.resolve_auto import Resolved
    from vjob.jobs.submit.snapshot import Snapshot

log = logging.getLogger(__name__)
SHARED: Mapping[str, Any] = {
    "name": None,
    "timeout_min": 5,
    "mem_gb": None,
    "nodes": None,
    "cpus_per_task": None,
    "gpus_per_node": None,
    "tasks_per_node": None,
    "stderr_to_stdout": False,
}
"""submitit's shared parameters and their defaults; the last has no effect, since each rank has two
output files."""
OWN: Mapping[str, Any] = {
    "conf": None,
    "set": None,
    "env": None,
    "after": None,
    "array_parallelism": 256,
}
"""vjob's own parameters, `vjob_conf` and so on in `AutoExecutor.update_parameters`."""
WARN_S = 90
"""Seconds before the time limit at which a function that can checkpoint is signalled; submitit's
signal_delay_s."""
NO_LIMIT_MIN = 366 * 24 * 60
"""Minutes that stand for no time limit, since submitit requires a number."""
GB = 1024**3


class VjobExecutor(ScriptExecutor):
    """Executor that runs functions and confs as runs of vjob, on Slurm or on this machine.

    Run folders are made in `folder`. A `%j` in its path, as submitit allows, is dropped, since each
    run has a folder of its own anyway.
    """

    job_class = VjobJob

    def __init__(
        self, folder: Path | str, max_num_timeout: int = 3, max_pickle_size_gb: float = 1.0
    ) -> None:
        super().__init__(JobPaths.get_first_id_independent_folder(folder))
        self.max_num_timeout = max_num_timeout
        self.max_pickle_size_gb = max_pickle_size_gb

    @classmethod
    def affinity(cls) -> int:
        """Return 0, so that AutoExecutor never chooses vjob unless the cluster is named."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(OWN)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        known = {**SHARED, **OWN}
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            listed = "".join(f"\n  - {name} (default: {value!r})" for name, value in known.items())
            raise ValueError(f"Unavailable parameter(s): {unknown}\nValid parameters are:{listed}")
        at_most = kwargs.get("array_parallelism", 1)
        if not isinstance(at_most, int) or at_most < 1:
            raise InputError(
                f"array_parallelism (vjob_array_parallelism) is {at_most!r}: it is the number "
                "of jobs of an array that may run at once, 1 or more"
            )
        super()._internal_update_parameters(**kwargs)

    # A conf's own program.

    def submit_conf(
        self,
        resolved: Resolved,
        words: Sequence[str] = (),
        *,
        after: AfterRuns = NO_RUNS,
        snapshot: Snapshot | None = None,
    ) -> VjobJob[None]:
        """Submit a conf's program; `words` are further arguments, `snapshot` is the code if it is
        not the present one."""
        run, _ = submitting.submit(resolved, words, after=after, executor=self, snapshot=snapshot)
        return VjobJob.open(run)

    # Functions.

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Job[Any]]:
        if len(delayed_submissions) == 1:
            return [self._submit_function(delayed_submissions[0])]
        return list(self._submit_array(delayed_submissions))

    def _submit_function(self, delayed: DelayedSubmission) -> VjobJob[Any]:
        resolved = self.resolve_function(delayed)
        self._throttle()
        run, record = submitting.submit(
            resolved,
            after=self._resolve_after(),
            executor=self,
            fill=functools.partial(self._write_function, delayed, resolved.conf),
        )
        if schedulers.has_queue(record.scheduler):
            self._last_job_submitted = time.time()
        return VjobJob.open(run)

    def _submit_array(self, all_delayed: Sequence[DelayedSubmission]) -> list[VjobJob[Any]]:
        """Submit one run for each function. All runs get the conf of the first function that can
        checkpoint or, if none can, of the first function."""
        like = next((one for one in all_delayed if can_checkpoint(one.function)), all_delayed[0])
        resolved = self.resolve_function(like)
        folders = submit_array(
            resolved,
            [functools.partial(self._write_function, one, resolved.conf) for one in all_delayed],
            at_most=self.parameters.get("array_parallelism", OWN["array_parallelism"]),
            executor=self,
            after=self._resolve_after(),
        )
        return [VjobJob.open(run) for run in folders]

    def _resolve_after(self) -> AfterRuns:
        return find_after(name_jobs(self.parameters.get("after") or ()), (), Path.cwd())

    def resolve_function(self, delayed: DelayedSubmission) -> Resolved:
        """Return the conf that a function runs with; of its own program, only `python` is used."""
        if not callable(delayed.function):
            raise InputError(
                f"{delayed.function!r} cannot be called: submit the function itself and its "
                "arguments, executor.submit(train, lr=3e-4)"
            )
        name = name_function(delayed.function)
        source = self.read_parameters(name)
        program: dict[str, str] = {FUNCTION: name}
        python = find_written(source, "program", "python")
        if python is not None:
            program["python"] = python
        inside = tuple(one for one in source.overrides if not one.startswith("program."))
        overrides = [*inside, spell_override("program", program)]
        resolved = resolve(replace(source, overrides=tuple(overrides)))
        cluster = resolved.conf.cluster
        is_split = cluster.hetero == "split" and len(cluster.nodes) > 1  # cannot: one by one
        if not is_split and find_written(source, "cluster", "requeue") is None:
            overrides.append("cluster.requeue=true")  # as submitit: preempted functions come again
        # submitit's protocol is to be called before the end.
        limit_min, is_told = cluster.walltime_min, cluster.signal_before_end_s > 0
        if can_checkpoint(delayed.function) and limit_min is not None and not is_told:
            warn_s = min(WARN_S, 30 * limit_min)
            overrides.append(f"cluster.signal_before_end_s={warn_s}")
        return resolve(replace(source, overrides=tuple(overrides)))

    def read_parameters(self, name: str) -> ConfText:
        """Return the conf that this executor's parameters define; its name is `name` unless the
        parameters contain a name."""
        asked = {name: value for name, value in self.parameters.items() if value is not None}
        conf: ConfLike | None = asked.get("conf")
        settings: dict[str, Any] = {"log_folder": str(self.folder)}
        if conf is None:
            group = spell_group({"nodes": 1, "tasks_per_node": 1, **asked})
            limit = asked.get("timeout_min", SHARED["timeout_min"])
            conf = {
                "name": spell_name(asked.get("name") or name),
                "program": {"function": name},
                "cluster": {"walltime_min": limit, "nodes": [{"group": "all", **group}]},
            }
        else:
            if "name" in asked:
                settings["name"] = spell_name(asked["name"])
            elif isinstance(conf, Mapping) and "name" not in conf:
                settings["name"] = spell_name(name)
            if "timeout_min" in asked:
                settings["cluster.walltime_min"] = asked["timeout_min"]
            group = spell_group(asked)
            settings.update({f"cluster.nodes[0].{key}": value for key, value in group.items()})
        source = read_source(conf, set=settings)
        own = read_source(conf, set=asked.get("set"), env=asked.get("env"))
        return replace(source, overrides=(*source.overrides, *own.overrides))

    def _write_function(self, delayed: DelayedSubmission, conf: JobConf, run: RunFolder) -> None:
        name = name_function(delayed.function)
        write_facts(run, name)
        delayed.set_timeout(conf.cluster.walltime_min or NO_LIMIT_MIN, self.max_num_timeout)
        try:
            write_pickle(run.submitted_pickle, delayed)
        except OSError:
            raise
        except Exception as error:  # pickling runs code of the objects' own
            raise InputError(
                f"{name} cannot be pickled with its arguments: {type(error).__name__}: {error}; "
                "open files, locks and sockets inside the function, and pass what is needed to "
                "open them. Nothing was submitted"
            ) from error
        size_gb = run.submitted_pickle.stat().st_size / GB
        if size_gb > self.max_pickle_size_gb:
            raise RuntimeError(  # as submitit
                f"{name} and its arguments take {size_gb:.3g} GB as a pickle, more than "
                f"max_pickle_size_gb={self.max_pickle_size_gb}: write large data to a file, or "
                "raise it: AutoExecutor(folder, cluster='vjob', vjob_max_pickle_size_gb=...). "
                "Nothing was submitted"
            )


def name_jobs(jobs: Any) -> list[str]:
    """Return JOB words for one or several jobs, each a VjobJob, a word or a path."""
    several = jobs if isinstance(jobs, (list, tuple)) else [jobs]
    return [str(one.folder) if isinstance(one, VjobJob) else str(one) for one in several]


def name_function(function: Any) -> str:
    """Return the name of a function for messages: `train`, or `Trainer` for a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def spell_name(name: str) -> str:
    """Return the nearest name that is valid in a conf: `<lambda>` becomes `lambda`."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "function"


def can_checkpoint(function: Any) -> bool:
    """Return True for an object that implements submitit's checkpoint protocol."""
    return hasattr(function, "checkpoint") or hasattr(function, "__submitit_checkpoint__")


def spell_group(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a conf's node group for the given shared parameters of submitit."""
    tasks = asked.get("tasks_per_node", 1)
    found: dict[str, Any] = {}
    if "nodes" in asked:
        found["count"] = asked["nodes"]
    if "tasks_per_node" in asked:
        found["ranks"] = tasks
    if asked.get("gpus_per_node"):
        found["gpus"] = asked["gpus_per_node"]
    if "cpus_per_task" in asked:
        found["cpus"] = asked["cpus_per_task"] * tasks
    if "mem_gb" in asked:
        found["memory_gb"] = math.ceil(asked["mem_gb"])
    return found
