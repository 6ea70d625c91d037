"""Judge a try: find what would stop the whole run, with its typed cause. Pure.

The rules of `vjob status` (jobs/monitor/rules) apply first, and their findings are quoted. Rules of
the try alone find a loss that is not a number, ranks that hang, and a program that does not end.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, REFUSED_BY_VJOB
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Target
from varuna_core.records.formatting import format_duration, join_numbers
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.plan import read_attempt_plan
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.rules.words import is_command, render_advice
from vjob.shelf.trial.result import Trouble
from vjob.shelf.trial.smaller import STEPS
from vjob.shelf.trial.watch import Ending, TryObservation

NUM_EVIDENCE = 3
NUM_LINES = 200
"""Lines searched for the place of an error, at the end of a rank's standard error."""
PLACE = re.compile(r'(?:\[rank\d+\]:)?\s+File "([^"]+)", line (\d+)(?:, in (.+))?$')
"""Line of a traceback; torch may print the rank before it."""
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/varuna_core/", "<frozen")
ECHOES = (ATTEMPT_ENDED, REFUSED_BY_VJOB)
"""Known lines that repeat how the attempt ended."""
ON_GOING = (Action.CANCEL, Action.WAIT)
"""Remedies that only make sense while a run continues; a try is over."""


def judge_try(seen: TryObservation) -> Trouble | None:
    """Return the cause that would stop the whole run; None if no problem is known."""
    health, what = seen.verdict.health, "steps" if seen.steps else "starts"
    lost = _find_lost_loss(seen)
    if lost is not None:
        return lost
    if seen.ending is Ending.NEVER:
        return _quote("submit", seen)
    if health is Health.DONE:
        return None
    if seen.ending is Ending.OVER or health is Health.FAILING:
        return _quote(what, seen)
    if seen.ending is Ending.STEPS:
        return None
    if seen.is_hanging:
        return _describe_hang(seen)
    if health is Health.STALLED:
        return _quote(what, seen)
    if len(seen.steps) >= STEPS:
        limit = format_duration(seen.limit_s)
        cause = f"its {STEPS} steps were done and it did not end within {limit} after them"
        return Trouble(what=what, rule="no end", cause=cause, remedy="--limit gives it longer")
    return None


def _quote(what: str, seen: TryObservation) -> Trouble:
    """Quote the verdict's finding, with remedies that repair the cause or, without any, all
    others."""
    verdict = seen.verdict
    remedies = [one for one in verdict.main.remedies if one.action not in ON_GOING]
    remedies = [one for one in remedies if one.target is not Target.REPORT]
    mending = [one for one in remedies if not is_command(one)]
    chosen = replace(verdict.main, remedies=tuple(mending or remedies))
    # The sentence rests on the first one.
    lines = [line.text for line in verdict.evidence[1:] if line.kind not in ECHOES]
    return Trouble(
        what=what,
        rule=verdict.rule,
        end=verdict.main.cause,
        cause=verdict.reason,
        remedy=render_advice(chosen, verdict.context, verdict.job),
        evidence=tuple((_find_place(seen) or lines)[:NUM_EVIDENCE]),
    )


def _find_place(seen: TryObservation) -> list[str]:
    """Return the last call of a traceback that is in the user's own code, with its source line."""
    attempts, rank = seen.run.attempts(), seen.verdict.rank
    if rank is None or not attempts:
        return []
    plan = read_attempt_plan(seen.run, attempts[-1].number)
    lines = locate_output(attempts[-1], plan, rank, "err").last_lines(NUM_LINES)
    place = ""
    for line, code in zip(lines, [*lines[1:], ""], strict=True):
        match = PLACE.match(line)
        if match is not None and not any(part in match[1] for part in LIBRARIES):
            within = f", in {match[3]}" if match[3] else ""
            place = f"{match[1].rpartition('/')[2]}:{match[2]}{within}"
            if code and not PLACE.match(code):
                place += ": " + re.sub(r"^(\d+: |\[rank\d+\]:)", "", code).strip()
    return [place] if place else []


def _find_lost_loss(seen: TryObservation) -> Trouble | None:
    """Return a finding for the first step whose loss is not a finite number."""
    progress = seen.snapshot.progress
    for point in progress.points if progress is not None else ():
        if point.nan or (point.loss is not None and not math.isfinite(point.loss)):
            loss = "nan" if point.loss is None or math.isnan(point.loss) else point.loss
            return Trouble(
                what="steps",
                rule="not a number",
                end=EndCause.NOT_A_NUMBER,
                cause=f"the loss is {loss} in step {point.step}",
                remedy="look at the first batch and the initial weights: a too high rate, a zero "
                "in a division or a mask of all -inf are the usual causes",
            )
    return None


def _describe_hang(seen: TryObservation) -> Trouble:
    gone = [rank.rank for rank in seen.snapshot.ranks if rank.exit is not None]
    ended = f"; ended {'is rank' if len(gone) == 1 else 'are ranks'} {join_numbers(gone)}"
    limit = format_duration(seen.limit_s)
    return Trouble(
        what="starts",
        rule="hang",
        end=EndCause.HANG,
        cause=f"no step in {limit}, and ranks wait: none uses its processor{ended if gone else ''}",
        remedy="see that all ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the "
        "environment and make the same calls: they wait for one that never comes",
        evidence=tuple(line.text for line in seen.snapshot.errors[:NUM_EVIDENCE]),
    )
