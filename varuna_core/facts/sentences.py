"""`describe_end`: render the sentence for an `End`. Only this module puts a cause into words.

A sentence has a main clause, followed after semicolons by what vjob itself did about the end. The
main clause is a phrase of this file or, for causes whose witness named the problem (a check before
the start, a node that missed another one), the text of the first piece of evidence.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Iterable, Mapping, Optional

from varuna_core.facts.cause import BY_SCHEDULER, Actor, End, EndCause
from varuna_core.facts.finding import Finding
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.facts.hardware import XIDS, Fault
from varuna_core.facts.known import Evidence

NOTES = "vjob"
"""Source of evidence that is vjob's own note about what it did then, one clause each."""
REMEDY = "container message"
"""Source of evidence that is the remedy of a container runtime's message."""
SCHEDULER = "scheduler"
"""Source of evidence that the scheduler reports about a job."""
STOP = "stop.json"
"""Source of the message with which an attempt was asked to end."""
LEFT_SHORT = "signal.json"
"""Source of the step, and of the total number of steps, at which ranks left when asked to."""
CUT_SHORT = "stopped after it"
"""Source of the evidence that a rank was stopped before its exception had ended it."""
LAST_LINE = "rank stderr"
"""Source of evidence that is the last line that a rank wrote."""
RAISED = "exception"
"""Source of evidence that is the exception which ended a rank: from its TORCHELASTIC_ERROR_FILE, or
else from its last traceback. Earlier versions of vjob wrote `error file`."""


def describe_end(end: End) -> str:
    """Return one sentence without a full stop; it is never empty."""
    clause = _OWN_WORDS[end.cause](end) if end.cause in _OWN_WORDS else _quote(end)
    if end.within and end.cause is not EndCause.ALLOCATION_ENDED:
        clause = f"the enclosing job {end.within} ended: {clause}"
    before = " before it started" if end.started is False and end.cause in BY_SCHEDULER else ""
    notes = [one.text for one in end.evidence if one.source == NOTES and one.text]
    remedies = [f" -> {one.text}" for one in end.evidence if one.source == REMEDY]
    return "; ".join([f"{clause}{before}", *notes]) + "".join(remedies)


def name_rank(rank: Optional[int], node: str) -> str:
    """Return `rank 3 on n061`, or as much of it as is known."""
    parts = [f"rank {rank}"] if rank is not None else []
    if node:
        parts.append(f"on {node}" if parts else node)
    return " ".join(parts)


PHRASES: Mapping[EndCause, str] = {
    EndCause.COMPLETED: "the job ended well",
    EndCause.REFUSED: "the scheduler refused it",
    EndCause.SUBMIT_LOST: "the submit was cut off before the scheduler had the job",
    EndCause.FORGOTTEN: "the scheduler has forgotten the job, and it left no outcome",
    EndCause.DEPENDENCY_FAILED: "never started: a run that it depends on did not end well",
    EndCause.CANCELLED: "cancelled",
    EndCause.TIME_LIMIT: "the time limit was reached",
    EndCause.DEADLINE: "its deadline passed",
    EndCause.PREEMPTED: "preempted",
    EndCause.REQUEUED: "requeued",
    EndCause.REVOKED: "another cluster of the federation runs the job",
    EndCause.ALLOCATION_ENDED: "the enclosing job ended first",
    EndCause.NODE_FAIL: "the scheduler reports that a node failed",
    EndCause.BOOT_FAIL: "a node did not boot",
    EndCause.LAUNCH_FAILED: "the scheduler could not start the batch script",
    EndCause.NO_OUTPUT: "the scheduler could not open the output file of the batch script",
    EndCause.OOM_JOB: "the scheduler reports that the job used up its memory",
    EndCause.RANK_EXIT: "a rank exited",
    EndCause.RANK_EXCEPTION: "a rank raised an exception",
    EndCause.RANK_SIGNAL: "a rank was ended by a signal",
    EndCause.OOM_HOST: "the memory of a node was used up",
    EndCause.HANG: "no rank made progress",
    EndCause.NOT_A_NUMBER: "the loss is not a number",
    EndCause.SETUP_FAILED: "a setup line failed",
    EndCause.PREFLIGHT: "the checks before the start found a problem",
    EndCause.NOT_MET: "the nodes did not find each other",
    EndCause.CONTAINER: "the container could not be prepared",
    EndCause.START_FAILED: "the ranks could not be started",
    EndCause.NODE_SILENT: "a node gave no sign of life",
    EndCause.AGENT_DIED: "the agent of a node exited without a message",
    EndCause.BATCH_KILLED: "the batch script was ended by a signal",
    EndCause.NODE_LEFT: "a node has left",
    EndCause.NO_ROOM: "there was no room on a disk",
    EndCause.STOPPED: "stopped from outside before the ranks ended",
    EndCause.SUPERVISOR_DIED: "the job's supervisor exited without recording an end",
    EndCause.SUPERVISOR_NOT_STARTED: "the supervisor of the job did not start",
    EndCause.MACHINE_UNREACHABLE: "a machine could not be reached",
    EndCause.MACHINE_REBOOTED: "a machine was restarted",
    EndCause.MACHINE_LIST_EMPTY: "the list of machines is empty",
    EndCause.UNKNOWN: "the cause of the end is not known",
}
"""Phrases for causes about which nothing more is known."""


