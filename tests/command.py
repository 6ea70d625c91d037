"""The `vjob` command as a user runs it, in a folder and with a state of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import PATIENCE, ROOT
from tests.ranks.start import build_order, fork
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.plan import read_attempt_plan
from varuna_core.records.runfolder import RunFolder

PROGRAMS = ROOT / "tests/programs"
HOST = os.uname().nodename.partition(".")[0]
"""The name of the only node of a local run."""
BAD = ("SLOW", "STALLED", "FAILING", "DEAD")
SPARED = 8
"""Times as long as a `vjob status` takes, the processors are left to the run that it looks at."""


class Vjob:
    """The command with its folder and environment; calling it runs `vjob`."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            **(env or {}),
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": str(ROOT),
            "LEAK_OF_THE_SHELL": "leaked",
        }

    def __call__(
        self, *args: str, code: int | None = 0, timeout_s: float = 150
    ) -> subprocess.CompletedProcess[str]:
        done = run_module("vjob", args, self.folder, self.env, timeout_s * PATIENCE)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def start(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in the background, with these options of Popen."""
        command = [sys.executable, "-m", "vjob", *args]
        return subprocess.Popen(command, cwd=self.folder, env=self.env, **options)

    def write(self, text: str, name: str = "conf.yaml") -> str:
        (self.folder / name).write_text(text)
        return name

    def submit(self, text: str, *options: str) -> RunFolder:
        said = self("submit", self.write(text), "--json", *options).stdout
        return RunFolder(Path(json.loads(said)["folder"]))

    def status(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", job, "--json", code=None).stdout)
        return found

    def wait_over(
        self, run: RunFolder, timeout_s: float = 90, *, may_fail: bool = False
    ) -> dict[str, Any]:
        """Wait for the run's end and return its record; a completed run was never unhealthy, unless
        an attempt of it may fail."""
        seen: dict[str, str] = {}
        next_s = 0.0

        def is_over() -> bool:
            nonlocal next_s
            over = json.loads(run.record.read_text())["state"] in ("ended", "refused")
            begun_s = time.monotonic()
            if over or begun_s >= next_s:
                verdict = self.status(str(run.path))["verdict"]
                seen[verdict["health"]] = verdict["reason"]
                next_s = time.monotonic() + SPARED * (time.monotonic() - begun_s)
            return over

        wait_for(is_over, timeout_s, lambda: self.explain(run))
        record: dict[str, Any] = json.loads(run.record.read_text())
        bad = {word: why for word, why in seen.items() if word in BAD}
        assert not bad or may_fail or record["verdict"] != "COMPLETED", bad
        return record

    def explain(self, run: RunFolder) -> str:
        logs = "\n".join(p.read_text(errors="replace") for p in run.path.glob("scheduler*.out"))
        return self("status", str(run.path), "-n", "5", code=None).stdout + logs


def run_module(
    module: str, words: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE WORDS`: forked by a process that has imported vjob, unless the environment
    makes it another Python."""
    if pick_early(env) != pick_early({**os.environ, "PYTHONPATH": str(ROOT)}):
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    of = "reports" if next(iter(words), "") in ("compare", "plan", "report") else "commands"
    return Forked(of, module, words, folder, env).finish(timeout_s)


class Forked:
    """`python -m MODULE WORDS`, forked by a process that has imported what it needs."""

    def __init__(
        self, pool: str, module: str, words: Sequence[str], folder: Path, env: Mapping[str, str]
    ) -> None:
        self.args = [module, *words]
        pipes = [os.pipe(), os.pipe()]
        order = build_order(module, words, env, folder)
        self._pid, end = fork(pool, order, *(written for _, written in pipes))
        for _, written in pipes:
            os.close(written)
        self._reads = [*(read for read, _ in pipes), end]

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does: killed at the deadline, and where the test is interrupted."""
        try:
            out, err, code = read_to_end(self._reads, timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.read(self._reads[-1], 16)  # when it has ended
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout_s) from None
            raise
        finally:
            for descriptor in self._reads:
                os.close(descriptor)
        return subprocess.CompletedProcess(self.args, int(code), out, err)


def pick_early(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter reads as it starts."""
    return {name: env[name] for name in env if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}


def read_to_end(descriptors: Sequence[int], timeout_s: float) -> list[str]:
    """What each has until its other end is closed, by the last process that holds it."""
    deadline = time.monotonic() + timeout_s
    texts = {descriptor: b"" for descriptor in descriptors}
    with selectors.DefaultSelector() as open_ones:
        for descriptor in descriptors:
            open_ones.register(descriptor, selectors.EVENT_READ)
        while open_ones.get_map():
            ready = open_ones.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                more = os.read(key.fd, 1 << 16)
                texts[key.fd] += more
                if not more:
                    open_ones.unregister(key.fd)
    return [io.TextIOWrapper(io.BytesIO(text)).read() for text in texts.values()]


def wait_for(
    is_so: Callable[[], object], timeout_s: float, explain: Callable[[], str] = lambda: ""
) -> None:
    """Poll a condition up to a deadline; a slow one (a `vjob` command) is polled less often, to
    leave the processors to the run."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while True:
        begun = time.monotonic()
        if is_so():
            return
        assert begun < deadline, f"not within {timeout_s * PATIENCE} s\n{explain()}"
        time.sleep(min(2.0, max(0.2, 2 * (time.monotonic() - begun))))


def read_out(run: RunFolder, attempt: int = 0) -> str:
    """Read the standard output of all ranks, one after another."""
    plan = read_attempt_plan(run, attempt)
    assert plan is not None
    return "".join(read_rank(run, rank, attempt=attempt) for rank in range(plan.world))


def read_rank(run: RunFolder, rank: int, kind: str = "out", *, attempt: int = 0) -> str:
    """Read what one rank wrote."""
    plan = read_attempt_plan(run, attempt)
    return locate_output(run.attempt(attempt), plan, rank, kind).read().decode()
