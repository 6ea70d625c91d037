"""Varuna's interface as a module: this rank's parameters under the plain model's names,
checkpoints, and signal handling. saving.py implements the checkpoints.

model.checkpoint("ckpt", keep=3)            # every rank, between steps
model.load_checkpoint("ckpt")               # every rank; the newest complete one
model.save_on_signal("ckpt")                # SIGUSR1, SIGUSR2, SIGTERM: save, leave with 0
"""

from __future__ import annotations

import logging
import signal
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from varuna_core.checkpoint.format.errors import NoCheckpoint
from varuna_core.runtime.arguments import FROM_CONF, ConfArguments, FromConf, StrPath
from varuna_core.runtime.assembly import RankParts
from varuna_core.runtime.comm.agreement import Agreement, decode, encode
from varuna_core.runtime.rank_view import view_model
from varuna_core.runtime.saving.preemption import CALLS, SignalCalls, ignore_calls
from varuna_core.runtime.saving.progress import PendingSave, TrainingProgress
from varuna_core.runtime.saving.saving import Saving
from varuna_core.runtime.step_trace import StepTrace

log = logging.getLogger(__name__)

LEFT_CODE = 0
"""Exit code of ranks that save and leave because of a signal; the exit is not a failure."""

P = TypeVar("P", bound="RankModule")


