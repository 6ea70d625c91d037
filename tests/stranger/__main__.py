"""Walks the path on the Slurm lab and tells each step: `python -m tests.stranger --write`.

`--fresh` begins where a stranger begins: a clone, a venv, and the README's `pip install`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
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
INSTALLATION = "Installation"
PARTS = {
    "uniform": "Uniform nodes: the quickstart on Slurm",
    "mixed": "Mixed nodes, which die, come and go",
    "compared": "Both runs, side by side",
    "astray": "Astray",
    "queue": "In the queue",
    "disk": "A full disk",
}
"""The word for a part, and its heading; in this order."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stranger", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="clone, venv, pip install first")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}")
    lab = Lab.start()
    try:
        with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
            steps = walk_all(Path(folder), lab, options.parts or list(PARTS), fresh=options.fresh)
    finally:
        lab.repair()
        if lab.started_here:
            lab.stop()
    words = ["python -m tests.stranger", *(["--fresh"] if options.fresh else []), *options.parts]
    old = RESULT.read_text() if options.write and options.parts and RESULT.exists() else ""
    text = render(" ".join([*words, "--write"]), steps, old)
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
        walk.part = PARTS[part]
        walk_part(walk, part, lab)
    return walk.steps


def walk_part(walk: Walk, part: str, lab: Lab) -> None:
    if part == "uniform":
        paths.walk_uniform(walk)
    elif part == "mixed":
        paths.walk_mixed(walk, lab)
    elif part == "compared":
        paths.walk_compared(walk)
    elif part == "astray":
        paths.walk_astray(walk)
    elif part == "queue":
        paths.walk_queue(walk, lab)
    else:
        with paths.small_disk(walk.folder / "disk") as disk:
            paths.walk_disk(walk, disk)


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
        steps.append(Step(part=INSTALLATION, command=shown, took_s=took_s, saw=""))
    return steps, (f"{folder}/venv/bin/vjob",)


def render(command: str, steps: Sequence[Step], old: str = "") -> str:
    """The page; parts that were not walked stand as in the `old` one."""
    head = (
        f"# A stranger's path\n\nMade by `{command}`. {os.cpu_count()} cores of "
        f"{read_processor()}, Python {platform.python_version()}. The nodes of the Slurm lab and "
        "whatever else ran shared them: the seconds say which steps are instant and which wait, "
        "no more.\n\nEach command is typed as it stands, beside the confs of "
        "`tests/stranger/confs.py`. One that does not print what it should, or prints a "
        "traceback, ends the walk.\n"
    )
    found = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", old, re.MULTILINE)
    sections = {title: text.strip("\n") for title, text in found}
    for part in {step.part for step in steps}:
        rows = [show_row(step) for step in steps if step.part == part]
        sections[part] = "\n".join(["| typed | s | seen |", "|---|---|---|", *rows])
    order = [title for title in (INSTALLATION, *PARTS.values()) if title in sections]
    return "\n".join([head, *(f"## {title}\n{sections[title]}\n" for title in order)])


def show_row(step: Step) -> str:
    saw = hide_paths(step.saw).replace("|", "\\|")[:160]
    return f"| {step.command} | {step.took_s:.1f} | {saw} |"


def hide_paths(text: str) -> str:
    """Results name no folders of the machine."""
    words = []
    for word in text.split():
        words.append("..." + word[word.rindex("/") :] if word.count("/") > 2 else word)
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
