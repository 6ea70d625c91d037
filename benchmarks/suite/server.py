"""A process that has imported pytest and what the tests need of others, and forks for each run.

    python -m benchmarks.suite.server

Each line of its input is a JSON list: a file for the output, the seconds that the run may take, and
pytest's arguments. It answers with a line each: pytest's exit code, or `time`. None of our modules
is imported before the fork, so that a run sees them as they are then.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

PRELOADED = (
    "click.testing", "hypothesis.stateful", "hypothesis.strategies", "jinja2", "numpy", "submitit",
    "torch", "unittest.mock", "xdist.scheduler", "yaml",
)  # fmt: skip


def run(output: str, limit_s: float, arguments: list[str]) -> str:
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = 1
        try:
            code = int(pytest.main(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            end_group(child)
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    end_group(child)
    os.waitpid(child, 0)
    return "time"


def end_group(leader: int) -> None:
    """What the tests started, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["--version"])  # imports pytest's plugins
    ours = [n for n in sys.modules if n.split(".")[0] in ("varuna_core", "vjob", "tests")]
    assert not ours, ours
    for line in sys.stdin:
        output, limit_s, arguments = json.loads(line)
        print(run(output, limit_s, arguments), flush=True)
        Path(output).touch()


if __name__ == "__main__":
    main()
