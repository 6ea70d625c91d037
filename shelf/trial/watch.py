"""Watches a run of a try: to its second step, its end, or the limit of its time.

A script that goes on after its second step is ended; a built-in program ends by itself. A run that
shows no step is asked for its ranks' stacks: ranks that wait for something that does not come hang,
others only need more time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from varuna_core.records.formatting import format_duration, join_numbers
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.stacks.collect import collect_stacks
from vjob.jobs.monitor.stacks.group import Frame, StackGroup, Stacks, shorten_path
from vjob.jobs.runs.find import view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.trial.smaller import SAVING

log = logging.getLogger(__name__)
POLL_S = 0.5
NUM_LINES = 5
SAMPLE_S = 6.0
"""After the last step that is needed, for a step's time and a sample of the GPUs."""
STACKS_S = 40.0
IDLE_PERCENT = 5.0
"""Per cent of a core; a rank that uses no more is taken to be waiting."""
WAITS = {
    *("init_process_group", "rendezvous", "_create_c10d_store", "barrier", "monitored_barrier"),
    *("all_reduce", "all_gather", "broadcast", "recv", "send", "synchronize", "wait"),
    *("connect", "accept", "urlopen", "select", "poll", "_read_ready", "read", "readinto"),
    *("acquire", "join", "sleep", "input", "flock", "lockf"),
}
"""Python functions in which a rank waits for another process, or for nothing."""
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/varuna_core/", "<frozen")

Say = Callable[[str], object]


class Ending(Enum):
    """Reasons why a try is watched no longer."""

    STEPS = "steps"
    """Its steps were seen."""
    OVER = "over"
    """The run has ended by itself."""
    LIMIT = "limit"
    """Its time was up."""
    NEVER = "never"
    """The scheduler will not start it."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Observations of one start of a try."""

    run: RunFolder
    snapshot: Snapshot
    verdict: Verdict
    limit_s: float
    ending: Ending = Ending.LIMIT
    gpu_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Most memory in use and memory there is, by GPU."""
    hang: str = ""
    """Places where ranks wait, if they do."""
    at: str = ""
    """Places where they are, if they do not."""

    @property
    def took_s(self) -> float | None:
        """Seconds since the ranks were started; None before."""
        went_at = self.snapshot.went_at
        return None if went_at is None else max(0.0, self.snapshot.now - went_at)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that lines show, each once."""
        progress = self.snapshot.progress
        if progress is None:
            return ()
        return tuple(dict.fromkeys(point.step for point in progress.points)) or (progress.step,)

    @property
    def step_times(self) -> list[float]:
        """Seconds of each step that has them; lines close to each other do not give any."""
        progress = self.snapshot.progress
        points = progress.points if progress is not None else ()
        return [point.step_s for point in points if point.step_s is not None]


def watch(
    run: RunFolder, *, num_steps: int, ends_itself: bool, limit_s: float, say: Say
) -> Seen:  # fmt: skip
    """Watch until `num_steps` were printed, or, of a program that ends by itself, its end."""
    reader = JudgedReader(RunReader(run, num_lines=NUM_LINES))
    gpu_mb: dict[str, tuple[float, float]] = {}
    enough_at: float | None = None
    while True:
        snapshot, verdict = reader.read()
        for node in snapshot.nodes:
            for gpu in node.gpus:
                used, total = gpu.memory_used_mb, gpu.memory_total_mb
                if used is not None and total and gpu.num_processes:
                    key = f"{node.name}:{gpu.index}"
                    gpu_mb[key] = (max(used, gpu_mb.get(key, (0.0, 0.0))[0]), total)
        seen = Seen(run=run, snapshot=snapshot, verdict=verdict, limit_s=limit_s, gpu_mb=gpu_mb)
        if snapshot.record_state in ("ended", "refused"):
            return replace(seen, ending=Ending.OVER)
        if verdict.never_starts:
            return replace(seen, ending=Ending.NEVER)
        has_enough, is_failing = len(seen.steps) >= num_steps, verdict.health is Health.FAILING
        if has_enough and (is_failing or not ends_itself):
            enough_at = enough_at or time.monotonic()
            is_sampled = seen.step_times and (not snapshot.num_gpus or gpu_mb)
            is_late = time.monotonic() - enough_at > SAMPLE_S
            if is_late or verdict.rule == "not a number" or (is_sampled and not is_failing):
                return replace(seen, ending=Ending.STEPS)
        most_s = limit_s * (SAVING if has_enough and ends_itself else 1)
        if seen.took_s is not None and seen.took_s > most_s:
            return seen if seen.steps else _ask_ranks(seen, say)
        _show_progress(seen, say)
        time.sleep(POLL_S)


def _show_progress(seen: Seen, say: Say) -> None:
    if seen.took_s is None:
        can = schedulers.get_capabilities(seen.snapshot.scheduler.name)
        is_waiting = seen.verdict.health is Health.PENDING and can.has_queue
        say(seen.verdict.reason if is_waiting else "preparing the node")
    elif seen.steps:
        say(f"step {seen.steps[-1]} done")
    else:
        left = format_duration(max(0.0, seen.limit_s - seen.took_s))
        say(f"ranks run; no step yet (at most {left} more)")


def _ask_ranks(seen: Seen, say: Say) -> Seen:
    """Where ranks are that show no step."""
    say("no step yet: asking the ranks where they are")
    try:
        stacks = collect_stacks(view_run(seen.run), timeout_s=STACKS_S)
    except VjobError as error:
        log.info("no stacks: %s", error)
        return seen
    idle = frozenset(
        rank.rank
        for rank in seen.snapshot.ranks
        if rank.cpu_percent is not None and rank.cpu_percent < IDLE_PERCENT
    )
    hang, at = judge_stacks(stacks, idle)
    return replace(seen, hang=hang, at=at)


def judge_stacks(stacks: Stacks, idle: frozenset[int]) -> tuple[str, str]:
    """Where ranks hang, or else where they are: one of the two is empty."""
    found: dict[str, list[int]] = {}
    waits = bool(stacks.groups)
    for group in stacks.groups:
        place, is_waiting = describe_place(group)
        found.setdefault(place, []).extend(group.ranks)
        waits = waits and (is_waiting or idle.issuperset(group.ranks))
    places = [f"{_name_ranks(ranks)} in {place}" for place, ranks in found.items()]
    named = "; ".join(places[:3]) + ("; ..." if len(places) > 3 else "")
    return (named, "") if waits else ("", named)


def describe_place(group: StackGroup) -> tuple[str, bool]:
    """`init_process_group, called at train.py:14`, and whether its innermost calls wait."""
    frames = group.stacks[0].threads[0].frames
    # Newer Pythons give a function's class too: `accept` of `socket.accept`.
    names = [frame.function.rpartition(".")[2] for frame in frames]
    own = next((n for n, frame in enumerate(frames) if not _is_library(frame)), None)
    inner = names[:own]
    known = [name for name in inner if name in WAITS]
    if own is not None and inner:
        return f"{(known or inner)[-1]}, called at {_spell(frames[own])}", bool(known)
    frame = frames[own or 0]
    return f"{frame.function} ({_spell(frame)})", bool(known)


def _is_library(frame: Frame) -> bool:
    is_native = "/" not in frame.file and not frame.file.endswith(".py")
    return is_native or any(part in frame.file for part in LIBRARIES)


def _spell(frame: Frame) -> str:
    return f"{shorten_path(frame.file).rpartition('/')[2]}:{frame.line}"


def _name_ranks(ranks: Sequence[int]) -> str:
    word, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
    return f"{word} {join_numbers(ranks)} {verb}"
