"""A simulated cluster: a real hub, and the nodes' ends of its connections.

    fixed run       the hub is the watch thread of node 0's agent (AttemptWatch)
    run that morphs the hub is the manager (Manager.run)
    nodes           real connections (Member, DaemonLink) in two processes; no agents and no ranks

Times are by the clock, as a person waits; processor seconds are the hub's own.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import random
from typing import Any

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.agent.meeting.link import (
    BEATS_PER_SILENCE,
    SPARE_DESCRIPTORS,
    Member,
    call_hub,
    compute_silence_s,
    read_place,
)
from varuna_core.agent.meeting.watch import AttemptWatch
from varuna_core.hang.signs import read_cut
from varuna_core.morph.cost import OLD_S
from varuna_core.morph.links import DaemonLink, name_agent
from varuna_core.morph.manager import Manager
from varuna_core.morph.node_daemon import linked_beat_s
from varuna_core.morph.orders import IDLE, RUNNING, Presence, follow
from varuna_core.records.morphing import ManagerState, read_state
from varuna_core.records.plan import MorphPlan, Plan, Timing, read_plan, write_plan
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts
from vjob.jobs.submit.build_plan import NODES_PER_BEAT_S

Points = dict[str, float]
RANKS = 8
PROCESSES = 4
SESSION = "7.0"
SWEEP_S = 0.25
"""Seconds between turns of all connections, for what no message wakes."""
DEADLINE_S = 500.0
WINDOW_S = 20.0
MOST_LOST_S = 100.0
"""A silence that is waited for here."""


def make_run(folder: Path, nodes: int, lost_s: float, *, morphs: bool) -> RunFolder:
    run = RunFolder(folder / "run")
    run.path.mkdir(mode=0o700)
    timing = Timing(
        grace_s=2, join_s=600, prepare_s=5, beat_s=lost_s / 3, lost_s=lost_s, sample_s=10
    )
    plan = make_plan(make_group("all", nodes, RANKS), timing=timing, address="127.0.0.1")
    if morphs:
        limits = MorphPlan(min_nodes=1, max_nodes=nodes, requeue=False, save_s=60)
        plan = replace(plan, morph=True, morphing=limits, pipeline=8, data=nodes)
        run.morph.make()
    run.attempt(0).make()
    write_plan(run.plan, plan)
    return run


def load(run: RunFolder) -> Plan:
    plan = read_plan(run.plan)
    assert plan is not None
    return plan


# Hubs, each in a process of its own.


def run_watch(run: RunFolder, pipe: Connection) -> None:
    """Node 0's watch of a fixed run, until `pipe` says anything."""
    plan = load(run)
    watch = AttemptWatch(
        plan, plan.node(0), run.attempt(0), "n0", 1.0,
        describe=dict, measure=dict, wake=lambda: None, forward=lambda number: None,
        address="127.0.0.1",
    )  # fmt: skip
    watch.start()
    pipe.recv()
    os._exit(0)


def run_manager(run: RunFolder, pipe: Connection) -> None:
    facts = TrainingFacts("script", None, None, "1f1b", None, None)
    Manager(run, load(run), facts, SESSION).run()


# Nodes, some thousands in a process.


@dataclass
class Node:
    """One node's end of a connection, and what it saw."""

    index: int
    step: Callable[[float], bool]
    """Do what is due; return True once the node has the word that is waited for."""
    fd: int
    close: Callable[[], None]
    is_frozen: bool = False
    has_word: bool = False


def make_member(run: RunFolder, plan: Plan, index: int) -> Node:
    """A member of a fixed run; the first word is that of the attempt, the second a stop."""
    silent_s = compute_silence_s(plan.timing.lost_s)
    member = Member(lambda: read_place(run.attempt(0).link), f"node-{index}", silent_s)
    due, every_s = [0.0], silent_s / BEATS_PER_SILENCE

    def step(now: float) -> bool:
        said = [line["value"] for line in member.step(now) if line.get("topic") == "attempt"]
        if member.is_up and now >= due[0]:
            due[0] = now + every_s * (random() if not due[0] else 1)
            member.send({"sign": 1})
        return bool(said)

    return Node(index, step, member.fileno(), member.close)


