"""The functions of `import vjob`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from vjob.jobs.api.confs import ConfLike, read_source, resolve
from vjob.jobs.errors import InputError

if TYPE_CHECKING:
    from vjob.jobs.api.job import VjobJob
    from vjob.jobs.conf.schema import JobConf
    from vjob.jobs.planning.answer import Answer

log = logging.getLogger(__name__)
JobLike = Union[str, Path, "VjobJob[Any]"]
"""A job, or how `vjob status` names one: an id, a name, a run id, `last`, a run folder."""


def submit(
    conf: ConfLike | None = None,
    *,
    like: JobLike | None = None,
    set: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    after: JobLike | Sequence[JobLike] = (),
    after_any: JobLike | Sequence[JobLike] = (),
) -> VjobJob[None]:
    """Submit a conf's program, as `vjob submit` does.

    `set` overrides keys of the conf, `env` is added to its environment. The job waits until the
    jobs `after` have succeeded, and until `after_any` have ended in any way. Instead of a conf,
    `like` names a job to submit again, with the code that it ran if a copy was kept.

    >>> job = vjob.submit("conf.yaml", set={"cluster.walltime_min": 10}, name="first")
    >>> second = vjob.submit("conf.yaml", after=job)
    >>> second.wait()
    >>> second.state
    'COMPLETED'
    """
    from vjob.jobs.api.executor import VjobExecutor, name_jobs
    from vjob.jobs.submit.chain import find_after

    before = find_after(name_jobs(after), name_jobs(after_any), Path.cwd())
    if like is not None and conf is None:
        from vjob.jobs.submit.like import resolve_like

        source = read_source({}, set=set, env=env, name=name)
        again = resolve_like(job(like).run, source.overrides)
        if again.warning:
            log.warning("%s", again.warning)
        executor = VjobExecutor(again.resolved.conf.log_folder)
        return executor.submit_conf(again.resolved, after=before, snapshot=again.snapshot)
    if conf is None or like is not None:
        raise InputError("give a conf, or a job: vjob.submit(like=job)")
    resolved = resolve(read_source(conf, set=set, env=env, name=name))
    return VjobExecutor(resolved.conf.log_folder).submit_conf(resolved, after=before)


def load(conf: ConfLike, *, set: Mapping[str, Any] | None = None) -> JobConf:
    """Read and check a conf; ConfError lists all of its problems at once.

    >>> conf = vjob.load("conf.yaml", set={"parallel.pipeline": 2})
    >>> conf.parallel.pipeline
    2
    >>> vjob.load({"name": "x", "progam": "pretrain_gpt"})
    Traceback (most recent call last):
    vjob.jobs.errors.ConfError: ...
    """
    from vjob.jobs.conf.loading.load import load_conf, require_valid

    source = read_source(conf, set=set)
    read = load_conf(source.path, source.overrides, text=source.text)
    require_valid(read, require_env=False)
    return read.conf


def plan(
    conf: ConfLike,
    *,
    set: Mapping[str, Any] | None = None,
    top: int = 5,
    limit_s: float = 60.0,
    budget: float | None = None,
    deadline_h: float | None = None,
) -> Answer:
    """Find the fastest layouts of a conf's model on its nodes, as `vjob plan` does; needs numpy.

    >>> answer = vjob.plan("gpt.yaml", top=3)
    >>> answer.best.build_prediction().step_s <= answer.plans[-1].build_prediction().step_s
    True
    >>> answer.question.is_estimate
    True
    """
    from vjob.jobs.planning.inputs import explain_errors

    source = read_source(conf, set=set)
    with explain_errors():
        from vjob.jobs.planning.answer import find_answer
        from vjob.jobs.planning.question import PlanOptions, read_question

        options = PlanOptions(overrides=source.overrides, prices={})
        _, question = read_question(source.path, options, text=source.text)
        return find_answer(question, limit_s=limit_s, top=top, budget=budget, deadline_h=deadline_h)


def job(which: JobLike = "last") -> VjobJob[Any]:
    """Return a job that was submitted, from Python or by `vjob submit`.

    >>> job = vjob.job("last")
    >>> job.wait()
    >>> job.status().verdict.reason
    'the job ended well after step 1 of 1: all 2 ranks exited 0'
    """
    from vjob.jobs.api.job import VjobJob
    from vjob.jobs.runs.find import find_run

    if isinstance(which, VjobJob):
        return which
    return VjobJob.open(find_run(str(which), Path.cwd()))


def runs(limit: int | None = None) -> list[VjobJob[Any]]:
    """Return your runs, the newest last; with `limit`, only that many of the newest.

    >>> for job in vjob.runs(10):
    ...     print(job.record.name, job.record.state, job.record.message)
    first ended all 2 ranks exited 0
    conf ended all 2 ranks exited 0
    """
    from varuna_core.records.record import read_record
    from vjob.jobs.api.job import VjobJob
    from vjob.jobs.schedulers import run_index

    run_index.check_readable()
    found = [run for run in run_index.list_runs() if read_record(run) is not None]
    return [VjobJob.open(run) for run in (found[-limit:] if limit else found)]
