"""Errors of the planner, worded for the user."""


class PlanningError(ValueError):
    """Raised for contradicting wishes, if nothing fits, or for unusable input."""


class MissingData(PlanningError):
    """Raised if the profile lacks a figure that a plan needs; the message says what to profile."""
