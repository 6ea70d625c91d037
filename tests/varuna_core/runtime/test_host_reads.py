"""Where a training step waits for the device: each place is listed, and a new one fails.

A GPU works behind the host, and a host that reads a tensor waits until all is done that it gave.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import varuna_core
from varuna_core import Varuna

CORE = Path(varuna_core.__file__).parent
STEP = [CORE / "varuna.py", *(CORE / "runtime").rglob("*.py"), *(CORE / "trace").rglob("*.py")]
READS = {"item", "tolist", "cpu", "numpy", "synchronize"}

NOT_IN_A_STEP = {
    "runtime/saving": "checkpoints",
    "runtime/tensor_parallel/sharding.py": "before the first step, and checkpoints",
    "runtime/comm/links.py:share_first": "before the first step",
    "runtime/comm/memory_channel.py:_hear": "before the first step, by gloo",
    "runtime/given.py:describe_batch": "in the first step alone",
    "runtime/step_trace.py": "before the first step, by gloo",
    "runtime/comm/words.py": "words in host memory, for settings and checkpoints",
    "runtime/optim/optimizers.py": "before the first step, and where a checkpoint is loaded",
}
IN_A_STEP = {
    "runtime/comm/agreement.py:start": "samples, in host memory",
    "runtime/comm/agreement.py:finish": "the one wait of a step: came a signal, do all ranks live. "
    "CUDA's own waits do not end where one is gone",
    "runtime/comm/channel.py:_receive_layout": "a description, in host memory",
    "runtime/comm/channel.py:_is_head_of": "a head, in host memory",
    "runtime/comm/wire.py:send": "ranks that share a GPU: gloo sends from host memory",
    "runtime/comm/wire.py:bring": "the same, in the receiver's thread and on its stream",
    "runtime/engine/adapting.py:agree_on_times": "one step of four, in host memory",
    "runtime/engine/graph_memory.py:agree_on_memory": "once, in host memory",
    "runtime/split/attributes.py:find_stream": "a generator's state, in host memory",
    "runtime/batch/outputs.py": "outputs that the user asked for",
    "runtime/batch/token_means.py:check": "whether `loss_counts` is right, after that wait",
    "runtime/optim/zero.py:compute_most": "ZeRO 3: micro-batches of the others, in host memory",
    "runtime/optim/grads.py:finish": "whether others have a gradient that this rank has not",
    "runtime/optim/precision.py:land_gradients": "masters in host memory (offload)",
    "runtime/optim/precision.py:wait_read": "the same: the GPU has read them long before",
}


def list_reads(path: Path) -> Iterator[str]:
    """`file:function` of each read."""

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef)
            inner = child.name if isinstance(child, ast.FunctionDef) and not name else name
            if isinstance(child, ast.Attribute) and child.attr in READS:
                yield f"{path.relative_to(CORE)}:{name}"
            yield from visit(child, inner if is_function else name)

    yield from visit(ast.parse(path.read_text()), "")


def test_every_read_of_the_device_is_known() -> None:
    known = NOT_IN_A_STEP | IN_A_STEP
    reads = {read for path in STEP for read in list_reads(path)}
    assert sorted(read for read in reads if not read.startswith(tuple(known))) == []
    assert sorted(one for one in known if not any(read.startswith(one) for read in reads)) == []


class Reads(TorchDispatchMode):
    """Counts what `item`, `float`, `int` and `bool` of a tensor end in."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def test_one_rank_reads_nothing() -> None:
    """What the list cannot see: a tensor in an `if`, a `float` of one."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 4)}
    varuna = Varuna(Line(), "0", inputs, 8, 2, recompute="full")
    optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
    varuna.set_optimizer(optimizer)
    varuna.step(inputs)
    with Reads() as reads:
        loss, _ = varuna.step(inputs, clip_grad_max_norm=1.0)
    assert reads.number == 0
    with Reads() as reads:
        float(loss)
    assert reads.number == 1
