"""Ranks that are asked to save and leave: all of them in the same step."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import wait_for
from tests.ranks.start import collect, start_ranks

ALONE = """
import atexit, os, signal
from varuna_core import leaving
leaving.listen()
leaving.listen()
atexit.register(print, "at the end")
assert not leaving.is_time()
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(int(leaving.is_asked()))
assert os.wait()[1] == 0
os.kill(os.getpid(), signal.SIGUSR1)
assert leaving.is_asked() and leaving.is_time()
os.kill(os.getpid(), signal.SIGUSR1)
print("saved", flush=True)
try:
    leaving.leave()
finally:
    os.kill(os.getpid(), signal.SIGUSR2)
"""
RANK = """
import pathlib, sys, time
import torch.distributed as dist
from varuna_core import leaving
leaving.listen()
rank, folder = int(sys.argv[1]), pathlib.Path(__file__).parent
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
for step in range(100000):
    (folder / f"begun{rank}").touch()
    if leaving.is_time():
        leaving.leave()
    time.sleep(0.002 * rank)
    print(step, flush=True)
"""


def run_alone(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_rank_alone_hears_its_own_signals_and_ends_well() -> None:
    done = run_alone(ALONE)
    assert (done.returncode, done.stdout) == (0, "saved\nat the end\n"), done.stderr


def test_ranks_that_cannot_ask_each_other_are_told_what_to_do() -> None:
    code = "from varuna_core import leaving\nleaving.is_time()"
    done = run_alone(code, WORLD_SIZE="2")
    assert "RuntimeError: leaving.is_time() asks all ranks: call it after" in done.stderr
    code = "from varuna_core import leaving\nassert leaving.is_time(lambda flag: True)"
    assert run_alone(code, WORLD_SIZE="2").returncode == 0


def test_a_signal_that_was_given_to_nccl_is_left_to_it() -> None:
    code = "import signal\nfrom varuna_core import leaving\nleaving.listen()\n"
    code += "assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL\n"
    assert run_alone(code, NCCL_PROXY_DUMP_SIGNAL="10").returncode == 0


def test_all_ranks_leave_in_the_same_step(tmp_path: Path) -> None:
    """Though only one of them was asked."""
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "rank.py").write_text(RANK)
    with start_ranks(str(tmp_path / "rank.py"), 3) as ranks:
        wait_for(lambda: len(list(tmp_path.glob("begun*"))) == 3, 120)
        ranks[2].send_signal(signal.SIGUSR1)
        (first, *others) = collect(ranks, 120)
    assert first[0] == 0 and others == [first] * 2
