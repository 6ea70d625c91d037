"""Which attempt did which steps of the way to the final weights.

attempt 0   1 ────────► 40┄┄┄45        resumed from 40: what came after it was for nothing
attempt 1               41 ───────► 90
                                       kept: 1 to 40 of the first, 41 to 90 of the second
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from tests.chaos.watching import LINE
from varuna_core.records.runfolder import RunFolder

SAMPLES = re.compile(r" iteration +(\d+)/[^|\n]*\| consumed samples: +(\d+) ")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Steps that one attempt did."""

    attempt: int
    first: int
    last: int
    """The last one that later steps stand on."""
    done: int
    """The last one that it did."""


def read_spans(run: RunFolder, batch: int) -> tuple[list[Span], list[str]]:
    """Those that lead to the final weights, and what is wrong with them.

    Step s reads the samples from (s - 1) x batch on, whatever the layout, and tells how many were
    read: so each sample is used once if each step is, and the count is right.
    """
    spans: list[Span] = []
    problems = []
    for attempt in run.attempts():
        text = "".join(
            path.read_text(errors="replace") for path in sorted(attempt.path.glob("ranks/*.out"))
        )
        steps = [int(step) for step, _ in LINE.findall(text)]
        if not steps:
            continue
        first, done = min(steps), max(steps)
        if steps != list(range(first, done + 1)):
            problems.append(f"attempt {attempt.number} did {steps}, not each step once")
        for step, samples in SAMPLES.findall(text):
            if int(samples) != int(step) * batch:
                problems.append(f"after step {step} {samples} samples of {batch} a step were read")
        spans = [replace(one, last=min(one.last, first - 1)) for one in spans]
        spans.append(Span(attempt=attempt.number, first=first, last=done, done=done))
    kept = [one for one in spans if one.last >= one.first]
    for before, after in itertools.pairwise(kept):
        if after.first != before.last + 1:
            problems.append(f"from step {before.last} on to {after.first}")
    return kept, problems
