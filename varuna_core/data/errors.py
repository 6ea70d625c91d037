"""The one error of this package that is meant for users."""

from __future__ import annotations


class DataError(Exception):
    """Data cannot be used as it is; the message says which, and what to do."""
