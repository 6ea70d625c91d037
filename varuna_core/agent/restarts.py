"""Decide whether a failed attempt of a fixed run is restarted in the same job.

    close ─► find_obstacle ─► decide ─► `restarted` event ─► outcome.json ─► the batch script waits,
                                 │                                           opens the next attempt
                                 └─ no: the reason of the outcome says why

The whole run has one budget, counted by its `restarted` events: a requeue does not refill it, and
if that event cannot be written, nothing is restarted. The event is written before the outcome, so
that nobody takes an outcome for the end of a run that goes on. In a split run the first group's job
decides; the others read next.json once the outcome exists, and go on to the same attempt. In a run
that may morph, the manager applies the same number as its own limit (`Rules.most_fruitless`) and
calls `is_same` to compare failures. `choose_way` decides if the job itself is requeued.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Iterable, List, Mapping, Optional, Tuple

from varuna_core.agent.meeting.watch import Peer
from varuna_core.agent.setup.site import STOPPED, WRONG_INPUT
from varuna_core.facts.cause import End, EndCause
from varuna_core.hang.signs import read_hang
from varuna_core.records.checkpoints import find_full, list_full
from varuna_core.records.exits import HUNG, NODE_LOST, Judgement, Outcome, read_exit, read_outcome
from varuna_core.records.files import (
    describe_room,
    is_listed,
    open_file,
    read_json,
    write_json,
)
from varuna_core.records.logs.step_counts import parse_counts
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.nodes import read_reports
from varuna_core.records.plan import Plan, find_store
from varuna_core.records.record import (
    NO_ROOM,
    REQUEUED,
    append_event,
    is_cancel_asked,
    read_restarts,
)
from varuna_core.records.requests import HANG, read_signal, read_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.training import read_training

FIRST_WAIT_S = 3.0
LONGEST_WAIT_S = 60.0
TRACE_BYTES = 256 * 1024
"""Bytes read from the end of a trace to find the last step: more than one step's details."""
LAST_LINES = 400
POLL_S = 0.3
ROOM_LOOK_S = 1.0
SILENT_S = 600.0
"""Seconds to wait for a sign of life of the first group's job beyond the usual limit; longer than
clients of a file server cache the times of a file."""
DECIDING_S = 30.0
"""Seconds for the first group's job to judge, once all exit files that it waits for exist."""
CALLS = ("signal", "cancel")
"""Kinds of a stop that ask the whole job to end."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_STEP = re.compile(rb'^\{"step": ?(\d{1,15}),.*\}$', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """Features of a failed attempt that are equal if the same failure occurs again."""

    error: str
    """Signal or exit code and the last line of the first rank that failed, with numbers replaced,
    since addresses, times and ranks differ from one attempt to the next."""
    step: Optional[int]
    """The last step that was done; None if it is not known."""


@dataclass(frozen=True)
class Budget:
    """The numbers of restarts that the conf allows and that the run has used."""

    allowed: int
    used: int
    starts_same: bool
    """True if the run is restarted even after the same failure twice in a row."""


@dataclass(frozen=True)
class Decision:
    """The wait before the restart, or why there is none; no reason if it needs no explanation."""

    wait_s: Optional[float]
    why_not: str = ""


def explain_requeue(run: RunFolder, plan: Plan, attempt: AttemptFolder, outcome: Outcome) -> str:
    """Explain why a job that hung is not requeued; empty if it is."""
    if plan.layout == "split":
        return "one job of a split run cannot be requeued without the others"
    before = run.attempt(attempt.number - 1)
    earlier = read_outcome(before) if attempt.number else None
    if earlier is None or earlier.code != HUNG or plan.restart_same:
        return ""
    now = describe_failure(plan, attempt, outcome, read_stop(attempt))
    then = describe_failure(plan, before, earlier, read_stop(before))
    return explain_same(now) if is_same(now, then) else ""


@dataclass(frozen=True)
class Again:
    """The attempt that follows a failed one."""

    number: int
    wait_s: float


def decide(
    obstacle: Optional[str],
    failure: Failure,
    before: Optional[Failure],
    budget: Budget,
    left_s: Optional[float],
) -> Decision:
    """Decide whether to restart the attempt after `failure`.

    `obstacle` is a reason that forbids a restart whatever the budget, `before` the failure of the
    attempt whose restart this attempt was, `left_s` the time to the job's time limit, if known. If
    no step is known, two failures are never taken for the same, and only the budget counts.
    """
    if budget.allowed <= 0:
        return Decision(None)
    if obstacle is not None:
        return Decision(None, obstacle)
    if budget.used >= budget.allowed:
        return Decision(None, f"cluster.restarts: {budget.allowed} is used up")
    if is_same(failure, before) and not budget.starts_same:
        return Decision(None, explain_same(failure))
    wait_s = get_wait_s(budget.used)
    if left_s is not None and left_s <= wait_s:
        return Decision(None, "the time limit comes first: not started again")
    return Decision(wait_s)


def is_same(failure: Failure, before: Optional[Failure]) -> bool:
    return failure == before and failure.step is not None


def explain_same(failure: Failure) -> str:
    return (
        f"the same error after step {failure.step} twice in a row: not started again "
        "(cluster.restart_same: true starts it anyway)"
    )


def get_wait_s(used: int) -> float:
    """Return the backoff before the next start: 3 s, doubled each time, at most a minute."""
    return float(min(FIRST_WAIT_S * 2 ** min(used, 10), LONGEST_WAIT_S))


def find_obstacle(
    outcome: Outcome,
    stop: Optional[Mapping[str, Any]],
    *,
    began: bool,
    called: bool,
    hang_do: str = "auto",
) -> Optional[str]:
    """Explain why this attempt is not restarted whatever the budget: None if nothing prevents a
    restart, empty if the reason needs no explanation.

    `began`: all nodes were ready and the ranks were started. `called`: the job was asked to end.
    """
    kind = (stop or {}).get("kind")
    if outcome.code == 0 or called or (outcome.culprit_rank is None and kind in CALLS):
        return ""
    if not began:
        return "the ranks never started, and would not start now either: not started again"
    if outcome.code == NODE_LOST:
        return (
            "a fixed run has no other node to replace the lost one: cluster.requeue gets one, "
            "morph continues without it"
        )
    if outcome.code == STOPPED:
        return "SIGTERM is a call to end: not started again"
    if outcome.code == WRONG_INPUT:
        return f"exit code {WRONG_INPUT} stands for wrong input: not started again"
    if kind == HANG and hang_do == "stop":
        return "on_hang.do is stop: not started again"
    if outcome.culprit_rank is None and kind not in ("rank", HANG):
        return "no rank failed: not started again"
    return None


def continue_run(
    run: RunFolder,
    plan: Plan,
    attempt: AttemptFolder,
    judged: Judgement,
    *,
    called: bool,
    left_s: Optional[float],
) -> Tuple[str, Optional[Again]]:
    """Return why there is no further attempt, and the next attempt if there is one.

    `called`: the batch script was asked to end. `left_s`: time to the job's time limit.
    """
    outcome = judged.outcome
    if outcome.code == HUNG and plan.hang_do == "requeue":
        return explain_requeue(run, plan, attempt, outcome), None
    if not plan.restarts or plan.morph:
        return "", None
    stop = read_stop(attempt)
    events = read_restarts(run)
    used = [event for event in events if not event.get("no_room")]
    budget = Budget(plan.restarts, len(used), plan.restart_same)
    obstacle = find_obstacle(
        outcome,
        stop,
        began=is_listed(attempt.go),
        called=called or _is_asked_to_leave(run, attempt),
        hang_do=plan.hang_do,
    )
    failure = describe_failure(plan, attempt, outcome, stop)
    last = events[-1] if events else {}
    before = None
    if last.get("next") == attempt.number:  # else this attempt was Slurm's: nothing came twice
        before = Failure(str(last.get("error")), last.get("step"))
    waited = await_room(run, plan, attempt, judged.end, left_s) if obstacle is None else None
    decision = waited or decide(obstacle, failure, before, budget, left_s)
    if decision.wait_s is None:
        return decision.why_not, None
    again = Again(attempt.number + 1, decision.wait_s)
    try:
        if plan.layout == "split":
            write_json(attempt.next, asdict(again))
        append_event(
            run.events(),
            "restarted",
            attempt=attempt.number,
            reason=outcome.reason,
            error=failure.error,
            step=failure.step,
            next=again.number,
            left=budget.allowed - budget.used - (waited is None),
            wait_s=again.wait_s,
            no_room=waited is not None,
        )
    except OSError as error:
        return f"not started again, as that cannot be recorded: {error}", None
    return "", again


def await_room(
    run: RunFolder,
    plan: Plan,
    attempt: AttemptFolder,
    end: End,
    left_s: Optional[float],
) -> Optional[Decision]:
    """Wait until the folder whose lack of space ended the attempt has space again, then restart;
    do not restart if the run is cancelled or its time is over meanwhile.

    Such a restart does not count against `cluster.restarts`. Return None if the attempt did not end
    for lack of space. In a split run the first group's job waits for space, and the others wait
    for that job (`await_first_group`).
    """
    if not list_full(end):
        return None
    full = found = find_full(run.path, find_store(run, plan))
    if found is None:
        return None
    deadline = None if left_s is None else time.monotonic() + left_s - LONGEST_WAIT_S
    said = f"attempt {attempt.number + 1} waits for room in {full} ({describe_room(found)})"
    print(said, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        append_event(run.events(), NO_ROOM, attempt=attempt.number, folder=str(full))
    while found is not None:
        if is_cancel_asked(run):
            return Decision(None, f"cancelled while it waited for room in {full}")
        if deadline is not None and time.monotonic() > deadline:
            return Decision(None, f"the time limit came before there was room in {full}")
        show_waiting(attempt)
        time.sleep(ROOM_LOOK_S)
        found = find_full(run.path, find_store(run, plan))
    return Decision(FIRST_WAIT_S)


def show_waiting(attempt: AttemptFolder) -> None:
    """Show the other jobs of a split run that this job waits, by a file's time, which needs no
    disk space."""
    with contextlib.suppress(OSError):
        os.utime(attempt.go)


def _read_sign(attempt: AttemptFolder) -> int:
    try:
        return os.stat(attempt.go).st_mtime_ns
    except OSError:
        return 0


def await_first_group(run: RunFolder, plan: Plan, attempt: AttemptFolder) -> Optional[Again]:
    """Return the next attempt that the first group's job decides on; call it in the other jobs.

    Wait as long as the first group gives signs of life, and then as long as its job may itself
    wait for the other groups' exit files, or shows that it waits for disk space.
    """
    if not plan.restarts or not is_listed(attempt.go):
        return None
    first = Peer(plan.node(0))
    limit_s = plan.timing.grace_s + plan.timing.lost_s + DECIDING_S
    hopeful = time.monotonic()
    sign = _read_sign(attempt)
    while not is_listed(attempt.outcome):
        now = time.monotonic()
        stop = read_stop(attempt)
        if stop is not None and stop["kind"] not in ("rank", "group", HANG):
            return None
        before, sign = sign, _read_sign(attempt)
        if sign != before or first.is_living(read_json(attempt.beat(0)), now, plan.timing.lost_s):
            hopeful = now
        wait_s = POLL_S
        if now - hopeful > limit_s:
            wait_s = ROOM_LOOK_S
            full = find_full(run.path, find_store(run, plan))
            if full is None or is_cancel_asked(run):
                return None
            if now - hopeful > limit_s + SILENT_S:
                said = f"no sign of the first group's job for {now - hopeful:.0f} s"
                print(f"this job ends: {said}, and {full} is full", file=sys.stderr, flush=True)
                return None
        time.sleep(wait_s)
    found = read_json(attempt.next) if is_listed(attempt.next) else None
    return Again(**found) if isinstance(found, dict) else None


def number_attempt(run: RunFolder, requeues: int) -> int:
    """Return the number of a batch script's first attempt, which no earlier attempt has."""
    return requeues + len(read_restarts(run))


