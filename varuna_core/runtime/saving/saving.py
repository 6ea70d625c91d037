"""Save this rank's part of a checkpoint, and load it from a checkpoint of any layout.

    save:  masters, buffers, optimizer state by name ─► CheckpointPart ─► CheckpointWriter
    load:  rank 0 chooses the checkpoint ─► each rank reads its part ─► all raise the first error

docs/checkpoints.md describes the files. Small state that is equal on all ranks is saved by rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor

from varuna_core.checkpoint.format.document import READABLE
from varuna_core.checkpoint.format.entries import CheckpointPart, Entry, deal
from varuna_core.checkpoint.format.errors import CheckpointError, DamagedCheckpoint, NotSaved
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.store.aside import Choice
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.torch_state import put_random_state, take_random_state
from varuna_core.checkpoint.store.writer import CheckpointWriter
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import describe_room, write_json
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.engine import Engine
from varuna_core.runtime.engine.graph_memory import without_collection
from varuna_core.runtime.optim.precision import Masters
from varuna_core.runtime.optim.updates import Updates
from varuna_core.runtime.saving.consensus import Consensus
from varuna_core.runtime.saving.gather import Gather
from varuna_core.runtime.saving.progress import (
    PendingRestore,
    PendingSave,
    SaveNews,
    TrainingProgress,
)
from varuna_core.runtime.saving.skipping import SkippedSaves
from varuna_core.runtime.saving.tensors import (
    drop_state,
    find_holders,
    find_part,
    fit_rates,
    list_tensors,
    list_wanted,
    put_optimizer,
    take_buffers,
    take_tensors,
)
from varuna_core.runtime.split.split import RankStages, Split
from varuna_core.runtime.tensor_parallel.shares import Shares

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

log = logging.getLogger(__name__)

SEEN_S = 90.0
"""Seconds until files of another node appear in a listing: NFS caches it for up to a minute."""
SEEN_POLL_S = 0.5
WAIT_S = 600.0
"""Seconds that a training's last save waits for disk space; the scheduler may end it earlier."""
RETRY_S = 5.0
LEFT = "left.json"
"""File in the checkpoint folder, which records that the training saved and left on a signal."""


