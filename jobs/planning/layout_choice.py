"""A layout that a run is to have: conf keys, what was predicted, and whence it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records.plan import Prediction, parse_prediction, read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError

FORMAT = 1
"""Of a file that `vjob plan --write` leaves (jobs/planning/plan_file.py)."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Nothing is set where the conf's own layout stays as it is."""

    settings: Mapping[str, str]
    """Conf keys, with values as YAML."""
    prediction: Prediction | None
    why: str
    """Where it is from, in a sentence."""
    layouts: Mapping[str, tuple[int, int, str]] | None = None
    """For other nodes than all, of a run that may morph: records/plan.py."""
    layout_steps: Mapping[str, float] | None = None
    """Seconds of a step there."""
    is_last: bool = False
    """It counts over what a person sets besides."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]


def read_plan_file(path: Path, overrides: Sequence[str] = ()) -> Chosen:
    """InputError in words where it is none of ours.

    Nothing is predicted of a layout that `overrides` change.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"plan {path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("vjob_plan") != FORMAT:
        raise InputError(
            f"{path} is no plan of this vjob; `vjob plan CONF --write FILE` writes one"
        )
    settings = fields.get("set")
    if not isinstance(settings, dict) or not all(isinstance(v, str) for v in settings.values()):
        raise InputError(f"plan {path}: the key set is not a mapping of keys to text")
    is_changed = any(word.partition("=")[0] in settings for word in overrides)
    return Chosen(
        settings=settings,
        prediction=None if is_changed else parse_prediction(fields.get("prediction")),
        why=f"plan {path.name}, {fields.get('why', '')}",
    )


def describe_promise(run: RunFolder) -> str:
    """What the planner says of a run that was just made; empty where it says nothing."""
    plan = read_plan(run.plan)
    if plan is None or plan.prediction is None:
        return ""
    took = plan.prediction.step_s
    words = "" if took is None else f"{took:.4g} s a step with "
    return f"{words}partition {plan.partition}: {plan.planned}"
