"""Actions that apply faults to a run; each returns a sentence that says what was hit."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.lab_testbed import LabTestbed
from benchmarks.chaos.testbed import Testbed, signal_all, slow_down
from tests.cluster.processes import send_signal
from varuna_core.morph.orders import Presence
from varuna_core.records.checkpoints import list_complete

T = TypeVar("T")
Pause = Callable[[float], None]
"""Waits, and polls the run meanwhile."""
Action = Callable[[Testbed, Fault, Pause], str]
NO_TARGET = "nothing to hit"


def pick(found: Sequence[T], fault: Fault) -> T | None:
    return found[int(fault.pick * len(found))] if found else None


def pick_node(testbed: Testbed, fault: Fault) -> Presence | None:
    return pick(testbed.list_nodes(), fault)


def kill_rank(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    ranks = [rank for node in testbed.list_nodes() for rank in testbed.find_ranks(node)]
    rank = pick(ranks, fault)
    if rank is None:
        return NO_TARGET
    send_signal(rank, signal.SIGKILL)
    return f"killed the rank of pid {rank.pid}"


def kill_agent(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    agents = [(node, testbed.find_agent(node)) for node in testbed.list_nodes()]
    found = pick([(node, agent) for node, agent in agents if agent is not None], fault)
    if found is None:
        return NO_TARGET
    node, agent = found
    send_signal(agent, signal.SIGKILL)
    return f"killed the attempt's agent of seat {node.seat}"


def kill_node(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Kill the node's daemon alone: its children have to end by themselves."""
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    send_signal(
        min(testbed.find_node_processes(node), key=lambda p: p.pid != node.pid), signal.SIGKILL
    )
    return f"killed what stays on seat {node.seat}"


