"""Standby ranks: started while an earlier attempt trains, with what they need already imported.

    agent ── PROGRAM SETTINGS --standby ──► imports, waits on its standard input
          ── {"env": ..., "arguments": ...} ──► is the rank: same process, same pipes, same end

A rank that waits is a child of the agent of the one attempt that may use it, and dies with it. Some
variables are read at import, so one is used only if what it was started with differs from what the
rank is to have in nothing but the settings and the rank's place.
"""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import replace
from typing import Mapping, Sequence

from varuna_core.agent.processes.process import RankProcess, start_rank
from varuna_core.agent.setup.ranks import INTERFACE_NAMES, Meeting, RankStart, build_rank
from varuna_core.agent.setup.world import follows_place
from varuna_core.records.plan import NodePlan, Plan

STANDBY = "--standby"
"""The built-in programs take it (varuna_core/programs/pretrain.py)."""


class StandbyRanks:
    """The ranks of one node that wait, by local rank; none at first."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[RankStart, RankProcess]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._ranks

    def start(self, plan: Plan, node: NodePlan, meeting: Meeting, own: Mapping[str, str]) -> None:
        """One for each rank of a node like this; from the main thread, with which they die."""
        for local_rank in range(node.group.ranks):
            model = build_rank(plan, node, local_rank, meeting, own, None)
            with contextlib.suppress(OSError):  # what is wrong the rank itself will say
                process = start_rank([*model.argv, STANDBY], model.env, model.cwd, waits=True)
                self._ranks[local_rank] = (model, process)

    def take(self, local_rank: int, start: RankStart) -> RankProcess | None:
        """The waiting process as this rank; None where there is none, or it does not fit."""
        model, process = self._ranks.get(local_rank, (None, None))
        if model is None or process is None or not fits(model, start):
            return None
        arguments = start.argv[len(model.argv) - 1 :]
        if not process.tell(json.dumps({"env": start.env, "arguments": arguments})):
            return None
        del self._ranks[local_rank]
        return process

    def end(self) -> None:
        """Whoever was not taken is in the way now."""
        for _, process in self._ranks.values():
            process.signal_group(signal.SIGKILL)
            process.close()
        self._ranks = {}


def fits(model: RankStart, start: RankStart) -> bool:
    """True if only the last word, the settings, and the rank's place differ."""
    plain = replace(model, argv=(), env=_strip(model.env)) == replace(
        start, argv=(), env=_strip(start.env)
    )
    return plain and _same_program(model.argv, start.argv)


def _same_program(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) > 1 and first[:-1] == second[:-1]


def _strip(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if not name.startswith("VJOB_") and name not in INTERFACE_NAMES and not follows_place(name)
    }