def describe_hang(hang: Hang) -> str:
    """Describe a hang in one sentence without a full stop: who is in which collective, who is
    missing, and where."""
    who = name_rank(hang.rank, hang.node)
    at = f" at {hang.place}" if hang.place else ""
    if hang.witness is HangWitness.STOPPED and hang.below:
        return f"process {hang.below}, which {who} started, is stopped (SIGSTOP){at}"
    if hang.witness is HangWitness.STOPPED:
        return f"{who} is stopped (SIGSTOP)"
    if hang.witness is HangWitness.DEAD:
        return f"{who} is dead, but its parent has not reaped it"
    if hang.witness is HangWitness.LOST:
        return f"{hang.node} sends no heartbeat or is cut off, and all other ranks wait"
    if not hang.collective and hang.missing:
        others = (
            f"{_name_ranks(hang.missing)}, the first on {hang.node}," if hang.missing[1:] else who
        )
        return f"{_name_ranks(hang.called_by)} reached the master's port, but {others} did not{at}"
    if not hang.collective:
        last = f"; the last collective all called is {hang.last_call}" if hang.last_call else ""
        if hang.witness is HangWitness.SPINNING:
            return f"{who} computes{at}, and all other ranks wait{last}"
        if hang.is_mute:
            waits = f"; the last collective called is {hang.last_call}" if hang.last_call else ""
            return (
                f"{who} does not answer, as native code holds the GIL{at}; the other ranks wait "
                f"in collectives{waits}"
            )
        return f"no rank is active{at}{last}"
    called = f"{_name_ranks(hang.called_by)} called {hang.collective}"
    doing = "computes" if hang.witness is HangWitness.SPINNING else "waits"
    instead = f" called {hang.other} instead" if hang.other else f" did not, and {doing}"
    if len(hang.missing) > 1:
        who = f"{_name_ranks(hang.missing)}, the first on {hang.node}," if hang.node else who
        instead = instead.replace("waits", "wait").replace("computes", "compute")
    return f"{called}, {who}{instead}{at}"


def _name_ranks(ranks: Iterable[int]) -> str:
    """Return text such as `ranks 0-3, 5`."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    is_one = len(found) == 1 and found[0][0] == found[0][1]
    return f"{'rank' if is_one else 'ranks'} {', '.join(parts)}"


_ADDED = (NOTES, REMEDY)


def _quote(end: End) -> str:
    """Return the text of the end's first evidence or, without one, the phrase of its cause."""
    return _first_text(end) or PHRASES[end.cause]


def _first_text(end: End) -> str:
    return next((one.text for one in end.evidence if one.text and one.source not in _ADDED), "")


def _find(end: End, source: str) -> Optional[Evidence]:
    return next((one for one in end.evidence if one.source == source), None)


