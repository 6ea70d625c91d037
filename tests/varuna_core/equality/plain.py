"""The plain model, trained by hand in one process: no code of ours but the seeds of dropout.

In fp64 it is the truth; in the draw's own precision it says how far rounding alone leads from it.
The truth is of whole batches, unless the model's result depends on its micro-batches (batch norm,
dropout, a branch on data): then those of the layout are run, each replica with buffers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from tests.segments import announce_segments
from tests.varuna_core.equality.model import (
    HALF_KEPT,
    Drawn,
    TwoMeans,
    bend,
    build_model,
    cut_batch,
    is_bent,
    make_batch,
)
from tests.varuna_core.equality.spec import NUM_STEPS, SAVED_AFTER, Piece, Spec, deal, list_pieces
from varuna_core.runtime.optim.optimizers import Lamb
from varuna_core.runtime.split.random_streams import build_seeder

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED, RATE, MOMENTUM = 7, 0.05, 0.9
LAMB_NORM = 0.5

EPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
OWN_FLOOR, COMMON_FLOOR = 2.0, 0.5
"""Units in the last place, of a tensor's own norm and of that of all gradients."""


@dataclass(kw_only=True)
class Trained:
    """What a training left, by the plain model's names."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, clipped."""

    summands: dict[str, float] = field(default_factory=dict)
    """The sum of the norms of what each of these is a sum of."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: Tensor | None = None
    """The loss in eval mode at the end, of the last batch."""


class Muon(torch.optim.Optimizer):
    """Updates matrices by what comes near an orthogonal one. torch's own rounds it to bf16, where
    nothing less can be seen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                near = mean / (mean.norm() + 1e-3)
                for _ in range(2):
                    near = 1.5 * near - 0.5 * near @ near.T @ near
                parameter.sub_(near, alpha=group["lr"])


