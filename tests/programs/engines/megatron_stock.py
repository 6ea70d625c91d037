"""Stock Megatron-LM's pretrain_gpt.py on CPUs, as it is: `pretrain_cpu.py ITS OPTIONS`.

The test puts this file beside `pretrain_gpt.py`. Megatron-LM runs on GPUs alone: only here, its
calls for CUDA mean the CPU, its groups are gloo's, and the helper of its data sets, which it
compiles with `make` at the first start, is the one of megatron-core's wheel.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its fused functions, compiled, find no GPU either

import megatron_imports  # noqa: F401  # which the test puts there too
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.data


def without(function: Callable[..., Any], *names: str, **given: Any) -> Callable[..., Any]:
    """The function without the keyword arguments `names`; `given` replaces the values of others."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name not in names}
        kept |= {
            name: value for name, value in given.items() if name in kwargs or name == "backend"
        }
        return function(*args, **kept)

    return called


class Nothing:
    """A stream or an event: all that is asked of it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: 0.0 if name == "elapsed_time" else None


def make_type(dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor(values)` and its like."""

    def new(cls: type, data: Any = ()) -> torch.Tensor:
        if isinstance(data, int):
            return torch.zeros(data, dtype=dtype)
        return torch.tensor(data, dtype=dtype)

    return type("CudaTensor", (), {"__new__": new})


for maker in ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
    made = without(getattr(torch, maker), "pin_memory", device="cpu")
    setattr(torch, maker, made)
cuda: Any = torch.cuda
cuda.is_available = lambda: True
cuda.current_device = lambda: "cpu"
cuda.device_count = lambda: 1
cuda.get_device_capability = lambda *_: (8, 0)
cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    major=8, minor=0, name="cpu", total_memory=1 << 30, multi_processor_count=1
)
for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "manual_seed",
             "max_memory_reserved", "reset_peak_memory_stats", "empty_cache", "set_device",
             "manual_seed_all", "synchronize"):  # fmt: skip
    setattr(cuda, name, lambda *_, **__: 0)
cuda.memory_stats = lambda *_, **__: dict.fromkeys(
    ("allocated_bytes.all.current", "allocated_bytes.all.peak", "allocation.all.current",
     "num_alloc_retries", "reserved_bytes.all.current"), 0)  # fmt: skip
cuda.Stream = cuda.Event = Nothing
cuda.current_stream = cuda.default_stream = Nothing
cuda.stream = lambda *_: contextlib.nullcontext()
cuda.get_rng_state = lambda *_: torch.get_rng_state()
cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
for name, dtype in {"Float": torch.float32, "Long": torch.int64, "Int": torch.int32,
                    "Half": torch.float16, "BFloat16": torch.bfloat16, "Byte": torch.uint8,
                    "Bool": torch.bool, "Double": torch.float64}.items():  # fmt: skip
    setattr(cuda, f"{name}Tensor", make_type(dtype))
find_type = torch.Tensor.type


def say_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """It asserts that gradients are `torch.cuda.FloatTensor`."""
    found = find_type(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


stays: Any = lambda self, *_, **__: self  # noqa: E731
torch.Tensor.type = say_type  # type: ignore[method-assign]
torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = stays  # type: ignore[method-assign]
dist.init_process_group = without(dist.init_process_group, "device_id", backend="gloo")
dist.new_group = without(dist.new_group, "pg_options", "device_id", backend="gloo")

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))
(helper,) = (file for file in importlib.metadata.files("megatron-core") or ()
             if file.name.startswith("helpers_cpp") and file.suffix == ".so")  # fmt: skip
spec = importlib.util.spec_from_file_location("helpers_cpp", helper.locate())
assert spec is not None and spec.loader is not None
sys.modules["megatron.core.datasets.helpers_cpp"] = compiled = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiled)

from megatron.core.tensor_parallel import random as drawing  # noqa: E402  # after its CUDA is the CPU
from megatron.training import initialize  # noqa: E402


@contextlib.contextmanager
def fork(self: Any, name: str = "") -> Iterator[None]:
    yield


drawing.CudaRNGStatesTracker.fork = fork
for name in ("_compile_dependencies", "set_jit_fusion_options"):
    setattr(initialize, name, lambda *_, **__: None)
torch.set_num_threads(1)
if __name__ == "__main__":
    # Not by runpy: its checkpoint's worker processes import the file of `__main__`, which is this
    # one then, with the CPU for CUDA, and not pretrain_gpt.py as it is.
    script = ROOT / "pretrain_gpt.py"
    sys.argv[0] = str(script)
    exec(compile(script.read_text(), script, "exec"))
