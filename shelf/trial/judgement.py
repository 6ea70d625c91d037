"""What was seen of a try, judged: what would stop the whole run, and a row that says how it began.

Causes and remedies are those of `vjob status` (jobs/monitor/rules). Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from varuna_core.records.formatting import format_duration, join_numbers
from varuna_core.records.logs.rank_output import find_output
from varuna_core.records.plan import read_attempt_plan
from vjob.jobs.monitor.model.snapshot import Health, Verdict
from vjob.shelf.trial.result import MEASURED, Finding, Row, unknown
from vjob.shelf.trial.smaller import STEPS, Trial
from vjob.shelf.trial.watching import LIBRARIES, Ending, Seen

NUM_EVIDENCE = 3
NUM_LINES = 200
"""Of a rank's standard error, looked through for the place of an error."""
USELESS = ("vjob report", "vjob cancel")
"""Advice for a run that goes on, or went on for long."""
OURS = re.compile(r"stopping the attempt: |^attempt \d+: code |^vjob agent: ")
"""Lines of the agent that repeat the reason."""
PLACE = re.compile(r'(?:\[rank\d+\]:)?\s+File "([^"]+)", line (\d+)(?:, in (.+))?$')
"""Of a traceback; torch puts the rank before its lines."""
REMEDIES = (
    (r"exited \d+$", "it said nothing of why: see the last lines of `vjob logs`"),
    (
        r"KeyError: '[A-Z][A-Z0-9_]+'",
        "where that is a variable of the environment: name it in pass_env, so that it passes from "
        "this shell, or set it in env",
    ),
    (
        r"program: .*not there, or not executable",
        "set program.python to an interpreter that the node has, or leave it out",
    ),
)
"""What removes a cause that the rules have no row for, as it is for tries."""
NOT_A_NUMBER = (
    "look at the first batch and the initial weights: a too high rate, a zero in a division or a "
    "mask of all -inf are the usual causes"
)
HANG = (
    "ranks wait for one that never comes: see that all of them read RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT from the environment and make the same calls"
)


def find_trouble(seen: Seen, limit_s: float) -> list[Finding]:
    """What would stop the whole run; empty for a healthy try."""
    verdict, snapshot = seen.verdict, seen.snapshot
    what = "steps" if seen.steps else "starts"
    lost = _find_not_a_number(seen)
    if lost is not None:
        return [lost]
    if seen.ending is Ending.NEVER:
        return [_quote("submit", seen)]
    if seen.ending is Ending.OVER:
        return [] if verdict.health is Health.DONE else [_quote(what, seen)]
    if verdict.health is Health.FAILING:
        return [_quote(what, seen)]
    if seen.ending is Ending.STEPS:
        return []
    limit = format_duration(limit_s)
    if seen.hang:
        return [
            Finding(
                what="starts",
                cause=f"no step in {limit}, and ranks wait: {seen.hang}{_list_gone(seen)}",
                remedy=HANG,
                evidence=tuple(line.text for line in snapshot.errors[:NUM_EVIDENCE]),
            )
        ]
    if verdict.health is Health.STALLED:
        return [_quote(what, seen)]
    if seen.steps and len(seen.steps) >= STEPS:
        cause = f"its {STEPS} steps were done and it did not end within {limit} after them"
        return [Finding(what=what, cause=cause, remedy="--limit gives it longer")]
    return []


def _list_gone(seen: Seen) -> str:
    """The ranks that have ended, for which others may wait."""
    gone = [rank.rank for rank in seen.snapshot.ranks if rank.exit is not None]
    if not gone:
        return ""
    many = len(gone) > 1
    ended = f"{'ranks' if many else 'rank'} {join_numbers(gone)} {'have' if many else 'has'} ended"
    return f"; {ended}"


