"""Write the opening sentence of a report: how the run went, and what to change first."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_core.facts.known import NotKnown, Value, value_of
from varuna_core.records.formatting import format_duration, format_pace, format_share
from vjob.reports.analysis.findings import Finding
from vjob.reports.analysis.headline import (
    format_bounded,
    goes_on,
    has_ended_badly,
    has_ended_well,
    is_waiting,
)
from vjob.reports.analysis.measures import Analysis
from vjob.reports.load.tables import Job

NO_STEPS = "steps not known"
MUCH_START = 0.1
"""Share of the time that the start-up has to take to be named."""


def write_opening(job: Job, analysis: Analysis, findings: Sequence[Finding]) -> str:
    """Return a sentence that says how the run went and what to change, using known figures only."""
    head = analysis.headline
    if is_waiting(job):
        return f"The run has not started; `vjob status {job.sources.name}` says what it waits for."
    went = "The run is not known to have ended"
    if has_ended_well(job):
        is_doubted = any(one.rule == "not a number" for one in findings)
        went = "The run ended" if is_doubted else "The run ended well"
    elif has_ended_badly(job):
        went = "The run did not end well"
    elif goes_on(job):
        went = "The run goes on"
    took_s, step = value_of(head.duration_s), value_of(head.last_step)
    total = value_of(head.num_steps)
    if took_s is not None:
        went += f" after {format_duration(took_s)}"
        queued_s = value_of(head.queued_s) or 0.0
        if queued_s >= MUCH_START * took_s:
            went += f", {format_duration(queued_s)} of it before the start"
    if step is not None:
        went += (
            f", at step {step:,}"
            + " (at least)" * head.is_least
            + (f" of {total:,}" if total and step <= total else "")
        )
    if head.slower:
        went += f", {head.slower}"
    elif isinstance(head.step_s, Value):
        went += f", {format_pace(head.step_s.value)} a step ({head.step_s.evidence[0].text})"
    if not isinstance(head.goodput, NotKnown):
        went += f"; {format_bounded(head.goodput)} of the time since the start was steps"
        if isinstance(head.start, Value) and head.start.value >= MUCH_START:
            went += f", {format_share(head.start.value)} its start-up"
    if head.hung:
        is_new = not head.hung_hours and goes_on(job)  # its time is not accounted yet
        went += "; it hangs" if is_new else f"; a hang cost {head.hung_cost}"
    elif any(one.rule == "suspected hang" for one in findings):
        went += "; it may hang" if goes_on(job) else "; it may have hung"
    if any(one.rule == NO_STEPS for one in findings):
        known = "how long a step took is" if step is not None else "its steps are"
        went += f"; {known} not known"
    keyed = (one for one in findings if one.key and one.rule != NO_STEPS)
    change, first = next(keyed, None), "change first"
    if findings and findings[0].rule == "ended badly":
        went, first = f"{went}; the first finding below says why", "change then"
    if change is not None:
        return f"{went}; {first}: {change.key}, for {_lower(change.sentence)}"
    if has_ended_badly(job):
        return f"{went}."
    if head.slower:
        return f"{went}; a finding below describes the slower steps, but no key is known to help."
    return f"{went}; no finding suggests a change."


def _lower(sentence: str) -> str:
    """Lower a sentence's first letter to continue another one; names and acronyms keep theirs."""
    first = sentence.split(" ", 1)[0]
    return sentence[0].lower() + sentence[1:] if first.istitle() else sentence
