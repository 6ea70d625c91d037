"""The models and clusters that the planner is measured on, from published figures.

GPT-2 XL on A100 and A10: forward times of one sample by FASOP's authors (HPDC '24) on one, two and
four GPUs, their backward twice that; links as they give them.
"""

from __future__ import annotations

from dataclasses import replace

from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import MEGATRON
from varuna_core.planner.profile.gpus import find_gpu
from varuna_core.planner.profile.profile import (
    Cell,
    GpuProfile,
    LinkKey,
    LinkTime,
    Network,
    Profile,
    build_link,
)
from varuna_core.planner.profile.transformer import (
    Transformer,
    build_cell,
    estimate_optimizer,
    estimate_profile,
)
from varuna_core.planner.result.plan import ShapePlan, build_plan
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes

GPT2_XL = Transformer(
    name="gpt2-xl",
    layers=48,
    hidden=1600,
    heads=25,
    length=1024,
    vocabulary=50257,
    flash=False,
)
LLAMA_70B = Transformer(
    name="70b-like",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    length=4096,
    vocabulary=32000,
    feed_forward=28672,
    gated=True,
    tied=False,
)

# Milliseconds forward of one sample by tensor degree: embedding, a block, head and loss.
FORWARD_MS = {
    "A100": {1: (0.159, 1.6385, 0.730), 2: (0.571, 1.598, 0.728), 4: (0.750, 1.453, 0.732)},
    "A10": {1: (0.297, 2.342, 2.118), 2: (0.558, 1.645, 2.059), 4: (1.030, 1.747, 2.074)},
}
INTRA_GB_S = {"A100": 1840 / 8, "A10": 128 / 8}
INTER_GB_S = 40 / 8
PRODUCTS = {"A100": "A100-40", "A10": "A10"}
SIZES = (1, 2, 4, 8, 16, 32, 64)


def build_gpt2_profile() -> Profile:
    """As its authors use the figures: time grows with the samples of a micro-batch."""
    degrees = (1, 2, 4)
    model = GPT2_XL.build_model(degrees)
    gpus = {}
    for kind, rows in FORWARD_MS.items():
        product = find_gpu(PRODUCTS[kind])
        cells = {}
        for tensor, (embedding, block, head) in rows.items():
            for size in SIZES:
                shape = build_cell(GPT2_XL, product, size, tensor)
                forward = tuple(
                    size * ms / 1e3 for ms in (embedding, *(block,) * GPT2_XL.layers, head)
                )
                cells[size, tensor] = Cell(
                    forward_s=forward,
                    input_grad_s=forward,
                    weight_grad_s=forward,
                    recompute_s=forward,
                    output_bytes=shape.output_bytes,
                    graph_bytes=shape.graph_bytes,
                    work_bytes=shape.work_bytes,
                )
        gpus[kind] = GpuProfile(
            memory_bytes=product.memory_bytes,
            cells=cells,
            optimizer_s={
                t: tuple(estimate_optimizer(model.parameters[t], product)) for t in degrees
            },
            optimizer_source="estimate",
        )
    links: dict[LinkKey, LinkTime] = {}
    for a in FORWARD_MS:
        links[a, a, "intra"] = build_link(0.0, INTRA_GB_S[a])
        for b in FORWARD_MS:
            links[a, b, "inter"] = build_link(0.0, INTER_GB_S)
    return Profile(
        model=model, software={}, gpus=gpus, network=Network(links=links, all_reduces={})
    )


MIXED_8 = Cluster(
    kinds=(
        NodeKind(name="a100", gpu="A100", gpus=4, count=1),
        NodeKind(name="a10", gpu="A10", gpus=4, count=7),
    )
)
A10_8 = Cluster(kinds=(NodeKind(name="a10", gpu="A10", gpus=4, count=8),))
LARGE_KINDS = ("A100-80", "V100-32", "H100")
LARGE = Cluster(
    kinds=tuple(NodeKind(name=gpu.lower(), gpu=gpu, gpus=8, count=32) for gpu in LARGE_KINDS)
)


def build_large_profile(model: Transformer) -> Profile:
    return estimate_profile(model, LARGE_KINDS, inter_gb_s=25.0)


def predict_seed(
    cluster: Cluster, *, overlap_sends: bool = True, free_messages: bool = False
) -> ShapePlan:
    """GPT-2 XL on 8 nodes of 4 A10, as it was measured at 1.402 s a step with Megatron-LM.

    `free_messages`: what is sent between stages takes no time, which no program can do better.
    """
    wishes = Wishes(
        stages=8,
        replicas=4,
        tensor=1,
        micro_batch=1,
        zero=0,
        schedule="1f1b",
        recompute="none",
        partition=(1, 11, 8, 8, 8, 8, 5, 1),
    )
    training = replace(MEGATRON, batch=64, overlap_sends=overlap_sends)
    profile = build_gpt2_profile()
    if free_messages:
        cells = {
            kind: {
                key: replace(cell, output_bytes=(0.0,) * len(cell.output_bytes))
                for key, cell in gpu.cells.items()
            }
            for kind, gpu in profile.gpus.items()
        }
        gpus = {kind: replace(gpu, cells=cells[kind]) for kind, gpu in profile.gpus.items()}
        profile = replace(profile, gpus=gpus)
    search = Search(profile, training, cluster, wishes)
    return build_plan(search.tables, cluster, search.run().best)
