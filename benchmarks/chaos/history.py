"""The history of a run: the steps and losses that lead to its final weights, from its logs.

attempt 0   1 ────────► 40┄┄┄45        resumed from 40: what came after it was for nothing
attempt 1               41 ───────► 90
                                       kept: 1 to 40 of the first, 41 to 90 of the second
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

LINE = re.compile(r" iteration +(\d+)/(?:(?! iteration +\d).)*? lm loss: (\S+)")
"""Of one step: a full disk cuts a line short, and the next one follows on it."""
ALIKE = 2e-5
"""Relative, between losses of layouts that add up in another order (docs/morphing.md)."""
SAMPLES = re.compile(r" iteration +(\d+)/[^|\n]*\| consumed samples: +(\d+) ")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A row of steps that one attempt did."""

    attempt: int
    first: int
    last: int
    """The last one that later steps stand on."""
    done: int
    """The last one that it did."""


def read_spans(run: RunFolder, batch: int) -> tuple[list[Span], list[str]]:
    """Read the spans that lead to the final weights, and the problems found in them.

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


def read_losses(run: RunFolder) -> tuple[dict[int, float], list[str]]:
    """Read the loss of each step that leads to the final weights, and problems in the logs.

    An attempt goes on from a step that an earlier one has done; of a step that was done more than
    once the last time counts, for later steps stand on it.
    """
    found: dict[int, float] = {}
    problems = []
    for attempt in run.attempts():
        text = "".join(
            path.read_text(errors="replace") for path in sorted(attempt.path.glob("ranks/*.out"))
        )
        steps = {int(step): float(loss) for step, loss in LINE.findall(text)}
        resumed = re.search(r"resumed from iteration (\d+)", text)
        first = int(resumed[1]) if resumed else 0
        where = f"attempt {attempt.number}"
        if steps and min(steps) != first + 1:
            problems.append(f"{where} begins with step {min(steps)} after iteration {first}")
        if steps and sorted(steps) != list(range(min(steps), max(steps) + 1)):
            problems.append(f"{where} leaves out steps")
        if steps and first and first not in found:
            problems.append(f"{where} goes on from step {first}, which nobody has done")
        found.update(steps)
    return found, problems


def check_losses(run: RunFolder, *, lines_may_lack: bool) -> tuple[list[str], dict[int, float]]:
    """Compare every step's loss with the undisturbed training: problems, and undisturbed losses.

    The batch of each step is its own, so a sample that came twice or never would show in the loss.
    `lines_may_lack`: the disk that holds the logs was full.
    """
    import torch

    from tests.varuna_core.programs.reference_training import train_plainly

    torch.set_num_threads(1)
    training = read_training(run.training)
    losses, problems = read_losses(run)
    expected, _ = train_plainly(training)
    missing = sorted(set(expected) - set(losses))
    if lines_may_lack:
        problems = []
    elif missing:
        problems.append(f"{len(missing)} steps have no loss: {missing[:5]}")
    for step, loss in sorted(losses.items()):
        if not abs(loss - expected[step]) <= ALIKE * abs(expected[step]):
            problems.append(f"step {step}: loss {loss}, undisturbed {expected[step]}")
            break
    return problems, expected
