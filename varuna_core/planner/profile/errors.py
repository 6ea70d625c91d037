"""Errors of the planner, in words for the user."""


class PlanningError(ValueError):
    """Contradicting wishes, nothing that fits, or an unusable input."""


class MissingData(PlanningError):
    """The profile lacks what a plan would need; the message says what to profile."""
