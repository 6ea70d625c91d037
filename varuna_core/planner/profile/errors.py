"""What a planner cannot do, in words for the one who asked."""


class PlanningError(ValueError):
    """Contradicting wishes, nothing that fits, or an unusable input."""


class MissingData(PlanningError):
    """The profile lacks what a plan would need; the message says what to profile."""
