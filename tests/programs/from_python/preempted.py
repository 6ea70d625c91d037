"""A count that is preempted by another job and goes on where it was."""

import json
import os
import subprocess
import time
from pathlib import Path

import submitit


class Count(submitit.helpers.Checkpointable):
    def __init__(self) -> None:
        self.done = 0
        self.starts: list[int] = []

    def __call__(self, goal: int, mark: str) -> tuple[int, list[int]]:
        self.starts.append(self.done)
        Path(mark).write_text(str(self.starts))
        while self.done < goal:
            time.sleep(0.25)
            self.done += 1
        return self.done, self.starts


executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    timeout_min=10,
    nodes=2,
    vjob_set={"cluster.nodes[0].queue": "low", "cluster.grace_s": 4},
)
mark = Path("mark").absolute()
job = executor.submit(Count(), 60, str(mark))
while not mark.exists():
    time.sleep(0.2)
time.sleep(3)
# Another user's job that needs every node.
script = "#!/bin/sh\nsleep 3\n"
subprocess.run(
    ["sbatch", "--nodes=6", "--exclusive", "--partition=all"],
    input=script, text=True, check=True, capture_output=True, env=os.environ,
)  # fmt: skip
results = job.results()
while job.record.state != "ended":  # results are there before the job is over
    job.get_info(mode="force")
    time.sleep(0.5)
print(
    json.dumps(
        {
            "results": results,
            "attempts": len(job.run.attempts()),
            "state": job.state,
            "restarts": job.status().as_dict()["scheduler"]["jobs"],
        }
    )
)
