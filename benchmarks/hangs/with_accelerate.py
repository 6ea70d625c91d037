"""A training by Hugging Face's Accelerate with the faults of faults.py."""

import functools

import faults
import torch
from accelerate import Accelerator

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
model = faults.build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
begun = max((int(path.name) for path in faults.SAVED.glob("*")), default=0)
if begun:
    accelerator.load_state(str(faults.SAVED / f"{begun:03}"))
for step, sample in enumerate(faults.build_loader(begun), begun + 1):
    faults.strike(step, functools.partial(accelerator.unwrap_model(model), sample))
    optimizer.zero_grad()
    loss = (model(sample) - sample).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    faults.tell(step, loss)
    if step % 10 == 0:
        accelerator.save_state(str(faults.SAVED / f"{step:03}"))
accelerator.end_training()
