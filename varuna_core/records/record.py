"""record.json and events*.jsonl: what was submitted, its history, and how it ended.

Only `vjob` writes the record: the intent before the scheduler knows of the run, job ids after that,
and the outcome once a command looks at the ended run. What happens on the nodes is in the attempt
folders. Each file of events has one writer, and one line for each event, in order.

Kinds: intent, submitted, refused, adopted, started, preflight, stopping, ended, cancel-asked,
cancel-failed, requeued, restarted, no-room, morph, left-out, grow-asked, shrink-asked,
slow-asked, withdrawn, tracking; of `vjob watch` verdict, notice, action.
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
    """One job of the run in the scheduler."""

    id: str
    group: str | None
    """The group that this job runs in a split run; None if one job runs all groups."""


@dataclass(frozen=True)
class JobEnd:
    """The end of one job, or of one component of a het job, as the scheduler reported it."""

    id: str
    state: str
    """A name of `JobState`."""
    word: str = ""
    """The scheduler's own word for the state."""
    nodes: str = ""
    reason: str = ""
    exit_code: str = ""
    restarts: int = 0
    started: Optional[float] = None
    ended: Optional[float] = None
    limit_s: Optional[float] = None
    earlier: str = ""
    """Ends of its earlier starts, oldest first: words of `EndCause`, separated by spaces."""


@dataclass(frozen=True)
class ArrayPlace:
    """A run's place in a Slurm job array, each task of which is a run of its own."""

    name: str
    """Common beginning of the tasks' names, which is stored in the comment of their jobs."""
    index: int


@dataclass(frozen=True)
class CodeRecord:
    """The user's code as it was submitted."""

    root: str
    """The git working tree, or the folder that was copied."""
    commit: str = ""
    """Hash of the commit; empty without git or before the first commit."""
    branch: str = ""
    """Name of the branch; empty if HEAD was detached."""
    dirty: bool = False
    """True if tracked files had uncommitted changes."""
    untracked: int = 0
    """Number of untracked files that are not ignored; a folder with only such files counts once."""
    kept: str = ""
    """Source of the code in the run folder: copy or git; empty if the run has no code of its
    own."""
    num_files: int = 0
    size_bytes: int = 0
    """Size of the code in the run folder."""
    note: str = ""
    """Reason why the run has no code of its own, or what could not be recorded."""


def format_commit(code: Optional[CodeRecord]) -> str:
    """Format a commit such as `1a2b3c4d5e on main, dirty`; empty if none is known."""
    if code is None or not code.commit:
        return ""
    branch = f" on {code.branch}" if code.branch else ""
    return f"{code.commit[:10]}{branch}{', dirty' if code.dirty else ''}"


@dataclass(frozen=True)
class JobLimits:
    """Limits with which the jobs of a run were submitted."""

    walltime_s: Optional[float] = None
    """Time limit; None if there is none."""
    warn_s: float = 0.0
    """Seconds before the time limit at which USR1 is sent to the batch script; 0 for never."""
    may_requeue: bool = False


@dataclass(frozen=True)
class RunRecord:
    """Record of a run: name, state, scheduler and jobs."""

    run: str
    name: str
    state: str
    """intent, submitted, refused or ended."""
    scheduler: str
    layout: str
    num_jobs: int
    """Number of jobs that the run needs; if `jobs` has fewer, the submit was interrupted."""
    jobs: tuple[JobRecord, ...]
    submitted: float
    user: str
    host: str
    conf: str
    """Path of the conf."""
    version: str
    pid: int
    """The submitting process on `host`, and its start time, while the state is intent."""
    pid_start: str | None
    end: Optional[End] = None
    """How the run ended; None while it is active, and in records of older versions."""
    message: str = ""
    """Why the run was refused, or how it ended: rendered from `end`."""
    verdict: str = ""
    """The scheduler's last word on an ended run."""
    outcome: Outcome | None = None
    """Outcome of the last attempt, with the culprit."""
    after: tuple[str, ...] = ()
    """Folders of the runs that must succeed before this run starts."""
    after_any: tuple[str, ...] = ()
    """Folders of the runs that must have ended, successfully or not, before this run starts."""
    sweep: str = ""
    """Name of the sweep to which the run belongs; empty if there is none."""
    swept: Mapping[str, str] = field(default_factory=dict)
    """The values of the sweep's keys in this run."""
    array: Optional[ArrayPlace] = None
    code: Optional[CodeRecord] = None
    """The submitted code; None if it is in no repository and was not copied."""
    limits: Optional[JobLimits] = None
    """Limits requested at the submit, even if an admin changed them later; not in old records."""
    job_ends: tuple[JobEnd, ...] = ()
    """Ends of its jobs, kept because the scheduler forgets them. Missing in old records."""


