"""Submits a conf of the layout that is named, and watches it to its end."""

import json
import sys
from pathlib import Path

import vjob

layout, script = sys.argv[1:]
GROUPS = {
    "plain": [{"group": "all", "count": 2, "queue": "gpu2", "ranks": 2}],
    "mixed": [
        {"group": "weak", "count": 2, "queue": "gpu2", "gpus": "a10:4", "ranks": 2},
        {"group": "strong", "count": 1, "queue": "gpu1", "gpus": "a100:4", "ranks": 1},
    ],
}
conf = {
    "name": layout,
    "program": {"script": Path(script)},
    "cluster": {
        "scheduler": "slurm",
        "hetero": "split" if layout == "split" else "auto",
        "walltime_min": 5,
        "join_s": 60,
        "lost_s": 15,
        "nodes": GROUPS["plain" if layout == "plain" else "mixed"],
    },
}
job = vjob.submit(
    conf, set={"cluster.grace_s": 3}, env={"NOTE": "from Python"}, name=f"py-{layout}"
)
lines: list[str] = []
code = job.follow(lines.append)
job.wait()
status = job.status()
print(
    json.dumps(
        {
            "folder": str(job.folder),
            "job": job.job_id,
            "jobs": len(job.record.jobs),
            "code": code,
            "lines": len(lines),
            "state": job.state,
            "results": job.results(),
            "health": status.verdict.health.value,
            "world": status.as_dict()["world"],
            "rank 0 said": job.task(0).stdout(),
            "rank 1 said": job.task(1).stdout(),
            "grace_s": job.conf.cluster.grace_s,
        }
    )
)
