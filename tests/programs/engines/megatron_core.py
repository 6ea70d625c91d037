"""megatron-core's GPT and its own 1F1B: `megatron_core.py STEPS [LAYOUT]`, the layout as
`--pipeline-model-parallel-layout` has it.

megatron-core asks for CUDA where it makes tensors and draws numbers. Only here, for a test without
a GPU, those calls mean the CPU.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


for maker in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, maker, on_cpu(getattr(torch, maker)))
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]

from megatron.core import parallel_state  # noqa: E402  # after its CUDA is the CPU
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import random as drawing  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


@contextlib.contextmanager
def fork(self: Any, name: str = "") -> Iterator[None]:
    yield


drawing.CudaRNGStatesTracker.fork = fork
steps, layout = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
torch.set_num_threads(1)
dist.init_process_group("gloo")
pipeline = dist.get_world_size()
parallel_state.initialize_model_parallel(1, pipeline)
config = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    use_cpu_initialization=True,
    perform_initialization=False,
    pipeline_dtype=torch.float32,
    pipeline_model_parallel_size=pipeline,
    pipeline_model_parallel_layout=layout,
    batch_p2p_comm=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=64,
    max_sequence_length=16,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=False,
)
# The same weights, however many stages: each layer is filled by its number in the whole model.
for name, weight in model.named_parameters():
    parts = name.split(".")
    number = 0
    if "layers" in parts:
        place = int(parts[parts.index("layers") + 1])
        number = model.decoder.layers[place].layer_number
        parts[parts.index("layers") + 1] = "-"
    seed = sum(map(ord, "".join(parts))) * 100 + number
    with torch.no_grad():
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.copy_(1 + 0.02 * drawn if "norm" in name and "bias" not in name else 0.02 * drawn)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
POSITIONS = torch.arange(16)[None].expand(2, -1)
MASK = torch.triu(torch.ones(16, 16), 1).bool()[None, None]


def step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(batch[:, :-1], POSITIONS, MASK, labels=batch[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def draw() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, 64, (2, 17), generator=generator)


batches, run = draw(), get_forward_backward_func()
for number in range(steps):
    losses = run(
        forward_step_func=step,
        data_iterator=batches,
        model=model,
        num_microbatches=4,
        seq_length=16,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        mean = sum(float(one["loss"]) for one in losses) / len(losses)
        print(f"step {number + 1}/{steps} loss {mean!r}", flush=True)
dist.barrier()
dist.destroy_process_group()
