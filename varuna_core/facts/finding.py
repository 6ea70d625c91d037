"""`Finding`: one observation about a run, with its evidence and remedies."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Dict, Mapping, Optional, Tuple

from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import Evidence, NotKnown, Value
from varuna_core.facts.remedy import Context, Remedy, render


@dataclass(frozen=True)
class Finding:
    """One observation made by a rule. Its sentence is rendered from `rule` and `values`."""

    rule: str
    """Name of the rule that made the finding; the key of its sentence."""
    cause: Optional[EndCause] = None
    """The cause of an end, if the finding explains one."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and names for the sentence: plain JSON values, `Known` values, or nested findings."""
    evidence: Tuple[Evidence, ...] = ()
    remedies: Tuple[Remedy, ...] = ()


def dump_finding(finding: Finding, context: Context, job: str = "") -> Dict[str, Any]:
    """Convert a finding to plain JSON values; its remedies are also rendered for a context."""
    return {
        "rule": finding.rule,
        "cause": finding.cause.value if finding.cause is not None else None,
        "values": {key: dump_value(value) for key, value in finding.values.items()},
        "evidence": [dump_value(one) for one in finding.evidence],
        "remedies": [
            dumped
            for dumped in (_dump_remedy(one, context, job) for one in finding.remedies)
            if dumped["text"]  # else that kind of job has no such thing
        ],
    }


def dump_value(value: Any) -> Any:
    """Convert a value to JSON: a `Known` becomes `{value, evidence}` or `{not_known, evidence}`."""
    if isinstance(value, Value):
        return {"value": dump_value(value.value), "evidence": dump_value(value.evidence)}
    if isinstance(value, NotKnown):
        return {"not_known": value.reason, "evidence": dump_value(value.evidence)}
    if isinstance(value, Finding):
        return {"rule": value.rule, "values": dump_value(value.values)}
    if isinstance(value, Evidence):
        return {key: dump_value(item) for key, item in asdict(value).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): dump_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump_value(item) for item in value]
    return value


def _dump_remedy(remedy: Remedy, context: Context, job: str) -> Dict[str, Any]:
    return {
        "action": remedy.action.value,
        "target": remedy.target.value if remedy.target is not None else None,
        "value": remedy.value,
        "text": render(remedy, context, job),
    }
