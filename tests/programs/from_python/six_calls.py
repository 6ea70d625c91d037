"""Submits six calls as a Slurm array of which two run at once, and one job for each het job."""

import json
import logging
import time

import submitit

import vjob


def span(x: int, y: int) -> tuple[int, float, float]:
    begin = time.time()
    time.sleep(1.5)
    return x * y, begin, time.time()


logging.basicConfig(level=logging.WARNING)
executor = submitit.AutoExecutor(folder="log", cluster="vjob")
executor.update_parameters(
    name="six",
    timeout_min=3,
    vjob_array_parallelism=2,
    vjob_set={"cluster.nodes[0].queue": "gpu2", "cluster.grace_s": 3},
)
jobs = executor.map_array(span, range(6), [10] * 6)
spans = [job.result() for job in jobs]
found = {
    "ids": [job.job_id for job in jobs],
    "products": [product for product, _, _ in spans],
    "most": max(sum(b <= begin < e for _, b, e in spans) for _, begin, _ in spans),
    "states": [vjob.job(job.job_id).record.state for job in jobs],
}
executor.update_parameters(
    vjob_conf={
        "name": "pairs",
        "program": "pretrain_gpt",
        "cluster": {
            "nodes": [{"group": "weak", "queue": "gpu2"}, {"group": "strong", "queue": "gpu1"}]
        },
    }
)
with executor.batch():
    pairs = [executor.submit(span, number, 1) for number in range(2)]
found["pairs"] = [[product for product, _, _ in job.results()] for job in pairs]
found["pair ids"] = [job.job_id for job in pairs]
print(json.dumps(found))
