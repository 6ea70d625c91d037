"""Each fault, done to a run: a sentence that says what was hit, or why nothing was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.chaos.faults import Fault
from tests.chaos.stage import Stage, signal_all, slow_down
from tests.cluster.processes import send_signal
from varuna_core.morph.orders import Presence
from varuna_core.records.checkpoints import list_complete

T = TypeVar("T")
Pause = Callable[[float], None]
"""Let the time pass, and look at the run meanwhile."""
Strike = Callable[[Stage, Fault, Pause], str]
NOBODY = "nothing to hit"


def pick(found: Sequence[T], fault: Fault) -> T | None:
    return found[int(fault.pick * len(found))] if found else None


def pick_node(stage: Stage, fault: Fault) -> Presence | None:
    return pick(stage.list_nodes(), fault)


def kill_rank(stage: Stage, fault: Fault, pause: Pause) -> str:
    ranks = [rank for node in stage.list_nodes() for rank in stage.find_ranks(node)]
    rank = pick(ranks, fault)
    if rank is None:
        return NOBODY
    send_signal(rank, signal.SIGKILL)
    return f"killed the rank of pid {rank.pid}"


def kill_agent(stage: Stage, fault: Fault, pause: Pause) -> str:
    node = pick_node(stage, fault)
    agent = None if node is None else stage.find_agent(node)
    if node is None or agent is None:
        return NOBODY
    send_signal(agent, signal.SIGKILL)
    return f"killed the attempt's agent of seat {node.seat}"


def kill_node(stage: Stage, fault: Fault, pause: Pause) -> str:
    """What stays on the node, alone: what it started has to go by itself."""
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    send_signal(min(stage.find_family(node), key=lambda p: p.pid != node.pid), signal.SIGKILL)
    return f"killed what stays on seat {node.seat}"


def kill_manager(stage: Stage, fault: Fault, pause: Pause) -> str:
    managers = stage.find_managers()
    for process in managers:
        send_signal(process, signal.SIGKILL)
    return f"killed {len(managers)} manager" if managers else NOBODY


def freeze_manager(stage: Stage, fault: Fault, pause: Pause) -> str:
    managers = set(stage.find_managers())
    signal_all(managers, signal.SIGSTOP)
    pause(fault.lasts_s)
    signal_all(managers, signal.SIGCONT)
    return f"stopped the manager for {fault.lasts_s} s" if managers else NOBODY


def freeze_node(stage: Stage, fault: Fault, pause: Pause) -> str:
    """Half the time for longer than a silent node may be."""
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    seconds = fault.lasts_s if fault.pick * 100 % 2 < 1 else fault.lasts_s + 16
    family = stage.find_family(node)
    signal_all(family, signal.SIGSTOP)
    pause(seconds)
    signal_all(family, signal.SIGCONT)
    return f"stopped all of seat {node.seat} for {seconds:.1f} s"


def slow_rank(stage: Stage, fault: Fault, pause: Pause) -> str:
    ranks = [rank for node in stage.list_nodes() for rank in stage.find_ranks(node)]
    rank = pick(ranks, fault)
    if rank is None:
        return NOBODY
    slow_down(rank, fault.lasts_s)
    return f"slowed the rank of pid {rank.pid} for {fault.lasts_s} s"


def damage_newest(stage: Stage, fault: Fault, pause: Pause) -> str:
    """A bit, a tail, or a whole file; then a rank, so that somebody loads it.

    All stand still meanwhile, or they would save a newer one before the rank is gone.
    """
    ranks = {rank for node in stage.list_nodes() for rank in stage.find_ranks(node)}
    signal_all(ranks, signal.SIGSTOP)
    try:
        return _damage(stage, fault, pause)
    finally:
        signal_all(ranks, signal.SIGCONT)


def _damage(stage: Stage, fault: Fault, pause: Pause) -> str:
    complete = list_complete(stage.store)
    if len(complete) < 2:  # where none is whole a run must not go on
        return NOBODY
    folder = complete[-1].path
    file = pick(sorted([*folder.glob("segment*"), folder / "manifest.json"]), fault)
    assert file is not None
    how = int(fault.lasts_s * 10) % 3
    word = spoil(file, how)
    said = kill_rank(stage, fault, pause)
    return f"{word} {folder.name}/{file.name}, {said}"


def spoil(file: Path, how: int) -> str:
    """Beside the file and renamed over it: no rank writes there any more."""
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


def fill_store(stage: Stage, fault: Fault, pause: Pause) -> str:
    return fill(stage, stage.store, fault, pause)


def fill_run(stage: Stage, fault: Fault, pause: Pause) -> str:
    return fill(stage, stage.folder / "log", fault, pause)


def fill(stage: Stage, folder: Path, fault: Fault, pause: Pause) -> str:
    if not folder.is_mount():
        return f"{NOBODY}: {folder} is no disk of its own"
    with stage.full(folder):
        pause(2 * fault.lasts_s)  # until somebody has to write
    return f"filled the disk of {folder.name} for {2 * fault.lasts_s} s"


def warn(stage: Stage, fault: Fault, pause: Pause) -> str:
    stage.warn()
    return "told the batch script that its time is near its end"


def leave(stage: Stage, fault: Fault, pause: Pause) -> str:
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    stage.ask_to_leave(node.seat)
    return f"asked seat {node.seat} to leave"


def kill_waiting(stage: Stage, fault: Fault, pause: Pause) -> str:
    """Of what waits for the next attempt; then a rank, so that somebody counts on it."""
    found = [one for node in stage.list_nodes() for one in stage.find_waiting(node)]
    one = pick(found, fault)
    if one is None:
        return NOBODY
    send_signal(one, signal.SIGKILL)
    return f"killed pid {one.pid}, which waited; {kill_rank(stage, fault, pause)}"


def grow(stage: Stage, fault: Fault, pause: Pause) -> str:
    count = 1 + int(fault.pick * 2)
    done = stage.vjob("grow", str(stage.run.path), "--count", str(count), code=None)
    return f"asked for {count} more nodes: {(done.stdout or done.stderr).splitlines()[:1]}"


def shrink(stage: Stage, fault: Fault, pause: Pause) -> str:
    done = stage.vjob("shrink", str(stage.run.path), "--count", "1", code=None)
    return f"asked for one node less: {(done.stdout or done.stderr).splitlines()[:1]}"


def step_clock(stage: Stage, fault: Fault, pause: Pause) -> str:
    """Of one node, forward or back; it stays so."""
    node = pick_node(stage, fault)
    seconds = int((fault.lasts_s - 4.5) * 1000)
    if node is None or not stage.has_clock(node):
        return NOBODY
    if not stage.clocks.step(stage.name_clock(node), seconds):
        return NOBODY
    return f"stepped the clock of {stage.name_clock(node)} by {seconds} s"


STRIKES: dict[str, Strike] = {
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
