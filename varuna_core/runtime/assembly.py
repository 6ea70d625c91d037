"""Build the parts of one training rank in order; the entry point is `assemble`.

    stage map ─► place and replica of this rank
    model ─► split ─► plans of the schedule, which place the stages ─► this rank's stages
    links to other ranks ─► equal weights ─► masters ─► gradients ─► engine

Every rank builds the same parts in the same order, since several parts need all ranks of a group.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from varuna_core.records.rank_map import StageMap
from varuna_core.runtime.arguments import VarunaSettings
from varuna_core.runtime.batch.named_inputs import InputNames, Inputs
from varuna_core.runtime.comm.links import Links, connect, connect_sharing
from varuna_core.runtime.comm.meeting import open_meeting
from varuna_core.runtime.engine.adapting import ActionTimes
from varuna_core.runtime.engine.compiled import compile_stages, why_none
from varuna_core.runtime.engine.cuda_graphs import CudaGraphs, CudaRecorder, why_none_recorded
from varuna_core.runtime.engine.engine import Engine
from varuna_core.runtime.engine.gradient_turns import GradientTurns
from varuna_core.runtime.engine.graph_memory import GraphMeter
from varuna_core.runtime.engine.loss_seed import LossSeed
from varuna_core.runtime.engine.microbatch import (
    BatchSplitter,
    GetBatch,
    deal_samples,
    read_dummies,
)
from varuna_core.runtime.engine.passes import Passes
from varuna_core.runtime.engine.plans import Plans, settle_stages
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.runtime.given import WARNED, describe_training
from varuna_core.runtime.optim.grads import Gradients, list_shared
from varuna_core.runtime.optim.hooks import ParameterHooks, list_parts
from varuna_core.runtime.optim.precision import Masters, MicroBatchWeight
from varuna_core.runtime.optim.updates import Updates
from varuna_core.runtime.optim.zero import Owners, WeightExchange, make_owners, share_values
from varuna_core.runtime.optim.zero_weights import refuse_uneven, shard_modules
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import LossForm
from varuna_core.runtime.split.split import RankStages, Split, split_model
from varuna_core.runtime.split.wrappers import take_plain
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import AUTO, may_split_backward
from varuna_core.trace.device import find_clock

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

log = logging.getLogger(__name__)

SharedWeights = Mapping[tuple[int, ...], Sequence[str]]
"""Names of weights held by several places, keyed by the tuple of places."""


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """The parts that one rank trains with."""

    place: int
    """This rank's column in the stage map."""

    replica: int
    samples: range
    """Samples of the global batch that this replica processes."""

    names: InputNames
    splitter: BatchSplitter
    split: Split
    plans: Plans
    sharding: Sharding | None
    """How layers are sharded across ranks; None if each rank holds whole layers."""

    stages: RankStages
    links: Links
    masters: Masters
    gradients: Gradients
    exchange: WeightExchange | None
    """Exchange of weights between the ranks that own them, with ZeRO."""

    engine: Engine
    updates: Updates


def assemble(
    model: nn.Module,
    dummy_inputs: Inputs | GetBatch,
    settings: VarunaSettings,
) -> RankParts:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    meeting = open_meeting(rank, range(world))
    with meeting.refusing():
        ranks = settings.stage_map.slice(rank % settings.tensor)
        place, replica = ranks.find(rank)
        model = take_plain(model)
        names = InputNames(model)
        dummies, splitter = read_dummies(names.name_all(dummy_inputs), settings.chunk_size)
        split = cut_model(model, dummies, ranks, settings)
        refuse_offload(split, settings)
        samples = deal_samples(settings.batch_size, settings.chunk_size, ranks.num_replicas)
        plans = plan_schedule(split, ranks, samples, settings)
    meeting.require_same(describe_training(split, settings), warned=WARNED)
    meeting = open_meeting(rank, range(world))
    with meeting.refusing():
        sharding = share_layers(split, plans.stage_map, rank, settings)
        stages = make_stages(split, plans.stage_map.stages_of(place), sharding, settings)
    meeting.compare({})
    shared = list_shared(split.ties, plans.stage_map)
    links = connect_rank(plans.stage_map, rank, shared, sharding, settings)
    weight = MicroBatchWeight(loss_type=split.record.loss.dtype)
    masters, owners = make_masters(split, stages, shared, links, samples, settings, weight)
    placed = {} if sharding is None else sharding.placed
    hooks = ParameterHooks(masters, model, list_parts(masters.slices, placed))
    gradients = Gradients(
        masters, shared, links, settings.device, owners, sharding, weight, hooks,
        has_fixed_sums=must_record(settings),
    )  # fmt: skip
    split = split.without_values()
    return_freed_memory()
    return RankParts(
        place=place,
        replica=replica,
        samples=samples[replica],
        names=names,
        splitter=splitter,
        split=split,
        plans=plans,
        sharding=sharding,
        stages=stages,
        links=links,
        masters=masters,
        gradients=gradients,
        exchange=None if owners is None else WeightExchange(owners, stages.parameters()),
        engine=build_engine(plans, stages, links, gradients, split.record.loss, settings),
        updates=Updates(needs_scale=settings.precision.name == "fp16"),
    )


