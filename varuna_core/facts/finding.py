"""`Finding`: one observation about a run, with what it rests on and what can be done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Tuple

from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import Evidence
from varuna_core.facts.remedy import Remedy


@dataclass(frozen=True)
class Finding:
    """One observation of a rule. Its sentence is rendered from `rule` and `values`."""

    rule: str
    """Name of the rule that made it; the key of its sentence."""
    cause: Optional[EndCause] = None
    """Set where the finding explains an end."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and names for the sentence: plain JSON values."""
    evidence: Tuple[Evidence, ...] = ()
    remedies: Tuple[Remedy, ...] = ()
