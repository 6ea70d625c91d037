"""A long run with a fault every two minutes: memory, descriptors and files over time.

    python -m benchmarks.chaos.soak --minutes 60 --every 120 --samples FILE --write

Every five seconds the resident memory and the open descriptors of each process of the run are
sampled, and the files and bytes of its folders; a live screen (`vjob status` in a terminal) and
`vjob watch` run beside it. The page has least-squares slopes, per kind of process. Samples are
appended to FILE as they are taken: a soak that was interrupted is read as far as it came, and a
later one with the same FILE adds to it. `--page` makes the page of FILE again, and runs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.chaos.experiment import OVER, apply_fault
from benchmarks.chaos.fault_actions import NO_TARGET
from benchmarks.chaos.faults import LASTS_S, Fault
from benchmarks.chaos.history import LINE, SAMPLES, check_history, read_losses
from benchmarks.chaos.invariants import Monitor
from benchmarks.chaos.testbed import CONF, Testbed
from benchmarks.commands.status_screen import Terminal
from benchmarks.machine import read_memory_gb, read_processor
from tests.cluster.processes import read_stat
from tests.small_training import write_slow_steps
from varuna_core.records.files import read_json
from varuna_core.records.runfolder import RunFolder

RESULT = RESULTS / "soak.md"
SAMPLE_S = 5.0
SETTLE_S = 60.0
"""Of a process' life: imports and first reads are no leak."""
LATE_S = 600.0
"""Of a process' life: what it reads again and again it has read by then."""
PAUSE_S = 0.04
"""Seconds of each layer and micro-batch that a rank waits: a step takes about a second."""
ENDS_DAEMONS = ("kill manager", "kill node", "warn", "leave", "shrink")
"""Faults that end what is to live long; they come in the last quarter."""
BATCH = 16
NUM_NODES = 4
END_S = 180.0
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ("manager", "stay", "agent", "rank", "tend", "watch", "screen", "supervisor")
FOLDERS = ("run folder, attempts left out", "attempts", "store", "index")
SOAK_CONF = (
    CONF.replace("every: 10, keep", "every: 20, keep")
    .replace("lr: 1.0e-2", "lr: 1.0e-4")
    .replace("min_lr: 1.0e-3", "min_lr: 1.0e-5")
    .replace("walltime_min: 20", "walltime_min: 600")
    .replace("max_nodes: 6", "max_nodes: 6, leave_slow: true, look_s: 10")
    .replace('OMP_NUM_THREADS: "1"', 'OMP_NUM_THREADS: "1", PYTHONPATH: calm')
)


class SoakTestbed(Testbed):
    """A run on this machine that does not end by itself, with steps that mostly wait."""

    conf = SOAK_CONF
    disk_mb = 128

    def prepare(self) -> None:
        super().prepare()
        write_slow_steps(self.folder / "calm", PAUSE_S)


# Samples: a line of JSON each.


def classify(words: Sequence[str], run: RunFolder) -> str | None:
    """Name the kind of a process of the run by its command line; None for others."""
    if not any(str(run.path) in word for word in words):
        return None
    if str(run.agent) in words:
        for word, kind in (("manage", "manager"), ("stay", "stay"), ("standby", "agent")):
            if word in words:
                return kind
        return "agent" if "node" in words else None
    if "tend" in words:
        return "tend"
    if any(word.endswith("local.supervisor") for word in words):
        return "supervisor"
    return "rank" if str(run.program) in words else None


def sample_processes(run: RunFolder, own: dict[int, str]) -> list[dict[str, Any]]:
    """Memory and descriptors of the run's processes, and of `own`: kinds by pid."""
    found = []
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    for name in filter(str.isdigit, os.listdir("/proc")):
        folder = Path("/proc", name)
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            kind = own.get(int(name)) or classify(words, run)
            stat = read_stat(int(name))
            if kind is None or stat is None:
                continue
            rss = int((folder / "statm").read_text().split()[1]) * PAGE
            descriptors = len(os.listdir(folder / "fd"))
        except OSError:  # it ended meanwhile
            continue
        start = stat[0].start_ticks
        age = round(uptime - start / TICKS, 1)
        who = f"{name}.{start}"
        found.append({"kind": kind, "who": who, "age": age, "rss": rss, "descriptors": descriptors})
    return found


