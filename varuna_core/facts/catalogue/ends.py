"""Remedies by cause: what a user can do about an end if no known line of a log gives better advice.

`explain_end` renders the sentence that a record stores. It includes remedies only if the ranks were
never started, because then there are no logs of ranks to examine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping, Optional, Tuple

from varuna_core.facts.catalogue.known_line import Scope
from varuna_core.facts.catalogue.remedies import (
    EXCLUDE,
    MAKE_ROOM,
    MORE_MEMORY,
    SHARE_LOG_FOLDER,
    SHOW_STACK,
    do,
    look_at,
)
from varuna_core.facts.catalogue.tables import BUILT_IN
from varuna_core.facts.cause import OF_NODE, End, EndCause
from varuna_core.facts.remedy import Action, Context, Remedy, Target, explain
from varuna_core.facts.sentences import RAISED, describe_end

RESUBMIT = Remedy(Action.RESUBMIT)
LOGS = Remedy(Action.INSPECT, Target.LOGS)
WITHOUT_NODE = (RESUBMIT, EXCLUDE)
AFTER_ANY = do("submit again after a run that succeeds; --after-any starts after any end")

REMEDIES: Mapping[EndCause, Tuple[Remedy, ...]] = {
    EndCause.SUBMIT_LOST: (RESUBMIT,),
    EndCause.FORGOTTEN: (LOGS,),
    EndCause.DEPENDENCY_FAILED: (AFTER_ANY,),
    EndCause.CANCELLED: (RESUBMIT,),
    EndCause.TIME_LIMIT: (
        Remedy(Action.RAISE, Target.WALLTIME),
        Remedy(Action.RESUBMIT, instead=True),
    ),
    EndCause.DEADLINE: (Remedy(Action.CHANGE, Target.DEADLINE), RESUBMIT),
    EndCause.PREEMPTED: (RESUBMIT,),
    EndCause.ALLOCATION_ENDED: (RESUBMIT,),
    EndCause.NODE_FAIL: WITHOUT_NODE,
    EndCause.BOOT_FAIL: WITHOUT_NODE,
    EndCause.LAUNCH_FAILED: (SHARE_LOG_FOLDER,),
    EndCause.NO_OUTPUT: (SHARE_LOG_FOLDER,),
    EndCause.OOM_JOB: (MORE_MEMORY, Remedy(Action.LOWER, Target.WORKERS, instead=True)),
    EndCause.OOM_HOST: (MORE_MEMORY, Remedy(Action.LOWER, Target.WORKERS, instead=True)),
    EndCause.RANK_SIGNAL: (SHOW_STACK,),
    EndCause.SETUP_FAILED: (do("correct it, or append `|| true` if the run can do without it"),),
    EndCause.START_FAILED: (do("look at the scheduler's log"),),
    EndCause.NODE_SILENT: WITHOUT_NODE,
    EndCause.AGENT_DIED: WITHOUT_NODE,
    EndCause.NODE_LEFT: WITHOUT_NODE,
    EndCause.MACHINE_UNREACHABLE: WITHOUT_NODE,
    EndCause.NO_ROOM: (MAKE_ROOM,),
    EndCause.SUPERVISOR_DIED: (RESUBMIT,),
    EndCause.SUPERVISOR_NOT_STARTED: (LOGS,),
}
"""The remedies of each cause. A cause without a row has no remedies of its own, because its witness
already names the problem."""

CRASHES = frozenset(("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"))
"""Signals that a process receives because of its own error."""
HANG_REMEDIES: Tuple[Remedy, ...] = (
    Remedy(
        Action.INSPECT,
        Target.STACKS,
        detail="the next time that the run hangs, before you raise the time limit",
    ),
)
"""The remedies of a job that made no steps for a long time before it reached its time limit."""

NEVER_BEGAN = frozenset((EndCause.LAUNCH_FAILED, EndCause.NO_OUTPUT))
"""Causes of a job whose batch script never started."""
RESUMABLE = frozenset(
    (
        EndCause.TIME_LIMIT,
        EndCause.CANCELLED,
        EndCause.PREEMPTED,
        EndCause.DEADLINE,
        EndCause.ALLOCATION_ENDED,
    )
)
"""Causes after which the same run, submitted again, goes on from its checkpoint."""


def list_remedies(end: End, *, checkpoint_step: Optional[int] = None) -> Tuple[Remedy, ...]:
    """Return the remedies of an end; `checkpoint_step` is that of the checkpoint to resume from."""
    found = REMEDIES.get(end.cause, ())
    if end.cause is EndCause.TIME_LIMIT and end.code == 0:
        found = (RESUBMIT,)  # it stayed within the limit by itself
    if end.cause is EndCause.RANK_SIGNAL and end.signal == "SIGKILL":
        return (look_at("dmesg -T | grep -i oom", f"on {end.node or 'its node'}"),)
    if end.cause is EndCause.RANK_SIGNAL and end.signal and end.signal not in CRASHES:
        return ()  # somebody sent it: a stack would show where, and not who
    if end.cause in OF_NODE:
        return tuple(
            replace(one, value=end.node) if one.action is Action.EXCLUDE else one
            for one in found
            if end.node or one.action is not Action.EXCLUDE
        )
    if end.cause in RESUMABLE and checkpoint_step is not None:
        detail = f": the run continues from the checkpoint of step {checkpoint_step}"
        return tuple(
            replace(one, detail=detail) if one.action is Action.RESUBMIT else one for one in found
        )
    return found


def refine_end(end: End) -> End:
    """Return the end with the cause that its exception implies, if that is more specific than the
    fact that an exception was raised."""
    said = next((one.text for one in end.evidence if one.source == RAISED), "")
    if end.cause is not EndCause.RANK_EXCEPTION or not said:
        return end
    row = BUILT_IN.match(Scope.RANK, said)
    is_more = row is not None and row.cause is EndCause.NOT_A_NUMBER
    return replace(end, cause=EndCause.NOT_A_NUMBER) if is_more else end


def explain_end(end: End, context: Context) -> str:
    """Render the sentence about an end that a record stores."""
    remedies = REMEDIES[end.cause] if end.cause in NEVER_BEGAN else ()
    return explain(describe_end(end), remedies, context)
