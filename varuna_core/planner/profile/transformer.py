"""Estimate a profile from a transformer's sizes and data sheets, without measurements.

```
segment 0      embedding        weights h V, a lookup: memory traffic
segments 1..L  blocks           forward 24 s h^2 (1 + s / 6h) flops a sample, backward twice that
segment L + 1  norm, head, loss 2 s h V flops a sample; logits held in fp32
```

Activations follow Korthikanti et al. (arXiv 2205.05198): a block keeps s h (10 + 24/t + 5 a s / (h
t)) bytes for one sample in half precision; fused attention (`flash`) drops the last term. Products
are s h (4 + 16/t) of these bytes (a gated MLP and fewer keys change 24 and 16). Recomputing the
rest takes a pass over all these bytes and, without fused attention, the scores. Copies to the host
run at PCI Express' rate beside the work. In fp32 (`element_bytes` 4) the flops are those of the
plain cores, and bytes double.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.gpus import LINK_EFFICIENCY, GpuProduct, find_gpu
from varuna_core.planner.profile.profile import (
    Cell,
    GpuProfile,
    LinkKey,
    LinkTime,
    Model,
    Network,
    Profile,
    Tie,
    build_link,
)
from varuna_core.records.training import Llama

LAUNCH_S = 2e-4
"""Seconds to launch a block's kernels, the least time of a block."""
LATENCY_S = {"intra": 2e-5, "inter": 5e-5}


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    feed_forward: int = 0
    """Inner size of the feed-forward part; 0 means 4 x hidden."""
    kv_heads: int = 0
    """Heads of keys and values; 0 means as many as heads."""
    gated: bool = False
    """True if the feed-forward part has three matrices instead of two."""
    head_size: int = 0
    """Size of a head; 0 means hidden / heads."""
    tied: bool = True
    flash: bool = True

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.length, self.vocabulary)
        if min(sizes) < 1:
            raise PlanningError(f"{self.name}: sizes of the model must be 1 or more, not {sizes}")

    @property
    def block_parameters(self) -> int:
        h, f = self.hidden, self.feed_forward or 4 * self.hidden
        q, kv = self.query_width, self.kv_width
        matrices = 2 * h * q + 2 * h * kv + (3 if self.gated else 2) * h * f
        return matrices + (2 * h if self.gated else 7 * h + f + 2 * kv)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size if self.head_size else self.hidden

    @property
    def kv_width(self) -> int:
        return self.query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def product_widths(self) -> float:
        """Bytes a token, over hidden, of a block's products that tensor-parallel ranks divide."""
        inner = (2 if self.gated else 1) * (self.feed_forward or 4 * self.hidden)
        return 2.0 * (2 * self.query_width + 2 * self.kv_width + inner) / self.hidden

    @property
    def shared_widths(self) -> float:
        """Return the total width that tensor-parallel ranks divide: `product_widths`, rotated
        queries and keys, and the inner activations of a gated MLP."""
        inner = (2 if self.gated else 1) * (self.feed_forward or 4 * self.hidden)
        turned = self.query_width + self.kv_width if self.gated else 0
        return self.product_widths + 2.0 * (turned + inner) / self.hidden

    @property
    def block_flops(self) -> float:
        """Floating-point operations of a forward of one sample through one block."""
        matrices = 2.0 * self.length * self.block_parameters
        return matrices + 4.0 * self.length**2 * self.query_width

    @property
    def head_flops(self) -> float:
        return 2.0 * self.length * self.hidden * self.vocabulary

    @property
    def num_segments(self) -> int:
        return self.layers + 2

    def build_model(self, degrees: Iterable[int]) -> Model:
        embedding = self.hidden * self.vocabulary
        parameters = {
            t: (
                embedding // t + (0 if self.gated else self.hidden * self.length),
                *(self.block_parameters // t,) * self.layers,
                embedding // t + 2 * self.hidden,
            )
            for t in degrees
        }
        ties = (Tie(segments=(0, self.layers + 1), parameters=embedding),) if self.tied else ()
        words = (self.layers, self.hidden, self.heads, self.length, self.vocabulary)
        more = (self.feed_forward, self.kv_heads, int(self.gated), int(self.tied), int(self.flash))
        own_heads = (self.head_size,) if self.head_size else ()
        return Model(
            name=self.name,
            digest="transformer " + "-".join(map(str, words + more + own_heads)),
            num_segments=self.num_segments,
            parameters=parameters,
            ties=ties,
        )


def list_parts(llama: Llama | None) -> dict[str, Any]:
    """Return the fields of Transformer that Llama sets; none for GPT-2 and BERT."""
    if llama is None:
        return {}
    return {
        "feed_forward": llama.inner,
        "kv_heads": llama.kv_heads,
        "head_size": llama.head_size,
        "gated": True,
        "tied": llama.tied,
    }


def build_cell(
    model: Transformer, gpu: GpuProduct, micro_batch: int, tensor: int = 1, element_bytes: int = 2
) -> Cell:
    """Estimate times from peak figures and the share of the peak that trainings reach."""
    flops_s = gpu.compute_flops_s(element_bytes)
    memory_s = gpu.memory_gb_s * 1e9 * LINK_EFFICIENCY
    b, s, h, t = micro_batch, model.length, model.hidden, tensor
    act = float(element_bytes) * s * b * h
    # Two sums over the tensor group each way, as a ring.
    shared = 2 * 2 * (t - 1) / t * act / (gpu.link_gb_s * 1e9 * LINK_EFFICIENCY) if t > 1 else 0.0
    block = b * model.block_flops / t / flops_s + shared + LAUNCH_S
    half = b * model.block_flops / t / flops_s + LAUNCH_S
    passes = 3 * 4.0 * b * s * model.vocabulary / t / memory_s
    head = b * model.head_flops / t / flops_s + passes
    embed = 4 * act / memory_s + LAUNCH_S
    scores = 0.0 if model.flash else 5.0 * model.heads * s / (h * t)
    graph = s * b * h * (10 + model.shared_widths / t + scores) * element_bytes / 2
    kept = s * b * h * (4 + model.product_widths / t) * element_bytes / 2
    again = 0.0 if model.flash else 2.0 * b * s**2 * h / t / flops_s
    between = again + (graph + kept) / memory_s + shared + LAUNCH_S
    logits = 4.0 * s * b * model.vocabulary / t
    host_s = gpu.host_gb_s * 1e9 * LINK_EFFICIENCY

    def spread(first: float, middle: float, last: float) -> tuple[float, ...]:
        return (first, *(middle,) * model.layers, last)

    copies = spread(act / host_s, (graph - act) / host_s, (logits + act) / host_s)
    return Cell(
        forward_s=spread(embed, block, head),
        input_grad_s=spread(0.0, half + shared, head),
        weight_grad_s=spread(embed, half, head / 2),
        recompute_s=spread(embed, block, head),
        output_bytes=spread(act, act, 0.0),
        graph_bytes=spread(act, graph, logits + 2 * act),
        work_bytes=spread(act, 4 * act, logits),
        selective_s=spread(embed, between, passes + LAUNCH_S),
        kept_bytes=spread(0.0, kept, logits * element_bytes / 4),
        offload_s=copies,
        load_s=copies,
        source="estimate",
    )


def estimate_optimizer(
    parameters: Sequence[int], gpu: GpuProduct, bytes_each: float = 28
) -> list[float]:
    """Return the seconds in which Adam moves `bytes_each` bytes for each parameter, for each number
    of parameters."""
    memory_s = gpu.memory_gb_s * 1e9 * LINK_EFFICIENCY
    return [count * bytes_each / memory_s for count in parameters]


def estimate_profile(
    model: Transformer,
    gpus: Iterable[str],
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16),
    degrees: Sequence[int] = (1, 2, 4, 8),
    inter_gb_s: float,
    element_bytes: int = 2,
) -> Profile:
    """Estimate a profile for GPUs of the table; `inter_gb_s` is a link between nodes in GB/s."""
    products = {kind: find_gpu(kind) for kind in gpus}
    held = model.build_model(degrees)
    profiles = {
        kind: GpuProfile(
            memory_bytes=gpu.memory_bytes,
            cells={
                (size, t): build_cell(model, gpu, size, t, element_bytes)
                for size in micro_batches
                for t in degrees
            },
            optimizer_s={t: tuple(estimate_optimizer(held.parameters[t], gpu)) for t in degrees},
            optimizer_source="estimate",
            copies_beside=True,
        )
        for kind, gpu in products.items()
    }
    links: dict[LinkKey, LinkTime] = {}
    for a, gpu in products.items():
        rate = gpu.link_gb_s * LINK_EFFICIENCY
        links[a, a, "intra"] = build_link(LATENCY_S["intra"], rate)
        for b in products:
            links[a, b, "inter"] = build_link(LATENCY_S["inter"], inter_gb_s)
    return Profile(
        model=held,
        software={},
        gpus=profiles,
        network=Network(links=links, all_reduces={}),
    )