def count_files(folder: Path, leave_out: Callable[[str], bool] = lambda name: False) -> list[int]:
    """Count the entries and bytes below a folder."""
    entries = size = 0
    try:
        with os.scandir(folder) as listed:
            for entry in listed:
                if leave_out(entry.name):
                    continue
                entries += 1
                if entry.is_dir(follow_symlinks=False):
                    more = count_files(Path(entry.path))
                    entries, size = entries + more[0], size + more[1]
                else:
                    size += entry.stat(follow_symlinks=False).st_size
    except OSError:  # removed meanwhile
        pass
    return [entries, size]


def sample_folders(testbed: Testbed) -> list[dict[str, Any]]:
    run = testbed.run
    attempts = [count_files(attempt.path) for attempt in run.attempts()]
    counts = {
        FOLDERS[0]: count_files(run.path, lambda name: name.startswith("attempt-")),
        FOLDERS[1]: [sum(files) for files in zip(*attempts, strict=True)] or [0, 0],
        FOLDERS[2]: count_files(testbed.store),
        FOLDERS[3]: count_files(testbed.folder / "state"),
    }
    return [
        {"folder": name, "files": files, "bytes": size, "attempts": len(attempts)}
        for name, (files, size) in counts.items()
    ]


# The soak.


def deal_kinds(seed: int, count: int, kinds: Sequence[str]) -> list[str]:
    """Deal kinds of faults; those that end long-lived processes come in the last quarter."""
    rng = random.Random(seed)
    gentle = [kind for kind in kinds if kind not in ENDS_DAEMONS]
    found: list[str] = []
    while len(found) < count * 3 // 4:
        found += rng.sample(gentle, len(gentle))
    del found[count * 3 // 4 :]
    while len(found) < count:
        found += rng.sample(list(kinds), len(kinds))
    return found[:count]


class Soak:
    """One run from its start to its end, sampled all the time."""

    def __init__(self, testbed: SoakTestbed, samples: Path) -> None:
        self.testbed, self._samples = testbed, samples
        self.run = testbed.submit(2_000_000)
        self.monitor = Monitor(testbed)
        self._begun = time.monotonic()
        self._id = f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} {os.getpid()}"
        self._next_sample = 0.0
        self._own: dict[int, str] = {}
        self._terminal: Terminal | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._is_full = False
        """Whether the disk that holds the logs was full."""

    def note(self, **facts: Any) -> None:
        seconds = round(time.monotonic() - self._begun, 1)
        line = json.dumps({"soak": self._id, "s": seconds, **facts})
        with self._samples.open("a") as file:
            file.write(f"{line}\n")

    def start_viewers(self) -> None:
        """The live screen, and `vjob watch`."""
        self._terminal = Terminal(self.run.path, self.testbed.vjob.env)
        words = ["watch", str(self.run.path), "--every", "5", "--quiet"]
        with (self.testbed.folder / "watch.out").open("w") as out:
            self._watch = self.testbed.vjob.start_into(out, *words)
        self._own = {self._terminal.process.pid: "screen", self._watch.pid: "watch"}

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            if time.monotonic() >= self._next_sample:
                self._next_sample = time.monotonic() + SAMPLE_S
                self.monitor.poll()
                for one in sample_processes(self.run, self._own):
                    self.note(**one)
                for one in sample_folders(self.testbed):
                    self.note(**one)
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.5, left))

    def hit(self, number: int, kind: str, rng: random.Random) -> None:
        """Apply one fault, and let nodes join for those that it costs."""
        fault = Fault(
            kind=kind, at=0, pick=round(rng.random(), 3), lasts_s=round(rng.uniform(*LASTS_S), 1)
        )
        said = apply_fault(self.testbed, fault, self.pause)
        if kind == "damage newest":
            self.monitor.expect_damage()
        self._is_full = self._is_full or kind == "fill run"
        self.note(fault=kind, number=number, said=said)
        print(f"{number}: {kind}: {said}", flush=True)

    def refill(self) -> None:
        missing = NUM_NODES - len(self.testbed.list_nodes())
        if missing > 0:
            words = ["grow", str(self.run.path), "--count", str(missing)]
            done = self.testbed.vjob(*words, code=None)
            self.note(grow=missing, said=(done.stdout or done.stderr).strip())

    @property
    def is_over(self) -> bool:
        return read_json(self.run.record).get("state") in OVER

    def finish(self) -> list[str]:
        """End the run as its user does, and check its history; the problems."""
        if self._terminal is not None:
            self.note(code=self._terminal.close(), of="screen")
        self.testbed.vjob("cancel", str(self.run.path), code=None)
        end = time.monotonic() + END_S
        while not self.is_over and time.monotonic() < end:
            self.testbed.vjob("status", str(self.run.path), "--json", code=None)
            time.sleep(2.0)
        if self._watch is not None:
            try:
                self.note(code=self._watch.wait(60), of="watch")
            except subprocess.TimeoutExpired:
                self._watch.kill()
                self.monitor.add_problem("vjob watch goes on after the run's end")
        record = read_json(self.run.record)
        if record.get("verdict") != "COMPLETED":
            self.monitor.add_problem(
                f"it ended as {record.get('verdict')}: {record.get('message')}"
            )
        problems = [
            *self.monitor.problems,
            *check_history(self.run),
            *check_steps(self.run, lines_may_lack=self._is_full),
        ]
        steps = max(read_losses(self.run)[0], default=0)
        attempts = len(self.run.attempts())
        self.note(end=record.get("verdict"), steps=steps, attempts=attempts, problems=problems)
        return problems


