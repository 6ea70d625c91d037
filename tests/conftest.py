"""Fixtures for all tests; what hypothesis draws.

A run draws the same examples each time, so that a red run can be repeated;
VJOB_EXPLORE=1 draws new ones, to look for what nobody thought of.
"""

import os

from hypothesis import settings

from tests.cluster.fixtures import clean_lab, lab
from tests.containers.image import image

__all__ = ["clean_lab", "image", "lab"]

settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("VJOB_EXPLORE") else "same")
