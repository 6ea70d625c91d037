"""Error that ends an agent's command: a sentence for the user and an exit code."""

from __future__ import annotations

WRONG_INPUT = 2
STOPPED = 143
"""As a shell says of a process that SIGTERM ended."""


class Refusal(Exception):
    """The command cannot go on; `code` is what the process exits with."""

    def __init__(self, code: int, reason: str, node: str | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.node = node
        """The host at fault, where one is."""
