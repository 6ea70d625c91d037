"""Asks for a job that sbatch made, and submits a function into a folder that no node sees."""

import json
import subprocess
import sys

import submitit

import vjob

theirs = subprocess.run(
    ["sbatch", "--parsable", "--partition=all", "--wrap=sleep 30"],
    check=True,
    capture_output=True,
    text=True,
).stdout.strip()
found = {}
try:
    vjob.job(theirs)
except vjob.InputError as error:
    found["theirs"] = str(error)
subprocess.run(["scancel", theirs], check=True)

executor = submitit.AutoExecutor(folder=sys.argv[1], cluster="vjob")
executor.update_parameters(timeout_min=5, vjob_set={"cluster.nodes[0].queue": "all"})
job = executor.submit(max, 1, 2)
found["unseen"] = str(job.exception())
found["state"] = job.state
print(json.dumps(found))