def _completed(end: End) -> str:
    if _first_text(end):  # rank 0 said why it left
        return _first_text(end)
    counted = next((one for one in end.evidence if one.seen), None)
    if counted is None:
        return PHRASES[EndCause.COMPLETED]
    return "the one rank exited 0" if counted.seen == 1 else f"all {counted.seen} ranks exited 0"


def _cancelled(end: End) -> str:
    if end.actor is Actor.VJOB:
        left = f": {_completed(end)}" if end.code == 0 and end.started else ""
        return f"cancelled with {end.by or 'vjob cancel'}{left}"
    if end.by:
        return f"cancelled by {end.by}"
    said = end.evidence[0] if end.evidence else None
    return said.text if said is not None and said.source == STOP else _phrase(end)


def _rank(end: End) -> str:
    """Describe a rank that ended by itself, with its exception or else its last line."""
    if end.rank is None:
        return _quote(end)
    raised = _find(end, RAISED) or _find(end, "error file")
    if raised is not None and _find(end, CUT_SHORT) is not None:
        return f"{name_rank(end.rank, end.node)} raised {raised.text}"
    words = raised.text if raised is not None else "", find_last_line(end)
    return f"{name_rank(end.rank, end.node)} {describe_exit(end.code, end.signal, *words)}"


def find_last_line(end: End) -> str:
    """Return the last line of the rank that ended; empty if it printed none but warnings."""
    last = _find(end, LAST_LINE)
    return "" if last is None or is_warning(last.text) else last.text


_WARNING = re.compile(
    r"(\[rank\d+\]: ?)?(\[W\d{3,4}[] :]|W\d{4} \d\d:)|.*\b[A-Z]\w*Warning: | *warnings\.warn\("
)
"""Beginning of a warning of torch's own log, such as `[W1130 01:43:06.08 socket.cpp:207] ...`, or
of Python's warnings, with the line of source that follows."""


def is_warning(line: str) -> bool:
    """Return True for a warning of torch or Python, which healthy ranks print too."""
    return _WARNING.match(line) is not None


def describe_exit(code: Optional[int], signal: Optional[str], raised: str, last: str) -> str:
    """Describe how a rank ended, with its exception or its last line, unless that is a warning. A
    line before a signal may be unrelated: it is quoted as the last line, not as the cause."""
    last = "" if is_warning(last) else last
    how = f"was ended by {signal}" if signal else f"exited {code}"
    between = "; the last line that it wrote: " if signal and not raised else ": "
    return between.join(filter(None, (how, raised or last)))


def _memory(end: End) -> str:
    """Describe a rank that was killed because its node ran out of memory."""
    proof = _find(end, SCHEDULER)
    why = PHRASES[EndCause.OOM_JOB if proof is not None else EndCause.OOM_HOST]
    return why if end.rank is None else f"{_rank(end)}: {why}"


def _node(end: End) -> str:
    return f"the scheduler reports that node {end.node} failed" if end.node else _phrase(end)


def _phrase(end: End) -> str:
    return PHRASES[end.cause]


def _time_limit(end: End) -> str:
    left = _find(end, LEFT_SHORT)
    if left is None:
        return _phrase(end)
    where = f"stopped at step {left.seen} of {left.expected}"
    return f"{where}, as SIGUSR1 asked the run to save and leave before the time limit"


def _batch_killed(end: End) -> str:
    return f"the batch script was ended by {end.signal}" if end.signal else _phrase(end)


def _agent_died(end: End) -> str:
    """Describe an agent that ended before its ranks: by its node, or by the witness's own words."""
    lost = next((one for one in end.evidence if one.expected is not None), None)
    if end.rank is None or lost is None:
        return _quote(end)
    missing = (lost.expected or 0) - lost.seen
    more = f" ({missing} ranks in all)" if missing > 1 else ""
    where = f"on {end.node}" if end.node else "of a node"
    return f"the agent {where} exited without a message: rank {end.rank} left no exit code{more}"


def _allocation(end: End) -> str:
    return f"the enclosing job {end.within} ended first" if end.within else _phrase(end)


def _waited_in_vain(end: End) -> str:
    said = _first_text(end)
    if not said:
        return _phrase(end)
    return f"never started: {end.by}, which it waited for, did not end well ({said})"


