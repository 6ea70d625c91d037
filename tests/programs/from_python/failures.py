"""A rank that raises, and a rank that is killed with -9 before it has a result."""

import json
import os
import signal
import sys
import time

import submitit


def fail() -> None:
    env = submitit.JobEnvironment()
    if env.global_rank == 3:
        raise ValueError("the learning rate is -1")
    time.sleep(60)


def die() -> None:
    if submitit.JobEnvironment().global_rank == 1:
        sys.stderr.write("about to go\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    timeout_min=3,
    nodes=2,
    tasks_per_node=2,
    vjob_set={"cluster.nodes[0].queue": "gpu2", "cluster.grace_s": 2},
)
found = {}
for function in (fail, die):
    job = executor.submit(function)
    problem = job.exception()
    found[function.__name__] = {
        "kind": type(problem).__name__,
        "text": str(problem),
        "hosts": job.record.outcome and job.record.outcome.culprit_node,
        "state": job.state,
        "own": str(job.task(0).exception()),
    }
    try:
        job.results()
    except submitit.core.utils.UncompletedJobError as error:
        found[function.__name__]["raised"] = str(error) == str(problem)
print(json.dumps(found))
