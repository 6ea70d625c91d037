"""Rules for a job that is over: DONE, or DEAD with its cause; and for abandoned jobs. Pure.

`infer_cause` asks the sources of evidence in the order of `varuna_core.facts.deciding.Witness`. The
recorded end is kept, apart from details that log lines add: a node out of memory, or the rank that
the others lost.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from varuna_core.facts.catalogue.ends import (
    HANG_REMEDIES,
    REMEDIES,
    RESUMABLE,
    list_remedies,
    refine_end,
)
from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, REFUSED_BY_VJOB
from varuna_core.facts.cause import (
    BY_SCHEDULER,
    OF_NODE,
    OF_RANK,
    Actor,
    End,
    EndCause,
    parse_cause,
)
from varuna_core.facts.deciding import Witness, choose_end
from varuna_core.facts.finding import Finding
from varuna_core.facts.known import Evidence, NotKnown
from varuna_core.facts.remedy import Remedy, Target
from varuna_core.facts.sentences import SCHEDULER, describe_end, find_last_line, name_rank
from varuna_core.records.exits import (
    BY_EXCEPTION,
    NODE_LOST,
    end_of_rank,
    name_signal,
    parse_judged,
)
from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.rank_output import NODE_FAILURE
from varuna_core.records.logs.training_log import parse_phase
from vjob.jobs.monitor.log_lines.errors import (
    explain_quiet,
    find_row,
    first_root,
    is_proof,
    strip_tags,
)
from vjob.jobs.monitor.log_lines.raised import SHELL
from vjob.jobs.monitor.model.snapshot import Health, Line, ReportedExit, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    END_LINES,
    OVER_WORDS,
    conclude,
    find_bad_loss,
    find_end_line,
    find_failed,
    find_life,
    format_line,
    format_names,
    format_step,
    hang_values,
    is_over,
    is_plain_job,
    join,
    line_values,
    list_bad_norms,
    list_unheard,
    make_evidence,
    norm_values,
    remedies_of_line,
    rows_in,
    show,
    step_values,
)
from vjob.jobs.monitor.rules.pace import (
    FLOOR_S,
    LATE_S,
    find_phase,
    find_silence_s,
    is_long_for_pace,
    job_limit_s,
)
from vjob.jobs.monitor.rules.stalled import SILENT_S
from vjob.jobs.runs.outcome import ACTORS
from vjob.jobs.schedulers.job import END_CAUSES, parse_name

OWN_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that mean a fault of the rank itself; SIGABRT and SIGTERM are often sent by others."""
FULL = 0.97
"""Fraction of a node's memory above which the memory counts as full."""
LINES: Mapping[EndCause, str] = {**END_LINES, EndCause.OOM_JOB: "host out of memory"}
"""Name of the catalogue's row for the line in which the scheduler reports the cause, keyed by
cause."""
OF_SCHEDULER = (*LINES.values(), "requeued")
NOT_OF_RANKS = BY_SCHEDULER | {
    EndCause.DEPENDENCY_FAILED,
    EndCause.SUPERVISOR_DIED,
    EndCause.SUPERVISOR_NOT_STARTED,
    EndCause.OOM_JOB,
    EndCause.NO_OUTPUT,
    EndCause.LAUNCH_FAILED,
    EndCause.BATCH_KILLED,
}
"""Causes outside the ranks, which a line that a rank wrote does not replace."""
HUNG = "no step in the last {}, so the run hung"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cause of an unsuccessful end, with a sentence."""

    end: End
    reason: str
    line: Line | None = None
    node: str = ""
    rank: int | None = None
    meaning: str = ""
    """A clause that precedes the remedies."""
    remedies: tuple[Remedy, ...] = ()

    @property
    def is_cancel(self) -> bool:
        """True if the job was cancelled, or never started because a job before it failed."""
        return self.end.cause in (EndCause.CANCELLED, EndCause.DEPENDENCY_FAILED)


def infer_cause(snapshot: Snapshot) -> Cause:
    """Return the cause of an unsuccessful end, from the first witness that knows one."""
    decided = decide_end(snapshot)
    for witness in Witness:
        found = HEARD[witness](snapshot, decided)
        if found is not None:
            return found
    raise AssertionError("the run's record always gives a cause")


def decide_end(snapshot: Snapshot) -> End:
    """Return the recorded end; without a record, the end that the ranks and the scheduler show."""
    if snapshot.end is not None:
        return snapshot.end
    attempt, outcome = snapshot.attempt_end, snapshot.outcome
    if attempt is None and outcome is not None:
        attempt = parse_judged(outcome, None, snapshot.stop)
    return choose_end(attempt, find_job_end(snapshot))


def find_job_end(snapshot: Snapshot) -> End | None:
    """Return the end of the job according to the scheduler alone; None if the scheduler gives no
    cause or reports success. While the job still runs, the scheduler's line in the job's output
    counts too, since it appears before the job's state changes."""
    words = [*(row.state for row in snapshot.scheduler.jobs), snapshot.record_verdict]
    causes = {END_CAUSES.get(parse_name(word)) for word in words}
    told = [parse_cause(row.end_cause) for row in snapshot.scheduler.jobs if row.end_cause]
    cause = next((x for x in [*told, *END_CAUSES.values()] if x in {*told, *causes}), None)
    line = find_end_line(snapshot) if rows_in(snapshot, ("RUNNING", "COMPLETING")) else None
    if cause is None and line is not None:
        cause = next(cause for cause, kind in END_LINES.items() if kind == line.kind)
    if cause is None or cause is EndCause.COMPLETED:
        return None
    actor = ACTORS.get(cause, Actor.SCHEDULER)
    actor = Actor.UNKNOWN if cause is EndCause.CANCELLED else actor
    return End(cause, actor, evidence=(Evidence(SCHEDULER, text=cause.value),))


