"""All-reduce gradients over replicas and over copies of a shared weight; compute their global norm.

    last backward of the step   head  block 3  block 2 | block 1  block 0  embedding
    bucket 0 (head, 3, 2)                              └─ all-reduce over replicas ─┐
    bucket 1 (1, 0, embedding)                                                  └─ all-reduce ─┐

A bucket's all-reduce starts when each of its parameters has its last gradient of the step, and
overlaps with other work. Buckets start in a fixed order, so that replicas whose data uses different
parameters start the same ones. The host never waits to read a value.

With ZeRO, a bucket holds the parameters of one owner, which alone receives and keeps the sum.

A parameter that no replica used keeps `grad = None`, as in the plain model: each bucket contains a
flag for each parameter, which is read only by ranks that have no gradient for the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from varuna_core.records.rank_map import StageMap
from varuna_core.runtime.comm.devices import GLOO
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.weight_grads import PutOffProduct, WideSum
from varuna_core.runtime.optim.fixed_sums import FixedSums
from varuna_core.runtime.optim.hooks import ParameterHooks
from varuna_core.runtime.optim.precision import Masters, MicroBatchWeight
from varuna_core.runtime.optim.zero import Owners, pack
from varuna_core.runtime.split.split import TiedWeight

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding

BUCKET_BYTES = 25 * 2**20
HAS_WIDE_PRODUCT = TorchVersion(torch.__version__) >= "2.11"
"""True if torch can add a half-precision product to an fp32 sum; tested with torch 2.11."""


class Bucket:
    """Parameters of one dtype whose gradients are reduced in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter], owner: int | None = None) -> None:
        """`owner` is the rank that keeps the sum; None means all ranks."""
        self.parameters, self.owner = parameters, owner
        self.waiting: set[int] = set()
        """Ids of parameters that may get further gradients in this step."""

        self._had: list[bool] = []
        self._flat: Tensor | None = None
        self._work: Any = None

    @torch.no_grad()
    def start(self, group: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        self._had = [grad is not None for grad in grads]
        parts = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(self.parameters, grads, strict=True)
        ]
        flags = torch.tensor([float(had) for had in self._had]).to(parts[0])
        self._flat = torch.cat([part.reshape(-1) for part in parts] + [flags])
        for parameter in self.parameters:
            parameter.grad = None  # its memory; a gradient that comes yet is seen
        if self.owner is None or (self._flat.is_cuda and dist.get_backend(group) == GLOO):
            # gloo reduces CUDA tensors to all or not at all.
            self._work = dist.all_reduce(self._flat, group=group, async_op=True)
        else:
            self._work = dist.reduce(self._flat, self.owner, group=group, async_op=True)

    def finish(self, settle: Callable[[], None]) -> None:
        """Wait for the sum of the gradients, and store it as the parameters' gradients. `settle` is
        called before the host reads from the sum."""
        assert self._flat is not None and self._work is not None
        self._work.wait()
        if not all(self._had):
            settle()
        if self.owner not in (None, dist.get_rank()):
            self.forget()
            return
        sizes = [p.numel() for p in self.parameters]
        *pieces, flags = torch.split(self._flat, [*sizes, len(sizes)])
        for place, (parameter, piece) in enumerate(zip(self.parameters, pieces, strict=True)):
            if self._had[place] or flags[place].item():
                summed = piece.view(parameter.shape)
                if not parameter.is_contiguous():  # fused optimizers want the strides alike
                    summed = torch.empty_like(parameter).copy_(summed)
                parameter.grad = summed
        self.forget()

    def forget(self) -> None:
        """Drop pending work."""
        self.waiting.clear()
        self._flat = self._work = None


def make_buckets(parameters: Sequence[nn.Parameter], owners: Mapping[int, int]) -> Iterator[Bucket]:
    """Yield buckets of parameters of one dtype and owner, with about BUCKET_BYTES over all owners,
    in the order in which they fill."""
    limit = BUCKET_BYTES / max(1, len(set(owners.values())))
    for owner, held in pack(parameters, owners, limit):
        yield Bucket(held, owner)


