"""A user of the launcher with two machines: this one, and a private sshd on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.command import ROOT, read_rank, run_module
from tests.varuna_core.agent.local_run import is_running
from tests.varuna_core.launch.sshd import Sshd
from varuna_core.records.runfolder import RunFolder

TIMEOUT_S = 300
SECRET = "hush-7f3a"

WAITING = """
import os, pathlib, signal, sys, time
caught = []
signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
def has_secret(path):
    try:
        return os.environ.get("TOKEN", "nothing").encode() in path.read_bytes()
    except OSError:
        return False
shown = [str(path) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if has_secret(path)]
print("ready", os.getpid(), len(os.environ.get("TOKEN", "")), shown, flush=True)
while not pathlib.Path(f"end-{os.environ['RANK']}").exists():
    time.sleep(0.02)
    while caught:
        print("caught", caught.pop(), flush=True)
sys.exit(int(pathlib.Path(f"end-{os.environ['RANK']}").read_text() or 0))
"""


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll for a true value; the test fails with `what` at the deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.05)
    return found


class User:
    """Somebody with two machines and a folder that both of them see."""

    def __init__(self, folder: Path, sshd: Sshd) -> None:
        self.folder, self.config = folder, sshd.config
        self.may_morph = False
        self.launcher: subprocess.Popen[str] | None = None
        state = str(folder / "state")
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": state}
        self.env["LEAK"] = "of the shell"
        (folder / "machines").write_text(f"127.0.0.1  # here\n{sshd.machine}\n")
        (folder / "wait.py").write_text(WAITING)
        (folder / "varuna.env").write_text(f"# all lines\nTOKEN={SECRET}\nOMP_NUM_THREADS=1\n")

    def start(self, *words: str, ranks: int = 1, stages: int = 2) -> None:
        sizes = ["--gpus_per_node", str(ranks), "--nstages", str(stages)]
        sizes += ["--chunk_size", "2"]
        fixed = () if self.may_morph else ("--no_morphing",)
        self._start(
            "--machine_list", "machines", "--cpu", *fixed, *sizes, "--batch_size", "8", *words
        )

    def _start(self, *words: str) -> None:
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.launcher = subprocess.Popen(
                self._command("--ssh_config", str(self.config), *words),
                cwd=self.folder,
                env=self.env,
                stdout=out,
                stderr=err,
                text=True,
            )

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another terminal."""
        return run_module("varuna_core.launch", words, self.folder, self.env, TIMEOUT_S)

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "varuna_core.launch", *words]

    def vjob(self, *words: str) -> str:
        """What a command of vjob prints on that run."""
        done = run_module("vjob", words, self.folder, self.env, 2 * TIMEOUT_S)
        return done.stdout + done.stderr

    def resume(self, *words: str) -> None:
        self._start("--resume", *words)

    def wait(self) -> int:
        assert self.launcher is not None
        return self.launcher.wait(timeout=TIMEOUT_S)

    @property
    def said(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()

    @property
    def run(self) -> RunFolder:
        """The newest."""

        def look() -> list[Path]:
            found = [path.parent for path in (self.folder / "log").glob("*/record.json")]
            return sorted(path for path in found if not path.is_symlink())

        return RunFolder(wait_until(look, "a run folder")[-1])

    def wait_for_ranks(self, run: RunFolder | None = None) -> list[int]:
        """The pids of both ranks once they are at work."""

        def look() -> list[int] | None:
            assert self.launcher is not None and self.launcher.poll() is None, self.said
            texts = [read_rank(run or self.run, rank) for rank in range(2)]
            found = [re.search(r"ready (\d+)", text) for text in texts]
            return [int(item[1]) for item in found if item] if all(found) else None

        pids: list[int] = wait_until(look, "both ranks")
        return pids

    def find_all(self) -> dict[int, str]:
        """Every process of the run, on either machine, by its words."""
        mark, found = os.fsencode(self.folder / "log"), {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, env = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            except OSError:
                continue
            if (mark in words or mark in env) and is_running(int(path.name)):
                found[int(path.name)] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def wait_for_word(self, text: str) -> None:
        wait_until(lambda: text in self.said, f"{text!r} in what the launcher says")

    def check_nothing_is_left(self) -> None:
        wait_until(lambda: not self.find_all(), f"the end of all of {self.find_all()}")

    def signal(self, number: signal.Signals) -> None:
        assert self.launcher is not None
        self.launcher.send_signal(number)

    def end(self) -> None:
        if self.launcher is not None:
            self.launcher.terminate()
            self.launcher.wait(timeout=2 * TIMEOUT_S)
            self.call("--kill")
