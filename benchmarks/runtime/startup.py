"""How long a start takes, from the agent to the end of the first step, by part.

    git worktree add ../before COMMIT
    python -m benchmarks.runtime.startup --before ../before [--rounds 9] [--write]

Four ranks of a tiny GPT on this machine, two stages and two replicas: a real run folder, the
agent's `open` and `node` as a batch script calls them, a new attempt of the run each time. A round
starts each tree once, in a drawn order. The ranks of both read the same `sitecustomize`, which
notes when functions that both trees have begin and end; a part ends when the last rank is through
it, so the parts add up to the whole. Without `--before` this tree is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import RESULTS, ROOT
from varuna_core.records.exits import read_exits
from varuna_core.records.machine import clean_environment
from varuna_core.records.runfolder import RunFolder

RESULT = RESULTS / "startup.md"
BOUND = 0.5
RANKS = 4
LIMIT_S = 120.0

_CONF = """\
name: startup
program: pretrain_gpt
model: {layers: 4, hidden: 64, heads: 4, sequence: 32, vocab: 512, dropout: 0.0}
data: {synthetic: true}
parallel: {pipeline: 2, data: 2}
train: {steps: 1, global_batch_size: 8, micro_batch_size: 2, log_every: 1, evaluate: {every: 0}}
cluster:
  scheduler: local
  walltime_min: 10
  nodes: [{group: all, count: 1, ranks: 4}]
env: {OMP_NUM_THREADS: "1"}
"""

# In the ranks, and in whatever runs before them. Named by module and function: who calls a function
# by its module's name for it calls the one that is timed.
_MARKS = """\
import importlib.machinery, os, sys, time

_WATCHED = {
    "varuna_core.runtime.comm.links": ["join_ranks"],
    "varuna_core.runtime.assembly": ["cut_model", "connect_rank"],
    "varuna_core.programs.place": ["find_place"],
    "varuna_core.programs.training": ["Trainer.__init__", "Trainer._run_step"],
}
_TIMES = {}


def _watch(owner, name):
    real = getattr(owner, name)

    def timed(*args, **kwargs):
        begun = time.time()
        try:
            return real(*args, **kwargs)
        finally:
            _TIMES.setdefault(name, (begun, time.time()))
            if name == "_run_step":
                _write()

    setattr(owner, name, timed)


def _write():
    import json

    path = os.path.join(os.environ["STARTUP_MARKS"], os.environ["RANK"])
    with open(path + ".part", "w") as handle:
        json.dump(_TIMES, handle)
    os.rename(path + ".part", path)


class _Loader:
    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def exec_module(self, module):
        self._real.exec_module(module)
        for words in _WATCHED[module.__name__]:
            owner = module
            *folders, last = words.split(".")
            for folder in folders:
                owner = getattr(owner, folder)
            _watch(owner, last)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder)
"""

PARTS = (
    ("agent: open, checks, until the ranks' processes are there", "ranks"),
    ("imports", "imports"),
    ("store: the ranks meet", "join_ranks"),
    ("split", "cut_model"),
    ("communicators", "connect_rank"),
    ("weights, optimizer, trace", "__init__"),
    ("first step", "_run_step"),
)
"""What it is called, and what ends it on each rank."""

LEFT = """\
What is left: one import of torch (about 2 s of a processor), of what a training needs beside it
(0.6 s), of sympy and torch's tensor parallelism, which a dry run loads (0.9 s), all of it once a
node; in each rank a dry run of the model on fake tensors (0.4 s); two Pythons of the agent (0.3 s
each). The store and the communicators are messages between ranks that share the cores."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds of one start; the parts follow each other."""

    parts: tuple[float, ...]
    processor_s: float
    """Of the agent and all ranks, to their very ends."""

    @property
    def whole_s(self) -> float:
        return sum(self.parts)


