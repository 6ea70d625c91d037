"""One rank of a traced training, for tests: `traced_rank <folder> <rank> <world size>`."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models import small as models
from varuna_core import Varuna
from varuna_core.records.logs.trace import TraceWriter

STEPS = 4
STAGE_MAPS = {1: "0;", 2: "0;1;", 4: "0,1;2,3;"}


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    batch = models.make_inputs(16, models.LENGTH, seed=1)
    stages = [field.split(",") for field in STAGE_MAPS[world].rstrip(";").split(";")]
    stage, replica = next(
        (stage, ranks.index(str(rank))) for stage, ranks in enumerate(stages) if str(rank) in ranks
    )
    (folder / "trace").mkdir(exist_ok=True)
    path = folder / "trace" / f"{rank}.jsonl"
    trace = TraceWriter(path, rank, stages=[stage], replica=replica, log_every=1)
    varuna = Varuna(
        models.Gpt(), STAGE_MAPS[world], batch, 16, 2, device="cpu", schedule="1f1b", trace=trace
    )
    optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
    varuna.set_optimizer(optimizer)
    own = {name: value[varuna.samples.start : varuna.samples.stop] for name, value in batch.items()}
    took = []
    for step in range(1, STEPS + 1):
        outer = time.perf_counter()
        trace.begin_step(step)
        inner = time.perf_counter()
        varuna.step(own)
        with trace.span("optimizer"):
            optimizer.step()
            varuna.zero_grad()
        inner = time.perf_counter() - inner
        trace.end_step()
        took.append((inner, time.perf_counter() - outer))
    (folder / f"took.{rank}.json").write_text(json.dumps(took))
    varuna.close()
    trace.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
