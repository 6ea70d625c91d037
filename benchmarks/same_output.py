"""Compares what two checkouts make of the same inputs, to show that a move changed nothing.

    python -m benchmarks.same_output OTHER_CHECKOUT [--runs LOG_FOLDER]

For each checkout, with its own `vjob` command: a submit of every example, with Slurm's commands
replaced by stand-ins that accept anything (so scripts, plan and resolved conf are written, and
nothing runs); `vjob status --json`, `vjob report --text` and its tables as CSV, of every run folder
and every bare log folder in LOG_FOLDER. Times of day, versions of import names and paths of the
checkout are put aside; every other difference is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

from benchmarks import ROOT

SLURM = {
    "sbatch": "echo 4711",
    "squeue": "exit 0",
    "sinfo": "exit 0",
    "scontrol": 'case "$1" in ping) echo "Slurmctld(primary) at here is UP";; esac',
    "sacct": "exit 0",
}
ASIDE = (
    (r"\d{8}-\d{6}", "DATE"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?", "TIME"),
    # Times of day, ages, and what else is of the moment on this machine.
    (
        r'"(\w*_age|age|now|submitted|pid|pid_start|free_bytes|free_inodes)": "?[-\d.e+]+"?',
        r'"\1": 0',
    ),
    (r'"time": 1\d{9}\.\d+', '"time": 0'),
    # What the import names and the start of vjob itself were before and are now.
    (r"-m varuna_core\.(programs\.)?pretrain", "-m PRETRAIN"),
    (r'"varuna_core\.(programs\.)?pretrain"', '"PRETRAIN"'),
    (r"(PYTHONPATH=\S+ )?(\S*python\S*) (-m jobs|\S*/vjob/__main__\.py)", r"\2 VJOB"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "other", type=Path, help="the other checkout, such as a worktree of a commit"
    )
    parser.add_argument("--runs", type=Path, help="a log folder with run folders in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for number, checkout in enumerate((options.other.resolve(), ROOT)):
            place = Path(folder) / str(number)
            place.mkdir()
            made.append(collect(checkout, place, options.runs))
    differences = 0
    for name in sorted(made[0].keys() | made[1].keys()):
        before, after = (texts.get(name, "(not there)\n") for texts in made)
        if before != after:
            differences += 1
            show(name, before.splitlines(), after.splitlines())
    print(f"{len(made[0])} and {len(made[1])} texts compared, {differences} differ")
    return 1 if differences or not made[0] else 0


def show(name: str, before: list[str], after: list[str]) -> None:
    """The first lines that differ; difflib takes hours on a page with data in it."""
    print(f"--- {name}: {len(before)} and {len(after)} lines")
    pairs = [(a, b) for a, b in zip_longest(before, after, fillvalue="") if a != b]
    for one, two in pairs[:8]:
        print(f"-{one[:160]}\n+{two[:160]}")


def sort_keys(text: str) -> str:
    """JSON with its keys in order, a value a line; what follows it stays."""
    value, end = json.JSONDecoder().raw_decode(text)
    return json.dumps(value, indent=1, sort_keys=True) + text[end:]


def collect(checkout: Path, place: Path, runs: Path | None) -> dict[str, str]:
    """Every text that this checkout makes, by name."""
    tools = place / "bin"
    tools.mkdir()
    for name, body in SLURM.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    work = place / "work"
    shutil.copytree(ROOT / "examples", work)
    (work / "train.py").touch()
    vjob = Command(checkout, place, work, f"{tools}:{os.environ['PATH']}")
    found = {}
    for conf in sorted(work.glob("*.yaml")):
        for words in ([], ["--set", "cluster.hetero=split"], ["--set", "cluster.scheduler=slurm"]):
            title = "/".join(["submit", conf.stem, *words[1:]])
            found[f"{title}/said"] = vjob("submit", conf.name, *words, "--dry-run")
            vjob("submit", conf.name, *words, *([] if "scheduler" in str(words) else ["--dry-run"]))
        for path in sorted(work.glob("log/*/*")):
            if (
                path.is_file()
                and not path.parent.is_symlink()
                and path.suffix not in (".pyz", ".lock")
            ):
                found[f"{title}/{path.name}"] = vjob.tidy(path.read_text())
        shutil.rmtree(work / "log", ignore_errors=True)
    for run in sorted(runs.iterdir()) if runs else ():
        if run.is_symlink() or not run.is_dir():
            continue
        found[f"status/{run.name}"] = sort_keys(vjob("status", str(run), "--json"))
        tables = place / f"tables-{run.name}"
        page = str(place / "page.html")
        found[f"report/{run.name}"] = vjob("report", str(run), "--text", "-o", page) + vjob(
            "report", str(run), "--export", "csv", "-o", str(tables)
        )
        for path in sorted(tables.glob("*.csv")):
            found[f"report/{run.name}/{path.name}"] = vjob.tidy(path.read_text())
    return found


class Command:
    """`vjob` of one checkout, in a folder and with a state of its own."""

    def __init__(self, checkout: Path, place: Path, work: Path, path: str) -> None:
        self.module = "vjob" if (checkout / "vjob").is_dir() else "jobs"
        self.place, self.work, self.checkout = place, work, checkout
        self.env = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(checkout),
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "COLUMNS": "100",
        }

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", self.module, *words],
            cwd=self.work,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        return self.tidy(f"{done.stdout}{done.stderr}exit code {done.returncode}\n")

    def tidy(self, text: str) -> str:
        """Without what the place and the moment add."""
        text = text.replace(str(self.place), "PLACE").replace(str(self.checkout), "CHECKOUT")
        for pattern, put in ASIDE:
            text = re.sub(pattern, put, text)
        return text


if __name__ == "__main__":
    sys.exit(main())