def check_steps(run: RunFolder, *, lines_may_lack: bool) -> list[str]:
    """Check that each step on the way to the last weights was done once.

    `lines_may_lack`: the disk that holds the logs was full, so that steps may have left no line.
    """
    problems = []
    done = 0
    for attempt in run.attempts():
        text = "".join(
            path.read_text(errors="replace") for path in sorted(attempt.path.glob("ranks/*.out"))
        )
        steps = [int(step) for step, _ in LINE.findall(text)]
        resumed = re.search(r"resumed from iteration (\d+)", text)
        first = int(resumed[1]) if resumed else 0
        name = f"attempt {attempt.number}"
        if first > done and not lines_may_lack:
            problems.append(f"{name} goes on from step {first}, and {done} are done")
        for before, after in itertools.pairwise([first, *steps]):
            if after <= before or (after > before + 1 and not lines_may_lack):
                problems.append(f"{name} did step {after} after {before}")
        for step, samples in SAMPLES.findall(text):
            if int(samples) != int(step) * BATCH:
                problems.append(f"after step {step} {samples} samples of {BATCH} a step were read")
        done = steps[-1] if steps else done
    return problems[:5]


def run_soak(
    folder: Path, samples: Path, *, minutes: float, every_s: float, seed: int
) -> list[str]:
    testbed = SoakTestbed(folder)
    count = max(1, int(minutes * 60 / every_s) - 1)
    rng = random.Random(seed)
    try:
        testbed.open()
        soak = Soak(testbed, samples)
        end = time.monotonic() + minutes * 60
        try:
            soak.start_viewers()
            for number, kind in enumerate(deal_kinds(seed, count, testbed.kinds)):
                soak.pause(every_s / 2)
                soak.refill()
                soak.pause(every_s / 2)
                soak.hit(number, kind, rng)
                if soak.is_over:
                    break
            soak.pause(end - time.monotonic())
        except KeyboardInterrupt:
            print("interrupted: the run is ended, and the page made of what there is", flush=True)
        return soak.finish()
    finally:
        testbed.close(keep=True)


