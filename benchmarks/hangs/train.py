"""A training by gloo with the faults of faults.py; KIND is ddp, loop (sums of our own) or fsdp2."""

import functools
import os
from typing import Any

import faults
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


def main() -> None:
    faults.strike_early("join")
    dist.init_process_group("gloo")
    faults.strike_early("load")
    module = faults.build_model()
    path, begun = faults.SAVED.with_suffix(".pt"), 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        begun = saved["step"]
    model: Any = module
    if faults.KIND == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(module)
    if faults.KIND == "fsdp2":
        fully_shard(module[0])
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, sample in enumerate(faults.build_loader(begun), begun + 1):
        # FSDP's forward is a collective of all ranks.
        alone = faults.build_model() if faults.KIND == "fsdp2" else module
        faults.strike(step, functools.partial(alone, sample))
        optimizer.zero_grad()
        loss = (model(sample) - sample).pow(2).mean()
        loss.backward()
        if faults.KIND == "loop":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        faults.tell(step, loss)
        if step % 10 == 0:
            whole = state_dict.get_model_state_dict(module, options=WHOLE)
            if faults.RANK == 0:
                torch.save({"model": whole, "step": step}, f"{path}.part")
                os.replace(f"{path}.part", path)
    if faults.RANK == 0 and faults.KIND != "fsdp2":
        faults.tell_end(module)
    dist.barrier()


main()