def _is_asked_to_leave(run: RunFolder, attempt: AttemptFolder) -> bool:
    """Return True if the run is being cancelled, or SIGUSR1 asked its ranks to save and leave."""
    signal = read_json(attempt.signal) if read_signal(attempt) is not None else {}
    return signal.get("name") == "USR1" or is_cancel_asked(run)


# How an attempt failed, by its files.


def describe_failure(
    plan: Plan, attempt: AttemptFolder, outcome: Outcome, stop: Optional[Mapping[str, Any]]
) -> Failure:
    """Return the error and the last step of a failed attempt."""
    rank = outcome.culprit_rank
    hang = read_hang(attempt) if outcome.code == HUNG else None
    if hang is not None:  # on other nodes other words name the same
        what = f"a hang ({hang.witness.value} {_NUMBERS.sub('#', hang.collective)})"
        return Failure(what.replace(" )", ")"), find_last_step(plan, attempt, rank))
    found = read_exit(attempt, plan, rank) if rank is not None else None
    how, said = f"exit {outcome.code}", (stop or {}).get("reason", outcome.reason)
    if found is not None:
        said = found.last_words
        if found.signal:  # it had no last word: its last line may be any
            how, said = found.signal, ""
    error = f"{how}: {_NUMBERS.sub('#', str(said))}".rstrip(": ")
    return Failure(error, find_last_step(plan, attempt, rank))


