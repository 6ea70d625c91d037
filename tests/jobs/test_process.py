"""Long work: its lines come as they are, and it ends with us, all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.command import ROOT, wait_for
from varuna_core.records.machine import start_time
from vjob.jobs import process
from vjob.jobs.errors import VjobError


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize("words", [["-c"], ["-S", "-c"]], ids=["installed", "by its folder"])
def test_a_checkout_starts_itself_by_its_own_file(words: list[str], tmp_path: Path) -> None:
    """Whether an editable installation finds `vjob.jobs` or the link in `vjob/` does."""
    libraries = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    code = "import os; os.chdir('/'); from vjob.jobs.process import ENTRY; print(ENTRY, end='')"
    done = subprocess.run(
        [sys.executable, *words, code],
        env={**os.environ, "PYTHONPATH": libraries if "-S" in words else ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout) == ROOT / "vjob/__main__.py"


def test_lines_come_from_both_streams_and_a_progress_bar_once() -> None:
    seen: list[str] = []
    text = "echo one; printf '10%%\\r50%%\\r100%%\\n'; echo two >&2; printf end; exit 3"
    result = process.run_shown(shell(text), seen.append)
    assert result.code == 3
    assert seen == ["one", "100%", "two", "end"] == result.out.splitlines()


def test_silent_work_ticks() -> None:
    ticks: list[float] = []
    process.run_shown(shell("sleep 2.3"), print, tick=lambda: ticks.append(time.monotonic()))
    assert len(ticks) == 2


def test_what_cannot_start_is_said() -> None:
    with pytest.raises(VjobError, match="/no/such cannot be started"):
        process.run_shown(["/no/such"], print)


def test_ctrl_c_gives_all_of_them_time_to_clean_up(tmp_path: Path) -> None:
    """The first of the group may end before its children have cleaned up."""
    trap = f"trap 'sleep 0.5; touch {tmp_path}/cleaned; exit' TERM"
    child = f"{trap}; touch {tmp_path}/up; sleep 60 & wait"
    threading.Thread(target=_interrupt_when, args=(tmp_path / "up",), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        process.run_shown(["sh", "-c", f'sh -c "{child}" & wait'], print)
    assert (tmp_path / "cleaned").exists()


def _interrupt_when(path: Path) -> None:
    wait_for(path.exists, 20)
    os.kill(os.getpid(), signal.SIGINT)


def test_work_ends_with_us_even_when_we_are_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "from vjob.jobs.process import run_shown; "
        f"run_shown(['sh', '-c', 'echo $$ > {pid}; exec sleep 60'], print)"
    )
    us = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: pid.exists() and pid.read_text(), 20)
    us.kill()
    us.wait()
    wait_for(lambda: start_time(int(pid.read_text())) is None, 20)


def test_the_start_of_a_long_output_is_enough() -> None:
    env = dict(os.environ)
    assert process.run_start(["yes"], 10, env=env, timeout_s=30) == (b"y\n" * 5, False)
    assert process.run_start(["echo", "a"], 10, env=env, timeout_s=30) == (b"a\n", True)
    assert process.run_start(["sleep", "60"], 10, env=env, timeout_s=0.1) == (b"", False)
    with pytest.raises(VjobError, match="false ended with 1"):
        process.run_start(["false"], 10, env=env, timeout_s=30)
    with pytest.raises(VjobError, match="cannot be started"):
        process.run_start(["/nonexistent/git"], 10, env=env, timeout_s=30)
