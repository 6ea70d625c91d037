"""One recipe, run by vjob and by its usual launcher, and everything that vjob says of it.

    recipe ─► torchrun, or python ─► losses ───────────────┐
       └────► vjob submit ─► out/rank<N>.jsonl: the truth ─┴► claims that hold or do not
                  └─► status while it stands still, status and report after it

A claim that is known not to hold is named in KNOWN with the reason, and is expected not to.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE, ROOT
from tests.command import Vjob
from tests.jobs.programs.free_port import find_free_port
from tests.ranks.start import Rank, build_order, collect, start_rank
from varuna_core.hang.signs import pause_guard
from varuna_core.records.runfolder import RunFolder

FOLDER = ROOT / "examples/recipes"
STEPS = 40
EVERY = 5
"""Steps between two lines of progress, at most; a bar is drawn more often."""
STOP_AT = 24
"""The step after which the ranks are stopped for a look at the status."""
OVER = ("ended", "refused")
RESULTS = "VJOB_RECIPES_RESULTS"
"""Names a folder in which each run leaves its row of the results page."""
ABORT = "terminate called without an active exception"
"""Printed by a process that aborts after its last step: a thread of gloo drops the last tensor
that it sent while the interpreter ends, and may not. destroy_process_group() ends such threads only
where nothing else refers to the group; DeepSpeed does, in default arguments. It is run again. So is
a rank that hangs after its last step, since that thread waits for the interpreter's lock."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
OF_TORCHRUN = {
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
"""Variables of all its ranks, beside the usual ones of torch."""
PLACES = {
    "local": "{scheduler: local, nodes: [{group: main, ranks: RANKS}]}",
    "plain": (
        "{walltime_min: 10, join_s: 200, nodes: ["
        "{group: main, count: RANKS, queue: gpu2, ranks: 1, cpus: 1}]}"
    ),
    "het": (
        "{walltime_min: 10, join_s: 200, hetero: hetjob, nodes: ["
        "{group: weak, queue: gpu2, ranks: 1, cpus: 1}, "
        "{group: strong, queue: gpu1, ranks: 1, cpus: 1}]}"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A folder of examples/recipes, and how its program is run without vjob."""

    name: str
    needs: tuple[str, ...] = ()
    """Distributions of PyPI beside torch."""
    start: tuple[str, ...] | None = (*TORCHRUN, "train.py")
    """Words after `python`; None: a process for each rank with the variables of torchrun."""
    program: str = "train.py"
    """The script or the module that each rank is, where a pool forks the ranks instead."""
    steps: str = "--steps=40"
    pause: str = "--pause="
    out: str = "--out="
    ranks: int = 2
    averaged: bool = False
    """True where the losses that are printed are means since the last such line."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="script", start=("train.py",), ranks=1),
        Recipe(name="ddp"),
        Recipe(name="fsdp"),
        Recipe(name="hf-trainer", needs=("transformers", "accelerate"), averaged=True),
        Recipe(name="accelerate", needs=("accelerate",)),
        Recipe(name="lightning", needs=("lightning",)),
        Recipe(name="deepspeed", needs=("deepspeed",)),
        Recipe(
            name="hydra",
            needs=("hydra-core", "hydra-submitit-launcher"),
            steps="steps=40",
            pause="pause=",
            out="out=",
        ),
        Recipe(name="jax", needs=("jax",), start=None),
        Recipe(name="nanogpt", steps="--max_iters=40"),
        Recipe(
            name="torchtitan",
            start=(*TORCHRUN, "-m", "tiny.train"),
            program="tiny.train",
            steps="--training.steps=40",
            pause="--training.pause=",
            out="--job.dump_folder=",
        ),
        Recipe(name="command", start=(*TORCHRUN, "--no-python", "sh", "train.sh")),
        Recipe(name="torchrun"),
    )
}


@functools.cache
def find_python() -> str:
    """Find the interpreter that has the frameworks; skip the test without one."""
    ours = Path(sys.prefix, "recipes/bin/python")
    python = os.environ.get("VJOB_RECIPES_PYTHON") or (str(ours) if ours.exists() else "")
    if not python:
        pytest.skip("no frameworks: `make .venv/.installed-recipes`, or VJOB_RECIPES_PYTHON")
    return python


@functools.cache
def list_versions() -> Mapping[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    said = subprocess.run([find_python(), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    return found


def require(recipe: Recipe) -> str:
    """Return the interpreter for a recipe; skip the test where a framework is not installed."""
    python = find_python()
    if missing := [name for name in ("torch", *recipe.needs) if name not in list_versions()]:
        pytest.skip(f"{python} lacks {', '.join(missing)}")
    if recipe.name == "torchrun" and not shutil.which("torchrun", path=build_path(python)):
        pytest.skip("the tests' venv has no torchrun")
    return python


# The truth.


@dataclass(frozen=True)
class Truth:
    """Everything that the program itself wrote, by rank."""

    worlds: dict[int, int]
    losses: dict[int, list[float]]
    times: list[float] = field(default_factory=list)
    """Of rank 0's steps."""


def read_truth(folder: Path) -> Truth:
    worlds, losses, times = {}, {}, []
    for path in sorted(folder.glob("rank*.jsonl")):
        head, *rows = map(json.loads, path.read_text().splitlines())
        worlds[head["rank"]] = head["world"]
        losses[head["rank"]] = [row["loss"] for row in rows]
        times = times or [row["at"] for row in rows]
    return Truth(worlds, losses, times)


def count_steps(folder: Path) -> int:
    """Steps that rank 0 has done, or the least of all ranks."""
    files = list(folder.glob("rank*.jsonl"))
    return min((path.read_text().count("\n") - 1 for path in files), default=0)


@functools.cache
def train_plainly(recipe: Recipe, config: str = "") -> Truth:
    """Train without vjob in a copy of the recipe's folder; once for all places.

    For the results page each recipe is started by its usual launcher. The tests start `ddp` so; the
    ranks of the others are forked with the variables that torchrun sets, which takes half as much
    of the processor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, recipe.name)
        shutil.copytree(recipe.folder, folder)
        (folder / "full.json").write_text(config)
        more = ["--deepspeed", "--deepspeed_config=full.json"] if config else []
        is_launched = recipe.name in ("ddp", "jax") or RESULTS in os.environ
        start = start_plainly if is_launched else fork_ranks
        code, said = start(recipe, folder, more)
        if code and ABORT in said:
            code, said = start(recipe, folder, more)
        assert code == 0, said
        return read_truth(folder / "out")


def fork_ranks(recipe: Recipe, folder: Path, more: Sequence[str]) -> tuple[int, str]:
    python = require(recipe)
    words = [*list_words(recipe), *more]
    ranks: list[Rank] = []
    try:
        for place in list_places(recipe.ranks):
            if recipe.ranks > 1:
                rank = place["RANK"]
                place |= {**OF_TORCHRUN, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            order = build_order(recipe.program, words, build_env(python) | place, folder)
            ranks.append(start_rank(order, "scripts", python))
        ended = collect(ranks, 100 * PATIENCE)
    except subprocess.TimeoutExpired as error:
        return 1, f"{error}: {ABORT}"
    finally:
        for process in ranks:
            process.close()
    return next((code for code, _ in ended if code), 0), "".join(said for _, said in ended)


def list_words(recipe: Recipe) -> list[str]:
    return [recipe.steps, f"{recipe.pause}0", f"{recipe.out}out"]


def build_env(python: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": build_path(python)}


def list_places(num_ranks: int) -> list[dict[str, str]]:
    """The usual variables of each rank; a rank that is alone has none."""
    if num_ranks == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    return [{"RANK": str(rank), **shared} for rank in range(num_ranks)]


def start_plainly(recipe: Recipe, folder: Path, more: Sequence[str]) -> tuple[int, str]:
    """Return the first exit code that is not 0, and everything that was printed."""
    python = require(recipe)
    words = [*list_words(recipe), *more]
    places = list_places(recipe.ranks) if recipe.start is None else [{}]
    started = [
        subprocess.Popen(
            [python, *(recipe.start or ("train.py",)), *words],
            cwd=folder, env=build_env(python) | place, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )
        for place in places
    ]  # fmt: skip
    said = "".join(process.communicate(timeout=200 * PATIENCE)[0] for process in started)
    return next((one.returncode for one in started if one.returncode), 0), said


def build_path(python: str) -> str:
    """PATH with the commands of the tests' venv, torchrun among them."""
    return os.pathsep.join(
        (str(Path(python).parent), str(Path(sys.executable).parent), "/usr/bin:/bin")
    )


# The run.


@dataclass(kw_only=True)
class Seen:
    """Everything that vjob said of one run."""

    during: dict[str, Any] = field(default_factory=dict)
    at: int = 0
    """Steps that were done when `during` was asked for."""
    stopped_s: float = 0.0
    """Seconds for which the ranks were stopped for that."""
    after: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def submit(recipe: Recipe, place: str, vjob: Vjob) -> RunFolder:
    python = require(recipe)
    shutil.copytree(recipe.folder, vjob.folder, dirs_exist_ok=True)
    words = ["--set", f"cluster={PLACES[place].replace('RANKS', str(recipe.ranks))}"]
    words += ["--set", f"program.python={python}"]
    words += ["--set", "env.OMP_NUM_THREADS=1", "--set", f"env.PATH={build_path(python)}"]
    if compiled := os.environ.get("TORCH_EXTENSIONS_DIR"):  # what make compiled, for all tests
        words += ["--set", f"env.TORCH_EXTENSIONS_DIR={compiled}"]
    said = vjob("submit", "conf.yaml", "--json", *words).stdout
    return RunFolder(Path(json.loads(said)["folder"]))


def watch(recipe: Recipe, vjob: Vjob, run: RunFolder, is_right: Callable[[Seen], bool]) -> Seen:
    """Stop all ranks in the midst of their steps and ask for the status, wait for their end, and
    ask again."""
    seen, out = Seen(), vjob.folder / "out"

    def is_there() -> bool:
        return count_steps(out) >= STOP_AT or json.loads(run.record.read_text())["state"] in OVER

    wait_often(is_there, lambda: vjob.explain(run))
    pause_guard(
        run, is_paused=True, by="a test", at=time.time()
    )  # on a busy machine a look is long
    stopped = stop_ranks(vjob.folder)
    since = time.monotonic()
    try:
        deadline = time.monotonic() + 10 * PATIENCE
        while stopped:
            seen.at = count_steps(out)
            seen.during = vjob.status(str(run.path))
            if is_right(seen) or time.monotonic() > deadline:
                break
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        seen.stopped_s = time.monotonic() - since if stopped else 0.0
    seen.record = vjob.wait_over(run, 200, may_fail=True)
    seen.after = vjob.status(str(run.path))
    seen.report = json.loads(vjob("report", str(run.path), "--json").stdout)
    return seen


def stop_ranks(folder: Path) -> list[int]:
    """Stop the processes of this folder that train, those of a launcher too."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = process.joinpath("cwd").samefile(folder)
            words = process.joinpath("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours and any(word.endswith((b"train.py", b"tiny.train")) for word in words):
            os.kill(int(process.name), signal.SIGSTOP)
            found.append(int(process.name))
    return found


def wait_often(is_so: Callable[[], object], explain: Callable[[], str]) -> None:
    """Poll a condition that is cheap to ask for."""
    deadline = time.monotonic() + 200 * PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


# What must hold.


@dataclass(frozen=True)
class Claim:
    """One thing that vjob must get right, and what it said beside the truth."""

    name: str
    holds: bool
    said: str
    truth: str


def list_claims(recipe: Recipe, seen: Seen, truth: Truth, plain: Truth) -> list[Claim]:
    """All claims of a run that has ended."""
    ranks = {rank: recipe.ranks for rank in range(recipe.ranks)}
    steps, last = len(truth.times), STEPS
    losses = "equal" if truth.losses == plain.losses else "differ"
    after, health = read_progress(seen.after)
    headline = seen.report["headline"]
    found = [
        Claim("ranks", truth.worlds == ranks, str(truth.worlds), str(ranks)),
        Claim("losses", losses == "equal" and steps == last, losses, "equal"),
        *claim_during(recipe, seen),
        Claim("verdict after", health == "DONE", health, "DONE"),
        Claim("step after", after[0] == last, str(after[0]), str(last)),
        Claim("total after", after[1] == last, str(after[1]), str(last)),
        *(
            Claim(f"report's {key}", read_value(headline.get(key)) == last,
                  str(read_value(headline.get(key))), str(last))
            for key in ("last_step", "num_steps")
        ),
        claim_goodput(seen, truth),
        claim_losses(recipe, seen, truth),
        claim_findings(seen),
    ]  # fmt: skip
    return found


def claim_during(recipe: Recipe, seen: Seen) -> list[Claim]:
    """The status while the ranks stood still: its step is the last that was printed. Once an agent
    has seen that they are stopped, that is said."""
    (step, total), health = read_progress(seen.during)
    rules = {each["rule"] for each in seen.during.get("verdict", {}).get("findings", ())}
    is_stop = health == "STALLED" and "stopped ranks" in rules
    least = seen.at - EVERY
    is_right = step is not None and least <= step <= seen.at + 1
    return [
        Claim("verdict during", is_stop or health == "HEALTHY", health, "HEALTHY"),
        Claim("step during", is_right, str(step), f"{max(0, least)} to {seen.at}"),
        Claim("total during", total == STEPS, str(total), str(STEPS)),
    ]


def read_progress(status: Mapping[str, Any]) -> tuple[tuple[int | None, int | None], str]:
    progress = status.get("progress") or {}
    health = status.get("verdict", {}).get("health", "none")
    return (progress.get("step"), progress.get("num_steps")), health


def read_value(value: Any) -> Any:
    """Return a figure of the report, None where it is not known."""
    return value.get("value") if isinstance(value, dict) else value


NEAR = 0.03


def claim_goodput(seen: Seen, truth: Truth) -> Claim:
    """The share of the time since the start that was steps, to 3 points, or bounds that hold it;
    not known is right too. Time in the queue is no part of it. The ranks' stop for a look may count
    as a part of the step that it was in, or as a pause."""
    headline = seen.report["headline"]
    said = headline["goodput"]
    pace = (truth.times[-1] - truth.times[0]) / (len(truth.times) - 1)
    ran = read_value(headline["duration_s"]) - read_value(headline["queued_s"])
    most = pace * len(truth.times) / ran
    least = most - seen.stopped_s / ran
    real = f"{least:.0%} to {most:.0%}"
    if "not_known" in said:
        return Claim("goodput", True, "not known", real)
    low, high = said.get("low", said.get("value")), said.get("high", said.get("value"))
    text = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
    return Claim("goodput", low - NEAR < most and least < high + NEAR, text, real)


def claim_losses(recipe: Recipe, seen: Seen, truth: Truth) -> Claim:
    """The first and the last loss of the report are some that training had."""
    values = next(
        (each["values"] for each in seen.report["findings"] if each["rule"] == "loss"), {}
    )
    had = truth.losses[0]
    if recipe.averaged:
        means = [sum(step) / len(step) for step in zip(*truth.losses.values(), strict=True)]
        had = [sum(means[at : at + 10]) / 10 for at in range(0, len(means), 10)]
    said = [values[key] for key in ("first", "last") if key in values]
    is_right = all(any(abs(one - loss) < 6e-4 * max(1, loss) for loss in had) for one in said)
    return Claim(
        "report's losses", is_right, " to ".join(map(str, said)) or "none",
        f"{had[0]:.4g} to {had[-1]:.4g}",
    )  # fmt: skip


def claim_findings(seen: Seen) -> Claim:
    """No finding blames a healthy run that did all its steps."""
    false = sorted({each["rule"] for each in seen.report["findings"]} - HARMLESS)
    return Claim("findings", not false, ", ".join(false) or "none", "none")


HARMLESS = {
    "goodput", "loss", "evaluation", "no trace", "outliers", "resumed", "slower", "start",
    "more ranks than processors",
}  # fmt: skip
"""Findings that say what was, without blame, and have claims of their own; ranks that are stopped
for a look make an outlier, on a busy machine the start takes most of a short run, and a small one
has fewer processors than ranks."""


def note(recipe: Recipe, place: str, claims: Sequence[Claim]) -> None:
    """Leave the row of the results page where it is asked for."""
    if folder := os.environ.get(RESULTS):
        names = ("torch", *recipe.needs)
        row = {
            "recipe": recipe.name,
            "place": place,
            "versions": {name: list_versions()[name] for name in names},
            "claims": [asdict(claim) for claim in claims],
        }
        Path(folder, f"{recipe.name}.{place}.json").write_text(json.dumps(row, indent=1))


def run_recipe(
    recipe: Recipe, place: str, folder: Path, env: Mapping[str, str] | None = None
) -> list[Claim]:
    """Train a recipe at a place and without vjob; every claim about it."""
    require(recipe)
    vjob = Vjob(folder, env)
    run = submit(recipe, place, vjob)
    known = KNOWN.get(recipe.name, {})

    def is_right(seen: Seen) -> bool:
        return all(claim.holds or claim.name in known for claim in claim_during(recipe, seen))

    seen = watch(recipe, vjob, run, is_right)
    errors = (path.read_text(errors="replace") for path in run.path.glob("attempt-0/**/*.err"))
    if seen.record["verdict"] != "COMPLETED" and any(ABORT in text for text in errors):
        vjob = Vjob(folder / "again", env)
        run = submit(recipe, place, vjob)
        seen = watch(recipe, vjob, run, is_right)
    assert seen.record["verdict"] == "COMPLETED", vjob.explain(run)
    truth = read_truth(vjob.folder / "out")
    config = run.path / "ds_config.json"
    plain = train_plainly(recipe, config.read_text() if config.exists() else "")
    claims = list_claims(recipe, seen, truth, plain)
    note(recipe, place, claims)
    return claims


def check(recipe: Recipe, claims: Sequence[Claim]) -> None:
    """All claims hold but those that are known not to."""
    known = KNOWN.get(recipe.name, {})
    wrong = [claim for claim in claims if not claim.holds and claim.name not in known]
    assert not wrong, wrong
    # How far off a goodput is varies with the machine.
    repaired = [one for one in claims if one.holds and one.name in known and one.name != "goodput"]
    assert not repaired, f"take these out of KNOWN, they hold now: {repaired}"


KNOWN: Mapping[str, Mapping[str, str]] = {}
"""By recipe: the claims that do not hold yet, each with the reason."""
