"""Random numbers in sharded layers: each rank gets the plain model's random numbers for its shard.

    dry run of the plain model     segment 3, draw 0: bernoulli_ of [2, 8, 16, 16]
    rank 1 of 2, same draw         bernoulli_ of [2, 4, 16, 16]: heads 4 to 7 of the whole

All ranks of a sharded layer use the same seed. A tensor that is whole on each rank gets the same
random numbers on all. For a tensor smaller than in the dry run, a shard, random numbers are drawn
for the whole tensor and sliced, so that masks differ between ranks and equal those of tensor=1. If
the shard is not a slice (flattened dimensions, fused kernels), the rank uses its own derived seed.

Random operations within torch.utils.checkpoint raise an error, since its backward repeats forwards
without information about their segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.record import Draw, Record, find_drawn, is_draw
from varuna_core.runtime.split.stage import NUM_KEPT_SHAPES, Stage

STRIDE, MASK = 0x9E3779B97F4A7C15, 2**63 - 1

WORDS = {
    "alpha_dropout", "bernoulli", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "exponential", "feature_alpha_dropout", "feature_dropout", "geometric", "gru",
    "gumbel_softmax", "log_normal", "lstm", "multi_head_attention_forward", "multinomial",
    "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random", "randperm", "rnn_relu", "rnn_tanh", "rrelu",
    "scaled_dot_product_attention", "uniform",
}  # fmt: skip
"""Names of torch functions that may use random numbers; names that end in _ may do so too."""


class ShardedDraws:
    """Provides random numbers on a rank with sharded layers."""

    def __init__(self, record: Record, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        records = [record, *([record.in_training] if record.in_training else [])]
        self.is_needed = any(found.draws for found in records)
        self.rests = False
        """True during a dry run of the model."""

        self._specs: dict[Any, Mapping[int, Sequence[Draw]]] = {}
        self._expected: Iterator[Draw] | None = None
        self._segment = -1
        drawn = [draw for found in records for held in found.draws.values() for draw in held]
        again = next((draw for draw in drawn if draw.is_checkpointed), None)
        if again is not None:
            raise SplitError(
                "with tensor > 1, random numbers cannot be used within torch.utils.checkpoint "
                f"({again.name} for {list(again.shape)}): remove the checkpoint and set "
                "recompute='full', or remove the dropout"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of a step, in which random operations are intercepted."""
        if not self.is_needed:
            yield
            return
        with _FunctionMode(self):
            yield

    def follow(
        self, stage: Stage, inputs: Mapping[str, Any], on_segment: Callable[[int], None]
    ) -> Callable[[int], None]:
        """Wrap `on_segment` of one forward to also set the random draws expected in the segment."""
        draws = self.foresee(stage, inputs)

        def begin(segment: int) -> None:
            on_segment(segment)
            self._segment, self._expected = segment, iter(draws.get(segment, ()))

        return begin

    def leave(self) -> None:
        self._expected = None

    def foresee(self, stage: Stage, inputs: Mapping[str, Any]) -> Mapping[int, Sequence[Draw]]:
        """Return the random draws that a stage will make for a batch of this shape, by segment."""
        key = stage.key_of(inputs)
        if key not in self._specs:
            if len(self._specs) >= NUM_KEPT_SHAPES:
                self._specs.clear()
            self.rests = True
            try:
                record = stage.rehearsal.run(inputs, training=stage.module.training)
            finally:
                self.rests = False
            self._specs[key] = record.draws
        return self._specs[key]

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        expected = self._expect(func)
        if expected is None:  # code before the stage
            return func(*args, **kwargs)
        target = find_drawn(func, args, None)
        if target is None:
            return self._make(func, args, kwargs, expected)
        local = target._local_tensor if isinstance(target, DTensor) else target
        if tuple(local.shape) == expected.shape:
            return func(*args, **kwargs)
        share = self._find_share(tuple(local.shape), expected.shape)
        others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
        if share is None or others or (target is not local and not _fills(func)):
            return self._run_apart(func, args, kwargs)
        whole = torch.empty_strided(
            expected.shape, expected.stride, dtype=local.dtype, device=local.device
        )
        if _fills(func):
            local.copy_(func(whole, *args[1:], **kwargs).narrow(*share))
            return target
        _, mask = func(whole.fill_(1), *args[1:], **kwargs)
        mask = mask.narrow(*share).contiguous()
        kept = 1 - float(args[1])
        return local * mask * (1 / kept if kept else 0.0), mask

    def _expect(self, func: Any) -> Draw | None:
        if self._expected is None:
            return None
        found = next(self._expected, None)
        if found is None or found.name != str(func):
            other = "no more" if found is None else found.name
            raise RuntimeError(
                f"in segment {self._segment} the model draws random numbers by {func}, where the "
                f"dry run has {other}: with tensor > 1 the draws may not depend on the data, since "
                "each rank must know its share of them"
            )
        return found

    def _make(self, func: Any, args: Any, kwargs: Any, expected: Draw) -> Any:
        """Run an operation that creates a tensor, whose shape is known only afterwards."""
        kept = [generator.get_state() for generator in _list_generators()]
        made = func(*args, **kwargs)
        out = find_drawn(func, args, made)
        if out is None or tuple(out.shape) == expected.shape:
            return made
        for generator, state in zip(_list_generators(), kept, strict=True):
            generator.set_state(state)
        return self._run_apart(func, args, kwargs)

    def _run_apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Use this rank's own generator; the common one stays equal on all ranks."""
        common = int(torch.randint(MASK, (1,)))
        generators = _list_generators()
        kept = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed((common + (self.rank + 1) * STRIDE) & MASK)
        try:
            return func(*args, **kwargs)
        finally:
            for generator, state in zip(generators, kept, strict=True):
                generator.set_state(state)

    def _find_share(
        self, local: tuple[int, ...], whole: tuple[int, ...]
    ) -> tuple[int, int, int] | None:
        """Return dimension, start and length of this rank's slice; None if not a slice."""
        if len(local) != len(whole):
            return None
        apart = [d for d, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
        if len(apart) != 1:
            return None
        (dim,) = apart
        step = -(-whole[dim] // self.size)
        begin = min(self.rank * step, whole[dim])
        length = min(step, whole[dim] - begin)
        return (dim, begin, length) if local[dim] == length else None


def _fills(func: Any) -> bool:
    first = func._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


def _list_generators() -> list[torch.Generator]:
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: untyped
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


class _FunctionMode(TorchFunctionMode):
    """Watches only operations of functions that may use random numbers, for low overhead."""

    def __init__(self, draws: ShardedDraws) -> None:
        super().__init__()
        self.draws, self.operations = draws, _OperationMode(draws)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.draws.rests or getattr(func, "__name__", "").rstrip("_") not in WORDS:
            return func(*args, **(kwargs or {}))
        with self.operations:
            return func(*args, **(kwargs or {}))


class _OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, draws: ShardedDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_draw(func, args, kwargs):
            return self.draws.draw(func, args, kwargs)
        return func(*args, **kwargs)