def sum_up(parameters: Sequence[nn.Parameter], group: Any, settle: Callable[[], None]) -> None:
    buckets = list(make_buckets(parameters, {}))
    for bucket in buckets:
        bucket.start(group)
    for bucket in buckets:
        bucket.finish(settle)


def list_shared(
    ties: Sequence[TiedWeight], stage_map: StageMap
) -> dict[tuple[int, ...], list[str]]:
    """Return the weights held by several places, keyed by the places, each with its first name."""
    shared: dict[tuple[int, ...], list[str]] = {}
    for tie in ties:
        places = stage_map.places_of(tie.stages)
        if len(places) > 1:
            shared.setdefault(places, []).append(tie.names[0])
    return shared


class Gradients:
    """The gradients of one rank's parameters."""

    def __init__(
        self,
        masters: Masters,
        shared: Mapping[tuple[int, ...], Sequence[str]],
        links: Links,
        device: torch.device,
        owners: Owners | None = None,
        sharding: Sharding | None = None,
        weight: MicroBatchWeight | None = None,
        hooks: ParameterHooks | None = None,
        has_fixed_sums: bool = False,
    ) -> None:
        """Prepare the sums of gradients over the replicas.

        `sharding` is given if the parameters are shards of layers (tensor parallelism). With
        `has_fixed_sums`, gradients are summed at the same addresses in all steps
        (fixed_sums.py)."""
        self.masters, self.links, self.device, self.owners = masters, links, device, owners
        self.overlap = True
        self.weight = weight or MicroBatchWeight()
        self.hooks = hooks or ParameterHooks(masters)
        self.at_once = owners is not None and owners.at_once
        """True to reduce after each backward, so that ranks keep only gradients that they own."""

        places = masters.list_places()
        self.parameters = [place for p, place in places if p.requires_grad]
        """Tensors whose `grad` accumulates gradients; this rank keeps the sums only for
        `masters.pairs`."""

        self.fixed = FixedSums(masters) if has_fixed_sums else None

        self.frozen = [place for p, place in places if not p.requires_grad]
        kept = {id(place) for place, _ in masters.pairs}
        self.shared = {
            stages: [masters.places[n] for n in names if id(masters.places[n]) in kept]
            for stages, names in shared.items()
            if links.place in stages
        }
        elsewhere = {
            id(copy)
            for stages, copies in self.shared.items()
            for copy in copies
            if links.place != stages[0]
        }
        self.counted = [p for p, _ in masters.pairs if id(p) not in elsewhere]
        """Parameters that this rank counts in the norm; a shared weight is counted by one stage."""

        self.whole: list[nn.Parameter] = []
        """Parameters that each rank of a tensor group holds whole, with a partial gradient."""

        self._compare: Callable[[Mapping[str, Tensor]], bool] | None = None
        self._names = {id(p): name for name, p in reversed(masters.places.items())}
        self._carried: list[tuple[nn.Parameter, Tensor]] = []
        self._summed: dict[int, Tensor] = {}
        """With `at_once`, this step's reduced gradients so far, keyed by the parameter's id."""

        self._backwards_left = 0
        self._seen: set[int] = set()
        """Ids of parameters that have received a gradient from autograd."""

        self._repeating: set[int] = set()
        """Ids of parameters that have received several gradients in one action."""

        # The backward comes to the last ones first.
        backwards = self.parameters[::-1] if links.replicas is not None else []
        self._buckets = list(make_buckets(backwards, self._list_owners(masters.places)))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        if sharding is not None:
            self._share_layers(sharding)
        self._reset()
        self._watch()

    def _list_owners(self, places: Mapping[str, nn.Parameter]) -> dict[int, int]:
        """Return the owning rank of each parameter, keyed by the id of its gradient's place."""
        if self.owners is None:
            return {}
        return {id(place): self.owners.rank_of(name) for name, place in places.items()}

    def _share_layers(self, sharding: Sharding) -> None:
        named = self.masters.places.items()
        counted = {id(place) for name, place in named if sharding.is_counted(name)}
        self.counted = [p for p in self.counted if id(p) in counted]
        whole = {id(place) for name, place in named if name in sharding.list_whole()}
        self.whole = [p for p in self.parameters if id(p) in whole]
        self._compare = sharding.compare

    def _watch(self) -> None:
        """Install hooks for gradients that must be processed as they arrive."""
        for parameter, place in self.masters.list_places():
            is_watched = parameter is not place or self._buckets or self.fixed is not None
            if parameter.requires_grad and is_watched:
                parameter.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._started = 0
        self._left: dict[int, int] = {}
        """Gradients still to come in a parameter's last action, keyed by the parameter's id."""

        self._fired: set[int] = set()
        self._learning = False

    # In a step.

    def begin(self, factor: float = 1.0, num_backwards: int = 0) -> None:
        """Set aside gradients of earlier steps, which are already reduced.

        This rank must then call `backward_done` `num_backwards` times.
        """
        thawed = next((p for p in self.frozen if p.requires_grad), None)
        if thawed is not None:
            raise RuntimeError(
                f"parameter {self._names[id(thawed)]!r} was frozen when Varuna was created, and "
                "the split relies on this: create Varuna while it is trainable, then freeze it"
            )
        self.weight.factor = factor
        self.hooks.rest(self.note)
        self._carried = [
            (p, master.grad) for p, master in self.masters.pairs if master.grad is not None
        ]
        for _, master in self.masters.pairs:
            master.grad = None
        if self.fixed is not None:
            self._carried = self.fixed.begin(self._carried)
        if self.at_once:
            assert self.owners is not None
            self._backwards_left = self.owners.compute_most(num_backwards)
        for bucket in self._buckets:
            bucket.waiting = set(map(id, bucket.parameters))

    def before(
        self, finishing: Sequence[nn.Parameter], products: Sequence[PutOffProduct] | None
    ) -> None:
        """Prepare for an action that computes gradients and is the step's last one for `finishing`.

        `products` holds the postponed products of a W, an action for weight gradients, else None.
        If None, every parameter that got a gradient before is expected to get one from autograd,
        except if it got several in one action (a module called repeatedly in a reentrant
        checkpoint).
        """
        self._fired.clear()
        self._learning = products is None
        if not self.overlap:
            return
        made = Counter(
            id(self.masters.place_of(p)) for work in products or () for p in work.parameters
        )
        for parameter in finishing:
            key = id(self.masters.place_of(parameter))
            if products is not None:
                self._expect(key, made[key])
            elif key in self._seen and key not in self._repeating:
                self._expect(key, 1)
        self._start_ready()

    def _expect(self, key: int, times: int) -> None:
        self._left[key] = times
        if not times and key in self._bucket_of:
            self._bucket_of[key].waiting.discard(key)

    def note(self, parameter: nn.Parameter) -> None:
        """Record that a parameter got a gradient from autograd or from a postponed product."""
        self._got_one(self.masters.take_gradient(parameter, self.weight.factor))

    def find_wide(self, parameter: nn.Parameter) -> WideSum | None:
        """Return the fp32 gradient to which a half-precision matrix product may directly add its
        result, and the factor for that result; None if this is not allowed."""
        place = self.masters.place_of(parameter)
        if place is parameter or place.grad is None or not can_add_wide(place.grad):
            return None
        return place.grad, self.weight.factor

    def note_recorded(self, parameter: nn.Parameter) -> None:
        """Record that a recorded backward has added to a parameter's gradient buffer."""
        self._got_one(self.masters.place_of(parameter))

    def _got_one(self, place: nn.Parameter) -> None:
        key = id(place)
        if self.fixed is not None:
            self.fixed.use(place)
        if self._learning:
            (self._repeating if key in self._fired else self._seen).add(key)
            self._fired.add(key)
        if key not in self._left:
            return
        if not self._left[key]:
            raise RuntimeError(
                f"parameter {self._names[key]!r} got another gradient after its last one was "
                "expected, for the first time in this training: set model.gradients.overlap = False"
            )
        self._expect(key, self._left[key] - 1)
        self._start_ready()

    def _start_ready(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        if self.fixed is not None:
            self.fixed.drop_unused(bucket.parameters)
        bucket.start(self.links.replicas)
        self._started += 1

    def backward_done(self) -> None:
        """Record that one micro-batch has contributed its gradients to a stage."""
        if not self.at_once:
            return
        self._backwards_left -= 1
        self._sum_replicas()
        for place, _ in self.masters.pairs:
            if place.grad is not None:
                held = self._summed.setdefault(id(place), place.grad)
                if held is not place.grad:
                    held.add_(place.grad)
                place.grad = None

    def _sum_replicas(self) -> None:
        while self._started < len(self._buckets):
            self._start_next()
        for bucket in self._buckets:
            bucket.finish(self._settle)
        self._reset()

    def reduce(self, compute_factor: Callable[[], float] | None = None) -> None:
        """All-reduce gradients over replicas, sharding ranks, and stages that share a weight.

        `compute_factor` returns the factor for this step's sums; it is called on all ranks at the
        same point, after the all-reduces.
        """
        while self._backwards_left > 0:  # other replicas have more micro-batches
            self.backward_done()
        if not self.at_once:
            self._sum_replicas()
        if self.fixed is not None and not self._buckets:
            self.fixed.drop_unused(self.parameters)
        for rows in self.masters.slices.values():
            rows.collect_gradient()
        for place, master in self.masters.pairs:
            place.grad = self._summed.pop(id(place), place.grad)
            if not master.requires_grad:  # its owner has frozen it for now
                place.grad = None
        sum_up(self.whole, self.links.tensor, self._settle)
        if self._compare is not None:
            grads = {self._names[id(p)]: p.grad for p in self.parameters if p.grad is not None}
            if self._compare(grads):
                self._compare = None
        for stages, copies in self.shared.items():
            sum_up(copies, self.links.sharing[stages], self._settle)
        if compute_factor is not None:
            self.scale(torch.tensor(compute_factor(), dtype=torch.float64, device=self.device))
        self.hooks.wake()
        self.hooks.run_before()
        fresh = self.hooks.list_fresh()
        for place, held in self._carried:
            grad = held.to(place.device)
            if place.grad is not None:
                grad.add_(place.grad)
            place.grad = grad
        self._carried = []
        self.hooks.run_after(fresh)

    def _settle(self) -> None:
        self.links.settle(self.device)

    def forget(self) -> None:
        """Drop pending work after a failure, since it would keep its group open."""
        for bucket in self._buckets:
            bucket.forget()
        self.hooks.wake()
        self._summed.clear()

    def square_norm(self) -> Tensor:
        """Return the squared norm of this stage's gradients, in double precision."""
        grads = [p.grad for p in self.counted if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if grads:
            norms = torch._foreach_norm(grads)
            for of_type in _by_type(norms):
                total += torch.stack(of_type).double().square().sum()
        if self.owners is not None:
            dist.all_reduce(total, group=self.links.replicas)
        return total

    def hold_any(self) -> bool:
        """Return True if a nonzero gradient has not yet been used for an update."""
        grads = [master.grad for _, master in self.masters.pairs]
        return any(grad is not None and bool(grad.any()) for grad in grads)

    def drop(self) -> None:
        for place, _ in self.masters.pairs:
            place.grad = None

    def zero(self, set_to_none: bool) -> None:
        """Clear the gradients, as an optimizer's `zero_grad` does."""
        for _, master in self.masters.pairs:
            if set_to_none:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()

    def scale(self, factor: Tensor) -> None:
        for grads in _by_type([p.grad for p, _ in self.masters.pairs if p.grad is not None]):
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def can_add_wide(total: Tensor) -> bool:
    """Return True if torch can add a product to another dtype's sum: CUDA, and not torch 2.9."""
    return total.is_cuda and HAS_WIDE_PRODUCT and not torch.cuda.is_current_stream_capturing()


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
