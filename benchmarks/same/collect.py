"""Outputs of one checkout on the inputs: texts and JSON values by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.same.inputs import Case, find_run, start_runs

CLOCK = Path(__file__).parent / "clock"
SLURM = {
    "sbatch": "echo 4711",
    "squeue": "exit 0",
    "sinfo": "exit 0",
    "scancel": "exit 0",
    "scontrol": """case "$*" in
ping) echo "Slurmctld(primary) at here is UP";;
*"show job"*) [ -z "${SAME_STATE:-}" ] || echo "JobId=4711 JobState=$SAME_STATE \
Reason=${SAME_REASON:-None} NodeList=local[0-1] ExitCode=${SAME_CODE:-1:0} Restarts=0 \
StartTime=$SAME_START RunTime=00:01:00 TimeLimit=00:05:00";;
esac""",
    "sacct": "exit 0",
}
RUN_S = 60
"""Since the job of the stand-ins started, as `RunTime` says."""
PYTHON = re.compile(r"(PYTHONPATH=\S+ )?\S*(?:PYTHON|python)\S* (-m vjob|\S*/vjob/__main__\.py)")
LIVE = {"SAME_CLOCK": ""}
"""With the clock running: pandas does not load over a datetime that is not Python's own."""
OF_THE_MOMENT = {
    "age_s", "pid", "pid_start", "took_s", "seconds", "cpu_percent", "memory_used_mb", "search_s",
    "memory_total_mb",
}  # fmt: skip
"""Keys whose values are of this moment on this machine."""
SECRETS = re.compile(r'("secret": )"\w+"')
OF_A_SUBMIT = ("resolved.yaml", "plan.json", "record.json", "training.json", "machines.json")


class Command:
    """`vjob` of one checkout, in `folder`, with a state of its own."""

    def __init__(self, checkout: Path, place: Path, clock: float | None) -> None:
        self.checkout, self.place = checkout, place
        tools = place / "bin"
        tools.mkdir(exist_ok=True)
        for name, body in SLURM.items():
            (tools / name).write_text(f"#!/bin/sh\n{body}\n")
            (tools / name).chmod(0o755)
        self.env = {
            **{name: os.environ[name] for name in ("HOME", "LANG", "TZ") if name in os.environ},
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": f"{CLOCK}:{checkout}",
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }
        if clock is not None:
            self.env["SAME_CLOCK"] = str(clock)
            start = time.localtime(clock - RUN_S)
            self.env["SAME_START"] = time.strftime("%Y-%m-%dT%H:%M:%S", start)

    def __call__(self, *words: str, folder: Path, env: Mapping[str, str] | None = None) -> str:
        shutil.rmtree(self.place / "state/vjob/scheduler", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-m", "vjob", *words],
            cwd=folder,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return self.tidy(f"{done.stdout}{done.stderr}exit code {done.returncode}\n")

    def tidy(self, text: str) -> str:
        """The text without the path of the checkout and the Python that runs it."""
        text = text.replace(sys.executable, "PYTHON").replace(str(self.checkout), "CHECKOUT")
        text = PYTHON.sub("VJOB", text)
        return SECRETS.sub(r'\1"SECRET"', text)


def read_value(text: str) -> Any:
    """The JSON document at the start of an output, with the text after it; else the text."""
    try:
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return text
    return {"document": mask(value), "after": text.lstrip()[end:].strip()}


def mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: 0 if key in OF_THE_MOMENT else mask(one) for key, one in value.items()}
    return [mask(one) for one in value] if isinstance(value, list) else value


def collect_submits(vjob: Command, folder: Path) -> dict[str, Any]:
    """What a submit of each conf prints and writes; Slurm's commands accept anything."""
    found: dict[str, Any] = {}
    for conf in sorted(folder.glob("*.yaml")):
        name = f"submit/{conf.stem}"
        found[f"{name}/said"] = vjob("submit", conf.name, "--dry-run", folder=folder)
        found[f"{name}/dry"] = read_value(
            vjob("submit", conf.name, "--dry-run", "--json", folder=folder)
        )
        if "machines" in conf.stem:  # a real submit would start it
            continue
        vjob("submit", conf.name, "--set", "cluster.scheduler=slurm", folder=folder)
        for path in sorted(folder.glob("log/*/*")):
            if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
                continue
            if path.name in OF_A_SUBMIT or path.suffix == ".sh":
                text = vjob.tidy(path.read_text())
                is_json = path.suffix == ".json"
                found[f"{name}/{path.name}"] = read_value(text) if is_json else text
        shutil.rmtree(folder / "log", ignore_errors=True)
    return found


def collect_plans(vjob: Command, folder: Path) -> dict[str, Any]:
    found = {}
    for name, words in {
        "auto": (),
        "slow-link": ("--link", "1.25"),
        "told": ("--set", "parallel.pipeline=4", "--set", "parallel.data=1"),
    }.items():
        words = ("plan", "planned.yaml", "--limit", "60", *words)
        found[f"plan/{name}/said"] = vjob(*words, folder=folder)
        found[f"plan/{name}"] = read_value(vjob(*words, "--json", folder=folder))
    return found


def collect_runs(vjob: Command, folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """`status` and `report` of each run folder, and the record that `status` leaves."""
    found: dict[str, Any] = {}
    for case in cases:
        run = folder / case.folder
        record = run / "record.json"
        kept = record.read_text()
        found[f"status/{case.name}"] = read_value(
            vjob("status", str(run), "--json", folder=folder, env=case.slurm)
        )
        found[f"record/{case.name}"] = read_value(vjob.tidy(record.read_text()))
        record.write_text(kept)
        if "/" not in case.name:
            found[f"status/{case.name}/said"] = vjob("status", str(run), folder=folder)
            record.write_text(kept)
            page = str(folder / "page.html")
            said = vjob("report", str(run), "--text", "-o", page, folder=folder, env=LIVE)
            found[f"report/{case.name}/text"] = said
            shown = vjob("report", str(run), "--json", folder=folder, env=LIVE)
            found[f"report/{case.name}/json"] = read_value(shown)
    return found


def collect_live(vjob: Command, folder: Path) -> dict[str, Any]:
    """Records, outcomes and exits of runs made by this checkout, and a `try`, without numbers."""
    found: dict[str, Any] = {}
    for name in start_runs(lambda *words: vjob(*words, folder=folder), folder):
        run = find_run(folder, name)
        for path in (run / "record.json", *sorted(run.glob("attempt-0/*/*.json"))):
            if path.name == "hanging.json":  # of a slow moment
                continue
            if path.parent.name in ("exit", "state") or path.parent == run:
                text = vjob.tidy(path.read_text()).replace(run.name, name)
                found[f"live/{name}/{path.name}"] = without_numbers(json.loads(text))
    said = vjob("try", "ok.yaml", "--json", folder=folder)
    tried = read_value(said)["document"]
    tried["rows"] = [row["name"] for row in tried["rows"]]  # the rest is as fast as the machine is
    found["live/try"] = without_numbers(tried)
    return found


def without_numbers(value: Any, key: str = "") -> Any:
    """With every float, and all numbers in texts, as 0: they differ between two runs."""
    if isinstance(value, dict):
        return {name: without_numbers(one, name) for name, one in value.items()}
    if isinstance(value, list):
        if key == "exits":  # in the order in which the ranks ended
            value = sorted(value, key=lambda one: one["rank"])
        return [without_numbers(one, key) for one in value]
    if isinstance(value, float) or key in ("pid", "pid_start", "port", "steps"):
        return 0
    return re.sub(r"\d+(\.\d+)?", "0", value) if isinstance(value, str) else value
