"""Copies of a Varuna in the memory of its nodes: laid every few steps, taken up by the next start.

What lies where is records/memory.py's; how it gets to ranks of another shape, memory_exchange's.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.memory import MemoryCopies
from varuna_core.runtime.saving.memory_exchange import MemoryExchange, list_files
from varuna_core.runtime.saving.progress import Progress
from varuna_core.runtime.saving.saving import Saving

log = logging.getLogger(__name__)


class Laying:
    """One rank's side of all copies of an attempt."""

    def __init__(self, saving: Saving, home: Path, attempt: int, neighbours: int) -> None:
        words = saving.words
        self._saving, self._home = saving, home
        self._copies = MemoryCopies(
            home,
            attempt=attempt,
            rank=words.rank,
            world_size=words.world_size,
            neighbours=neighbours,
        )

    def load(self, copy: str) -> tuple[int, Progress] | None:
        """What the nodes hold of this copy; None, with all ranks told why, where it is not whole.

        After that what the weights are is not known until another load.
        """
        saving = self._saving
        try:
            exchange = MemoryExchange(self._home, copy)
            folder, errors = exchange.assemble(lambda m: list_files(m, saving.list_names()))
            saving.words.judge(lambda: _raise_first(errors))
            found = saving.load_folder(folder)
        except CheckpointError as error:
            if saving.words.rank == 0:
                log.warning("the copy in memory cannot be taken up: %s", error)
            self._copies.begin_from("")
            return None
        self._copies.begin_from(copy)
        return found

    def begin_anew(self) -> None:
        """The training goes on from elsewhere: what is left of earlier copies goes."""
        self._copies.begin_from("")

    def settle(self) -> None:
        """Before a step after which a copy is laid."""
        self._copies.settle()

    def lay(self, progress: Progress) -> None:
        """Begin a copy; it is written beside training."""
        saving, copies = self._saving, self._copies
        if copies.is_off:
            copies.clear()
            return
        if copies.is_first:
            _remove_taken(self._home)
        part = saving.take_part(progress, progress.iteration, shard=False, for_memory=True)
        if copies.is_first and saving.words.any(not copies.fits(part)):
            copies.refuse()
            return
        index, count = self._find_share()
        copies.lay(part, index, count, saving.line)

    def _find_share(self) -> tuple[int, int]:
        """Which share is this rank's, and of how many; with ZeRO each replica has its own."""
        links, tensor_rank = self._saving.links, self._saving.shares.tensor_rank
        stages = links.stage_map
        index = links.place * stages.tensor + tensor_rank
        count = stages.depth * stages.tensor
        if self._saving.masters.owned is None:
            return index, count
        return index * stages.num_replicas + links.replica, count * stages.num_replicas


def _raise_first(errors: list[str]) -> None:
    if errors:
        raise CheckpointError(errors[0])


def _remove_taken(home: Path) -> None:
    """What was put together for the load."""
    for path in home.glob("varuna_ckpt_*"):
        if path.suffix != ".partial":
            shutil.rmtree(path, ignore_errors=True)