def _by_outside(snapshot: Snapshot, decided: End) -> Cause | None:
    """Return a cause outside the ranks: the job was ended, or failed as a whole."""
    return _by_word(snapshot, decided) if decided.cause in NOT_OF_RANKS else None


def _by_culprit(snapshot: Snapshot, decided: End) -> Cause | None:
    """Return the failure of a rank that failed by itself; None if there is none."""
    culprit = _find_culprit(snapshot)
    if culprit is None:
        return None
    rank, node, name, reason = culprit
    own = [line for line in snapshot.errors if line.rank == rank]
    root = first_root(own)
    is_telling = root is not None and is_proof(root, Proof.CAUSE)
    is_echo = name in ("SIGTERM", "SIGINT") or (name in (None, "SIGKILL") and not is_telling)
    if is_echo and (_has_word(snapshot, BY_SCHEDULER) or _lost_a_node(snapshot)):
        return None
    end = _choose_end_of(snapshot, decided, rank)
    if name in OWN_SIGNALS:
        return _by_signal(snapshot, end, root if is_telling else None)
    memory = find_memory_proof(snapshot, node) if end.code == SHELL + signal.SIGKILL else ""
    if memory:
        how = f"{name_rank(rank, node)} exited {end.code}, as a shell does after SIGKILL"
        return _by_memory(snapshot, end, f"{how}: {memory}")
    if not is_telling:
        other = _find_peer(snapshot, rank)
        if other is not None:
            return other
        seen = first_root(snapshot.errors)
        root = root or (seen if seen is not None and seen.node in ("", node) else None)
    said = "" if root is None else strip_tags(format_line(root))
    if root is not None and said[:40] not in reason and reason[:40] not in root.text:
        reason = f"{reason} ({format_line(root)})"
    meaning, remedies = "", () if root is not None else list_remedies(end)
    if root is None and end.cause is EndCause.RANK_EXIT and end.code and not find_last_line(end):
        meaning, remedies = explain_quiet(rank, end.code)
    return Cause(end=end, reason=reason, line=root, node=node, rank=rank, meaning=meaning,
                 remedies=remedies)  # fmt: skip


def _find_peer(snapshot: Snapshot, rank: int) -> Cause | None:
    """Return the error of another rank, if the exit of this rank shows no error of its own."""
    other = first_root([line for line in snapshot.errors if line.rank not in (None, rank)])
    if other is None or not is_proof(other, Proof.CAUSE):
        return None
    return Cause(
        end=End(EndCause.RANK_EXCEPTION, Actor.RANK, rank=other.rank, node=other.node),
        reason=f"{format_root(other)}; rank {rank} ended before that rank",
        line=other,
        node=other.node,
        rank=other.rank,
    )


def _choose_end_of(snapshot: Snapshot, decided: End, rank: int) -> End:
    """Return the end of a rank that failed by itself: the recorded end if it names this rank, else
    that of the rank's exit."""
    if decided.rank == rank and decided.cause in OF_RANK:
        return decided
    own = next((item.exit for item in snapshot.ranks if item.rank == rank and item.exit), None)
    if own is not None:
        return refine_end(end_of_rank(own))
    outcome = snapshot.outcome
    assert outcome is not None, "a rank that is the culprit left an exit, or is named by an outcome"
    return parse_judged(outcome, None, snapshot.stop)


