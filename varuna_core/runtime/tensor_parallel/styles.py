"""Parallel styles that torch lacks, for plans of tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ColwiseParallel


class PackedColwise(ColwiseParallel):
    """For a linear layer whose rows are those of several layers, one after the other: query, key
    and value, or the gate of an MLP and its values. Each rank takes its share of each of them.
    """

    def __init__(
        self,
        *,
        parts: int,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.parts = parts

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            dealt = deal_rows(parameter.detach(), self.parts, device_mesh.size())
            module.register_parameter(own, nn.Parameter(dealt, parameter.requires_grad))
        super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[no-untyped-call]

    def _partition_embedding_fn(self, *args: Any) -> None:
        raise ValueError("PackedColwise is for linear layers, not for an embedding")


def deal_rows(tensor: Tensor, parts: int, ranks: int) -> Tensor:
    """The rows in the order of the ranks that get them; those of one rank by part.

    parts = 3, ranks = 2        q q k k v v  ->  q k v | q k v
    """
    if parts == 1:
        return tensor
    if tensor.shape[0] % (parts * ranks):
        raise ValueError(
            f"{tensor.shape[0]} rows of {parts} parts cannot be shared evenly by {ranks} ranks"
        )
    rest = tensor.shape[1:]
    return tensor.reshape(parts, ranks, -1, *rest).transpose(0, 1).reshape(-1, *rest)