def find_last_step(plan: Plan, attempt: AttemptFolder, rank: Optional[int]) -> Optional[int]:
    """Return the last step in the traces of this rank, the first rank and the last rank, and in the
    logs of their nodes; other nodes are not read. The trace of a killed rank lacks its last
    seconds."""
    last = plan.world - 1
    ranks = {0, last, last if rank is None else rank}
    reports = read_reports(attempt)
    indices = {plan.node_of_rank(item).index for item in ranks}
    hosts = sorted({reports[index].host for index in indices if index in reports})
    found = [_find_traced(attempt, plan.node_of_rank(item).index, item) for item in ranks]
    found += [steps[-1] for steps, _ in _read_printed(plan, attempt, hosts) if steps]
    return max((step for step in found if step is not None), default=None)


def find_short(run: RunFolder, plan: Plan, attempt: AttemptFolder) -> Optional[Tuple[int, int]]:
    """Return the last step and the number of all steps of an attempt that ended before its last
    one. Return None if that is not certain, as when the next step that it would print could be the
    last: after a single line, any of those that its optimizer can have made since."""
    step = find_last_step(plan, attempt, None)
    hosts = sorted({report.host for report in read_reports(attempt).values()})[:1]
    printed = _read_printed(plan, attempt, hosts)
    gaps = [steps[i] - steps[i - 1] for steps, _ in printed for i in range(1, len(steps))]
    gaps = gaps or _count_steps(attempt, 0)
    totals = {total for _, total in printed if total is not None}
    with contextlib.suppress(ValueError):
        totals, gaps = {read_training(run.training).steps}, [*gaps, 1]
    if step is None or len(totals) != 1 or not gaps or step + max(gaps) >= min(totals):
        return None
    return step, min(totals)


