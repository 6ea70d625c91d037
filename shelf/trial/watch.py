"""Watch the run of a try until its second step, its end, or its time limit.

A script that continues after its second step is ended; a built-in program ends by itself. If no
step is seen, the ranks are asked for their stacks: ranks that use no processor time hang; others
may only need more time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from varuna_core.records.record import ENDED, REFUSED
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.jobs.monitor.readers.run import RunReader
from vjob.jobs.monitor.stacks.collect import collect_stacks
from vjob.jobs.monitor.stacks.group import render_stacks
from vjob.jobs.runs.find import view_run
from vjob.shelf.trial.smaller import SAVING, STEPS

log = logging.getLogger(__name__)
POLL_S = 0.5
NUM_LINES = 5
SAMPLE_S = 6.0
"""Seconds to wait for a sample of the GPUs after the last required step."""
BEATS_S = 20.0
"""Seconds beyond the limit to wait for two heartbeats, from which the use of processors is
known."""
STACKS_S = 40.0
IDLE_PERCENT = 5.0
"""Percentage of a core up to which a rank counts as waiting."""

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class TryObservation:
    """Observations of one start of a try."""

    snapshot: Snapshot
    verdict: Verdict
    limit_s: float
    is_enough: bool = False
    """True if the watch ended because the required steps were seen."""
    gpu_mb: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Greatest memory in use, and total memory, by GPU."""
    stacks: tuple[str, ...] = ()
    """Stacks of ranks if no step was seen, as `vjob stacks` prints them."""
    is_hanging: bool = False
    """True if no rank uses its processor."""

    @property
    def is_over(self) -> bool:
        return self.snapshot.record_state in (ENDED, REFUSED)

    @property
    def took_s(self) -> float | None:
        """Seconds since the ranks were started; None if they were not."""
        went_at = self.snapshot.went_at
        return None if went_at is None else max(0.0, self.snapshot.now - went_at)

    @property
    def gpus_not_known(self) -> str:
        """Reason why no node's GPUs can be read; empty if those of some node can."""
        reasons = [node.gpus_not_known for node in self.snapshot.nodes]
        return reasons[0] if reasons and all(reasons) else ""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that log lines show, without duplicates."""
        progress = self.snapshot.progress
        if progress is None:
            return ()
        return tuple(dict.fromkeys(point.step for point in progress.points)) or (progress.step,)


def watch(run: RunFolder, *, ends_itself: bool, limit_s: float, say: Say) -> TryObservation:
    """Watch until the required steps or the program's own end; return what was seen."""
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
        seen = TryObservation(snapshot=snapshot, verdict=verdict, limit_s=limit_s, gpu_mb=gpu_mb)
        if seen.is_over or verdict.never_starts:
            return seen
        has_enough, is_failing = len(seen.steps) >= STEPS, verdict.health is Health.FAILING
        if has_enough and (is_failing or not ends_itself):
            enough_at = enough_at or time.monotonic()
            is_sampled = gpu_mb or not snapshot.num_gpus or seen.gpus_not_known
            is_late = time.monotonic() - enough_at > SAMPLE_S
            if is_late or verdict.rule == "not a number" or (is_sampled and not is_failing):
                return replace(seen, is_enough=True)
        most_s = limit_s * (SAVING if has_enough and ends_itself else 1)
        over_s = -1.0 if seen.took_s is None else seen.took_s - most_s
        if over_s > 0 and seen.steps:
            return seen
        knows_use = all(rank.cpu_percent is not None for rank in snapshot.ranks)
        if over_s > (0.0 if knows_use else BEATS_S):
            say("no step yet: asking the ranks where they are")
            return _ask_ranks(run, seen)
        say(verdict.reason)
        time.sleep(POLL_S)


def _ask_ranks(run: RunFolder, seen: TryObservation) -> TryObservation:
    """Collect the stacks of ranks that show no step, and determine if the ranks hang."""
    try:
        stacks = collect_stacks(view_run(run), timeout_s=STACKS_S)
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
