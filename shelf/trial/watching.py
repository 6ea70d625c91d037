"""Runs a try and watches it: to its second step, its end, or the limit of its time.

A script that goes on after its second step is ended; a built-in program ends by itself. What a run
that shows no step does is asked of its ranks' stacks: ranks that wait for something that does not
come hang, others only need more time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from varuna_core.records.formatting import format_duration, join_numbers
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.stacks.collect import collect_stacks
from vjob.jobs.monitor.stacks.group import Frame, StackGroup, Stacks, shorten_path
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.trial.smaller import SAVING

log = logging.getLogger(__name__)
POLL_S = 0.5
NUM_LINES = 5
SAMPLE_S = 6.0
"""After the last step that is needed, for a step's time and a sample of the GPUs."""
STACKS_S = 40.0
CANCEL_S = 60
IDLE_PERCENT = 5.0
"""Of a core: a rank that uses no more waits."""
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
    """Why a try was watched no longer."""

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
    """What was seen of one start of a try."""

    run: RunFolder
    ending: Ending
    snapshot: Snapshot
    verdict: Verdict
    took_s: float | None = None
    """From the start of the ranks to the last step, or to the end; None without a start."""
    steps: tuple[int, ...] = ()
    """Those that were printed, in order."""
    gpu_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Most memory in use and memory there is, by GPU."""
    rank_mb: dict[int, float] = field(default_factory=dict)
    """Most memory of the processes of ranks on this machine."""
    hang: str = ""
    """Where ranks wait, if they do."""
    at: str = ""
    """Where they are, if they do not."""


class Watcher:
    """Watches one run of a try."""

    def __init__(self, run: RunFolder, *, limit_s: float, say: Say) -> None:
        self.run, self.limit_s, self.say = run, limit_s, say
        self._reader = JudgedReader(RunReader(run, num_lines=NUM_LINES))
        self._gpu_mb: dict[str, tuple[float, float]] = {}
        self._rank_mb: dict[int, float] = {}

    def watch(self, *, num_steps: int, ends_itself: bool) -> Seen:
        """Watch until `num_steps` were printed, or, of a program that ends by itself, its end."""
        enough_at: float | None = None
        while True:
            snapshot, verdict = self._look()
            took_s = _find_taken_s(snapshot)
            steps = list_steps(snapshot)
            if snapshot.record_state in ("ended", "refused"):
                return self._finish(Ending.OVER, snapshot, verdict, steps)
            if verdict.never_starts:
                return self._finish(Ending.NEVER, snapshot, verdict, steps)
            has_enough = len(steps) >= num_steps
            is_failing = verdict.health is Health.FAILING
            if has_enough and (is_failing or not ends_itself):
                enough_at = enough_at or time.monotonic()
                is_sampled = is_timed(snapshot) and (not snapshot.num_gpus or bool(self._gpu_mb))
                is_late = time.monotonic() - enough_at > SAMPLE_S
                is_lost = verdict.rule == "not a number"
                if is_late or is_lost or (is_sampled and not is_failing):
                    return self._finish(Ending.STEPS, snapshot, verdict, steps)
            limit_s = self.limit_s * (SAVING if has_enough and ends_itself else 1)
            if took_s is not None and took_s > limit_s:
                return self._time_out(snapshot, verdict, steps)
            self._show_progress(snapshot, verdict, steps, took_s)
            time.sleep(POLL_S)

    def _look(self) -> tuple[Snapshot, Verdict]:
        snapshot, verdict = self._reader.read()
        for node in snapshot.nodes:
            for gpu in node.gpus:
                used, total = gpu.memory_used_mb, gpu.memory_total_mb
                if used is not None and total and gpu.num_processes:
                    key = f"{node.name}:{gpu.index}"
                    self._gpu_mb[key] = (max(used, self._gpu_mb.get(key, (0.0, 0.0))[0]), total)
        if schedulers.get_capabilities(snapshot.scheduler.name).one_host:
            for rank in snapshot.ranks:
                mb = _read_peak_mb(rank.pid)
                if mb is not None:
                    self._rank_mb[rank.rank] = max(mb, self._rank_mb.get(rank.rank, 0.0))
        return snapshot, verdict

    def _finish(
        self, ending: Ending, snapshot: Snapshot, verdict: Verdict, steps: tuple[int, ...],
        hang: str = "", at: str = "",
    ) -> Seen:  # fmt: skip
        return Seen(
            run=self.run,
            ending=ending,
            snapshot=snapshot,
            verdict=verdict,
            took_s=_find_taken_s(snapshot),
            steps=steps,
            gpu_mb=dict(self._gpu_mb),
            rank_mb=dict(self._rank_mb),
            hang=hang,
            at=at,
        )

    def _time_out(self, snapshot: Snapshot, verdict: Verdict, steps: tuple[int, ...]) -> Seen:
        if steps:
            return self._finish(Ending.LIMIT, snapshot, verdict, steps)
        self.say("no step yet: asking the ranks where they are")
        try:
            stacks = collect_stacks(view_run(self.run), timeout_s=STACKS_S)
        except VjobError as error:
            log.info("no stacks: %s", error)
            return self._finish(Ending.LIMIT, snapshot, verdict, steps)
        hang, at = judge_stacks(stacks, find_idle(snapshot))
        return self._finish(Ending.LIMIT, snapshot, verdict, steps, hang=hang, at=at)

    def _show_progress(
        self, snapshot: Snapshot, verdict: Verdict, steps: tuple[int, ...], took_s: float | None
    ) -> None:
        if took_s is None:
            can = schedulers.get_capabilities(snapshot.scheduler.name)
            is_waiting = verdict.health is Health.PENDING and can.has_queue
            self.say(verdict.reason if is_waiting else "preparing the node")
        elif steps:
            self.say(f"step {steps[-1]} done")
        else:
            left = format_duration(max(0.0, self.limit_s - took_s))
            self.say(f"ranks run; no step yet (at most {left} more)")


def stop(run: RunFolder, *, saves: bool = False) -> None:
    """End a run that goes on, asked to save first where its ranks can; what is over is fine."""
    try:
        cancel_run(run, now=not saves, wait_s=CANCEL_S, say=lambda text: None)
    except VjobError as error:
        log.info("%s", error)


def list_steps(snapshot: Snapshot) -> tuple[int, ...]:
    """The steps that lines show, each once."""
    progress = snapshot.progress
    if progress is None:
        return ()
    return tuple(dict.fromkeys(point.step for point in progress.points)) or (progress.step,)


def is_timed(snapshot: Snapshot) -> bool:
    """True where the time of a step is known; lines close to each other do not give it."""
    progress = snapshot.progress
    return progress is not None and any(point.step_s is not None for point in progress.points)


def _find_taken_s(snapshot: Snapshot) -> float | None:
    """Since the ranks were started."""
    return None if snapshot.went_at is None else max(0.0, snapshot.now - snapshot.went_at)


def _read_peak_mb(pid: int | None) -> float | None:
    """The most memory that a process of this machine had."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None


