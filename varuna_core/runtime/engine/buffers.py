"""Save and restore attributes and buffers that a forward changes, such as batch norm statistics.

Buffers change once for each micro-batch. A recompute uses the values that the first forward saw and
does not change them; an evaluation uses the first replica's buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor

from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.split.attributes import KeptAttributes
from varuna_core.runtime.split.stage import Stage


class ChangingBuffers:
    """The buffers of one stage that its forward changes."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.names = stage, stage.list_changing()

    def copy(self) -> dict[str, Tensor]:
        """Return copies of the changing buffers, by name."""
        return {name: self.stage.module.get_buffer(name).clone() for name in self.names}

    def keep_attributes(self) -> KeptAttributes | None:
        """Save the attributes that the forward changes; None if there are none."""
        places = self.stage.record.attributes
        return KeptAttributes(self.stage.module, places.keys()) if places else None

    @contextmanager
    def attributes_as(self, kept: KeptAttributes | None) -> Iterator[None]:
        """Set the stage's attributes to these values within the context, then restore them."""
        if kept is None:
            yield
            return
        own = self.keep_attributes()
        assert own is not None
        kept.restore()
        try:
            yield
        finally:
            own.restore()

    @contextmanager
    def replaced_by(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Set the stage's buffers to these values within the context, then restore them."""
        own = {name: self.stage.module.get_buffer(name) for name in values}
        self._put(values)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            self.stage.module.get_submodule(path)._buffers[own] = value


@contextmanager
def use_first_buffers(stages: Collection[ChangingBuffers], links: Links) -> Iterator[None]:
    """Make stages in evaluation use the first replica's buffers, which a checkpoint would store,
    since running averages differ between replicas."""
    changing = [buffers for buffers in stages if buffers.names]
    if links.replicas is None or any(each.stage.module.training for each in changing):
        yield
        return
    with ExitStack() as stack:
        for buffers in changing:
            copies = buffers.copy()
            links.share_first(copies.values())
            stack.enter_context(buffers.replaced_by(copies))
        yield
