"""The guard's looks at a rank that says where it is, and at one whose Python does not run."""

import os
import queue
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from varuna_core.agent.processes import guard
from varuna_core.agent.processes.guard import (
    ABSENT_S,
    MUTE_S,
    START_EVERY_S,
    TICK_S,
    BeatTrack,
    Guard,
    Progress,
    parse_down,
)
from varuna_core.agent.processes.proc import read_stat
from varuna_core.facts.hang import Hang, HangAction, HangWitness
from varuna_core.hang.judge import Finding
from varuna_core.hang.signs import read_hang, read_signs
from varuna_core.records.files import read_json, write_json
from varuna_core.records.logs.step_counts import StepFile, Tally
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import RunFolder

GROUP = SimpleNamespace(count=1, ranks=1, inner_ranks=None)
PLAN = SimpleNamespace(num_nodes=1, groups=[GROUP], count_steps=True, scheduler="local",
                       hang_after_s=None, morph=None, restarts=0, hang_do="report")  # fmt: skip
FRAME = {"filename": "/torch/distributed/c10d.py", "name": "all_reduce", "line": 3}


class Watched:
    """The guard of one rank, this very process, that made ten steps and then none."""

    def __init__(self, folder, monkeypatch, steps=10):
        run = RunFolder(folder)
        self.attempt = run.attempt(0)
        self.attempt.make()
        self.gathered = queue.Queue()
        self.says, self.frames, self.printed_at = True, [FRAME], float("-inf")
        node = SimpleNamespace(index=0, ranks=[0], group=GROUP)
        self.guard = Guard(run, PLAN, node, self.attempt, "n0", lambda: {0: os.getpid()}, print,
                           lambda: None, self.gather, lambda rank: self.printed_at)  # fmt: skip
        self.token, self.moved, self.main_s, self.others_s = 0, 0, 0.0, 0.0
        self.stepped_at = None
        monkeypatch.setattr(self.guard, "_read_progress", self.read_progress)
        monkeypatch.setattr(self.guard, "_ask", self.ask)
        monkeypatch.setattr(guard, "ANSWER_S", 0.0)
        # This process reads and computes for the guard.
        monkeypatch.setattr(guard, "_read_bytes", lambda pid: self.moved * (pid == os.getpid()))
        monkeypatch.setattr(guard, "read_received", lambda port: {})
        monkeypatch.setattr(guard, "_read_main_thread", lambda pid: self.main_s)
        self.now = 0.0
        for self.token in range(1, steps + 1):
            self.tick()

    def read_progress(self, rank):
        return Progress(self.token, self.token, last_at=self.stepped_at)

    def ask(self, rank):
        if self.says:
            threads = [{"thread_name": "MainThread", "frames": self.frames}]
            write_json(self.attempt.where(rank), {"threads": threads, "flight": None})
        return True

    def gather(self, ranks, deep):
        self.gathered.put((dict(ranks), deep))
        return {}

    def tick(self):
        self.now += TICK_S
        self.guard.tick(self.now, 1000 + self.now)

    def look(self):
        """The signs of the rank at the next tick at which it is looked at."""
        self.tick()
        nodes = read_signs(self.attempt, 1)
        return nodes[0].ranks[0] if nodes else self.look()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def test_each_look_asks_again_and_a_rank_that_answers_is_not_mute(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    for _ in range(6):
        seen = watched.look()
        assert (seen.in_collective, seen.is_mute) == (True, False)
        assert seen.place == "all_reduce (c10d.py:3)"
    assert watched.gathered.get(timeout=60) == ({0: os.getpid()}, False)
    assert watched.gathered.empty()  # once in a silence
    watched.token += 1
    watched.tick()
    assert read_signs(watched.attempt, 1) == {}
    watched.look(), watched.look()
    assert watched.gathered.get(timeout=60)


def test_a_rank_that_stops_answering_is_mute_and_its_last_place_is_not_told(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    assert watched.look().place
    watched.says = False
    seen = [watched.look() for _ in range(int(MUTE_S / TICK_S))]
    assert not any(one.place for one in seen)
    assert [one.is_mute for one in seen] == [False, False, True]
    watched.says = True
    assert not watched.look().is_mute


def test_an_answer_that_comes_late_is_not_read_but_shows_that_python_runs(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    watched.look()
    watched.says = False
    for _ in range(5):
        write_json(watched.attempt.where(0), {"threads": []})
        assert not watched.look().is_mute


def test_a_library_that_asks_again_and_again_is_no_movement(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    own = {"filename": "/home/me/train.py", "name": "main", "line": 7}
    seen = []
    for line in range(6):
        library = {"filename": "/v/lib/python3.11/queue.py", "name": "get", "line": line}
        watched.frames = [library, own]
        seen.append(watched.look())
    assert {one.place for one in seen} == {"main (train.py:7)"}
    assert seen[-1].still_s == 5 * TICK_S
    watched.frames = [{**own, "line": 8}]
    assert watched.look().still_s == 0


@pytest.mark.parametrize(("own_s", "late_s"), [(None, 0.0), (4.5, 4.5), (-60.0, 0.0)])
def test_a_hang_begins_with_the_last_step_not_with_the_look_that_found_it(
    own_s, late_s, tmp_path, monkeypatch
):
    """The look is up to five seconds late; a clock that was set back since tells nothing."""
    watched = Watched(tmp_path, monkeypatch)
    watched.stepped_at = None if own_s is None else 1000 + watched.now + TICK_S - own_s
    watched.token += 1
    watched.tick()
    seen_at = 1000 + watched.now
    while not watched.attempt.hanging.exists():
        watched.tick()
    assert read_json(watched.attempt.hanging)["since"] == seen_at - late_s


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_suspicion_stays_if_somebody_ends_the_attempt(is_stopped, tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    hang = Hang(HangWitness.SILENT, 10.0, 40.0, rank=0, acts_at=100.0)
    watched.guard._act(Finding(hang, is_due=False, due_at=100.0))
    assert read_json(watched.attempt.hanging)["rank"] == 0
    if is_stopped:
        write_stop(watched.attempt, "signal", 143, "SIGTERM from outside")
    watched.guard.end()
    assert watched.attempt.hanging.exists() == is_stopped


def test_a_process_below_a_rank_is_stopped_for_longer_with_each_look(tmp_path, monkeypatch):
    """A data loader's worker, say; the rank itself only waits for it."""
    watched = Watched(tmp_path, monkeypatch)
    with subprocess.Popen(["sleep", "600"]) as worker:
        try:
            assert watched.look().below == 0
            worker.send_signal(signal.SIGSTOP)
            while read_stat(worker.pid).state != "T":
                pass
            seen = [watched.look() for _ in range(4)]
            worker.send_signal(signal.SIGCONT)
            while read_stat(worker.pid).state == "T":
                pass
            after = watched.look()
        finally:
            worker.kill()
    assert [(one.below, one.state) for one in seen] == [(worker.pid, "T")] * 4
    first = seen[0].halted_s
    assert [one.halted_s for one in seen[1:]] == [TICK_S, 2 * TICK_S, 3 * TICK_S], first
    assert (after.below, after.halted_s) == (0, 0.0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param(
            0, (False, START_EVERY_S), id="it still starts, and is looked at each ten seconds"
        ),
        pytest.param(1, (False, START_EVERY_S), id="its second step may compile"),
        pytest.param(2, (True, TICK_S), id="its pace is known, so its silence counts"),
    ],
)
def test_a_rank_has_stepped_by_its_count_not_by_the_guards_looks(
    steps, expected, tmp_path, monkeypatch
):
    watched = Watched(tmp_path, monkeypatch, steps=0)
    watched.token = steps
    first, at = watched.look(), watched.now
    while read_signs(watched.attempt, 1)[0].ranks[0] == first:
        watched.tick()
    assert (first.has_stepped, watched.now - at) == expected


@pytest.mark.parametrize(
    ("bytes_s", "is_still"),
    [
        pytest.param(0, True, id="nothing"),
        pytest.param(9_000, True, id="rank 0's store, which waits for another rank"),
        pytest.param(100_000, False, id="a dataset is read"),
    ],
)
def test_a_start_stands_still_by_its_rate_of_bytes(bytes_s, is_still, tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch, steps=0)
    for _ in range(20):
        watched.moved += int(bytes_s * TICK_S)
        watched.tick()
    seen = read_signs(watched.attempt, 1)[0].ranks[0]
    assert (seen.still_s > 0) == is_still


OWN, OTHERS = 1, 2


@pytest.mark.parametrize(
    ("receives", "is_answered", "is_still"),
    [
        pytest.param(OWN, True, False, id="the rank downloads"),
        pytest.param(OTHERS, True, True, id="another job of its node downloads"),
        pytest.param(OTHERS, False, False, id="who does is not known"),
    ],
)
def test_a_start_moves_by_what_its_own_connections_receive(
    receives, is_answered, is_still, tmp_path, monkeypatch
):
    watched = Watched(tmp_path, monkeypatch, steps=0)

    def read_received(port):
        if not is_answered:
            raise OSError("no sock_diag")
        return {receives: int(100_000 * watched.now)}

    monkeypatch.setattr(guard, "read_received", read_received)
    monkeypatch.setattr(guard, "measure_received", lambda pid: int(100_000 * watched.now))
    monkeypatch.setattr(guard, "list_inodes", lambda pid: [OWN] if pid == os.getpid() else [])
    for _ in range(20):
        watched.tick()
    assert (read_signs(watched.attempt, 1)[0].ranks[0].still_s > 0) == is_still


def test_a_mapped_file_that_is_read_slowly_is_movement(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    stat = read_stat(os.getpid())
    stats = [{os.getpid(): stat._replace(faults=at // 4)} for at in range(8)]
    monkeypatch.setattr(guard, "list_stats", lambda: stats.pop(0))
    assert [watched.look().still_s for _ in range(8)] == [
        0.0,
        5.0,
        10.0,
        15.0,
        0.0,
        5.0,
        10.0,
        15.0,
    ]


def test_a_helper_that_prints_is_no_movement_of_a_rank_in_a_collective(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    seen = []
    for frame in (FRAME, {**FRAME, "filename": "/home/me/train.py"}):
        watched.frames = [frame]
        for _ in range(4):
            watched.printed_at = watched.now
            seen.append(watched.look())
    assert [one.prints for one in seen] == [False] * 4 + [True] * 4
    assert [one.still_s for one in seen] == [0.0, 5.0, 10.0, 15.0] * 2


LOOP = {"filename": "/home/me/train.py", "name": "wait", "line": 3, "spins": 3}


@pytest.mark.parametrize(
    ("frame", "others_s", "spins", "waits"),
    [
        pytest.param(LOOP, 0.0, True, True, id="a loop that cannot end"),
        pytest.param(LOOP, 2.0, False, False, id="while another thread of it computes"),
        pytest.param({**LOOP, "spins": 0}, 0.0, False, False, id="a count, or an evaluation"),
    ],
)
def test_a_loop_that_cannot_end_is_a_wait_and_no_other_is(
    frame, others_s, spins, waits, tmp_path, monkeypatch
):
    watched = Watched(tmp_path, monkeypatch)
    stat = read_stat(os.getpid())

    def show():
        ticks = int((watched.main_s + watched.others_s) * os.sysconf("SC_CLK_TCK"))
        return {os.getpid(): stat._replace(ticks=ticks)}

    monkeypatch.setattr(guard, "list_stats", show)
    for look in range(6):
        watched.frames = [{**frame, "line": 3 + look % 2}]
        watched.main_s, watched.others_s = watched.main_s + 5, watched.others_s + others_s
        seen = watched.look()
    assert (seen.spins, seen.waits) == (spins, waits)


@pytest.mark.parametrize("pids", [(11, 12), (11, 99), (98, 99)])
def test_ranks_that_a_launcher_started_are_found_by_their_counts(pids, tmp_path, monkeypatch):
    """The launcher is process 10; 98 and 99 are none of it, such as those of another node."""
    watched = Watched(tmp_path, monkeypatch)
    watched.attempt.steps(0).parent.mkdir(exist_ok=True)
    for rank, pid in enumerate(pids):
        file = StepFile(os.open(watched.attempt.steps(rank), os.O_RDWR | os.O_CREAT),
                        (1, pid, 0, 0, 0))  # fmt: skip
        file.write(Tally(0.0, 0.0), whole=False)
    monkeypatch.setattr(guard, "list_stats", dict)
    monkeypatch.setattr(guard, "list_below", lambda mains, stats: {10, 11, 12})
    found = watched.guard._find_inner({0: 10})
    assert found == ({rank: pid for rank, pid in enumerate(pids) if pid < 90} or {0: 10})


@pytest.mark.parametrize(("inner_ranks", "expected"), [(None, 1), (2, None)])
def test_a_stop_blames_only_ranks_of_the_plan(inner_ranks, expected, tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    group = SimpleNamespace(**{**vars(GROUP), "inner_ranks": inner_ranks})
    monkeypatch.setattr(watched.guard, "_node", SimpleNamespace(index=0, ranks=[0], group=group))
    monkeypatch.setattr(guard, "choose_action", lambda plan: HangAction.RESTART)
    hang = Hang(HangWitness.STOPPED, since=1.0, seen_at=2.0, rank=1, node="n0")
    watched.guard._act(Finding(hang, True, 2.0))
    stop = read_json(watched.attempt.stop)
    assert (stop["node"], stop["rank"]) == ("n0", expected)
    assert read_hang(watched.attempt).rank == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [("DOWN*", [1]), ("IDLE", []), ("ALLOCATED*", [1]), ("DOWN+DRAIN", [1]), ("MIXED", [])],
)
def test_a_node_that_slurm_calls_down_or_that_does_not_answer_it_is_lost(state, expected):
    text = f"NodeName=a1 Arch=x86_64 State=MIXED CPUAlloc=1\nNodeName=a2 Cores=1 State={state} X=1"
    assert parse_down(text, {"a1": 0, "a2": 1}) == expected


def test_an_agent_is_absent_once_its_beats_stand_unless_it_said_that_it_is_done(tmp_path):
    attempt, beats = RunFolder(tmp_path).attempt(0), BeatTrack()
    attempt.make()
    for now in (0.0, ABSENT_S):
        for index, state in ((1, "running"), (2, "done"), (3, "running")):
            count = int(now) if index == 3 else 7
            facts = {"host": f"n{index}", "count": count, "state": state}
            write_json(attempt.beat(index), facts)
        beats.look(attempt, (1, 2, 3, 4), now)
    assert beats.find_absent(ABSENT_S) == {1: "n1"}