def kill_manager(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    managers = testbed.find_managers()
    for process in managers:
        send_signal(process, signal.SIGKILL)
    return f"killed {len(managers)} manager" if managers else NO_TARGET


def freeze_manager(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    managers = set(testbed.find_managers())
    signal_all(managers, signal.SIGSTOP)
    pause(fault.lasts_s)
    signal_all(managers, signal.SIGCONT)
    return f"stopped the manager for {fault.lasts_s} s" if managers else NO_TARGET


def freeze_node(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Stop all processes of a node, half the time for longer than a node may be silent."""
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    seconds = fault.lasts_s if fault.pick * 100 % 2 < 1 else fault.lasts_s + 16
    family = testbed.find_node_processes(node)
    signal_all(family, signal.SIGSTOP)
    pause(seconds)
    signal_all(family, signal.SIGCONT)
    return f"stopped all of seat {node.seat} for {seconds:.1f} s"


def slow_rank(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    ranks = [rank for node in testbed.list_nodes() for rank in testbed.find_ranks(node)]
    rank = pick(ranks, fault)
    if rank is None:
        return NO_TARGET
    slow_down(rank, fault.lasts_s)
    return f"slowed the rank of pid {rank.pid} for {fault.lasts_s} s"


def damage_newest(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Damage a file of the newest checkpoint; then kill a rank, so that the file is read.

    All ranks are stopped meanwhile, or they would save a newer one before the rank is gone.
    """
    ranks = {rank for node in testbed.list_nodes() for rank in testbed.find_ranks(node)}
    signal_all(ranks, signal.SIGSTOP)
    try:
        return _damage(testbed, fault, pause)
    finally:
        signal_all(ranks, signal.SIGCONT)


def _damage(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    complete = list_complete(testbed.store)
    if len(complete) < 2:  # where none is whole a run must not go on
        return NO_TARGET
    folder = complete[-1].path
    file = pick(sorted([*folder.glob("segment*"), folder / "manifest.json"]), fault)
    assert file is not None
    how = int(fault.lasts_s * 10) % 3
    word = spoil(file, how)
    said = kill_rank(testbed, fault, pause)
    return f"{word} {folder.name}/{file.name}, {said}"


def spoil(file: Path, how: int) -> str:
    """Damage one file; no rank writes there any more."""
    if how == 2 and file.name != "manifest.json":
        file.unlink()
        return "removed"
    data = bytearray(file.read_bytes())
    if how == 1:
        del data[len(data) // 2 :]
    else:
        data[-len(data) // 4] ^= 4
    file.write_bytes(data)
    return ("changed a bit of", "cut", "cut")[how]


def fill_store(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    return fill(testbed, testbed.store, fault, pause)


def fill_run(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    return fill(testbed, testbed.folder / "log", fault, pause)


def fill(testbed: Testbed, folder: Path, fault: Fault, pause: Pause) -> str:
    if not folder.is_mount():
        return f"{NO_TARGET}: {folder} is no disk of its own"
    with testbed.fill_disk(folder):
        pause(2 * fault.lasts_s)  # until somebody has to write
    return f"filled the disk of {folder.name} for {2 * fault.lasts_s} s"


def warn(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    testbed.warn()
    return "told the batch script that its time is near its end"


def leave(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    testbed.ask_to_leave(node.seat)
    return f"asked seat {node.seat} to leave"


def kill_waiting(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Kill a process that waits for the next attempt; then a rank, so that it is needed."""
    found = [one for node in testbed.list_nodes() for one in testbed.find_waiting(node)]
    one = pick(found, fault)
    if one is None:
        return NO_TARGET
    send_signal(one, signal.SIGKILL)
    return f"killed pid {one.pid}, which waited; {kill_rank(testbed, fault, pause)}"


def grow(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    count = 1 + int(fault.pick * 2)
    done = testbed.vjob("grow", str(testbed.run.path), "--count", str(count), code=None)
    said = (done.stdout or done.stderr).splitlines()[:1]
    return f"{NO_TARGET}: {said}" if done.returncode else f"asked for {count} more nodes: {said}"


def shrink(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    done = testbed.vjob("shrink", str(testbed.run.path), "--count", "1", code=None)
    said = (done.stdout or done.stderr).splitlines()[:1]
    return f"{NO_TARGET}: {said}" if done.returncode else f"asked for one node less: {said}"


def step_clock(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Step one node's clock forward or back, for good."""
    node = pick_node(testbed, fault)
    seconds = int((fault.lasts_s - 4.5) * 1000)
    if node is None or not testbed.has_clock(node):
        return NO_TARGET
    if not testbed.clocks.step(testbed.name_clock(node), seconds):
        return NO_TARGET
    return f"stepped the clock of {testbed.name_clock(node)} by {seconds} s"


LOCAL_ACTIONS: dict[str, Action] = {
    "kill rank": kill_rank,
    "kill agent": kill_agent,
    "kill node": kill_node,
    "kill manager": kill_manager,
    "freeze manager": freeze_manager,
    "freeze node": freeze_node,
    "slow rank": slow_rank,
    "damage newest": damage_newest,
    "fill store": fill_store,
    "fill run": fill_run,
    "warn": warn,
    "leave": leave,
    "grow": grow,
    "shrink": shrink,
    "kill waiting": kill_waiting,
    "step clock": step_clock,
}


SLOW_MBIT = 1.0


PREEMPT_S = 10.0
"""Until a preempted job has let its nodes go (GraceTime of the lab and a little)."""


NOTICED_S = 16.0
"""Until the controller calls a silent node down (docs/lab.md)."""


def power_off(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Cut a node's power until the controller has noticed; the node of the batch script stays off.

    A minute after a node was lost Slurm 22.05 repeats the kill of what ran there, by the job's
    number. The job may have begun there anew by then, for the lab does not wait 120 s before a
    requeue, and would be ended.
    """
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    seconds = fault.lasts_s + NOTICED_S
    cluster = as_lab_testbed(testbed).lab
    cluster.crash_node(node.host)
    pause(seconds)
    if node.seat == 0:
        return f"{node.host}, the first node, has no power any more"
    cluster.restore_node(node.host)
    return f"{node.host} had no power for {seconds:.1f} s"


def cut_link(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Cut a node's link, every other time for so long that the controller calls the node down.

    Not that of the batch script: if it comes back before the other nodes gave the job back, Slurm
    ends the job as FAILED (docs/morph_design.md, "A headless job").
    """
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    is_short = node.seat == 0 or fault.pick * 100 % 2 < 1
    seconds = fault.lasts_s if is_short else fault.lasts_s + NOTICED_S
    as_lab_testbed(testbed).cut_link(node.host)
    pause(seconds)
    as_lab_testbed(testbed).mend_link(node.host)
    return f"cut the link of {node.host} for {seconds:.1f} s"


def slow_link(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    cluster = as_lab_testbed(testbed).lab
    cluster.slow_link(node.host, SLOW_MBIT, latency_ms=200)
    pause(fault.lasts_s)
    cluster.clear_link(node.host)
    return f"slowed the link of {node.host} to {SLOW_MBIT:g} Mbit/s for {fault.lasts_s} s"


def stop_slurmd(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    as_lab_testbed(testbed).stop_slurmd(node.host)
    pause(fault.lasts_s)
    as_lab_testbed(testbed).start_slurmd(node.host)
    return f"killed slurmd of {node.host}, back after {fault.lasts_s} s"


def restart_controller(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    cluster = as_lab_testbed(testbed).lab
    cluster.stop_controller()
    pause(fault.lasts_s)
    cluster.start_controller()
    return f"no controller for {fault.lasts_s} s"


def requeue(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    as_lab_testbed(testbed).requeue()
    return "requeued the job, as an administrator does"


def preempt(testbed: Testbed, fault: Fault, pause: Pause) -> str:
    """Submit a job of a better queue that wants one node: Slurm warns the run and requeues it."""
    node = pick_node(testbed, fault)
    if node is None:
        return NO_TARGET
    job = as_lab_testbed(testbed).preempt([node.host])
    pause(fault.lasts_s + PREEMPT_S)
    as_lab_testbed(testbed).lab.run(["scancel", job], check=False)
    return f"a job of a better queue took {node.host}"


def as_lab_testbed(testbed: Testbed) -> LabTestbed:
    assert isinstance(testbed, LabTestbed)
    return testbed


LAB_ACTIONS: dict[str, Action] = {
    "power off": power_off,
    "cut link": cut_link,
    "slow link": slow_link,
    "stop slurmd": stop_slurmd,
    "restart controller": restart_controller,
    "requeue": requeue,
    "preempt": preempt,
}
