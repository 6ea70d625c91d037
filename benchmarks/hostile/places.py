"""A clock that steps, and a mount that becomes read-only, in a run, in status and in report.

The layer of faults.c is loaded by every process of a mount namespace (ld.so.preload): the
environments of the supervisor, the agents and the ranks of a local run are clean.
"""

from __future__ import annotations

import errno
import json
import mmap
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_STEPS, STEP_S, HOUR_S = 60, 0.25, 3600
TRAIN = f"""import sys, time
begin = time.monotonic()
for step in range(1, {NUM_STEPS} + 1):
    time.sleep({STEP_S})
    print(f"step {{step}}/{NUM_STEPS} loss {{3 / step:.3f}}", flush=True)
open(sys.argv[1], "a").write(f"{{time.monotonic() - begin}}\\n")
"""
CONF = """name: tiny
program: {script: train.py, args: [TRUTH]}
cluster: {scheduler: local, nodes: {ranks: 2}, walltime_min: 5}
"""
PLACES = {
    "the clock steps back an hour": -HOUR_S,
    "the clock steps forward an hour": HOUR_S,
    "the mount of the run folder becomes read-only": 0,
}
FIGURES = ("duration_s", "step_s", "goodput")
WRONG = ("STALLED", "HUNG", "SLOW", "no sign of life", "Traceback")
MOST_LATE_S = 15
"""Seconds between the ranks' end and the run's, on a busy machine."""
FORMAT = "7q4096s"
"""The layout of struct fault in faults.c."""


class Control:
    """The file of struct fault, which every process of the namespace has mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.held = mmap.mmap(file.fileno(), struct.calcsize(FORMAT))
        self.zero = time.time() - time.monotonic()

    def set(self, *, by: int = 0, in_s: float = 0.0, below: Path | None = None) -> None:
        """Let clocks step by so many seconds in so many, or what is below a folder be read-only."""
        kinds = 0 if below is None else 4 | 32 | 64 | 128
        at = int(self.zero + time.monotonic() + in_s)
        fields = (kinds, errno.EROFS, 1, 1 << 60, 0, at, by, str(below or "").encode())
        struct.pack_into(FORMAT, self.held, 0, *fields)


def start(folder: Path, words: Sequence[str], env: dict[str, str]) -> int:
    """Run a command where every process loads the layer; its exit code."""
    library, control, etc = folder / "places.so", folder / "control", folder / "etc"
    control.write_bytes(bytes(struct.calcsize(FORMAT)))
    source = Path(__file__).with_name("faults.c")
    options = ["-shared", "-fPIC", "-O1", f'-DCONTROL="{control}"']
    subprocess.run(["cc", *options, "-o", library, source], check=True)
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    (etc / "ld.so.preload").write_text(f"{library}\n")
    script = 'mount --bind "$0" /etc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(etc), *words]
    return subprocess.run(command, env=env, check=False).returncode


def call(here: Path, *words: str) -> str:
    command = [sys.executable, "-m", "vjob", *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def read_headline(here: Path, run: str) -> dict[str, Any]:
    found, _ = json.JSONDecoder().raw_decode(call(here, "report", run, "--json"))
    headline: dict[str, Any] = found["headline"]
    return headline


def measure(top: Path) -> list[list[str]]:
    """A row for each place: what was said while the run went on and of its end, its figures, and
    what of that is wrong."""
    here, control = top / "here", Control(top / "control")
    (here / "train.py").write_text(TRAIN)
    rows = []
    for place, by in PLACES.items():
        truth = here / "truth"
        truth.write_text("")
        (here / "conf.yaml").write_text(CONF.replace("TRUTH", str(truth)))
        control.set()
        call(here, "submit", "conf.yaml")
        run = (here / "log/tiny").resolve()
        while "step 20/" not in "".join(p.read_text() for p in run.glob("attempt-0/*.out")):
            time.sleep(STEP_S)
        control.set(by=by, below=None if by else run)
        said = [call(here, "status", run.name, "--once")]
        while len(truth.read_text().splitlines()) < 2:
            said.append(call(here, "status", run.name, "--once"))
        while not any(word in said[-1].partition("\n")[0] for word in ("DONE", "DEAD")):
            time.sleep(1)
            said.append(call(here, "status", run.name, "--once"))
        states = dict.fromkeys(text.splitlines()[0].split(None, 1)[-1] for text in said)
        if not by:
            said.append(call(here, "report", run.name, "--text"))
            said.append(call(here, "share", run.name, "--private"))
        before = read_headline(here, run.name)
        control.set(by=by + HOUR_S, in_s=1.0)
        others = [read_headline(here, run.name) for _ in range(2)]
        said.append(call(here, "status", run.name, "--once"))
        real_s = max(map(float, truth.read_text().split()))
        wrong = judge(real_s, said, before)
        wrong += [] if [before] * 2 == others else ["a report differs while the clock steps"]
        figures = [show(before[name]) for name in FIGURES]
        end = before["state"]
        rows.append([place, ", ".join(states), end, f"{real_s:.1f}", *figures, "; ".join(wrong)])
        print(*rows[-1], sep=" | ", flush=True)
        print(*said[-3:], sep="\n", flush=True)
    return rows


def judge(real_s: float, texts: Sequence[str], headline: dict[str, Any]) -> list[str]:
    wrong = [word for word in WRONG if any(word in text for text in texts)]
    took, step_s = (headline[name].get("value") for name in FIGURES[:2])
    if took is not None and not real_s <= took < real_s + MOST_LATE_S:
        wrong.append("the duration")
    if step_s is not None and not STEP_S * 0.9 < step_s < STEP_S * 1.5:
        wrong.append("the pace")
    return wrong


def show(figure: dict[str, Any]) -> str:
    if "not_known" in figure:
        return f"not known: {figure['not_known']}"
    return " to ".join(f"{figure[name]:.3g}" for name in ("value", "low", "high") if name in figure)
