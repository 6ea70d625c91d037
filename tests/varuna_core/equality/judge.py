"""The verdict on a draw: equal to the plain model but for rounding, or by how much it is not.

The truth is the plain model in fp64. For each tensor (losses, norms, gradients, weights, buffers)

    |ours - truth|  <=  2 * (|plain - truth| + floor)

where plain is the plain model in the draw's precision, |.| the Euclidean norm of a tensor, and the
floor a few units in the last place: of the tensor's own norm, and a fraction of one of the norm of
all gradients, since one that cancels to nothing is as coarse as what it is a sum of. A single
training may be right by chance: where a draw exceeds the bound, |plain - truth| becomes the largest
of five trainings of the plain model, four of them from weights that differ in the last place, and
with gradients that differ by their floor.

A right training errs as these do. Of six that err alike each is the worst with a chance of one in
six, the sixth by more than twice with less; so a draw that is still outside is judged by 64
trainings, and a tensor of it is called different wrongly with a chance of at most one in 65.

In half precision that bound is wide. Where ours and the plain model round the same things in the
same order (`rounds_alike`), what differs is fp32's alone: each of n micro-batches' gradients is
rounded with its weight, n - 1 times in their sum, and twice as it is clipped, here and in the plain
model: gradients of the first step are within (n + 3) units in the last place of fp32 of the sum of
their norms. For that the plain model gives gradients the memory order of activations where stages
meet, as a leaf that collects them does: half-precision sums of convolutions depend on it. Whole
numbers must be equal, and so must all copies of a weight on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.varuna_core.equality.model import build_model
from tests.varuna_core.equality.plain import COMMON_FLOOR, EPS, OWN_FLOOR, Plain, Trained, widen
from tests.varuna_core.equality.spec import SAVED_AFTER, Spec, list_pieces

FACTOR = 2.0
ALIKE = 3
"""Roundings of a gradient in fp32 beside one for each summand: its weight, and two of clipping."""

NUM_PROBES, MOST_PROBES = 5, 64

Held = tuple[str, Tensor, Any]
"""Name, values, and the pieces of the whole that they are (None: all of it)."""


@dataclass(kw_only=True)
class Finding:
    """The largest difference of a draw, as a multiple of what rounding explains."""

    ratio: float = 0.0
    where: str = ""
    problem: str = ""
    """What is wrong, if anything."""

    def note(self, ratio: float, where: str, told: str) -> None:
        if ratio > self.ratio or math.isnan(ratio):
            self.ratio, self.where = ratio, where
            if not ratio <= FACTOR:
                self.problem = f"{where}: {told}"


def judge(spec: Spec, leg: int, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """`ranks` are what each rank reports of its training."""
    truth, plain = (Plain(spec, leg, precision).train() for precision in ("fp64", spec.precision))
    if not all(bool(torch.as_tensor(x).isfinite()) for x in (*truth.losses, *truth.norms)):
        return Finding(problem="void: the plain model itself overflows")
    finding = weigh(spec, leg, ranks, truth, [plain])
    if math.isfinite(finding.ratio) and finding.ratio > FACTOR:
        probes: list[Trained] = []
        for first, last in pairwise((1, NUM_PROBES, MOST_PROBES)):
            probes += [Plain(spec, leg, spec.precision, n).train() for n in range(first, last)]
            same = [p for p in probes if p.overflows == plain.overflows]
            finding = weigh(spec, leg, ranks, truth, [plain, *same])
            if not math.isfinite(finding.ratio) or finding.ratio <= FACTOR:
                break
    return finding


def weigh(
    spec: Spec,
    leg: int,
    ranks: Sequence[Mapping[str, Any]],
    truth: Trained,
    plains: Sequence[Trained],
) -> Finding:
    """The finding, where the plain model's error is the largest of these trainings'."""
    finding, first = Finding(), SAVED_AFTER if leg else 0
    problem = find_disagreement(spec, ranks)
    if problem:
        return Finding(ratio=float("inf"), where="ranks", problem=problem)
    eps, plain = EPS[spec.precision], plains[0]
    pair = ranks[0]["evaluated"][0], [p.evaluated for p in plains], truth.evaluated
    compare(finding, "evaluated", *pair, eps, 0.0)
    if ranks[0]["overflows"] != plain.overflows[first:]:
        told = f"overflows {ranks[0]['overflows']}, of the plain model {plain.overflows[first:]}"
        return Finding(ratio=float("inf"), where="overflows", problem=told)
    for word in ("losses", "norms"):
        for step, true in enumerate(getattr(truth, word)):
            if step >= first:
                ours = ranks[0][word][step - first]
                close = [getattr(p, word)[step] for p in plains]
                compare(finding, f"{word} {step}", ours, close, true, eps, 0.0)
    names = find_names(spec)
    for word in ("gradients", "weights", "buffers"):
        if word == "gradients" and (leg or plain.overflows[0]):
            continue
        problem = compare_all(finding, word, names, ranks, truth, plains, eps)
        if problem:
            return Finding(ratio=float("inf"), where=word, problem=problem)
    if leg == 0 and not plain.overflows[0] and rounds_alike(spec):
        compare_alike(finding, names, ranks, spec)
    problem = find_ungathered(names, ranks)
    if problem:
        return Finding(ratio=float("inf"), where="gathered", problem=problem)
    limits = next((rank["limits"] for rank in ranks if rank["limits"]), "")
    if limits and not finding.problem:
        return Finding(ratio=float("inf"), where="time limits", problem=f"time limits: {limits}")
    return finding


def rounds_alike(spec: Spec) -> bool:
    """True where half precision rounds the same things here as in the plain model on the same
    micro-batches: nothing is summed in another place or order. A weight that a micro-batch uses
    twice is left out, for a W adds each use in fp32, and autograd both in half precision."""
    layout = spec.layout
    return (
        spec.precision in ("bf16", "fp16")
        and layout.tensor == 1
        and not spec.tied
        and not spec.tokens
        and not spec.has("shared", "tied_use", "twice", "shared_twice", "gain", "force")
    )


def compare_alike(
    finding: Finding,
    names: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    spec: Spec,
) -> None:
    """What is left is fp32's: of each micro-batch's gradient its weight, the sum, the clipping."""
    plain = Plain(spec, 0, spec.precision, boundaries=ranks[0]["boundaries"]).train()
    roundings = len(list_pieces(spec, spec.layout, 0)) + ALIKE
    for name, copies in assemble("gradients", names, ranks, plain.gradients).items():
        for ours in copies if isinstance(copies, list) else ():
            close = plain.gradients.get(name)
            if close is not None:
                apart = float((widen(ours) - widen(close)).norm())
                floor = EPS["fp32"] * roundings * plain.summands[name]
                if apart > floor and not finding.problem:
                    finding.ratio, finding.where = float("inf"), f"gradients of {name}"
                    finding.problem = (
                        f"gradients of {name}: {apart:.3g} from the plain model's in the same "
                        f"precision, where both round alike; |tensor| {float(close.norm()):.3g}"
                    )


def find_names(spec: Spec) -> dict[str, str]:
    """Each name of a parameter to the one that leads."""
    model = build_model(spec)
    leads = {id(p): name for name, p in model.named_parameters()}
    return {n: leads[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def find_disagreement(spec: Spec, ranks: Sequence[Mapping[str, Any]]) -> str:
    for word in ("losses", "norms", "evaluated"):
        values = [torch.stack([torch.as_tensor(x).double() for x in rank[word]]) for rank in ranks]
        for number, other in enumerate(values):
            if not torch.equal(other.nan_to_num(), values[0].nan_to_num()):
                return f"{word} of rank {number} {other.tolist()}, of rank 0 {values[0].tolist()}"
    return ""


def find_ungathered(names: Mapping[str, str], ranks: Sequence[Mapping[str, Any]]) -> str:
    """The gathered state dict has the weights and buffers that ranks have, under all names."""
    whole = {name: tensor for name, tensor, _ in ranks[0]["whole"]}
    for word in ("weights", "buffers"):
        held = assemble(word, names, ranks, whole)
        for name, copies in held.items():
            if name in whole and isinstance(copies, list):
                if not torch.equal(widen(copies[0]), widen(whole[name])):
                    return f"gathered {name} is not what ranks have"
            elif name in names:
                return f"gathered state dict lacks {name}"
    return next((f"gathered state dict lacks {n}" for n in names if n not in whole), "")


def compare_all(
    finding: Finding,
    word: str,
    names: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    truth: Trained,
    plains: Sequence[Trained],
    eps: float,
) -> str:
    """What is wrong beside numbers, if anything."""
    true, rounded = getattr(truth, word), [getattr(p, word) for p in plains]
    common = math.sqrt(sum(float(widen(t).norm()) ** 2 for t in true.values()))
    common = common if word == "gradients" else 0.0
    seen: set[str] = set()
    for name, whole in assemble(word, names, ranks, true).items():
        seen.add(name)
        if isinstance(whole, str):
            return whole
        for ours in whole:
            expected, close = true.get(name), [r[name] for r in rounded if name in r]
            if expected is None or not close:  # ours may be zeros where there is none
                if bool(ours.any()):
                    return f"{word} of {name}: the plain model has none"
                continue
            if ours.shape != expected.shape:
                return f"{word} of {name}: {list(ours.shape)}, want {list(expected.shape)}"
            if not (expected.is_floating_point() or expected.is_complex()):
                if not torch.equal(ours, expected):
                    return f"{word} of {name}: {ours.tolist()}, want {expected.tolist()}"
                continue
            compare(finding, f"{word} of {name}", ours, close, expected, eps, common)
    missing = sorted(name for name in true if name not in seen and bool(true[name].any()))
    return f"{word} of {missing[0]}: no rank has any" if missing else ""


def assemble(
    word: str,
    names: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    true: Mapping[str, Tensor],
) -> dict[str, list[Tensor] | str]:
    """Whole tensors: of pieces on several ranks, and every different copy of what is whole."""
    found: dict[str, list[Tensor] | str] = {}
    filled: dict[str, Tensor] = {}
    for rank in ranks:
        for held, tensor, pieces in rank[word]:
            name = names.get(held, held)
            if pieces is None:
                copies = found.setdefault(name, [])
                assert isinstance(copies, list)
                if not any(torch.equal(tensor, copy) for copy in copies):
                    copies.append(tensor)
                continue
            if name not in filled:
                shape = true[name].shape if name in true else tuple(rank["shapes"][held])
                filled[name] = torch.full(shape, float("nan"), dtype=widen(tensor).dtype)
            for offset, extent, inner in pieces:
                outside = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
                inside = tuple(slice(i, i + e) for i, e in zip(inner, extent, strict=True))
                filled[name][outside] = widen(tensor[inside])
    for name, copies in found.items():
        if len(copies) > 1 and word == "weights" and not ranks[0]["tensor"]:
            found[name] = f"weights of {name} differ between ranks that hold them"
    return {**found, **{name: [tensor] for name, tensor in filled.items()}}


def compare(
    finding: Finding,
    where: str,
    ours: Any,
    plains: Sequence[Any],
    truth: Any,
    eps: float,
    common: float,
) -> None:
    mine, true, *closes = (widen(x) for x in (ours, truth, *plains))
    own = max(float((close - true).norm()) for close in closes)
    if not math.isfinite(own):
        ratio = 0.0 if torch.equal(mine.isfinite(), closes[0].isfinite()) else float("inf")
        finding.note(ratio, where, "not finite where the plain model is")
        return
    error, size = float((mine - true).norm()), float(true.norm())
    floor = eps * (OWN_FLOOR * size + COMMON_FLOOR * common) + 1e-30
    ratio = error / (own + floor)
    finding.note(
        ratio if ratio == ratio else float("inf"),
        where,
        f"|error| {error:.3g}, the plain model's own {own:.3g}, |tensor| {size:.3g}",
    )
