"""All that needs a GPU, in parts, and the page of what was shown: `make gpu`, `make gpu8`.

    python -m benchmarks.gpu [--several] [--part NAME ...] [--write]

For one machine with at least one GPU; `--several` has the parts for a machine with some, of which
eight take about twenty minutes. Each part ends within eight minutes. .gpu/ keeps the results of
finished parts: an interrupted run resumes with the next part, unless the code, the GPU or torch has
changed. `--part` repeats parts. The page is rewritten after each part. Without a GPU nothing is
written, except with `--write` a page that says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.figures import Figure, find_figures
from benchmarks.running import describe_machine, render_measured, run_bounded
from tests.containers.lane import parse_report

STATE = ROOT / ".gpu/state.json"
LIMIT_S = 480.0
SHOWN, FAILED = "yes", "FAILED"
"""A test's outcome; anything else is why it was left out."""
ABSENT = "no GPU here"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tests or benchmarks that run together."""

    name: str
    title: str
    words: tuple[str, ...]
    """Arguments of Python."""
    is_tests: bool = False
    """It is pytest; its outcome is that of each test."""
    belief: str = ""
    """Why it is believed to be right where it could not run."""


def build_tests(name: str, title: str, *places: str, belief: str = "") -> Part:
    # pytest-benchmark, where it is installed, warns of several processes.
    spread = ("-p", "no:benchmark", "-n", "4", "--dist", "loadgroup")
    words = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *spread, *places)
    return Part(name=name, title=title, words=words, is_tests=True, belief=belief)


PARTS: Sequence[Part] = (
    build_tests(
        "training",
        "Layouts against the plain model: fp32, bf16, fp16, recompute, tied weights, ZeRO, offload",
        "tests/gpu/test_training.py",
        belief="the same tests pass on processors, and passed on one H200 on 2026-11-27",
    ),
    build_tests(
        "tools",
        "Checkpoints between CPU and GPU, the profiler, readings, nsys and ncu, apex",
        "tests/gpu/test_tools.py",
        belief="passed on one H200; else stand-ins of the tools",
    ),
    Part(
        name="throughput",
        title="gpt2-xl's size in bf16: one stage beside plain torch.compile",
        words=("-m", "benchmarks.pipeline", "gpu"),
        belief="ran on one H200; TESTS_DEVICE=cpu runs it in small",
    ),
    Part(
        name="stages",
        title="The same model in two and in four stages on one GPU",
        words=("-m", "benchmarks.pipeline", "gpu_stages", "--rounds", "3"),
        belief="ran on one H200; TESTS_DEVICE=cpu runs it in small",
    ),
    Part(
        name="simulator",
        title="The simulator's error on layouts of GPUs",
        words=("-m", "benchmarks.simulator", "--gpu"),
        belief="ran on one H200; 41 layouts on processors",
    ),
    Part(
        name="checkpoint",
        title="The stall of a checkpoint in the background",
        words=(
            "-m",
            "benchmarks.runtime.checkpoint_stall",
            "--gpu",
            "--rounds",
            "5",
        ),
        belief="ran on one H200; saves beside training have changed since",
    ),
    Part(
        name="wire",
        title="Time of a message",
        words=("-m", "benchmarks.runtime.wire"),
        belief="ran on one H200 by gloo; by NCCL in a group of one, and with a fake of it",
    ),
)
ALONE = "TESTS_DEVICE=cpu runs it on four ranks in small over gloo"
SEVERAL: Sequence[Part] = (
    PARTS[0],
    Part(
        name="links",
        title="Sums of all GPUs and messages between neighbours, by torch.distributed alone",
        words=("-m", "benchmarks.runtime.several_gpus", "links"),
        belief=f"{ALONE}; it calls torch alone",
    ),
    Part(
        name="layouts",
        title="gpt2-xl's size in bf16: pipelines, replicas and tensor groups beside torch's DDP",
        words=("-m", "benchmarks.runtime.several_gpus", "layouts"),
        belief=f"{ALONE}; these layouts equal the plain model on processors, and on one GPU",
    ),
    *PARTS[-3:],
)
"""For a machine with a GPU for each of several ranks: NCCL between them, and ZeRO 3."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a part."""

    text: str = ""
    """Standard output."""
    obstacle: str | None = None
    """Why there is nothing, or not all."""
    tests: list[tuple[str, str]] = field(default_factory=list)
    """Each test and its outcome."""
    took_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        return self.obstacle is not None or any(said == FAILED for _, said in self.tests)

    @property
    def figures(self) -> list[Figure]:
        return list(find_figures(self.text)) if self.obstacle is None else []

    @property
    def short(self) -> str:
        if self.tests:
            counts = {word: sum(one == word for _, one in self.tests) for word in (SHOWN, FAILED)}
            words = [f"{counts[SHOWN]} of {len(self.tests)} tests shown"]
            words += [f"**{counts[FAILED]} failed**"] * bool(counts[FAILED])
            return ", ".join([*words, *([self.obstacle] if self.obstacle else [])])
        if self.obstacle is not None:
            return f"**failed**: {self.obstacle}"
        if not self.figures:
            return "measured; it has no bound"
        met = sum(figure.is_met for figure in self.figures)
        return f"{met} of {len(self.figures)} figures within their bounds"


