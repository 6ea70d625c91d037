"""state/signal.json: a signal that every rank's own process is to get, once.

Not through Slurm: where processes are tracked by their parents, `scancel --signal` and srun reach
every process of a step, so that data loaders die of a SIGUSR1 that only the ranks handle, and
ranks get it twice (Slurm 22.05 with proctrack/linuxproc).
"""

from __future__ import annotations

import signal
import time

from varuna_core.records.files import is_listed, read_json, write_json
from varuna_core.records.runfolder import AttemptFolder

NAMES = ("USR1", "USR2")


def write_signal(attempt: AttemptFolder, name: str, key: str) -> None:
    """Ask for a signal; the same key again asks for nothing new."""
    write_json(attempt.signal, {"name": name, "key": key, "time": round(time.time(), 3)})


def read_signal(attempt: AttemptFolder) -> tuple[int, str] | None:
    """Number and key of the signal that was asked for last."""
    if not is_listed(attempt.signal):
        return None
    value = read_json(attempt.signal)
    if not isinstance(value, dict) or value.get("name") not in NAMES:
        return None
    return int(signal.Signals[f"SIG{value['name']}"]), str(value.get("key"))
