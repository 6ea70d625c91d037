"""A draw: a model, a layout, a training. Plain data, which travels and stays in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from varuna_core.runtime.engine.microbatch import compute_first, deal_samples

NUM_STEPS = 3
KEPT = ("layer_norm", "sequential", "conv")
"""Blocks that a draw may keep in fp32."""

CHUNKED = ("dropout", "mlp_dropout", "checked_dropout", "norm", "norm2d", "shared_norm", "extra")
STATEFUL = ("average", "calls", "stream")
"""Blocks that keep something in plain attributes, which no checkpoint has."""

CHUNKED += ("branch", "count", "root_count", "read_count", "foreign", "spectral", *STATEFUL)
"""Blocks whose result depends on the micro-batch that a sample is in."""

SAVED_AFTER = 2
"""Steps before the checkpoint that another layout takes up."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the model."""

    kind: str
    form: str | None = None
    """How values pass the cut before it; None: there is no cut."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the model is trained."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    partition: str | None = None
    """Every segment counted."""

    recompute: str = "none"
    memory_limit: float | None = None
    """With recompute "auto"."""

    zero: int = 0
    offload: bool = False
    even: bool = False
    """Replicas are given equal shares of a full batch, whatever the micro-batches are."""

    opportunistic: bool = True
    reverse: bool = False
    """The stage map names the last rank first."""

    hang_timeout_s: float | None = None

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def num_stages(self) -> int:
        return self.pipeline * (2 if self.schedule == "zbv" else self.stages_per_rank)

    @property
    def stage_map(self) -> str:
        """With `tensor` an entry k stands for the ranks k * tensor and up."""
        numbers = list(range(self.pipeline * self.data))
        numbers = numbers[::-1] if self.reverse else numbers
        rows = [numbers[place * self.data :][: self.data] for place in range(self.pipeline)]
        return "".join(",".join(map(str, row)) + ";" for row in rows)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One draw."""

    blocks: tuple[Block, ...]
    layout: Layout
    other: Layout | None = None
    """The layout that takes up the checkpoint after two steps and takes the third."""

    tied: bool = False
    """The head's weight is the embedding's."""

    output: str = "loss"
    """The model returns: loss, dict, tuple, object."""

    tokens: bool = False
    """The loss is a mean over the tokens that are not masked, else over samples."""

    full_loss: bool = False
    """The loss is computed in fp32 where the model is in half precision."""

    nested: bool = False
    """Inputs lie in a dict within the batch."""

    by_function: bool = False
    """Dummy inputs are a function of the size."""

    hooks: str | None = None
    """Hooks on parameters, made "before" or "after" Varuna."""

    precision: str = "fp32"
    loss_scale: float | str = 1024.0
    keep: bool = False
    """In half precision the blocks of `KEPT` stay in fp32, by name."""

    shorter: bool = False
    """The second step's samples are shorter."""

    batch_size: int = 4
    batches: tuple[int, ...] = (4, 4, 4)
    chunk_size: int = 2
    clip: float | None = None
    optimizer: str = "sgd"
    seed: int = 0
    frozen: int = 0
    """The embedding (1) and so many blocks less one are frozen."""

    forks: bool = False
    """After the first step each rank forks a child, which collects and ends."""

    def list_kept(self) -> list[str]:
        """Modules that stay in fp32."""
        if not self.keep or self.precision == "fp32":
            return []
        kinds = {number: block.kind for number, block in enumerate(self.blocks)}
        return [f"blocks.{number}" for number, kind in kinds.items() if kind in KEPT]

    def has(self, *kinds: str) -> bool:
        return any(block.kind in kinds for block in self.blocks)

    @property
    def num_segments(self) -> int:
        return 1 + sum(block.form is not None for block in self.blocks)

    @property
    def carries(self) -> tuple[str, ...]:
        """Values that cross the cuts beside the main one."""
        found = []
        if self.has("extra"):
            found.append("extra")
        if self.has("skip_start", "skip_alias", "skip_end"):
            found.append("skip")
        return tuple(found)

    @property
    def depends_on_chunks(self) -> bool:
        """The plain model's result on a whole batch is another than on its micro-batches."""
        return self.has(*CHUNKED)

    def list_layouts(self, leg: int) -> list[Layout]:
        """The layout of each step: in the second leg another one takes the last."""
        if not leg or self.other is None:
            return [self.layout] * NUM_STEPS
        return [self.layout] * SAVED_AFTER + [self.other] * (NUM_STEPS - SAVED_AFTER)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A micro-batch of the plain model."""

    replica: int
    begin: int
    stop: int
    place: int = 0
    """Where its random streams say that it begins: a share of the size of an even one is taken for
    that, where it is not the dealt one."""


def deal(spec: Spec, layout: Layout, step: int) -> list[range]:
    """The samples of the step's batch that each replica is given."""
    size = spec.batches[step]
    whole = deal_samples(spec.batch_size, spec.chunk_size, layout.data)
    if layout.even and size == spec.batch_size and size % layout.data == 0:
        each = size // layout.data
        shares = [range(r * each, (r + 1) * each) for r in range(layout.data)]
        if all(len(a) != len(b) or a == b for a, b in zip(shares, whole, strict=True)):
            return shares  # else one would be taken for the dealt one
    return [range(min(held.start, size), min(held.stop, size)) for held in whole]


def list_pieces(spec: Spec, layout: Layout, step: int) -> list[Piece]:
    whole = deal_samples(spec.batch_size, spec.chunk_size, layout.data)
    pieces = []
    for replica, held in enumerate(deal(spec, layout, step)):
        place = replica, layout.data
        first = compute_first(len(held), spec.batch_size, whole[replica], *place, bounded=True)
        for begin in range(held.start, held.stop, spec.chunk_size):
            stop, place_of = min(begin + spec.chunk_size, held.stop), first + begin - held.start
            pieces.append(Piece(replica=replica, begin=begin, stop=stop, place=place_of))
    return pieces


def dump(spec: Spec) -> dict[str, Any]:
    return asdict(spec)


def load(found: Mapping[str, Any]) -> Spec:
    read = dict(found)
    read["blocks"] = tuple(Block(**block) for block in read["blocks"])
    read["batches"] = tuple(read["batches"])
    read["layout"] = Layout(**read["layout"])
    read["other"] = read["other"] and Layout(**read["other"])
    return Spec(**read)


def show(spec: Spec) -> str:
    """As a test writes it: what is not as by default."""
    return _show(spec)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(_show(item) + ", " for item in value).rstrip(" ") + ")"
    if not isinstance(value, (Spec, Layout, Block)):
        return repr(value)
    plain = type(value)(**_needed(value))
    parts = [
        f"{field.name}={_show(getattr(value, field.name))}"
        for field in fields(value)
        if field.name in _needed(value) or getattr(value, field.name) != getattr(plain, field.name)
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _needed(value: Any) -> dict[str, Any]:
    names = {"Spec": ("blocks", "layout"), "Layout": (), "Block": ("kind",)}[type(value).__name__]
    return {name: getattr(value, name) for name in names}
