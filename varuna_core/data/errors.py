"""Define the error of this package that is shown to users."""

from __future__ import annotations


class DataError(Exception):
    """Raised for data that cannot be used; the message names the data and the remedy."""
