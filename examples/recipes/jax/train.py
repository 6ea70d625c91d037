"""Trains a tiny network in JAX with the samples divided among all processes."""

import argparse
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step, to watch it")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the losses")
args = parser.parse_args()

if "SLURM_JOB_ID" in os.environ:
    jax.distributed.initialize()  # JAX reads Slurm's variables itself
else:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
rank, world = jax.process_index(), jax.process_count()
args.out.mkdir(parents=True, exist_ok=True)
losses = open(args.out / f"rank{rank}.jsonl", "w", buffering=1)
print(json.dumps({"rank": rank, "world": world}), file=losses)

mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))


def compute_loss(weights, batch):
    hidden = jnp.tanh(batch @ weights["in"])
    return jnp.mean((hidden @ weights["out"] - jnp.sin(batch).sum(1, keepdims=True)) ** 2)


@jax.jit
def train(weights, batch):
    loss, slopes = jax.value_and_grad(compute_loss)(weights, batch)
    return jax.tree.map(lambda weight, slope: weight - 0.05 * slope, weights, slopes), loss


draw = np.random.default_rng(0)
shapes = {"in": (8, 32), "out": (32, 1)}
weights = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
own = np.random.default_rng(1 + rank)
for step in range(1, args.steps + 1):
    batch = own.normal(size=(16, 8)).astype(np.float32)
    weights, loss = train(weights, jax.make_array_from_process_local_data(split, batch))
    time.sleep(args.pause)
    print(json.dumps({"step": step, "loss": float(loss), "at": time.time()}), file=losses)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}/{args.steps} loss {float(loss):.4f}", flush=True)
jax.distributed.shutdown()
