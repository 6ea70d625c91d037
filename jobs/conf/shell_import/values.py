"""Values of an old shell conf and of #SBATCH lines, in a conf's words and units."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vjob.jobs.conf.redact import redact_string
from vjob.jobs.conf.shell_import.assignments import Assignment, ShellConf

_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*))?:(?P<count>[1-9][0-9]{0,3})")
_TIME = re.compile(r"(?:(?P<d>\d{1,4})-)?(?P<a>\d{1,6})(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MEMORY = re.compile(r"(?P<number>\d{1,9})(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
_PARTITION = re.compile(r"\d{1,6}(-\d{1,6})*", re.ASCII)


class Translator:
    """Takes the known variables one after the other; the rest become notes."""

    def __init__(self, found: ShellConf) -> None:
        self.found = found
        self.left = dict(found.variables)
        self.notes = [
            f"line {line}: not understood, left out: {redact_string(text)}"
            for line, text in found.not_understood
        ]
        self.comments: dict[str, str] = {}

    def note(self, message: str) -> None:
        self.notes.append(message)

    def take(self, name: str, key: str, convert: Callable[[str], Any]) -> Any:
        """The variable's value, converted; None with a note where that is not possible."""
        assignment = self.left.pop(name, None)
        if assignment is None:
            return None
        value = None if assignment.value is None else convert(assignment.value.strip())
        if value is None:
            self.note(
                f"line {assignment.line}: {spell(assignment)} cannot be used for {key}; left out"
            )
        else:
            self.comments[key] = f"was {spell(assignment)}"
        return value

    def take_number(self, name: str, key: str) -> int | None:
        value: int | None = self.take(name, key, to_number)
        return value

    def take_flag(self, name: str, key: str) -> bool | None:
        value: bool | None = self.take(name, key, to_flag)
        return value


def spell(assignment: Assignment) -> str:
    text = f"{assignment.name}={assignment.raw}"
    return "".join(char if char.isprintable() else "?" for char in redact_string(text))


def to_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def to_flag(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False, "": False}.get(text.lower())


def to_gpus(text: str) -> str | int | None:
    match = _GRES.fullmatch(text)
    if match is None:
        return None
    return f"{match['type']}:{match['count']}" if match["type"] else int(match["count"])


def to_minutes(text: str) -> int | None:
    """Slurm's minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s; seconds round up."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:
        seconds = ((int(match["d"]) * 24 + first) * 60 + second) * 60 + third
    elif match["c"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) or None


def to_gigabytes(text: str) -> int | None:
    match = _MEMORY.fullmatch(text)
    if match is None:
        return None
    return -int(-int(match["number"]) * _UNITS[match["unit"].upper()] // 1)


def to_name(text: str) -> str | None:
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) else None


def to_node_list(text: str) -> list[str] | None:
    """Commas outside brackets part node names."""
    names = re.findall(r"(?:\[[^\]]*\]|[^,\[\]\s])+", text)
    return names if names and ",".join(names) == text else None


def to_partition(text: str) -> str | None:
    return text if _PARTITION.fullmatch(text) else None


def to_word(text: str) -> str | None:
    return text if re.fullmatch(r"[\w.,-]+", text, re.ASCII) else None