@dataclass(kw_only=True)
class State:
    """What has been shown, of this code on this machine."""

    facts: dict[str, str]
    date: str
    machine: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        os.replace(part, path)


def load_state(path: Path, facts: dict[str, str]) -> State:
    """The state that was kept; a new one where there is none, or of something else."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["facts"] == facts:
            outcomes = {
                name: Outcome(**{**one, "tests": [(test, said) for test, said in one["tests"]]})
                for name, one in kept.pop("outcomes").items()
            }
            return State(**kept, outcomes=outcomes)
    except (OSError, ValueError, KeyError, TypeError):  # none, or of an older program
        pass
    return State(facts=facts, date=f"{datetime.date.today()}", machine=describe_machine())


ASK = """\
import json, torch
if torch.cuda.is_available():
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    memory = torch.cuda.get_device_properties(0).total_memory
    print(json.dumps({
        "device": f"{torch.cuda.get_device_name()}, {memory / 2**30:.0f} GiB",
        "devices": str(torch.cuda.device_count()), "torch": torch.__version__,
        "CUDA": torch.version.cuda, "NCCL": nccl,
    }))
"""


def find_facts() -> dict[str, str] | None:
    """Device, driver, torch and the code; None without a GPU. Another process asks: a context in
    this one would take memory from the parts."""
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    lines = said.stdout.splitlines()
    if said.returncode or not lines:
        return None
    facts: dict[str, str] = json.loads(lines[-1])
    return {**facts, "driver": find_driver(), "commit": find_commit()}


def find_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def find_commit() -> str:
    """With `-dirty` where other files are changed than pages of results, which a part writes."""
    commit = ask("git", "rev-parse", "--short", "HEAD").strip()
    changed = ask("git", "diff", "--name-only", "HEAD", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return f"{commit}-dirty" if commit and changed.strip() else commit or "unknown"


def ask(*words: str) -> str:
    try:
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run_part(part: Part, limit_s: float = LIMIT_S) -> Outcome:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TESTS_DEVICE": "cuda"}
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        words = [sys.executable, *part.words]
        words += [f"--junitxml={report}"] if part.is_tests else []
        ended = run_bounded(words, limit_s, env)
        found = parse_report(report.read_text()) if report.exists() else []
    tests = [(one.name, one.outcome) for one in found]
    obstacle = ended.obstacle
    if tests and obstacle is not None and any(said == FAILED for _, said in tests):
        obstacle = None  # pytest's exit code says no more than the tests
    return Outcome(text=ended.text, obstacle=obstacle, tests=tests, took_s=ended.took_s)


def run_parts(
    parts: Sequence[Part], state: State, path: Path, page: Path, again: Sequence[str] = ()
) -> None:
    """Those that are to run again, or all that have not ended; state and page after each."""
    chosen = [part for part in parts if part.name in again]
    if not again:
        chosen = [part for part in parts if part.name not in state.outcomes]
    for part in chosen:
        print(f"{part.name}: {part.title}", flush=True)
        outcome = run_part(part)
        print(f"{part.name}: {outcome.short}, {outcome.took_s:.0f} s", flush=True)
        state.outcomes[part.name] = outcome
        state.save(path)
        page.write_text(render(state, parts))
    page.write_text(render(state, parts))


def render(state: State, parts: Sequence[Part]) -> str:
    """The page."""
    facts = ", ".join(f"{name} {value}" for name, value in state.facts.items())
    made = "Made by `python -m benchmarks.gpu`, which is `make gpu`."
    if parts is SEVERAL:
        made = "Made by `python -m benchmarks.gpu --several`, which is `make gpu8`."
    title = "On several GPUs" if parts is SEVERAL else "On a GPU"
    lines = [f"# {title}, {state.date}", "", f"{made} {facts}. {state.machine}", ""]
    lines += ["| part | what | outcome | seconds |", "|---|---|---|---|"]
    for part in parts:
        outcome = state.outcomes.get(part.name)
        said = "not run yet | " if outcome is None else f"{outcome.short} | {outcome.took_s:.0f}"
        lines.append(f"| {part.name} | {part.title} | {said} |".replace("  ", " "))
    lines += ["", "## What missed", "", *(list_missed(state, parts) or ["Nothing."])]
    for part in parts:
        outcome = state.outcomes.get(part.name)
        if outcome is None:
            continue
        lines += ["", f"## {part.name}", "", f"`python {' '.join(part.words)}`"]
        if outcome.tests:
            lines += ["", "| test | shown |", "|---|---|"]
            lines += [f"| {name} | {said.replace('|', '/')} |" for name, said in outcome.tests]
        else:
            lines += render_measured(outcome.text, outcome.figures)
    return "\n".join(lines) + "\n"


def list_missed(state: State, parts: Sequence[Part]) -> list[str]:
    """A line for each thing that was not shown, and why."""
    lines = []
    for part in parts:
        outcome = state.outcomes.get(part.name)
        if outcome is None:
            lines.append(f"- {part.name}: not run yet")
            continue
        if outcome.obstacle is not None:
            lines.append(f"- {part.name}: {outcome.obstacle}")
        reasons: dict[str, int] = {}
        for name, said in outcome.tests:
            if said == FAILED:
                lines.append(f"- {part.name}: {name}: failed")
            elif said != SHOWN:
                reasons[said] = reasons.get(said, 0) + 1
        lines += [f"- {part.name}: {count} left out: {why}" for why, count in reasons.items()]
        for figure in outcome.figures:
            if not figure.is_met:
                found = f"{figure.value:g}, and the bound is {figure.shown_bound}"
                lines.append(f"- {part.name}: {figure.what}: {found}")
    return lines


def render_absent(date: str, machine: str, parts: Sequence[Part], why: str) -> str:
    """The page where nothing can run."""
    title, target = "On a GPU", "gpu"
    if parts is SEVERAL:
        title, target = "On several GPUs", "gpu8"
    lines = [
        f"# {title}, {date}",
        "",
        f"Not run: {why}.",
        "",
        f"Made by `make {target}`. {machine}",
    ]
    lines += ["", "| part | what | outcome | believed to be right, as |", "|---|---|---|---|"]
    lines += [f"| {part.name} | {part.title} | not run | {part.belief} |" for part in parts]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Run what is left; 1 where a part of it failed. Without a GPU nothing has, as in `lane`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({part.name for part in (*PARTS, *SEVERAL)})
    parser.add_argument("--part", nargs="+", default=[], choices=names, help="run these again")
    parser.add_argument("--several", action="store_true", help="the parts for several GPUs")
    parser.add_argument("--write", action="store_true", help="without a GPU: a page that says so")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a part is then ended too
    found, parts, target, kept = find_facts(), PARTS, "gpu", STATE
    why = ABSENT if found is None else ""
    if options.several:
        parts, target, kept = SEVERAL, "gpu8", STATE.with_name("several.json")
        if found is not None and int(found["devices"]) < 2:
            why = "there is one GPU here"
    if found is None or why:
        print(f"make {target}: not run: {why}")
        if options.write:
            today = f"{datetime.date.today()}"
            page = RESULTS / f"{today}-{target}.md"
            page.write_text(render_absent(today, describe_machine(), parts, why))
            print(f"wrote {page.relative_to(ROOT)}")
        return 0
    state = load_state(kept, found)
    page = RESULTS / f"{state.date}-{target}.md"
    try:
        run_parts(parts, state, kept, page, options.part)
    except KeyboardInterrupt:
        print(f"make {target}: interrupted; the same command resumes with this part")
        return 130
    print(f"wrote {page.relative_to(ROOT)}")
    return int(any(outcome.has_failed for outcome in state.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
