"""Implement context parallelism for the built-in GPT: neighbouring replicas share each sample, and
each of them trains on a part of the sequence.

    a sample of 8 tokens and the next one, by two ranks
    part 0    t0 t1 t2 t3                  predicts t1 t2 t3 t4
    part 1                 t4 t5 t6 t7     predicts t5 t6 t7 t8

Everything except attention works on single positions, so a rank holds only activations of its own
positions. In attention, a rank's queries need the keys and values of all earlier positions, so each
rank gathers the keys and values of all parts; in the backward pass, their gradients are summed over
the ranks. The mask is a full one, so all parts have equal work.

The engine treats these ranks as replicas. Parts are equally long, so the mean of their losses is
that of the sample, and the gradients that the engine averages over its replicas are those of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from varuna_core.programs.place import Place, ProgramError
from varuna_core.records.rank_map import StageMap, parse_stage_map
from varuna_core.records.training import Training
from varuna_core.runtime.comm.links import Links

SEQUENCE = 2
"""Dimension of positions in queries, keys and values."""


class Context:
    """The parts into which sequences are cut, and the index of this rank's part."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index
        self.group: Any = None
        """Process group of the ranks that hold the parts, in the order of their numbers."""

    def __deepcopy__(self, _: Any) -> Context:
        return self  # copies of a model use the same group

    def join(self, links: Links) -> None:
        """Create the process groups of ranks that share samples; every rank must call this."""
        for sharing in list_sharing(links.stage_map, self.size):
            group = dist.new_group(sharing, backend=dist.get_backend(links.replicas))
            if dist.get_rank() in sharing:
                links.keep_group(group)
                self.group = group

    def share_samples(self, own: range) -> range:
        """Return the samples that these ranks share, given `own`: the samples that the engine
        assigns to this rank as a replica."""
        replica = own.start // len(own)
        first = replica // self.size * len(own)
        return range(first, first + len(own))

    def cut(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of each sequence, with the token that follows the part."""
        length = (tokens.shape[1] - 1) // self.size
        return tokens[:, self.index * length : (self.index + 1) * length + 1].contiguous()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        *,
        is_grouped: bool = False,
    ) -> Tensor:
        """Return causal attention of this part's queries to all parts' keys and values."""
        key, value = gather(torch.stack([key, value]), self).unbind()
        places = torch.arange(key.shape[SEQUENCE], device=key.device)
        length = query.shape[SEQUENCE]
        own = places[self.index * length : (self.index + 1) * length]
        seen = places <= own[:, None]
        return F.scaled_dot_product_attention(
            query, key, value, seen, dropout, enable_gqa=is_grouped
        )


class _Gather(torch.autograd.Function):
    """Gather the keys and values of all parts from those of each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context) -> Tensor:
        ctx.context = context
        parts = [part] * context.size
        if type(part) is Tensor:  # a tensor of the dry run is of another type, and has no values
            part = part.contiguous()
            parts = [torch.empty_like(part) for _ in parts]
            dist.all_gather(parts, part, group=context.group)
        return torch.cat(parts, 1 + SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: Context = ctx.context
        parts = [part.contiguous() for part in gradient.chunk(context.size, 1 + SEQUENCE)]
        own = torch.empty_like(parts[context.index])
        dist.reduce_scatter(own, parts, group=context.group)
        return own, None


def gather(part: Tensor, context: Context) -> Tensor:
    whole: Tensor = _Gather.apply(part, context)  # type: ignore[no-untyped-call]  # torch: untyped
    return whole


def list_sharing(stages: StageMap, size: int) -> Iterator[list[int]]:
    """Yield the ranks of each process group to create: neighbouring replicas at one place."""
    for ranks in stages.ranks:
        for first in range(0, len(ranks), size):
            yield sorted(ranks[first : first + size])


def choose_context(training: Training, place: Place) -> Context | None:
    """Return this rank's part of the sequences; None without context parallelism."""
    size = training.context
    if size == 1:
        return None
    stages = parse_stage_map(place.stage_map, place.world, place.tensor)
    if stages.num_replicas % size:
        raise ProgramError(
            f"{stages.num_replicas} replicas are not divisible by parallel.context {size}"
        )
    if training.program != "pretrain_gpt":
        raise ProgramError("parallel.context is for pretrain_gpt: BERT's parts need whole samples")
    if training.sequence % size:
        raise ProgramError(
            f"sequences of {training.sequence} are not divisible by parallel.context {size}"
        )
    for is_on, name in (
        (training.tensor > 1, "parallel.tensor above 1"),
        (training.compile, "train.compile"),
        (training.cuda_graphs, "train.cuda_graphs"),
    ):
        if is_on:
            raise ProgramError(f"parallel.context cannot be combined with {name}: remove one")
    (sharing,) = (ranks for ranks in list_sharing(stages, size) if place.rank in ranks)
    return Context(size, sharing.index(place.rank))