def cut_model(
    model: nn.Module, dummies: Mapping[str, Any], ranks: StageMap, settings: VarunaSettings
) -> Split:
    """Split the model into the stages of all ranks, in the requested precision."""
    settings.precision.check_names(model, dummies)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        settings.precision.warn_of_lost_numbers(dummies)
    split = split_model(
        model,
        settings.precision.cast(dummies),
        ranks.depth * settings.stages_per_rank,
        settings.partition,
        shared_weights=settings.shared_weights,
        device=settings.device,
        types=settings.precision.choose_types(model),
        kept=settings.precision.select_kept(model),
    )
    if is_first and split.record.loss.is_sum:
        log.warning(
            "the model's loss ends in a sum, but Varuna treats losses as means over the samples: "
            "return a mean, or TokenMean(sum, count) of the summed values"
        )
    return split


def refuse_offload(split: Split, settings: VarunaSettings) -> None:
    """Raise an error if torch's hooks cannot see all the saved tensors that are to be offloaded."""
    if settings.recompute == "offload" and split.record.unhooked:
        raise SplitError(
            "the model uses torch.func.grad, vjp, jacrev or hessian, in which torch allows no "
            "saved-tensor hooks, but recompute='offload' needs such hooks: choose "
            "recompute='full' or 'none', or use torch.autograd.grad(..., create_graph=True)"
        )


