"""Judgement of a try: one table of what would stop the whole run, with typed causes. Pure.

What `vjob status` has a rule for is judged by it (jobs/monitor/rules); the table adds what a try
alone can know. Sentences are rendered last, from the rule and its values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.facts.catalogue.rank_output import ATTEMPT_ENDED, REFUSED_BY_VJOB
from varuna_core.facts.cause import EndCause
from varuna_core.facts.finding import Finding
from varuna_core.facts.remedy import Action, Context, Remedy, Target, render_all
from varuna_core.records.formatting import format_duration, join_numbers
from varuna_core.records.logs.rank_output import find_output
from varuna_core.records.plan import read_attempt_plan
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.rules.words import is_command, render_advice
from vjob.shelf.trial.result import Trouble
from vjob.shelf.trial.smaller import STEPS
from vjob.shelf.trial.watch import LIBRARIES, Ending, Seen

NUM_EVIDENCE = 3
NUM_LINES = 200
"""Lines of a rank's standard error that are searched for the place of an error."""
PLACE = re.compile(r'(?:\[rank\d+\]:)?\s+File "([^"]+)", line (\d+)(?:, in (.+))?$')
"""A line of a traceback; torch puts the rank before it."""
ECHOES = (ATTEMPT_ENDED, REFUSED_BY_VJOB)
"""Known lines that repeat how the attempt ended."""
ON_GOING = (Action.CANCEL, Action.WAIT)
"""Remedies for a run that goes on: a try is over."""
SENTENCES: Mapping[str, str] = {
    "not a number": "the loss is {loss} in step {step}",
    "hang": "no step in {limit}, and ranks wait: {places}{gone}",
    "no end": "its {steps} steps were done and it did not end within {limit} after them",
    "folder": "train.checkpoint.folder {folder} cannot be written: {why}",
    "not saved": "it ended well and no checkpoint is in {folder}",
    "not loaded": "{seen}",
}
"""Sentence of each finding of a try, by its rule."""
FIRST_BATCH = Remedy(
    Action.INSPECT,
    detail="look at the first batch and the initial weights: a too high rate, a zero in a division "
    "or a mask of all -inf are the usual causes",
)
MEETING = Remedy(
    Action.INSPECT,
    detail="see that all ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the "
    "environment and make the same calls: they wait for one that never comes",
)
LONGER = Remedy(Action.INSPECT, detail="--limit gives it longer")


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A row of the table: what a try may look like, and the finding if it does."""

    when: Callable[[Seen], bool]
    what: str | None = None
    """The part of the try that failed; None for `steps`, or `starts` before the first step."""
    find: Callable[[Seen], Finding | None]
    """None where it is well; `quote` for the finding of the verdict."""


def find_trouble(seen: Seen) -> list[Trouble]:
    """The first row that applies, which says what would stop the whole run; empty if healthy."""
    row = next((row for row in TABLE if row.when(seen)), None)
    found = row.find(seen) if row is not None else None
    if row is None or found is None:
        return []
    what = row.what or ("steps" if seen.steps else "starts")
    if found is seen.verdict.main:
        return [_quote(what, seen)]
    return [make_trouble(what, found, evidence=[x.text for x in seen.snapshot.errors])]


def make_trouble(what: str, found: Finding, *, evidence: Sequence[str] = ()) -> Trouble:
    """The finding of a try in words."""
    return Trouble(
        what=what,
        rule=found.rule,
        end=found.cause,
        cause=SENTENCES[found.rule].format(**found.values),
        remedy=render_all(found.remedies, Context.CONF, ""),
        evidence=tuple(evidence[:NUM_EVIDENCE]),
    )


def _quote(what: str, seen: Seen) -> Trouble:
    """The verdict's finding; with the remedies that repair it, else those that tell more."""
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


def _find_place(seen: Seen) -> list[str]:
    """The last call of a traceback that lies in the user's own code, and its line."""
    attempts, rank = seen.run.attempts(), seen.verdict.rank
    if rank is None or not attempts:
        return []
    plan = read_attempt_plan(seen.run, attempts[-1].number)
    lines = find_output(attempts[-1], plan, rank, "err").last_lines(NUM_LINES)
    place = ""
    for line, code in zip(lines, [*lines[1:], ""], strict=True):
        match = PLACE.match(line)
        if match is not None and not any(part in match[1] for part in LIBRARIES):
            within = f", in {match[3]}" if match[3] else ""
            place = f"{match[1].rpartition('/')[2]}:{match[2]}{within}"
            if code and not PLACE.match(code):
                place += ": " + re.sub(r"^(\d+: |\[rank\d+\]:)", "", code).strip()
    return [place] if place else []


def _find_lost_loss(seen: Seen) -> Mapping[str, Any] | None:
    """The first step whose loss is not a number."""
    progress = seen.snapshot.progress
    for point in progress.points if progress is not None else ():
        if point.nan or (point.loss is not None and not math.isfinite(point.loss)):
            loss = "nan" if point.loss is None or math.isnan(point.loss) else point.loss
            return {"loss": loss, "step": point.step}
    return None


def _tell_loss(seen: Seen) -> Finding:
    values = _find_lost_loss(seen) or {}
    return Finding("not a number", EndCause.NOT_A_NUMBER, values, remedies=(FIRST_BATCH,))


def _tell_hang(seen: Seen) -> Finding:
    gone = [rank.rank for rank in seen.snapshot.ranks if rank.exit is not None]
    ended = f"; ended {'is rank' if len(gone) == 1 else 'are ranks'} {join_numbers(gone)}"
    values = {
        "limit": format_duration(seen.limit_s),
        "places": seen.hang,
        "gone": ended if gone else "",
    }
    return Finding("hang", EndCause.HANG, values, remedies=(MEETING,))


def _tell_no_end(seen: Seen) -> Finding:
    values = {"steps": STEPS, "limit": format_duration(seen.limit_s)}
    return Finding("no end", values=values, remedies=(LONGER,))


def _is_well(seen: Seen) -> None:
    return None


def quote(seen: Seen) -> Finding:
    """The finding of the verdict."""
    return seen.verdict.main


TABLE = (
    Judgement(when=lambda seen: _find_lost_loss(seen) is not None, what="steps", find=_tell_loss),
    Judgement(when=lambda seen: seen.ending is Ending.NEVER, what="submit", find=quote),
    Judgement(when=lambda seen: seen.verdict.health is Health.DONE, find=_is_well),
    Judgement(when=lambda seen: seen.ending is Ending.OVER, find=quote),
    Judgement(when=lambda seen: seen.verdict.health is Health.FAILING, find=quote),
    Judgement(when=lambda seen: seen.ending is Ending.STEPS, find=_is_well),
    Judgement(when=lambda seen: bool(seen.hang), what="starts", find=_tell_hang),
    Judgement(when=lambda seen: seen.verdict.health is Health.STALLED, find=quote),
    Judgement(when=lambda seen: len(seen.steps) >= STEPS, find=_tell_no_end),
)
"""The first row that applies counts; a try that none applies to is well, as far as is known."""