# Slopes.


@dataclass(frozen=True, kw_only=True)
class Slope:
    """A least-squares slope and its standard error."""

    value: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Three errors from zero, and not the rounding of a constant."""
        return abs(self.value) > 3 * self.error and abs(self.value) > 1e-9


def fit_slope(series: Iterable[Sequence[tuple[float, float]]]) -> Slope | None:
    """Fit one slope to several series of (x, y), each with a level of its own.

    None where fewer than three points are left beyond the levels.
    """
    xx = xy = yy = 0.0
    freedom = -1
    for points in series:
        if len(points) < 2:
            continue
        mean_x = math.fsum(x for x, _ in points) / len(points)
        mean_y = math.fsum(y for _, y in points) / len(points)
        xx += math.fsum((x - mean_x) ** 2 for x, _ in points)
        xy += math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
        yy += math.fsum((y - mean_y) ** 2 for _, y in points)
        freedom += len(points) - 1
    if freedom < 2 or xx == 0.0:
        return None
    slope = xy / xx
    return Slope(value=slope, error=math.sqrt(max(0.0, yy - slope * xy) / freedom / xx))


def average_minutes(samples: Sequence[dict[str, Any]], what: str) -> list[tuple[float, float]]:
    """Means of each minute, (hours, value): neighbouring samples are hardly independent."""
    minutes: dict[int, list[float]] = defaultdict(list)
    for one in samples:
        minutes[int(one["s"] // 60)].append(one[what])
    return [(minute / 60, math.fsum(v) / len(v)) for minute, v in sorted(minutes.items())]


def group_by_process(
    samples: Iterable[dict[str, Any]], settle_s: float = SETTLE_S
) -> dict[str, list[dict[str, Any]]]:
    """Samples of each process, its first seconds left out."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in samples:
        if one["age"] >= settle_s:
            found[f"{one['soak']} {one['who']}"].append(one)
    return dict(found)


