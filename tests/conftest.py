"""Fixtures for all tests, hypothesis' settings, and the order of the tests.

hypothesis draws the same examples in each run, so that a failure can be repeated;
VJOB_EXPLORE=1 draws new ones.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Hundreds of processes start from this tree: without compiled modules each compiles them again, and
# pytest rewrites the assertions of every test in each of its own.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(Path(__file__).parent.parent / ".compiled")
    )

# After that, so that pytest need not rewrite the 100 modules of hypothesis, its plugin, each time.
from hypothesis import settings

from tests import ROOT
from tests.cluster.fixtures import clean_lab, lab, shared_files
from tests.containers.image import image

__all__ = ["clean_lab", "image", "lab", "shared_files"]

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("default" if os.environ.get("VJOB_EXPLORE") else "same")

# Workers and background jobs ignore it, and so would each process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As the ranks of most tests have: a sum over several threads is rounded otherwise, and threads that
# wait for each other's turn on a busy processor spin.
os.environ["OMP_NUM_THREADS"] = "1"
# torch waits without end for the lock of an extension whose compiler was killed: each checkout has
# extensions of its own, and `pytest_sessionstart` removes such locks.
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
# A site's file of the machine is no part of a test.
os.environ["VJOB_SITE"] = ""

HANDLED = [signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "HUP", "USR1", "USR2", "CHLD")]
LAB = (
    "tests/benchmarks/test_chaos_on_slurm",
    "tests/benchmarks/test_scheduler_load",
    "tests/benchmarks/test_truth",
    "tests/benchmarks/test_walkthrough",
    "tests/cluster",
    "tests/containers/test_pyxis",
)
"""Tests that share the lab and its network run one after the other, in one process."""
LAB_NICENESS = -10
"""Niceness of the lab's tests: each has nine times the share of a test that runs beside it."""
CONTAINERS = "tests/containers"
"""Tests that share the container runtimes, and an image that takes a while to make."""
LONG = ("tests/varuna_core/test_varuna", "tests/varuna_core/trace/test_engines")
"""Files of minutes in which no test is marked slow."""


@pytest.fixture(autouse=True)
def _keep_signals() -> Iterator[None]:
    """A manager that a test makes in its own process handles signals as its job would."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_sessionstart() -> None:
    """Remove the locks of extensions that nobody compiles: those that are there while no other run
    of the tests holds the folder."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(exist_ok=True)
    held = os.open(folder, os.O_RDONLY)  # until this process ends
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in folder.glob("**/lock"):
            lock.unlink()
    fcntl.flock(held, fcntl.LOCK_SH)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import other test files first in each process of `pytest -n 4`, so that each file is compiled
    by one of them. On a fresh clone all four would otherwise compile every file."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    places = [Path(name).absolute() for name in session.config.args]
    files = sorted(path for place in places for path in place.rglob("test_*.py"))
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        # What fails here, or is skipped, is collected again.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first: short ones then fill the processes that are done early."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def weigh(item: pytest.Item) -> tuple[bool, bool, bool]:
        file = item.nodeid
        is_slow = item.path in slow or file.startswith(LONG)
        return not file.startswith(LAB), not file.startswith(CONTAINERS), not is_slow

    items.sort(key=weigh)
    at_lab = [item for item in items if "lab" in getattr(item, "fixturenames", ())]
    if astray := sorted({i.nodeid for i in at_lab if not i.nodeid.startswith(LAB)}):
        raise pytest.UsageError(f"these use the lab, but LAB does not name their file: {astray}")


def pytest_collection_finish() -> None:
    """All that is there stays, thousands of tests among it: the collector need not look through it
    again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """The lab's tests run one after the other, so a whole run waits for them: the others leave
    them the processors. They give way to no other program, so a busy machine slows a run as it
    slows any program. Only root may lower a niceness, and only root has the lab."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container, without CAP_SYS_NICE
            os.setpriority(os.PRIO_PROCESS, 0, LAB_NICENESS if item.nodeid.startswith(LAB) else 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule `pytest -n 4`: a file stays whole, and tests that share a resource of the machine
    run in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(LAB):
                return "lab"
            return CONTAINERS if file.startswith(CONTAINERS) else file

    config.option.loadscopereorder = False  # in the order above, not by the number of tests
    return Scheduling(config, log)
