"""A run whose files are cut off with its first node: what wakes up later must harm nothing.

a node ── link cut, files too ──────────────────── healed ── its manager and agents wake up
others      ── no manager: requeue ── new session ── trains ────────────────► on and on
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import pytest

from benchmarks.chaos.history import check_history, read_spans
from tests.cluster import daemons
from tests.cluster.files import DAEMON
from tests.cluster.lab import Lab
from tests.cluster.processes import (
    ProcessId,
    find_descendants,
    find_in_namespace,
    is_alive,
    read_record,
    send_signal,
    wait_for,
)
from tests.cluster.shape import LabError
from tests.cluster.test_morph import CONF
from tests.command import Vjob
from tests.command import wait_for as wait_until
from tests.small_training import read_losses, write_slow_steps, write_text
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.files import read_json
from varuna_core.records.morphing import read_state
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import read_training

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CUT = (
    CONF.replace("steps: 60", "steps: 20000")
    .replace("pipeline: 4", "pipeline: 2")
    .replace("count: 4, queue: gpu2", "count: 2, queue: gpu2")
    .replace("lost_s: 15", "lost_s: 15\n  requeue: true")
    .replace("warm: false", "warm: false, return_s: 10")
)


@pytest.fixture
def vjob(clean_lab: Lab, shared_files: Path, request: pytest.FixtureRequest) -> Vjob:
    """The command in a folder that the nodes mount."""
    pytest.importorskip("torch", reason="torch is not installed")
    folder = shared_files / request.node.name
    folder.mkdir(mode=0o700)
    write_text(folder)
    write_slow_steps(folder / "calm", 0.05)
    clean_lab.wait_idle()
    return Vjob(folder, clean_lab.env)


def find_agents(lab: Lab, node: str, run: RunFolder) -> dict[ProcessId, str]:
    """The manager, the daemon and the agents of a run on a node, with their command lines."""
    found = {}
    for process in find_in_namespace(lab.paths.namespace(node)):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            if f"{run.agent}" in words[:3]:
                found[process] = " ".join(words)
    return found


def find_manager(lab: Lab, node: str, run: RunFolder) -> ProcessId | None:
    found = find_agents(lab, node, run).items()
    return next((process for process, line in found if " manage " in line), None)


def read_blocked_path(process: ProcessId) -> str:
    """Read the path for which a process waits in a system call; empty where it is for none."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process.pid}/syscall").read_text().split()
        with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
            for word in words[1:7]:
                with contextlib.suppress(OSError, OverflowError):
                    memory.seek(int(word, 16))
                    text = memory.read(400).partition(b"\0")[0]
                    if text.startswith(b"/"):
                        return text.decode(errors="replace")
    return ""


def cut_while_it_looks(lab: Lab, node: str, run: RunFolder, manager: ProcessId) -> str:
    """Cut the node's link while its manager reads the run's files; where it sleeps then.

    It has seen by then that the run is its own, and gives its orders once it wakes up. The file
    server stands still meanwhile, so the manager comes to no further look before the link is cut.
    Where it sleeps in that look all the same, a few times, that counts too.
    """
    server = find_descendants({read_record(lab.paths.pid_record(DAEMON))})
    for is_last in (False, False, False, False, True):
        wait_for_file(manager, run)
        for process in server:
            send_signal(process, signal.SIGSTOP)
        lab.cut_link(node)
        for process in server:
            send_signal(process, signal.SIGCONT)
        seen: list[str] = []

        def sleeps(seen: list[str] = seen) -> bool:
            seen.append(read_blocked_path(manager))
            return len(seen) >= 20 and seen[-20:] == seen[-1:] * 20 and seen[-1] != ""

        with contextlib.suppress(LabError):
            wait_for(sleeps, 5, "the manager sleeps")
            if is_last or seen[-1] != f"{run.morph.epochs}":
                break
        if not is_last:
            lab.mend_link(node)
    return seen[-1]


def wait_for_file(process: ProcessId, run: RunFolder) -> None:
    """Wait for a call of the process on a file of the run, its look at the epochs left out; for ten
    seconds at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        path = read_blocked_path(process)
        if path.startswith(f"{run.path}/") and not path.startswith(f"{run.morph.epochs}"):
            return


def read_session(run: RunFolder) -> str:
    state = read_state(run.morph)
    return "" if state is None else state.session


def test_a_manager_that_wakes_up_after_the_take_over_harms_nothing(
    clean_lab: Lab, vjob: Vjob
) -> None:
    """Its slurmd is dead too, so Slurm does not end what wakes up there."""
    import torch

    from tests.varuna_core.programs.reference_training import train_plainly

    run = vjob.submit(CUT)
    store = vjob.folder / "ckpt"

    def newest() -> int:
        return max((one.iteration for one in list_complete(store)), default=0)

    def explain() -> str:
        return vjob.explain(run)

    wait_until(lambda: newest() >= 20, 180, explain)
    first = read_session(run)
    victim = str(read_json(run.morph.node(0))["host"])
    manager = find_manager(clean_lab, victim, run)
    assert manager is not None, explain()
    moment = cut_while_it_looks(clean_lab, victim, run, manager)
    send_signal(read_record(clean_lab.paths.pid_record(victim)), signal.SIGKILL)
    wait_until(lambda: read_session(run) not in ("", first), 240, explain)
    second = read_session(run)
    before = newest()
    wait_until(lambda: newest() >= before + 10, 180, explain)
    assert is_alive(manager), "it sleeps"

    clean_lab.mend_link(victim)
    wait_until(lambda: not find_agents(clean_lab, victim, run), 240, explain)
    before = newest()
    wait_until(lambda: newest() >= before + 20, 180, explain)
    assert read_session(run) == second, f"{moment}\n{explain()}"
    said = vjob("cancel", run.name).stdout
    assert "saved and left" in said, f"{said}\n{explain()}"
    assert vjob.wait_over(run, 120)["verdict"] == "CANCELLED", explain()
    spans, problems = read_spans(run, 8)
    assert problems == [] and len(spans) == 2, spans
    assert check_history(run) == []
    torch.set_num_threads(1)
    found = read_losses(run)
    losses, _ = train_plainly(read_training(run.training), last=max(found))
    assert found == pytest.approx(losses, rel=2e-5)
    wait_for(lambda: not daemons.is_running(clean_lab.paths, victim), 10, "its slurmd is dead")