def _with_reason(end: End) -> str:
    """Return the cause's phrase with the scheduler's own word for it in parentheses."""
    said = _first_text(end)
    return f"{_phrase(end)} ({said})" if said else _phrase(end)


_OWN_WORDS: Mapping[EndCause, Callable[[End], str]] = {
    EndCause.COMPLETED: _completed,
    EndCause.DEPENDENCY_FAILED: _waited_in_vain,
    EndCause.CANCELLED: _cancelled,
    EndCause.TIME_LIMIT: _time_limit,
    EndCause.DEADLINE: _phrase,
    EndCause.PREEMPTED: _phrase,
    EndCause.REVOKED: _phrase,
    EndCause.ALLOCATION_ENDED: _allocation,
    EndCause.NODE_FAIL: _node,
    EndCause.BOOT_FAIL: _phrase,
    EndCause.LAUNCH_FAILED: _with_reason,
    EndCause.NO_OUTPUT: _with_reason,
    EndCause.OOM_JOB: _phrase,
    EndCause.RANK_EXIT: _rank,
    EndCause.RANK_EXCEPTION: _rank,
    EndCause.RANK_SIGNAL: _rank,
    EndCause.OOM_HOST: _memory,
    EndCause.NOT_A_NUMBER: _rank,
    EndCause.AGENT_DIED: _agent_died,
    EndCause.BATCH_KILLED: _batch_killed,
    EndCause.SUPERVISOR_DIED: _phrase,
    EndCause.SUPERVISOR_NOT_STARTED: _with_reason,
}
"""Functions for causes whose clause is built from the end's own fields. All others quote their
first witness."""


def describe_fault(fault: Finding, node: str) -> str:
    """Describe a hardware fault in one sentence without a full stop, as far as the driver reports
    it."""
    values = fault.values
    part = str(values["part"])
    who = f"GPU {part} of {node}" if fault.rule.startswith("gpu-") else f"{part} of {node}"
    ranks = values.get("ranks") or []
    if ranks:
        doubt = "" if values.get("ranks_sure") else ", if ranks take GPUs in order"
        many = "rank" if len(ranks) == 1 else "ranks"
        who += f" ({many} {', '.join(map(str, ranks[:8]))}{doubt})"
    return f"{who} {_FAULTS[Fault(fault.rule)](values)}"


def _times(values: Mapping[str, Any]) -> str:
    count = values.get("count") or 1
    return f", {count} times" if count > 1 else ""


def _describe_xid(values: Mapping[str, Any]) -> str:
    _, meaning = XIDS.get(values.get("code", 0), (None, "see NVIDIA's list of Xid errors"))
    return f"had Xid {values.get('code')}{_times(values)}: {meaning}"


_FAULTS: Mapping[Fault, Callable[[Mapping[str, Any]], str]] = {
    Fault.LOST: lambda v: "is lost: the driver cannot reach it",
    Fault.XID: _describe_xid,
    Fault.KERNEL: lambda v: f"had errors in the kernel's log{_times(v)}: {v.get('detail')}",
    Fault.ECC: lambda v: f"has {v.get('count')} uncorrected ECC errors of this run",
    Fault.REMAP: lambda v: (
        "has a row of memory that could not be replaced"
        if v.get("detail") == "failed"
        else "will replace a row of its memory at its next reset"
    ),
    Fault.RESET: lambda v: f"needs a repair: its driver asks for {v.get('detail')}",
    Fault.NVLINK: lambda v: f"has {v.get('count')} {v.get('detail')} NVLinks down",
    Fault.NVLINK_ERRORS: lambda v: f"has {v.get('count')} errors of NVLinks: {v.get('detail')}",
    Fault.PORT_DOWN: lambda v: "has lost its link",
    Fault.PORT_SLOW: lambda v: f"runs at {v.get('detail')}",
    Fault.PORT_ERRORS: lambda v: f"counts errors: {v.get('detail')} grew by {v.get('count')}",
    Fault.HOST_MEMORY: lambda v: (
        f"(memory) counts errors: {v.get('detail')} grew by {v.get('count')}"
    ),
}
