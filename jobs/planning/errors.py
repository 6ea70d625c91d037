"""The planner's errors as those of `vjob`, also the first of all: that numpy is not there.

It imports nothing that needs numpy, so that a bare install is told what to do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from varuna_core.planner.profile.errors import PlanningError
from vjob.jobs.errors import InputError, VjobError


@contextmanager
def explain_errors() -> Iterator[None]:
    """What the planner refuses is the user's input; whatever needs numpy is imported within."""
    if importlib.util.find_spec("numpy") is None:
        raise VjobError("planning needs numpy, which is not installed: pip install 'vjob[plan]'")
    try:
        yield
    except PlanningError as error:
        raise InputError(str(error)) from None