# The page.


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a sample file; one that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def render_page(samples: Sequence[dict[str, Any]]) -> str:
    faults = [one for one in samples if "fault" in one]
    ends = [one for one in samples if "end" in one]
    minutes = _sum_minutes(samples)
    hits = [one for one in faults if not one["said"].startswith(NO_TARGET)]
    count = Counter(one["fault"] for one in hits)
    attempts = sum(one["attempts"] for one in ends)
    lines = [
        "# Soak: memory, descriptors and files of a run that is disturbed all the time",
        "",
        "Made by `python -m benchmarks.chaos.soak --minutes 60 --every 120 --write`.",
        f"{read_processor()}, {os.cpu_count()} CPUs, {read_memory_gb():.0f} GB, others on it:",
        f"{minutes:.0f} minutes, {len(hits)} faults that hit ({len(faults) - len(hits)} that found "
        f"nothing), {attempts} attempts; four ranks or more on this machine.",
        "",
        "Slopes by least squares over means of a minute, ± one standard error; bold where it is",
        "more than three errors from zero. The first minute of each process is left out.",
        "*In a process*: processes of a kind have one slope, and each a level of its own.",
        "*Over the run*: all samples of the kind against the time of the run; of processes that",
        "live for one attempt it shows if later ones are larger. Agents and ranks wait for their",
        "attempt first and then train, which is their slope in a process.",
        "",
        "| process | how many | longest, min | MiB, median | MiB/h in a process "
        "| MiB/h after its first ten minutes | MiB/h over the run "
        "| descriptors, least to most | descriptors/h in a process "
        "| descriptors/h over the run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines += _render_process(kind, [one for one in samples if one.get("kind") == kind])
    lines += [
        "",
        "Attempts make folders, so files and bytes grow with them; what counts is the growth per",
        "attempt, and that the rest does not grow.",
        "",
        "| folder | files at first | at last | files/h | files/attempt | kB at first | at last "
        "| kB/h | kB/attempt |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in FOLDERS:
        lines += _render_folder(name, [one for one in samples if one.get("folder") == name])
    lines += ["", f"Faults that hit: {', '.join(f'{k} {n}' for k, n in sorted(count.items()))}."]
    if missed := Counter(one["fault"] for one in faults) - count:
        lines += [f"Nothing to hit: {', '.join(f'{k} {n}' for k, n in sorted(missed.items()))}."]
    lines += ["", "| run | ended | steps | attempts | problems |", "|---|---|---|---|---|"]
    for one in ends:
        wrong = "; ".join(one["problems"]) or "none"
        lines.append(
            f"| {one['soak'].rpartition(' ')[0]} | {one['end']} | {one['steps']} | "
            f"{one['attempts']} | {wrong} |"
        )
    return "\n".join(lines) + "\n"


def _sum_minutes(samples: Sequence[dict[str, Any]]) -> float:
    last: dict[str, float] = {}
    for one in samples:
        if "kind" in one:
            last[one["soak"]] = one["s"]
    return sum(last.values()) / 60


def _render_process(kind: str, samples: Sequence[dict[str, Any]]) -> list[str]:
    processes = group_by_process(samples)
    if not processes:
        return []
    settled = [one for series in processes.values() for one in series]
    rss = sorted(one["rss"] for one in settled)
    descriptors = [one["descriptors"] for one in settled]
    longest = max(one["age"] for one in settled) / 60
    soaks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in settled:
        soaks[one["soak"]].append(one)
    cells = [f"{rss[len(rss) // 2] / 2**20:.1f}"]
    for what, unit in (("rss", 2**20), ("descriptors", 1)):
        if what == "descriptors":
            cells.append(f"{min(descriptors)} to {max(descriptors)}")
        late = group_by_process(samples, LATE_S)
        for groups in (processes, late, soaks) if what == "rss" else (processes, soaks):
            slope = fit_slope(average_minutes(series, what) for series in groups.values())
            cells.append(_format_slope(slope, unit))
    return [f"| {kind} | {len(processes)} | {longest:.0f} | {' | '.join(cells)} |"]


def _render_folder(name: str, samples: Sequence[dict[str, Any]]) -> list[str]:
    if not samples:
        return []
    soaks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in samples:
        if one["s"] >= SETTLE_S:
            soaks[one["soak"]].append(one)
    cells = []
    for what, unit in (("files", 1), ("bytes", 1000)):
        firsts = ", ".join(f"{series[0][what] / unit:.0f}" for series in soaks.values())
        lasts = ", ".join(f"{series[-1][what] / unit:.0f}" for series in soaks.values())
        over_time = fit_slope(average_minutes(series, what) for series in soaks.values())
        by_attempt = fit_slope(
            [(one["attempts"], one[what]) for one in series] for series in soaks.values()
        )
        cells += [firsts, lasts, _format_slope(over_time, unit), _format_slope(by_attempt, unit)]
    return [f"| {name} | {' | '.join(cells)} |"]


def _format_slope(slope: Slope | None, unit: float) -> str:
    if slope is None:
        return "too few"
    text = f"{slope.value / unit:.2f} ± {slope.error / unit:.2f}"
    return f"**{text}**" if slope.is_clear else text


def main(words: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background has INT ignored
        signal.signal(number, signal.default_int_handler)
    options = build_parser().parse_args(words)
    problems: list[str] = []
    if not options.page:
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{options.seed}-", dir=options.folder))
        problems = run_soak(
            folder,
            options.samples,
            minutes=options.minutes,
            every_s=options.every,
            seed=options.seed,
        )
        for text in problems:
            print(f"problem: {text}", file=sys.stderr)
        print(f"samples: {options.samples}; the run's folder: {folder}")
    page = render_page(read_samples(options.samples))
    print(page)
    if options.write:
        RESULT.write_text(page)
    return 1 if problems else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=Path, default=Path("soak.jsonl"), metavar="FILE")
    parser.add_argument("--folder", type=Path, help="where the run's folder is made")
    parser.add_argument("--page", action="store_true", help="make the page of FILE, run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
