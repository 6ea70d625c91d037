"""The part of Varuna that users call for checkpoints and signals; the work is saving.py's.

model.checkpoint("ckpt", keep=3)            # every rank, between steps
model.load_checkpoint("ckpt")               # every rank; the newest complete one
model.save_on_signal("ckpt")                # SIGUSR1, SIGUSR2, SIGTERM: save, leave with 0
"""

from __future__ import annotations

import logging
import os
import signal
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_core.runtime.comm.agreement import Agreement, decode, encode
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.engine import Engine
from varuna_core.runtime.module_interface import OwnPart
from varuna_core.runtime.optim.updates import Updates
from varuna_core.runtime.saving.memory_copies import Laying
from varuna_core.runtime.saving.preemption import CALLS, SignalCalls, ignore_calls
from varuna_core.runtime.saving.progress import Progress
from varuna_core.runtime.saving.save_progress import PendingSave
from varuna_core.runtime.saving.saving import Saving

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

log = logging.getLogger(__name__)

LEFT_CODE = 0
"""Exit code of ranks that saved because of a signal and left: the job did as it was told."""


class Checkpointed(OwnPart):
    """What Varuna saves, loads, and does on a signal."""

    links: Links
    engine: Engine
    updates: Updates
    sharding: Sharding | None

    def _prepare_saving(self) -> None:
        self.iteration = 0
        """Steps taken, those that overflowed too."""

        self.data_position: Any = None
        """Where the data is, in the user's terms; rank 0's is saved with each checkpoint."""

        self.user_state: Any = None
        """What else the user wants kept: numbers, words, lists, dicts, small tensors; rank 0's."""

        self._laying: Laying | None = None
        self._leave_to: tuple[Path, dict[str, Any]] | None = None
        self._calls = calls = SignalCalls()
        self.agreement = Agreement(
            self.links, self.engine.holds_last, lambda: encode(calls.heard, CALLS)
        )
        self.saving = Saving(
            self.split,
            self.part,
            self._masters,
            self.links,
            self.engine,
            self.updates,
            self.sharding,
        )
        weakref.finalize(self, calls.close)

    def _end_saving(self) -> None:
        self._calls.close()
        self.saving.close()

    def _find_progress(self) -> Progress:
        return Progress(
            iteration=self.iteration, data_position=self.data_position, user_state=self.user_state
        )

    def checkpoint(
        self,
        global_store: str | os.PathLike[str],
        step: int | None = None,
        tempdir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        on_demand: bool = False,
        *,
        keep: int | None = None,
    ) -> PendingSave | None:
        """Save into `varuna_ckpt_<step>` of a folder that all ranks see; every rank calls it.

        `step` is the iteration if not given. With `tempdir`, a local folder, this returns once a
        copy is there, with a thing whose `result()` waits until this rank's part is written; the
        next save's call raises its error too. `shard` deals the writing out over the replicas.
        `on_demand` returns when the whole checkpoint is complete, or raises the same error on all
        ranks. `keep` so many, the newest.
        """
        store, number = Path(global_store), self.iteration if step is None else step
        options: dict[str, Any] = {"shard": shard, "keep": keep}
        if on_demand:
            self.saving.save_whole(self._find_progress(), store, number, **options)
            return None
        options["tempdir"] = Path(tempdir) if tempdir is not None else None
        return self.saving.save(self._find_progress(), store, number, **options)

    def load_checkpoint(
        self,
        global_store: str | os.PathLike[str],
        iteration: int | None = None,
        check_complete: bool = True,
    ) -> int:
        """Take up a checkpoint of any layout, the newest if none is named; its number.

        Every rank calls it, before or after `set_optimizer` and `set_scheduler` and before the next
        step. `iteration`, `data_position` and `user_state` are then as they were saved. An error is
        the same on all ranks; after one, what the weights are is not known until another load.
        """
        number, progress = self.saving.load(Path(global_store), iteration, check_complete)
        self._take_up(progress)
        return number

    def _take_up(self, progress: Progress) -> None:
        self.iteration = progress.iteration
        self.data_position, self.user_state = progress.data_position, progress.user_state
        self.zero_grad()

    def keep_in_memory(
        self, home: str | os.PathLike[str] | None, attempt: int, neighbours: int
    ) -> bool:
        """Let `lay_copy` lay copies into this folder of the node's memory, which so many ranks
        share; whether all nodes have one. For programs whose group of all ranks is gloo's."""
        words = self.saving.words
        if words.any(home is None):
            if words.rank == 0:
                log.warning("no copies in memory: not every node has a folder for them")
            return False
        assert home is not None
        self._laying = Laying(self.saving, Path(home), attempt, neighbours)
        return True

    def load_copy(self, copy: str | None) -> bool:
        """Take up a copy that the nodes hold between them, as `load_checkpoint` does a checkpoint;
        whether it was whole. Without a name forget those that there are."""
        assert self._laying is not None, "keep_in_memory comes first"
        found = None
        if copy is None:
            self._laying.begin_anew()
        else:
            found = self._laying.load(copy)
        if found is not None:
            self._take_up(found[1])
        return found is not None

    def settle_copy(self) -> None:
        """Before the step after which `lay_copy` follows: the last one is written then."""
        if self._laying is not None:
            self._laying.settle()

    def lay_copy(self) -> None:
        """After a step, on every rank: begin a copy of what there is now."""
        if self._laying is not None:
            self._laying.lay(self._find_progress())

    def set_scheduler(self, scheduler: Any) -> None:
        """Say which learning rate schedule the user steps: it is saved and loaded with the rest."""
        self.saving.set_scheduler(scheduler)

    def save_on_signal(
        self, global_store: str | os.PathLike[str], shard: bool = False, keep: int | None = None
    ) -> None:
        """On SIGUSR1, SIGUSR2 or SIGTERM to any rank: all save where a step begins, and exit.

        The exit code is 0; `left.json` in the folder says which checkpoint it was. A handler that
        the user has for the signal is called there instead.
        """
        self._leave_to = Path(global_store), {"shard": shard, "keep": keep}
        self._calls.listen()

    def _heed_signals(self) -> None:
        """Where a step begins: do what all ranks agreed on in the last one."""
        self._calls.look_around()
        self.saving.step_begins()
        number = decode(self.agreement.told, CALLS)
        if not number or self.links.closed:
            return
        # Gradients that wait for more to be added are in no checkpoint.
        if self.saving.words.any(self.gradients.hold_any()):
            return
        self.agreement.answered()
        handler = self._calls.answer(number)
        name = signal.Signals(number).name
        if handler is not None:
            try:
                handler(number, None)
            except SystemExit:
                ignore_calls()
                self.saving.words.part()
                raise
        elif self._leave_to is not None:
            store, options = self._leave_to
            log.warning("%s: saving iteration %d into %s", name, self.iteration, store)
            ignore_calls()
            note = {"signal": name, "world_size": self.saving.words.world_size}
            self.saving.save_whole(
                self._find_progress(), store, self.iteration, note=note, **options
            )
            self.saving.words.part()
            raise SystemExit(LEFT_CODE)
