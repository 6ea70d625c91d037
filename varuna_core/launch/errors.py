"""Errors meant for users. Only the command line prints them."""

from __future__ import annotations


class LaunchError(Exception):
    """An error for the user: one or several sentences on what failed and what to do."""

    exit_code = 1


class InputError(LaunchError):
    """Raised for input of the user that cannot be used."""

    exit_code = 2


class NotReadyError(LaunchError):
    """Raised if machines cannot run this; nothing was started. The exit code equals the agent's."""

    exit_code = 112
