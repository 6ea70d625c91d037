"""Functions in containers, where nothing of vjob is installed: archive, environment, signals."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from tests.command import wait_for
from tests.containers.image import PYTHON
from tests.containers.real import Tools
from tests.containers.test_behaviour import every_runtime
from tests.varuna_core.functions import rank_functions as functions
from tests.varuna_core.functions.function_run import Functions, read_result
from varuna_core.records.exits import read_outcome
from varuna_core.records.requests import write_signal

CONF = """
name: boxed
cluster: {{scheduler: local, grace_s: 5, requeue: true, nodes: [{{group: m, count: 2, ranks: 2}}]}}
container: {{runtime: {runtime}, image: {image}, scratch: {scratch}}}
env: {{PYTHONPATH: {packages}}}
"""


@pytest.fixture
def by_value() -> Iterator[None]:
    """The image lacks the tests, as it lacks a notebook's cells."""
    cloudpickle.register_pickle_by_value(functions)
    yield
    cloudpickle.unregister_pickle_by_value(functions)


@pytest.fixture
def conf(
    runtime: str, tmp_path: Path, image: Path, scratch: Path, tools: Tools, by_value: None
) -> str:
    """Beside the conf lies all that a function needs in the image."""
    tools.need(runtime)
    told = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True).stdout
    if told.split()[1].split(".")[:2] != list(map(str, sys.version_info[:2])):
        pytest.skip(f"the image has {told.strip()}")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("submitit", "cloudpickle"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        shutil.copytree(spec.submodule_search_locations[0], packages / name)
    spec = importlib.util.find_spec("typing_extensions")
    assert spec is not None and spec.origin is not None
    shutil.copy(spec.origin, packages)
    given = tools.make_reference(runtime) if runtime == "docker" else str(image)
    return CONF.format(
        runtime=runtime,
        image=json.dumps(given),
        scratch=json.dumps(str(scratch)),
        packages=packages,
    )


@every_runtime
def test_a_function_runs_saves_and_comes_again_in_a_container(
    conf: str, runtime: str, tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", tools.path)
    runs = Functions(tmp_path, monkeypatch, {"PATH": tools.path})
    run = runs.submit(functions.Counter(str(tmp_path), 50), conf=conf)
    for attempt in (0, 1):
        names = [tmp_path / f"{attempt}.{rank}" for rank in range(4)]
        wait_for(lambda: all(name.exists() for name in names), 60, lambda: runs.vjob.explain(run))  # noqa: B023
        if attempt == 0:
            write_signal(run.attempt(0), "USR1", "as the batch script would")
    outcome = read_outcome(run.attempt(0))
    assert outcome is not None and outcome.code == 0 and "is requeued" in outcome.reason
    (tmp_path / "go").touch()
    assert runs.wait(run)["verdict"] == "COMPLETED", runs.vjob.explain(run)
    for rank in range(4):
        kind, told = read_result(run, rank)
        assert kind == "success" and told["count"] == 50 and told["saves"] == 1


@every_runtime
def test_an_image_without_submitit_says_so(
    conf: str, runtime: str, tmp_path: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Functions(tmp_path, monkeypatch, {"PATH": tools.path})
    run = runs.submit(functions.describe_rank, conf=conf.split("env:")[0])
    message = runs.wait(run)["message"]
    assert "ModuleNotFoundError: No module named 'submitit'" in message
    assert "install it for the image's python3" in message