def build_optimizers(name: str, parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Optimizers as a user builds them; their epsilon is large, so that rounding stays small."""
    if name != "several":
        return [build_optimizer(name, parameters)]
    is_matrix = [p.dim() == 2 and not p.is_complex() for p in parameters]
    matrices = [p for p, fits in zip(parameters, is_matrix, strict=True) if fits]
    rest = [p for p, fits in zip(parameters, is_matrix, strict=True) if not fits]
    made = [Muon(matrices, {"lr": 0.01})] if matrices else []
    return [*made, build_optimizer("adamw", rest)] if rest else made


def build_optimizer(name: str, parameters: Any) -> Any:
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.05, max_iter=1)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)
    if name == "lamb":
        return Lamb(parameters, lr=0.01, eps=1e-3, max_grad_norm=LAMB_NORM)
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def take_closure(optimizer: Any) -> list[Any]:
    """The argument of `step`: LBFGS asks for the loss, of gradients that are there already."""
    return [lambda: torch.zeros(())] if isinstance(optimizer, torch.optim.LBFGS) else []


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast as users do, and complex numbers to those of the same or the next wider kind."""
    wide = torch.cdouble if dtype is torch.double else torch.cfloat

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(wide)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(cast)


def widen(tensor: Any) -> Tensor:
    """In double precision."""
    held = torch.as_tensor(tensor).detach()
    return held.to(torch.cdouble if held.is_complex() else torch.double)


def keep_full(module: nn.Module, half: torch.dtype) -> None:
    """The module in fp32 within a model in half precision."""
    module.float()
    module.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
    module.register_forward_hook(lambda module, args, output: output.to(half))


def lay_out_gradients(cut: nn.Module, args: Any, output: Any) -> Any:
    """Give gradients the strides of what crosses, as those that a leaf collects have."""

    def lay_out(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        through, like = tensor.view_as(tensor), torch.empty_like(tensor)
        through.register_hook(lambda gradient: torch.empty_like(like).copy_(gradient))
        return through

    return pytree.tree_map_only(Tensor, lay_out, output)


class Plain:
    """One training."""

    def __init__(
        self,
        spec: Spec,
        leg: int,
        precision: str,
        noise: int = 0,
        boundaries: Sequence[int] = (),
    ) -> None:
        """With `noise` the first weights differ in the last place, and gradients by their floor.
        Gradients get the memory order of activations at the cuts that are `boundaries`."""
        self.spec, self.precision = spec, precision
        self.layouts = spec.list_layouts(leg)
        self.half = HALVES.get(precision)
        self.full = torch.float64 if precision == "fp64" else torch.float32
        self.whole = precision == "fp64" and not spec.depends_on_chunks
        self.model: Drawn = build_model(spec)
        for cut in boundaries:
            self.model.cuts[cut].register_forward_hook(lay_out_gradients)
        self.summands: dict[str, float] = {}
        cast_model(self.model, self.full)
        self.draw: torch.Generator | None = None
        if noise:
            self.shake(noise)
        self.parameters = dict(self.model.named_parameters())
        self.masters = self.parameters
        if self.half is not None:
            made = {n: p.detach().clone() for n, p in self.parameters.items()}
            self.masters = {
                n: nn.Parameter(value, self.parameters[n].requires_grad)
                for n, value in made.items()
            }
            cast_model(self.model, self.half)
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.float()
            for name in spec.list_kept():
                keep_full(self.model.get_submodule(name), self.half)
        self.optimizers = build_optimizers(spec.optimizer, list(self.masters.values()))
        scaled = precision == "fp16"
        self.dynamic = spec.loss_scale == "dynamic"
        self.scale = (2.0**10 if self.dynamic else float(spec.loss_scale)) if scaled else 1.0
        self.buffers: dict[int, dict[str, Tensor]] = {}
        """Of replicas but the first, whose are the model's own."""

        self.started: dict[str, Tensor] = {}
        """Buffers that all replicas begin with."""

        self.keep_start()

    @torch.no_grad()
    def shake(self, noise: int) -> None:
        self.draw = torch.Generator().manual_seed(noise)
        for parameter in self.model.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=self.draw) * 2 - 1
            parameter.mul_(1 + EPS[self.precision] * sign)

    def blur(self, gradients: dict[str, Tensor]) -> None:
        """Add what a gradient may differ by: an optimizer that divides by it, or by the size of
        its update, makes much of one that is nothing but rounding."""
        common = math.sqrt(sum(float(widen(g).norm()) ** 2 for g in gradients.values()))
        for gradient in gradients.values():
            noise = torch.randn(gradient.shape, generator=self.draw, dtype=widen(gradient).dtype)
            size = OWN_FLOOR * float(widen(gradient).norm()) + COMMON_FLOOR * common
            noise *= EPS[self.precision] * size / (float(noise.norm()) + 1e-30)
            gradient.add_(noise.to(gradient))

    def keep_start(self) -> None:
        self.buffers.clear()
        self.started = {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def train(self) -> Trained:
        result = Trained()
        for step in range(NUM_STEPS):
            if step == SAVED_AFTER and self.layouts[step] is not self.layouts[0]:
                self.keep_start()  # all start from what the first replica saved
            loss, gradients = self.compute(step)
            if self.draw is not None:
                self.blur(gradients)
            found = [widen(g).abs().square().sum() for g in gradients.values()]
            norm = torch.stack(found).sum().sqrt() if found else torch.zeros(())
            overflow = self.precision == "fp16" and not bool(norm.isfinite())
            result.losses.append(loss)
            result.norms.append(norm)
            result.overflows.append(overflow)
            if not overflow:
                self.update(norm, gradients)
            elif self.dynamic:
                self.scale /= 2
            if not step:
                result.gradients = {n: g.detach().clone() for n, g in gradients.items()}
                result.summands = self.summands
        result.weights = {n: p.detach().clone() for n, p in self.masters.items()}
        result.buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
        result.evaluated = self.evaluate(NUM_STEPS - 1)
        return result

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        self.refresh()
        self.model.eval()
        self.keep_start()  # all replicas evaluate with the first one's
        batch, size, pieces, totals = self.prepare(step)
        loss = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            for weight, value in self.run(batch, size, piece, step, totals):
                loss += value.double() * weight
        return loss

    def update(self, norm: Tensor, gradients: dict[str, Tensor]) -> None:
        if self.spec.clip is not None:
            factor = (self.spec.clip / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients.values():
                gradient.mul_(factor)
            norm = norm * factor
        for name, master in self.masters.items():
            master.grad = gradients.get(name)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Lamb):
                optimizer.grad_norm = norm
            optimizer.step(*take_closure(optimizer))
        for master in self.masters.values():
            master.grad = None

    def compute(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the unscaled gradients in the masters' precision."""
        self.refresh()
        batch, size, pieces, totals = self.prepare(step)
        summed: dict[str, Tensor] = {}
        self.summands = {}
        loss = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            parts = self.run(batch, size, piece, step, totals)
            for number, (weight, value) in enumerate(parts, 1):
                # As small as in the mean over the batch, and exact: the rest is multiplied in fp32.
                start = self.scale * 2.0 ** math.floor(math.log2(weight))
                seed = torch.full_like(value, start)
                value.backward(seed, retain_graph=number < len(parts))
                loss += value.detach().double() * weight
                self.add_up(summed, weight / start)
        if self.spec.hooks:
            for name, gradient in summed.items():
                if is_bent(name, self.parameters[name]):
                    summed[name] = bend(gradient)
        return loss, summed

    def refresh(self) -> None:
        if self.half is not None:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.masters[name])

    def prepare(self, step: int) -> tuple[dict[str, Any], int, list[Piece], list[float]]:
        """The batch, its size, its micro-batches, and what each mean is divided by."""
        batch, size = self.cast(make_batch(self.spec, step)), self.spec.batches[step]
        pieces = list_pieces(self.spec, self.layouts[step], step)
        assert sum(len(h) for h in deal(self.spec, self.layouts[step], step)) == size
        if self.whole:
            pieces = [Piece(replica=0, begin=0, stop=size)]
        return batch, size, pieces, self.count(batch, size)

    def add_up(self, summed: dict[str, Tensor], factor: float) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                given = parameter.grad.to(self.masters[name].dtype) * factor
                self.summands[name] = self.summands.get(name, 0.0) + float(given.norm())
                summed[name] = summed[name] + given if name in summed else given
                parameter.grad = None

    def run(
        self, batch: dict[str, Any], size: int, piece: Piece, step: int, totals: list[float]
    ) -> list[tuple[float, Tensor]]:
        """The means of a micro-batch, each with its weight in the loss."""
        held = range(piece.begin, piece.stop)
        with self.buffers_of(piece.replica):
            seeder = build_seeder(SEED, step, piece.place, seeds_foreign=True)
            with announce_segments(seeder):
                output = self.model(**cut_batch(batch, size, held))
        if isinstance(output, dict):
            output = output["loss"]
        if self.spec.tokens:
            return self.weigh(output, totals)
        if isinstance(output, tuple):
            output = output[0]
        return [(len(held) / size, getattr(output, "loss", output))]

    def weigh(self, output: Any, totals: list[float]) -> list[tuple[float, Tensor]]:
        means = [output] if isinstance(output, tuple) else output.terms
        return [
            (float(count) / total, summed / count)
            for (summed, count), total in zip(means, totals, strict=True)
            if int(count)
        ]

    def count(self, batch: dict[str, Any], size: int) -> list[float]:
        """What each mean of the loss is divided by."""
        labels = batch["labels"]
        if isinstance(self.model, TwoMeans):
            return [float(count) for count in self.model.loss_counts(labels)]
        return [float((labels >= 0).sum())]

    def buffers_of(self, replica: int) -> Any:
        return _Buffers(self, replica)

    def cast(self, inputs: Any, name: str = "") -> Any:
        if isinstance(inputs, dict):
            return {key: self.cast(value, key) for key, value in inputs.items()}
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            return inputs
        if self.half is not None and name in HALF_KEPT:
            return inputs.clone()
        return inputs.to(self.full if self.half is None else self.half, copy=True)


class _Buffers:
    """The model has the buffers of one replica."""

    def __init__(self, plain: Plain, replica: int) -> None:
        self.plain, self.replica = plain, replica
        self.kept: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        if self.replica:
            self.kept = self.take()
            self.put(self.plain.buffers.get(self.replica) or self.plain.started)

    def __exit__(self, *error: object) -> None:
        if self.replica:
            self.plain.buffers[self.replica] = self.take()
            self.put(self.kept)

    def take(self) -> dict[str, Tensor]:
        return {n: b.detach().clone() for n, b in self.plain.model.named_buffers()}

    def put(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.plain.model.named_buffers():
            buffer.data.copy_(values[name])
