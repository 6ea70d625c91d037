"""Which segment of a whole model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from varuna_core.runtime.split.cut import CutPoint, unpack, watch


class _Announcer:
    def __init__(self, on_segment: Callable[[int], None]) -> None:
        self.on_segment, self.segment = on_segment, 0

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        self.segment += 1
        self.on_segment(self.segment)
        return unpack(values)


@contextmanager
def announce_segments(on_segment: Callable[[int], None]) -> Iterator[None]:
    """Call `on_segment(k)` when a forward of the whole model enters segment k, to seed or time."""
    before = watch(_Announcer(on_segment))
    try:
        on_segment(0)
        yield
    finally:
        watch(before)
