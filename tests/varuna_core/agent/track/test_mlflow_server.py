"""A real MLflow tracking server on this machine, where one is installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import Stage, make_plan, shell
from tests.varuna_core.agent.track.readers import MLFLOW, read_mlflow
from tests.varuna_core.agent.track.test_tracker import list_said, make_track, play
from varuna_core.records.plan import write_plan

COMMAND = "VJOB_TEST_MLFLOW"
"""The `mlflow` command of a Python with the whole package: mlflow-skinny has no server."""
START_S = 120.0


class Server:
    """`mlflow server`, which can be ended and started at the same address."""

    def __init__(self, command: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._argv = [
            command, "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination", str(folder / "artifacts"),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {"PATH": os.environ["PATH"], "HOME": str(self._folder)}
        env["MLFLOW_DISABLE_TELEMETRY"] = "true"
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=self._folder, env=env, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._answers():
            said = (self._folder / "server.log").read_text()
            assert self._process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    command = os.environ.get(COMMAND) or shutil.which("mlflow")
    if command is None or not MLFLOW.is_dir():
        pytest.skip(
            f"no MLflow with a server: pip install mlflow in a venv, and name it: {COMMAND}"
        )
    monkeypatch.setattr(sys, "path", [*sys.path, str(MLFLOW)])
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(command, folder)
    try:
        yield server
    finally:
        server.end()


@pytest.mark.slow
def test_attempts_are_one_run_on_a_server(make_stage: Callable[..., Stage], server: Server) -> None:
    server.start()
    track = make_track(mlflow={"experiment": "e", "uri": server.uri})
    stage = make_stage(make_plan(track=track))
    assert play(stage, 0, 0, 5, "exit 3", PYTHONPATH=str(MLFLOW)) == 3
    assert play(stage, 1, 3, 9, PYTHONPATH=str(MLFLOW)) == 0
    assert list_said(stage) == []
    (run,) = read_mlflow(server.uri, "e")
    assert run["metrics"]["loss"] == [(step, step / 10) for step in range(1, 10)]
    assert run["metrics"]["repeated/loss"] == [(4, 0.4), (5, 0.5)]
    assert (run["status"], run["params"]["train.steps"]) == ("FINISHED", "9")


@pytest.mark.slow
def test_a_server_that_is_away_delays_no_step_and_gets_all_points_later(
    make_stage: Callable[..., Stage], server: Server, tmp_path: Path
) -> None:
    """It is away from the start, comes, goes, and comes back; the ranks never wait for it."""
    track = make_track(mlflow={"experiment": "e", "uri": server.uri})
    stage = make_stage(make_plan(track=track))
    parts = [tmp_path / f"part{number}" for number in range(3)]
    wait = "".join(
        f"while [ ! -e {part} ]; do sleep 0.1; done; "
        f'for i in 1 2 3; do echo "step $(({3 * number}+i))/9 loss 0.$(({3 * number}+i))"; done; '
        for number, part in enumerate(parts)
    )
    write_plan(stage.run.plan, make_plan(command=shell(wait), track=track))
    stage.open()
    agent = stage.start(0, PYTHONPATH=str(MLFLOW))
    parts[0].touch()
    stage.wait_for_log("n0", "out", "step 3/9")
    wait_long(lambda: list_said(stage), "the server is away")
    server.start()
    wait_long(lambda: list_steps(server) == [1, 2, 3], "the points that waited")
    server.end()
    parts[1].touch()
    stage.wait_for_log("n0", "out", "step 6/9")
    server.start()
    wait_long(lambda: list_steps(server) == [1, 2, 3, 4, 5, 6], "the points of the second time")
    parts[2].touch()
    assert agent.wait(timeout=START_S) == 0
    assert list_steps(server) == [*range(1, 10)]
    (said,) = list_said(stage)
    assert said.startswith("mlflow: ")


def list_steps(server: Server) -> list[int]:
    try:
        runs = read_mlflow(server.uri, "e")
    except AssertionError:
        return []
    return [step for run in runs for step, _ in run["metrics"].get("loss", [])]


def wait_long(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.2)
