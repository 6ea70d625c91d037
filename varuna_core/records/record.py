"""record.json and events*.jsonl: what was submitted, what happened to it, and how it ended.

The record is written by `vjob` only (intent before the scheduler knows of the run, ids after, the
outcome once somebody looks); what happens on the nodes is in the attempt folders. Of events there
is one writer a file and one line an event, in order.

Kinds: intent, submitted, refused, adopted, started, preflight, stopping, ended, cancel-asked,
cancel-failed, requeued, restarted, no-room, morph, left-out, grow-asked, shrink-asked,
slow-asked, withdrawn, tracking; of `vjob watch` verdict, notice, action; a later
one (checkpoint) joins the list.
`time` is seconds since the epoch, UTC.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from varuna_core.facts import legacy
from varuna_core.facts.cause import Actor, End, EndCause, parse_cause, parse_end
from varuna_core.facts.known import Evidence
from varuna_core.records.exits import Outcome, end_of_stop
from varuna_core.records.files import (
    MOST_LINES,
    append_line,
    expect_types,
    read_json,
    read_lines,
    write_json,
)
from varuna_core.records.requests import read_stop
from varuna_core.records.runfolder import RunFolder

RECORD_FORMAT = 1
INTENT = "intent"
SUBMITTED = "submitted"
REFUSED = "refused"
ENDED = "ended"
NO_ROOM, REQUEUED = "no-room", "requeued"


@dataclass(frozen=True)
class JobRecord:
    """One job of the run in the scheduler's eyes."""

    id: str
    group: str | None
    """The group that this job holds in a split run; None where one job holds all."""


@dataclass(frozen=True)
class JobEnd:
    """One job, or component of a het job, as the scheduler had it when it was over."""

    id: str
    state: str
    """A name of `JobState`."""
    word: str = ""
    """The scheduler's own."""
    nodes: str = ""
    reason: str = ""
    exit_code: str = ""
    restarts: int = 0
    started: Optional[float] = None
    ended: Optional[float] = None
    limit_s: Optional[float] = None
    earlier: str = ""
    """Ends of its earlier starts, oldest first: words of `EndCause`, separated by blanks."""


@dataclass(frozen=True)
class ArrayPlace:
    """A run's place in a Slurm array, each element of which is a run of its own."""

    name: str
    """What the elements' names begin with; it stands in the comment of their jobs."""
    index: int


@dataclass(frozen=True)
class CodeRecord:
    """The user's code as it was submitted."""

    root: str
    """The working tree of git, or the folder that was copied."""
    commit: str = ""
    """Empty where there is no git, or no commit yet."""
    branch: str = ""
    """Empty where HEAD was detached."""
    dirty: bool = False
    """Whether files that git knows had changed since."""
    untracked: int = 0
    """Files, and folders of them alone, that git neither knew nor ignored."""
    kept: str = ""
    """copy or git: where the code of the run folder is from; empty where the run has none of its
    own."""
    num_files: int = 0
    size_bytes: int = 0
    """Of the code in the run folder."""
    note: str = ""
    """Why the run has no code of its own, or what is missing above."""


def format_commit(code: Optional[CodeRecord]) -> str:
    """`1a2b3c4d5e on main, dirty`; empty where no commit is known."""
    if code is None or not code.commit:
        return ""
    branch = f" on {code.branch}" if code.branch else ""
    return f"{code.commit[:10]}{branch}{', dirty' if code.dirty else ''}"


@dataclass(frozen=True)
class JobLimits:
    """Limits that the jobs of a run were submitted with."""

    walltime_s: Optional[float] = None
    """None where there is no time limit."""
    warn_s: float = 0.0
    """So long before it, USR1 goes to the batch script; 0 for never."""
    may_requeue: bool = False


@dataclass(frozen=True)
class RunRecord:
    """A run as `vjob` knows it."""

    run: str
    name: str
    state: str
    """intent, submitted, refused or ended."""
    scheduler: str
    layout: str
    num_jobs: int
    """How many jobs the run needs; fewer in `jobs` means that a submit was cut off."""
    jobs: tuple[JobRecord, ...]
    submitted: float
    user: str
    host: str
    conf: str
    """The conf's own path."""
    version: str
    pid: int
    """The submitting process on `host`, and its start, while the state is intent."""
    pid_start: str | None
    end: Optional[End] = None
    """How it ended; None while it goes on, and in records of before."""
    message: str = ""
    """Why it was refused, or how it ended: rendered from `end`."""
    verdict: str = ""
    """The scheduler's last word on an ended run."""
    outcome: Outcome | None = None
    """How the last attempt ended, the culprit named."""
    after: tuple[str, ...] = ()
    """Folders of the runs that must end well before this one starts."""
    after_any: tuple[str, ...] = ()
    """Folders of the runs that must be over before this one starts."""
    sweep: str = ""
    """Name of the sweep that it is a run of; empty where it is of none."""
    swept: Mapping[str, str] = field(default_factory=dict)
    """The keys of the sweep and the values that this run has of them."""
    array: Optional[ArrayPlace] = None
    code: Optional[CodeRecord] = None
    """None where it lies in no repository and was not copied."""
    limits: Optional[JobLimits] = None
    """As asked for at the submit, whatever an admin changed since; not in old records."""
    job_ends: tuple[JobEnd, ...] = ()
    """Ends of its jobs, kept because the scheduler forgets them. Missing in old records."""


def write_record(run: RunFolder, record: RunRecord) -> None:
    write_json(run.record, dict(asdict(record), format=RECORD_FORMAT))


