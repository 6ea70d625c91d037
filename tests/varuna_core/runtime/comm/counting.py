"""A store that counts what it is asked."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Counting(dist.Store):
    """Hands all on to another store; gloo calls it too."""

    def __init__(self, held: dist.Store) -> None:
        super().__init__()
        self.held = held
        self.calls: list[str] = []

    def _ask(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        return getattr(self.held, name)(*args)

    def set(self, *args: Any) -> None:  # type: ignore[override]  # as torch calls it
        self._ask("set", *args)

    def get(self, *args: Any) -> bytes:  # type: ignore[override]
        return bytes(self._ask("get", *args))

    def add(self, *args: Any) -> int:  # type: ignore[override]
        return int(self._ask("add", *args))

    def wait(self, *args: Any) -> None:
        self._ask("wait", *args)

    def check(self, *args: Any) -> bool:  # type: ignore[override]
        return bool(self._ask("check", *args))
