"""Watch thread of a node: signs of life, stops and signals, nodes that fell silent.

    node 0   is the hub: looks at the state folder, seldom while all the others are connected,
             and sends them at once what it finds there
    others   are members: send the hub signs of life, and obey its stops and signals
    files    beat/<index>.json and the state folder are for nodes without a connection, and for
             `vjob`; with a connection a beat is written twice a minute and when it has changed

A connection (link.py) that is refused or breaks changes only how often files are written and read.
In a split run no srun watches over all groups: node 0 watches the first node of each other group by
its connection or its beats, and these nodes watch each other by their beats. Each node measures
silence by its own monotonic clock; a beat's own time is never compared, since clocks differ.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

from varuna_core.agent.meeting.link import (
    BEATS_PER_SILENCE,
    Hub,
    Member,
    compute_silence_s,
    publish_place,
    raise_descriptor_limit,
    read_place,
)
from varuna_core.agent.setup.site import STOPPED
from varuna_core.hang.signs import write_cut
from varuna_core.records.exits import NODE_LOST, find_exited
from varuna_core.records.files import read_json, write_json
from varuna_core.records.plan import NodePlan, Plan
from varuna_core.records.record import CLOCK_SET, append_event
from varuna_core.records.requests import read_requests, read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

POLL_S = 0.25
NODES_PER_POLL_S = 200.0
"""Polls per second that all nodes of a large run make together, to spare the file server."""


MOST_POLL_S = 1.0

FILE_S = 30.0
"""Seconds between heartbeats that are written to a file while a connection carries heartbeats
too."""
LOOK_S, NODES_LOOK_S = 2.0, 15.0
"""Seconds between the hub's polls of the state folder while all nodes are connected, and that
time for one node, which is divided by the number of nodes."""
FULL_LOOK_S = 60.0
"""Seconds between listings of a folder whose modification time has not changed."""
CLOCK_STEP_S = 1.0
"""Least step in seconds that counts as a clock being set; NTP slews smaller offsets."""


class Peer:
    """Another group's first node and its signs of life, as observed by this node."""

    def __init__(self, node: NodePlan) -> None:
        self.node = node
        self._seen: tuple[Any, Any] | None = None
        self._changed = 0.0
        self._is_done = False
        self._was_linked = False

    def note_link(self, now: float) -> None:
        """Note a sign of life over the connection, which is newer than the file's present beat."""
        self._changed, self._was_linked = now, True

    def is_lost(self, beat: Any, now: float, lost_s: float) -> bool:
        """Return True if the node was silent for `lost_s`; `beat` is the content of its file."""
        self._note(beat, now)
        return self._seen is not None and not self._is_done and now - self._changed > lost_s

    def is_living(self, beat: Any, now: float, lost_s: float) -> bool:
        """Return True if the node has given a sign of life in the last `lost_s` and is not done."""
        self._note(beat, now)
        return self._seen is not None and not self._is_done and now - self._changed <= lost_s

    def _note(self, beat: Any, now: float) -> None:
        if isinstance(beat, dict):
            self._is_done = beat.get("state") == "done"
            mark = (beat.get("count"), beat.get("time"))
            if mark != self._seen:
                self._seen = mark
                self._changed = self._changed if self._was_linked else now
            self._was_linked = False