def _find_culprit(snapshot: Snapshot) -> tuple[int, str, str | None, str] | None:
    """Return rank, node, signal and a sentence about the culprit, from the outcome or the exits."""
    outcome = snapshot.outcome
    if outcome is not None:
        if outcome.culprit_rank is None or outcome.code in (0, NODE_LOST):
            return None
        node = outcome.culprit_node or ""
        return outcome.culprit_rank, node, outcome.culprit_signal, outcome.reason
    first = find_failed(snapshot)
    if first is None:
        return None
    said = f"{name_rank(first.rank, first.node)} {first.how}"
    return first.rank, first.node, first.signal, said


def _lost_a_node(snapshot: Snapshot) -> bool:
    """Return True if the scheduler reports a failed node, which may have killed a rank that still
    left an exit."""
    return _has_word(snapshot, (EndCause.NODE_FAIL,))


def _has_word(snapshot: Snapshot, causes: Collection[EndCause]) -> bool:
    """Return True if the scheduler reports one of these causes for the job's end."""
    said = find_job_end(snapshot)
    return said is not None and said.cause in causes


def _by_signal(snapshot: Snapshot, end: End, root: Line | None, who: str = "") -> Cause:
    rank, node, name = end.rank, end.node, end.signal
    reason = f"{who or name_rank(rank, node)} was ended by {name}"
    if name != "SIGKILL":
        said = f": {format_line(root)}" if root is not None else ": native code crashed"
        remedies = () if root is not None else list_remedies(end)
        reason += said
        return Cause(end=end, reason=reason, line=root, node=node, rank=rank, remedies=remedies)
    memory = find_memory_proof(snapshot, node)
    if memory:
        return _by_memory(snapshot, end, f"{reason}: {memory}")
    return Cause(
        end=end,
        reason=f"{reason}; sender unknown: kill -9 or out of memory",
        line=root,
        node=node,
        rank=rank,
        remedies=list_remedies(end),
    )


def _by_memory(snapshot: Snapshot, end: End, reason: str) -> Cause:
    """Return the cause for a rank that was killed because memory ran out."""
    killed = _find_oom(snapshot, end.node)
    evidence = (*map(make_evidence, filter(None, (killed,))), *end.evidence)
    end = replace(end, cause=EndCause.OOM_HOST, evidence=evidence)
    remedies = list_remedies(end)
    return Cause(
        end=end, reason=reason, line=killed, node=end.node, rank=end.rank, remedies=remedies
    )


def find_memory_proof(snapshot: Snapshot, node: str) -> str:
    """Return a clause with the evidence that the node's memory was used up; empty without any."""
    line = _find_oom(snapshot, node)
    if line is not None:
        return f"the node's memory was used up ({format_line(line)})"
    if rows_in(snapshot, ("OUT_OF_MEMORY",)):
        return "the scheduler says that memory was used up"
    for item in snapshot.nodes:
        used, total = item.memory_used_mb, item.memory_total_mb
        if item.name == node and used is not None and total and used > FULL * total:
            return f"memory of the node was full: {used:.0f} of {total:.0f} MB"
    return ""


def _find_oom(snapshot: Snapshot, node: str) -> Line | None:
    """Find the line in which the kernel or the scheduler says that memory ran out on `node`, or in
    the job."""
    lines = (line for line in snapshot.errors if line.kind == "host out of memory")
    return next((x for x in lines if x.node in ("", node) and not x.doubt), None)


def _by_lost_node(snapshot: Snapshot, decided: End) -> Cause | None:
    lost = dict(snapshot.scheduler.lost_nodes)
    matches = [match for line in snapshot.errors if (match := NODE_FAILURE.search(line.text))]
    outcome, stop = snapshot.outcome, snapshot.stop or {}
    by_rank = outcome is not None and outcome.code == NODE_LOST and bool(outcome.culprit_node)
    by_stop = stop.get("kind") == "lost" and bool(stop.get("node"))
    kinds = ("node failure", "ended after a node failure")
    line = next((x for kind in kinds for x in snapshot.errors if x.kind == kind), None)
    by_line = line is not None and line == first_root(snapshot.errors)
    if not (lost or by_rank or by_stop or by_line or _lost_a_node(snapshot)):
        return None
    node = matches[0][1] if matches else next(iter(lost), "")
    if not node and outcome is not None and (by_rank or outcome.culprit_signal == "SIGKILL"):
        node = outcome.culprit_node or ""
    node = node or (str(stop["node"]) if by_stop else "") or _find_silent_node(snapshot)
    word = f" (the scheduler calls it {lost[node]})" if lost.get(node) else ""
    rank = outcome.culprit_rank if outcome is not None and by_rank else None
    if decided.cause in OF_NODE:
        end = replace(decided, node=node if matches else decided.node or node)
    else:
        end = End(EndCause.NODE_FAIL, Actor.NODE, node=node, rank=rank, code=decided.code)
    return Cause(
        end=end,
        reason=f"{describe_end(end)}{word}",
        line=line,
        node=node,
        rank=rank,
        remedies=list_remedies(end),
    )


