"""Managers and agents, the real ones, in a simulated cluster: its clock, its file system and its
scheduler draw what happens next from a seed.

Each actor is a thread that runs until it touches a file or waits; then the simulation goes on with
any of them. So a write lands any time after it was decided, and that of a killed process any time
after its death, or never; some land and say that they failed. A reader may see a file or a folder
as it was, but nothing older than what it has seen before. Jobs are requeued while their processes
live on, frozen or cut off, and wake later; killed managers are started again by their script.

What is held:
- an agent obeys nothing of an earlier epoch, or of an earlier session, after a later one;
- the agents that run an attempt are of one session, and each has a place of its own in its plan;
- no attempt does a step after a later one has begun to: in one session never, else only as long
  as none of its agents has seen that the run went on;
- nobody goes home, and no manager ends, because of what an earlier session writes, and no script
  requeues a job that another session has;
- at the end, when all that was late has landed, the last session trains on all of its nodes.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import TIMING, make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.facts.cause import End, EndCause
from varuna_core.morph import attempt as attempts
from varuna_core.morph import cli, headless, links, manager, node_daemon, orders
from varuna_core.records import morphing
from varuna_core.records.exits import Judgement, Outcome
from varuna_core.records.plan import MorphPlan
from varuna_core.records.runfolder import AttemptFolder, MorphFolder, RunFolder
from varuna_core.records.training import derive_facts

NODES = 3
LIMITS = MorphPlan(min_nodes=2, max_nodes=NODES, requeue=True, save_s=5, warm=False, return_s=4.0)
PLAN = make_plan(
    make_group("all", NODES, 1),
    timing=replace(TIMING, lost_s=6.0, join_s=30.0, grace_s=2.0),
    morph=True,
    morphing=LIMITS,
    restarts=10**6,
)
FACTS = derive_facts(replace(GPT, pipeline=NODES, checkpoint_folder=None))
ELSEWHERE = "the run went on in another job"
SEEDS = int(os.environ.get("VJOB_EPOCH_SEEDS", "100"))
DISTURBED_UNTIL = 150.0
CALM_S = 400.0
KINDS = ("taken over", "manager killed", "woke outdated", "late write landed", "given back")
"""What has to have happened in a fair part of the courses."""


class Killed(BaseException):
    """SIGKILL: no handler of the program sees it."""


class Disk:
    """Files with all their versions; who looks sees one that is no older than what it saw."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.versions: dict[str, list[str | None]] = {}
        self._log: list[tuple[str, str]] = []
        """Names as they came, with their folders."""
        self.is_fresh = False

    def put(self, path: Path, text: str) -> None:
        if str(path) not in self.versions:
            self._log.append((str(path.parent), path.name))
        self.versions.setdefault(str(path), [None]).append(text)

    def has(self, path: Path) -> bool:
        return str(path) in self.versions

    def get(self, path: Path, seen: dict[str, int]) -> Any:
        versions = self.versions.get(str(path), [None])
        index = self._look(f"file {path}", len(versions) - 1, seen)
        text = versions[index]
        return None if text is None else json.loads(text)

    def list(self, folder: Path, seen: dict[str, int]) -> list[str]:
        end = self._look(f"folder {folder}", len(self._log), seen)
        return [name for parent, name in self._log[:end] if parent == str(folder)]

    def refresh(self, path: Path, seen: dict[str, int]) -> None:
        """A client that has written a file is shown that, and what is in its folder."""
        seen[f"folder {path.parent}"] = len(self._log)
        seen[f"file {path}"] = len(self.versions[str(path)]) - 1

    def _look(self, what: str, newest: int, seen: dict[str, int]) -> int:
        is_stale = not self.is_fresh and self._draw.random() < 0.2
        at = self._draw.randint(seen.get(what, 0), newest) if is_stale else newest
        seen[what] = at
        return at


