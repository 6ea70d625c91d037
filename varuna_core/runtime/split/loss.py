"""Find the loss in a model's output, and determine how it is averaged.

A loss that is a single number is the mean over the samples. A mean over other units (such as tokens
without padding) is a `TokenMean`: the sum and count of one micro-batch, from which the mean over
the whole batch is computed, regardless of how the batch is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.values import describe
from varuna_core.runtime.split.cut import SplitError

Path = tuple[str | int, ...]
"""Keys, attributes and indices that lead to part of a model's output."""

COUNTS = "loss_counts"
"""Name of the method by which a model computes its loss's counts from the inputs."""


class TokenMean:
    """A mean over tokens or other units, given as the sum and the count in this micro-batch.

        return TokenMean(losses[mask].sum(), mask.sum())

    In a sum such as `TokenMean(a, n) + 0.1 * TokenMean(b, m)`, each term is averaged separately.
    """

    def __init__(self, sum: Tensor, count: Tensor | float) -> None:
        self.terms: tuple[tuple[Tensor, Tensor | float], ...] = ((sum, count),)

    @staticmethod
    def of(terms: Sequence[tuple[Tensor, Tensor | float]]) -> TokenMean:
        made = TokenMean.__new__(TokenMean)
        made.terms = tuple(terms)
        return made

    def mean(self) -> Tensor:
        """Return the loss of this micro-batch only, as in plain training."""
        first, *others = (total / count for total, count in self.terms)
        for other in others:
            first = first + other
        return first

    def __add__(self, other: TokenMean) -> TokenMean:
        return TokenMean.of((*self.terms, *other.terms))

    def __mul__(self, factor: float | Tensor) -> TokenMean:
        return TokenMean.of([(total * factor, count) for total, count in self.terms])

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return " + ".join(f"TokenMean({total}, {count})" for total, count in self.terms)

    @property
    def requires_grad(self) -> bool:
        return any(total.requires_grad for total, _ in self.terms)

    def detach(self) -> TokenMean:
        """Return the same sums and counts, detached from their graphs."""
        return TokenMean.of([(total.detach(), count) for total, count in self.terms])

    def totals(self) -> Tensor:
        """Return one row per term, with sum and count in double precision."""
        rows = [
            torch.stack([_one_number(total), _one_number(count).to(total.device)])
            for total, count in self.terms
        ]
        return torch.stack(rows)


def add_means(means: Sequence[TokenMean]) -> TokenMean:
    """Add the sums and counts of several micro-batches."""
    rows = torch.stack([mean.totals() for mean in means]).sum(0)
    return TokenMean.of([(total, count) for total, count in rows.unbind()])