def make_daemon(run: RunFolder, plan: Plan, index: int) -> Node:
    """A daemon, and the connection of its agent once an attempt began, which is the first word."""
    me = [Presence(index, "0" * 32, SESSION, f"n{index:05d}", 1, 0, IDLE, -1, 0)]
    link, due = DaemonLink(run, plan, me[0], lambda text: None), [0.0]
    agents: list[Member] = []
    lost_s = plan.timing.lost_s

    def step(now: float) -> bool:
        link.step()
        for agent in agents:
            agent.step(now)
        orders, starts = link.orders, False
        if orders is None:
            return False
        if orders.attempt > me[0].attempt:
            task = follow(orders, me[0], knows_session=True)
            if task.attempt is not None:
                starts, due[0] = True, 0.0
                name = name_agent(task.attempt, task.node)
                agents.append(Member(lambda: read_place(run.morph.link), name, lost_s))
                me[0] = replace(me[0], attempt=task.attempt, state=RUNNING)
        if now >= due[0]:
            due[0] = now + linked_beat_s(plan) * (random() if not due[0] else 1)
            me[0] = replace(me[0], count=me[0].count + 1)
            link.tell(me[0])
            for agent in agents:
                agent.send({"sign": 1})
        return starts

    def close() -> None:
        link.close()
        for agent in agents:
            agent.close()

    return Node(index, step, link.fds[0], close)


def play_nodes(run: RunFolder, indices: range, morphs: bool, pipe: Connection) -> None:
    """Drive these nodes; tell the time at which all have the next word, each time they do."""
    plan, make = load(run), make_daemon if morphs else make_member
    nodes = {(node := make(run, plan, index)).fd: node for index in indices}
    poll = select.epoll()
    for fd in nodes:
        poll.register(fd, select.EPOLLIN)
    waits, swept = set(nodes), 0.0

    def turn(node: Node, now: float) -> None:
        if not node.is_frozen and node.step(now):
            waits.discard(node.fd)

    while True:
        for fd, _ in poll.poll(SWEEP_S):
            turn(nodes[fd], time.monotonic())
        if (now := time.monotonic()) >= swept + SWEEP_S:
            for node in nodes.values():
                turn(node, now)
            swept = time.monotonic()
        if not waits:
            pipe.send(time.monotonic())
            waits = {fd for fd, node in nodes.items() if not node.is_frozen}
        while pipe.poll():
            what, index = pipe.recv()
            node = next(one for one in nodes.values() if one.index == index)
            node.is_frozen = True
            poll.unregister(node.fd)
            waits.discard(node.fd)
            if what == "close":
                node.close()
                del nodes[node.fd]


