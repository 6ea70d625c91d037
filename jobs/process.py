"""The one module of `jobs` that starts processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import VjobError

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished command left."""

    code: int
    out: str
    err: str


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> Result:
    """Run to the end. Raises VjobError where it cannot start or does not end."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=None if env is None else dict(env),
            check=False,
        )
    except FileNotFoundError:
        raise VjobError(f"{command[0]} is not on PATH") from None
    except OSError as error:
        raise VjobError(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise VjobError(f"{command[0]} did not answer within {timeout_s:.0f} s") from None
    return Result(
        code=done.returncode,
        out=done.stdout.decode(errors="replace"),
        err=done.stderr.decode(errors="replace"),
    )


def start_detached(command: Sequence[str], *, output: Path, env: Mapping[str, str]) -> int:
    """Start in a session of its own, so that it outlives the terminal; returns the pid."""
    with output.open("ab") as handle:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
            close_fds=True,
        )
    return child.pid


def start(command: Sequence[str], *, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that shares our output, and gets TERM if we die."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=dict(env),
        start_new_session=True,
        preexec_fn=_ask_for_term,
    )


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _ask_for_term() -> None:
    """In the child, between fork and exec; our callers have one thread."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def tool_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For scheduler commands: SQUEUE_PARTITION and its like would filter our jobs away."""
    filters = ("SQUEUE_", "SACCT_", "SCANCEL_", "SBATCH_", "SLURM_")
    keep = ("SLURM_CONF", "SLURM_JWT")
    return {k: v for k, v in environ.items() if k in keep or not k.startswith(filters)}


def start_time(pid: int) -> str | None:
    """A process' start in clock ticks: with the pid it names one process for ever."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a job may inherit from the submitting shell: enough to find programs, nothing more.

    SLURM_* and SBATCH_* of a surrounding job, conda's and Python's own would all leak otherwise.
    """
    keep = (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LC_ALL",
        "TZ",
        "SLURM_CONF",
        "SLURM_JWT",
    )
    found = {name: environ[name] for name in keep if name in environ}
    found.setdefault("PATH", os.defpath)
    return found