class Actor:
    """A process: a thread that has the word only while the simulation gives it."""

    def __init__(
        self,
        world: World,
        name: str,
        session: str,
        act: Callable[[], Any],
        seen: dict[str, int] | None = None,
    ) -> None:
        self.world, self.name, self.session = world, name, session
        self.seen = {} if seen is None else seen
        """What its host has seen of files and folders, by their versions."""
        self.sessions: set[str] = set()
        """Those whose orders it has seen."""
        self.obeyed = (-1, -1)
        self.wake_at = 0.0
        self.is_frozen = self.is_killed = self.is_over = False
        self.pending: Callable[[], Any] | None = None
        """The write that it is about to do."""
        self.result: Any = None
        self._act = act
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.is_killed:
                self.result = self._act()
        except Killed:
            self.result = "killed"
        except OSError as error:
            self.result = error
        except BaseException as error:
            self.result = error
            self.world.problems.append(f"{self.name}: {type(error).__name__}: {error}")
        self.is_over = True
        self._back.release()

    def resume(self) -> None:
        self.world.current = self
        self._go.release()
        self._back.acquire()

    def park(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        if self.is_over:
            return
        if self.pending is not None and self.world.draw.random() < 0.7:
            self.world.late.append(self.pending)
        self.is_killed = True
        self.resume()


@dataclass
class Child:
    """The agent of an attempt with its ranks, on one node."""

    world: World
    attempt: int
    session: str
    actor: Actor
    code: int | None = None
    is_told: bool = False
    stdin: None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.is_told = True

    def kill(self) -> None:
        self.code = -signal.SIGKILL

    def wait(self) -> None:
        pass


@dataclass
class World:
    draw: random.Random
    run: RunFolder
    now: float = 100.0
    current: Any = None
    restart: int = -1
    actors: list[Actor] = field(default_factory=list)
    late: list[Callable[[], Any]] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    """Steps by attempts."""
    given: dict[int, tuple[str, dict[int | None, str]]] = field(default_factory=dict)
    """Session and nodes by place, by attempts, as those who started them knew."""
    keys: int = 0
    is_calm: bool = False
    has_recovered: bool = False
    """The newest session has trained since nothing new happens."""
    requeue_at: float = math.inf
    tally: Counter[str] = field(default_factory=Counter)
    has_links: bool = False
    hubs: list[SimHub] = field(default_factory=list)
    """Managers that listen, the last one last."""

    def __post_init__(self) -> None:
        self.disk = Disk(self.draw)

    # What the programs call.

    def read(self, path: Path) -> Any:
        self.current.park()
        return self.disk.get(path, self.current.seen)

    def list_names(self, folder: Path) -> list[str]:
        self.current.park()
        return self.disk.list(folder, self.current.seen)

    def write(self, path: Path, value: Any, *_: Any, **__: Any) -> None:
        self._write(path, lambda: self.disk.put(path, json.dumps(value)))

    def write_first(self, path: Path, value: Any) -> bool:
        return bool(self._write(path, lambda: self._link(path, value)))

    def _link(self, path: Path, value: Any) -> bool:
        if self.disk.has(path):
            return False
        self.disk.put(path, json.dumps(value))
        return True

    def _write(self, path: Path, act: Callable[[], Any]) -> Any:
        actor = self.current
        actor.pending = act
        actor.park()
        actor.pending = None
        found = act()
        self.disk.refresh(path, actor.seen)
        if not self.is_calm and self.draw.random() < 0.01:
            raise OSError(5, "the answer was lost")
        return found

    def wait(self, seconds: float) -> None:
        actor = self.current
        actor.wake_at = self.now + seconds
        actor.park()

    def make_key(self) -> SimpleNamespace:
        self.keys += 1
        return SimpleNamespace(hex=f"k{self.keys}")

    # Processes.

    def spawn(
        self, name: str, session: str, act: Callable[[], Any], seen: dict[str, int] | None = None
    ) -> Actor:
        actor = Actor(self, name, session, act, seen)
        self.actors.append(actor)
        return actor

    def start_session(self) -> None:
        self.restart += 1
        session = f"7.{self.restart}"
        self.start_script(session)
        for seat in range(NODES - 1):
            self.start_node(seat, session)

    def start_script(self, session: str) -> None:
        self.spawn(f"script {session}", session, lambda: self.run_script(session))

    def run_script(self, session: str) -> None:
        """The batch script: starts a manager again that failed, then does what it is answered."""
        own = self.current
        while True:
            name = f"manager {session}"  # on the same host
            child = self.spawn(name, session, lambda: run_manager(session), own.seen)
            child.is_frozen = own.is_frozen
            while not child.is_over:
                self.wait(0.5)
            if child.result == 0:
                break
            self.wait(1.0)
        answer = cli.choose_answer(self.run.morph, session)
        if answer == "requeue":
            self.ask_to_requeue(session)
        elif session == self.newest:
            self.problems.append(f"the script of {session} ends the job: {answer}")

    def ask_to_requeue(self, session: str) -> None:
        if session == self.newest:
            self.requeue_at = min(self.requeue_at, self.now + 5.0)
        elif self._is_claimed_by(self.newest):
            self.problems.append(f"{self.current.name} requeues {self.newest}")

    def run_line(self, line: str) -> bool:
        """What nodes without a manager ask the scheduler."""
        if self.draw.random() < 0.2:
            return False
        session = self.current.session
        if line == "end" and session != self.newest:
            self.problems.append(f"{self.current.name} cancels {self.newest}")
        self.tally["given back"] += 1
        self.ask_to_requeue(session)
        return True

    @property
    def newest(self) -> str:
        return f"7.{self.restart}"

    def start_node(self, seat: int, session: str) -> None:
        name = f"node {seat} of {session or 'a guest'}"
        self.spawn(name, session, lambda: run_node(self, seat, session))

    def _is_claimed_by(self, session: str) -> bool:
        return any(
            versions[-1] is not None and json.loads(versions[-1])["session"] == session
            for path, versions in self.disk.versions.items()
            if path.endswith(".claim.json")
        )

    # Faults.

    def requeue(self) -> None:
        """Slurm ends the session's processes; those that it does not reach live on."""
        old, self.requeue_at = self.newest, math.inf
        self.tally["taken over"] += 1
        for actor in [one for one in self.actors if one.session == old and not one.is_over]:
            if self.draw.random() < 0.5:
                self.kill(actor)
            else:
                actor.is_frozen = self.draw.random() < 0.7
        self.start_session()

    def kill(self, actor: Actor) -> None:
        actor.kill()
        for child in self.children:
            if child.actor is actor and child.code is None:
                child.code = -signal.SIGKILL

    def disturb(self) -> None:
        kind = self.draw.choice(("kill manager", "freeze", "freeze", "requeue", "wake", "wake"))
        alive = [one for one in self.actors if not one.is_over]
        managers = [one for one in alive if one.name.startswith("manager")]
        if not alive:  # the job waits to be started again
            return
        if kind == "kill manager" and managers:
            self.kill(self.draw.choice(managers))
            self.tally["manager killed"] += 1
        elif kind == "freeze":
            self.draw.choice(alive).is_frozen = True
        elif kind == "requeue" and self.restart < 3:
            self.requeue()
        elif kind == "wake":
            actor = self.draw.choice(alive)
            if actor.is_frozen and actor.session not in ("", self.newest):
                self.tally["woke outdated"] += 1
            actor.is_frozen = False

    # The course of things.

    def step(self) -> None:
        """One actor goes on, a late write lands, or ranks do something."""
        chance = self.draw.random()
        if self.late and chance < 0.05:
            self.late.pop(self.draw.randrange(len(self.late)))()
            self.tally["late write landed"] += 1
            return
        if self.now >= self.requeue_at:
            self.requeue()
        if chance < 0.15:
            self._let_ranks_run()
        ready = [
            one
            for one in self.actors
            if not one.is_over and not one.is_frozen and one.wake_at <= self.now
        ]
        if ready:
            self.draw.choice(ready).resume()
            return
        waiting = [a.wake_at for a in self.actors if not a.is_over and not a.is_frozen]
        self.now = max(self.now + 0.05, min(waiting, default=self.now + 1.0))

    def _let_ranks_run(self) -> None:
        for child in self.children:
            stopped = self.disk.has(self.run.attempt(child.attempt).stop)
            if child.code is None and (child.is_told or stopped) and not child.actor.is_frozen:
                child.code = 143
        for number, (session, _) in self.given.items():
            plan = self.disk.versions[str(self.run.attempt(number).plan)][-1]
            members = [one for one in self.children if one.attempt == number]
            running = [one for one in members if one.code is None and not one.actor.is_frozen]
            if len(running) == int(plan or 0) and not any(one.is_told for one in running):
                self._do_step(number, session, running)

    def _do_step(self, number: int, session: str, running: Sequence[Child]) -> None:
        self.done[number] = self.done.get(number, 0) + 1
        if self.is_calm and session == self.newest:
            self.has_recovered = True
        for later in self.done:
            if later <= number:
                continue
            after = self.given[later][0]
            if after == session:
                self.problems.append(f"attempt {number} trains after {later} of its own session")
            elif any(self._has_seen(child.actor, after) for child in running):
                self.problems.append(f"attempt {number} of {session} trains beside {later}")

    def _has_seen(self, actor: Actor, session: str) -> bool:
        """Whether it has seen this session's orders, and has come to its next wait since."""
        return actor.wake_at > self.now and session in actor.sessions

    def check_start(self, told: orders.Orders, me: orders.Presence) -> None:
        place = told.find_place(me.name)
        session, nodes = self.given.setdefault(told.attempt, (told.session, {}))
        if (session, nodes.setdefault(place, me.name)) != (told.session, me.name):
            was = f"of {session}, with {nodes[place]} at {place}"
            self.problems.append(f"attempt {told.attempt} is {was}, not {me.name}")
        last, now = self.current.obeyed, (int(told.session.rpartition(".")[2]), told.epoch)
        if now < last:
            self.problems.append(f"{self.current.name} obeys {now} after {last}")
        self.current.obeyed = now

    def check_leave(self, why: str) -> None:
        actor = self.current
        if why == ELSEWHERE and actor.session == self.newest:
            self.problems.append(f"{actor.name} goes home: {why}")

    def calm_down(self) -> None:
        """Nothing new happens; all that was late comes, and the run trains."""
        self.is_calm = self.disk.is_fresh = True
        for act in self.late:
            act()
        self.late = []
        for actor in self.actors:
            actor.is_frozen = False
        end = self.now + CALM_S
        while not self.has_recovered and not self.problems:
            self.step()
            if self.now > end:
                self.problems.append(f"{self.newest} does not train")

    def end(self) -> None:
        for actor in self.actors:
            actor.kill()


WORLD: list[World] = []


def run_manager(session: str) -> int:
    run = WORLD[-1].run
    try:
        return manager.Manager(run, PLAN, FACTS, session).run()
    except morphing.Replaced:
        return 0


class CheckedNode(node_daemon.NodeDaemon):
    """Tells the simulation what it decided."""

    def _leave(self, reason: str) -> None:
        if not self._leaving:
            WORLD[-1].check_leave(reason)
        super()._leave(reason)


def run_node(world: World, seat: int, session: str) -> int:
    me = orders.Presence(
        seat=seat,
        key=world.make_key().hex,
        session=session,
        host=f"{world.current.name}",
        pid=1,
        count=0,
        state=orders.IDLE,
        attempt=-1,
        code=0,
    )
    node = CheckedNode(world.run, PLAN, me, None)
    code = node.run()
    if node.is_orphaned:
        lines = headless.build_lines("ask", "end")
        headless.give_back(world.run.morph, session, lines, node.rest, 5.0)
    return code


class SimHub:
    """The manager's end of connections that carry lines in their order, late, and may be cut."""

    def __init__(self) -> None:
        self.members: dict[str, SimMember] = {}
        self.inbox: list[tuple[str, dict[str, Any]]] = []
        self.hung_up: list[str] = []
        self._word: dict[str, Any] = {}
        self._count = 0
        WORLD[-1].hubs.append(self)

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def step(self, now: float) -> list[tuple[str, dict[str, Any]]]:
        number = WORLD[-1].draw.randint(0, len(self.inbox))
        taken, self.inbox = self.inbox[:number], self.inbox[number:]
        return taken

    def take_hung_up(self) -> list[str]:
        taken, self.hung_up = self.hung_up, []
        return taken

    def admit(self, name: str, member: SimMember) -> None:
        self.members[name] = member
        member.queue = [{"topic": topic, "value": value} for topic, value in self._word.items()]

    def say(self, topic: str, value: Any) -> None:
        if self._word.get(topic) != value:
            self._word[topic] = value
            self._send({"topic": topic, "value": value})

    def beat(self, now: float) -> None:
        self._count += 1
        self._send({"beat": self._count})

    def _send(self, line: dict[str, Any]) -> None:
        for member in self.members.values():
            member.queue.append(json.loads(json.dumps(line)))

    def has(self, name: str) -> bool:
        return name in self.members

    def answer(self, name: str, line: dict[str, Any]) -> None:
        if name in self.members:
            self.members[name].queue.append(json.loads(json.dumps(line)))

    def close(self) -> None:
        for member in list(self.members.values()):
            member.hang_up()
        WORLD[-1].hubs = [hub for hub in WORLD[-1].hubs if hub is not self]


class SimMember:
    def __init__(self, _: Any, name: str, silent_s: float, *__: Any) -> None:
        self._name, self._silent_s = name, silent_s
        self.hub: SimHub | None = None
        self.queue: list[dict[str, Any]] = []
        self._heard = 0.0

    @property
    def is_up(self) -> bool:
        return self.hub is not None

    def step(self, now: float) -> list[dict[str, Any]]:
        world = WORLD[-1]
        if self.hub is None:
            if world.hubs and world.draw.random() < 0.3:
                # The place that was published last, or one that is still seen.
                self.hub = world.hubs[-1] if world.is_calm else world.draw.choice(world.hubs)
                self._heard = now
                self.hub.admit(self._name, self)
            return []
        number = world.draw.randint(0, len(self.queue))
        taken, self.queue = self.queue[:number], self.queue[number:]
        self._heard = now if taken else self._heard
        is_cut = not world.is_calm and world.draw.random() < 0.01
        if is_cut or now - self._heard > self._silent_s:
            self.hang_up()
        world.tally["orders by connection"] += any("topic" in line for line in taken)
        return taken

    def send(self, line: dict[str, Any]) -> None:
        if self.hub is not None:
            self.hub.inbox.append((self._name, json.loads(json.dumps(line))))

    def hang_up(self) -> None:
        if self.hub is not None:
            self.hub.members.pop(self._name, None)
            self.hub.hung_up.append(self._name)
        self.hub, self.queue = None, []

    close = hang_up


class SimManagerLink(links.ManagerLink):
    fds = ()  # type: ignore[assignment]

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()
        self._hub = None

    def open(self) -> None:
        self._hub = SimHub() if WORLD[-1].has_links else None  # type: ignore[assignment]

    def is_complete(self, state: Any) -> bool:
        """Without the agents of attempts, which are no processes here."""
        here = {told.name for told in self._presences.values() if self._hub is not None}
        return bool(here) and here.issuperset(state.nodes)


class SimDaemonLink(links.DaemonLink):
    fds = ()  # type: ignore[assignment]


class SimCalm:
    def __init__(self, *_: Any) -> None:
        pass

    def must_look(self, *_: Any) -> bool:
        return WORLD[-1].draw.random() < 0.1


def call_last_hub(_: Any) -> bool:
    for hub in WORLD[-1].hubs[-1:]:
        hub.inbox.append(("caller-1", {"look": True}))
    return True


class QuietSignals:
    ending: str | None = None

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        WORLD[-1].wait(seconds)

    def take_forwarded(self) -> list[int]:
        return []


class NoCost:
    trained = -1
    is_old = True

    def __init__(self, *_: Any) -> None:
        pass

    def mark(self, *_: Any) -> None:
        pass

    def look(self, *_: Any) -> bool:
        return False


def follow_and_tell(told: Any, me: Any, *, knows_session: bool) -> Any:
    world = WORLD[-1]
    task = FOLLOW(told, me, knows_session=knows_session)
    if told is not None:
        world.current.sessions.add(told.session)
        if task.attempt is not None:
            world.check_start(told, me)
    return task


FOLLOW = node_daemon.follow


def start_child(words: Sequence[str], **_: Any) -> Child:
    world = WORLD[-1]
    number = int(words[words.index("--attempt") + 1])
    child = Child(world, number, world.given[number][0], world.current)
    world.children.append(child)
    return child


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The modules that touch files, clocks and processes, led to the simulation."""

    def now() -> float:
        return WORLD[-1].now

    clock = SimpleNamespace(time=now, monotonic=now, sleep=lambda s: WORLD[-1].wait(s))
    fakes: dict[str, Any] = {
        "read_json": lambda path: WORLD[-1].read(path),
        "list_names": lambda folder: WORLD[-1].list_names(folder),
        "is_listed": lambda path: path.name in WORLD[-1].list_names(path.parent),
        "write_json": lambda path, *rest, **more: WORLD[-1].write(path, *rest, **more),
        "write_first": lambda path, value: WORLD[-1].write_first(path, value),
        "write_atomic": lambda path, text, **_: WORLD[-1].write(path, text),
        "write_plan": lambda path, plan: WORLD[-1].write(path, plan.num_nodes),
        "write_outcome": lambda attempt, value: WORLD[-1].write(attempt.outcome, value.code),
        "write_judgement": lambda attempt, value: WORLD[-1].write(
            attempt.outcome, value.outcome.code
        ),
        "write_stop": lambda attempt, *_, **__: WORLD[-1].write_first(attempt.stop, 1),
        "write_signal": lambda attempt, *_: WORLD[-1].write(attempt.signal, 1),
        "read_stop": lambda attempt: None,
        "read_signal": lambda attempt: None,
        "read_requests": lambda attempt: (None, None),
        "ManagerLink": SimManagerLink,
        "DaemonLink": SimDaemonLink,
        "Member": SimMember,
        "Calm": SimCalm,
        "call_hub": call_last_hub,
        "read_outcome": lambda attempt: None,
        "read_plan": lambda path: None,
        "read_training": lambda path: GPT,
        "append_line": lambda *_: None,
        "append_event": lambda *_, **__: None,
        "judge": lambda scene: Judgement(
            End(EndCause.RANK_EXIT, code=1), Outcome(1, "it ended", None, None, None, [], 0.0)
        ),
        "Cost": NoCost,
        "Signals": QuietSignals,
        "time": clock,
        "open_attempt": lambda *_: None,
        "load_plan": lambda *_: PLAN,
        "start_agent": start_child,
        "follow": follow_and_tell,
        "run_line": lambda line: WORLD[-1].run_line(line),
        "uuid": SimpleNamespace(uuid4=lambda: WORLD[-1].make_key()),
    }
    for module in (morphing, orders, attempts, headless, links, manager, node_daemon):
        for name, fake in fakes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(manager.Manager, "_say", lambda *_: None)
    monkeypatch.setattr(node_daemon.NodeDaemon, "_say", lambda *_: None)
    monkeypatch.setattr(node_daemon, "POLL_S", 1.0)
    monkeypatch.setattr(manager, "HOME_S", 0.0)
    monkeypatch.setattr(AttemptFolder, "make", lambda *_: None)
    monkeypatch.setattr(
        RunFolder, "attempts", lambda run: [run.attempt(number) for number in WORLD[-1].given]
    )
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).morph.make()
    yield run
    WORLD.clear()


def play(run: Path, seed: int, *, has_links: bool = False) -> World:
    """One course of things."""
    world = World(random.Random(seed), RunFolder(run))
    world.has_links = has_links
    WORLD[:] = [world]
    try:
        world.start_session()
        world.start_node(NODES - 1, "")
        while world.now < DISTURBED_UNTIL and not world.problems:
            for _ in range(40):
                world.step()
            if world.draw.random() < 0.2:
                world.disturb()
        world.calm_down()
    finally:
        world.end()
    return world


def test_whatever_lands_late_the_newest_session_owns_the_run(simulated: Path) -> None:
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = play(simulated, seed)
        assert not world.problems, f"seed {seed}: {world.problems}"
        tally.update(world.tally)
    rare = {kind: tally[kind] for kind in KINDS if tally[kind] < SEEDS / 20}
    assert not rare, f"too rare to mean something: {rare}"


def test_connections_bring_nobody_back_to_an_earlier_manager(simulated: Path) -> None:
    """Nodes may be connected to a manager that was replaced and does not know it yet: they obey it
    as long as they have seen nothing later, and get away from it."""
    tally: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = play(simulated, seed, has_links=True)
        assert not world.problems, f"seed {seed}: {world.problems}"
        tally.update(world.tally)
    rare = {kind: tally[kind] for kind in ("taken over", "woke outdated", "orders by connection")}
    assert all(number > SEEDS / 20 for number in rare.values()), rare


def test_without_epochs_the_simulation_sees_healthy_nodes_go_home(
    simulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: all managers wrote the same two files, and looked whose they are."""

    def own(folder: MorphFolder, session: str) -> int:
        WORLD[-1].write_first(folder.claim(0), {"session": session})
        return 0

    def is_replaced(self: manager.Manager) -> bool:
        state = manager.read_state(self._run.morph)
        return state is not None and state.session != self._session

    monkeypatch.setattr(manager, "claim_epoch", own)
    monkeypatch.setattr(manager, "claim_attempt", lambda *_: True)
    monkeypatch.setattr(manager.Manager, "_is_replaced", is_replaced)
    monkeypatch.setattr(cli, "is_outdated", lambda *_: False)
    found = (problem for seed in range(SEEDS) for problem in play(simulated, seed).problems)
    assert any("goes home" in problem for problem in found)
