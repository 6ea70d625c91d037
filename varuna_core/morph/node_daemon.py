"""Node daemon (`morph stay`): runs for as long as the node's job, through all attempts.

    presence ──► manager                 orders ──► RUN attempt N: open (on its first node), node
    each second, and at each change                  leave: end the ranks, go home

The agent of each attempt is a child process: it starts without old state, and dies with the daemon
as its ranks die with it. So the daemon needs no threads, and killing its process kills the node's
part of the run.

Standby (`morph standby`) is the agent of the next attempt, started while the present one trains,
with a process that imports what ranks need and later forks the ranks. A standby agent is used by
one attempt, or by none:

    daemon ── starts ──► standby: starts what forks ranks (agent/setup/forked_ranks.py)
           ── {"attempt": 3, "node": 1} ──► the agent of attempt 3, as if started for it
           ── the end of our input ──► goes
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from typing import Optional, Sequence

from varuna_core.agent.meeting.link import BEATS_PER_SILENCE, compute_silence_s
from varuna_core.agent.meeting.opening import open_attempt
from varuna_core.agent.node import run_node
from varuna_core.agent.processes.process import own_environment, start_agent
from varuna_core.agent.processes.signals import Signals
from varuna_core.agent.setup.forked_ranks import STANDBY, Origin
from varuna_core.agent.setup.ranks import Meeting, build_rank
from varuna_core.agent.setup.site import STOPPED, Refusal, compute_index, host_name, load_plan
from varuna_core.morph.headless import give_back, most_wait_s
from varuna_core.morph.links import FILE_S, DaemonLink
from varuna_core.morph.orders import (
    ENDED,
    GONE,
    IDLE,
    RUNNING,
    Newest,
    Orders,
    Presence,
    Task,
    follow,
    is_for_guest,
    read_orders,
    write_presence,
)
from varuna_core.records.exits import NOT_READY
from varuna_core.records.files import append_line
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder

GAP_S = 5.0
"""Least delay in seconds of a look that shows that this process itself stood still, and not that
others were silent."""


class ManagerLiveness:
    """Detects a lost manager by the age of its sign of life in the orders.

    Slurm may take the batch script's node out of a job and let the job go on (`--no-kill`), with
    nobody to own the run. Only time in which the orders could be read counts.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._beat: Optional[float] = None
        self._looked: Optional[float] = None
        self._silent_s = 0.0
        self._was_linked = False

    def is_lost(self, beat: Optional[float], now: float, *, is_linked: bool = False) -> bool:
        """Return True if the manager is lost. `beat` is its sign of life, None if not known. Right
        after a connection ended, the orders' file may be older than the manager's last message."""
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if beat is None or gap > GAP_S:
            return False
        is_new = beat != self._beat and (is_linked or not self._was_linked)
        self._silent_s = 0.0 if is_new else self._silent_s + gap
        self._beat, self._was_linked = beat, is_linked
        return self._silent_s > self.limit_s


def can_stand_by(plan: Plan) -> bool:
    """Return True if ranks of this plan may wait on standby: not in a container, which is prepared
    for each attempt, nor under a profiler."""
    asked = plan.morphing is not None and plan.morphing.warm
    return asked and not plan.containers and not plan.prefix


def run_standby_agent(run: RunFolder, number: int, index: int) -> int:
    """Hold a process ready that forks ranks for a node like `index` of attempt `number`; return the
    node's exit code."""
    plan = load_plan(run, number)
    node = plan.node(index)
    meeting = Meeting(
        run=run.path,
        attempt=number,
        trace=run.attempt(number).trace(0).parent,
        address="",
        port=0,
        interface=None,
        host=host_name(plan, index, os.environ, os.uname().nodename),
    )
    origin = None
    with contextlib.suppress(OSError):  # what is wrong the ranks themselves will say
        model = build_rank(plan, node, 0, meeting, own_environment(), None)
        origin = Origin(model, node.group.ranks, STANDBY)
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # whoever started us has no use for us any more
        if origin is not None:
            origin.end()
        return 0
    task = json.loads(line)
    plan = load_plan(run, task["attempt"])
    return run_node(run, plan, task["attempt"], task["node"], origin=origin)


POLL_S = 0.25
NODES_PER_POLL_S = 200.0
"""Polls per second that all nodes of a large run make together, to spare the file server."""
BEAT_S = 1.0
BEATS_PER_S = 50.0


def poll_s(plan: Plan) -> float:
    return max(POLL_S, plan.num_nodes / NODES_PER_POLL_S)


def beat_s(plan: Plan) -> float:
    """Return the seconds between two signs of life."""
    return max(BEAT_S, plan.num_nodes / BEATS_PER_S)


def linked_beat_s(plan: Plan) -> float:
    """Return the seconds between two signs of life over a connection: a fraction of the silence
    after which a connection counts as broken."""
    return min(beat_s(plan), compute_silence_s(plan.timing.lost_s) / BEATS_PER_SILENCE)