class Cluster:
    """A hub and its nodes."""

    def __init__(self, folder: Path, nodes: int, *, morphs: bool) -> None:
        self.lost_s = max(90.0, 3 * nodes / NODES_PER_BEAT_S)
        self.sign_s = compute_silence_s(self.lost_s) / BEATS_PER_SILENCE
        self.run = make_run(folder, nodes, self.lost_s, morphs=morphs)
        context = multiprocessing.get_context("fork")
        self._hub_pipe, other = context.Pipe()
        role = run_manager if morphs else run_watch
        self.hub = context.Process(target=role, args=(self.run, other), daemon=True)
        self.began = time.monotonic()
        self.hub.start()
        self.parts = []
        first = 0 if morphs else 1
        share = -(-(nodes - first) // PROCESSES)
        for at in range(first, nodes, share):
            mine, other = context.Pipe()
            indices = range(at, min(at + share, nodes))
            words = (self.run, indices, morphs, other)
            process = context.Process(target=play_nodes, args=words, daemon=True)
            process.start()
            self.parts.append((indices, mine, process))

    def wait_for_word(self) -> float:
        """Return when the last node had the next word."""
        return max(self._receive(pipe) for _, pipe, _ in self.parts)

    def _receive(self, pipe: Connection) -> float:
        until = time.monotonic() + DEADLINE_S
        while not pipe.poll(1.0):
            assert self.hub.is_alive(), "the hub has ended"
            assert time.monotonic() < until, "nodes waited in vain for a word"
        return float(pipe.recv())

    def order(self, what: str, index: int) -> float:
        next(pipe for indices, pipe, _ in self.parts if index in indices).send((what, index))
        return time.monotonic()

    def read_processor_s(self) -> float:
        words = Path(f"/proc/{self.hub.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def measure_share(self) -> float:
        """Return the hub's share of a processor, in percent."""
        began, used = time.monotonic(), self.read_processor_s()
        time.sleep(WINDOW_S)
        return 100 * (self.read_processor_s() - used) / (time.monotonic() - began)

    def read_peak_mb(self) -> float:
        text = Path(f"/proc/{self.hub.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    def read_state(self) -> ManagerState:
        state = read_state(self.run.morph)
        assert state is not None
        return state

    def close(self) -> None:
        for process in (self.hub, *(process for _, _, process in self.parts)):
            process.kill()
            process.join()


def wait_until(condition: Callable[[], Any]) -> float:
    """Return the time at which it held."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + DEADLINE_S, "waited in vain"
        time.sleep(0.05)
    return time.monotonic()


@contextlib.contextmanager
def opened(nodes: int, *, morphs: bool) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(Path(name), nodes, morphs=morphs)
        try:
            yield cluster
        finally:
            cluster.close()


def measure_fixed(nodes: int) -> Points:
    points: Points = {}
    with opened(nodes, morphs=False) as cluster:
        state = cluster.run.attempt(0)
        points["all have the first word, s"] = cluster.wait_for_word() - cluster.began
        points["until then, processor s"] = cluster.read_processor_s()
        points["messages a second while ranks train"] = nodes / cluster.sign_s
        points["of a processor for that, %"] = cluster.measure_share()
        said = cluster.order("close", nodes - 1)
        points["a closed connection is noticed, s"] = (
            wait_until(lambda: nodes - 1 in read_cut(state)) - said
        )
        if cluster.lost_s <= MOST_LOST_S:
            said = cluster.order("freeze", nodes - 2)
            points["a silent one is noticed, s"] = (
                wait_until(lambda: nodes - 2 in read_cut(state)) - said
            )
        else:
            points["a silent one is noticed, s"] = math.nan
        began, used = time.monotonic(), cluster.read_processor_s()
        write_stop(state, "cancel", 1, "the end")
        call_hub(state.link)
        points["all have a stop, s"] = cluster.wait_for_word() - began
        points["for that, processor s"] = cluster.read_processor_s() - used
        points["peak MB"] = cluster.read_peak_mb()
    return points


def measure_morphing(nodes: int) -> Points:
    points: Points = {}
    with opened(nodes, morphs=True) as cluster:
        points["all have the order to start, s"] = cluster.wait_for_word() - cluster.began
        points["until then, processor s"] = cluster.read_processor_s()
        time.sleep(OLD_S)  # until the manager no longer waits for a first step, which none does
        points["messages a second while ranks train"] = 2 * nodes / cluster.sign_s
        points["of a processor for that, %"] = cluster.measure_share()
        points["a silent node is noticed, s"] = math.nan
        if cluster.lost_s <= MOST_LOST_S:
            said = cluster.order("freeze", nodes - 1)
            points["a silent node is noticed, s"] = (
                wait_until(lambda: len(cluster.read_state().nodes) < nodes) - said
            )
        points["peak MB"] = cluster.read_peak_mb()
    return points


def find_most_nodes() -> int:
    """Return for how many nodes of a run that morphs the open files suffice."""
    return (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_DESCRIPTORS - 64) // 2


def measure_cluster(sizes: Sequence[int]) -> list[str]:
    """Return the lines of two tables."""
    lines = []
    for title, measure, most in (
        ("A fixed run; the hub is the agent of node 0", measure_fixed, sizes[-1]),
        ("A run that may morph; the hub is the manager", measure_morphing, find_most_nodes()),
    ):
        counts = sorted({min(nodes, most) for nodes in sizes})
        found = []
        for nodes in counts:
            found.append(measure(nodes))
            print(f"{title}, {nodes:,} nodes: {found[-1]}", file=sys.stderr)
        lines += [f"| {title} | {' | '.join(f'{nodes:,} nodes' for nodes in counts)} |"]
        lines += [f"|{'---|' * (len(counts) + 1)}"]
        for what in found[0]:
            cells = [
                "not measured" if math.isnan(one[what]) else f"{one[what]:.3g}" for one in found
            ]
            lines.append(f"| {what} | {' | '.join(cells)} |")
        lines.append("")
    return lines