def _quote(what: str, seen: Seen) -> Finding:
    """The verdict's own words; of its advice what helps, else what to read."""
    verdict = seen.verdict
    parts = [part.removeprefix("vjob agent: ") for part in verdict.reason.split("; ")]
    reason = "; ".join(dict.fromkeys(parts))
    known = next((text for pattern, text in REMEDIES if re.search(pattern, reason)), "")
    advice = [part.strip() for part in verdict.advice.split("; ")]
    advice = [part for part in advice if part and not part.startswith(USELESS)]
    mending = [part for part in advice if not part.startswith("vjob ")]
    return Finding(
        what=what,
        cause=reason,
        remedy=known or "; ".join(mending or advice),
        evidence=(*_find_place(seen), *_list_lines(verdict, reason))[:NUM_EVIDENCE],
    )


def _list_lines(verdict: Verdict, reason: str) -> list[str]:
    """Lines that say more than the reason does."""
    lines = [clean_line(line.text) for line in verdict.evidence]
    return [line for line in lines if line[:60] not in reason and not OURS.search(line)]


def clean_line(text: str) -> str:
    """Without the tag of its rank."""
    return re.sub(r"^(\d+: |\[rank\d+\]:)", "", text).strip()


def _find_place(seen: Seen) -> list[str]:
    """The last call of a traceback that lies in the user's own code, and its line."""
    attempts, rank = seen.run.attempts(), seen.verdict.rank
    if rank is None or not attempts:
        return []
    plan = read_attempt_plan(seen.run, attempts[-1].number)
    lines = find_output(attempts[-1], plan, rank, "err").last_lines(NUM_LINES)
    found: list[str] = []
    for number, line in enumerate(lines):
        match = PLACE.match(line)
        if match is not None and not any(part in match[1] for part in LIBRARIES):
            code = lines[number + 1 : number + 2]
            is_code = bool(code) and not PLACE.match(code[0])
            within = f", in {match[3]}" if match[3] else ""
            place = f"{match[1].rpartition('/')[2]}:{match[2]}{within}"
            found = [f"{place}: {clean_line(code[0])}" if is_code else place]
    return found


def _find_not_a_number(seen: Seen) -> Finding | None:
    """A loss that is not a number in one of the first steps."""
    progress = seen.snapshot.progress
    for point in progress.points if progress is not None else ():
        if point.nan or (point.loss is not None and not math.isfinite(point.loss)):
            said = "nan" if point.loss is None or math.isnan(point.loss) else str(point.loss)
            return Finding(
                what="steps", cause=f"the loss is {said} in step {point.step}", remedy=NOT_A_NUMBER
            )
    return None


def tell_start(seen: Seen, trial: Trial, findings: Sequence[Finding], limit_s: float) -> Row:
    """Whether it starts."""
    name = "starts"
    where = ", ".join(node.name for node in seen.snapshot.nodes) or "no node"
    took = format_duration(seen.took_s or 0.0)
    ranks = sum(group.num_ranks for group in trial.conf.cluster.nodes)
    values = {"starts": True, "steps": len(seen.steps), "seconds": seen.took_s, "ranks": ranks}
    if any(finding.what in ("starts", "submit") for finding in findings):
        return Row(name=name, text="no", certainty=MEASURED, values={**values, "starts": False})
    on = f"{ranks} rank{'s' if ranks > 1 else ''} on {where}"
    if seen.steps:
        num, last = len(seen.steps), seen.steps[-1]
        # A program that prints a line every 5 steps did more of them than its lines.
        count = f"{num} steps" if num > 1 and last - seen.steps[0] < num else f"step {last}"
        return Row(name=name, text=f"yes: {count} in {took}, {on}", certainty=MEASURED,
                   values=values)  # fmt: skip
    if seen.ending is Ending.OVER:
        text = f"yes: it ended well after {took} and printed no step, {on}"
        return Row(name=name, text=text, certainty=MEASURED, values=values)
    at = f"; {seen.at}" if seen.at else ""
    why = f"it runs, no step was seen in {format_duration(limit_s)}{at}; try a longer --limit"
    return unknown(name, why, **values)