def _find_silent_node(snapshot: Snapshot) -> str:
    """Return the node whose last heartbeat is much older than all others, else an empty text."""
    beats = sorted((node.beat_at, node.name) for node in snapshot.nodes if node.beat_at is not None)
    if len(beats) < 2 or beats[1][0] - beats[0][0] < LATE_S:
        return ""
    return beats[0][1]


def _by_word(snapshot: Snapshot, decided: End) -> Cause | None:
    """Return the cause that the scheduler reports; None if the scheduler reports none."""
    end = decided if decided.cause in NOT_OF_RANKS else find_job_end(snapshot)
    if end is None:
        return None
    line = next((x for x in snapshot.errors if x.kind == LINES.get(end.cause)), None)
    has_left = end.cause is EndCause.TIME_LIMIT and end.code == 0  # its sentence has the step
    reason = describe_end(end) + ("" if has_left else _format_at(snapshot))
    node = line.node if line is not None else ""
    root = first_root(snapshot.errors)
    if root is not None and is_proof(root, Proof.CAUSE) and root.kind not in OF_SCHEDULER:
        reason = f"{reason}; before that, {format_root(root)}"
        line = line or root
    may_hang = end.cause is EndCause.TIME_LIMIT and not has_left
    hung_s = _find_hang_s(snapshot) if may_hang else None
    is_own = end.cause is EndCause.CANCELLED and end.actor is Actor.VJOB
    saved = find_resume_step(snapshot)
    if hung_s is not None:
        remedies = HANG_REMEDIES
    elif is_own and saved is None:
        remedies = ()
    elif snapshot.after and snapshot.attempt is None:
        remedies = REMEDIES[EndCause.DEPENDENCY_FAILED]
    else:
        remedies = list_remedies(end, checkpoint_step=saved)
    meaning = "" if hung_s is None else HUNG.format(format_duration(hung_s))
    return Cause(end=end, reason=reason, line=line, node=node, meaning=meaning, remedies=remedies)


def find_resume_step(snapshot: Snapshot) -> int | None:
    """Return the step of the checkpoint from which the run would continue when it is submitted
    again.

    Return None for a checkpoint from before the run unless a step shows that the run made progress,
    since the run may not be able to load that checkpoint.
    """
    written, submitted = snapshot.checkpoint_at, snapshot.submitted
    is_older = written is not None and submitted is not None and written < submitted
    return None if is_older and snapshot.progress is None else snapshot.checkpoint_step


def _find_ended(snapshot: Snapshot) -> float | None:
    ends = [rank.exit.ended for rank in snapshot.ranks if rank.exit is not None]
    return snapshot.outcome.ended if snapshot.outcome is not None else max(ends, default=None)


def _find_hang_s(snapshot: Snapshot) -> float | None:
    """Return the seconds from the last step to the end, if they are long for the job's pace or the
    agents found a hang; else None."""
    ended, hang = _find_ended(snapshot), snapshot.hang
    if ended is not None and hang is not None and hang.until is None:
        return ended - hang.since
    if ended is None or find_phase(snapshot) is not None:
        return None
    silence = find_silence_s(replace(snapshot, now=ended))
    if silence is None or silence <= FLOOR_S or not is_long_for_pace(snapshot, silence):
        return None
    return silence


def _by_setup(snapshot: Snapshot, decided: End) -> Cause:
    """Return the cause of a run that ended because a line of the conf's `setup` failed. It quotes a
    line of the output that explains the failure, if a known pattern matches one."""
    own = (REFUSED_BY_VJOB, ATTEMPT_ENDED)
    output = first_root([line for line in snapshot.errors if line.kind not in own])
    said = "" if output is None else f" ({format_line(output)})"
    return Cause(
        end=decided,
        reason=f"{describe_end(decided)}{said}",
        line=output,
        node=decided.node,
        remedies=list_remedies(decided),
    )