class FolderNews:
    """Detects from a folder's own times if the folder has changed and must be listed.

    Opening the folder makes an NFS client ask the server. Since times may have a resolution of a
    second or two, a changed folder is listed once more after `COARSE_S`.
    """

    COARSE_S = 2.0

    def __init__(self, path: Path, full_s: float = FULL_LOOK_S) -> None:
        """`full_s` is the time between listings of an unchanged folder."""
        self._path, self._full_s = path, full_s
        self._mark: tuple[int, ...] = ()
        self._changed = float("-inf")
        self._is_settled = True
        self._full_at = 0.0

    def look(self, now: float) -> bool:
        """Return True if the folder must be listed; raise OSError if it cannot be opened."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        mark = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        if mark != self._mark:
            self._mark, self._changed, self._is_settled = mark, now, False
        elif self._is_settled and now < self._full_at:
            return False
        else:
            self._is_settled = now - self._changed >= self.COARSE_S
        self._full_at = now + self._full_s
        return True


class AttemptWatch(threading.Thread):
    """Watch thread: writes beats, and sets `stop` to the content of stop.json and wakes the agent.

    A beat has the results of `describe`, a change of which is written at once, and those of
    `measure`, which change all the time.
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
        address: str | None = None,
        manager: Path | None = None,
    ) -> None:
        """`address` is that of node 0, for a connection; `manager` is the file in which the manager
        of a run that may morph publishes its address. Without both, only files are used."""
        super().__init__(name="watch", daemon=True)
        self.stop: dict[str, Any] | None = None
        self._plan, self._node, self._attempt = plan, node, attempt
        self._host, self._opened = host, opened
        self._describe, self._measure = describe, measure
        self._wake, self._forward = wake, forward
        self._heard: set[str] = set()
        """Keys of the signals that have been passed to the ranks."""
        self._signal: tuple[int, str] | None = None
        """The last signal that was passed to the ranks, with its key."""
        self._peers = list_peers(plan, node)
        timing = plan.timing
        self._silent_s = compute_silence_s(timing.lost_s)
        self._sign_s = self._silent_s / BEATS_PER_SILENCE
        self._poll_s = min(max(POLL_S, plan.num_nodes / NODES_PER_POLL_S), MOST_POLL_S)
        self._file_s = max(timing.beat_s, min(FILE_S, timing.lost_s / 3))
        self._look_s = max(LOOK_S, NODES_LOOK_S / plan.num_nodes)
        self._address, self._manager = address, manager
        self._hub: Hub | None = None
        self._member: Member | None = None
        self._callers: list[str] = []
        """Connections that wait for the hub to read the state folder."""
        self._missing = set(range(1, plan.num_nodes))
        """Nodes without a connection whose ranks have not ended."""
        self._is_cut_known, self._next_cut = True, 0.0
        """True if cut.json is up to date with `_missing`; the file is written now and then."""
        self._done: set[int] = set()
        """Nodes that left the hub because their ranks have ended."""
        self._is_linked = False
        self._news = FolderNews(attempt.master.parent)
        self._next_look = self._next_sign = self._next_beat = 0.0
        self._looked = time.monotonic()
        """The last time at which the state folder could be read."""
        self._is_asked = False
        self._count = 0
        self._told: dict[str, Any] = {}
        self._gone_since: float | None = None
        self._clock = read_clock_offset()
        self._ended = threading.Event()
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)

    def run(self) -> None:
        self._open_link()
        while not self._ended.is_set():
            now = time.monotonic()
            self._exchange(now)
            # What changed is told at once: a rank that just got its handler can be asked to save.
            if self._is_clock_set() or now >= self._next_beat or self._describe() != self._told:
                self._beat("running")
                self._next_beat = now + self._compute_every_s()
            with contextlib.suppress(OSError):  # a file server that does not answer is asked again
                self._look(now)
            self._answer(now)
            self._wait(min(self._poll_s, self._plan.timing.beat_s, self._sign_s))

    def end(self) -> None:
        """End the thread; the last beat says `done`, so that the silence after it is expected."""
        self._ended.set()
        self.look_now()
        if self.is_alive():
            self.join(5)
        self._beat("done")
        if not self.is_alive():
            self._close_link()

    def look_now(self) -> None:
        """Have the state folder read now, as it may have changed; callable from any thread."""
        self._is_asked = True
        with contextlib.suppress(OSError):
            os.write(self._ringer, b"\0")

    def _wait(self, seconds: float) -> None:
        link = self._hub or self._member
        select.select([self._bell, *([] if link is None else [link])], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._bell, 4096):
                pass

    # The connection.

    def _open_link(self) -> None:
        path, name = self._attempt.link, f"node-{self._node.index}"
        if self._manager is not None:
            path, name = self._manager, f"attempt-{self._attempt.number}-{self._node.index}"
        if self._manager is not None or (self._address is not None and self._node.index != 0):
            self._member = Member(lambda: read_place(path), name, self._silent_s, self._complain)
        elif self._address is not None:
            self._listen(self._address)

    def _listen(self, address: str) -> None:
        try:
            raise_descriptor_limit(self._plan.num_nodes)
            others = self._plan.num_nodes - 1
            self._hub = Hub(address, num_members=others, silent_s=self._silent_s)
            publish_place(self._attempt.link, self._hub.place)
        except OSError as error:
            self._complain(f"no hub at {address} ({error}): files are used instead")
            self._close_link()

    def _close_link(self) -> None:
        if self._member is not None:
            self._member.send({"state": "done"})
            self._member.close()
        if self._hub is not None:
            self._hub.close()
            with contextlib.suppress(OSError):  # nobody is to call there any more
                if read_place(self._attempt.link) == self._hub.place:
                    self._attempt.link.unlink()
        self._hub = self._member = None

    def _exchange(self, now: float) -> None:
        was_linked = self._is_linked
        if self._hub is not None:
            self._is_linked = self._serve(self._hub, now)
        elif self._member is not None:
            self._is_linked = self._follow(self._member, now)
        if was_linked and not self._is_linked:
            self._next_beat = self._next_look = now

    def _serve(self, hub: Hub, now: float) -> bool:
        """Serve as the hub: True while all nodes that have not ended are connected."""
        for name, line in hub.step(now):
            kind, _, index = name.partition("-")
            if line.get("look"):
                self._is_asked = True
                self._callers.append(name)
            if kind == "node" and line.get("state") == "done":
                self._done.add(int(index))
        for name in hub.take_changed():  # of thousands of nodes few come or go
            kind, _, index = name.partition("-")
            if kind == "node":
                if hub.has(name) or int(index) in self._done:
                    self._missing.discard(int(index))
                else:
                    self._missing.add(int(index))
                self._is_cut_known = False
        for peer in self._peers:
            if self._is_peer_linked(peer):
                peer.note_link(now)
        if not self._is_cut_known and now >= self._next_cut:
            self._is_cut_known, self._next_cut = True, now + self._look_s
            write_cut(self._attempt, self._missing)
        return not self._missing

    def _follow(self, member: Member, now: float) -> bool:
        """Follow the hub as a member; return True while the hub is connected, and so reads the
        run's files for this node."""
        for line in member.step(now):
            if line.get("topic") == "attempt":
                self._obey(line.get("value"))
        if not member.is_up:
            return False
        for peer in self._peers:
            if peer.node.index == 0:
                peer.note_link(now)
        if self._is_asked:
            self._is_asked = False
            member.send({"look": True})
        if now >= self._next_sign:
            self._next_sign = now + self._sign_s
            member.send({"sign": self._count})
        return member.is_up

    def _answer(self, now: float) -> None:
        """Send the members the stop and signal that were read in the state folder."""
        if self._hub is None:
            return
        asked = {"stop": self.stop, "signal": self._signal}
        self._hub.say("attempt", {"attempt": self._attempt.number, "opened": self._opened, **asked})
        if self.stop is not None:
            self._looked = now
        if now - self._looked <= self._look_s + self._silent_s:
            self._hub.beat(now)
        if not self._is_asked or self.stop is not None:
            callers, self._callers = self._callers, []
            for name in callers:
                self._hub.answer(name, {"looked": True})

    def _obey(self, value: Any) -> None:
        if not isinstance(value, dict) or value.get("attempt") != self._attempt.number:
            return
        asked, stop = value.get("signal"), value.get("stop")
        tries = [value.get("opened"), stop.get("opened") if isinstance(stop, dict) else None]
        if any(opened not in (None, self._opened) for opened in tries):
            return  # of another try of this attempt
        if isinstance(asked, list) and len(asked) == 2:
            self._pass_on((int(asked[0]), str(asked[1])))
        if self.stop is None and isinstance(stop, dict) and isinstance(stop.get("code"), int):
            self.stop = stop
            self._wake()

    # Files.

    def _compute_every_s(self) -> float:
        """Return the seconds between two heartbeats in this node's file."""
        return self._file_s if self._is_linked else self._plan.timing.beat_s

    def _look(self, now: float) -> None:
        if self.stop is not None or (self._member is not None and self._is_linked):
            return
        if now < self._next_look and not self._is_asked:
            return
        is_asked, self._is_asked = self._is_asked, False
        try:
            is_new = self._news.look(now)
        except FileNotFoundError:
            self._miss_folder(now)
            return
        except OSError:
            self._is_asked = is_asked
            raise
        self._next_look = now + (self._look_s if self._is_linked else 0.0)
        self._gone_since, self._looked = None, now
        if is_new or is_asked or not self._is_linked:
            self._read_state()
        if self.stop is None:
            for peer in self._peers:
                if not self._is_peer_linked(peer) and self._is_lost(peer, now):
                    self._say_lost(peer.node)
        if self.stop is not None:
            self._wake()

    def _read_state(self) -> None:
        asked, stop = read_requests(self._attempt, self._opened)
        if asked is not None:
            self._pass_on(asked)
        self.stop = self.stop or stop

    def _pass_on(self, asked: tuple[int, str]) -> None:
        self._signal = asked
        if asked[1] not in self._heard:
            self._heard.add(asked[1])
            self._forward(asked[0])

    def _is_peer_linked(self, peer: Peer) -> bool:
        return self._hub is not None and f"node-{peer.node.index}" in self._hub.names

    def _is_lost(self, peer: Peer, now: float) -> bool:
        beat = read_json(self._attempt.beat(peer.node.index))
        return peer.is_lost(beat, now, self._plan.timing.lost_s)

    def _miss_folder(self, now: float) -> None:
        """Stop the ranks once the run folder has been missing for too long, since nobody could stop
        them without it."""
        self._gone_since = now if self._gone_since is None else self._gone_since
        self._next_look = now
        if now - self._gone_since > self._plan.timing.lost_s:
            reason = f"the run folder was removed: {self._attempt.path} is gone"
            self.stop = {"kind": "cancel", "code": STOPPED, "reason": reason}
            self._complain(reason)
            self._wake()

    def _say_lost(self, node: NodePlan) -> None:
        # Its last beat may be on its way while its exits are there.
        if find_exited(self._attempt, self._plan, node.ranks) == set(node.ranks):
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
        facts = {**self._told, **self._measure(), "every_s": self._compute_every_s()}
        write_beat(self._attempt, self._node.index, self._host, self._count, state, facts)

    def _is_clock_set(self) -> bool:
        """Return True once after each jump of this node's clock; node 0 records the jump."""
        by = read_clock_offset() - self._clock
        if abs(by) < CLOCK_STEP_S:
            return False
        self._clock += by
        self._complain(f"the clock was set by {by:+.1f} s")
        if self._node.index == 0:
            with contextlib.suppress(OSError):
                path = RunFolder(self._attempt.path.parent).events()
                append_event(path, CLOCK_SET, attempt=self._attempt.number, by=round(by, 3))
        return True

    def _complain(self, text: str) -> None:
        with contextlib.suppress(OSError):  # srun may be gone, and with it our stderr
            print(f"{self._host}: {text}", file=sys.stderr, flush=True)


def read_clock_offset() -> float:
    """Return the time of day minus the time since boot, which only a step of the clock changes."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


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
        write_json(attempt.beat(index), value, lasts=False)


def list_peers(plan: Plan, node: NodePlan) -> list[Peer]:
    if plan.layout != "split":
        return []
    groups = [group for group in plan.groups if group.name != node.group.name]
    return [Peer(plan.node(group.first_node)) for group in groups]
