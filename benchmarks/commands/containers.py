"""Cost of a start in a container whose image is unpacked, and proof that it is unpacked once.

    python -m benchmarks.commands.containers IMAGE.sqsh [--rounds 15] [--write]

Bound 1: the second start of an unpacked image adds under 0.3 s a node over bare. Timed is the node
agent's whole way of one rank that does nothing, from its start to its end, bare and in each runtime
that works here in turn, so that a machine whose speed drifts drifts for all.

Bound 2: 16 simultaneous prepares of one image on one node unpack once. Counted are the unpackings
that a recording wrapper around the real tool saw.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder, make_run_folder
from vjob.containers.registry import RUNTIMES
from vjob.jobs.planning.resolve_auto import resolve_conf
from vjob.jobs.submit.submit import prepare, write_run_folder

RESULT = RESULTS / "containers.md"
BOUND_S = 0.3
NUM_PREPARES = 16
UNPACKERS = {"enroot": "enroot create", "charliecloud": "unsquashfs", "apptainer": "unsquashfs"}

CONF = """\
name: cost
program: {{script: nothing.py}}
cluster: {{scheduler: local}}
container: {{runtime: {runtime}, image: {image}, scratch: {scratch}}}
"""

WRAPPER = """\
#!/bin/sh
echo "{name} $1" >>"{log}"
exec "{real}" "$@"
"""


@dataclass(frozen=True)
class Node:
    """One node of one run, started again and again as a new attempt."""

    run: RunFolder

    def time_attempt(self, number: int) -> float:
        self._call("open", number)
        start = time.perf_counter()
        self._call("node", number)
        return time.perf_counter() - start

    def _call(self, command: str, number: int) -> None:
        words = [sys.executable, str(self.run.agent), command, "--run", str(self.run.path)]
        words += ["--attempt", str(number), *(["--node", "0"] if command == "node" else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")


def make_node(folder: Path, runtime: str, image: str, scratch: Path) -> Node:
    conf = folder / f"{runtime}.yaml"
    (folder / "nothing.py").touch()
    conf.write_text(CONF.format(runtime=runtime, image=json.dumps(image), scratch=scratch))
    ready = prepare(resolve_conf(conf, [f"name={runtime}"]))
    run = make_run_folder(ready.run.path)
    write_run_folder(ready, run)
    return Node(run)


def find_working(folder: Path, image: str, scratch: Path) -> dict[str, Node]:
    """Bare, and each runtime whose probe and first start work here."""
    nodes = {"none": make_node(folder, "none", image, scratch)}
    for name, kind in RUNTIMES.items():
        if not kind.is_automatic or shutil.which(kind.probe[0]) is None:
            continue
        node = make_node(folder, name, image, scratch)
        try:
            node.time_attempt(0)
        except SystemExit as error:
            print(f"{name} does not work here: {str(error)[-300:]}", file=sys.stderr)
        else:
            nodes[name] = node
    nodes["none"].time_attempt(0)
    return nodes


def measure_starts(nodes: dict[str, Node], rounds: int) -> dict[str, list[float]]:
    """Seconds over bare, round by round."""
    added: dict[str, list[float]] = {name: [] for name in nodes if name != "none"}
    for number in range(1, rounds + 1):
        taken = {name: node.time_attempt(number) for name, node in nodes.items()}
        for name, seconds in added.items():
            seconds.append(taken[name] - taken["none"])
    return added


def count_unpackings(folder: Path, runtime: str, image: str) -> tuple[int, float]:
    """How often the image was unpacked when many asked for it at once, and the seconds."""
    scratch = folder / f"scratch-{runtime}"
    plan = read_plan(make_node(folder, runtime, image, scratch).run.plan)
    assert plan is not None
    [container] = plan.containers
    tool = UNPACKERS[runtime].partition(" ")[0]
    log, tools = folder / f"{runtime}.log", folder / f"tools-{runtime}"
    tools.mkdir()
    wrapper = tools / tool
    wrapper.write_text(WRAPPER.format(name=tool, log=log, real=shutil.which(tool)))
    wrapper.chmod(0o755)
    env = {**os.environ, **container.env, "PATH": f"{tools}:{os.environ['PATH']}"}
    start = time.perf_counter()
    children = [subprocess.Popen(container.prepare[0], env=env) for _ in range(NUM_PREPARES)]
    codes = [child.wait() for child in children]
    seconds = time.perf_counter() - start
    if any(codes):
        raise SystemExit(f"a prepare failed: {codes}")
    words = UNPACKERS[runtime]
    return sum(line.startswith(words) for line in log.read_text().splitlines()), seconds


def render(
    image: Path, rounds: int, added: dict[str, list[float]], counts: dict[str, tuple[int, float]]
) -> str:
    lines = [
        f"Python {platform.python_version()}, {platform.machine()}, {rounds} rounds, an image of "
        f"{image.stat().st_size / 2**20:.0f} MiB.",
        "",
        "Seconds that a start in an unpacked image adds to a node over bare:",
        "",
        "| runtime | bound | least | median | most |",
        "|---|---|---|---|---|",
    ]
    for name, taken in added.items():
        values = (min(taken), statistics.median(taken), max(taken))
        row = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {name} | {BOUND_S} | {row} |")
    lines += ["", f"{NUM_PREPARES} prepares of one image at once:", ""]
    lines += ["| runtime | unpackings | bound | seconds for all |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {count} | 1 | {seconds:.1f} |" for name, (count, seconds) in counts.items()
    ]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", type=Path, help="a .sqsh file with a python3 in it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    image = options.image.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nodes = find_working(folder, str(image), folder / "scratch")
        added = measure_starts(nodes, options.rounds)
        counts = {
            runtime: count_unpackings(folder, runtime, str(image))
            for runtime in UNPACKERS
            if runtime in nodes
        }
    text = render(image, options.rounds, added, counts)
    print(text)
    if options.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
