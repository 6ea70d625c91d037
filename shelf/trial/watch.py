"""Watches a run of a try: to its second step, its end, or the limit of its time.

A script that goes on after its second step is ended; a built-in program ends by itself. A run that
shows no step is asked for its ranks' stacks: ranks that use no processor hang, others may only need
more time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from varuna_core.records.formatting import format_duration
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.stacks.collect import collect_stacks
from vjob.jobs.monitor.stacks.group import render_stacks
from vjob.jobs.runs.find import view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.trial.smaller import SAVING, STEPS

log = logging.getLogger(__name__)
POLL_S = 0.5
NUM_LINES = 5
SAMPLE_S = 6.0
"""After the last step that is needed, for a sample of the GPUs."""
BEATS_S = 20.0
"""Beyond the limit, for the two signs of life that tell how much ranks used their processors."""
STACKS_S = 40.0
IDLE_PERCENT = 5.0
"""Per cent of a core; a rank that uses no more is taken to be waiting."""

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
class TryObservation:
    """Observations of one start of a try."""

    run: RunFolder
    snapshot: Snapshot
    verdict: Verdict
    limit_s: float
    ending: Ending = Ending.LIMIT
    gpu_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Most memory in use and memory there is, by GPU."""
    stacks: tuple[str, ...] = ()
    """Stacks of ranks that show no step, as `vjob stacks` prints them."""
    is_hanging: bool = False
    """None of them uses its processor."""

    @property
    def took_s(self) -> float | None:
        """Seconds since the ranks were started; None before."""
        went_at = self.snapshot.went_at
        return None if went_at is None else max(0.0, self.snapshot.now - went_at)

    @property
    def gpus_not_known(self) -> str:
        """Why no node's GPUs can be read; empty where those of some node can."""
        reasons = [node.gpus_not_known for node in self.snapshot.nodes]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that lines show, each once."""
        progress = self.snapshot.progress
        if progress is None:
            return ()
        return tuple(dict.fromkeys(point.step for point in progress.points)) or (progress.step,)


def watch(run: RunFolder, *, ends_itself: bool, limit_s: float, say: Say) -> TryObservation:
    """Watch until its steps were printed, or, of a program that ends by itself, its end."""
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
        seen = TryObservation(
            run=run, snapshot=snapshot, verdict=verdict, limit_s=limit_s, gpu_mb=gpu_mb
        )
        if snapshot.record_state in ("ended", "refused"):
            return replace(seen, ending=Ending.OVER)
        if verdict.never_starts:
            return replace(seen, ending=Ending.NEVER)
        has_enough, is_failing = len(seen.steps) >= STEPS, verdict.health is Health.FAILING
        if has_enough and (is_failing or not ends_itself):
            enough_at = enough_at or time.monotonic()
            is_sampled = gpu_mb or not snapshot.num_gpus or seen.gpus_not_known
            is_late = time.monotonic() - enough_at > SAMPLE_S
            if is_late or verdict.rule == "not a number" or (is_sampled and not is_failing):
                return replace(seen, ending=Ending.STEPS)
        most_s = limit_s * (SAVING if has_enough and ends_itself else 1)
        over_s = -1.0 if seen.took_s is None else seen.took_s - most_s
        if over_s > 0 and seen.steps:
            return seen
        knows_use = all(rank.cpu_percent is not None for rank in snapshot.ranks)
        if over_s > (0.0 if knows_use else BEATS_S):
            return _ask_ranks(seen, say)
        _show_progress(seen, say)
        time.sleep(POLL_S)


def _show_progress(seen: TryObservation, say: Say) -> None:
    if seen.took_s is None:
        can = schedulers.get_capabilities(seen.snapshot.scheduler.name)
        is_waiting = seen.verdict.health is Health.PENDING and can.has_queue
        say(seen.verdict.reason if is_waiting else "preparing the node")
    elif seen.steps:
        say(f"step {seen.steps[-1]} done")
    else:
        left = format_duration(max(0.0, seen.limit_s - seen.took_s))
        say(f"ranks run; no step yet (at most {left} more)")


def _ask_ranks(seen: TryObservation, say: Say) -> TryObservation:
    """Ask ranks that show no step for their stacks."""
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
    hangs = bool(stacks.groups) and all(idle.issuperset(group.ranks) for group in stacks.groups)
    return replace(seen, stacks=tuple(render_stacks(stacks).splitlines()), is_hanging=hangs)