def read_record(run: RunFolder) -> RunRecord | None:
    """None where the file is missing, torn, or of another format."""
    value = read_json(run.record)
    if not isinstance(value, dict) or value.pop("format", None) != RECORD_FORMAT:
        return None
    try:
        return _parse(value)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _parse(value: dict[str, Any]) -> RunRecord:
    """Fields that a newer vjob added are left out: a long `vjob watch` outlives an upgrade."""
    known = {one.name for one in fields(RunRecord)}
    value = {name: item for name, item in value.items() if name in known}
    outcome, array, code = value["outcome"], value.get("array"), value.get("code")
    limits = value.get("limits")
    made = RunRecord(
        **{
            **value,
            "jobs": tuple(expect_types(JobRecord(**job)) for job in value["jobs"]),
            "end": parse_end(value.get("end")),
            "outcome": None if outcome is None else expect_types(Outcome(**outcome)),
            "after": tuple(value.get("after", ())),  # not in old records, nor are those below
            "after_any": tuple(value.get("after_any", ())),
            "array": None if array is None else expect_types(ArrayPlace(**array)),
            "code": None if code is None else expect_types(CodeRecord(**code)),
            "limits": None if limits is None else expect_types(JobLimits(**limits)),
            "job_ends": tuple(expect_types(JobEnd(**one)) for one in value.get("job_ends", ())),
        }
    )
    if made.state == SUBMITTED and not made.jobs:
        raise ValueError("a run that was submitted has a job")
    return expect_types(made)


def refuse(
    record: RunRecord,
    message: str,
    cause: EndCause = EndCause.REFUSED,
    actor: Actor = Actor.SCHEDULER,
) -> RunRecord:
    """The record of a run that never had its jobs."""
    evidence = (Evidence("vjob", text=message),)
    end = End(cause, actor, at=time.time(), started=False, evidence=evidence)
    return replace(record, state=REFUSED, end=end, message=message)


def read_run_end(run: RunFolder, record: RunRecord) -> Optional[End]:
    """How the run ended: as the record has it, or as an older vjob left it; None while it goes
    on."""
    if record.end is not None or record.state not in (ENDED, REFUSED):
        return record.end
    attempts = run.attempts()
    stop = read_stop(attempts[-1]) if attempts else None
    return legacy.read_end(
        asdict(record),
        None if record.outcome is None else asdict(record.outcome),
        None if stop is None else end_of_stop(stop),
        read_events(run),
    )


CANCEL_ASKED, CANCEL_FAILED = "cancel-asked", "cancel-failed"


CLOCK_SET = "clock-set"
"""A kind of event: the clock of the attempt's first node stepped, by so many seconds."""


def append_event(path: Path, kind: str, **facts: Any) -> None:
    append_line(path, {"time": round(time.time(), 3), "kind": kind, **facts})


def read_events(run: RunFolder) -> list[dict[str, Any]]:
    """All events of the run in time order, whichever job wrote them; of very many the first."""
    lines = chain.from_iterable(map(read_lines, run.all_events()))
    events = [
        event
        for event in islice(lines, MOST_LINES)
        if isinstance(event, dict) and _is_number(event.get("time"))
    ]
    return sorted(events, key=lambda event: float(event["time"]))


def is_cancel_asked(run: RunFolder) -> bool:
    """True after `vjob cancel`, whose event is written before its signal; not after one that
    failed, and left the run as it was."""
    return count_cancels(run) > 0


def count_cancels(run: RunFolder) -> int:
    """How often `vjob cancel` asked the run to end; 0 where the last one failed."""
    kinds = [event.get("kind") for event in read_events(run)]
    cancels = [kind for kind in kinds if kind in (CANCEL_ASKED, CANCEL_FAILED)]
    return cancels.count(CANCEL_ASKED) if cancels[-1:] == [CANCEL_ASKED] else 0


def read_requeues(run: RunFolder, job_id: str) -> Dict[int, EndCause]:
    """Causes of requeues that the batch script of a job asked for itself, by start from 0 on."""
    found = {}
    for event in read_lines(run.events()):
        if isinstance(event, dict) and event.get("kind") == REQUEUED:
            start = event.get("start")
            if isinstance(start, int) and event.get("job_id") == job_id:
                found[start] = parse_cause(event.get("cause"))
    return found


def read_restarts(run: RunFolder) -> List[Dict[str, Any]]:
    """Events of failed attempts that were restarted in the same job, oldest first."""
    return [
        event
        for event in read_lines(run.events())
        if isinstance(event, dict) and event.get("kind") == "restarted"
    ]


MORPH_PARTS = ("notice_s", "stop_s", "plan_s", "start_s", "load_s", "first_step_s")
"""Parts of a morph's pause, in order: from the last sign that all was well to the first step in the
new layout. `varuna_core/morph/cost.py` writes them."""


def read_morph_parts(event: Mapping[str, Any]) -> Dict[str, float]:
    """Seconds by part, as far as the event has them: one that ended before its first step lacks
    some."""
    return {name: float(event[name]) for name in MORPH_PARTS if _is_number(event.get(name))}


def read_pause_s(event: Mapping[str, Any]) -> Optional[float]:
    """None where no step came of it."""
    return float(event["pause_s"]) if _is_number(event.get("pause_s")) else None


def format_morph(event: Mapping[str, Any]) -> str:
    """`from 8 x 4 to 6 x 4, 12 s`."""
    pause_s = read_pause_s(event)
    took = "no step came of it" if pause_s is None else f"{pause_s:.0f} s"
    return f"from {event.get('from', '?')} to {event.get('to', '?')}, {took}"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 2**63