def _count_steps(attempt: AttemptFolder, rank: int) -> List[int]:
    """Return the number of the rank's optimizer steps in a list, which is empty if not known."""
    counts = None
    with contextlib.suppress(OSError):
        counts = parse_counts(attempt.steps(rank).read_bytes())
    return [] if counts is None or counts.is_captured else [counts.earlier + counts.count]


def _find_traced(attempt: AttemptFolder, node: int, rank: int) -> Optional[int]:
    """Return the last step in the trace of the rank or of its node, which other ranks share."""
    steps: List[bytes] = []
    for path in (attempt.node_trace(node), attempt.trace(rank)):
        with contextlib.suppress(OSError), open_file(path) as handle:
            handle.seek(max(0, handle.seek(0, 2) - TRACE_BYTES))
            steps += _STEP.findall(handle.read(TRACE_BYTES))
    return max(map(int, steps), default=None)


def _read_printed(
    plan: Plan, attempt: AttemptFolder, hosts: Iterable[str]
) -> List[Tuple[List[int], Optional[int]]]:
    """Read the steps and their total from the last lines of each log, such as `step 10/100`."""
    # An attempt that ends well needs none of these patterns.
    from varuna_core.records.logs.progress import read_pattern
    from varuna_core.records.logs.steps import StepReader

    found = []
    for path in [attempt.node_log(host, kind) for host in hosts for kind in ("out", "err")]:
        reader = StepReader(read_pattern(plan.progress), is_partial=True)
        steps: List[int] = []
        for line in last_lines(path, LAST_LINES):
            reader.read(line)
            if reader.last is not None and reader.last not in steps[-1:]:
                steps.append(reader.last)
        found.append((steps, reader.num_steps))
    return found