def _by_root(snapshot: Snapshot, decided: End) -> Cause | None:
    root = first_root(snapshot.errors)
    if decided.cause is EndCause.SETUP_FAILED:
        return _by_setup(snapshot, decided)
    reported = next(filter(None, map(_make_reported_end, snapshot.reported_exits)), None)
    if reported is not None and (root is None or not is_proof(root, Proof.CAUSE)):
        who, end = reported
        if end.signal:
            return _by_signal(snapshot, end, None, who)
        return Cause(end=end, reason=f"{who} exited {end.code}", node=end.node, rank=end.rank)
    if root is None:
        return None
    outcome = snapshot.outcome
    said = outcome.reason if outcome is not None else ""
    # What srun printed as it ended the others explains nothing; an agent's line stands in `said`.
    is_told = said and (root.kind == REFUSED_BY_VJOB or not is_proof(root, Proof.CAUSE))
    is_told = is_told or _quotes(decided, root)
    reason = said if is_told else join([format_root(root), said], "; ")
    reason = reason or format_root(root)
    end = (
        decided if is_told or decided.cause is not EndCause.UNKNOWN else end_of_line(snapshot, root)
    )
    remedies = list_remedies(end) if root.kind == REFUSED_BY_VJOB else ()
    return Cause(
        end=end, reason=reason, line=root, node=root.node, rank=root.rank, remedies=remedies
    )


def _make_reported_end(reported: ReportedExit) -> tuple[str, End] | None:
    """Return the name of the rank or task whose end a launcher reports, and this end. Return None
    for an end that a rank may also have because it lost another rank: by an exception, or by a
    signal that others send."""
    name = name_signal(reported.code - SHELL)
    if reported.code in (0, BY_EXCEPTION) or (name and name not in OWN_SIGNALS):
        return None
    cause = EndCause.RANK_SIGNAL if name else EndCause.RANK_EXIT
    actor = Actor.UNKNOWN if name else Actor.RANK
    seen = (Evidence("log", text=reported.text),)
    end = End(cause, actor, code=reported.code, signal=name, rank=reported.rank, node=reported.node,
              evidence=seen)  # fmt: skip
    return f"{reported.who} on {reported.node}", end


def _quotes(end: End, line: Line) -> bool:
    """Return True if the evidence of the end contains the line, with or without the name before the
    line's colon."""
    text = format_line(line)
    parts = [part[:60] for part in (text, text.partition(": ")[2]) if len(part) > 20]
    return any(part in one.text for part in parts for one in end.evidence)


def end_of_line(snapshot: Snapshot, line: Line) -> End:
    """Return the end that a line reports, for a job whose ranks left no exit."""
    row = find_row(line.kind)
    seen = (make_evidence(line),)
    if snapshot.record_state and snapshot.attempt is None:
        return End(EndCause.START_FAILED, evidence=seen)
    cause = row.cause if row is not None and row.cause is not None else EndCause.UNKNOWN
    if cause is EndCause.UNKNOWN and line.raised:
        cause = EndCause.RANK_EXCEPTION
    elif cause is EndCause.UNKNOWN:
        exited = _find_exit(snapshot) or End(EndCause.RANK_EXIT, Actor.RANK)
        evidence = (*seen, *exited.evidence)
        return replace(exited, rank=line.rank, node=line.node, evidence=evidence)
    actor = Actor.RANK if cause in OF_RANK - {EndCause.RANK_SIGNAL} else Actor.UNKNOWN
    return End(cause, actor, rank=line.rank, node=line.node, evidence=seen)


def _by_start(snapshot: Snapshot, decided: End) -> Cause | None:
    """Return the cause if the batch script ended before any rank started."""
    if snapshot.attempt is not None or not snapshot.record_state or not snapshot.scheduler_lines:
        return None
    said = snapshot.scheduler_lines[-1].strip()
    end = End(EndCause.START_FAILED)
    return Cause(
        end=end,
        reason=f"the batch script ended before any rank started: {said}",
        line=Line(text=said),
        remedies=list_remedies(end),
    )


