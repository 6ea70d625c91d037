"""Track the progress of a training, and which of its checkpoints are pending or complete.

No rank waits for another, so a checkpoint may become complete long after rank 0 wrote its part.
Completion is checked at the start of each step, and reported once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.checkpoint.store.store import SaveFolder
from varuna_core.checkpoint.store.writer import CheckpointWriter


@dataclass(kw_only=True)
class TrainingProgress:
    """Progress of a training, equal on every rank."""

    iteration: int = 0
    """Number of steps taken."""

    data_position: Any = None
    user_state: Any = None


@dataclass(kw_only=True)
class PendingRestore:
    """State from a loaded checkpoint, for an optimizer and a scheduler that are set later."""

    folder: Path
    loss_scale: Any
    lr_schedule: Any
    options: dict[int, Any] | None = None
    """Options of each parameter's group; None until the optimizer's state is restored."""


Teller = Callable[[int, Path], None]
"""Function called with a checkpoint's number and the folder of all checkpoints."""


class PendingSave:
    """This rank's pending part of a checkpoint."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer, self._number = writer, writer.num_saves

    def done(self) -> bool:
        return self._writer.num_saves != self._number or not self._writer.is_writing

    def result(self) -> None:
        """Wait until the part is written; raise its error, unless a later save has done so."""
        if self._writer.num_saves == self._number:
            self._writer.wait()

    wait = result


class SaveNews:
    """Notifies a subscribed program when a checkpoint starts and when it is complete."""

    def __init__(self) -> None:
        self._begun: Teller | None = None
        self._complete: Teller | None = None
        self._waiting: list[tuple[int, SaveFolder]] = []

    def subscribe(self, begun: Teller, complete: Teller) -> None:
        """Call these functions for all later checkpoints."""
        self._begun, self._complete = begun, complete

    def report_begun(self, number: int, store: Path) -> None:
        if self._begun is not None:
            self._begun(number, store)

    def expect(self, number: int, folder: SaveFolder) -> None:
        if self._complete is not None:
            self._waiting.append((number, folder))

    def poll(self) -> None:
        """Notify of checkpoints that have become complete."""
        while (at := self._find_complete()) is not None:
            # Those before it failed, or have made room for it.
            number, folder = self._waiting[at]
            del self._waiting[: at + 1]
            assert self._complete is not None
            self._complete(number, folder.store)

    def _find_complete(self) -> int | None:
        """Return the index of the first pending checkpoint that is complete; None if none is."""
        for at, (_, folder) in enumerate(self._waiting):
            if folder.is_published():
                return at
        return None
