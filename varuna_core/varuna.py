"""Varuna: a model with CutPoints trained as pipeline stages and replicas, spelled as in Varuna.

    model = Varuna(model, stage_to_rank_map, dummy_inputs, batch_size, chunk_size, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    loss, overflow = model.step(inputs)     # every rank of a replica gets the replica's batch
    optimizer.step()
    model.zero_grad()

Loss, gradients and updates equal those of the plain model on the global batch, in fp16 and bf16
(precision.py) too. runtime/assembly.py makes the parts; checkpoints are rank_module.py's.
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
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.arguments import FROM_CONF, ConfArguments, FromConf
from varuna_core.runtime.assembly import assemble
from varuna_core.runtime.batch.named_inputs import Inputs
from varuna_core.runtime.batch.outputs import (
    Names,
    StepOutputs,
    join_outputs,
    spread,
)
from varuna_core.runtime.batch.token_means import LossWeights
from varuna_core.runtime.comm.devices import may_share, take_device
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
from varuna_core.runtime.engine.plans import count_stages
from varuna_core.runtime.given import describe_batch, describe_shapes
from varuna_core.runtime.optim.updates import build_loss_scale, check_optimizers, refuse_whole
from varuna_core.runtime.rank_module import RankModule
from varuna_core.runtime.settings import (
    Options,
    VarunaSettings,
    refuse_unknown,
    refuse_zero,
    take_deprecated,
)
from varuna_core.runtime.split.inputs import note_versions, refuse_unforeseen
from varuna_core.runtime.split.loss import AmbiguousLoss
from varuna_core.runtime.split.random_streams import kept_random_state
from varuna_core.runtime.step_trace import StepTrace, open_rank_trace, synchronise_clocks
from varuna_core.schedule.actions import Action
from varuna_core.schedule.recompute import Memory, Recompute
from varuna_core.trace import NUM_FIRST, open_once, read_every, span

log = logging.getLogger(__name__)


class Varuna(RankModule):
    """This rank's part of the model; `parameters()` are its own, under the plain model's names."""

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
        """`batch_size` is that of all replicas, `chunk_size` a micro-batch's. Inputs are a dict by
        the names of the model's forward, or a list in their order.

        `stage_to_rank_map` "0,2;1,3;" is stage 0 on ranks 0 and 2, stage 1 on ranks 1 and 3; so is
        [[0, 2], [1, 3]]. `precision` is fp32, bf16 or fp16, the last of which `fp16=True` says too.
        `shared_weights` are pairs of names that are one weight, besides tied parameters, which are
        found. `device` is by default the GPU of `local_rank`, else of LOCAL_RANK. `from_cache` is
        Varuna's and has no effect: the dry run is made at each start. `options` has the rest; given
        here, they are still taken, with a warning.

        Arguments that are not given come from the conf when the script runs under vjob
        (runtime/arguments.py); the ranks then meet over gloo if the script has not seen to it.
        Elsewhere sizes must be given, and a stage map for more than one rank.
        """
        if dummy_inputs is FROM_CONF:
            raise TypeError("Varuna needs dummy_inputs: a sample batch, or get_batch(size, device)")
        options = take_deprecated(options or Options(), deprecated)
        conf = ConfArguments()
        if conf.must_join(stage_to_rank_map):
            join_ranks()
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        layout, tensor_degree = conf.choose_layout(stage_to_rank_map, options.tensor, world)
        stages = parse_stage_map(layout, world, tensor_degree)
        batch_size, chunk_size = conf.choose_sizes(batch_size, chunk_size, stages)
        partition = conf.choose_partition(options.partition)
        schedule = conf.choose_schedule(options.schedule)
        zero = conf.choose_zero(options.zero)
        offload = conf.choose_offload(options.offload)
        is_device_shared = may_share(device)
        device = take_device(device, local_rank)
        recompute = conf.choose_recompute(options.recompute, device, zero)
        refuse_unknown(schedule, recompute, batch_size, chunk_size)
        refuse_zero(zero, offload, recompute, tensor_degree)
        given = conf.count_stages(options.stages_per_rank, schedule, partition, stages.depth)
        stages_per_rank = count_stages(schedule, given)
        resolved = {
            "batch_size": batch_size,
            "chunk_size": chunk_size,
            "precision": conf.choose_precision(fp16, precision).keeping(options.keep_fp32),
            "schedule": schedule,
            "stages_per_rank": stages_per_rank,
            "device": device,
            "may_share": is_device_shared,
            "shared_weights": shared_weights,
            "partition": partition,
            "tensor": tensor_degree,
            "recompute": recompute,
            "costs": conf.choose_costs(options.costs, partition, stages.depth * stages_per_rank),
            "zero": zero,
            "offload": offload,
            "seed": conf.choose("seed", options.seed, "train.seed", int, 1234),
            "trace": None if options.trace is FROM_CONF else options.trace,
        }
        settings = VarunaSettings(**vars(options) | resolved)
        writer = None
        if options.trace is FROM_CONF:
            writer = open_once(
                lambda: open_rank_trace(
                    choose_trace_file(os.environ),
                    rank,
                    stages,
                    schedule=settings.schedule,
                    partition=settings.partition,
                    stages_per_rank=settings.stages_per_rank,
                    device=settings.device,
                    log_every=read_every(),
                    num_first=NUM_FIRST,
                )
            )
            settings = replace(settings, trace=writer)
        parts = assemble(model, layout, dummy_inputs, settings)
        super().__init__(parts)
        if writer is not None:
            synchronise_clocks(writer)
            self._steps = StepTrace(writer, span)
        self.batch_size, self.chunk_size = batch_size, chunk_size
        self.precision, self.device = settings.precision, device
        self.memory_limit = options.memory_limit
        self.place, self.replica = parts.place, parts.replica
        self.samples = parts.samples
        """The samples of the global batch that this rank is to be given."""

        self.plans, self.stage_map = parts.plans, parts.plans.stage_map
        self.adapting = self._find_adapting(recompute)
        in_replica = sorted(stages.list_replica(self.replica))
        part, rank = f"replica {self.replica}", dist.get_rank() if dist.is_initialized() else 0
        self._first_batch: Meeting | None = open_meeting(rank, in_replica, part)
        self.exchange, self._splitter = parts.exchange, parts.splitter
        self._names = parts.names
        self.last_grad_norm: Tensor | None = None
        """Norm of the last step's gradients before clipping, not read from the device."""

        self._untouched: list[tuple[nn.Parameter, int]] = []
        """Parameters before the first step, and how often each had been changed."""

        weakref.finalize(self, self.links.close)  # at exit too

    # Training.

    @property
    def optimizer(self) -> Any:
        """The optimizer given to `set_optimizer`, or a list of several; None before the call."""
        held = [*self.updates.optimizers]
        return held if len(held) > 1 else next(iter(held), None)

    def set_optimizer(
        self,
        optimizer: Any,
        loss_scale: float | str | FromConf = FROM_CONF,
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> Any:
        """Take the optimizer that the user steps, torch's or any with `param_groups` and `step()`,
        or a list of several, each of parameters of its own.

        The loss scale is by default the conf's, or "dynamic". All of them are fp16's, where a
        `step()` after an overflow does nothing. Returns the optimizer.
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
        """Warn once where the gradients of the first step were cleared and changed nothing: an
        optimizer that was made before Varuna holds other parameters."""
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
        """Name the option that gives this rank pieces of tensors; empty if it has whole ones."""
        if self._masters.slices:
            return "zero=3"
        return "tensor parallelism" if self.sharding is not None else ""

    def _name_spread(self) -> str:
        """Name the option that gives this rank a part of the parameters; empty if it has all."""
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
        """Forward and backward of the replica's batch: the global mean loss, and the overflow.

        Gradients add to what is there, as in plain PyTorch; both are the same on every rank. An
        overflow is a gradient of fp16 that is not finite, on any rank; in fp32 and bf16 it is never
        told: then the loss or `last_grad_norm` is not finite.

        With `outputs`, keys of a dict, attributes or places in a tuple, there is a third thing:
        these parts of what the model returned, by name, as batch/outputs.py joins them. All ranks
        ask for the same.
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
                done_s = self.engine.done_s
                trace.add("all-reduce", done_s, agreed_s, what="gradients, loss and norm")
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
        """The mean loss of the global batch without gradients, the same on every rank.

        With `outputs` instead what the model returns, of the replica's batch, as
        `outputs.join_outputs` says: True on all ranks of the replica, "last" on the one that
        holds the last stage (None elsewhere). The model need then return no loss.
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
            raise ValueError(f"outputs {outputs!r}: want False, True or 'last'")
        return self._guarded(inputs, collect if outputs else run, bounded=False)

    def forward(self, *inputs: Any, **by_name: Any) -> Any:
        """Evaluate the replica's batch without gradients, as a plain script calls its model: the
        same as `evaluate(inputs, outputs=True)`, on every rank."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Varuna trains on whole batches: call step(inputs), which runs forward and "
                "backward; under torch.no_grad() model(inputs) returns what the model returns"
            )
        return self.evaluate(self._names.bind(inputs, by_name), outputs=True)

    def close(self) -> None:
        """Wait for checkpoints on their way and take leave of the other ranks; done at exit too."""
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
        """Run on the batch; a failure here or on another rank ends the step on all."""
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
        """Compare the first batch with that of the replica's other ranks: its shapes must be the
        same, and other values are warned of."""
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
        text = f"the ranks of a replica take the same batch in each step: {difference.text}"
        if difference.names != ["values"]:
            raise ValueError(text)
        log.warning("%s", text)

    def _join_asked(self, asked: StepOutputs, microbatches: Sequence[MicroBatch]) -> Any:
        """The parts of this step's outputs, on all ranks of the replica."""
        joined = None
        if self.engine.last is not None:
            sizes, dims = [micro.size for micro in microbatches], self._splitter.list_dims()
            joined = asked.join(sizes, dims, self.device, self.links.replicas)
        return self._spread_from_last(joined)

    def _spread_from_last(self, value: Any) -> Any:
        """Send a value of the last stage to all ranks of the replica."""
        last = self.stage_map.slice(0).ranks[self.stage_map.placement[-1]]
        return spread(value, self.links.pipeline, last[self.replica], self.device)

    def _find_adapting(self, recompute: Recompute) -> Adapting | None:
        times = self.engine.times
        if times is None:
            return None
        must_fit = self.device.type == "cuda" and recompute != "auto"  # auto knows it anyway
        return Adapting(self.plans, self.links, times, self._find_memory if must_fit else None)

    def _set_memory_limit(self) -> None:
        """Set the memory limit from the second step on: the first one has measured what graphs
        hold."""
        if not self.plans.lacks_memory or not self.iteration:
            return
        memory = self._find_memory()
        if memory is not None:
            self.plans.set_memory(memory)
            self.engine.passes.meter = None

    def _find_memory(self) -> Memory | None:
        """Bytes that the graphs of all stages hold, and may; None while that is not known."""
        meter, limit = self.engine.passes.meter, self.memory_limit
        if meter is None:
            return None
        if limit is None:
            limit = compute_limit(self.device, self.part.parameters().values())
        return agree_on_memory(meter, limit, self.links)

    def _plan(self, num_microbatches: int) -> tuple[tuple[Action, ...], int]:
        """This rank's actions for so many micro-batches, verified when first asked for, and how
        many forwards may be run before their turn."""
        if not num_microbatches:
            return (), 0
        plan = self.plans.find(num_microbatches)
        self.links.hold(plan.capacity)
        return plan.schedule.ranks[self.place], plan.ahead[self.place]