def _by_record(snapshot: Snapshot, decided: End) -> Cause:
    code = next((row.exit_code for row in snapshot.scheduler.jobs if row.exit_code), "")
    words = {row.word or row.state for row in snapshot.scheduler.jobs if row.state in OVER_WORDS}
    said = "" if is_plain_job(snapshot) else snapshot.message  # of such a job it is whose it is
    said = said or (snapshot.outcome.reason if snapshot.outcome is not None else "")
    last = format_names(sorted(words)) or snapshot.record_verdict or "ended"
    exit_code = f" with exit code {code}" if code and code != "0:0" else ""
    end = _find_exit(snapshot) if decided.cause is EndCause.UNKNOWN else None
    end = end or decided
    return Cause(
        end=end,
        reason=said or f"{last}{exit_code}{_format_at(snapshot)}; the cause is not known",
        node=(snapshot.outcome.culprit_node or "") if snapshot.outcome is not None else "",
        remedies=list_remedies(end),
    )


def _find_exit(snapshot: Snapshot) -> End | None:
    """Return the end by the batch script's exit code, for a job that vjob did not submit."""
    if snapshot.record_state or len(snapshot.scheduler.jobs) != 1:
        return None
    row = snapshot.scheduler.jobs[0]
    if not row.code:
        return None
    name = name_signal(row.code - SHELL)
    cause = EndCause.RANK_SIGNAL if name else EndCause.RANK_EXIT
    actor = Actor.UNKNOWN if name else Actor.RANK
    seen = Evidence(SCHEDULER, text=f"{row.word or row.state} {row.exit_code}")
    return End(cause, actor, code=row.code, signal=name, evidence=(seen,))


Hear = Callable[[Snapshot, End], Cause | None]
HEARD: Mapping[Witness, Hear] = {
    Witness.OUTSIDE: _by_outside,
    Witness.RANK: _by_culprit,
    Witness.NODE: _by_lost_node,
    Witness.JOB: _by_word,
    Witness.LINE: _by_root,
    Witness.SCRIPT: _by_start,
    Witness.RECORD: _by_record,
}
"""Function of each witness: it returns the cause, or None if the witness saw nothing."""


def _format_at(snapshot: Snapshot) -> str:
    """Return ` at step N`; empty if no step is known, as in a table of runs, which does not read
    the logs of runs that are over."""
    return "" if snapshot.progress is None else f" at {format_step(snapshot)}"


def format_root(root: Line) -> str:
    who = name_rank(root.rank, root.node)
    many = f" ({root.num_same} times in all)" if root.num_same > 1 else ""
    return f"{who}: {format_line(root)}{many}" if who else f"{format_line(root)}{many}"


OLD_S = 1800.0
"""Seconds of silence after which a job without any known owner counts as abandoned."""
TRAINING_DONE = "after training is done"


def done(snapshot: Snapshot) -> Verdict | None:
    """Return DONE if the job ended successfully, or its logs show that the last step was done."""
    if is_over(snapshot):
        is_done = _ended_well(snapshot)
    else:
        is_done = _said_done(snapshot) and snapshot.fatal is None
    if not is_done:
        return None
    how = "" if is_plain_job(snapshot) else snapshot.message
    how = how or (snapshot.outcome.reason if snapshot.outcome else "")
    # A job that tells of no steps has none to be counted.
    steps = step_values(snapshot) if snapshot.progress is not None else {}
    is_saved = is_short(snapshot) and snapshot.checkpoint_step is not None
    end = End(EndCause.CANCELLED)  # whoever left early goes on as whoever was told to
    again = list_remedies(end, checkpoint_step=snapshot.checkpoint_step) if is_saved else ()
    doubts = _list_doubts(snapshot)
    return conclude(
        Health.DONE,
        "done",
        {
            **steps,
            "how": how or NotKnown("no record and no outcome says how the run ended"),
            "is_doubted": bool(doubts),
        },
        details=doubts,
        remedies=(*again, *show(snapshot, Target.REPORT)),
        end=snapshot.end or snapshot.attempt_end or _find_good_end(snapshot),
    )


def _find_good_end(snapshot: Snapshot) -> End | None:
    """Return the successful end that the scheduler reports; None for a folder of logs."""
    if not snapshot.scheduler.jobs:
        return None
    words = ", ".join(sorted({row.word or row.state for row in snapshot.scheduler.jobs}))
    return End(EndCause.COMPLETED, Actor.RANK, evidence=(Evidence(SCHEDULER, text=words),))


def choose_first_failed(snapshot: Snapshot) -> Snapshot:
    """Return what is known of the first element that failed, if the job is a plain array, whose
    elements have a step and an end each; any other snapshot unchanged."""
    rows = [row for row in snapshot.scheduler.jobs if "_" in row.id and row.state != "COMPLETED"]
    if not is_plain_job(snapshot) or len(snapshot.scheduler.jobs) < 2 or not rows:
        return snapshot
    first = min(rows, key=lambda row: math.inf if row.ends is None else row.ends)
    return replace(
        snapshot,
        scheduler=replace(snapshot.scheduler, jobs=(first,)),
        errors=tuple(line for line in snapshot.errors if line.node == first.id),
        progress=None,
    )