def run_node_daemon(
    run: RunFolder,
    plan: Plan,
    session: str,
    given_index: Optional[int],
    orphaned: Sequence[str] = (),
    tether: Optional[int] = None,
) -> int:
    """Run this node until its job ends; return 0 if the run ended, whatever became of its ranks.

    Without a session of its own the node is a guest (orders.py). `orphaned` are shell commands that
    give the job back to the scheduler if the manager is gone for good (headless.py). `tether` is an
    input by which a launcher over ssh shows that it lives.
    """
    seat = compute_index(plan, given_index, os.environ)
    host = host_name(plan, seat, os.environ, os.uname().nodename)
    run.morph.make()
    me = Presence(
        seat=seat,
        key=uuid.uuid4().hex,
        session=session,
        host=host,
        pid=os.getpid(),
        count=0,
        state=IDLE,
        attempt=-1,
        code=0,
    )
    node = NodeDaemon(run, plan, me, tether)
    code = node.run()
    if node.is_orphaned and orphaned:
        give_back(run.morph, session, orphaned, node.rest, most_wait_s(plan))
    return code


class NodeDaemon:
    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        me: Presence,
        tether: Optional[int] = None,
    ) -> None:
        self._run, self._plan, self._me = run, plan, me
        self._signals = Signals()
        if tether is not None:
            self._signals.hold(tether, plan.timing.lost_s)
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._is_guest = not me.session
        self.is_orphaned = False
        return_s = 0.0 if plan.morphing is None else plan.morphing.return_s
        self._manager = ManagerLiveness(plan.timing.lost_s + return_s)
        self._is_mute = False
        """True if this node could not write its sign of life; the manager may then have the same
        problem."""
        self._manager_beat = 0.0
        self._next: Optional[subprocess.Popen[bytes]] = None
        """The process of the next attempt's agent, which waits on standby with its ranks."""
        self._next_since = -1
        """The attempt during which a standby was last started; each attempt starts at most one."""
        self._knows_session = False
        self._newest = Newest()
        self._history = run.morph.history(me.seat, me.key)
        self._link = DaemonLink(run, plan, me, self._say)
        self._next_file = 0.0
        self._next_beat = 0.0
        self._begun = time.monotonic()
        self._leaving = ""
        self._kill_at = float("inf")

    def run(self) -> int:
        while True:
            self._reap()
            if self._leaving and self._child is None:
                self._say(f"leaving: {self._leaving}")
                self._change(state=GONE)
                self._link.close()
                return STOPPED if self._signals.ending else 0
            self._exchange()
            self._handle_signals()
            if not self._leaving:
                self._follow_orders()
            if self._child is not None and time.monotonic() >= self._kill_at:
                self._child.kill()
            if time.monotonic() >= self._next_beat:
                self._beat()
            self._signals.wait(poll_s(self._plan), self._link.fds)

    def _exchange(self) -> None:
        was_up = self._link.is_up
        self._link.step()
        if was_up and not self._link.is_up:  # the file is to say that we live
            self._next_beat = 0.0

    def _read_orders(self) -> Optional[Orders]:
        orders = self._link.orders if self._link.is_up else read_orders(self._run.morph)
        return self._newest.take(orders)

    def rest(self, seconds: float) -> bool:
        """Wait some seconds; return False if a signal asks this node to end."""
        until = time.monotonic() + seconds
        while self._signals.ending is None and time.monotonic() < until:
            self._signals.wait(until - time.monotonic())
        return self._signals.ending is None

    def _handle_signals(self) -> None:
        for number in self._signals.take_forwarded():
            if self._child is not None:
                self._child.send_signal(number)
        if self._signals.ending is not None:
            self._leave(self._signals.ending)

    def _follow_orders(self) -> None:
        orders = self._read_orders()
        if self._is_guest and orders is not None:
            self._follow_as_guest(orders)
        is_ours = orders is not None and orders.session == self._me.session
        self._knows_session = self._knows_session or is_ours
        waited = time.monotonic() - self._begun
        if (self._is_guest or not self._knows_session) and waited > self._plan.timing.join_s:
            self._leave(f"no message from the manager for {waited:.0f} s")
            return
        if self._is_guest and not is_ours:
            return
        if self._knows_session and not self._is_guest:
            is_mute = self._is_mute and not self._link.is_up
            beat = orders.beat if orders is not None and is_ours and not is_mute else None
            is_linked = self._link.is_up
            if self._manager.is_lost(beat, time.monotonic(), is_linked=is_linked):
                self.is_orphaned = True
                silent_s = self._manager.limit_s
                self._leave(
                    f"the manager gave no sign of life for {silent_s:g} s: the run has no manager"
                )
                return
        if orders is not None and orders.ending and is_ours:
            self._next_beat = 0.0
            if self._child is not None:  # one that somebody stopped could not end its ranks
                self._child.send_signal(signal.SIGCONT)
        task = follow(orders, self._me, knows_session=self._knows_session)
        if task.leave:
            self._leave(task.leave)
        elif task.attempt is not None and self._child is None:
            self._start(task)
        elif orders is not None and orders.trained and self._child is not None:
            self._prepare_next(orders)

    def _prepare_next(self, orders: Orders) -> None:
        """Start the agent that stands by for the next attempt, but only once the ranks train, since
        they need the whole node until then."""
        me, place = self._me, orders.find_place(self._me.name)
        is_member = orders.attempt == me.attempt and place is not None
        if not is_member or self._next_since == me.attempt or not can_stand_by(self._plan):
            return
        self._next_since = me.attempt
        node = str(place)
        options = ["--run", str(self._run.path), "--attempt", str(me.attempt), "--node", node]
        with contextlib.suppress(OSError):  # the next attempt starts without
            words = [str(self._run.agent), "morph", "standby", *options]
            self._next = start_agent(words, waits=True)

    def _follow_as_guest(self, orders: Orders) -> None:
        """Follow the orders of a manager whose session this node is not part of: note that the
        manager lives, and join its session with no ranks running once it invites this node."""
        if orders.beat != self._manager_beat:
            self._manager_beat, self._begun = orders.beat, time.monotonic()
        if not is_for_guest(orders, self._me):
            return
        if self._child is not None:
            self._end_ranks()
            return
        self._knows_session = True
        self._note("join", session=orders.session)
        key = uuid.uuid4().hex
        self._change(session=orders.session, key=key, attempt=-1, state=IDLE, code=0)

    def _start(self, task: Task) -> None:
        assert task.attempt is not None
        number = str(task.attempt)
        self._note("start", attempt=task.attempt)
        self._change(attempt=task.attempt, state=RUNNING, code=0)
        try:
            if task.node == 0:  # where rank 0 will be: its address and a port that is free here
                plan = load_plan(self._run, task.attempt)
                job = self._me.session.rpartition(".")[0]  # behind it is the restart
                open_attempt(self._run, plan, task.attempt, None, job or None)
        except Refusal as refusal:
            self._say(refusal.reason)
            self._change(state=ENDED, code=refusal.code)
            return
        self._child, self._next = self._call_next(task), None
        if self._child is not None:
            return
        options = ["--run", str(self._run.path), "--attempt", number, "--node", str(task.node)]
        try:
            self._child = start_agent([str(self._run.agent), "node", *options])
        except OSError as error:
            self._say(f"the agent does not start: {error}")
            self._change(state=ENDED, code=NOT_READY)

    def _call_next(self, task: Task) -> Optional[subprocess.Popen[bytes]]:
        """Return the standby agent after sending it its task; None if there is none."""
        agent = self._next
        if agent is None or agent.stdin is None or agent.poll() is not None:
            return None
        words = {"attempt": task.attempt, "node": task.node}
        with contextlib.suppress(OSError), agent.stdin as pipe:
            pipe.write(json.dumps(words).encode() + b"\n")
            pipe.flush()
            return agent
        return None

    def _reap(self) -> None:
        if self._child is None:
            return
        code = self._child.poll()
        if code is not None:
            self._child, self._kill_at = None, float("inf")
            state = GONE if self._leaving else ENDED
            self._note("end", attempt=self._me.attempt, code=code)
            self._change(state=state, code=128 - code if code < 0 else code)

    def _leave(self, reason: str) -> None:
        if self._leaving:
            return
        self._leaving = reason
        self._note("leave", reason=reason)
        if self._next is not None:
            self._next.kill()  # and so its ranks
            self._next.wait()
        self._end_ranks()

    def _end_ranks(self) -> None:
        if self._child is not None and self._kill_at == float("inf"):
            self._child.send_signal(signal.SIGTERM)
            self._child.send_signal(signal.SIGCONT)
            timing = self._plan.timing
            self._kill_at = time.monotonic() + timing.grace_s + timing.lost_s

    def _change(self, **changes: object) -> None:
        self._me = replace(self._me, **changes)  # type: ignore[arg-type]
        self._next_file = 0.0
        self._beat()

    def _beat(self) -> None:
        self._me = replace(self._me, count=self._me.count + 1)
        every_s = linked_beat_s(self._plan) if self._link.is_up else beat_s(self._plan)
        self._next_beat = time.monotonic() + every_s
        self._link.tell(self._me)
        if self._link.is_up and time.monotonic() < self._next_file:
            return
        try:
            write_presence(self._run.morph, self._me)
            self._next_file = time.monotonic() + FILE_S
            self._is_mute = False
        except OSError:  # on a full disk the next one may land
            self._is_mute = True

    def _note(self, what: str, **facts: object) -> None:
        """Append an event, such as the start of an attempt, to this node's history, which
        benchmarks/chaos checks."""
        own = {"what": what, "epoch": self._newest.epoch, "session": self._me.session}
        with contextlib.suppress(OSError):
            append_line(self._history, {"time": round(time.time(), 3), **own, **facts})

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{self._me.host}: {text}", file=sys.stderr, flush=True)
