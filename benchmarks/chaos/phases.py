"""The phase of a run, read from its own records, and the cells of the table fault x phase.

queue ─► join ─► start ─► training ⇄ save ─► end
                   ▲          │
                   ├─ morph ◄─┤        another attempt, the same session
                   └─ requeue ◄        another session
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import ANYWHERE, ON_SLURM
from varuna_core.morph.orders import read_orders
from varuna_core.records.files import list_names, read_lines
from varuna_core.records.morphing import (
    END,
    ENDED,
    GATHERING,
    JUDGING,
    REQUEUE,
    RUNNING,
    SAVING,
    STOPPING,
    read_joins,
    read_state,
)
from varuna_core.records.runfolder import RunFolder

QUEUE, JOIN, START, TRAINING, SAVE, MORPH, REQUEUED, OVER = PHASES = (
    "queue", "join", "start", "training", "save", "morph", "requeue", "end",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the run's records say at one look."""

    state: Mapping[str, Any]
    """manager.json; empty before there is one."""
    trained: bool
    """Whether the attempt has done a step."""
    is_saving: bool
    """Whether a checkpoint is being written."""
    is_growing: bool
    """Whether nodes were asked for that are not here yet."""
    is_called_off: bool
    """Whether the run was asked to end."""


def name_phase(facts: Facts) -> str:
    """The phase that these facts mean."""
    state = facts.state
    phase, after = state.get("phase"), state.get("after")
    if phase is None:
        return QUEUE
    if phase == ENDED:
        return REQUEUED if state.get("requeue") else OVER
    if facts.is_called_off:
        return OVER
    if phase in (SAVING, STOPPING, JUDGING):  # the last save of an attempt is a part of its end
        return {REQUEUE: REQUEUED, END: OVER}.get(str(after), MORPH)
    if phase == GATHERING:
        return _name_gathering(state)
    if facts.is_saving:
        return SAVE
    if phase == RUNNING and not facts.trained:
        return START
    return JOIN if facts.is_growing else TRAINING


def _name_gathering(state: Mapping[str, Any]) -> str:
    """Before the first attempt of a session nodes join; after one the run morphs."""
    attempt, earlier = state.get("attempt", -1), state.get("earlier", -1)
    if attempt != earlier:
        return MORPH
    return JOIN if attempt < 0 else REQUEUED


GROWING_S = 60.0
"""How long after nodes were asked for their seats count as awaited."""


FRESH_S = 2.0


class PhaseReader:
    """Reads the phase of a run."""

    def __init__(self, run: RunFolder, store: Path) -> None:
        self._run, self._store = run, store

    def read(self) -> str:
        return name_phase(self.read_facts())

    def read_facts(self) -> Facts:
        state, orders = read_state(self._run.morph), read_orders(self._run.morph)
        attempt = -1 if state is None else state.attempt
        asked = [event["kind"] for event in read_lines(self._run.vjob_events)]
        return Facts(
            state={} if state is None else asdict(state),
            trained=orders is not None and orders.trained and orders.attempt == attempt,
            is_saving=self._is_saving(),
            is_growing=self._is_growing(),
            is_called_off="cancel-asked" in asked,
        )

    def _is_saving(self) -> bool:
        """Tell if a checkpoint changes; what a killed save left behind does not."""
        for name in list_names(self._store):
            if name.endswith(".partial"):
                with contextlib.suppress(OSError):
                    if time.time() - (self._store / name).stat().st_mtime < FRESH_S:
                        return True
        return False

    def _is_growing(self) -> bool:
        """Tell if a seat that was given out lately has had no agent yet."""
        there = set(list_names(self._run.morph.nodes))
        return any(
            f"{seat}.json" not in there
            for join in read_joins(self._run.morph)
            if time.time() - join.asked < GROWING_S
            for seat in join.seats
        )


NO_NODE = "nothing of the run has started"
OF_RANKS = ("kill rank", "slow rank", "kill agent", "kill waiting", "damage newest")
OF_NODES = ("kill node", "kill manager", "freeze manager", "freeze node", "leave", "step clock")
OF_HOSTS = ("power off", "cut link", "slow link", "stop slurmd", "preempt")
OF_JOBS = ("warn", "requeue", "grow", "shrink")


def explain_impossible(kind: str, phase: str) -> str | None:
    """Why a fault cannot hit in a phase; None where it can."""
    if phase == QUEUE and kind in (*OF_RANKS, *OF_NODES, *OF_HOSTS, *OF_JOBS):
        return NO_NODE
    if phase == START and kind == "kill waiting":
        return "ranks wait only once an attempt has trained"
    if phase == OVER and kind in ("leave", *OF_JOBS, "preempt"):
        return "refused, or no longer looked at: the run ends as it is"
    return None


def list_cells(kinds: Sequence[str] = (*ANYWHERE, *ON_SLURM)) -> list[tuple[str, str]]:
    """The cells of the table that can be hit."""
    return [
        (kind, phase)
        for kind in kinds
        for phase in PHASES
        if explain_impossible(kind, phase) is None
    ]
