"""record.json: what was submitted, and what became of it.

Written by `vjob` only (intent before the scheduler knows of the run, ids after, the outcome once
somebody looks); what happens on the nodes is in the attempt folders.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from varuna_core.records.exits import Outcome
from varuna_core.records.files import read_json, write_json
from varuna_core.records.runfolder import RunFolder

RECORD_FORMAT = 1

INTENT = "intent"
SUBMITTED = "submitted"
REFUSED = "refused"
ENDED = "ended"


@dataclass(frozen=True)
class JobRecord:
    """One job of the run in the scheduler's eyes."""

    id: str
    group: str | None
    """The group that this job holds in a split run; None where one job holds all."""


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
    message: str = ""
    """Why it was refused, or how it ended."""
    verdict: str = ""
    """The scheduler's last word on an ended run."""
    outcome: Outcome | None = None
    """How the last attempt ended, the culprit named."""


def write_record(run: RunFolder, record: RunRecord) -> None:
    write_json(run.record, dict(asdict(record), format=RECORD_FORMAT))


def read_record(run: RunFolder) -> RunRecord | None:
    """None where the file is missing, torn, or of another format."""
    value = read_json(run.record)
    if not isinstance(value, dict) or value.pop("format", None) != RECORD_FORMAT:
        return None
    try:
        return _parse(value)
    except (TypeError, KeyError):
        return None


def _parse(value: dict[str, Any]) -> RunRecord:
    outcome = value.pop("outcome")
    record = RunRecord(**{**value, "jobs": tuple(JobRecord(**job) for job in value["jobs"])})
    return record if outcome is None else replace(record, outcome=Outcome(**outcome))
