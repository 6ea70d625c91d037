"""Give a headless job back to the scheduler: Slurm removed its first node, with the batch script
and the manager, and let the job continue.

The other nodes notice at about the same time that the manager is missing. One of them asks the
scheduler to requeue or end the job:

    a random wait ─► the turn is taken ─► no later session, nobody was heard ─► ask the scheduler
                     by another one: wait; still alive, so it was not heard ─► the next turn

When a request succeeds, the scheduler ends all nodes that it can reach. A node that it cannot reach
finds in the run folder that another node's request succeeded, or that a later session has the run,
and makes no request. After `TRIES` requests in vain the job is ended, since it would otherwise hold
its nodes to the time limit.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Callable, Sequence

from varuna_core.agent.processes.process import run as run_command
from varuna_core.records.files import list_names, write_first
from varuna_core.records.morphing import is_outdated, read_newest_epoch
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import MorphFolder

TRIES = 3
TURN_S = 60.0
"""Seconds for the scheduler to end the asking node and all others; it may be overloaded."""
ASK_S = 50.0
"""Time limit of one command, in seconds."""
LEAST_WAIT_S = 5.0
NODES_PER_S = 20.0
"""How many nodes may look at the run folder in a second, so that thousands do not come at once."""


def give_back(
    folder: MorphFolder,
    session: str,
    lines: Sequence[str],
    rest: Callable[[float], bool],
    most_wait_s: float,
) -> bool:
    """Run the shell commands `lines` in turn, one node at a time, until one succeeds; return True
    if this node ran the command that succeeded.

    `rest` waits some seconds, and returns False if this node is asked to end meanwhile.
    """
    epoch = read_newest_epoch(folder)
    for turn, line in enumerate(lines):
        if not rest(random.uniform(0, most_wait_s)):
            return False
        is_ours = False
        with contextlib.suppress(OSError):
            is_ours = write_first(folder.turn(epoch, turn), {"node": os.uname().nodename})
        # After our own write: a client that has written to a folder is shown what is in it.
        if is_over(folder, session, epoch):
            return False
        if is_ours and run_line(line):
            with contextlib.suppress(OSError):
                write_first(folder.given_back(epoch), {"turn": turn})
            return True
        if not rest(TURN_S):
            return False
    return False


def is_over(folder: MorphFolder, session: str, epoch: int) -> bool:
    """Return True if a later session owns the run, or is about to."""
    newest = read_newest_epoch(folder)
    if is_outdated(folder, session, newest):
        return True
    names = list_names(folder.epochs)  # last: a node stands still where it touches files
    return folder.given_back(epoch).name in names or folder.claim(newest + 1).name in names


def run_line(line: str) -> bool:
    return run_command(["sh", "-c", line], timeout_s=ASK_S).code == 0


def build_lines(ask: str, end: str) -> Sequence[str]:
    return (*[ask] * TRIES, end)


def most_wait_s(plan: Plan) -> float:
    return LEAST_WAIT_S + plan.num_nodes / NODES_PER_S