class RankModule(nn.Module):
    """A rank's part of the model, in the form that torch's optimizers and users expect."""

    def __init__(self, parts: RankParts) -> None:
        super().__init__()
        self.split, self.part, self.sharding = parts.split, parts.stages, parts.sharding
        self.links, self.engine = parts.links, parts.engine
        self.gradients, self.updates = parts.gradients, parts.updates
        self._masters = parts.masters
        self.training = parts.split.model.training  # the stage is a copy, frozen batch norms too
        # An optimizer refuses to hold nothing, and a rank may have nothing to train.
        self._nothing = nn.Parameter(torch.empty(0, device=parts.split.device))
        self.iteration = 0
        """Number of steps taken, including steps that overflowed."""

        self.data_position: Any = None
        """Position in the data, in any form that the user likes; each checkpoint saves rank 0's."""

        self.user_state: Any = None
        """Further state to save: numbers, words, lists, dicts, small tensors; rank 0's is saved."""

        self._conf = ConfArguments()
        self._steps: StepTrace | None = None
        self._leave_to: tuple[Path, dict[str, Any]] | None = None
        self._calls = calls = SignalCalls()
        self.agreement = Agreement(
            self.links, self.engine.last is not None, lambda: encode(calls.heard, CALLS)
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
        self.saving.is_told_to_end = lambda: calls.heard == signal.SIGTERM
        weakref.finalize(self, calls.close)

    # The module.

    def masters(self) -> dict[str, nn.Parameter]:
        """Return the fp32 parameters that the optimizer updates, under each of their names in the
        plain model; the next step copies them to the weights. With ZeRO, only this rank's own."""
        return dict(self._masters.by_name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the masters, or an empty parameter if this rank has none: optimizers need one."""
        dot = prefix + "." if prefix else ""
        named = list(self._masters.by_name.items())
        if remove_duplicate:
            named = [*{id(p): (name, p) for name, p in reversed(named)}.values()][::-1]
        if not any(parameter.requires_grad for _, parameter in named):
            named.append(("nothing", self._nothing))
        for name, parameter in named:
            yield dot + name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        dot = prefix + "." if prefix else ""
        for name, buffer in self.part.buffers().items():
            yield dot + name, buffer

    def state_dict(  # type: ignore[override]  # a part of the model has no prefix, no destination
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return this rank's masters and persistent buffers under the plain model's names."""
        if args or kwargs:
            raise TypeError("Varuna.state_dict takes no arguments: it holds this rank's part")
        if self._masters.slices:
            raise NotImplementedError(
                "with zero=3 the weights are sharded: call gather_state_dict() for whole weights"
            )
        persistent = self.split.model.state_dict().keys()
        named = {**self._masters.by_name, **self.part.buffers()}
        return {name: tensor.detach() for name, tensor in named.items() if name in persistent}

    def gather_state_dict(
        self, file: StrPath | None = None, *, only_trained: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the plain model's state dict on rank 0, None on others; call this on every rank.

        It has masters (fp32) and persistent buffers on the CPU under all names of the plain model,
        for `load_state_dict` or Hugging Face's `save_pretrained(state_dict=...)`. If `file` is
        given (.safetensors or .pt), rank 0 writes the dict to that file instead; for .safetensors,
        with one tensor in memory at a time. `only_trained` skips buffers and frozen parameters:
        adapters only, for peft's `save_pretrained(state_dict=...)`. An error is raised on all
        ranks.
        """
        self.links.expect_open()
        target = None if file is None else Path(file)
        found: dict[str, Tensor] | None = self.saving.gather(target, only_trained)
        return found

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("pass the plain model's state dict as Options(state_dict=...)")

    def train(self: P, mode: bool = True) -> P:
        self.training = mode
        self.part.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients.zero(set_to_none)

    @cached_property
    def _view(self) -> Any:
        stages = self.part.stages
        modules, buffers = [s.module for s in stages], [s.buffers() for s in stages]
        return view_model(modules, self._masters.by_name, buffers, self._nothing)

    @property
    def module(self) -> Any:
        """Return the user's model as a view, for calling its own methods. The view has this rank's
        `parameters()` and stages, and cannot run a forward (rank_view.py)."""
        return self._view

    # Checkpoints.

    def _end_saving(self) -> None:
        self._calls.close()
        self.saving.close()

    def _build_progress(self) -> TrainingProgress:
        return TrainingProgress(
            iteration=self.iteration, data_position=self.data_position, user_state=self.user_state
        )

    def checkpoint(
        self,
        global_store: StrPath | FromConf = FROM_CONF,
        step: int | None = None,
        tempdir: StrPath | FromConf | None = FROM_CONF,
        shard: bool = False,
        on_demand: bool = False,
        *,
        keep: int | FromConf | None = FROM_CONF,
    ) -> PendingSave | None:
        """Save to `varuna_ckpt_<step>` in a folder that all ranks see; call this on every rank.

        Folder, tempdir and keep default to those of `train.checkpoint` in the conf of a run.

        `step` defaults to the iteration. With `tempdir`, a local folder, this returns a handle at
        once, whose `result()` waits until this rank's part is written; the next save raises the
        same error, unless the disk was full. The local copy is made during the next step, before
        the optimizer's: do not change weights until then. `shard` divides the writing among
        replicas. `on_demand` waits until the whole checkpoint is complete, or raises the same error
        on all ranks. Only the newest `keep` checkpoints are kept.

        If the disk is full, the save is skipped with a warning and training continues. With
        `on_demand`, the save waits for space, up to ten minutes, and then raises NoRoom.
        """
        store = self._conf.choose_folder("checkpoint", global_store)
        number = self.iteration if step is None else step
        options: dict[str, Any] = {"shard": shard, "keep": self._conf.choose_keep(keep)}
        with self._span("checkpoint"):
            if on_demand:
                self.saving.save_whole(self._build_progress(), store, number, **options)
                return None
            options["tempdir"] = self._conf.choose_tempdir(tempdir)
            return self.saving.save(self._build_progress(), store, number, **options)

    def _span(self, kind: str) -> AbstractContextManager[Any]:
        """Open a span of the rank's trace, if one is written."""
        return self._steps.span(kind) if self._steps is not None else nullcontext()

    def load_checkpoint(
        self,
        global_store: StrPath | FromConf = FROM_CONF,
        iteration: int | None = None,
        check_complete: bool = True,
        *,
        missing_ok: bool = False,
    ) -> int:
        """Load a checkpoint of any layout (default: the newest), and return its number.

        If `missing_ok` and the folder has no complete checkpoint, load nothing and return the
        iteration, 0; but raise an error in a run that may change its layout (morph) and has saved
        before, since its folder is then missing.

        Call this on every rank, before or after `set_optimizer` and `set_scheduler`, before the
        next step. It restores `iteration`, `data_position` and `user_state`. An error is raised on
        all ranks; the weights are then undefined until another load.
        """
        store = self._conf.choose_folder("load_checkpoint", global_store)
        try:
            number, progress = self.saving.load(store, iteration, check_complete)
        except NoCheckpoint as error:
            if not missing_ok or iteration is not None:
                raise
            saved = self._conf.environ.get("VJOB_SAVED")
            if saved is not None:
                raise NoCheckpoint(
                    f"{error}; this run saved iteration {saved}, but it is missing now: is the "
                    "disk mounted? To train from the beginning, submit again"
                ) from None
            if self._conf.environ.get("RANK", "0") == "0":
                log.warning("%s: the training begins at iteration %d", error, self.iteration)
            return self.iteration
        self._take_up(progress)
        return number

    def _take_up(self, progress: TrainingProgress) -> None:
        self.iteration = progress.iteration
        self.data_position, self.user_state = progress.data_position, progress.user_state
        self.zero_grad()

    def set_scheduler(self, scheduler: Any) -> None:
        """Set the learning rate scheduler that the user steps; checkpoints include its state."""
        self.saving.set_scheduler(scheduler)

    # Signals.

    def save_on_signal(
        self,
        global_store: StrPath | FromConf = FROM_CONF,
        shard: bool = False,
        keep: int | FromConf | None = FROM_CONF,
    ) -> None:
        """Save and exit on all ranks at the next step if any rank gets SIGUSR1, SIGUSR2 or SIGTERM.

        The exit code is 0; `left.json` in the folder names the checkpoint. If the user has a
        handler for the signal, the handler is called at that point instead.
        """
        store = self._conf.choose_folder("save_on_signal", global_store)
        self._leave_to = store, {"shard": shard, "keep": self._conf.choose_keep(keep)}
        self._calls.listen()

    def _handle_signals(self) -> None:
        """Handle, at the start of a step, the signal that all ranks agreed on in the last step."""
        self._calls.claim_handlers()
        self.saving.step_begins()
        number = decode(self.agreement.told, CALLS)
        if not number or self.links.closed:
            return
        # Gradients that wait for more to be added are in no checkpoint.
        if self.saving.consensus.any_rank(self.gradients.hold_any()):
            return
        self.agreement.answered()
        handler = self._calls.answer(number)
        name = signal.Signals(number).name
        if handler is not None:
            try:
                handler(number, None)
            except SystemExit:
                ignore_calls()
                self.saving.consensus.leave()
                raise
        elif self._leave_to is not None:
            store, options = self._leave_to
            log.warning("%s: saving iteration %d into %s", name, self.iteration, store)
            ignore_calls()
            note = {"signal": name, "world_size": self.saving.consensus.world_size}
            self.saving.save_whole(
                self._build_progress(), store, self.iteration, note=note, **options
            )
            self.saving.consensus.leave()
            raise SystemExit(LEFT_CODE)
