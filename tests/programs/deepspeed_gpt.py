"""The DeepSpeed example as a test program; prints the settings DeepSpeed took from the conf."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
from deepspeed import comm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from train_deepspeed import parse_arguments, train  # the path comes first


def main() -> None:
    args = parse_arguments()
    # Its sums through shared memory are compiled on first use, which takes minutes: gloo has them.
    vars(deepspeed.ops)["__compatible_ops__"] = {}
    engine, losses = train(args)
    said = {
        "rank": comm.get_rank(),
        "world": comm.get_world_size(),
        "local_rank": args.local_rank,
        "stage": engine.zero_optimization_stage(),
        "batch": engine.train_batch_size(),
        "bucket": engine.zero_reduce_bucket_size(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "losses": losses,
    }
    print(json.dumps(said), flush=True)
    comm.destroy_process_group()
    sys.stderr.flush()
    # On a busy machine the interpreter's own end met a thread of gloo's that was not done yet.
    os._exit(0)


if __name__ == "__main__":
    main()
