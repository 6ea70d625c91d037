"""Watches a hundred jobs that wait, and counts the questions to Slurm."""

import json
import time
from pathlib import Path

import submitit

from vjob.jobs.api.job import VjobJob

executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    timeout_min=1,
    vjob_array_parallelism=1,
    vjob_set={"cluster.nodes[0].queue": "gpu2", "cluster.sbatch.begin": "now+1hour"},
)
jobs = executor.map_array(time.sleep, [1] * 100)
calls = Path("calls")
calls.write_text("")
before = VjobJob.watcher.num_calls
deadline = time.monotonic() + 12
while time.monotonic() < deadline:
    assert not any(job.done() for job in jobs)
    states = [job.state for job in jobs]
    time.sleep(0.2)
found = {
    "states": states,
    "calls": calls.read_text().split(),
    "intervals": VjobJob.watcher.num_calls - before,
}
for job in jobs:
    job.cancel(check=False)
print(json.dumps(found))
