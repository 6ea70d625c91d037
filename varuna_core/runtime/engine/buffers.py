"""Buffers that a forward changes, such as the statistics of batch norm, and plain attributes.

They change once a micro-batch. A recompute sees them as its forward did and leaves no trace, and an
evaluation has the buffers of the first replica.
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
        """Copies of them, by name."""
        return {name: self.stage.module.get_buffer(name).clone() for name in self.names}

    def keep_attributes(self) -> KeptAttributes | None:
        """The attributes that the forward changes, as they are now."""
        places = self.stage.record.attributes
        return KeptAttributes(self.stage.module, places.keys()) if places else None

    @contextmanager
    def attributes_as(self, kept: KeptAttributes | None) -> Iterator[None]:
        """Let the stage have these attributes, and its own again afterwards."""
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
        """Let the stage have these values, and its own again afterwards."""
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
    """Let stages that do not train have the first replica's buffers: running averages differ by
    replica, and an evaluation is to give what it would after a checkpoint, which has hers."""
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
