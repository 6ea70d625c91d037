"""A diagnosis of `vjob doctor`, and functions that query this machine for facts."""

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
    """State of one item that `vjob doctor` examined, with a remedy if there is a problem."""

    name: str
    status: Status
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ask(*command: str) -> str | None:
    """Return the output of a command; None if the command failed or does not exist."""
    code, text = try_out(command)
    return text if code == 0 else None


def try_out(
    command: tuple[str, ...], env: Mapping[str, str] | None = None, timeout_s: float = ASK_S
) -> tuple[int, str]:
    """Return the exit code and output of a command; 127 if it could not be run to its end."""
    try:
        result = process.run(command, env=env, timeout_s=timeout_s)
    except VjobError as error:
        return 127, str(error)
    if result.code == 0:
        return 0, result.out or result.err
    return result.code, result.err or result.out


def read_text(path: str) -> str | None:
    """Return the text of a file; None if the file cannot be read."""
    try:
        return files.read_text(Path(path), "replace")
    except OSError:
        return None
