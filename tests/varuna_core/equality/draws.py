"""Hypothesis strategies: models, layouts, trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.varuna_core.equality.model import (
    BARE,
    LINEAR,
    MODULES,
    RARE,
    RISKY,
    SHARED_BY_RANKS,
)
from tests.varuna_core.equality.spec import NUM_STEPS, STATEFUL, Block, Layout, Spec
from varuna_core.schedule.registry import AUTO, SCHEDULES

SAFE = [kind for kind in (*MODULES, *LINEAR, *BARE) if kind not in RARE]
FORMS = ["one", "two", "dict", "nested", "popped", "edited"]
OPTIMIZERS = ["sgd", "sgd", "adamw", "adamw", "lamb", "several"]
"""The last two look at whole tensors."""

WORLDS = [1, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4]
"""Ranks; most draws are small."""


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, ...]:
    is_risky = draw(st.integers(0, 19)) == 0
    kinds = st.sampled_from([*SAFE, *RISKY * 3, *RARE * 2] if is_risky else SAFE)
    forms = st.sampled_from([*FORMS, *FORMS, None, None])
    made = draw(st.lists(st.builds(Block, kind=kinds, form=forms), min_size=1, max_size=6))
    if all(block.form is None for block in made):
        made.append(Block(kind="linear", form="one"))
    return tuple(made)


def list_shapes(world: int) -> list[tuple[int, int, int]]:
    """Pipeline, data, tensor."""
    return [
        (p, d, t)
        for p in range(1, world + 1)
        for d in range(1, world + 1)
        for t in (1, 2)
        if p * d * t == world
    ]


@st.composite
def layouts(draw: st.DrawFn, num_segments: int, is_shared: bool, world: int) -> Layout:
    """Of a model with so many segments; `is_shared`: it has layers that tensor ranks share."""
    shapes = [s for s in list_shapes(world) if is_shared or s[2] == 1]
    pipeline, data, tensor = draw(st.sampled_from(shapes))
    schedule = draw(st.sampled_from([*SCHEDULES, AUTO]))
    per_rank = 1
    if schedule == "interleaved":
        per_rank = draw(st.integers(1, 3))
    elif schedule == "zbv":
        per_rank = 2
    elif schedule == AUTO:
        per_rank = draw(st.integers(1, 2))
    num_stages = pipeline * per_rank
    partition: str | None = str(num_segments)
    if num_stages > 1:
        inner = st.integers(1, num_segments - 1)
        cuts = draw(st.lists(inner, min_size=num_stages - 1, max_size=num_stages - 1))
        ends = [0, *sorted(cuts), num_segments]
        partition = "-".join(str(b - a) for a, b in pairwise(ends))
    if num_stages <= num_segments and draw(st.integers(0, 4)) == 0:
        partition = None
    zero = draw(st.sampled_from([0, 0, 1, 2, 3] if data > 1 else [0, 0, 0, 1, 3]))
    if tensor > 1 and zero == 3 and draw(st.integers(0, 9)):
        zero = 2
    ways = ["none", "full", "selective", "auto"] if zero < 3 else ["none", "full", "selective"]
    ways += ["offload"] if zero < 3 and schedule != "varuna" else []
    recompute = draw(st.sampled_from(ways))
    return Layout(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        schedule=schedule,
        stages_per_rank=per_rank,
        partition=partition,
        recompute=recompute,
        memory_limit=draw(st.sampled_from([8000.0, 1e9])) if recompute == "auto" else None,
        zero=zero,
        offload=draw(st.integers(0, 3)) == 0,
        even=data > 1 and draw(st.booleans()),
        opportunistic=draw(st.booleans()),
        reverse=draw(st.booleans()),
        hang_timeout_s=draw(st.sampled_from([None, None, None, 1000.0])),
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    made = draw(blocks())
    is_shared = any(block.kind in SHARED_BY_RANKS for block in made)
    num_segments = 1 + sum(block.form is not None for block in made)
    worlds = st.sampled_from(WORLDS)
    layout = draw(layouts(num_segments, is_shared, draw(worlds)))
    other = None
    if draw(st.booleans()):
        other = draw(layouts(num_segments, is_shared, draw(worlds)))
    if layout.data > 1 or other is not None:
        made = tuple(
            replace(block, kind="linear") if block.kind in STATEFUL else block for block in made
        )
    chunk = draw(st.integers(1, 3))
    layouts_used = [layout, *([other] if other else [])]
    most_replicas = max(each.data for each in layouts_used)
    batch = draw(st.integers(max(2, most_replicas), 8))
    sizes = [batch] * NUM_STEPS
    if any(each.zero == 3 and each.data > 1 for each in layouts_used):
        if draw(st.integers(0, 9)):  # replicas must have as many micro-batches
            batch = chunk * lcm(*(each.data for each in layouts_used)) * draw(st.integers(1, 2))
            sizes = [batch] * NUM_STEPS
    elif draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, batch), min_size=NUM_STEPS, max_size=NUM_STEPS))
    precision = draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16"]))
    optimizers = [*OPTIMIZERS]
    if other is None and layout.pipeline == layout.tensor == 1 and not layout.zero:
        optimizers += ["lbfgs"]
    if any(each.zero == 3 or each.tensor > 1 for each in layouts_used) and draw(st.integers(0, 9)):
        optimizers = OPTIMIZERS[:4]  # others want whole matrices, which no rank has: refused
    return Spec(
        blocks=made,
        layout=layout,
        other=other,
        tied=draw(st.integers(0, 3)) == 0,
        output=draw(st.sampled_from(["loss", "dict", "tuple", "object"])),
        tokens=draw(st.integers(0, 3)) == 0,
        full_loss=draw(st.booleans()),
        nested=draw(st.integers(0, 3)) == 0,
        by_function=draw(st.integers(0, 3)) == 0,
        hooks=draw(st.sampled_from([None, None, None, None, "before", "after"])),
        precision=precision,
        loss_scale=draw(st.sampled_from([1024.0, "dynamic", 1.0, 32.0])),
        keep=draw(st.booleans()),
        shorter=draw(st.integers(0, 3)) == 0,
        batch_size=batch,
        batches=tuple(sizes),
        chunk_size=chunk,
        clip=draw(st.sampled_from([None, None, 0.3, 100.0])),
        optimizer=draw(st.sampled_from(optimizers)),
        seed=draw(st.integers(0, 3)),
        frozen=draw(st.integers(1, 1 + len(made))) if draw(st.integers(0, 4)) == 0 else 0,
        forks=draw(st.integers(0, 9)) == 0,
    )


def draw_specs(count: int, number: int, first: int = 0) -> list[Spec]:
    """So many draws of this seed, from the `first` on: always the same.

    Each is of a seed of its own, and the second that Hypothesis makes of it: its first one is the
    smallest there is, and later ones are often like those before.
    """
    return [_draw_one(number * 1_000_003 + first + place) for place in range(count)]


def _draw_one(number: int) -> Spec:
    drawn: list[Spec] = []

    @seed(number)
    @settings(
        max_examples=2,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def collect(spec: Spec) -> None:
        drawn.append(spec)

    collect()
    return drawn[-1]


def list_features(spec: Spec) -> Sequence[str]:
    """What a draw has, for the table of what was covered."""
    layout = spec.layout
    found = [f"block {kind}" for kind in sorted({block.kind for block in spec.blocks})]
    found += [f"cut as {form}" for form in sorted({b.form for b in spec.blocks if b.form})]
    found += [f"{spec.precision}", f"{spec.optimizer}", f"returns {spec.output}"]
    found += [f"schedule {layout.schedule}", f"recompute {layout.recompute}"]
    found += [f"zero {layout.zero}", f"world of {layout.world_size}"]
    flags = {
        "pipeline": layout.pipeline > 1,
        "replicas": layout.data > 1,
        "tensor": layout.tensor > 1,
        "several stages a rank": layout.num_stages > layout.pipeline,
        "stages without segments": "0" in (layout.partition or "").split("-"),
        "offload": layout.offload,
        "equal shares": layout.even,
        "tied": spec.tied,
        "mean over tokens": spec.tokens,
        "loss in fp32": spec.full_loss,
        "nested inputs": spec.nested,
        "dummy inputs by function": spec.by_function,
        f"hooks {spec.hooks} Varuna": spec.hooks is not None,
        "modules kept in fp32": bool(spec.list_kept()),
        "samples of several lengths": spec.shorter,
        "clipping": spec.clip is not None,
        "batch not of whole micro-batches": bool(spec.batch_size % spec.chunk_size),
        "batches of several sizes": len(set(spec.batches)) > 1,
        "loaded by another layout": spec.other is not None,
        "two or three values cross": bool(spec.carries),
        "first layers frozen": bool(spec.frozen),
        "a forked child": spec.forks,
    }
    return [*found, *(name for name, has in flags.items() if has)]
