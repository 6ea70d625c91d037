"""The reasons why scripts cannot be converted to a conf."""

from __future__ import annotations

from enum import Enum

from vjob.jobs.errors import InputError


class Refusal(Enum):
    """Kind of a refusal."""

    ARGUMENTS = "the script needs arguments"
    COUNTS = "the script needs counts that are known only in the job"
    ENDLESS = "bash does not reach the end of the script"
    FILES = "the script needs files that are not on this machine"
    NOTHING = "the script starts no program"
    OUTPUTS = "the script needs the output of a command"
    PLACEHOLDERS = "placeholders in angle brackets or braces must be replaced first"
    SEVERAL = "the script starts several different programs"
    SYNTAX = "bash does not accept the script"
    VARIABLES = "the script needs variables that it does not set"


class ScriptRefusedError(InputError):
    """Raised if scripts do not determine which program they start, or with which arguments."""

    def __init__(self, text: str, *reasons: Refusal) -> None:
        super().__init__(text)
        self.reasons = frozenset(reasons)
