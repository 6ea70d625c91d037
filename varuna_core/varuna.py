"""Varuna: a model with CutPoints trained as pipeline stages and replicas, spelled as in Varuna.

    model = Varuna(model, stage_to_rank_map, dummy_inputs, batch_size, chunk_size, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    loss, overflow = model.step(inputs)     # every rank of a replica gets the replica's batch
    optimizer.step()
    model.zero_grad()

Loss, gradients and updates equal those of the plain model on the global batch. Not in this version:
precisions other than fp32, checkpoints, and the fields that say so when they are set.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.engine import Engine, Trace
from varuna_core.failure import RankFailed, describe_error, is_connection_error
from varuna_core.grads import Gradients, list_shared
from varuna_core.graph_memory import GraphMeter, agree_on_memory, find_limit
from varuna_core.links import connect
from varuna_core.microbatch import BatchSplitter, GetBatch, MicroBatch, deal_samples
from varuna_core.plans import Plans, count_stages, place_stages
from varuna_core.random_streams import kept_random_state
from varuna_core.rank_part import RankPart
from varuna_core.schedule.actions import Action
from varuna_core.schedule.recompute import Recompute
from varuna_core.settings import check_memory_limit, estimate_costs, find_device, refuse_unknown
from varuna_core.split import split_model
from varuna_core.stage_map import parse_stage_map


class Varuna(nn.Module):
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
        precision: str | None = None,
        recompute: Recompute = "none",
        trace: Trace | None = None,
        seed: int = 1234,
        state_dict: Mapping[str, Tensor] | None = None,
        memory_limit: float | None = None,
        opportunistic: bool = True,
        hang_timeout_s: float | None = None,
    ) -> None:
        """`batch_size` is that of all replicas, `chunk_size` a micro-batch's.

        `seed` is that of dropout and the like, and of the weights of a model on the meta device;
        `state_dict` holds weights to start from. `from_cache` is taken and changes nothing: the dry
        run is made anew each time.
        """
        super().__init__()
        refuse_unknown(fp16, precision, schedule, recompute, batch_size, chunk_size)
        self.batch_size, self.chunk_size = batch_size, chunk_size
        stages_per_rank = count_stages(schedule, stages_per_rank)
        self.device = find_device(device, local_rank)
        check_memory_limit(recompute, memory_limit, self.device)
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        ranks = parse_stage_map(stage_to_rank_map, world)
        self.place, self.replica = ranks.find(rank)
        dummies, self._splitter = _look_at(dummy_inputs, chunk_size)
        self.split = split_model(
            model,
            dummies,
            ranks.depth * stages_per_rank,
            partition,
            shared_weights=shared_weights,
            device=self.device,
        )
        dealt = deal_samples(batch_size, chunk_size, ranks.num_replicas)
        self.samples = dealt[self.replica]
        """Which samples of the global batch this rank is to be given."""

        costs, usual = estimate_costs(self.split), max(1, -(-len(dealt[0]) // chunk_size))
        self.stage_map, name = place_stages(ranks, schedule, stages_per_rank, usual, costs)
        self.memory_limit = memory_limit
        self.plans = Plans(
            name,
            self.stage_map,
            costs,
            recompute,
            opportunistic=opportunistic,
            is_limit_given=memory_limit is not None,
        )
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        self.part = RankPart.make(
            self.split,
            self.stage_map.stages_of(self.place),
            state_dict=state_dict,
            seed=seed if on_meta else None,
        )
        shared = list_shared(
            [replace(t, stages=self.stage_map.places_of(t.stages)) for t in self.split.ties]
        )
        self.links = connect(self.stage_map, rank, tuple(shared), self.device, hang_timeout_s)
        self.engine = Engine(self.part.stages, self.links, seed=seed, trace=trace)
        self.engine.meter = GraphMeter(chunk_size) if recompute == "auto" else None
        own = self.part.parameters()
        self.gradients = Gradients(own, shared, self.links, self.device)
        self.gradients.share_values(
            [*(p for _, p in self.part.unique_parameters()), *self.part.buffers().values()]
        )
        if name in ("zero_bubble", "zbv", "auto"):
            for stage in self.part.stages:
                self.engine.weight_grads.install(stage.module)
        # An optimizer refuses to hold nothing, and a stage may have no layers.
        self._nothing = nn.Parameter(torch.empty(0, device=self.device))
        self._counting: Any = None
        self.iteration = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.last_grad_norm: Tensor | None = None
        """Of the last step's gradients, before clipping; a tensor, read when the user reads it."""

        self.train(model.training)
        weakref.finalize(self, self.links.close)  # at exit too

    # As a module.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's own; a rank without any has one of no elements."""
        dot = prefix + "." if prefix else ""
        found = (
            self.part.unique_parameters() if remove_duplicate else self.part.parameters().items()
        )
        named = list(found) or [("nothing", self._nothing)]
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
        """This rank's parameters and persistent buffers, in the plain model's names."""
        if args or kwargs:
            raise TypeError("Varuna.state_dict takes no arguments: it holds this rank's part")
        persistent = self.split.model.state_dict().keys()
        named = {**self.part.parameters(), **self.part.buffers()}
        return {name: tensor.detach() for name, tensor in named.items() if name in persistent}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("give Varuna(state_dict=...) the plain model's state dict")

    def train(self, mode: bool = True) -> Varuna:
        self.training = mode
        self.part.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.gradients.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Varuna runs whole batches: call step(inputs) or evaluate(inputs)")

    # Training.

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Say which optimizer the user steps; the loss scales are those of fp16."""
        own = {id(parameter) for parameter in self.parameters()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held <= own:
            raise ValueError(
                "the optimizer holds parameters that are not this rank's: make it after Varuna, "
                "from model.parameters()"
            )
        self.optimizer = optimizer

    def step(
        self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None
    ) -> tuple[Tensor, bool]:
        """Forward and backward of the replica's batch: the global mean loss, and False (overflow).

        Gradients add to what is there, as in plain PyTorch; the loss is the same on every rank.
        """

        def run(microbatches: list[MicroBatch], count: Callable[[], int]) -> Tensor:
            self._settle_memory()
            actions = self._plan(len(microbatches))
            summed = self.engine.run(actions, microbatches, self.iteration, count)
            self.gradients.reduce()
            square = self.gradients.square_norm()
            loss, square = self._agree(summed, square, count)
            self.last_grad_norm = square.sqrt().to(torch.get_default_dtype())
            if clip_grad_max_norm is not None:
                factor = clip_grad_max_norm / (square.sqrt() + 1e-6)
                self.gradients.scale(factor.clamp(max=1.0))
            return loss

        loss = self._guarded(inputs, run)
        self.iteration += 1
        return loss, False

    def evaluate(self, inputs: Mapping[str, Any]) -> Tensor:
        """The mean loss of the global batch without gradients, the same on every rank."""

        def run(microbatches: list[MicroBatch], count: Callable[[], int]) -> Tensor:
            actions = self._plan(len(microbatches))
            summed = self.engine.evaluate(actions, microbatches, self.iteration)
            return self._agree(summed, torch.zeros_like(summed), count)[0]

        return self._guarded(inputs, run)

    def close(self) -> None:
        """Take leave of the other ranks; done at exit too."""
        self.links.close()

    def _guarded(
        self,
        inputs: Mapping[str, Any],
        run: Callable[[list[MicroBatch], Callable[[], int]], Tensor],
    ) -> Tensor:
        """Run on the batch; a failure here or on another rank ends the step on all."""
        if self.links.closed:
            raise RuntimeError("this Varuna is closed, or a rank has failed: start anew")
        try:
            size = self._splitter.count(inputs)
            first = self._find_first(size)
            microbatches = self._splitter.split(inputs, self.chunk_size, first, self.device)
            with kept_random_state(self.device):
                return run(microbatches, self._start_count(size))
        except BaseException as error:
            mine = f"{self.links.name}: {describe_error(error)}"
            first_error = self.links.board.write(mine)
            self._counting = None  # it would keep its group open
            self.links.abort()
            if not is_connection_error(error):
                raise
            raise RankFailed(f"{self.links.name} stops: {first_error}") from error

    def _find_first(self, size: int) -> int:
        """The place of this batch in the global one: its even share, or the one dealt to it."""
        if size * self.stage_map.num_replicas == self.batch_size:
            return self.replica * size
        if size > len(self.samples):
            raise ValueError(
                f"a batch of {size} samples: replica {self.replica} of "
                f"{self.stage_map.num_replicas} takes {len(self.samples)} of {self.batch_size} "
                f"(model.samples says which)"
            )
        return self.samples.start

    def _start_count(self, size: int) -> Callable[[], int]:
        """Begin to add up what the replicas were given; the last stage will ask for the sum."""
        if self.links.replicas is None or not self.engine.holds_last:
            return lambda: size
        total = torch.tensor([size])
        self._counting = dist.all_reduce(total, group=self.links.replicas, async_op=True)

        def wait() -> int:
            if self._counting is not None:
                self._counting.wait()
            self._counting = None
            return int(total.item())

        return wait

    def _agree(
        self, summed: Tensor, square: Tensor, count: Callable[[], int]
    ) -> tuple[Tensor, Tensor]:
        """The mean loss and the square of the norm, the same on every rank."""
        loss = torch.zeros_like(summed)
        if self.engine.holds_last:
            total = count()
            loss = summed / total if total else summed
            if self.links.replicas is not None:
                dist.all_reduce(loss, group=self.links.replicas)
        both = torch.stack([loss, square])
        if self.links.pipeline is not None:
            dist.all_reduce(both, group=self.links.pipeline)
        return both[0].to(torch.get_default_dtype()), both[1]

    def _settle_memory(self) -> None:
        """From the second step on: the first one has measured what graphs hold."""
        if not self.plans.lacks_memory or not self.iteration:
            return
        limit = self.memory_limit
        if limit is None:
            limit = find_limit(self.device, self.part.parameters().values())
        assert self.engine.meter is not None
        memory = agree_on_memory(self.engine.meter, limit, self.links)
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


def _look_at(
    dummy_inputs: Mapping[str, Any] | GetBatch, size: int
) -> tuple[Mapping[str, Any], BatchSplitter]:
    if isinstance(dummy_inputs, Mapping):
        return dummy_inputs, BatchSplitter.from_inputs(dummy_inputs)
    return dummy_inputs(size), BatchSplitter.from_function(dummy_inputs, size)
