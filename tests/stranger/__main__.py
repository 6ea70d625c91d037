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
    parts = options.parts or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        walk = start_walk(Path(folder), fresh=options.fresh)
        if "disk" in parts:
            walk.part = PARTS["disk"]
            with paths.small_disk(walk.folder / "disk") as disk:
                paths.walk_disk(walk, disk)
        if on_slurm := [part for part in parts if part != "disk"]:
            walk_slurm(walk, on_slurm)
    command = f"python -m tests.stranger{' --fresh' if options.fresh else ''} --write"
    old = RESULT.read_text() if options.parts and RESULT.exists() else ""
    text = render(command, walk.steps, old)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


def start_walk(folder: Path, *, fresh: bool) -> Walk:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    if fresh:
        steps, vjob = install(folder)
        return Walk(folder=folder, env=env, vjob=vjob, steps=steps)
    env["PYTHONPATH"] = str(ROOT)
    return Walk(folder=folder, env=env, vjob=(sys.executable, "-m", "vjob"))


def walk_slurm(walk: Walk, parts: Sequence[str]) -> None:
    """In the lab that is up, or in one of its own."""
    lab = Lab.start()
    walk.env = {**walk.env, **lab.env}
    try:
        for part in parts:
            walk.part = PARTS[part]
            if part == "uniform":
                paths.walk_uniform(walk)
            elif part == "mixed":
                paths.walk_mixed(walk, lab)
            elif part == "compared":
                paths.walk_compared(walk)
            elif part == "astray":
                paths.walk_astray(walk)
            else:
                paths.walk_queue(walk, lab)
    finally:
        lab.repair()
        if lab.started_here:
            lab.stop()


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
