"""Fixtures for all tests; what hypothesis draws.

A run draws the same examples each time, so that a red run can be repeated;
VJOB_EXPLORE=1 draws new ones, to look for what nobody thought of.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.cluster.fixtures import clean_lab, lab
from tests.containers.image import image

__all__ = ["clean_lab", "image", "lab"]

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("default" if os.environ.get("VJOB_EXPLORE") else "same")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers ignore it, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of processes start from this tree: without compiled modules each compiles them anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parent.parent / ".compiled"))

WHOLE_MACHINE = ("tests/chaos/test_on_slurm", "tests/cluster", "tests/containers", "tests/stranger")
"""These share the lab, its network and the containers' store."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: the rest fills the processes that are done before others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda i: (not i.nodeid.startswith(WHOLE_MACHINE), i.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For processes that share the tests (`pytest -n 3`): a file stays whole, and what needs the
    whole machine runs in one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "machine" if file.startswith(WHOLE_MACHINE) else file

    config.option.loadscopereorder = False  # in the order above, not by the number of tests
    return Scheduling(config, log)