class Saving:
    """One rank's side of saving and loading checkpoints."""

    def __init__(
        self,
        split: Split,
        part: RankStages,
        masters: Masters,
        links: Links,
        engine: Engine,
        updates: Updates,
        sharding: Sharding | None = None,
    ) -> None:
        self.shares = Shares() if sharding is None else sharding.shares
        self.split, self.part, self.masters, self.links = split, part, masters, links
        self.engine, self.updates = engine, updates
        self.scheduler: Any = None
        self.consensus = Consensus(links.board, links.name, links.find_lost_peer)
        self.news = SaveNews()
        self.skipped = SkippedSaves()
        self.is_told_to_end: Callable[[], bool] = lambda: False
        """Function that returns True once this rank got SIGTERM; saves then wait no longer."""

        self._hooks: list[Any] = []
        """Handles of the hooks that optimizers call before a step."""

        self._number = -1
        """Number of the last save that was started."""

        self._writers: dict[Path, CheckpointWriter] = {}
        self._line: str | None = None
        self._loaded: PendingRestore | None = None
        self._shapes, self._ties = list_tensors(split)

    # Saving.

    def save(
        self,
        progress: TrainingProgress,
        store: Path,
        number: int,
        *,
        tempdir: Path | None = None,
        shard: bool = False,
        keep: int | None = None,
    ) -> PendingSave | None:
        """Write this rank's part. With `tempdir`, write in the background and return a handle.

        If waits have a timeout, all ranks return together and raise the same error, so that a slow
        disk does not count towards the next step's timeout. If the disk is full, the save is
        skipped (skipping.py).
        """
        options: dict[str, Any] = {"shard": shard, "tempdir": tempdir, "keep": keep}
        made: list[PendingSave | None] = [None]

        def write() -> None:
            made.append(self._save_part(progress, store, number, **options))

        together = self.links.arrivals.patience_s is not None
        try:
            if together:
                self.consensus.run_on_all(write)
            else:
                write()
        except NotSaved as error:
            tells = not together or self.consensus.rank == 0
            self.skipped.skip(error, store, number, tells=tells)
        self.skipped.expect_few()
        return made[-1]

    @without_collection()  # the documents of many tensors make objects by the thousand
    def _save_part(
        self,
        progress: TrainingProgress,
        store: Path,
        number: int,
        *,
        shard: bool = False,
        tempdir: Path | None = None,
        keep: int | None = None,
    ) -> PendingSave | None:
        writer = self._get_writer(store)
        self._await_last(writer)
        writer.keep = keep
        writer.set_background(tempdir)
        is_first = self.consensus.rank == 0 and not writer.num_saves
        if is_first and progress.iteration and not self.updates.optimizers:
            log.warning("no optimizer state is saved: pass the optimizer to set_optimizer()")
        self.news.report_begun(number, store)
        self._number = number
        part = self.take_part(progress, number, shard)
        self.news.expect(number, writer.save(part, later=self.sees_updates))
        if tempdir is None:
            self.skipped.note_saved()
        return PendingSave(writer) if tempdir is not None else None

    def await_copies(self) -> None:
        """Wait for a save's copies that must be complete before the optimizer changes weights."""
        for writer in self._writers.values():
            writer.wait_copied()

    def _await_last(self, writer: CheckpointWriter) -> None:
        """Wait until the last background save is written or skipped."""
        try:
            if writer.wait():
                self.skipped.note_saved()
        except NotSaved as error:
            self.skipped.skip(error, writer.store, self._number)

    def save_whole(
        self,
        progress: TrainingProgress,
        store: Path,
        number: int,
        note: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Save, and return once the checkpoint is complete; raise any rank's error on all ranks.

        If the disk is full, retry for WAIT_S, since no later save follows. If `note` is given,
        record in LEFT that the training leaves after this save.
        """

        def write() -> None:
            self._save_part(progress, store, number, **options)
            self._writers[store].finish()

        def finish() -> None:
            if store in self._writers:
                self._writers[store].finish()

        def find() -> str:
            return "yes" if number in [one.iteration for one in list_complete(store)] else ""

        def check() -> None:
            until = time.monotonic() + SEEN_S
            self._writers[store].finish()  # for listings that came too late to whoever was last
            while not find():
                if time.monotonic() > until:
                    raise CheckpointError(f"iteration {number} is not complete in {store}")
                time.sleep(SEEN_POLL_S)
                self._writers[store].finish()
            if note is not None:
                told = {**note, "iteration": number, "time": round(time.time(), 3)}
                write_json(store / LEFT, told, READABLE)

        deadline = time.monotonic() + WAIT_S
        work = write
        while True:
            try:
                self.consensus.run_on_all(work, check)
                break
            except NotSaved as error:
                self._wait_for_room(error, store, number, deadline)
            with contextlib.suppress(NotSaved):
                self.consensus.run_on_all(finish)  # all parts may be there
            work = finish if self.consensus.decide(find) else write
        self.news.poll()

    def _wait_for_room(self, error: NotSaved, store: Path, number: int, deadline: float) -> None:
        """Wait briefly on all ranks; raise the error at the deadline or if a rank must end."""

        def wait() -> str:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return "late"
            room = describe_room(store)
            self.skipped.note(error, store, number, waits=True)
            log.warning(
                "iteration %d is not saved yet: %s%s; trying again every %g s, for %.0f s more",
                number, error, f" ({room})" if room else "", RETRY_S, left_s,
            )  # fmt: skip
            time.sleep(min(RETRY_S, left_s))
            return ""

        is_late = self.consensus.decide(wait)
        if is_late or self.consensus.any_rank(self.is_told_to_end()):
            raise error

    def close(self) -> None:
        """Wait for pending saves."""
        while self._writers:
            self._writers.popitem()[1].close()
        self.news.poll()

    def _get_writer(self, store: Path) -> CheckpointWriter:
        if store not in self._writers:
            self.links.expect_open()

            def begin() -> str:
                (store / LEFT).unlink(missing_ok=True)
                return uuid4().hex[:12]

            self._writers[store] = CheckpointWriter(
                store,
                job=self.consensus.decide(begin),
                rank=self.consensus.rank,
                world_size=self.consensus.world_size,
                line=self._line,
            )
        return self._writers[store]

    def take_part(self, progress: TrainingProgress, number: int, shard: bool) -> CheckpointPart:
        segments, optimizer, shared = self._take_segments(self.updates.optimizers, shard=shard)
        return CheckpointPart(
            iteration=number,
            segments=segments,
            shared=shared or self.links.stage_map.tensor > 1,
            optimizer=optimizer,
            own={
                "place": self.links.place,
                "replica": self.links.replica,
                "tensor_rank": self.shares.tensor_rank,
                "iteration": progress.iteration,
                "seed": self.engine.seed,
                "random": take_random_state(),
            },
            state=self._take_state(progress) if self.consensus.rank == 0 else None,
        )

    def _take_segments(
        self, with_state_of: Sequence[Any], *, shard: bool
    ) -> tuple[dict[int, list[Entry]], dict[str, Any], bool]:
        """Return, for each segment, the tensors that this rank saves, including these optimizers'
        state; the other state; and True if other replicas save parts of the same segments."""
        replicas = self.links.stage_map.num_replicas
        owned = self.masters.owned is not None
        shared = (shard or owned) and replicas > 1
        segments: dict[int, list[Entry]] = {}
        optimizer: dict[str, Any] = {}
        if shared or self.links.replica == 0:
            held = self.split, self.part, self.masters
            segments, optimizer = take_tensors(*held, with_state_of)
        segments = self.shares.place(segments)
        if shared and not owned:  # else each has its own already
            segments = deal(segments, replicas, self.links.replica)
        # Buffers of the other replicas may differ (batch norm).
        if self.links.replica == 0 and self.shares.tensor_rank == 0:
            for segment, entries in take_buffers(self.split, self.part, self._shapes).items():
                segments.setdefault(segment, []).extend(entries)
        return segments, optimizer, shared

    def _take_model(self) -> list[Entry]:
        """Return this rank's masters and persistent buffers; all ranks' cover the whole model."""
        segments, _, _ = self._take_segments((), shard=False)
        return [entry for held in segments.values() for entry in held]

    def gather(self, target: Path | None, only_trained: bool) -> Any:
        """Return the plain model's state dict on rank 0, or write it to the target file."""
        made = Gather(self.split.model, self._ties, self.consensus, only_trained)
        return made.run(self._take_model, target)

    def _take_state(self, progress: TrainingProgress) -> TrainingState:
        scale, scheduler = self.updates.loss_scale, self.scheduler
        return TrainingState(
            partition="-".join(str(len(held)) for held in self.split.stages),
            shapes=self._shapes,
            ties=self._ties,
            loss_scale=None if scale is None else vars(scale),
            lr_schedule=None if scheduler is None else scheduler.state_dict(),
            data_position=progress.data_position,
            user=progress.user_state,
        )

    # Loading.

    @without_collection()
    def load(
        self, store: Path, iteration: int | None, check_complete: bool
    ) -> tuple[int, TrainingProgress]:
        """Load a checkpoint that rank 0 chooses; return its number and progress.

        If `iteration` is None and any rank finds the newest checkpoint damaged, all ranks load the
        previous one.
        """
        choice = Choice(store, iteration, check_complete)
        opened: list[CheckpointReader] = []
        """The opened checkpoint, on the rank that chose it."""

        def choose() -> str:
            opened[:] = [choice.take()]
            with contextlib.suppress(OSError):  # a store that is only read
                (store / LEFT).unlink(missing_ok=True)
            return opened[0].folder.name

        def load_part() -> tuple[int, str, TrainingProgress]:
            reader = opened.pop() if opened else CheckpointReader(folder, check_complete=False)
            return self._load_part(reader)

        while True:
            folder = store / self.consensus.decide(choose)
            found: list[Any] = []
            try:
                self.consensus.run_on_all(lambda: found.extend(load_part()))  # noqa: B023
            except DamagedCheckpoint as error:
                choice.refuse(folder, error)
                continue
            number, self._line, progress = found
            return number, progress

    @property
    def line(self) -> str:
        """Return the training's identity from a loaded checkpoint or the first save; else ""."""
        return next((writer.line for writer in self._writers.values()), self._line) or ""

    def list_names(self) -> list[str]:
        """Return the names of stored tensors of which this rank needs a part."""
        held = (*self.masters.by_name, *self.part.buffers())
        return [name for name in held if name in self._shapes]

    def _load_part(self, opened: CheckpointReader) -> tuple[int, str, TrainingProgress]:
        self.close()  # those that follow go on in the line of what is loaded
        self._loaded = None
        with opened as reader:
            state, folder = reader.state, reader.folder
            self._expect_same(state.shapes, folder)
            tensors: Mapping[str, Tensor] = {**self.masters.by_name, **self.part.buffers()}
            once = {id(t): (n, t) for n, t in tensors.items() if n in self._shapes}
            held = self.masters, self.shares
            reader.fill(w for name, out in once.values() for w in list_wanted(name, out, *held))
            loaded = PendingRestore(
                folder=folder, loss_scale=state.loss_scale, lr_schedule=state.lr_schedule
            )
            self._put_optimizer(loaded, reader)
            self._put_schedule(loaded)
            own = self._choose_own(reader)
            if own is not None:
                put_random_state(own["random"])
            # Of a copy in memory that of rank 0 may be lost; these two are the same on all ranks.
            number = min(reader.manifest.own, default=0)
            first = reader.own(number) or {"seed": self.engine.seed, "iteration": reader.iteration}
            self.engine.seed = first["seed"]
            self._loaded = loaded
            return (
                reader.iteration,
                reader.line,
                TrainingProgress(
                    iteration=first["iteration"],
                    data_position=state.data_position,
                    user_state=state.user,
                ),
            )

    def _expect_same(self, stored: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        faults = [f"it has no {name!r}" for name in self._shapes if name not in stored]
        faults += [f"the model has no {name!r}" for name in stored if name not in self._shapes]
        faults += [
            f"{name!r} has shape {list(stored[name])} in the checkpoint and {list(shape)} in the "
            "model"
            for name, shape in self._shapes.items()
            if tuple(stored.get(name, shape)) != shape
        ]
        if faults:
            more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise CheckpointError(f"{folder} is of another model: {'; '.join(faults[:5])}{more}")

    def _choose_own(self, reader: CheckpointReader) -> Any:
        """Return the saved state of the same replica and, if possible, place, as its ranks read the
        same data and use the same random numbers. For a new replica, keep the present state."""
        own = reader.manifest.own
        words = ("place", "replica", "tensor_rank")
        ranks = {tuple(held.get(word, 0) for word in words): rank for rank, held in own.items()}
        place, replica = self.links.place, self.links.replica
        wanted = [(place, replica, self.shares.tensor_rank), (place, replica, 0), (0, replica, 0)]
        rank = next((ranks[one] for one in wanted if one in ranks), None)
        return None if rank is None else reader.own(rank)

    def _put_optimizer(self, loaded: PendingRestore, reader: CheckpointReader) -> None:
        names = {id(master): name for name, master in self.masters.by_name.items()}
        loaded.options = {}
        for optimizer in self.updates.optimizers:
            found = {}
            drop_state(optimizer)  # else it and what is read would both be in memory
            keys = {names[key]: key for key in find_holders([optimizer]) if key in names}
            parts = {name: find_part(name, self.masters, self.shares) for name in keys}
            for name, tree in reader.read_optimizers(parts).items():
                found[keys[name]] = tree
                loaded.options[keys[name]] = {**tree, "state": None}
            put_optimizer(optimizer, found)
        scale, kept = self.updates.loss_scale, loaded.loss_scale
        self.updates.skipping = False
        if scale is not None and scale.dynamic and kept is not None and kept["dynamic"]:
            scale.scale, scale.good_steps = kept["scale"], kept["good_steps"]

    def _put_schedule(self, loaded: PendingRestore) -> None:
        if self.scheduler is None or loaded.lr_schedule is None:
            return
        optimizers = self.updates.optimizers
        if optimizers and loaded.options:
            # A schedule that is made after the load has changed the rates.
            for optimizer in optimizers:
                put_optimizer(optimizer, loaded.options, with_state=False)
            optimizer = getattr(self.scheduler, "optimizer", optimizers[0])
            self.scheduler.load_state_dict(fit_rates(loaded.lr_schedule, optimizer))
        else:
            self.scheduler.load_state_dict(loaded.lr_schedule)

    # What is told of after a load.

    @property
    def sees_updates(self) -> bool:
        """True if the optimizers call a hook before a step: copies can wait until then."""
        return bool(self._hooks)

    def optimizers_set(self) -> None:
        for hook in self._hooks:
            hook.remove()
        held = self.updates.optimizers
        self._hooks = []
        if all(hasattr(optimizer, "register_step_pre_hook") for optimizer in held):
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.await_copies())
                for optimizer in held
            ]
        if self._loaded is not None:
            with CheckpointReader(self._loaded.folder, check_complete=False) as reader:
                self._put_optimizer(self._loaded, reader)

    def set_scheduler(self, scheduler: Any) -> None:
        for word in ("state_dict", "load_state_dict"):
            if not callable(getattr(scheduler, word, None)):
                raise ValueError(
                    f"{type(scheduler).__name__} is not a scheduler: it has no {word}()"
                )
        self.scheduler = scheduler
        if self._loaded is not None:
            self._put_schedule(self._loaded)

    def step_begins(self) -> None:
        """Release the loaded state when a step starts."""
        self._loaded = None
        self.news.poll()
