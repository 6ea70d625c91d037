"""A pytest plugin for mutants.py: what each test runs and takes, and runs of chosen tests.

--passed FILE: coverage.py, when it measures, keeps what each test runs under the test's id; the
               tests that pass are written to FILE, with their seconds
--chosen FILE: of what is collected only the ids that FILE holds run, in that order
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path)
    parser.addoption("--at-most", type=float, default=float("inf"))
    parser.addoption("--chosen", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--passed"):
        config.pluginmanager.register(Passed(file, config.getoption("--at-most")))
    if config.getoption("--chosen"):
        # One failure is enough: not the smallest example of it. After the conftest's own profile,
        # and before the tests are imported.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("unshrunk", settings.default, phases=phases, database=None)
        settings.load_profile("unshrunk")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--chosen"):
        place = {name: index for index, name in enumerate(json.loads(file.read_text()))}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )


class Passed:
    def __init__(self, file: Path, at_most_s: float) -> None:
        self.file = file
        self.until = time.monotonic() + at_most_s
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            switch_context("")
            if time.monotonic() > self.until:
                item.session.shouldstop = "the time for this room is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if not report.passed:
            self.failed.add(name)

    def pytest_sessionfinish(self) -> None:
        passed = {name: s for name, s in self.seconds.items() if name not in self.failed}
        self.file.write_text(json.dumps(passed, indent=0))


def switch_context(name: str) -> None:
    """Without coverage.py nothing measures."""
    if (coverage := sys.modules.get("coverage")) and (running := coverage.Coverage.current()):
        running.switch_context(name)
