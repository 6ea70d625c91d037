"""Track the actions that compute gradients, and which of them must trigger autograd's hooks.

```
stage 0      B0           B1           B2
             hooks run,   no hooks:    hooks run: the last gradient
             learn which  added in     of its parameters, so their
             get one      the product  all-reduce may begin
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from varuna_core.runtime.engine.weight_grads import PutOffProduct, WeightGrads
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.actions import Action

BeforeGradients = Callable[[Sequence[nn.Parameter], Sequence[PutOffProduct] | None], None]
"""Function called before each action that computes gradients. Its arguments are the parameters for
which the action is the last one, and the products of a W (None for other actions)."""


class GradientTurns:
    """Actions of a step that compute gradients, and the parameters that each action completes."""

    def __init__(
        self,
        stages: Sequence[Stage],
        weight_grads: WeightGrads,
        before: BeforeGradients | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is None if no hook waits for gradients; `after` is called after each B and W."""
        self.stages, self.weight_grads = stages, weight_grads
        self.before, self.end = before, after
        self._finishing: dict[Action, list[nn.Parameter]] = {}
        self._begun: set[int] = set()

    def begin_step(self, actions: Sequence[Action]) -> None:
        """Determine the last action for each parameter."""
        self.weight_grads.may_add = self.before is None
        self._begun.clear()
        if self.before is not None:
            self._finishing = list_finishing(actions, self.stages)

    def begin(self, action: Action, products: Sequence[PutOffProduct]) -> None:
        """Prepare for an action that computes gradients (B, I or W). `products` are the postponed
        products of a W."""
        if self.before is None or action.kind not in "BIW":
            return
        last_for = self._finishing.get(action, [])
        self.before(last_for, products if action.kind == "W" else None)
        # Autograd's hooks see the first action of a stage, which teaches what to wait for, and the
        # last, which is waited for.
        self.weight_grads.may_add = action.stage in self._begun and not last_for
        self._begun.add(action.stage)


def list_finishing(
    actions: Sequence[Action], stages: Sequence[Stage]
) -> dict[Action, list[nn.Parameter]]:
    """Return, for each action, the parameters whose gradients it completes, in order."""
    if not actions:  # no samples for this replica
        return {}
    last = {a.stage: place for place, a in enumerate(actions) if a.kind in "BIW"}
    final: dict[nn.Parameter, int] = {}
    for stage in stages:
        for parameter in stage.parameters().values():
            final[parameter] = max(final.get(parameter, 0), last.get(stage.index, 0))
    finishing: dict[Action, list[nn.Parameter]] = {}
    for parameter, place in final.items():
        finishing.setdefault(actions[place], []).append(parameter)
    return finishing
