"""Observer of the nodes: turns files of the run folder into inputs of the state machine.

A sign of life counts from the time at which a change of it was seen, by this machine's clock. While
ranks train, only a long silence counts as a loss. Once an attempt is being stopped, a node that
does not end is detected soon, and sooner if the node's side has closed the connection: a node that
lives writes a sign of life to its file at once, and connects again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple

from varuna_core.facts.cause import EndCause
from varuna_core.morph.machine import ATTEMPTING
from varuna_core.morph.messages import (
    AskedToLeave,
    CalledToEnd,
    Input,
    Joined,
    Lost,
    RankFailed,
    RanksEnded,
    Saved,
)
from varuna_core.morph.orders import ENDED, GONE, Presence
from varuna_core.records.exits import NOT_READY
from varuna_core.records.morphing import RUNNING, SAVING, STOPPING, ManagerState, get_seat

SUSPECT_BEATS = 8.0
"""Number of missing signs of life after which a node counts as lost while the attempt is ending;
nodes then give a sign of life at each poll (`node_daemon.py`)."""
CLOSED_BEATS = 3.0
"""Number of missing signs of life after which a node counts as lost while the attempt is ending, if
the node's side has closed the connection."""


class Sight(NamedTuple):
    """Contents of the run folder at one moment."""

    presences: Dict[int, Presence]
    stop: Optional[Dict[str, object]]
    """Content of the attempt's stop.json."""
    refused: Dict[int, str]
    """Reasons for which the preflight of a node refused to start, by seat."""
    leave: Dict[int, str]
    """Seats that were asked to leave, with the reason unless a person asked."""
    saved: int
    closed: Mapping[str, int]
    """Count of the last sign of life of each node whose side has closed the connection."""


class NodeObserver:
    """Observes nodes, and remembers when the sign of life of each changed last."""

    def __init__(self, lost_s: float, beat_s: float, poll_s: float) -> None:
        """`beat_s` is the time between two signs of life of a node, `poll_s` the same time while an
        attempt is ending."""
        self._lost_s, self._suspect_s = lost_s, SUSPECT_BEATS * poll_s
        self._closed_s = CLOSED_BEATS * poll_s
        self._beat_s = beat_s
        self._signs: Dict[str, Tuple[int, float]] = {}
        """The last counter in the signs of life of each node, and the time at which it changed."""
        self._closed: Dict[str, Tuple[int, float]] = {}
        """The counter in the last sign of life of each node that closed its connection, and the
        time at which the closing became known."""
        self._observed: Optional[float] = None

    def observe(self, state: ManagerState, sight: Sight, now: float) -> List[Input]:
        """Return inputs in the order in which the machine must take them."""
        self._excuse_gap(now)
        before = self._closed
        self._closed = {
            name: before[name] if before.get(name, (-1, now))[0] == count else (count, now)
            for name, count in sight.closed.items()
        }
        said: List[Input] = [Saved(sight.saved)] if sight.saved != state.whole else []
        present = {item.name: item for item in sight.presences.values()}
        known, living = {*state.nodes, *state.fenced}, frozenset(state.living)
        # Those that left no trace any more were there when an earlier manager looked.
        for name in state.nodes:
            self._signs.setdefault(name, (-1, now))
        hosts = {present[name].host for name in state.nodes if name in present}
        for name, item in present.items():
            count, _ = self._signs.get(name, (-1, now))
            if count != item.count:
                self._signs[name] = (item.count, now)
            elif self._is_silent(state, name, now):
                continue  # left by an agent of this session that is gone
            if name in known or item.state == GONE:
                continue
            if item.host in hosts:  # files have names of hosts: one of them would be lost
                said.append(
                    Lost(name, f"{item.host} already takes part, by another job of the run")
                )
            else:
                hosts.add(item.host)
                said.append(Joined((name,)))
        for name in state.nodes:
            said += self._find_changes(state, sight, name, present.get(name), now, living)
        if state.phase in (RUNNING, SAVING) and sight.stop is not None:
            reason = str(sight.stop.get("reason"))
            is_asked = sight.stop.get("kind") == "cancel"
            said.append(CalledToEnd(reason) if is_asked else RankFailed(reason, state.attempt))
        return _merge(said)

    def find_last_sign(self, node: str) -> Optional[float]:
        """Return when this node last gave a sign of life, by our clock."""
        return self._signs[node][1] if node in self._signs else None

    def _excuse_gap(self, now: float) -> None:
        """Excuse silence while this process itself stood still, such as on a hung file server."""
        gap = 0.0 if self._observed is None else now - self._observed
        self._observed = now
        if gap > self._beat_s:
            self._signs = {name: (count, at + gap) for name, (count, at) in self._signs.items()}
            self._closed = {name: (count, at + gap) for name, (count, at) in self._closed.items()}

    def _find_changes(
        self,
        state: ManagerState,
        sight: Sight,
        name: str,
        item: Optional[Presence],
        now: float,
        living: FrozenSet[str],
    ) -> List[Input]:
        seat = get_seat(name)
        if item is None and seat in sight.presences:
            host = sight.presences[seat].host
            return [Lost(name, f"the agent of {host} was replaced by another one")]
        host = item.host if item is not None else f"node {seat}"
        if item is not None and item.state == GONE:
            return [
                Lost(
                    name,
                    f"{host} has left: its job ends, or somebody ended its agent",
                    EndCause.NODE_LEFT,
                )
            ]
        silent_s = now - self._signs[name][1]
        if self._is_silent(state, name, now):
            return [Lost(name, f"{host} was lost: no sign of life for {silent_s:.1f} s")]
        said: List[Input] = []
        if seat in sight.refused and name in state.members:
            reason = f"{host} is not fit: {sight.refused[seat]}"
            said.append(Lost(name, reason, EndCause.PREFLIGHT))
        if seat in sight.leave:
            said.append(AskedToLeave(name, sight.leave[seat]))
        has_ended = item is not None and (item.state, item.attempt) == (ENDED, state.attempt)
        if item is not None and has_ended and name in living and state.phase in ATTEMPTING:
            said.append(RanksEnded((name,), state.attempt))
            # Else an agent says so itself, in a file that may come later than its presence.
            is_asked = sight.stop is not None or state.phase == STOPPING
            if item.code not in (0, NOT_READY) and not is_asked:
                reason = f"the agent of {host} ended with {item.code}"
                said.append(RankFailed(reason, state.attempt))
        return said

    def _is_silent(self, state: ManagerState, name: str, now: float) -> bool:
        count, since = self._signs[name]
        if state.phase != STOPPING:
            return now - since > self._lost_s
        last, closed_at = self._closed.get(name, (-1, now))
        has_hung_up = count <= last and now - closed_at > self._closed_s
        return has_hung_up or now - since > self._suspect_s


def _merge(said: List[Input]) -> List[Input]:
    """Merge nodes that joined one after the other, and those whose ranks ended, into one input."""
    found: List[Input] = []
    for _, alike in groupby(said, type):
        first, *rest = alike
        if isinstance(first, (Joined, RanksEnded)):
            nodes = [node for one in rest if isinstance(one, type(first)) for node in one.nodes]
            first, rest = replace(first, nodes=(*first.nodes, *nodes)), []
        found += [first, *rest]
    return found
