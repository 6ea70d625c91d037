"""DeepSpeed's PipelineEngine on CPU: `deepspeed_pipeline.py STEPS [uneven]`.

Arguments that a launcher adds are ignored. It cuts by the number of weights; with `uneven` the last
two of the eight layers have as many as the other six.
"""

import itertools
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule

steps = int(next(word for word in sys.argv[1:] if word.isdigit()))
widths = [32] * 7 + [96 if "uneven" in sys.argv else 32, 32]
torch.set_num_threads(1)
# Its sums through shared memory are compiled on first use, which takes minutes: gloo has them.
vars(deepspeed.ops)["__compatible_ops__"] = {}
deepspeed.init_distributed("gloo")
torch.manual_seed(3)


def measure(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


layers = [LayerSpec(torch.nn.Linear, a, b) for a, b in itertools.pairwise(widths)]
net = PipelineModule(layers, num_stages=2, loss_fn=measure)
engine, *_ = deepspeed.initialize(
    model=net,
    model_parameters=list(net.parameters()),
    config={
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    },
)
batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
batches = iter(lambda: (batch, batch), None)
print("layers", len(net.forward_funcs), flush=True)
for _ in range(steps):
    loss = engine.train_batch(batches)
    print("loss", float(loss).hex(), flush=True)
dist.barrier()
dist.destroy_process_group()
