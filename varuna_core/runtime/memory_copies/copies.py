"""Copies of a training in the memory of its nodes, made every few steps; the next start loads them.

records/memory_copies.py says where a copy lies, exchange.py brings it to ranks of another layout.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.memory import MemoryCopies
from varuna_core.runtime.memory_copies.exchange import MemoryExchange, list_files
from varuna_core.runtime.rank_module import RankModule
from varuna_core.runtime.saving.progress import TrainingProgress
from varuna_core.runtime.saving.saving import Saving

log = logging.getLogger(__name__)


class NodeCopies:
    """One rank's side of all copies of an attempt."""

    def __init__(self, saving: Saving, home: Path, attempt: int, neighbours: int) -> None:
        consensus = saving.consensus
        self._saving, self._home = saving, home
        self._copies = MemoryCopies(
            home,
            attempt=attempt,
            rank=consensus.rank,
            world_size=consensus.world_size,
            neighbours=neighbours,
        )
        saving.await_memory_copy = self._copies.wait_copied

    def load(self, copy: str) -> tuple[int, TrainingProgress] | None:
        """Load this copy from the nodes' memory; None, with a warning, where it is not whole.

        After that what the weights are is not known until another load.
        """
        saving = self._saving
        try:
            exchange = MemoryExchange(self._home, copy)
            folder, errors = exchange.assemble(lambda m: list_files(m, saving.list_names()))
            saving.consensus.run_on_all(lambda: _raise_first(errors))
            found = saving.load_folder(folder)
        except CheckpointError as error:
            if saving.consensus.rank == 0:
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

    def lay(self, progress: TrainingProgress) -> None:
        """Begin a copy; it is written beside training."""
        saving, copies = self._saving, self._copies
        if copies.is_off:
            copies.clear()
            return
        if copies.is_first:
            _remove_taken(self._home)
        part = saving.take_part(progress, progress.iteration, shard=False, for_memory=True)
        if copies.is_first and saving.consensus.any_rank(not copies.fits(part)):
            copies.refuse()
            return
        index, count = self._find_share()
        copies.lay(part, index, count, saving.line, later=saving.sees_updates)

    def _find_share(self) -> tuple[int, int]:
        """The number of this rank's share, and the count of shares; with ZeRO each replica has its
        own."""
        links, tensor_rank = self._saving.links, self._saving.shares.tensor_rank
        stages = links.stage_map
        index = links.place * stages.tensor + tensor_rank
        count = stages.depth * stages.tensor
        if self._saving.masters.owned is None:
            return index, count
        return index * stages.num_replicas + links.replica, count * stages.num_replicas


class KeptInMemory(RankModule):
    """The methods of Varuna for copies in node memory."""

    _copies: NodeCopies | None = None

    def keep_in_memory(
        self, home: str | os.PathLike[str] | None, attempt: int, neighbours: int
    ) -> bool:
        """Let `lay_copy` lay copies into this folder of the node's memory, which so many ranks
        share; whether all nodes have one. For programs whose group of all ranks is gloo's."""
        consensus = self.saving.consensus
        if consensus.any_rank(home is None):
            if consensus.rank == 0:
                log.warning("no copies in memory: not every node has a folder for them")
            return False
        assert home is not None
        self._copies = NodeCopies(self.saving, Path(home), attempt, neighbours)
        return True

    def load_copy(self, copy: str | None) -> bool:
        """Take up a copy that the nodes hold between them, as `load_checkpoint` does a checkpoint;
        whether it was whole. Without a name forget those that there are."""
        assert self._copies is not None, "keep_in_memory comes first"
        found = None
        if copy is None:
            self._copies.begin_anew()
        else:
            found = self._copies.load(copy)
        if found is not None:
            self._take_up(found[1])
        return found is not None

    def settle_copy(self) -> None:
        """Before the step after which `lay_copy` follows: the last one is written then."""
        if self._copies is not None:
            self._copies.settle()

    def lay_copy(self) -> None:
        """After a step, on every rank: begin a copy of what there is now."""
        if self._copies is not None:
            self._copies.lay(self._find_progress())


def _raise_first(errors: list[str]) -> None:
    if errors:
        raise CheckpointError(errors[0])


def _remove_taken(home: Path) -> None:
    """Remove the folders that were put together for the load."""
    for path in home.glob("varuna_ckpt_*"):
        if path.suffix != ".partial":
            shutil.rmtree(path, ignore_errors=True)
