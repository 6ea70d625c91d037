"""Errors meant for users. Only the command line prints them."""

from __future__ import annotations


class LaunchError(Exception):
    """One sentence or several for the user: what failed and what to do."""

    exit_code = 1


class InputError(LaunchError):
    """The user's input cannot be used as it is."""

    exit_code = 2


class NotReadyError(LaunchError):
    """The machines cannot run this; nothing was started. The code is the agent's for the same."""

    exit_code = 112
