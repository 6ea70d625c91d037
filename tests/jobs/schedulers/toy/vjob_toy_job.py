"""The table, and the process of one job: `python vjob_toy_job.py RUN SCRIPT LOG [LIMIT_S]`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def find_folder() -> Path:
    return Path(os.environ["TOY_TABLE"])


def read(job: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads((find_folder() / f"{job}.json").read_text())
    except FileNotFoundError:
        return {}
    return row


def write(job: str, row: dict[str, Any]) -> None:
    part = find_folder() / f".{job}.part"
    part.write_text(json.dumps(row))
    part.rename(part.with_name(f"{job}.json"))


def submit(run: str, script: str, log: str, limit_s: float | None) -> str:
    """Start the job in a process of its own, which looks after the batch script."""
    find_folder().mkdir(exist_ok=True)
    job = f"T{len(list(find_folder().glob('*.json'))) + 1}"
    row = {"run": run, "state": "busy", "start": time.time(), "limit_s": limit_s}
    pid = os.fork()
    if pid:
        write(job, {**row, "pid": pid})
        return job
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    while not read(job):
        time.sleep(0.01)
    child = subprocess.Popen(["bash", script], env={**os.environ, "TOY_JOB": job})
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, lambda number, frame: child.send_signal(number))
    asked = ""
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        asked = "late"
        child.terminate()
        code = child.wait()
    row = read(job)
    state = asked or row.get("asked") or ("fine" if code == 0 else "broken")
    write(job, {**row, "state": state, "code": code})
    os._exit(0)


if __name__ == "__main__":
    more = sys.argv[4:]
    print(submit(*sys.argv[1:4], float(more[0]) if more else None))
