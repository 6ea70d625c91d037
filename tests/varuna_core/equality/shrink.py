"""A failing draw made smaller: each step takes something away and must fail in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise

from tests.varuna_core.equality.spec import Layout, Spec


def shrink(spec: Spec, fails: Callable[[Spec], bool], most: int = 150) -> Spec:
    """The smallest draw found that still `fails`."""
    left, goes_on = most, True
    while goes_on and left > 0:
        goes_on = False
        for smaller in list_smaller(spec):
            left -= 1
            if fails(smaller):
                spec, goes_on = smaller, True
                break
            if left <= 0:
                break
    return spec


def list_smaller(spec: Spec) -> Iterator[Spec]:
    if spec.other is not None:
        yield replace(spec, other=None)
    for number, block in enumerate(spec.blocks):
        rest = (*spec.blocks[:number], *spec.blocks[number + 1 :])
        if len(spec.blocks) > 1 and block.form is None:
            yield replace(spec, blocks=rest)
        if block.form is not None and spec.num_segments > 2:
            lost = tuple(
                replace(b, form=None) if n == number else b for n, b in enumerate(spec.blocks)
            )
            cut = sum(b.form is not None for b in spec.blocks[:number])
            yield _merge(replace(spec, blocks=lost), cut)
        if block.form not in (None, "one"):
            plain = tuple(
                replace(b, form="one") if n == number else b for n, b in enumerate(spec.blocks)
            )
            yield replace(spec, blocks=plain)
        if block.kind != "linear":
            plain = tuple(
                replace(b, kind="linear") if n == number else b for n, b in enumerate(spec.blocks)
            )
            yield replace(spec, blocks=plain)
    default = Spec(blocks=spec.blocks, layout=spec.layout)
    for field in fields(spec):
        if field.name in ("blocks", "layout", "other"):
            continue
        if getattr(spec, field.name) != getattr(default, field.name):
            if field.name in ("batch_size", "batches"):
                size = max(2, spec.layout.data)
                yield replace(spec, batch_size=size, batches=(size,) * 3)
            else:
                yield replace(spec, **{field.name: getattr(default, field.name)})
    for name in ("layout", "other"):
        layout = getattr(spec, name)
        if layout is not None:
            yield from (replace(spec, **{name: one}) for one in _list_layouts(layout))


def _list_layouts(layout: Layout) -> Iterator[Layout]:
    for name in ("offload", "even", "reverse", "zero", "hang_timeout_s", "opportunistic", "tensor"):
        if getattr(layout, name) != getattr(Layout(), name):
            yield replace(layout, **{name: getattr(Layout(), name)})
    if layout.data > 1:
        yield replace(layout, data=layout.data - 1)
    if layout.recompute != "none":
        yield replace(layout, recompute="none", memory_limit=None)
    if layout.schedule != "1f1b" and layout.num_stages == layout.pipeline:
        yield replace(layout, schedule="1f1b", stages_per_rank=1)
    if layout.num_stages > 1 and layout.partition is not None:
        counts = [int(word) for word in layout.partition.split("-")]
        if layout.num_stages == layout.pipeline:
            for number in range(len(counts) - 1):
                joined = [*counts[:number], counts[number] + counts[number + 1]]
                joined += counts[number + 2 :]
                text = "-".join(map(str, joined))
                yield replace(layout, pipeline=layout.pipeline - 1, partition=text)
        elif layout.pipeline == 1:
            ends = [0, sum(counts)]
            text = "-".join(str(b - a) for a, b in pairwise(ends))
            yield replace(layout, schedule="1f1b", stages_per_rank=1, partition=text)


def _merge(spec: Spec, cut: int) -> Spec:
    """The partitions without one of the cuts."""

    def change(layout: Layout | None) -> Layout | None:
        if layout is None or layout.partition is None:
            return layout
        counts, end = [int(word) for word in layout.partition.split("-")], 0
        for number, count in enumerate(counts):
            end += count
            if end > cut or number == len(counts) - 1:
                if count > 1 or 0 < number < len(counts) - 1:
                    counts[number] -= 1
                else:  # the end has one alone: another gives one
                    counts[counts.index(max(counts))] -= 1
                break
        return replace(layout, partition="-".join(map(str, counts)))

    layout = change(spec.layout)
    assert layout is not None
    return replace(spec, layout=layout, other=change(spec.other))
