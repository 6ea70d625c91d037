"""Cancels a job that runs, one that can checkpoint, and one that has yet to begin."""

import json
import time
from pathlib import Path

import submitit


class Count(submitit.helpers.Checkpointable):
    def __init__(self) -> None:
        self.done = 0

    def __call__(self, mark: str) -> int:
        while True:
            time.sleep(0.1)
            self.done += 1
            Path(mark).write_text("begun")


def wait(mark: str) -> None:
    Path(mark).write_text("begun")
    time.sleep(120)


executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    timeout_min=3, vjob_set={"cluster.nodes[0].queue": "gpu2", "cluster.grace_s": 2}
)
found = {}
for name, function in (("plain", wait), ("saves", Count())):
    job = executor.submit(function, str(Path(name).absolute()))
    while not Path(name).exists():
        time.sleep(0.2)
    job.cancel()
    problem = job.exception()
    found[name] = {"state": job.state, "text": str(problem), "message": job.record.message}
saved = job.submission()
found["count"] = saved.function.done
executor.update_parameters(nodes=4, vjob_set={"cluster.nodes[0].queue": "gpu2"})
first, waits = (executor.submit(time.sleep, 60) for _ in range(2))
waits.cancel()
first.cancel(now=True)
waits.wait()
first.wait()
found["waiting"] = {"state": waits.state, "message": waits.record.message}
print(json.dumps(found))
