"""The guard over a kernel, ranks and a clock that are made up: hours of a run in a second.

Nothing of varuna_core/hang and the guard's own thread is replaced but what reads the system: a
rank's count of steps, its answer, /proc, and time. Each simulated run makes some thousand steps
and draws its disturbances; a run with a hang ends with one.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from varuna_core.agent.processes import guard as guard_module
from varuna_core.agent.processes.guard import TICK_S, Guard, Progress
from varuna_core.agent.processes.proc import Stat
from varuna_core.facts.hang import Hang
from varuna_core.hang.signs import read_hang
from varuna_core.records.runfolder import AttemptFolder, RunFolder

HOURS = 3
SECONDS = {
    "compile": (30, 900),
    "evaluate": (30, 1500),
    "python": (30, 1500),
    "save": (10, 300),
    "data": (20, 90),
    "storage": (60, 60),
    "stopped": (5, 12),
    "debugger": (30, 3600),
    "terminal": (30, 3600),
    "child": (20, 900),
    "slow": (300, 900),
}
BY_ALL = ("compile", "evaluate", "python", "save", "data", "storage")
HANGS = {
    "sigstop": "stopped",
    "other": "mismatched",
    "sleep": "silent",
    "mute": "silent",
    "spin": "spinning",
}
BUSY = ("step", "compile", "evaluate", "python", "child", "spin")
HELD = ("debugger", "terminal")


@dataclass(frozen=True)
class Event:
    """A time in which no step is made, because of one rank or (-1) of all."""

    at: float
    seconds: float
    name: str
    rank: int


class World:
    """Ranks that step every `step_s` but for their events, as the system shows them at `now`."""

    def __init__(self, source: random.Random, ranks: int, events: list[Event]) -> None:
        self.source, self.ranks, self.events = source, ranks, events
        self.step_s = source.choice((0.3, 1.0, 5.0, 20.0))
        self.now = self.stepping_s = 0.0
        self.cpu, self.moved = [0.0] * ranks, [0] * ranks

    def move(self, seconds: float) -> None:
        for rank in range(self.ranks):
            activity = self.find_activity(rank)
            busy = activity in BUSY or (activity == "slow" and self.is_odd(rank))
            self.cpu[rank] += seconds * (0.9 if busy else 0.01)
            self.moved[rank] += int(seconds * (4e5 if activity == "save" else 300))
        event = self.find_event()
        if event is None or event.name == "slow":
            self.stepping_s += seconds / (1 if event is None else 3)
        self.now += seconds

    def find_event(self) -> Event | None:
        return next((x for x in self.events if x.at <= self.now < x.at + x.seconds), None)

    def is_odd(self, rank: int) -> bool:
        event = self.find_event()
        return event is not None and event.rank in (rank, -1)

    def find_activity(self, rank: int) -> str:
        event = self.find_event()
        return "step" if event is None else event.name if self.is_odd(rank) else "wait"

    @property
    def count(self) -> int:
        return int(self.stepping_s / self.step_s)

    # What the guard reads.

    def read_stat(self, pid: int) -> Stat:
        activity = self.find_activity(pid)
        state = {"debugger": "t", "terminal": "T", "stopped": "T", "sigstop": "T"}
        usual = "R" if activity in BUSY else "S"
        ticks = int(self.cpu[pid] * guard_module._TICKS_S)
        return Stat("python", state.get(activity, usual), 0, pid, ticks, 1)

    def read_main_thread(self, pid: int) -> float:
        return self.cpu[pid]

    def answer(self, rank: int) -> tuple[dict[str, Any], int]:
        activity, count = self.find_activity(rank), self.count
        if activity in ("stopped", "sigstop", "mute", *HELD):
            return {}, 0
        varying = activity in ("step", "compile", "evaluate")
        place = {"filename": f"{activity}.py", "name": activity,
                 "line": self.source.randrange(50) if varying else 7}  # fmt: skip
        called = ["all_reduce"] * min(count, 60)
        if activity == "wait":
            called.append("all_reduce")
        if activity == "other":
            called.append("barrier")
        if activity in ("wait", "other"):
            place["filename"] = "/torch/distributed/distributed_c10d.py"
        entries = [
            {"process_group": ["0", "default_pg"], "is_p2p": False,
             "collective_seq_id": number, "profiling_name": f"gloo:{name}"}
            for number, name in enumerate(called, max(count - 60, 0) + 1)
        ]  # fmt: skip
        frames = [place]
        if activity == "sleep":  # a data loader asks for its worker again and again
            name = "/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
            line = self.source.randrange(5)
            frames = [{"filename": name, "name": "_try_get_data", "line": line}, place]
        if varying:  # it calls one function or another
            frames.insert(0, {"filename": "model.py", "name": self.source.choice("abc"), "line": 1})
        frames[0]["spins"] = 7 if activity == "spin" else 0
        threads = [{"thread_name": "MainThread", "frames": frames}]
        return {"threads": threads, "flight": {"entries": entries}}, 4000


def run(seed: int, hang: str = "") -> tuple[Hang | None, float, list[Event]]:
    """Simulate a run: the hang that the guard names, seconds from its begin, and the events."""
    source = random.Random(seed)
    num_ranks = source.choice((2, 3, 4, 8))
    events = draw_events(source, num_ranks)
    if hang:
        last = events[-1]
        at = last.at + last.seconds + source.uniform(300, 900)
        events.append(Event(at, 1e9, hang, source.randrange(num_ranks)))
    world = World(source, num_ranks, events)
    until = HOURS * 3600.0 if not hang else events[-1].at + 600
    with tempfile.TemporaryDirectory() as text:
        attempt = RunFolder(Path(text)).attempt(0)
        attempt.make()
        watch(world, attempt, until)
        found = read_hang(attempt)
    return found, 0.0 if found is None else found.seen_at - events[-1].at, events


def draw_events(source: random.Random, num_ranks: int) -> list[Event]:
    events, at = [Event(0, source.uniform(20, 900), "compile", -1)], 0.0
    at = events[0].seconds
    while True:
        at += source.uniform(200, 1500)
        name = source.choice(list(SECONDS))
        seconds = source.uniform(*SECONDS[name])
        if at + seconds > HOURS * 3600 - 1800:
            return events
        rank = source.randrange(-1 if name in BY_ALL else 0, num_ranks)
        events.append(Event(at, seconds, name, rank))
        at += seconds


def watch(world: World, attempt: AttemptFolder, until: float) -> None:
    """Let the guard look at the world until it acts, or the time is over."""
    ranks = list(range(world.ranks))
    group = SimpleNamespace(count=1, ranks=world.ranks, inner_ranks=None)
    plan: Any = SimpleNamespace(scheduler="local", num_nodes=1, groups=[group], count_steps=True,
                                hang_after_s=None, morph=None, restarts=3,
                                hang_do="restart")  # fmt: skip
    node: Any = SimpleNamespace(index=0, ranks=ranks, group=group)
    run_folder = RunFolder(attempt.path.parent)
    one = Guard(run_folder, plan, node, attempt, "n0", lambda: {x: x for x in ranks},
                lambda words: None, lambda: None, lambda pids, deep: {},
                lambda rank: float("-inf"))  # fmt: skip
    module = "varuna_core.agent.processes.guard."
    fakes: dict[str, Any] = {
        "read_stat": world.read_stat,
        "list_stats": lambda: {pid: world.read_stat(pid) for pid in ranks},
        "list_below": lambda pids, stats: set(),
        "_read_bytes": lambda pid: world.moved[pid],
        "_read_main_thread": world.read_main_thread,
        "_read_channel": lambda pid: "",
        "_is_held_by_a_person": lambda pid: world.find_activity(pid) in HELD,
        "ANSWER_S": 0.0,
    }
    own: dict[str, Any] = {
        "_read_progress": lambda rank: Progress(world.count or None, world.count, world.step_s),
        "_ask": lambda rank: True,
        "_read_answer": world.answer,
    }
    patches = [mock.patch(module + name, new) for name, new in fakes.items()]
    patches += [mock.patch.object(one, name, new) for name, new in own.items()]
    for patch in patches:
        patch.start()
    try:
        while world.now < until and not one._is_done:
            held_up = 40.0 if world.source.random() < 0.001 else 0.0  # a busy node
            world.move(TICK_S + world.source.uniform(0, 1.5) + held_up)
            one.tick(world.now, world.now)
    finally:
        for patch in reversed(patches):
            patch.stop()


def simulate(num_runs: int, seed: int) -> list[str]:
    """Lines for the page."""
    counted: Counter[str] = Counter()
    wrong = []
    for number in range(seed, seed + num_runs):
        found, _, events = run(number)
        counted.update(event.name for event in events)
        if found is not None:
            wrong.append(f"{number}: {found.witness.value}")
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
    rows = [
        f"Simulated: {num_runs} runs of {HOURS} hours with {sum(counted.values())} disturbances",
        f"({kinds}); acted on: {len(wrong)}" + (f" ({'; '.join(wrong[:10])})" if wrong else "."),
        "The same with a hang at the end:",
    ]
    for hang, witness in HANGS.items():
        results = [run(number, hang) for number in range(seed, seed + max(num_runs // 10, 1))]
        right = [
            after
            for found, after, events in results
            if found is not None
            and (found.witness.value, found.rank) == (witness, events[-1].rank)
            and after > 0
        ]
        times = ""
        if right:
            times = (
                f"; median {statistics.median(right):.0f} s, worst {max(right):.0f} s to the action"
            )
        rows.append(f"- {hang}: {len(right)} of {len(results)} named right{times}")
    return rows
