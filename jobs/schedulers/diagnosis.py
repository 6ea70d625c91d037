"""One diagnosis of `vjob doctor`, and how this machine is asked for facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from varuna_core.records import files
from vjob.jobs import process
from vjob.jobs.errors import VjobError

Status = Literal["ok", "warn", "fail", "note"]
ASK_S = 15


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """State of one thing that `vjob doctor` examined, with a remedy where there is trouble."""

    name: str
    status: Status
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ask(*command: str) -> str | None:
    """Output of a command; None where it failed or is not there."""
    code, text = try_out(command)
    return text if code == 0 else None


def try_out(
    command: tuple[str, ...], env: Mapping[str, str] | None = None, timeout_s: float = ASK_S
) -> tuple[int, str]:
    """Exit code and output of a command; 127 where it could not run, or not to its end."""
    try:
        result = process.run(command, env=env, timeout_s=timeout_s)
    except VjobError as error:
        return 127, str(error)
    if result.code == 0:
        return 0, result.out or result.err
    return result.code, result.err or result.out


def read_text(path: str) -> str | None:
    """Text of a file; None where it cannot be read."""
    try:
        return files.read_text(Path(path), "replace")
    except OSError:
        return None
