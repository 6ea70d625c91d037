"""Finds a run that the command line submitted, and submits one for the command line to see."""

import json
import sys

import vjob

word, script = sys.argv[1:]
job = vjob.job(word)
job.wait()
mine = vjob.submit(
    {
        "name": "mine",
        "program": {"script": script},
        "cluster": {"nodes": [{"group": "all", "count": 1, "queue": "gpu2"}]},
    },
    after=job,
)
mine.wait()
print(
    json.dumps(
        {
            "name": job.name,
            "state": job.state,
            "health": job.status().verdict.health.value,
            "logs": job.logs(rank=0),
            "mine": mine.name,
            "same": vjob.job(mine.name).folder == mine.folder,
            "runs": [one.name for one in vjob.runs()],
            "bad": [one for one in (vjob.runs(1)[0].exception(),) if one],
        }
    )
)
