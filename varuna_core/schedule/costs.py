"""Costs of actions, one number for each stage, in any unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from varuna_core.schedule.actions import Kind, ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of actions on all stages; each tuple has one number for each stage."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...] = ()
    """Cost of computing both gradients in one action; by default the sum of their costs."""
    recompute: tuple[float, ...] = ()
    """Cost of a recompute; by default equal to the forward."""
    offload: tuple[float, ...] = ()
    """Time for copying a graph out during which a rank does no other work. Default: 0."""
    load: tuple[float, ...] = ()
    """Time for copying a graph back during which a rank does no other work. Default: 0."""
    hops: tuple[float, ...] = ()
    """Time of a message between stages s and s + 1, in either direction. Default: 0."""
    by_kind: dict[Kind, tuple[float, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = len(self.forward)
        both = tuple(map(sum, zip(self.input_grad, self.weight_grad, strict=True)))
        by_kind: dict[Kind, tuple[float, ...]] = {
            "F": self.forward,
            "f": self.forward,
            "R": self.recompute or self.forward,
            "B": self.backward or both,
            "I": self.input_grad,
            "W": self.weight_grad,
            "O": self.offload or (0.0,) * stages,
            "L": self.load or (0.0,) * stages,
        }
        object.__setattr__(self, "by_kind", by_kind)
        if not self.hops:
            object.__setattr__(self, "hops", (0.0,) * (stages - 1))
        for kind, figures in by_kind.items():
            if len(figures) != stages or min(figures, default=-1) < 0:
                raise ScheduleError(f"costs of {kind} {figures}: expected {stages} numbers >= 0")
        if len(self.hops) != stages - 1 or min(self.hops, default=0) < 0:
            raise ScheduleError(f"hops {self.hops}: expected {stages - 1} numbers of 0 or more")

    def as_json(self) -> dict[str, tuple[float, ...]]:
        """Return the costs by name, rounded to six digits; `Costs(**...)` reads the result."""
        names = (
            *("forward", "input_grad", "weight_grad", "backward", "recompute"),
            *("offload", "load", "hops"),
        )
        return {
            name: tuple(float(f"{number:.6g}") for number in getattr(self, name))
            for name in names
            if getattr(self, name)
        }

    @property
    def num_stages(self) -> int:
        return len(self.forward)


def build_even_costs(
    num_stages: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    hop: float = 0.0,
) -> Costs:
    """Return costs that are the same on every stage."""
    return Costs(
        forward=(forward,) * num_stages,
        input_grad=(input_grad,) * num_stages,
        weight_grad=(weight_grad,) * num_stages,
        hops=(hop,) * (num_stages - 1),
    )
