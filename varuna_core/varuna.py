"""Varuna: a model with CutPoints trained as pipeline stages and replicas, spelled as in Varuna.

    model = Varuna(model, stage_to_rank_map, dummy_inputs, batch_size, chunk_size, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    loss, overflow = model.step(inputs)     # every rank of a replica gets the replica's batch
    optimizer.step()
    model.zero_grad()

Loss, gradients and updates equal those of the plain model on the global batch, in fp16 and bf16
(precision.py) too. Checkpoints are checkpointed.py's, evaluation on several ranks outputs.py's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.records.stage_map import parse_stage_map
from varuna_core.runtime.checkpointed import Checkpointed
from varuna_core.runtime.comm.failure import RankFailed, describe_error, is_connection_error
from varuna_core.runtime.comm.links import connect
from varuna_core.runtime.engine.engine import Engine, Trace
from varuna_core.runtime.engine.graph_memory import GraphMeter, agree_on_memory, find_limit
from varuna_core.runtime.engine.microbatch import (
    GetBatch,
    MicroBatch,
    deal_samples,
    find_first,
    look_at_dummies,
)
from varuna_core.runtime.engine.outputs import join_outputs, spread
from varuna_core.runtime.engine.plans import Plans, count_stages, place_stages
from varuna_core.runtime.engine.random_streams import kept_random_state
from varuna_core.runtime.engine.rank_part import RankPart, share_layers
from varuna_core.runtime.optim.equal_start import share_values
from varuna_core.runtime.optim.grads import Gradients, list_shared
from varuna_core.runtime.optim.loss_scale import build_loss_scale
from varuna_core.runtime.optim.precision import Masters, choose_precision
from varuna_core.runtime.optim.updates import Updates, check_optimizer
from varuna_core.runtime.optim.zero import WeightExchange, make_owners
from varuna_core.runtime.optim.zero_weights import refuse_optimizer, refuse_uneven, shard_modules
from varuna_core.runtime.settings import (
    check_memory_limit,
    choose_costs,
    find_device,
    refuse_unknown,
    refuse_zero,
)
from varuna_core.runtime.split.split import split_model
from varuna_core.schedule.actions import Action
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Recompute


class Varuna(Checkpointed):
    """This rank's part of the model; `parameters()` are its own, under the plain model's names."""

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str | Sequence[Sequence[int]],
        dummy_inputs: Mapping[str, Any] | GetBatch,
        batch_size: int,
        chunk_size: int,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str | torch.device = -1,
        shared_weights: Sequence[Sequence[str]] | None = None,
        from_cache: bool = True,
        *,
        partition: str | Sequence[int] | None = None,
        schedule: str = "auto",
        stages_per_rank: int = 1,
        tensor: int = 1,
        tensor_plan: Mapping[str, Any] | None = None,
        precision: str | None = None,
        recompute: Recompute = "none",
        trace: Trace | None = None,
        seed: int = 1234,
        state_dict: Mapping[str, Tensor] | None = None,
        memory_limit: float | None = None,
        opportunistic: bool = True,
        hang_timeout_s: float | None = None,
        costs: Costs | None = None,
        zero: int = 0,
        offload: str | None = None,
    ) -> None:
        """`batch_size` is that of all replicas, `chunk_size` a micro-batch's.

        `seed` is that of dropout and the like, and of the weights of a model on the meta device;
        `state_dict` holds weights to start from. `from_cache` is Varuna's and has no effect: the
        dry run is made at each start. `costs` are what a profile found; all ranks must be given
        the same. `zero` and `offload="optimizer"` are zero.py's. `tensor` ranks share each layer,
        by `tensor_plan` or the model's own `tensor_parallel_plan`.
        """
        super().__init__()
        refuse_unknown(schedule, recompute, batch_size, chunk_size)
        refuse_zero(zero, offload, recompute, tensor)
        self.batch_size, self.chunk_size = batch_size, chunk_size
        self.precision = choose_precision(fp16, precision)
        stages_per_rank = count_stages(schedule, stages_per_rank)
        self.device = find_device(device, local_rank)
        check_memory_limit(recompute, memory_limit, self.device)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        ranks = parse_stage_map(stage_to_rank_map, world, tensor).slice(rank % tensor)
        self.place, self.replica = ranks.find(rank)
        dummies, self._splitter = look_at_dummies(dummy_inputs, chunk_size)
        self.split = split_model(
            model,
            self.precision.cast(dummies),
            ranks.depth * stages_per_rank,
            partition,
            shared_weights=shared_weights,
            device=self.device,
            types=self.precision.choose_types(model),
        )
        dealt = deal_samples(batch_size, chunk_size, ranks.num_replicas)
        self.samples = dealt[self.replica]
        """Which samples of the global batch this rank is to be given."""

        costs, usual = choose_costs(self.split, costs), max(1, -(-len(dealt[0]) // chunk_size))
        self.stage_map, name = place_stages(ranks, schedule, stages_per_rank, usual, costs)
        self.memory_limit = memory_limit
        self.plans = Plans(
            name,
            self.stage_map,
            costs,
            recompute,
            # Ranks that share layers or weights must do the same in one order.
            opportunistic=opportunistic and zero != 3 and tensor == 1,
            is_limit_given=memory_limit is not None,
        )
        self.sharding = share_layers(
            self.split, tensor_plan, self.stage_map, rank, self.device, hang_timeout_s
        )
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        self.part = RankPart.make(
            self.split,
            self.stage_map.stages_of(self.place),
            state_dict=state_dict,
            seed=seed if on_meta else None,
            sharding=self.sharding,
        )
        shared = list_shared(
            [replace(t, stages=self.stage_map.places_of(t.stages)) for t in self.split.ties]
        )
        self.links = connect(
            self.stage_map, rank, tuple(shared), self.device, hang_timeout_s, zero == 3
        )
        self.engine = Engine(self.part.stages, self.links, seed=seed, trace=trace)
        full = self.part.take_full()
        share_values(
            {**self.part.parameters(), **full}, self.part.buffers().values(), shared, self.links
        )
        slices = {}
        if zero == 3 and self.links.replicas is not None:
            refuse_uneven(dealt, chunk_size)
            slices = shard_modules(self.split, self.part, full, self.links, self.precision.half)
        owners = make_owners(zero, self.links, self.part.parameters(), shared, model)
        self._masters = Masters(
            self.part.parameters(),
            full,
            owned=None if owners is None else owners.list_own(),
            offload=offload is not None,
            slices=slices,
        )
        del full  # the values of what others own
        self.gradients = Gradients(self._masters, shared, self.links, self.device, owners)
        if self.sharding is not None:
            self.sharding.join(self.links)
            self.gradients.share_layers(self.sharding)
        self.exchange = WeightExchange(owners, self.part.parameters()) if owners else None
        if self.gradients.at_once:
            self.engine.after_gradients = self.gradients.backward_done
        elif self.links.replicas is not None:
            self.engine.before_gradients = self.gradients.before
        self.engine.weight_grads.on_made = self.gradients.note
        self.engine.meter = GraphMeter(chunk_size) if recompute == "auto" else None
        puts_off = name in ("zero_bubble", "zbv", "auto")
        for stage in () if slices else self.part.stages:
            self.engine.weight_grads.install(stage.module, puts_off)
        # An optimizer refuses to hold nothing, and a rank may own nothing.
        self._nothing = nn.Parameter(torch.empty(0, device=self.device))
        self.updates = Updates(needs_scale=self.precision.name == "fp16")
        self.last_grad_norm: Tensor | None = None
        """Of the last step's gradients, before clipping; a tensor, read when the user reads it."""

        self.training = model.training  # the stage is a copy, frozen batch norms too
        self._prepare_saving()
        weakref.finalize(self, self.links.close)  # at exit too

    # Training.

    @property
    def optimizer(self) -> Any:
        return self.updates.optimizer

    def set_optimizer(
        self,
        optimizer: Any,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Say which optimizer the user steps: torch's or any with `param_groups` and `step()`.

        The loss scales are those of fp16, where a `step()` after an overflow does nothing.
        """
        check_optimizer(optimizer, {id(parameter) for parameter in self.parameters()})
        if self._masters.slices:
            refuse_optimizer(optimizer)
        if self.sharding is not None:
            self.sharding.check_optimizer(optimizer)
        scale = build_loss_scale(loss_scale, init_loss_scale, min_loss_scale)
        self.updates.attach(optimizer, scale)
        self.saving.optimizer_set()

    def step(
        self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None
    ) -> tuple[Tensor, bool]:
        """Forward and backward of the replica's batch: the global mean loss, and the overflow.

        Gradients add to what is there, as in plain PyTorch; both are the same on every rank. An
        overflow is a gradient of fp16 that is not finite, on any rank; in fp32 and bf16 it is never
        told: then the loss or `last_grad_norm` is not finite.
        """
        self.updates.check_ready()
        self._heed_signals()

        def run(microbatches: list[MicroBatch], size: int) -> Tensor:
            count = self.agreement.start(size)
            self._settle_memory()
            actions = self._plan(len(microbatches))
            self.engine.loss_scale = self.updates.scale
            num_backwards = sum(action.kind in "BW" for action in actions)
            self.gradients.begin(1 / self.updates.scale, num_backwards)
            summed = self.engine.run(actions, microbatches, self.iteration, count)
            self.gradients.reduce()
            square = self.gradients.square_norm()
            loss, square = self.agreement.finish(summed, square, count)
            self.last_grad_norm = self.updates.judge(square, self.gradients, clip_grad_max_norm)
            self._masters.land_gradients()
            return loss

        loss = self._guarded(inputs, run)
        self.iteration += 1
        return loss, self.updates.skipping

    def evaluate(self, inputs: Mapping[str, Any], outputs: bool | Literal["last"] = False) -> Any:
        """The mean loss of the global batch without gradients, the same on every rank.

        With `outputs` instead what the model returns, of the replica's batch, as
        `outputs.join_outputs` says: True on all ranks of the replica, "last" on the one that holds
        the last stage (None elsewhere). The model need then return no loss.
        """

        def run(microbatches: list[MicroBatch], size: int) -> Tensor:
            count = self.agreement.start(size)
            summed = self.engine.evaluate(self._plan(len(microbatches)), microbatches, step)
            return self.agreement.finish(summed, torch.zeros_like(summed), count)[0]

        def collect(microbatches: list[MicroBatch], size: int) -> Any:
            kept: dict[int, Any] = {}
            actions = self._plan(len(microbatches))
            self.engine.evaluate(actions, microbatches, step, kept.__setitem__)
            sizes = [microbatches[number].size for number in kept]
            joined = join_outputs([*kept.values()], sizes, self._splitter.list_dims())
            if outputs == "last":
                return joined
            last = self.stage_map.slice(0).ranks[self.stage_map.placement[-1]]
            return spread(joined, self.links.pipeline, last[self.replica], self.device)

        step = self.iteration
        if outputs not in (False, True, "last"):
            raise ValueError(f"outputs {outputs!r}: want False, True or 'last'")
        return self._guarded(inputs, collect if outputs else run, bounded=False)

    def close(self) -> None:
        """Wait for checkpoints on their way and take leave of the other ranks; done at exit too."""
        try:
            self._end_saving()
        finally:
            self.links.close()

    def _guarded(
        self,
        inputs: Mapping[str, Any],
        run: Callable[[list[MicroBatch], int], Any],
        bounded: bool = True,
    ) -> Any:
        """Run on the batch; a failure here or on another rank ends the step on all."""
        if self.links.closed:
            raise RuntimeError("this Varuna is closed, or a rank has failed: start anew")
        try:
            size = self._splitter.count(inputs)
            place = self.replica, self.stage_map.num_replicas
            first = find_first(size, self.batch_size, self.samples, *place, bounded=bounded)
            cast = self.precision.cast(inputs)
            microbatches = self._splitter.split(cast, self.chunk_size, first, self.device)
            self._masters.refresh()
            if self.exchange is not None:
                self.exchange.run(len(microbatches))
            shared = nullcontext() if self.sharding is None else self.sharding.running()
            with kept_random_state(self.device), shared:
                return run(microbatches, size)
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

    def _settle_memory(self) -> None:
        """From the second step on: the first one has measured what graphs hold."""
        meter, limit = self.engine.meter, self.memory_limit
        if meter is None or not self.iteration:
            return
        if limit is None:
            limit = find_limit(self.device, self.part.parameters().values())
        memory = agree_on_memory(meter, limit, self.links)
        if memory is not None:
            self.plans.settle(memory)
            self.engine.meter = None

    def _plan(self, num_microbatches: int) -> tuple[Action, ...]:
        """This rank's actions for so many micro-batches, verified when first asked for."""
        if not num_microbatches:
            return ()
        plan = self.plans.find(num_microbatches)
        self.links.hold(plan.capacity)
        self.engine.ahead = plan.ahead[self.place]
        return plan.schedule.ranks[self.place]
