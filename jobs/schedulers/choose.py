"""Choose a scheduler by its name in the plan, from the built-in schedulers and those of plug-ins.

Callers import this module rather than its functions, so that a test can replace the scheduler in
one place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from varuna_core.plugins import BuiltIn, Seam
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.schema import Cluster
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers.base import Capabilities, Scheduler

SEAM = Seam(
    "vjob.schedulers",
    [
        BuiltIn("slurm", "Slurm.", "vjob.jobs.schedulers.slurm.scheduler:SlurmScheduler"),
        BuiltIn(
            "allocation",
            "The Slurm job that this shell is in.",
            "vjob.jobs.schedulers.allocation.scheduler:AllocationScheduler",
        ),
        BuiltIn("local", "This machine.", "vjob.jobs.schedulers.local.scheduler:LocalScheduler"),
        BuiltIn(
            "ssh",
            "A list of machines.",
            "vjob.jobs.schedulers.local.scheduler:MachinesScheduler",
        ),
    ],
)
CONF_NAMES = {"machines": "ssh"}
"""Names in a conf that differ from those in a plan."""
LOCAL = "local"
QUEUE_KEYS = frozenset(
    f"cluster.{name}" for name in ("nodes", "account", "qos", "exclude", "requeue", "sbatch")
)
"""Keys that only make sense with a queue: a conf that writes one of them uses the queue."""
DEFAULT_WALLTIME_MIN = 60
AUTO = ("allocation", "slurm", LOCAL)
"""`auto` means the first of these schedulers that is available; a plug-in must be named."""


def get_scheduler(scheduler: str, run: RunFolder | None = None) -> Scheduler:
    """Return the scheduler with this name in the plan, for a run's jobs, importing no other."""
    found = SEAM.load(scheduler)
    if found is None:
        raise InputError(
            f"there is no scheduler {scheduler!r}; give one of {', '.join(SEAM.list_names())}"
        )
    made: Scheduler = found(run)
    return made


def get_capabilities(scheduler: str) -> Capabilities:
    return get_scheduler(scheduler).can


def choose_auto(*, new_job: bool = False) -> Scheduler:
    """Return the scheduler that `auto` means in this shell; with `new_job`, as if the shell were
    not inside a job."""
    *others, last = [
        one for one in map(get_scheduler, AUTO) if not (new_job and one.can.inside_job)
    ]
    return next((one for one in others if not one.find_obstacle()), last)


def override_job() -> tuple[str, ...]:
    """Return the overrides of the conf that `--new-job` makes; empty outside of a job."""
    if not choose_auto().can.inside_job:
        return ()
    return (f"cluster.scheduler={choose_auto(new_job=True).name}",)


def choose_for(cluster: Cluster) -> Scheduler:
    """Return the scheduler that a conf asks for, which may not be available here."""
    asked = "machines" if cluster.machine_list else cluster.scheduler
    return choose_auto() if asked == "auto" else get_scheduler(CONF_NAMES.get(asked, asked))


def settle_cluster(cluster: Cluster, written: Collection[str]) -> Cluster:
    """Replace defaults that depend on the scheduler; `written` are the keys that the conf sets.

    A conf that uses none of QUEUE_KEYS runs on this machine, even if Slurm is available. Only a job
    on other hosts, under a scheduler with time limits, gets a default time limit.
    """
    is_open = cluster.scheduler == "auto" and cluster.machine_list is None
    if is_open and QUEUE_KEYS.isdisjoint(written) and choose_for(cluster).can.has_queue:
        cluster = replace(cluster, scheduler=LOCAL)
    can = choose_for(cluster).can
    if cluster.walltime_min is None and can.time_limit and not can.one_host:
        cluster = replace(cluster, walltime_min=DEFAULT_WALLTIME_MIN)
    return cluster


def has_queue(scheduler: str) -> bool:
    """Return True if one query covers all jobs of a user; also True for an unknown name."""
    found = SEAM.load(scheduler)
    return found is None or found.can.has_queue


def list_with_queue() -> Iterator[Scheduler]:
    """Yield the schedulers, plug-ins too, that may have jobs of this user without a run folder."""
    for name in SEAM.list_names():
        found = SEAM.load(name)
        if found is not None and found.can.has_queue:
            yield found(None)
