"""Errors meant for users; only the command line prints them."""

from __future__ import annotations


class LaunchError(Exception):
    """An error for the user: its message says what failed and what to do."""

    exit_code = 1


class InputError(LaunchError):
    """Raised for invalid input of the user, such as a wrong line in the list of machines."""

    exit_code = 2


class NotReadyError(LaunchError):
    """Raised before anything starts if machines cannot run the job; exits as the agent does."""

    exit_code = 112
