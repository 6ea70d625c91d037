"""Cancel a run, asking it to checkpoint first if it can."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from varuna_core.agent.meeting.link import call_hub
from varuna_core.facts.cause import EndCause
from varuna_core.records import record as records
from varuna_core.records.checkpoints import count_written
from varuna_core.records.files import read_json
from varuna_core.records.plan import find_store, read_attempt_plan, read_plan
from varuna_core.records.record import CANCEL_ASKED, CANCEL_FAILED, append_event
from varuna_core.records.requests import write_signal
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.find import (
    RunView,
    cancel_joined,
    is_over,
    read_mtime,
    view_run,
    view_runs,
)
from vjob.jobs.runs.outcome import find_own_checkpoint
from vjob.jobs.runs.owner import expect_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import JobState

POLL_S = 1.0
NOT_YOURS = "only the run's owner can cancel it with vjob (an operator: scancel, by its job id)"
CALLS_AT_ONCE = 16
FRESH_S = 3.0
"""Seconds within which an agent's heartbeat shows a change on its node."""


def cancel_run(
    run: RunFolder, *, now: bool, wait_s: int, say: Callable[[str], object], by: str = ""
) -> str:
    """Cancel a run; return a sentence for the user. `by` names what requested it, if it was not
    `vjob cancel`."""
    expect_ours(run, NOT_YOURS)
    view = view_run(run, warn=False, after=time.time())
    if is_over(view):
        raise InputError(f"{run.name} is over already: {view.state}")
    if not view.record.jobs:
        raise VjobError(f"{run.name} has no job yet; look again in a moment")
    scheduler = schedulers.get_scheduler(view.record.scheduler, run)
    is_asked = False
    try:
        append_event(run.vjob_events, CANCEL_ASKED, now=now, by=by)
        has_handlers = not now and bool(_find_saving([view]))
        if not now and not has_handlers and view.is_under_way:
            say("no rank is asked to save: not every rank is known to have a handler for SIGUSR1")
        if has_handlers:
            say(f"asking {run.name} to checkpoint and leave, for at most {wait_s} s")
            write_signal(run.attempts()[-1], "USR1", f"cancel-{uuid.uuid4().hex}")
            is_asked = True
            call_agents(run)
            if not _wait_all([view], wait_s):
                return _explain_leave(view_run(run))
    except OSError as error:  # a full disk must not keep a run from its end
        say(f"{run.path} cannot be written: {error.strerror}; ranks are not asked to checkpoint")
    problems = _cancel_all(view, scheduler.cancel)
    cancelled = time.time()
    # Who did not answer a moment ago is not asked again.
    last = view if view.problem or not problems else view_run(run, after=cancelled)
    if problems and last.record.state != records.ENDED:
        _note_failure(run)
        raise VjobError(f"{run.name} could not be cancelled: {problems[0]}; try again")
    if not _wait_all([view], wait_s, cancelled if _is_pending(view) else 0.0):
        last = view_run(run)
        if is_asked and _has_left(last):
            return _explain_leave(last)
        return f"{run.name} is cancelled{_tell_resume(run)}"
    return f"{run.name} was asked to end and has not yet; `vjob status {run.name}` shows it"


def _note_failure(run: RunFolder) -> None:
    """Record that the cancel failed, so that a later end is not attributed to it."""
    with contextlib.suppress(OSError):
        append_event(run.vjob_events, CANCEL_FAILED)


def cancel_runs(
    runs: Sequence[RunFolder], *, now: bool, wait_s: int, say: Callable[[str], object]
) -> str:
    """Cancel many runs; return a sentence for the user. Waiting runs are cancelled first, in
    reverse order, so that none starts because one before it ends."""
    views = [view for view in view_runs(runs) if not is_over(view)]
    if not views:
        raise InputError("all of these runs are over already")
    num_over = len(runs) - len(views)
    for view in views:
        expect_ours(view.run, NOT_YOURS)
    problems = [f"{view.run.name} has no job yet" for view in views if not view.record.jobs]
    views = [view for view in views if view.record.jobs]
    for view in views:
        with contextlib.suppress(OSError):  # a full disk must not keep a run from its end
            append_event(view.run.vjob_events, CANCEL_ASKED, now=now)
    running = [view for view in views if any(i.state is JobState.RUNNING for i in view.infos)]
    for view in reversed([view for view in views if view not in running]):
        problems += _try_cancel(view)
    asked = [] if now else _ask_all(_find_saving(running))
    for view in reversed([view for view in running if view not in asked]):
        problems += _try_cancel(view)
    late: set[str] = set()
    if asked:
        say(f"asking {len(asked)} of the runs to checkpoint and leave, for at most {wait_s} s")
        late = {view.run.name for view in _wait_all(asked, wait_s)}
        for view in asked:
            problems += _try_cancel(view) if view.run.name in late else []
    going = _wait_all(views, wait_s, time.time() if any(map(_is_pending, views)) else 0.0)
    problems += [f"{view.run.name} was asked to end and has not yet" for view in going]
    if problems:
        raise VjobError("\n  ".join(["not all of the runs were cancelled:", *problems]))
    left = view_runs([view.run for view in asked if view.run.name not in late])
    num_left = sum(map(_has_left, left))
    asked_to = f", {num_left} of the runs after they were asked to save" if num_left else ""
    done = "1 run is" if len(views) == 1 else f"{len(views)} runs are"
    over = f"; {num_over} {'was' if num_over == 1 else 'were'} over already" if num_over else ""
    return f"{done} cancelled{asked_to}{over}"


