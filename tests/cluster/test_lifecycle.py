"""`up` and `down` at bad moments: they leave nothing behind and touch nothing foreign."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.network import BRIDGE, list_mounts
from tests.cluster.processes import read_record, run, send_signal, wait_for
from tests.cluster.record import LabPaths, hold_lock
from tests.cluster.shape import LabError

pytestmark = pytest.mark.slurm


def call_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run([sys.executable, "-m", "tests.cluster", *arguments], check=False)


@pytest.fixture(scope="module")
def no_lab(lab: Lab) -> Iterator[LabPaths]:
    if not lab.started_here:
        pytest.skip("the lab was up before the tests; stopping it is not theirs to do")
    # Its controller dies first: `down` must cope with a lab that was killed.
    send_signal(read_record(lab.paths.pid_record("slurmctld")), signal.SIGKILL)
    lab.stop()
    yield lab.paths
    Lab.start()


def find_traces(paths: LabPaths) -> list[str]:
    """All that a lab could leave on the machine."""
    traces = list_mounts(paths.folder)
    traces += [str(paths.folder)] if paths.folder.exists() else []
    traces += [name for name in os.listdir("/sys/class/net") if name.startswith("vjl-")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes()
            environment = Path("/proc", pid, "environ").read_bytes()
        except OSError:
            continue
        if f"SLURM_CONF={paths.slurm_conf}".encode() in environment:
            traces.append(f"process {pid}: {command!r}")
    return traces


def test_down_leaves_nothing(no_lab: LabPaths) -> None:
    assert find_traces(no_lab) == []
    assert call_cli("down").stdout == "no lab is up; nothing done\n"
    assert call_cli("status").returncode == 1


@pytest.mark.parametrize("moment", ["netns/b2", "pids/mariadbd", "pids/a2"])
def test_down_after_an_up_that_was_killed(no_lab: LabPaths, moment: str) -> None:
    up = subprocess.Popen([sys.executable, "-m", "tests.cluster", "up"], stdout=subprocess.DEVNULL)
    wait_for((no_lab.folder / moment).exists, 30, moment)
    up.kill()
    up.wait()
    assert call_cli("status").returncode == 1
    assert call_cli("down").stdout == "down\n"
    assert find_traces(no_lab) == []


def refuse_up(no_lab: LabPaths, reason: str) -> None:
    result = call_cli("up")
    assert result.returncode == 1
    assert reason in result.stderr


def test_up_refuses_a_bridge_that_is_not_its_own(no_lab: LabPaths) -> None:
    run(["ip", "link", "add", "name", BRIDGE, "type", "bridge"])
    try:
        refuse_up(no_lab, f"network interface {BRIDGE} exists")
        assert call_cli("down").stdout == "no lab is up; nothing done\n"
        assert Path("/sys/class/net", BRIDGE).exists()
    finally:
        run(["ip", "link", "delete", BRIDGE])


def test_up_refuses_a_port_in_use(no_lab: LabPaths) -> None:
    with socket.create_server(("127.0.0.1", 27817)):
        refuse_up(no_lab, "TCP port 27817, which the lab needs, is taken")
    assert find_traces(no_lab) == []


def test_up_and_down_refuse_a_folder_that_is_not_a_labs(no_lab: LabPaths) -> None:
    no_lab.folder.mkdir()
    precious = no_lab.folder / "precious"
    precious.touch()
    try:
        refuse_up(no_lab, "not made by this lab")
        assert call_cli("down").returncode == 1
        assert precious.exists()
    finally:
        precious.unlink()
        no_lab.folder.rmdir()


def test_a_lock_taken_twice_by_one_process_is_an_error_not_a_wait(no_lab: LabPaths) -> None:
    with hold_lock("test", timeout_s=1):
        twice = hold_lock("test", timeout_s=1)
        with pytest.raises(LabError, match="holds the lab's test lock already"):
            twice.__enter__()
    assert not Path("/run/vjob-lab.test.lock").exists()
