"""A new user's walkthrough of the README on the Slurm lab: `python -m benchmarks.walkthrough`.

`--write` renews benchmarks/results/walkthrough.md; `--fresh` begins where a new user begins: a
clone, a venv, and the README's `pip install`.
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

from benchmarks import RESULTS, ROOT
from benchmarks.machine import read_processor
from benchmarks.walkthrough import parts
from benchmarks.walkthrough.session import Session, Step
from tests.cluster.lab import Lab

RESULT = RESULTS / "walkthrough.md"
INSTALLATION = "Installation"
PARTS = {
    "uniform": "Uniform nodes: the quickstart on Slurm",
    "mixed": "Mixed nodes, which die, come and go",
    "compared": "Both runs, side by side",
    "mistakes": "Mistakes",
    "queue": "In the queue",
    "disk": "A full disk",
}
"""Name of each part, and its heading; in this order."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walkthrough", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="clone, venv, pip install first")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}")
    names = options.parts or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="walkthrough-") as folder:
        session = start_session(Path(folder), fresh=options.fresh)
        if "disk" in names:
            session.part = PARTS["disk"]
            with parts.small_disk(session.folder / "disk") as disk:
                parts.run_disk(session, disk)
        if on_slurm := [name for name in names if name != "disk"]:
            run_on_slurm(session, on_slurm)
    command = f"python -m benchmarks.walkthrough{' --fresh' if options.fresh else ''} --write"
    old = RESULT.read_text() if options.parts and RESULT.exists() else ""
    text = render(command, session.steps, old)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


def start_session(folder: Path, *, fresh: bool) -> Session:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    if fresh:
        steps, vjob = install(folder)
        return Session(folder=folder, env=env, vjob=vjob, steps=steps)
    env["PYTHONPATH"] = str(ROOT)
    return Session(folder=folder, env=env, vjob=(sys.executable, "-m", "vjob"))


def run_on_slurm(session: Session, names: Sequence[str]) -> None:
    """Run parts in the lab that is up, or in a lab started for them."""
    lab = Lab.start()
    session.env = {**session.env, **lab.env}
    try:
        for name in names:
            session.part = PARTS[name]
            if name == "uniform":
                parts.run_uniform(session)
            elif name == "mixed":
                parts.run_mixed(session, lab)
            elif name == "compared":
                parts.run_compared(session)
            elif name == "mistakes":
                parts.run_mistakes(session)
            else:
                parts.run_queue(session, lab)
    finally:
        lab.repair()
        if lab.started_here:
            lab.stop()


def install(folder: Path) -> tuple[list[Step], tuple[str, ...]]:
    """Install as the README says, with the tested versions."""
    pip = f"{folder}/venv/bin/pip install -q -c constraints.txt .[train]"
    clone = folder / "clone"
    steps = []
    for shown, command, where in (
        ("git clone", f"git clone -q {ROOT} {clone}", folder),
        ("python3 -m venv", f"python3 -m venv {folder}/venv", folder),
        ("pip install '.[train]'", pip, clone),
    ):
        start = time.monotonic()
        subprocess.run(command.split(), cwd=where, check=True)
        took_s = time.monotonic() - start
        steps.append(Step(part=INSTALLATION, command=shown, took_s=took_s, saw=""))
    return steps, (f"{folder}/venv/bin/vjob",)


def render(command: str, steps: Sequence[Step], old: str = "") -> str:
    """Render the page; parts that were not run stand as in the `old` one."""
    head = (
        f"# A new user's walkthrough\n\nMade by `{command}`. {os.cpu_count()} cores of "
        f"{read_processor()}, Python {platform.python_version()}. The nodes of the Slurm lab and "
        "whatever else ran shared them: the seconds say which steps are instant and which wait, "
        "no more.\n\nEach command is typed as it stands, beside the confs of "
        "`benchmarks/walkthrough/parts.py`. One that does not print what it should, or prints a "
        "traceback, ends the walkthrough.\n"
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
    """Shorten absolute paths: results name no folders of the machine."""
    words = []
    for word in text.split():
        words.append("..." + word[word.rindex("/") :] if word.count("/") > 2 else word)
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
