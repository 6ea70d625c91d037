"""The one module of `jobs` that starts processes."""

from __future__ import annotations

import os
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


def start(
    command: Sequence[str], *, env: Mapping[str, str], own_group: bool = True
) -> subprocess.Popen[bytes]:
    """Start a child that shares our output."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=dict(env), start_new_session=own_group
    )


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a job may inherit from the submitting shell: enough to find programs, nothing more.

    SLURM_* and SBATCH_* of a surrounding job, conda's and Python's own would all leak otherwise.
    """
    keep = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "SLURM_CONF")
    found = {name: environ[name] for name in keep if name in environ}
    found.setdefault("PATH", os.defpath)
    return found
