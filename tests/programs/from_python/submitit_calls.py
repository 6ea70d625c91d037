"""A script of submitit's, run unchanged but for the cluster; its functions are its own.

Prints what came of its calls.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import submitit


class Fit(submitit.helpers.Checkpointable):
    """Stages that are each done once, whatever interrupts them; the model goes into a file."""

    def __init__(self) -> None:
        self.data: list[int] | None = None
        self.scale: float | None = None
        self.stage = "0"

    def __call__(self, size: int, model_path: Path) -> float:
        print(f"starting from stage '{self.stage}'", flush=True)
        if self.data is None:
            self.stage = "load"
            self.data = list(range(size))
        if self.scale is None:
            self.stage = "scale"
            Path(f"{model_path}.scaling").touch()
            time.sleep(0 if Path(f"{model_path}.interrupted").exists() else 100)
            self.scale = 0.5
        self.stage = "fit"
        with open(model_path, "wb") as file:
            pickle.dump(self.scale * sum(self.data), file)
        return self.scale

    def checkpoint(self, *args: Any, **kwargs: Any) -> submitit.helpers.DelayedSubmission:
        print(f"checkpoint at stage '{self.stage}'", flush=True)
        Path(f"{args[1] if len(args) > 1 else kwargs['model_path']}.interrupted").touch()
        return super().checkpoint(*args, **kwargs)


def meet() -> tuple[str, float]:
    import torch

    environment = submitit.helpers.TorchDistributedEnvironment().export()
    torch.distributed.init_process_group(backend="gloo")
    total = torch.tensor(float(environment.rank))
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return submitit.JobEnvironment().hostname, float(total)


def product(x: int, y: int) -> int:
    return x * y


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def inverse(x: int) -> float:
    return 1 / x


def twice(mark: str) -> int:
    with open(mark, "a") as file:
        file.write("called\n")
    calls = Path(mark).read_text().count("called")
    time.sleep(100 if calls == 1 else 0)
    return calls


found: dict[str, Any] = {}
queue = {"cluster.nodes[0].queue": "all"}

# Torch over two nodes, and tasks.
executor = submitit.AutoExecutor(folder="log/%j", cluster="vjob", slurm_max_num_timeout=3)
executor.update_parameters(
    name="meeting", timeout_min=5, nodes=2, tasks_per_node=2, slurm_partition="dev", vjob_set=queue
)
job = executor.submit(meet)
found["tasks"] = job.num_tasks
found["meeting"] = job.results()
found["meeting, task 3"] = job.task(3).result()
found["nodes"] = job.get_info()["NodeList"]

# Arrays.
executor = submitit.AutoExecutor(folder="log/%j", cluster="vjob")
executor.update_parameters(timeout_min=5, vjob_array_parallelism=2, vjob_set=queue)
jobs = executor.map_array(product, [1, 2, 3], [10, 20, 30])
found["ids"] = [job.job_id for job in jobs]
with executor.batch():
    batch = [executor.submit(product, number, y=7) for number in range(2)]
found["as completed"] = sorted(
    job.result() for job in submitit.helpers.as_completed([*jobs, *batch], poll_frequency=0.5)
)

# Errors, and a state that is watched.
bad = executor.submit(inverse, 0)
long = executor.submit(sleep, 300)
try:
    bad.result()
except submitit.core.utils.FailedJobError as error:
    found["error"] = str(error)
submitit.helpers.monitor_jobs([bad, *jobs], poll_frequency=1, test_mode=True)
while long.state != "RUNNING":
    time.sleep(0.2)
found["done"] = long.done()
long.cancel()
found["cancelled"] = long.state

# Checkpoints.
model = Path("model.pkl").absolute()
job = executor.submit(Fit(), 5, model_path=model)
while job.state != "RUNNING" or not Path(f"{model}.scaling").exists():
    time.sleep(0.2)
job._interrupt()
found["fit"] = asyncio.run(job.awaitable().result())
found["model"] = pickle.loads(model.read_bytes())
found["said"] = [line for line in job.stdout().splitlines() if "stage" in line]

# A preemption, of a function that has no checkpoint().
low = {"cluster.nodes[0].queue": "low", "cluster.grace_s": 3}
executor.update_parameters(vjob_set=low)
mark = Path("mark").absolute()
job = executor.submit(twice, str(mark))
while not mark.exists():
    time.sleep(0.2)
words = ["srun", f"--nodelist={job.get_info()['NodeList']}", "--exclusive", "--partition=all"]
subprocess.run([*words, "true"], check=True, capture_output=True)
found["twice"] = job.result()

print(json.dumps(found))
