"""Walks the path on the Slurm lab and tells each step: `python -m tests.stranger --write`.

`--fresh` begins where a stranger begins: a clone, a venv, and the README's `pip install`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import read_processor
from tests.cluster.lab import Lab
from tests.command import ROOT
from tests.stranger import paths
from tests.stranger.walk import Step, Walk

RESULT = ROOT / "benchmarks/results/stranger.md"
PARTS = ("uniform", "mixed", "astray", "queue", "disk")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stranger", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="clone, venv, pip install first")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}")
    lab = Lab.start()
    try:
        with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
            steps = walk_all(Path(folder), lab, options.parts or PARTS, fresh=options.fresh)
    finally:
        lab.repair()
        if lab.started_here:
            lab.stop()
    words = ["python -m tests.stranger", *(["--fresh"] if options.fresh else []), *options.parts]
    text = render(" ".join([*words, "--write"]), steps)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


def walk_all(folder: Path, lab: Lab, parts: Sequence[str], *, fresh: bool) -> list[Step]:
    steps: list[Step] = []
    env = {**os.environ, **lab.env, "XDG_STATE_HOME": str(folder / "state")}
    vjob: tuple[str, ...] = (sys.executable, "-m", "jobs")
    if fresh:
        steps, vjob = install(folder)
    else:
        env["PYTHONPATH"] = str(ROOT)
    walk = Walk(folder=folder, env=env, vjob=vjob, steps=steps)
    for part in parts:
        print(f"-- {part}", flush=True)
        if part == "disk":
            with paths.small_disk(folder / "disk") as disk:
                paths.walk_disk(walk, disk)
        elif part in ("mixed", "queue"):
            {"mixed": paths.walk_mixed, "queue": paths.walk_queue}[part](walk, lab)
        else:
            {"uniform": paths.walk_uniform, "astray": paths.walk_astray}[part](walk)
    return walk.steps


def install(folder: Path) -> tuple[list[Step], tuple[str, ...]]:
    """As the README says, with the versions that are tested."""
    pip = f"{folder}/venv/bin/pip install -q -c constraints.txt .[train,report]"
    clone = folder / "clone"
    steps = []
    for shown, command, where in (
        ("git clone", f"git clone -q {ROOT} {clone}", folder),
        ("python3 -m venv", f"python3 -m venv {folder}/venv", folder),
        ("pip install '.[train,report]'", pip, clone),
    ):
        start = time.monotonic()
        subprocess.run(command.split(), cwd=where, check=True)
        took_s = time.monotonic() - start
        steps.append(Step(part="installation", command=shown, took_s=took_s, saw=""))
    return steps, (f"{folder}/venv/bin/vjob",)


def render(command: str, steps: Sequence[Step]) -> str:
    cores = os.cpu_count()
    lines = [
        "# A stranger's path",
        "",
        f"Made by `{command}`. {cores} cores of {read_processor()}, Python "
        f"{platform.python_version()}; the Slurm lab's nodes all share them, and so do others: "
        "seconds say which steps are instant and which wait, no more.",
        "",
        "Each step is typed as it stands, in the folder of the confs (`tests/stranger/confs.py`). "
        "A step that does not print what it should, or prints a traceback, ends the walk.",
    ]
    part = ""
    for step in steps:
        if step.part != part:
            part = step.part
            lines += ["", f"## {part.capitalize()}", "| typed | s | seen |", "|---|---|---|"]
        saw = hide_paths(step.saw).replace("|", "\\|")[:160]
        lines.append(f"| `{step.command.strip('`')}` | {step.took_s:.1f} | {saw} |")
    total_s = sum(step.took_s for step in steps)
    lines += ["", f"{len(steps)} steps, {total_s:.0f} s."]
    return "\n".join(lines) + "\n"


def hide_paths(text: str) -> str:
    """Results name no folders of the machine."""
    words = []
    for word in text.split():
        words.append("..." + word[word.rindex("/") :] if word.count("/") > 2 else word)
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
