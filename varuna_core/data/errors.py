"""The one error of this package that is meant for users."""

from __future__ import annotations


class DataError(Exception):
    """Raised for data that cannot be used; the message says which and what to do."""