def dead(snapshot: Snapshot) -> Verdict | None:
    if is_over(snapshot):
        whole, snapshot = snapshot, choose_first_failed(snapshot)
        cause = infer_cause(snapshot)
        is_quoted = cause.line is not None and cause.line.kind not in OF_SCHEDULER
        if snapshot is not whole and not is_quoted:  # a quoted line stands with its element
            cause = replace(cause, reason=f"{snapshot.scheduler.jobs[0].id}: {cause.reason}")
    elif snapshot.fatal is not None and _said_done(snapshot):
        root = snapshot.fatal
        reason = f"{format_root(root)}; it came after {format_step(snapshot)}"
        end = end_of_line(snapshot, root)
        cause = Cause(end=end, reason=reason, line=root, node=root.node, rank=root.rank)
    else:
        return None
    values: dict[str, Any] = {"reason": cause.reason}
    remedies = cause.remedies
    is_known = cause.is_cancel and cause.end.actor is Actor.VJOB
    if remedies and cause.meaning:
        values["meaning"] = cause.meaning
    elif not remedies and not is_known:
        meaning, remedies = remedies_of_line(cause.line)
        values.update(meaning)
    return conclude(
        Health.CANCELLED if cause.is_cancel else Health.DEAD,
        "dead",
        values,
        lines=_list_lines(snapshot, cause.line, is_known=is_known),
        details=_list_details(snapshot, cause),
        remedies=(
            *remedies,
            *show(snapshot, *([] if cause.is_cancel else [Target.ERRORS]), Target.REPORT),
        ),
        node=cause.node,
        rank=cause.rank,
        end=cause.end,
    )


def abandoned(snapshot: Snapshot) -> Verdict | None:
    """Return DEAD or UNKNOWN if no scheduler knows the job and its logs have been silent for long,
    as in a folder of old logs."""
    if is_over(snapshot) or snapshot.record_state == "intent":
        return None
    if snapshot.scheduler.jobs or snapshot.scheduler.problem:
        return None
    life = find_life(snapshot)
    silence = snapshot.now - life if life is not None else None
    if silence is None or silence <= max(OLD_S, job_limit_s(snapshot)):
        return None
    root = first_root(snapshot.errors)
    values = {"silence_s": silence, **step_values(snapshot)}
    if root is None and not is_short(snapshot):
        return conclude(
            Health.UNKNOWN,
            "abandoned",
            {**values, "is_end_known": False},
            remedies=show(snapshot, Target.LOGS),
        )
    meaning, remedies = remedies_of_line(root)
    if root is not None:
        values["line"] = line_values(root)
    return conclude(
        Health.DEAD,
        "abandoned",
        {**values, **meaning, "is_end_known": True},
        lines=_list_lines(snapshot, root),
        details=_list_saved(snapshot),
        remedies=(*remedies, *show(snapshot, Target.ERRORS)),
        node=root.node if root is not None else "",
        rank=root.rank if root is not None else None,
        end=end_of_line(snapshot, root) if root is not None else None,
    )


def _lacks_steps(snapshot: Snapshot) -> bool:
    progress = snapshot.progress
    if progress is None or not progress.knows_end or progress.is_last:
        return False
    # Its number may be that of the step before, and no line need follow the last one.
    missing = (progress.num_steps or 0) - progress.step
    gaps = (after.step - before.step for before, after in pairwise(progress.points))
    return not progress.is_least or missing > max(gaps, default=1)


def is_short(snapshot: Snapshot) -> bool:
    """Return True if the job is known to have done fewer steps than planned."""
    return _lacks_steps(snapshot) and not _count_unwritten(snapshot)


def _count_unwritten(snapshot: Snapshot) -> int:
    """Return the number of bytes that the logs of all nodes lack because they could not be
    written, as on a full disk."""
    nodes: dict[str, int] = {}
    for exit in (rank.exit for rank in snapshot.ranks if rank.exit is not None):
        nodes[exit.node] = max(exit.unwritten, nodes.get(exit.node, 0))
    return sum(nodes.values())