class Tree:
    """A checkout with a run folder that it made."""

    def __init__(self, root: Path, folder: Path) -> None:
        folder.mkdir()
        self.root, self.folder, self.count = root, folder, 0
        self.marks = folder / "marks"
        self.marks.mkdir()
        (self.marks / "sitecustomize.py").write_text(_MARKS)
        (folder / "conf.yaml").write_text(_CONF)
        env = {
            **os.environ,
            "PYTHONPATH": str(root),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        said = self._call(["-m", "vjob", "submit", "conf.yaml", "--json"], env)
        self.run = RunFolder(Path(json.loads(said)["folder"]))
        self._wait_for_end()

    def _call(self, words: list[str], env: Mapping[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        path = self.run.path / "local.json"
        while not path.exists() or json.loads(path.read_text())["state"] in ("PENDING", "RUNNING"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first run in {self.run.path} does not end")
            time.sleep(0.1)

    def start(self) -> Start:
        """Start the run once more, as its next attempt."""
        self.count += 1
        marks = self.marks / str(self.count)
        marks.mkdir()
        env = {
            **clean_environment(os.environ),
            "PYTHONPATH": str(self.marks),
            "STARTUP_MARKS": str(marks),
        }
        before = os.times()
        words = ["--run", str(self.run.path), "--attempt", str(self.count)]
        begun = time.time()
        self._call([str(self.run.agent), "open", *words], env)
        self._call([str(self.run.agent), "node", *words, "--node", "0"], env)
        after = os.times()
        exits = read_exits(self.run.attempt(self.count), RANKS)
        ends = {"ranks": max(each.started for each in exits.values())}
        found = [json.loads((marks / str(rank)).read_text()) for rank in range(RANKS)]
        ends["imports"] = max(times["find_place"][0] for times in found)
        for _, name in PARTS[2:]:
            ends[name] = max(times[name][1] for times in found)
        last, parts = begun, []
        for _, name in PARTS:
            parts.append(ends[name] - last)
            last = ends[name]
        processor = after.children_user + after.children_system
        processor -= before.children_user + before.children_system
        return Start(parts=tuple(parts), processor_s=processor)


def show(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} | {statistics.median(ratios):.2f} | {max(ratios):.2f}"


def render(found: dict[str, list[Start]]) -> str:
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {len(found['now'])} rounds. A part ends when the last rank is "
        "through it. Seconds, medians:",
        "",
        f"| part | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
    ]
    for at, (text, _) in enumerate(PARTS):
        cells = [statistics.median(each.parts[at] for each in starts) for starts in found.values()]
        lines.append(f"| {text} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    for text, name in (("the whole", "whole_s"), ("processor, to the end", "processor_s")):
        cells = [
            statistics.median(getattr(each, name) for each in starts) for starts in found.values()
        ]
        lines.append(f"| {text} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    if "before" in found:
        pairs = list(zip(found["now"], found["before"], strict=True))
        whole = [now.whole_s / before.whole_s for now, before in pairs]
        work = [now.processor_s / before.processor_s for now, before in pairs]
        lines += [
            "",
            "| now over before, of each round | bound | least | median | most |",
            "|---|---|---|---|---|",
            f"| from the agent's start to the end of the first step | {BOUND} | {show(whole)} |",
            f"| processor time | | {show(work)} |",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(dir=".", prefix=".startup-") as name:
        folder = Path(name).resolve()
        trees = {"now": Tree(ROOT, folder / "now")}
        if options.before is not None:
            trees = {"before": Tree(options.before.resolve(), folder / "before"), **trees}
        found: dict[str, list[Start]] = {each: [] for each in trees}
        for _ in range(options.rounds):
            for each in draw.sample([*trees], len(trees)):
                found[each].append(trees[each].start())
                print(each, *(f"{part:.2f}" for part in found[each][-1].parts), flush=True)
        text = render(found)
    print(text)
    if options.write:
        command = "python -m benchmarks.runtime.startup --before TREE"
        RESULT.write_text(
            "# From the agent's start to the first step\n\n"
            f"Made by `{command} --rounds {options.rounds} --write`. {text}\n\n{LEFT}\n"
        )


if __name__ == "__main__":
    main()
