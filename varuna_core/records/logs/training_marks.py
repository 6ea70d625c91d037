"""The lines between which a training does no steps, as Megatron-LM spells them.

saving checkpoint at iteration      30 to ckpt
  successfully saved checkpoint from iteration      30 to ckpt
Evaluating on 640 samples                           ends with a validation line (training_log)
first step of this start is done (31)               ours alone: a morph is over
"""

from __future__ import annotations

import re
from typing import Match, Optional, Tuple

_SAVING = re.compile(r"\bsaving checkpoint at iteration +(\d{1,18}) to (\S.*)")
_SAVED = re.compile(r"\bsuccessfully saved checkpoint from iteration +(\d{1,18}) to (\S.*)")
_SAVE_ENDING = re.compile(r" in \S+ format$| \[ t .*\]$")
"""What newer versions write behind the folder."""
_EVALUATION = re.compile(r"\bEvaluating on (\d{1,18}) samples")


BEGIN = "before the start of training step"
"""The phase (training_log) that a rank says once all is loaded."""
FIRST_STEP = "first step of this start is done"


def format_first_step(step: int) -> str:
    return f"{FIRST_STEP} ({step})"


def format_saving(step: int, folder: str) -> str:
    """A checkpoint begins; `folder` is that of all checkpoints."""
    return f"saving checkpoint at iteration {step:7d} to {folder}"


def format_saved(step: int, folder: str) -> str:
    """A checkpoint is complete."""
    return f"  successfully saved checkpoint from iteration {step:7d} to {folder}"


def parse_saving(line: str) -> Optional[Tuple[int, str]]:
    """The step and the folder."""
    return _parse_save(_SAVING.search(line))


def parse_saved(line: str) -> Optional[Tuple[int, str]]:
    return _parse_save(_SAVED.search(line))


def _parse_save(match: Optional[Match[str]]) -> Optional[Tuple[int, str]]:
    if match is None:
        return None
    return int(match.group(1)), _SAVE_ENDING.sub("", match.group(2).rstrip())


def format_evaluation(num_samples: int) -> str:
    """An evaluation begins."""
    return f"Evaluating on {num_samples} samples"


def parse_evaluation(line: str) -> Optional[int]:
    """The number of samples."""
    match = _EVALUATION.search(line)
    return None if match is None else int(match.group(1))
