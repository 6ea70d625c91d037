# %% [markdown]
# vjob from Python: a conf, a function on every rank, an array, and what they leave.
# Run it as it is (`python examples/from_python.py`) or cell by cell in an editor or notebook.
# It uses this machine; on a cluster leave "scheduler" out and name your queue.

# %% A conf is a path, a dict, or what vjob.load returned.
import time
from pathlib import Path

import submitit

import vjob

HERE = {"cluster.scheduler": "local"}
conf = {
    "name": "demo",
    "program": "pretrain_gpt",
    "model": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 64, "vocab": 512},
    "data": {"synthetic": True},
    "train": {"steps": 12, "global_batch_size": 8, "micro_batch_size": 2, "log_every": 2},
    "parallel": {"pipeline": 2, "partition": "2-2"},
    "cluster": {"walltime_min": 5, "nodes": [{"group": "all", "count": 2}]},
}
job = vjob.submit(conf, set={**HERE, "train.optimizer.lr": 1e-3})
print(job.name, "is job", job.job_id, "in", job.folder)

# %% Its lines as they come, its state with the evidence, its report.
job.follow()
status = job.status()
print(status.verdict.health.value, "-", status.verdict.reason)
points = status.as_dict()["progress"]["points"]
print("losses", [point["loss"] for point in points if point["loss"] is not None])

# %% Every table of the report as a DataFrame (docs/notebook.md).
print(job.tables.steps[["step", "begin", "took_s"]].tail(3))

# %% A function on every rank, as submitit does it; here two unlike groups of nodes.


def whoami(mark: str) -> str:
    env = submitit.JobEnvironment()
    return f"{mark}: rank {env.global_rank} of {env.num_tasks}, node {env.node}"


executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    timeout_min=2,
    vjob_conf={
        "name": "groups",
        "program": "pretrain_gpt",
        "cluster": {"nodes": [{"group": "small", "ranks": 1}, {"group": "big", "ranks": 3}]},
    },
    vjob_set=HERE,
)
print(executor.submit(whoami, "hello").results())

# %% Many calls: an array on Slurm, one job each here.
executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(timeout_min=2, name="square", vjob_array_parallelism=2, vjob_set=HERE)
jobs = executor.map_array(lambda number: number**2, [1, 2, 3])
print([one.result() for one in jobs])

# %% A failure names rank and host, and carries the function's own traceback.


def fails() -> None:
    raise ValueError("no such corpus")


problem = executor.submit(fails).exception()
print(problem)


# %% A function that can checkpoint is called before the end, and goes on where it was.
class Count(submitit.helpers.Checkpointable):
    def __init__(self) -> None:
        self.done = 0

    def __call__(self, goal: int, mark: str) -> tuple[int, int]:
        begun = self.done
        while self.done < goal:
            time.sleep(0.05)
            self.done += 1
            if self.done == 10:
                Path(mark).touch()
        return begun, self.done


mark = Path("log/counting").absolute()
counting = executor.submit(Count(), 100, str(mark))
while not mark.exists():
    time.sleep(0.1)
counting._interrupt()  # as Slurm does before it preempts
begun, done = counting.result()
print(f"began the second time at {begun}, and came to {done}")

# %% Runs are found again, by the command line too: `vjob status demo`.
print([one.name for one in vjob.runs(3)], vjob.job("demo").record.verdict)