def write_record(run: RunFolder, record: RunRecord) -> None:
    write_json(run.record, dict(asdict(record), format=RECORD_FORMAT))


def read_record(run: RunFolder) -> RunRecord | None:
    """Read the record; None if the file is missing, torn, or of another format."""
    value = read_json(run.record)
    if not isinstance(value, dict) or value.pop("format", None) != RECORD_FORMAT:
        return None
    try:
        return _parse(value)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _parse(value: dict[str, Any]) -> RunRecord:
    """Parse a record. Unknown fields of a newer vjob are ignored, because a long `vjob watch` may
    outlive an upgrade."""
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
        raise ValueError("a submitted run must have a job")
    return expect_types(made)


def refuse(
    record: RunRecord,
    message: str,
    cause: EndCause = EndCause.REFUSED,
    actor: Actor = Actor.SCHEDULER,
) -> RunRecord:
    """Return the record of a run whose submit was refused."""
    evidence = (Evidence("vjob", text=message),)
    end = End(cause, actor, at=time.time(), started=False, evidence=evidence)
    return replace(record, state=REFUSED, end=end, message=message)


def read_run_end(run: RunFolder, record: RunRecord) -> Optional[End]:
    """Return how the run ended, from its record or an older vjob's files; None while active."""
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
"""Event kind: the clock of the attempt's first node was set by a number of seconds."""


def append_event(path: Path, kind: str, **facts: Any) -> None:
    append_line(path, {"time": round(time.time(), 3), "kind": kind, **facts})


def read_events(run: RunFolder) -> list[dict[str, Any]]:
    """Read all events of the run in time order, whichever job wrote them; if there are too many,
    the first ones."""
    lines = chain.from_iterable(map(read_lines, run.all_events()))
    events = [
        event
        for event in islice(lines, MOST_LINES)
        if isinstance(event, dict) and _is_number(event.get("time"))
    ]
    return sorted(events, key=lambda event: float(event["time"]))


def is_cancel_asked(run: RunFolder) -> bool:
    """Return True after `vjob cancel`, whose event is written before its signal; False after a
    cancel that failed and left the run unchanged."""
    return count_cancels(run) > 0


def count_cancels(run: RunFolder) -> int:
    """Count the cancel requests of `vjob cancel`; 0 if the last one failed."""
    kinds = [event.get("kind") for event in read_events(run)]
    cancels = [kind for kind in kinds if kind in (CANCEL_ASKED, CANCEL_FAILED)]
    return cancels.count(CANCEL_ASKED) if cancels[-1:] == [CANCEL_ASKED] else 0


def read_canceller(run: RunFolder) -> str:
    """Return what requested the last cancel if it was not `vjob cancel`, such as `Ctrl-C`."""
    asked = [event for event in read_events(run) if event.get("kind") == CANCEL_ASKED]
    return str(asked[-1].get("by", "")) if asked else ""


def read_requeues(run: RunFolder, job_id: str) -> Dict[int, EndCause]:
    """Return the causes of requeues that a job's batch script requested, by start from 0."""
    found = {}
    for event in read_lines(run.events()):
        if isinstance(event, dict) and event.get("kind") == REQUEUED:
            start = event.get("start")
            if isinstance(start, int) and event.get("job_id") == job_id:
                found[start] = parse_cause(event.get("cause"))
    return found


def read_restarts(run: RunFolder) -> List[Dict[str, Any]]:
    """Return events of failed attempts that were restarted in the same job, oldest first."""
    return [
        event
        for event in read_lines(run.events())
        if isinstance(event, dict) and event.get("kind") == "restarted"
    ]


MORPH_PARTS = ("notice_s", "stop_s", "plan_s", "start_s", "load_s", "first_step_s")
"""Parts of a morph's pause, in order: from the last sign that all was well to the first step in the
new layout. `varuna_core/morph/cost.py` writes them."""


def read_morph_parts(event: Mapping[str, Any]) -> Dict[str, float]:
    """Return the seconds by part, as far as the event has them: a morph that ended before its first
    step lacks some."""
    return {name: float(event[name]) for name in MORPH_PARTS if _is_number(event.get(name))}


def read_pause_s(event: Mapping[str, Any]) -> Optional[float]:
    """Return the pause of a morph; None if no step followed it."""
    return float(event["pause_s"]) if _is_number(event.get("pause_s")) else None


def format_morph(event: Mapping[str, Any]) -> str:
    """Describe a morph: `from 8 x 4 to 6 x 4, 12 s`."""
    pause_s = read_pause_s(event)
    took = "no step followed it" if pause_s is None else f"{pause_s:.0f} s"
    return f"from {event.get('from', '?')} to {event.get('to', '?')}, {took}"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 2**63
