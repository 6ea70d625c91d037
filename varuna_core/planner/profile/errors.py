"""Errors of the planner, worded for the user."""


class PlanningError(ValueError):
    """Raised if wishes contradict each other, if no plan fits, or if the input cannot be used."""


class MissingData(PlanningError):
    """Raised if the profile lacks a figure that a plan needs; the message says what to profile."""
