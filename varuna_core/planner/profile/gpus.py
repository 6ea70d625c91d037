"""List the vendors' figures of GPUs, for estimates if nothing was measured.

The figures are from the vendors' data sheets as of 2024. Half precision is dense, without sparsity,
and sums in fp32; fp32 is that of the plain cores, which torch uses unless a program allows TF32.
Memory is in GB as sold (2^30 bytes). The bandwidths of memory and link are in GB/s, and that of the
link is the rate at which one GPU sends to another of its node. A plan always calls a figure of this
table an estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.records.files import as_whole

EFFICIENCY = 0.45
"""The share of its peak that a GPU reaches in large products; published trainings: 0.3 to 0.6."""
LINK_EFFICIENCY = 0.75
HOST_GB_S = {"NVLink 2": 16, "NVLink 3": 32, "NVLink 4": 64}
"""GB/s between a GPU and the host in one direction, over PCI Express, for products with each
link."""


@dataclass(frozen=True, kw_only=True)
class GpuProduct:
    """Data sheet figures of one GPU product."""

    name: str
    memory_gb: float
    half_tflops: float
    single_tflops: float
    memory_gb_s: float
    link_gb_s: float
    """GB/s to another GPU of the node, one way: NVLink if there is one, else PCI Express."""
    link: str

    def compute_flops_s(self, element_bytes: int) -> float:
        """Return the operations a second that a training reaches, for numbers of this size."""
        peak = self.half_tflops if element_bytes == 2 else self.single_tflops
        return peak * 1e12 * EFFICIENCY

    @property
    def host_gb_s(self) -> float:
        """GB/s to the host's memory, one way."""
        return HOST_GB_S.get(self.link, self.link_gb_s)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 2**30


def _gpu(
    name: str,
    memory_gb: float,
    half_tflops: float,
    single_tflops: float,
    memory_gb_s: float,
    link_gb_s: float,
    link: str,
) -> GpuProduct:
    return GpuProduct(
        name=name,
        memory_gb=memory_gb,
        half_tflops=half_tflops,
        single_tflops=single_tflops,
        memory_gb_s=memory_gb_s,
        link_gb_s=link_gb_s,
        link=link,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40", 40, 312, 19.5, 1555, 300, "NVLink 3"),
        _gpu("A100-80", 80, 312, 19.5, 2039, 300, "NVLink 3"),
        _gpu("H100", 80, 989, 67, 3350, 450, "NVLink 4"),
        _gpu("H100-PCIE", 80, 756, 51, 2000, 64, "PCIe 5"),
        _gpu("H200", 141, 989, 67, 4800, 450, "NVLink 4"),
        _gpu("GH200", 96, 989, 67, 4000, 450, "NVLink 4"),
        _gpu("V100-16", 16, 125, 15.7, 900, 150, "NVLink 2"),
        _gpu("V100-32", 32, 125, 15.7, 900, 150, "NVLink 2"),
        _gpu("A10", 24, 125, 31.2, 600, 32, "PCIe 4"),
        _gpu("A30", 24, 165, 10.3, 933, 32, "PCIe 4"),
        _gpu("A40", 48, 150, 37.4, 696, 32, "PCIe 4"),
        _gpu("A6000", 48, 155, 38.7, 768, 32, "PCIe 4"),
        _gpu("L4", 24, 121, 30.3, 300, 32, "PCIe 4"),
        _gpu("L40S", 48, 362, 91.6, 864, 32, "PCIe 4"),
        _gpu("T4", 16, 65, 8.1, 320, 16, "PCIe 3"),
        _gpu("RTX2080TI", 11, 54, 13.4, 616, 16, "PCIe 3"),
        _gpu("RTX3090", 24, 71, 35.6, 936, 32, "PCIe 4"),
        _gpu("TITANRTX", 24, 130, 16.3, 672, 16, "PCIe 3"),
        _gpu("RTX4090", 24, 165, 82.6, 1008, 32, "PCIe 4"),
    )
}


def find_gpu(name: str) -> GpuProduct:
    """Return the GPU with this name, as we, the driver or a GRES spell it; PlanningError if
    unknown.

    If there are two memory sizes, the name must have one (`A100-SXM4-80GB`, `v100_32gb`).
    """
    found = list_gpus(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise PlanningError(f"GPU {name!r} may be {names}: give the full name")
    raise PlanningError(f"GPU {name!r} is not in the table; known are {', '.join(GPUS)}")


def list_gpus(name: str) -> list[GpuProduct]:
    """Return all products that the name may stand for, smallest memory first."""
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    sizes = {as_whole(word.removesuffix("GB")) for word in words} - {None}
    joined = "".join(words)
    found = []
    for gpu in GPUS.values():
        product, *rest = gpu.name.split("-")
        is_named = product in words or joined.startswith(product + "SXM")
        is_named |= product.startswith("RTX") and product[3:] in words and "RTX" in joined
        if not is_named:
            continue
        if rest and rest[0].isdecimal():
            if not sizes or int(rest[0]) in sizes:
                found.append(gpu)
        elif bool(rest) == ("PCIE" in words):
            found.append(gpu)
    return sorted(found, key=lambda gpu: gpu.memory_bytes)
