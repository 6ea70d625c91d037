"""Watch thread of a node: writes beats, reads stops and signals, finds nodes that fell silent.

Each node writes beat/<index>.json. In a split run no srun watches over all groups, so each agent
watches the beats of the other groups' first nodes by its own monotonic clock; a beat's own time is
never compared, for clocks differ.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any, Callable

from varuna_core.agent.setup.site import STOPPED
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.files import is_listed, read_json, write_json
from varuna_core.records.plan import NodePlan, Plan
from varuna_core.records.requests import read_signal, read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder

POLL_S = 0.25
NODES_PER_POLL_S = 200.0
"""On a large run all look less often, for the file server's sake."""


MOST_POLL_S = 1.0


class Peer:
    """The beats of another group's first node, as seen from here."""

    def __init__(self, node: NodePlan) -> None:
        self.node = node
        self._seen: tuple[Any, Any] | None = None
        self._changed = 0.0
        self._is_done = False

    def is_lost(self, beat: Any, now: float, lost_s: float) -> bool:
        """True if the silence since the last change is too long; `beat` is what the file says."""
        self._note(beat, now)
        return self._seen is not None and not self._is_done and now - self._changed > lost_s

    def is_living(self, beat: Any, now: float, lost_s: float) -> bool:
        """True if it beat before, did not say that it is done, and is not silent for too long."""
        self._note(beat, now)
        return self._seen is not None and not self._is_done and now - self._changed <= lost_s

    def _note(self, beat: Any, now: float) -> None:
        if isinstance(beat, dict):
            self._is_done = beat.get("state") == "done"
            mark = (beat.get("count"), beat.get("time"))
            if mark != self._seen:
                self._seen, self._changed = mark, now


class AttemptWatch(threading.Thread):
    """Sets `stop` to what stop.json says and wakes the agent.

    A beat says what `describe` tells, and comes at once where that has changed, and what `measure`
    tells, which changes all the time.
    """

    def __init__(
        self,
        plan: Plan,
        node: NodePlan,
        attempt: AttemptFolder,
        host: str,
        opened: float,
        describe: Callable[[], dict[str, Any]],
        measure: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
        forward: Callable[[int], None],
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.stop: dict[str, Any] | None = None
        self._plan, self._node, self._attempt = plan, node, attempt
        self._host, self._opened = host, opened
        self._describe, self._measure = describe, measure
        self._wake, self._forward = wake, forward
        self._heard: set[str] = set()
        """Keys of the signals that the ranks got."""
        self._peers = list_peers(plan, node)
        self._poll_s = min(max(POLL_S, plan.num_nodes / NODES_PER_POLL_S), MOST_POLL_S)
        self._count = 0
        self._told: dict[str, Any] = {}
        self._gone_since: float | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        next_beat = 0.0
        while not self._ended.is_set():
            now = time.monotonic()
            # What changed is told at once: a rank that just got its handler can be asked to save.
            if now >= next_beat or self._describe() != self._told:
                self._beat("running")
                next_beat = now + self._plan.timing.beat_s
            with contextlib.suppress(OSError):  # a file server that does not answer is asked again
                self._look(now)
            self._ended.wait(min(self._poll_s, self._plan.timing.beat_s))

    def end(self) -> None:
        """The last beat says that silence from now on is right."""
        self._ended.set()
        self.join(5)
        self._beat("done")

    def _look(self, now: float) -> None:
        if self.stop is not None:
            return
        self._miss_folder(now)
        asked = read_signal(self._attempt)
        if asked is not None and asked[1] not in self._heard:
            self._heard.add(asked[1])
            self._forward(asked[0])
        self.stop = self.stop or read_stop(self._attempt, self._opened)
        if self.stop is None:
            for peer in self._peers:
                path = self._attempt.beat(peer.node.index)
                if peer.is_lost(read_json(path), now, self._plan.timing.lost_s):
                    self._say_lost(peer.node)
        if self.stop is not None:
            self._wake()

    def _miss_folder(self, now: float) -> None:
        """End where the run folder was removed: nobody could tell the run to end any other way."""
        try:
            os.stat(self._attempt.path)
        except FileNotFoundError:
            self._gone_since = now if self._gone_since is None else self._gone_since
            if now - self._gone_since > self._plan.timing.lost_s:
                reason = f"the run folder was removed: {self._attempt.path} is gone"
                self.stop = {"kind": "cancel", "code": STOPPED, "reason": reason}
                print(f"{self._host}: {reason}", file=sys.stderr, flush=True)
        else:
            self._gone_since = None

    def _say_lost(self, node: NodePlan) -> None:
        # Its last beat may be on its way while its exits are there.
        if all(is_listed(self._attempt.exit(rank)) for rank in node.ranks):
            return
        where = f"node {node.index} of group {node.group.name}"
        silence = f"no sign of life for {self._plan.timing.lost_s:g} s"
        beat = read_json(self._attempt.beat(node.index))
        host = str(beat.get("host", where)) if isinstance(beat, dict) else where
        reason = f"{host} was lost: {silence} from {where}, says {self._host}"
        write_stop(self._attempt, "lost", NODE_LOST, reason, node=host)
        self.stop = read_stop(self._attempt, self._opened)

    def _beat(self, state: str) -> None:
        self._count += 1
        self._told = self._describe()
        facts = {**self._told, **self._measure()}
        write_beat(self._attempt, self._node.index, self._host, self._count, state, facts)


def write_beat(
    attempt: AttemptFolder, index: int, host: str, count: int, state: str, ranks: dict[str, Any]
) -> None:
    value = {
        "index": index,
        "host": host,
        "time": round(time.time(), 3),
        "count": count,
        **ranks,
        "state": state,
    }
    with contextlib.suppress(OSError):  # on a full disk the next beat may land
        write_json(attempt.beat(index), value)


def list_peers(plan: Plan, node: NodePlan) -> list[Peer]:
    if plan.layout != "split":
        return []
    groups = [group for group in plan.groups if group.name != node.group.name]
    return [Peer(plan.node(group.first_node)) for group in groups]
