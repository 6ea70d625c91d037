"""A key of W&B and a password of MLflow: used, and nowhere to be read."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.command import Vjob, wait_for
from tests.varuna_core.agent.track.readers import MLFLOW
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

KEY = "0123456789abcdef0123456789abcdef01234567"
PASSWORD = "pa55-w0rd-of-mlflow"
SECRETS = (KEY, PASSWORD, base64.b64encode(f"api:{KEY}".encode()).decode(),
           base64.b64encode(f"me:{PASSWORD}".encode()).decode())  # fmt: skip
CONF = """
name: secret
program: {{script: train.py, snapshot: none}}
cluster: {{scheduler: local, walltime_min: 5, nodes: [{{group: m, count: 1, ranks: 1}}]}}
setup: [. {secrets}]
env: {{PYTHONPATH: {mlflow}}}
track:
  wandb: {{project: p}}
  mlflow: {{uri: "http://127.0.0.1:{port}", experiment: e}}
"""
TRAIN = """
import os, time
for step in range(1, 4):
    print(f"step {step}/3 loss 0.5", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
"""


class Refusing(ThreadingHTTPServer):
    """Knows nobody, and notes by what they wanted to be known."""

    daemon_threads = True

    def __init__(self) -> None:
        self.seen: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Refusing

    def do_POST(self) -> None:
        self.server.seen.add(self.headers.get("Authorization", ""))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = json.dumps({"errors": [{"message": "who are you?"}]}).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Refusing]:
    server = Refusing()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Processes(threading.Thread):
    """Looks at all command lines of the machine until it is left; notes those with a secret."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: set[bytes] = set()
        self.trackers: set[bytes] = set()
        self._left = threading.Event()

    def run(self) -> None:
        while not self._left.wait(0.05):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = path.read_bytes()
                except OSError:
                    continue
                if any(secret.encode() in words for secret in SECRETS):
                    self.found.add(words)
                if b"\0track\0" in words:
                    self.trackers.add(words)

    def leave(self) -> None:
        self._left.set()
        self.join()


@pytest.mark.slow
def test_secrets_reach_the_servers_and_nothing_else(tmp_path: Path, server: Refusing) -> None:
    """Both servers refuse them, so that there is something to say about it."""
    if not MLFLOW.is_dir():
        pytest.skip(f"MLflow is not in {MLFLOW}: make .venv/.installed-dev")
    port = server.server_address[1]
    secrets = tmp_path / "secrets"
    secrets.write_text(
        f"export WANDB_API_KEY={KEY} WANDB_BASE_URL=http://127.0.0.1:{port}\n"
        f"export MLFLOW_TRACKING_USERNAME=me MLFLOW_TRACKING_PASSWORD={PASSWORD}\n"
    )
    secrets.chmod(0o600)
    (tmp_path / "work").mkdir()
    vjob = Vjob(tmp_path / "work")
    vjob.write(TRAIN, "train.py")
    processes = Processes()
    processes.start()
    run = vjob.submit(CONF.format(secrets=secrets, mlflow=MLFLOW, port=port))
    wait_for(lambda: len(list_said(run)) >= 2, 120, lambda: vjob.explain(run))
    (vjob.folder / "go").touch()
    vjob.wait_over(run, 150)
    processes.leave()
    assert {secret for secret in SECRETS[2:] if f"Basic {secret}" in server.seen} == {*SECRETS[2:]}
    assert processes.trackers and processes.found == set()
    commands = ("status last", "status last --json", "logs last", "report last --text")
    said = [vjob(*words.split(), code=None) for words in commands]
    for secret in SECRETS:
        assert not [text for text in list_said(run) if secret in text]
        assert not [one for one in said if secret in one.stdout + one.stderr]
        for path in vjob.folder.rglob("*"):  # the run folder and vjob's state
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def list_said(run: RunFolder) -> list[str]:
    return [event["said"] for event in read_events(run) if event["kind"] == "tracking"]


@pytest.mark.parametrize("is_set", [False, True])
def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path: Path, is_set: bool) -> None:
    vjob = Vjob(tmp_path)
    vjob.write(TRAIN, "train.py")
    text = CONF.format(secrets="x", mlflow="/", port=1)
    uri = f"http://me:{PASSWORD}@127.0.0.1:1"
    words = ["--set", f"track.mlflow.uri={uri}"] if is_set else []
    conf = vjob.write(text if is_set else text.replace("http://127.0.0.1:1", uri))
    done = vjob("submit", conf, *words, code=2)
    assert "MLFLOW_TRACKING_PASSWORD" in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != conf:
            assert PASSWORD.encode() not in path.read_bytes(), path
