"""Lines that the tests of some rooms run, at this commit and at an earlier one.

    python -m benchmarks.suite.covered --before ca59e047 [--write]

Each commit's tests run its own code, in a clone, under coverage.py and this Python: the rooms whose
tests run in pytest's own process, for coverage.py sees no more. ca59e047 is the last commit before
tests were made shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import RESULTS, ROOT

RESULT = RESULTS / "covered.md"
ROOMS = {
    "jobs/conf": ("tests/jobs/conf",),
    "varuna_core/checkpoint": ("tests/varuna_core/checkpoint",),
    "varuna_core/planner": ("tests/varuna_core/planner",),
    "varuna_core/records": ("tests/varuna_core/records",),
    "varuna_core/schedule": (
        "tests/varuna_core/schedule",
        "tests/varuna_core/morph/test_machine.py",
    ),
}
"""With the tests that are run. Each room's lines are counted for the tests of all."""


def clone(commit: str, folder: Path) -> str:
    """The commit's short name."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)
    words = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def measure(folder: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """What pytest said at its end, and of each room the lines and those of them that ran."""
    tests = [one for each in ROOMS.values() for one in each if (folder / one).exists()]
    data = folder / "covered.data"
    long = ["-m", "not long"] if "\n    long:" in (folder / "setup.cfg").read_text() else []
    sources = ",".join([*ROOMS, "vjob/jobs/conf"])
    words = [sys.executable, "-m", "coverage", "run", f"--source={sources}", f"--data-file={data}"]
    words += ["-m", "pytest", "-q", "-p", "no:cacheprovider", *long, *tests]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    end = (done.stdout.strip() or done.stderr).splitlines()[-1]
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run: {end}")
    report = [sys.executable, "-m", "coverage", "json", "-q", "--data-file", str(data), "-o", "-"]
    printed = subprocess.run(
        report, cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    found = dict.fromkeys(ROOMS, (0, 0))
    for name, one in json.loads(printed.stdout)["files"].items():
        (room,) = [room for room in ROOMS if name.removeprefix("vjob/").startswith(f"{room}/")]
        lines, ran = found[room]
        summary = one["summary"]
        found[room] = lines + summary["num_statements"], ran + summary["covered_lines"]
    return end, found


def render(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> str:
    def show(lines: int, ran: int) -> str:
        return f"{ran / lines:.1%} of {lines}" if lines else "none"

    rows = [f"| {room} | {show(*before[room])} | {show(*now[room])} |" for room in ROOMS]
    return "\n".join(["| room | before | now |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        places = Path(name, "before"), Path(name, "now")
        commits = [clone(one, to) for one, to in zip((options.before, "HEAD"), places, strict=True)]
        (end_before, before), (end_now, now) = map(measure, places)
    command = f"python -m benchmarks.suite.covered --before {options.before} --write"
    text = (
        f"Made by `{command}`. Python {platform.python_version()}, coverage {version('coverage')}. "
        f"Before is {commits[0]} ({end_before}), now {commits[1]} ({end_now}).\n\n"
        f"{render(before, now)}"
    )
    print(text)
    if options.write:
        RESULT.write_text(f"# Lines that tests run, before and now\n\n{text}\n")


if __name__ == "__main__":
    main()
