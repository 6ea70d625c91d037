"""Runs a function on every rank of a het job; each returns its rank and host."""

import json
import os

import submitit


def look(mark: str) -> dict[str, object]:
    env = submitit.JobEnvironment()
    print("hello from", env.global_rank)
    return {
        "mark": mark,
        "rank": env.global_rank,
        "local_rank": env.local_rank,
        "node": env.node,
        "host": os.environ["VJOB_NODE"],
        "world": env.num_tasks,
        "nodes": env.num_nodes,
        "hosts": list(env.hostnames),
        "job": env.job_id,
        "MASTER_ADDR": os.environ["MASTER_ADDR"],
        "RANK": os.environ["RANK"],
    }


executor = submitit.AutoExecutor(folder="log/%j", cluster="vjob")
executor.update_parameters(
    name="het",
    timeout_min=5,
    vjob_conf={
        "name": "base",
        "program": "pretrain_gpt",
        "cluster": {
            "nodes": [
                {"group": "weak", "count": 2, "queue": "gpu2", "ranks": 2},
                {"group": "strong", "count": 1, "queue": "gpu1", "ranks": 3},
            ]
        },
    },
    vjob_set={"cluster.grace_s": 3},
)
job = executor.submit(look, mark="m")
print(json.dumps({"job": job.job_id, "folder": str(job.folder), "results": job.results()}))