def choose_code(run: RunFolder, code: int, *, is_short: bool = False) -> int:
    """Return the exit code of a batch script whose ranks ended with `code`. It is not 0 after
    `vjob cancel` or if steps are missing, so that no dependent job (Slurm's afterok) starts."""
    return STOPPED if code == 0 and (is_short or is_cancel_asked(run)) else code


REQUEUE_WORD = "requeue"
"""Word that `close` prints instead of an exit code if the job is to be requeued."""


class Way(Enum):
    """Next action of a batch script that ends; the script reads the values.

    The job is requeued if its attempt asks for that, and if Slurm preempts the job with a grace
    time (GraceTime). In that case Slurm signals the steps, and takes a script that ends before the
    grace is over for a failed job, or for a completed one if its ranks saved and left with 0.
    """

    GO_ON = "go-on"
    """The script ends with the code of its ranks, or restarts them."""
    REQUEUE = "requeue"
    LEAVE = "leave"
    """A later start of the job is running, since this node was cut off: do not requeue the job."""
    ENDED = "ended"
    """Somebody ended the job meanwhile."""


@dataclass(frozen=True)
class JobFacts:
    """State of the job according to the scheduler; a fact that it does not report is None."""

    is_running: Optional[bool] = None
    is_preempted: Optional[bool] = None
    restarts: Optional[int] = None


def parse_job(text: str) -> JobFacts:
    """Parse the output of `scontrol --oneliner show job`."""
    if not text.strip():
        return JobFacts()
    restarts = re.search(r"\sRestarts=(\d+)(?:\s|$)", text)
    return JobFacts(
        is_running="JobState=RUNNING" in text,
        is_preempted=re.search(r"\sPreemptTime=\d", text) is not None,
        restarts=int(restarts[1]) if restarts else -1,
    )


def may_return(said: str, *, warned: bool) -> bool:
    """Return False if the job cannot be requeued, so that the scheduler need not be asked."""
    return said in (REQUEUE_WORD, str(STOPPED)) or (said == "0" and warned)


def note_requeue(run: RunFolder, job_id: str, start: int, job: JobFacts) -> None:
    """Record why the job is requeued, since accounting says REQUEUED whatever the cause."""
    cause = EndCause.PREEMPTED if job.is_preempted else EndCause.REQUEUED
    with contextlib.suppress(OSError):  # a full disk keeps nobody from coming again
        append_event(run.events(), REQUEUED, job_id=job_id, start=start, cause=cause.value)


def choose_way(said: str, ended: str, job: JobFacts, restarts: int) -> Way:
    """Choose the script's next action. `said` is the output of `close`, `ended` the signal that
    ended the script, `restarts` the job's count of restarts when the script began."""
    if said == REQUEUE_WORD:
        if ended:
            return Way.ENDED
    elif not (job.is_running and job.is_preempted):
        return Way.GO_ON
    if job.restarts is not None and job.restarts != restarts:
        return Way.LEAVE
    return Way.REQUEUE
