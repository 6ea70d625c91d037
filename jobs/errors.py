"""Errors meant for users. Only the command line prints them; nothing here exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_core.facts.catalogue.known_line import KnownLine
from varuna_core.facts.remedy import Context


class VjobError(Exception):
    """Something failed that was not the user's input. Exit code 1."""

    exit_code = 1


class InputError(VjobError):
    """The user's input cannot be used as it is. Exit code 2."""

    exit_code = 2


class UncertainError(VjobError):
    """Raised if a scheduler's answer is missing or not understood, so that it is not known if the
    requested action took place."""

    def __init__(self, text: str, found: Mapping[str, Sequence[Any]] | None = None) -> None:
        super().__init__(text)
        self.found = found or {}
        """Jobs, keyed by id, that are known from another source to be over."""


class RefusedError(VjobError):
    """A scheduler refused a job."""

    def __init__(
        self, head: str, said: Sequence[str] = (), row: KnownLine | None = None, note: str = ""
    ) -> None:
        self.head, self.said, self.row = head, tuple(said), row
        """A sentence on the refusal, the scheduler's own lines, and the catalogue's row for these
        lines."""
        lines = [f"{head}:" if said else head, *(f"    {line}" for line in said)]
        lines += [f"  {self.remedy}"] if self.remedy else []
        super().__init__("\n".join(lines) + note)

    @property
    def remedy(self) -> str:
        return "" if self.row is None else self.row.explain(Context.CONF)

    def with_note(self, text: str) -> RefusedError:
        """Return the same error with a further note."""
        return RefusedError(self.head, self.said, self.row, text)


KeyProblem = tuple[str, object, str]
"""Dotted key, its value, and what is wrong with it: a Problem whose place is not yet known."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a conf."""

    where: str
    """file:line, or `--set` for an override."""
    key: str
    """Dotted key, `cluster.nodes[0].gpus`."""
    value: str
    """The value as read, redacted if it looks like a secret; empty if the key is missing."""
    message: str
    """What is wrong, and what is allowed or what to do."""

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        key = f"{self.key}{shown}: " if self.key else ""
        return f"{self.where}: {key}{self.message}"


class ConfError(InputError):
    """All problems of a conf. Problems between keys are found only once every key can be read."""

    def __init__(
        self, problems: Sequence[Problem], *, is_first_round: bool = False, what: str = "the conf"
    ) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''} in {what}"
        if is_first_round:
            head += " (fix these first; checks across keys run afterwards)"
        super().__init__(head + ":\n" + "\n".join(f"  {problem}" for problem in self.problems))
