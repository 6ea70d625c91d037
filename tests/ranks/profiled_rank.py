"""DDP over gloo under torch.profiler, which writes into TRACES or the folder of the traces."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from varuna_core import trace

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=tensorboard_trace_handler(
        os.environ.get("TRACES") or trace.get_folder(),
        use_gzip=sys.argv[1:] == ["gzip"] and dist.get_rank() == 1,
    ),
) as profiler:
    for number in range(7):
        print(f"step {number + 1}/7 loss 1.0", flush=True)
        optimizer.zero_grad()
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
        profiler.step()
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads end badly now and then after a profile (torch 2.13)
