"""pytest fixtures of the lab, to be imported by the project's conftest.

They skip with a reason where the lab cannot run, and refuse to stop a lab that was up before the
tests. Two test sessions on one machine take turns: an accident in one would confuse the other.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.files import explain_no_files
from tests.cluster.lab import Lab
from tests.cluster.record import hold_lock
from tests.cluster.requirements import LAB_PACKAGES, explain_missing

__all__ = ["LAB_PACKAGES", "clean_lab", "lab", "shared_files"]

SESSION_TIMEOUT_S = 900


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The Slurm lab, as `python -m tests.cluster up` starts it."""
    if reason := explain_missing():
        pytest.skip(reason)
    with hold_lock("session", timeout_s=SESSION_TIMEOUT_S):
        lab = Lab.start()
        try:
            if not lab.started_here:
                lab.repair()
            yield lab
        finally:
            if lab.started_here:
                lab.stop()


@pytest.fixture
def clean_lab(lab: Lab) -> Iterator[Lab]:
    """The lab; after the test all jobs are cancelled and all accidents undone."""
    yield lab
    lab.repair()


@pytest.fixture
def shared_files(clean_lab: Lab) -> Iterator[Path]:
    """A folder that each node of the lab mounts over its own link (files.py)."""
    if reason := explain_no_files():
        pytest.skip(reason)
    clean_lab.serve_files()
    try:
        yield clean_lab.paths.shared
    finally:
        clean_lab.repair()  # jobs that write there end first
        clean_lab.stop_files()