# Where ranks are.


def find_idle(snapshot: Snapshot) -> frozenset[int]:
    """Ranks that use no processor."""
    return frozenset(
        rank.rank
        for rank in snapshot.ranks
        if rank.cpu_percent is not None and rank.cpu_percent < IDLE_PERCENT
    )


def judge_stacks(stacks: Stacks, idle: frozenset[int]) -> tuple[str, str]:
    """Where ranks hang, or else where they are: one of the two is empty."""
    found: dict[str, list[int]] = {}
    for group in stacks.groups:
        found.setdefault(describe_place(group), []).extend(group.ranks)
    places = [f"{_name_ranks(ranks)} in {place}" for place, ranks in found.items()]
    named = "; ".join(places[:3]) + ("; ..." if len(places) > 3 else "")
    waiting = [is_waiting(group) or idle.issuperset(group.ranks) for group in stacks.groups]
    if stacks.groups and all(waiting):
        return named, ""
    return "", named


def is_waiting(group: StackGroup) -> bool:
    """True where the innermost calls are known to wait."""
    frames = group.stacks[0].threads[0].frames
    own = _find_own(frames)
    inner = frames if own is None else frames[: frames.index(own)]
    return any(_name(frame) in WAITS for frame in inner)


def describe_place(group: StackGroup) -> str:
    """`init_process_group, called in train.py:14`."""
    frames = group.stacks[0].threads[0].frames
    own = _find_own(frames)
    if own is None:
        return _spell(frames[0])
    called = frames[: frames.index(own)]
    if not called:
        return f"{own.function} ({_spell_place(own)})"
    known = [_name(frame) for frame in called if _name(frame) in WAITS]
    return f"{(known or [_name(called[-1])])[-1]}, called at {_spell_place(own)}"


def _name(frame: Frame) -> str:
    """`accept` of `socket.accept`: newer Pythons give a function's class too."""
    return frame.function.rpartition(".")[2]


def _find_own(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost call of the user's own code."""
    return next((frame for frame in frames if not _is_library(frame)), None)


def _is_library(frame: Frame) -> bool:
    is_native = "/" not in frame.file and not frame.file.endswith(".py")
    return is_native or any(part in frame.file for part in LIBRARIES)


def _spell(frame: Frame) -> str:
    return f"{frame.function} ({_spell_place(frame)})"


def _spell_place(frame: Frame) -> str:
    return f"{shorten_path(frame.file).rpartition('/')[2]}:{frame.line}"


def _name_ranks(ranks: Sequence[int]) -> str:
    word, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
    return f"{word} {join_numbers(ranks)} {verb}"