def _one_number(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double()
    return torch.tensor(value, dtype=torch.float64)


def _take_apart(mean: TokenMean) -> tuple[list[Any], None]:
    return [part for term in mean.terms for part in term], None


def _join(parts: Any, _: None) -> TokenMean:
    held = list(parts)
    return TokenMean.of(list(zip(held[::2], held[1::2], strict=True)))


pytree.register_pytree_node(
    TokenMean, _take_apart, _join, serialized_type_name="varuna_core.TokenMean"
)


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """How a model returns its loss, as seen in the dry run."""

    path: Path | None = None
    """Path to the loss; None if the dry run's output has no loss."""

    dtype: torch.dtype | None = None
    """Dtype of the loss if the loss is a mean over the samples."""

    num_terms: int = 0
    """Number of terms of a TokenMean; 0 for a mean over the samples."""

    is_counted: bool = False
    """True if the model has `loss_counts`, which computes the counts from the inputs."""

    problem: SplitError | None = None
    """Reason why the model cannot be trained, although its outputs can be evaluated."""

    is_sum: bool = False
    """True if the loss's last operation is a sum, as in `reduction="sum"`, and no TokenMean."""

    @property
    def is_weighed_after(self) -> bool:
        """Return True if the counts are known only after all forwards."""
        return self.num_terms > 0 and not self.is_counted


def read_form(output: Any, is_counted: bool) -> LossForm:
    """Find the loss in a dry run's output; `is_counted` is True if the model has `loss_counts`."""
    try:
        path = locate_loss(output)
    except AmbiguousLoss as error:
        return LossForm(problem=error)
    except SplitError:  # dummy inputs without labels, say: the first step tells
        return LossForm()
    mean = _read_mean(follow(output, path))
    terms = 0 if mean is None else len(mean.terms)
    problem = None
    if terms > 1 and not is_counted:
        problem = SplitError(
            f"the model's loss is the sum of {terms} TokenMeans, whose counts must be known before "
            f"the first backward: give the model a method {COUNTS}(**inputs) that returns "
            f"the {terms} counts of the batch"
        )
    return LossForm(
        path=path,
        dtype=follow(output, path).dtype if mean is None else None,
        num_terms=terms,
        is_counted=is_counted and terms > 0,
        problem=problem,
        is_sum=mean is None and _is_sum(follow(output, path)),
    )


def _is_sum(loss: Tensor) -> bool:
    """Return True if the last operation of the loss is a sum."""
    node: Any = loss.grad_fn
    if node is None:
        return False
    return node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", 0) == 2


class AmbiguousLoss(SplitError):
    """Raised if several numbers may be the loss."""


def pick_loss(output: Any, path: Path | None = None) -> Tensor | TokenMean:
    """Return the loss in a model's output; `path` is the loss's path in the dry run's output.

    A mean over the samples must be one number; a TokenMean's half-precision sums become fp32.
    """
    loss = None if path is None else follow(output, path)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    mean = _read_mean(loss)
    if mean is None:  # this output is another than the dry run's
        loss = follow(output, locate_loss(output))
        mean = _read_mean(loss)
        if mean is None:
            assert isinstance(loss, Tensor)
            return loss.reshape(())
    return TokenMean.of([(_widen(total).reshape(()), count) for total, count in mean.terms])


def _widen(total: Tensor) -> Tensor:
    return total.float() if total.dtype in (torch.float16, torch.bfloat16) else total


def locate_loss(output: Any) -> Path:
    """Return the path of the loss: "loss", `.loss`, or the only number that may be the loss.

    Among several numbers, choose the one with a gradient; if none has a gradient (as under
    no_grad), choose the first one of a tuple.
    """
    if _is_number(output) or isinstance(output, TokenMean):
        return ()
    named = _find_named(output)
    if named is not None:
        if not _is_number(named) and _read_mean(named) is None:
            raise _refuse(named)
        return ("loss",)
    found = dict(list_numbers(output))
    trained = {path: value for path, value in found.items() if value.requires_grad} or found
    chosen = {path: v for path, v in trained.items() if isinstance(v, TokenMean) or not v.dim()}
    chosen = chosen or trained
    if len(chosen) == 1:
        return next(iter(chosen))
    if not chosen:
        raise _refuse(output)
    if not any(value.requires_grad for value in chosen.values()) and (0,) in chosen:
        return (0,)
    listed = ", ".join(f"{spell(path)} ({_describe(value)})" for path, value in chosen.items())
    raise AmbiguousLoss(
        f"the model returns {len(chosen)} numbers, each of which may be its loss: {listed}. Return "
        'the loss under "loss" (in a dict, or as .loss), or detach() the others'
    )


def _find_named(output: Any) -> Any:
    """Return the value under "loss"; None if there is none."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    if isinstance(output, Tensor):
        return None
    held = getattr(output, "loss", None)
    return held if isinstance(held, (Tensor, TokenMean, tuple, list)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _read_mean(value: Any) -> TokenMean | None:
    """Return a TokenMean, also from a named (sum, count) pair; None for other values."""
    if isinstance(value, TokenMean):
        return value
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not _is_number(value[0]):
        return None
    total, count = value
    if isinstance(count, Tensor):
        is_count = count.numel() == 1 and not count.requires_grad
    else:
        is_count = isinstance(count, (int, float))
    return TokenMean(total, count) if is_count else None


def list_numbers(output: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield floating-point scalars and TokenMeans with their paths."""
    if isinstance(output, TokenMean) or (_is_number(output) and output.is_floating_point()):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from list_numbers(value, (*path, key))
    elif isinstance(output, (tuple, list)):
        for place, value in enumerate(output):
            yield from list_numbers(value, (*path, place))
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from list_numbers(getattr(output, field.name), (*path, field.name))


def follow(output: Any, path: Path) -> Any:
    """Return the part of an output at `path`; None if the path does not exist."""
    try:
        for key in path:
            if isinstance(key, int) or (isinstance(output, (dict, Mapping)) and key in output):
                output = output[key]
            else:
                output = getattr(output, key)
    except (LookupError, AttributeError, TypeError):
        return None
    return output


def spell(path: Path) -> str:
    """Return a path as a Python expression."""
    return "output" + "".join(f"[{key!r}]" for key in path)


def _describe(value: Any) -> str:
    if isinstance(value, TokenMean):
        return "TokenMean"
    return describe(value.dtype, value.shape)


def _refuse(output: Any) -> SplitError:
    shown = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    return SplitError(
        f"the model returns {shown}, not its loss: return one number (the mean over the samples), "
        'or a TokenMean(sum, count), alone, under "loss" or `.loss`, or among other outputs'
    )
