"""Train a model with CutPoints as pipeline stages and replicas, with the original Varuna's API.

    model = Varuna(model, stage_to_rank_map, dummy_inputs, batch_size, chunk_size, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    loss, overflow = model.step(inputs)     # every rank of a replica gets the replica's batch
    optimizer.step()
    model.zero_grad()

Loss, gradients and updates equal those of the plain model on the global batch, also in fp16 and
bf16 (precision.py). runtime/assembly.py builds the parts; rank_module.py has the checkpoints.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.records.logs.trace import TraceWriter, choose_trace_file
from varuna_core.runtime.arguments import (
    FROM_CONF,
    ConfArguments,
    FromConf,
    Options,
    take_deprecated,
)
from varuna_core.runtime.assembly import assemble
from varuna_core.runtime.batch.named_inputs import Inputs
from varuna_core.runtime.batch.outputs import (
    Names,
    StepOutputs,
    join_outputs,
    spread,
)
from varuna_core.runtime.batch.token_means import LossWeights
from varuna_core.runtime.comm.failure import RankFailed, describe_error, is_connection_error
from varuna_core.runtime.comm.links import join_ranks
from varuna_core.runtime.comm.meeting import Meeting, open_meeting
from varuna_core.runtime.engine.adapting import Adapting
from varuna_core.runtime.engine.graph_memory import agree_on_memory, compute_limit
from varuna_core.runtime.engine.microbatch import (
    GetBatch,
    MicroBatch,
    compute_first,
)
from varuna_core.runtime.given import describe_batch, describe_shapes
from varuna_core.runtime.optim.updates import build_loss_scale, check_optimizers, refuse_whole
from varuna_core.runtime.rank_module import RankModule
from varuna_core.runtime.split.inputs import note_versions, refuse_unforeseen
from varuna_core.runtime.split.loss import AmbiguousLoss
from varuna_core.runtime.split.random_streams import kept_random_state
from varuna_core.runtime.step_trace import StepTrace, open_rank_trace, synchronise_clocks
from varuna_core.schedule.actions import Action
from varuna_core.schedule.recompute import Memory, Recompute
from varuna_core.trace import NUM_FIRST, open_once, read_every, span

log = logging.getLogger(__name__)


class Varuna(RankModule):
    """This rank's part of the model; `parameters()` returns this part's, under the plain names."""

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str | Sequence[Sequence[int]] | FromConf = FROM_CONF,
        dummy_inputs: Inputs | GetBatch | FromConf = FROM_CONF,
        batch_size: int | FromConf = FROM_CONF,
        chunk_size: int | FromConf = FROM_CONF,
        fp16: bool | FromConf = FROM_CONF,
        local_rank: int = -1,
        device: int | str | torch.device = -1,
        shared_weights: Sequence[Sequence[str]] | None = None,
        from_cache: bool = True,
        *,
        precision: str | FromConf | None = FROM_CONF,
        options: Options | None = None,
        **deprecated: Any,
    ) -> None:
        """`batch_size` is over all replicas, `chunk_size` is one micro-batch. Inputs are a dict
        keyed by the parameters of the model's forward, or a list in their order.

        `stage_to_rank_map` "0,2;1,3;" puts stage 0 on ranks 0 and 2, stage 1 on ranks 1 and 3, as
        does [[0, 2], [1, 3]]. `precision` is fp32, bf16 or fp16; `fp16=True` also selects the last.
        `shared_weights` lists pairs of names that are one weight; tied parameters are found without
        it. `device` defaults to the GPU of `local_rank`, else of LOCAL_RANK. `from_cache` has no
        effect and exists for compatibility: every start makes a dry run. `options` has all other
        options; as keywords here, they are deprecated.

        Under vjob, omitted arguments are read from the conf (runtime/arguments.py), and the ranks
        initialize a gloo process group if the script has not. Otherwise, pass the sizes and, for
        more than one rank, a stage map.
        """
        if dummy_inputs is FROM_CONF:
            raise TypeError("Varuna needs dummy_inputs: a sample batch, or get_batch(size, device)")
        options = take_deprecated(options or Options(), deprecated)
        conf = ConfArguments()
        if conf.must_join(stage_to_rank_map):
            join_ranks()
        settings = conf.resolve(
            options,
            stage_to_rank_map=stage_to_rank_map,
            batch_size=batch_size,
            chunk_size=chunk_size,
            fp16=fp16,
            precision=precision,
            local_rank=local_rank,
            device=device,
            shared_weights=shared_weights,
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        writer = None
        if options.trace is FROM_CONF:
            writer = open_once(
                lambda: open_rank_trace(
                    choose_trace_file(os.environ),
                    rank,
                    settings.stage_map,
                    schedule=settings.schedule,
                    partition=settings.partition,
                    stages_per_rank=settings.stages_per_rank,
                    device=settings.device,
                    log_every=read_every(),
                    num_first=NUM_FIRST,
                )
            )
            settings = replace(settings, trace=writer)
        parts = assemble(model, dummy_inputs, settings)
        if settings.partition is None and rank == 0 and len(parts.split.stages) > 1:
            conf.record_partition(parts.split.partition)
        super().__init__(parts)
        if writer is not None:
            synchronise_clocks(writer)
            self._steps = StepTrace(writer, span)
        self.batch_size, self.chunk_size = settings.batch_size, settings.chunk_size
        self.precision, self.device = settings.precision, settings.device
        self.memory_limit = options.memory_limit
        self.place, self.replica = parts.place, parts.replica
        self.samples = parts.samples
        """The samples of the global batch that the caller must pass to this rank."""

        self.plans, self.stage_map = parts.plans, parts.plans.stage_map
        self.adapting = self._find_adapting(settings.recompute)
        in_replica = sorted(settings.stage_map.list_replica(self.replica))
        part, rank = f"replica {self.replica}", dist.get_rank() if dist.is_initialized() else 0
        self._first_batch: Meeting | None = open_meeting(rank, in_replica, part)
        self.exchange, self._splitter = parts.exchange, parts.splitter
        self._names = parts.names
        self.last_grad_norm: Tensor | None = None
        """Norm of the last step's gradients before clipping, as a tensor still on the device."""

        self._untouched: list[tuple[nn.Parameter, int]] = []
        """Parameters before the first step, each with its version counter."""

        weakref.finalize(self, self.links.close)  # at exit too

    # Training.

    @property
    def optimizer(self) -> Any:
        """Return the optimizer given to `set_optimizer`, or a list of several; None before that."""
        held = [*self.updates.optimizers]
        return held if len(held) > 1 else next(iter(held), None)

    def set_optimizer(
        self,
        optimizer: Any,
        loss_scale: float | str | FromConf = FROM_CONF,
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> Any:
        """Register the optimizer that the user steps: torch's, any with `param_groups` and
        `step()`, or a list of optimizers with separate parameters.

        The loss scale defaults to the conf's, or "dynamic". The scale arguments apply only to fp16,
        where `step()` does nothing after an overflow. Return the optimizer.
        """
        held = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
        check_optimizers(held, {id(parameter) for parameter in self.parameters()})
        refuse_whole(held, has_pieces=self._name_pieces(), is_spread=self._name_spread())
        chosen = self._conf.choose_loss_scale(loss_scale)
        scale = build_loss_scale(chosen, init_loss_scale, min_loss_scale)
        self.updates.attach(held, scale)
        for one in held:
            if self._steps is not None:
                self._steps.watch_optimizer(one)
        self.saving.optimizers_set()
        return optimizer

    def _warn_of_no_updates(self) -> None:
        """Warn once if the gradients of the first step were cleared but no parameter changed: an
        optimizer created before Varuna holds other parameters."""
        masters = [p for p in self._masters.by_name.values() if p.requires_grad]
        if self.iteration == 0:
            self._untouched = [(p, p._version) for p in masters]
        elif self.iteration == 1 and not self.updates.optimizers and masters:
            is_cleared = not self.gradients.hold_any()
            if is_cleared and all(p._version == version for p, version in self._untouched):
                log.warning(
                    "%s: the gradients of the first step were cleared, and no parameter has "
                    "changed: make the optimizer after Varuna, of model.parameters(), and give it "
                    "to set_optimizer",
                    self.links.name,
                )
        if self.iteration == 1:
            self._untouched = []

    def _name_pieces(self) -> str:
        """Return the option by which this rank holds parts of tensors; empty if none."""
        if self._masters.slices:
            return "zero=3"
        return "tensor parallelism" if self.sharding is not None else ""

    def _name_spread(self) -> str:
        """Return the option by which this rank holds only some parameters; empty if none."""
        if self.stage_map.depth > 1:
            return f"{self.stage_map.depth} pipeline stages"
        return self._name_pieces() or ("zero" if self._masters.owned is not None else "")

    @overload
    def step(
        self, inputs: Inputs, clip_grad_max_norm: float | None = None
    ) -> tuple[Tensor, bool]: ...

    @overload
    def step(
        self,
        inputs: Inputs,
        clip_grad_max_norm: float | None = None,
        *,
        outputs: Names,
    ) -> tuple[Tensor, bool, dict[str | int, Any]]: ...

    def step(
        self,
        inputs: Inputs,
        clip_grad_max_norm: float | None = None,
        *,
        outputs: Names | None = None,
    ) -> tuple[Tensor, bool] | tuple[Tensor, bool, dict[str | int, Any]]:
        """Run forward and backward on the replica's batch; return the global mean loss and an
        overflow flag, equal on every rank.

        Gradients accumulate, as in plain PyTorch. The flag is True if fp16 gradients are not finite
        on any rank; in fp32 and bf16 it is always False: check the loss or `last_grad_norm`
        instead.

        With `outputs` (dict keys, attributes or tuple indices; the same on all ranks), also return
        these parts of the model's output, by name, joined as in batch/outputs.py.
        """
        form = self.split.record.loss
        if form.problem is not None:
            raise form.problem
        asked = None if outputs is None else StepOutputs(outputs)
        if asked is not None and form.path is not None:
            asked.check(self.split.record.output)
        self.updates.check_ready()
        self._warn_of_no_updates()
        self._handle_signals()

        def run(microbatches: list[MicroBatch], size: int) -> tuple[Tensor, Any]:
            weights = LossWeights(form, self.agreement, self.engine.last)
            places = 0
            if form.is_weighed_after:
                places = self._splitter.count_places(self._names.name(inputs))
            everywhere = self.engine.loss.split is not None
            totals = weights.start(microbatches, size, places, everywhere)
            self._set_memory_limit()
            if self.adapting is not None:
                self.adapting.begin_step()
            actions, ahead = self._plan(len(microbatches))
            scale = self.updates.scale
            num_backwards = sum(action.kind in "BW" for action in actions)
            self.gradients.begin(1 / scale, num_backwards)
            summed = self.engine.run(
                actions,
                microbatches,
                self.iteration,
                lambda: int(totals()[0]),
                loss_scale=scale,
                ahead=ahead,
                weigh=weights.weigh,
                keep=None if asked is None else asked.keep,
            )
            weights.note(summed)

            def compute_factor() -> float:
                return weights.compute_factor(self.agreement.sum_means(summed))

            self.gradients.reduce(compute_factor if form.is_weighed_after else None)
            if form.num_terms and form.is_counted:
                self.agreement.sum_means(summed)
            square = self.gradients.square_norm()
            loss, square = self.agreement.finish(summed, square, totals)
            weights.check()
            trace = self.engine.trace if isinstance(self.engine.trace, TraceWriter) else None
            agreed_s = trace.now() if trace is not None else 0.0
            self.last_grad_norm = self.updates.clip_and_scale(
                square, self.gradients, clip_grad_max_norm
            )
            self._masters.land_gradients()
            if trace is not None:
                kind = "all-reduce" if self.stage_map.world_size > 1 else "optimizer"
                trace.add(kind, self.engine.done_s, agreed_s, what="gradients, loss and norm")
                trace.add("optimizer", agreed_s, trace.now(), what="clip")
            return loss, None if asked is None else self._join_asked(asked, microbatches)

        if self._steps is not None:
            self._steps.begin(self.iteration + 1)
        try:
            loss, parts = self._guarded(inputs, run)
        except BaseException:
            if self._steps is not None:
                self._steps.drop()
            raise
        if self._steps is not None:
            self._steps.touch()
        self.iteration += 1
        overflow = self.updates.skipping
        return (loss, overflow) if asked is None else (loss, overflow, parts)

    def evaluate(self, inputs: Inputs, outputs: bool | Literal["last"] = False) -> Any:
        """Return the mean loss of the global batch without gradients, equal on every rank.

        If `outputs` is set, return instead the model's output for the replica's batch, joined by
        `outputs.join_outputs`: with True on all ranks of the replica, with "last" only on the rank
        of the last stage (None elsewhere). The model need not return a loss then.
        """

        def run(microbatches: list[MicroBatch], size: int) -> Tensor:
            totals = self.agreement.start(size)
            actions, _ = self._plan(len(microbatches))
            summed = self.engine.evaluate(actions, microbatches, step)
            if form.num_terms:
                self.agreement.sum_means(summed)
            square = torch.zeros((), dtype=summed.dtype, device=summed.device)
            return self.agreement.finish(summed, square, totals)[0]

        def collect(microbatches: list[MicroBatch], size: int) -> Any:
            kept: dict[int, Any] = {}
            actions, _ = self._plan(len(microbatches))
            self.engine.evaluate(actions, microbatches, step, kept.__setitem__)
            sizes = [microbatches[number].size for number in kept]
            joined = join_outputs([*kept.values()], sizes, self._splitter.list_dims())
            return joined if outputs == "last" else self._spread_from_last(joined)

        step, form = self.iteration, self.split.record.loss
        if not outputs and isinstance(form.problem, AmbiguousLoss):
            raise form.problem
        if outputs not in (False, True, "last"):
            raise ValueError(f"outputs {outputs!r}: expected False, True or 'last'")
        with self._span("evaluate"):
            return self._guarded(inputs, collect if outputs else run, bounded=False)

    def forward(self, *inputs: Any, **by_name: Any) -> Any:
        """Evaluate the replica's batch without gradients, like a plain model's call: the same as
        `evaluate(inputs, outputs=True)`, on every rank."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Varuna trains on whole batches: call step(inputs), which runs forward and "
                "backward; under torch.no_grad() model(inputs) returns what the model returns"
            )
        return self.evaluate(self._names.bind(inputs, by_name), outputs=True)

    def close(self) -> None:
        """Wait for pending checkpoints and disconnect from the other ranks; also called at exit."""
        if self._steps is not None:
            self._steps.end()
        try:
            self._end_saving()
        finally:
            self.links.close()

    def _guarded(
        self,
        inputs: Inputs,
        run: Callable[[list[MicroBatch], int], Any],
        bounded: bool = True,
    ) -> Any:
        """Run on the batch; a failure on this or another rank ends the step on all ranks."""
        self.links.expect_open()
        try:
            inputs = self._names.name(inputs)
            size = self._splitter.count(inputs)
            self.links.arrivals.batch = describe_shapes(inputs)
            self._compare_first(inputs)
            if self.sharding is not None:
                self.sharding.expect_same(self.links.arrivals.batch)
            place = self.replica, self.stage_map.num_replicas
            first = compute_first(size, self.batch_size, self.samples, *place, bounded=bounded)
            cast = self.precision.cast(inputs)
            microbatches = self._splitter.split(cast, self.chunk_size, first, self.device)
            self._masters.refresh()
            if self.exchange is not None:
                self.exchange.run(len(microbatches))
            note, sharding = self.gradients.note, self.sharding
            shared = nullcontext() if sharding is None else sharding.running(note)
            noted = note_versions(microbatches[0].inputs) if microbatches else []
            with kept_random_state(self.device), shared:
                result = run(microbatches, size)
            self._masters.wait_read()
            refuse_unforeseen(noted)
            return result
        except BaseException as error:
            mine = f"{self.links.name}: {describe_error(error)}"
            first_error = self.links.board.write(mine)
            self.gradients.forget()
            if self.exchange is not None:
                self.exchange.forget()
            self.agreement.forget()
            self.links.abort()
            if not is_connection_error(error):
                raise
            raise RankFailed(f"{self.links.name} stops: {first_error}") from error

    def _compare_first(self, inputs: Mapping[str, Any]) -> None:
        """Compare the first batch with those of the replica's other ranks: raise an error if the
        shapes differ, and warn if the values differ."""
        meeting, self._first_batch = self._first_batch, None
        if meeting is None:
            return
        difference = meeting.compare(
            describe_batch(inputs),
            lambda waited_s: self.links.look(waited_s, asks_board=True),
            "take its first step",
        )
        if difference is None:
            return
        text = f"all ranks of a replica must get the same batch in each step: {difference.text}"
        if difference.names != ["values"]:
            raise ValueError(text)
        log.warning("%s", text)

    def _join_asked(self, asked: StepOutputs, microbatches: Sequence[MicroBatch]) -> Any:
        """Return the requested outputs of this step, on all ranks of the replica."""
        joined = None
        if self.engine.last is not None:
            sizes, dims = [micro.size for micro in microbatches], self._splitter.list_dims()
            joined = asked.join(sizes, dims, self.device, self.links.replicas)
        return self._spread_from_last(joined)

    def _spread_from_last(self, value: Any) -> Any:
        """Broadcast a value from the last stage to all ranks of the replica."""
        last = self.stage_map.slice(0).ranks[self.stage_map.placement[-1]]
        return spread(value, self.links.pipeline, last[self.replica], self.device)

    def _find_adapting(self, recompute: Recompute) -> Adapting | None:
        times = self.engine.times
        if times is None:
            return None
        must_fit = self.device.type == "cuda" and recompute != "auto"  # auto knows it anyway
        return Adapting(self.plans, self.links, times, self._find_memory if must_fit else None)

    def _set_memory_limit(self) -> None:
        """Set the memory limit at the second step, after the first one has measured the graphs."""
        if not self.plans.lacks_memory or not self.iteration:
            return
        memory = self._find_memory()
        if memory is not None:
            self.plans.set_memory(memory)
            self.engine.passes.meter = None

    def _find_memory(self) -> Memory | None:
        """Return the bytes of all stages' graphs and their limits; None while these are unknown."""
        meter, limit = self.engine.passes.meter, self.memory_limit
        if meter is None:
            return None
        if limit is None:
            limit = compute_limit(self.device, self.part.parameters().values())
        return agree_on_memory(meter, limit, self.links)

    def _plan(self, num_microbatches: int) -> tuple[tuple[Action, ...], int]:
        """Return this rank's actions for this number of micro-batches, verified at first use, and
        the number of forwards that may run early."""
        if not num_microbatches:
            return (), 0
        plan = self.plans.find(num_microbatches)
        self.links.hold(plan.capacity)
        return plan.schedule.ranks[self.place], plan.ahead[self.place]
