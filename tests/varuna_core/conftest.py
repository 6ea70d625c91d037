"""Fixtures for tests that play a run with real agents."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.small_disk import mount_small
from tests.varuna_core.agent.local_run import Stage
from varuna_core.records.plan import Plan


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Builds stages in a fresh folder, and ends their agents after the test."""
    stages: list[Stage] = []

    def build(plan: Plan, folder: Path | None = None, **options: str) -> Stage:
        stages.append(Stage(folder or tmp_path / plan.run, plan, **options))
        return stages[-1]

    yield build
    for stage in stages:
        stage.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mount_small(tmp_path / "small") as folder:
        yield folder
