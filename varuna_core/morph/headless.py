"""Give back a headless job: Slurm took out its first node, with batch script and manager, and let
the job go on.

Its other nodes miss the manager at about the same time. One of them gives the job back:

    a random wait ─► the turn is taken ─► no later session, nobody was heard ─► ask the scheduler
                     by another one: wait; still alive, so it was not heard ─► the next turn

The scheduler ends whom it can reach when it hears; who is left, cut off from it, finds that
somebody was heard, or that a later session has the run, and asks for nothing. After `TRIES` in vain
the job is ended, for else it would hold its nodes to the time limit.
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
"""Nodes that look at the run folder in a second, so that thousands do not come at once."""


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
