"""Fixtures for all tests; what hypothesis draws.

A run draws the same examples each time, so that a red run can be repeated;
VJOB_EXPLORE=1 draws new ones, to look for what nobody thought of.
"""

import os

import pytest
from hypothesis import settings

from tests.cluster.fixtures import clean_lab, lab
from tests.containers.image import image

__all__ = ["clean_lab", "image", "lab"]

settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("VJOB_EXPLORE") else "same")

WHOLE_MACHINE = ("tests/cluster", "tests/containers")
"""These share the lab, its network and the containers' store."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two processes share the tests (`pytest -n 2 --dist loadgroup`): a file stays whole,
    and what needs the whole machine runs in one of them."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = "machine" if file.startswith(WHOLE_MACHINE) else file
        item.add_marker(pytest.mark.xdist_group(group))