def describe_cancelled(runs: Sequence[RunFolder], text: str) -> dict[str, Any]:
    """Return the present state of the runs, for scripts."""
    views = view_runs(runs)
    found = [
        {
            "run": view.run.name,
            "folder": str(view.run.path),
            "jobs": [job.id for job in view.record.jobs],
            "state": view.state,
        }
        for view in views
    ]
    return {"message": text, "runs": found}


def _ask_all(views: Sequence[RunView]) -> list[RunView]:
    """Ask runs to checkpoint and leave; return those that could be asked."""
    asked = []
    for view in views:
        with contextlib.suppress(OSError):
            write_signal(view.run.attempts()[-1], "USR1", f"cancel-{uuid.uuid4().hex}")
            asked.append(view)
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:  # a firewall lets each of them wait
        list(pool.map(call_agents, [view.run for view in asked]))
    return asked


def call_agents(run: RunFolder) -> bool:
    """Ask the run's agents to check its files now instead of some seconds later; return True if
    they confirm."""
    attempts = run.attempts()
    return call_hub(run.morph.link) or bool(attempts and call_hub(attempts[-1].link))


def _try_cancel(view: RunView) -> list[str]:
    """Cancel a run's jobs; return the problems if the run goes on nevertheless."""
    problems = _cancel_all(view, schedulers.get_scheduler(view.record.scheduler, view.run).cancel)
    if not problems or is_over(view_run(view.run, after=time.time())):
        return []
    _note_failure(view.run)
    return [f"{view.run.name}: {problem}" for problem in problems[:1]]


def _wait_all(views: Sequence[RunView], wait_s: int, cancelled: float = 0.0) -> list[RunView]:
    """Wait for the end of runs, with one query for all; return those that go on."""
    deadline = time.monotonic() + wait_s
    going = list(views)
    while True:
        views = view_runs([each.run for each in going], after=cancelled)
        going = [view for view in views if not is_over(view)]
        if not going or time.monotonic() > deadline:
            return going
        time.sleep(POLL_S)


def _explain_leave(view: RunView) -> str:
    record = view.record
    if not _has_left(view):
        said = f"{view.state}: {record.message}"
        raise VjobError(f"{record.run} has ended in another way than asked: {said}")
    if _has_saved(view.run):
        return f"{record.run} saved and left{_tell_resume(view.run)}"
    return f"{record.run} left after it was asked to save; no new checkpoint was seen"


def _tell_resume(run: RunFolder) -> str:
    step = find_own_checkpoint(run)
    return "" if step is None else f"; submit again to continue from its checkpoint of step {step}"


def _has_left(view: RunView) -> bool:
    """Return True if all ranks exited 0 after they were asked to."""
    end = view.record.end
    return end is not None and end.cause is EndCause.CANCELLED and end.code == 0


def _has_saved(run: RunFolder) -> bool:
    """Return True if files were seen to be written since ranks were asked to save; a script may
    save where only it knows."""
    plan, since = read_plan(run.plan), read_mtime(run.attempts()[-1].signal)
    store = None if plan is None else find_store(run, plan)
    if read_mtime(run.submitted_pickle) >= since:
        return True
    return store is not None and count_written(store, since) > 0


def _cancel_all(view: RunView, cancel: Callable[[str], None]) -> list[VjobError]:
    """Cancel every job of the run, last first, since the others wait for the first to start."""
    cancel_joined(view)
    problems = []
    for job in reversed(view.record.jobs):
        try:
            cancel(job.id)
        except VjobError as error:  # gone already; the others are cancelled all the same
            problems.append(error)
    return problems


def _find_saving(views: Sequence[RunView]) -> list[RunView]:
    """Return the runs whose ranks catch SIGUSR1 on every node; on other ranks the signal would end
    the process before it has saved."""
    begun = time.monotonic()
    found: list[RunView] = []
    open_ = list(views)
    while open_:
        answers = [(view, _catches(view, time.monotonic() - begun)) for view in open_]
        found += [view for view, answer in answers if answer]
        open_ = [view for view, answer in answers if answer is None]
        if open_:
            time.sleep(POLL_S)
    return found


def _catches(view: RunView, waited_s: float) -> bool | None:
    """Return True if the ranks of every node catch SIGUSR1; None if it is too early to tell."""
    running = any(info.state is JobState.RUNNING for info in view.infos)
    attempts = view.run.attempts()
    plan = read_attempt_plan(view.run, attempts[-1].number) if attempts else None
    if not running or not attempts or plan is None:
        return False
    beats = [read_json(attempts[-1].beat(number)) for number in range(plan.num_nodes)]
    known = [beat for beat in beats if isinstance(beat, dict)]
    at_work = [beat for beat in known if beat.get("ranks_alive")]
    everybody = len(known) == len(beats) and all(beat.get("count") for beat in known)
    if everybody and at_work and all(beat.get("catches_usr1") for beat in at_work):
        return True
    # A handler that was installed this second shows in a beat of the next ones.
    return False if waited_s > (FRESH_S if everybody else 2 * plan.timing.beat_s) else None


def _is_pending(view: RunView) -> bool:
    """Return True for a run with a pending job, which is over as soon as it is cancelled; the end
    of a running job is known from its files."""
    return any(info.state is JobState.PENDING for info in view.infos)