def plan_schedule(
    split: Split, ranks: StageMap, samples: Sequence[range], settings: VarunaSettings
) -> Plans:
    """Choose the schedule and assign its stages to ranks; `samples` holds each replica's share."""
    costs = choose_costs(split, settings.costs)
    usual = max(1, -(-len(samples[0]) // settings.chunk_size))
    stage_map, name = settle_stages(
        ranks, settings.schedule, settings.stages_per_rank, usual, costs
    )
    return Plans(
        name,
        stage_map,
        costs,
        settings.recompute,
        # Ranks that share layers or weights must do the same in one order.
        opportunistic=settings.opportunistic and settings.zero != 3 and settings.tensor == 1,
        is_limit_given=settings.memory_limit is not None,
        usual=usual,
    )


def choose_costs(split: Split, given: Costs | None) -> Costs:
    """Return the given costs, or estimates from the dry run, in which a backward costs two forwards
    and messages are free."""
    if given is not None:
        if given.num_stages != len(split.stages):
            raise ValueError(f"costs has {given.num_stages} stages, expected {len(split.stages)}")
        return given
    unit = max(sum(split.costs), 1e-30)
    each = tuple(sum(split.costs[s] for s in held) / unit for held in split.stages)
    return Costs(forward=each, input_grad=each, weight_grad=each)


def share_layers(
    split: Split, stage_map: StageMap, rank: int, settings: VarunaSettings
) -> Sharding | None:
    """Create the sharding group for this rank's layers; None if no other rank shards them."""
    if stage_map.tensor == 1:
        return None
    from varuna_core.runtime.tensor_parallel.sharding import (
        Sharding,  # torch's part of it takes half a second to load
    )

    group = connect_sharing(
        stage_map, rank, settings.device, settings.hang_timeout_s, settings.may_share
    )
    return Sharding(split, settings.tensor_plan, group, settings.device)


def make_stages(
    split: Split, indices: Sequence[int], sharding: Sharding | None, settings: VarunaSettings
) -> RankStages:
    """Build this rank's stages; weights of a meta-device model are initialized from the seed."""
    on_meta = any(parameter.is_meta for parameter in split.model.parameters())
    return RankStages.make(
        split,
        indices,
        state_dict=settings.state_dict,
        seed=settings.seed if on_meta else None,
        sharding=sharding,
    )


def connect_rank(
    stage_map: StageMap,
    rank: int,
    shared: SharedWeights,
    sharding: Sharding | None,
    settings: VarunaSettings,
) -> Links:
    """Connect this rank to the ranks that it exchanges tensors with."""
    return connect(
        stage_map,
        rank,
        tuple(shared),
        settings.device,
        settings.hang_timeout_s,
        has_mesh=settings.zero == 3,
        tensor=None if sharding is None else sharding.group,
        let_go=(lambda: None) if sharding is None else sharding.release,
        may_share=settings.may_share,
    )


def make_masters(
    split: Split,
    stages: RankStages,
    shared: SharedWeights,
    links: Links,
    samples: Sequence[range],
    settings: VarunaSettings,
    weight: MicroBatchWeight,
) -> tuple[Masters, Owners | None]:
    """Make the weights equal on all ranks, and return the master copies for the optimizer."""
    full = stages.take_full()
    share_values({**stages.parameters(), **full}, stages.buffers().values(), shared, links)
    slices = {}
    if settings.zero == 3 and links.replicas is not None:
        refuse_uneven(samples, settings.chunk_size)
        slices = shard_modules(split, stages, full, links, settings.precision.half, weight)
    owners = make_owners(settings.zero, links, stages.parameters(), shared, split.model)
    masters = Masters(
        stages.parameters(),
        full,
        owned=None if owners is None else owners.list_own(),
        offload=settings.offload is not None,
        slices=slices,
    )
    return masters, owners


def build_engine(
    plans: Plans,
    stages: RankStages,
    links: Links,
    gradients: Gradients,
    loss: LossForm,
    settings: VarunaSettings,
) -> Engine:
    """Build the engine, which notifies `gradients` of each gradient that it computes."""
    weight_grads = WeightGrads(gradients.note, gradients.find_wide)
    is_split = settings.precision.half is not None and not loss.num_terms
    times = find_times(plans.stage_map, settings)
    # On a GPU a schedule that is chosen later must fit.
    measures = settings.recompute == "auto" or (times and settings.device.type == "cuda")
    passes = Passes(
        stages.stages,
        weight_grads,
        meter=GraphMeter(settings.chunk_size) if measures else None,
        graphs=build_graphs(stages, gradients, loss, settings),
        is_selective=settings.recompute == "selective",
    )
    is_awaited = links.replicas is not None and not gradients.at_once
    turns = GradientTurns(
        stages.stages,
        weight_grads,
        before=gradients.before if is_awaited else None,
        after=gradients.backward_done,
    )
    seed = LossSeed(loss, settings.device, split=gradients.weight.split if is_split else None)
    engine = Engine(
        stages.stages,
        links,
        passes,
        seed,
        turns,
        seed=settings.seed,
        seeds_foreign=settings.recompute != "none"
        or any(stage.record.draws_foreign for stage in stages.stages),
        trace=settings.trace,
        times=times,
    )
    # `auto` may get to it in any step.
    puts_off = may_split_backward(plans.name)
    compiled = compile_modules(stages, puts_off, settings)
    for stage in () if gradients.masters.slices else stages.stages:
        weight_grads.install(stage.module, puts_off, compiled)
    return engine


def find_times(stage_map: StageMap, settings: VarunaSettings) -> ActionTimes | None:
    """Return timers for a schedule that adapts to measured times; None if the user named a schedule
    or asked for bitwise repeatable runs."""
    stays = settings.schedule != AUTO or not settings.opportunistic or stage_map.depth == 1
    if stays or torch.are_deterministic_algorithms_enabled():
        return None
    is_on_gpu = settings.device.type == "cuda"
    return ActionTimes(stage_map, find_clock() if is_on_gpu else None)


def build_graphs(
    stages: RankStages, gradients: Gradients, loss: LossForm, settings: VarunaSettings
) -> CudaGraphs | None:
    """Return the recorder of CUDA graphs; None if none is used, so that gradients may be moved."""
    if gradients.fixed is None:
        return None
    return CudaGraphs(
        stages.stages,
        loss,
        partial(CudaRecorder, settings.device),
        gradients.fixed.add,
        lambda: gradients.weight.factor,
        gradients.note_recorded,
    )


def must_record(settings: VarunaSettings) -> bool:
    """Return True if CUDA graphs are requested and supported; warn if they are unsupported."""
    if not settings.cuda_graphs:
        return False
    reason = why_none_recorded(settings.tensor, settings.zero, settings.device)
    if reason:
        log.warning("cuda_graphs: CUDA graphs are not supported with %s", reason)
    return not reason


def compile_modules(
    stages: RankStages, puts_off: bool, settings: VarunaSettings
) -> frozenset[nn.Module]:
    """Apply torch.compile to the stages' modules if requested, and return the compiled modules with
    their submodules."""
    if not settings.compile:
        return frozenset()
    reason = why_none(settings.tensor, settings.zero)
    if reason:
        log.warning("compile: torch.compile is not supported with %s", reason)
        return frozenset()
    return compile_stages(stages.stages, settings.compile, puts_off)


def return_freed_memory() -> None:
    """Return freed memory to the operating system; glibc would otherwise keep it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