def _list_doubts(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Return findings for a job that exited 0 although its lines show fewer steps than it was to
    do (it stopped early, or its logs lack lines), or a last loss that is not a number."""
    found = []
    unwritten = _count_unwritten(snapshot)
    if is_short(snapshot):
        found.append(Finding("stopped early"))
    elif unwritten and _lacks_steps(snapshot):
        found.append(Finding("logs lack lines", values={"num_bytes": unwritten}))
    return (*found, *_list_bad_loss(snapshot))


def _list_bad_loss(snapshot: Snapshot) -> tuple[Finding, ...]:
    points = snapshot.progress.points if snapshot.progress is not None else ()
    bad, norms = find_bad_loss(points), list_bad_norms(snapshot)
    if bad is not None:
        return (Finding("last loss is not a number", values={"step": bad.step}),)
    return (Finding("last norms are not numbers", values=norm_values(norms)),) if norms else ()


def _ended_well(snapshot: Snapshot) -> bool:
    jobs = snapshot.scheduler.jobs
    if snapshot.end is not None and snapshot.end.cause in BY_SCHEDULER:
        return False  # its ranks may have exited 0 all the same, after a save
    if snapshot.outcome is not None and snapshot.outcome.code != 0:
        return False
    if snapshot.outcome is None and find_failed(snapshot) is not None:
        return False
    if jobs and all(row.state in OVER_WORDS for row in jobs):
        is_completed = all(row.state == "COMPLETED" for row in jobs)
        return is_completed or (snapshot.outcome is not None and not is_short(snapshot))
    if snapshot.record_state == "ended" and snapshot.record_verdict:
        return snapshot.record_verdict == "COMPLETED"
    return snapshot.outcome is not None


def _said_done(snapshot: Snapshot) -> bool:
    """Return True if no scheduler has a job of the run and the logs show that the training is over.
    While the scheduler does not answer, a job whose nodes still send heartbeats is not over."""
    progress = snapshot.progress
    if snapshot.scheduler.jobs:
        return False
    beats = [node.beat_at for node in snapshot.nodes if node.beat_at is not None]
    if snapshot.scheduler.problem and beats and snapshot.now - max(beats) <= SILENT_S:
        return False
    if progress is not None and progress.is_last:
        return True
    for node in snapshot.nodes:
        for text in node.out:
            phase = parse_phase(text)
            if phase is not None and phase[0].startswith(TRAINING_DONE):
                return True
    return False


def _list_lines(
    snapshot: Snapshot, first: Line | None, *, is_known: bool = False
) -> tuple[Line, ...]:
    """Return the lines that a verdict quotes: `first`, which shows the cause, and up to two lines
    of other ranks that only follow from it; only `first` if the cause `is_known` without lines.

    Other lines of the rank that printed `first` are omitted: a launcher prints them about its
    children.
    """
    lines: Sequence[Line] = () if is_known else snapshot.errors
    others = [line for line in lines if line is not first and is_proof(line, Proof.FALLOUT)]
    if first is None:
        return tuple(others[:2])
    own = first.node, first.rank
    return (first, *[line for line in others if (line.node, line.rank) != own][:2])


def _list_details(snapshot: Snapshot, cause: Cause) -> tuple[Finding, ...]:
    details = []
    hang = snapshot.hang or snapshot.suspected
    if hang is not None and hang.until is None and cause.end.cause is not EndCause.HANG:
        values = hang_values(snapshot, hang, _find_ended(snapshot))
        values |= {"attempt": snapshot.attempt, "is_sure": snapshot.hang is not None}
        details.append(Finding("hung", values=values))
    if cause.end.cause is EndCause.TIME_LIMIT:
        details += list_unheard(snapshot)
    return (*details, *_list_bad_loss(snapshot), *_list_saved(snapshot, cause))


def _list_saved(snapshot: Snapshot, cause: Cause | None = None) -> tuple[Finding, ...]:
    """Return a finding about the last checkpoint; for a cancelled training also if no checkpoint is
    known."""
    step = snapshot.checkpoint_step
    if step is not None:
        is_advised = cause is not None and cause.end.cause in RESUMABLE
        goes_on = not is_advised and find_resume_step(snapshot) is not None
        return (Finding("checkpoint", values={"step": step, "goes_on": goes_on}),)
    if snapshot.progress is None or cause is None or not cause.is_cancel or is_plain_job(snapshot):
        return ()
    folders = [disk.path for disk in snapshot.disks if disk.what == "checkpoints"]
    line = {} if snapshot.saved is None else {"line": line_values(snapshot.saved)}
    return (Finding("no checkpoint", values={"folders": folders, **line}),)
