"""Requests to every node of an attempt: state/stop.json and state/signal.json.

stop.json says who asked the attempt to end. The first request wins, whatever comes later. Kinds:
rank (one failed), not-ready (preflight), cancel (a user), signal (the scheduler told an agent to
end), lost (a node fell silent), group (a job of a split run ended badly), hang (no steps any more);
with code 0, by rank 0 of a function that checkpointed: requeue (the batch script requeues the job),
left (it is over).

signal.json names a signal that every rank's own process is to get, once. It does not go through
Slurm: where processes are tracked by their parents, `scancel --signal` and srun reach every process
of a step, so that data loaders die of a SIGUSR1 that only the ranks handle, and ranks get it twice
(Slurm 22.05 with proctrack/linuxproc)."""

from __future__ import annotations

import signal
import time
from typing import Any

from varuna_core.facts.cause import EndCause
from varuna_core.records.files import is_listed, list_names, read_json, write_first, write_json
from varuna_core.records.runfolder import AttemptFolder

REQUEUE, LEFT, HANG = "requeue", "left", "hang"
STOP_KINDS = ("rank", "not-ready", "cancel", "signal", "lost", "group", HANG, REQUEUE, LEFT)


def write_stop(
    attempt: AttemptFolder,
    kind: str,
    code: int,
    reason: str,
    *,
    node: str | None = None,
    rank: int | None = None,
    cause: EndCause | None = None,
    by: str = "",
) -> bool:
    """Request that the attempt stop; return False if a stop was already requested. `node` and
    `rank` are those at fault, if any.

    `cause` is given if the writer knows more than the kind implies; `by` is the name of a user.
    """
    master = read_json(attempt.master)
    return write_first(
        attempt.stop,
        {
            "kind": kind,
            "code": code,
            "reason": reason,
            "node": node,
            "rank": rank,
            "cause": None if cause is None else cause.value,
            "by": by,
            "time": round(time.time(), 3),
            "opened": master.get("time") if isinstance(master, dict) else None,
        },
    )


def read_stop(attempt: AttemptFolder, opened: float | None = None) -> dict[str, Any] | None:
    """Read the stop of this try of the attempt; None if none was requested.

    `opened` is the time in master.json: an NFS cache may still return the stop of an older try.
    """
    if not is_listed(attempt.stop):
        return None
    value = read_json(attempt.stop)
    if not isinstance(value, dict) or not isinstance(value.get("code"), int):
        return None
    said_of = value.get("opened")
    return value if opened is None or said_of is None or said_of == opened else None


SIGNAL_NAMES = ("USR1", "USR2")


def write_signal(attempt: AttemptFolder, name: str, key: str) -> None:
    """Request a signal; a repeated key does not request it again."""
    write_json(attempt.signal, {"name": name, "key": key, "time": round(time.time(), 3)})


def read_signal(attempt: AttemptFolder) -> tuple[int, str] | None:
    """Return the number and the key of the signal that was requested last."""
    if not is_listed(attempt.signal):
        return None
    value = read_json(attempt.signal)
    if not isinstance(value, dict) or value.get("name") not in SIGNAL_NAMES:
        return None
    return int(signal.Signals[f"SIG{value['name']}"]), str(value.get("key"))


def read_requests(
    attempt: AttemptFolder, opened: float | None = None
) -> tuple[tuple[int, str] | None, dict[str, Any] | None]:
    """Return the signal and the stop. If neither was requested, this takes a single listing."""
    names = list_names(attempt.stop.parent)
    asked = read_signal(attempt) if attempt.signal.name in names else None
    return asked, read_stop(attempt, opened) if attempt.stop.name in names else None
