"""What others see of one run whose conf, arguments, setup and code hold secrets.

A dry run is left out: it shows the owner, on a screen of their own, what would be written.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.secrets.corpus import Shape, draw_shapes

LEAST_LEFT = 12
PLACES = ("env", "args", "setup", "code", "comment")
TRAIN = """
import pathlib
ours = pathlib.Path(__file__).name
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes().split(b"\\0")
    except OSError:
        continue
    if not any(word.endswith(ours.encode()) for word in words):
        with open("out/processes", "ab") as file:
            file.write(b" ".join(words) + b"\\n")
print("step 1/1 loss 2.0")
"""
API = """
import vjob
job = vjob.job("last")
print(repr(job), job.status(), repr(job.record), vjob.runs())
try:
    vjob.load("conf.yaml", set={"train.nothing": 1})
except vjob.VjobError as error:
    print(repr(error), error)
"""
Words = tuple[str, ...]
COMMANDS: dict[str, Words] = {
    "status": ("status", "last", "--once"),
    "status --json": ("status", "last", "--once", "--json"),
    "list --json": ("list", "--json"),
    "report --text": ("report", "last", "--text"),
    "report --json": ("report", "last", "--json"),
    "page of a report": ("report", "last", "-o", "out/page.html"),
    "tables of a report": ("report", "last", "--export", "csv", "-o", "out/tables"),
    "page of a comparison": ("compare", "last", "last", "-o", "out/compare.html"),
    "share --show-what": ("share", "last", "--group", "{group}", "--show-what", "--json"),
    "files that share opened": ("share", "last", "--group", "{group}"),
    "doctor": ("doctor",),
    "archive of doctor --report": ("doctor", "--report"),
    "refusal of a conf": ("submit", "conf.yaml", "--set", "train.nothing=1"),
}


def measure(seed: int) -> list[tuple[str, int, int, list[str]]]:
    """(artefact, its bytes, secrets in the run, names of those that it shows) of each."""
    with tempfile.TemporaryDirectory(prefix="vjob-") as folder:
        here = Path(folder)
        (here / "out").mkdir()
        shapes = {
            (place, shape.name): shape
            for number, place in enumerate(PLACES)
            for shape in draw_shapes(1000 * seed + number)
            if shape.artefact == "conf" and "X_VALUE" in shape.text
        }
        write_run(here, shapes)
        vjob = [sys.executable, "-m", "vjob"]

        def run(*words: str) -> str:
            env = {**os.environ, "HOME": folder}
            done = subprocess.run(words, cwd=here, env=env, capture_output=True, check=False)
            return (done.stdout + done.stderr).decode(errors="replace")

        run(*vjob, "submit", "conf.yaml")
        texts = {"watch": run(*vjob, "watch", "last", "--every", "1")}
        texts["notices"] = read_all(here / "out")
        for name, words in COMMANDS.items():
            if name == "files that share opened":
                texts["comments of scripts"] = read_comments(here / "log")
                texts["live page"] = fetch_page([*vjob, "status", "last", "--web"], here)
            said = run(*vjob, *(word.format(group=os.getegid()) for word in words))
            texts[name] = said + read_all(here / "out") + read_all(here, "*.zip")
        texts["files that share opened"] += read_all(here / "log", is_shared=True)
        texts["API"] = run(sys.executable, "-c", API)
        rows = []
        for name, text in texts.items():
            known = shapes
            if name == "notices":  # with the processes that the program saw
                known = {key: one for key, one in shapes.items() if key[0] != "args"}
            shown = [f"{one} ({at})" for (at, one), s in known.items() if is_seen(s.secret, text)]
            rows.append((name, len(text), len(known), shown))
        return rows


def write_run(here: Path, shapes: dict[tuple[str, str], Shape]) -> None:
    values: dict[str, list[str]] = {place: [] for place in PLACES}
    for (place, _), shape in shapes.items():
        values[place].append(yaml.safe_load(shape.text)["env"]["X_VALUE"])
    (here / "train.py").write_text("".join(f"# {one}\n" for one in values["code"]) + TRAIN)
    conf = {
        "name": "tiny",
        "program": {"script": "train.py", "args": [w for v in values["args"] for w in ("--x", v)]},
        "env": {f"X_VALUE_{number}": value for number, value in enumerate(values["env"])},
        "setup": [f"true {value}" for value in values["setup"]],
        "cluster": {"scheduler": "local", "nodes": {"ranks": 1}, "walltime_min": 5},
        "notify": {"command": "cat >> out/notice"},
    }
    comments = "".join(f"# {one}\n" for one in values["comment"])
    (here / "conf.yaml").write_text(comments + yaml.safe_dump(conf))


def read_all(folder: Path, pattern: str = "**/*", *, is_shared: bool = False) -> str:
    """The files there; they are removed, but those that are shared stay."""
    texts = []
    for path in sorted(folder.glob(pattern)):
        if not path.is_file() or (is_shared and not path.stat().st_mode & 0o040):
            continue
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                texts += [archive.read(one).decode(errors="replace") for one in archive.namelist()]
        else:
            texts.append(path.read_text(errors="replace"))
        if not is_shared:
            path.unlink()
    return "".join(texts)


def read_comments(log: Path) -> str:
    scripts = [path.read_text() for path in log.rglob("*.sh") if path.is_file()]
    return "\n".join(re.findall(r"(?m)^[ \t]*#.*", "\n".join(scripts)))


def fetch_page(words: Sequence[str], here: Path) -> str:
    """The live page, as its address gives it."""
    env = {**os.environ, "HOME": str(here)}
    with subprocess.Popen(words, cwd=here, env=env, stdout=subprocess.PIPE, text=True) as child:
        try:
            found = (re.search(r"http://\S+", line) for line in child.stdout or ())
            address = next(filter(None, found), None)
            if address is None:
                return ""
            with urllib.request.urlopen(address[0], timeout=60) as answer:
                return str(answer.read().decode(errors="replace"))
        finally:
            child.terminate()


def is_seen(secret: str, text: str) -> bool:
    ends = range(max(1, len(secret) - LEAST_LEFT + 1))
    return any(secret[at : at + LEAST_LEFT] in text for at in ends)


def render(rows: Sequence[tuple[str, int, int, Sequence[str]]]) -> list[str]:
    lines = [
        "## What others see of a run",
        "",
        f"One run with a vendor's secret, under a name that says nothing, in each of {len(PLACES)} "
        f"places ({', '.join(PLACES)}): {len(rows)} artefacts. `notices` are the messages of "
        "`notify` and the command lines of all processes but the program's own.",
        "",
        "| artefact | bytes | secrets in the run | seen |",
        "|---|---|---|---|",
    ]
    return [*lines, *(f"| {a} | {n} | {of} | {', '.join(s) or 0} |" for a, n, of, s in rows), ""]
