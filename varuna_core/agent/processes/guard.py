"""Thread of an agent that checks if its ranks still make steps, and acts if they hang.

    every 5 s     each rank's count of steps, and its process's state
    no step for   max(15 s, twice the usual time between two steps): processor time, bytes moved,
      long        stacks, the last collectives, into hang/<node>.json
    node 0        reads these files of all nodes, and `judge_hang` compares the ranks. If the agent
                  of node 0 gives no sign of life, the next node does this
    a node        whose agent is silent, or whose links are cut (state/cut.json), or which Slurm
                  calls down, is the one that all others wait for
    a hang        is written to state/hang.json and, with `on_hang.do`, to stop.json: then ranks are
                  ended and a restart is decided as after a failure

Time for which the thread itself was held up (a suspended job, a file server that hangs) does not
count as silence of the ranks. The thread takes no action while a rank is in a debugger, nor while
`vjob guard` has paused it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from varuna_core.agent.processes.proc import Stat, list_below, list_stats, read_stat
from varuna_core.agent.processes.process import run as run_command
from varuna_core.agent.processes.sockets import (
    has_socket,
    list_inodes,
    measure_received,
    read_received,
)
from varuna_core.facts.cause import EndCause
from varuna_core.facts.hang import Hang, HangAction, HangWitness
from varuna_core.facts.sentences import describe_hang
from varuna_core.hang.flight import read_flight
from varuna_core.hang.judge import FLOOR_S, Finding, find_halted, judge_hang
from varuna_core.hang.signs import (
    NodeSigns,
    RankSigns,
    end_hang,
    is_guard_paused,
    read_cut,
    read_signs,
    remove_signs,
    tell_suspicion,
    write_hang,
    write_signs,
)
from varuna_core.records.exits import HUNG
from varuna_core.records.files import read_json
from varuna_core.records.logs.step_counts import HEAD_BYTES, parse_counts
from varuna_core.records.plan import UNDER_SLURM, NodePlan, Plan
from varuna_core.records.requests import HANG, read_signal, read_stop, write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

TICK_S = 5.0
OWN_GAP_S = 12.0
"""Least seconds between two ticks that show that this thread itself was held up."""
LOOK_S = 15.0
ANSWER_S = 0.5
"""Seconds for the ranks to answer where they are in the program."""
MUTE_S = 15.0
"""Seconds without an answer, which are three looks, after which a rank counts as mute."""
LOOK_TIMES = 2.0
NUM_GAPS = 9
START_LOOK_S, START_EVERY_S = 30.0, 10.0
"""Seconds of silence before the first look at ranks that have not counted enough steps yet, and
seconds between two looks at them."""
START_BYTES_S = 32 * 1024
"""Bytes per second that a rank's connections (or its node's, if those are not known) receive before
the first steps if the rank is downloading."""
FAULT_BYTES = 128 * 1024
"""Bytes that count as read at each page fault of a mapped file: Linux's usual read-ahead."""
ABSENT_S = 60.0
"""Seconds without a heartbeat after which an agent counts as absent: the time of two heartbeats in
files of a connected agent."""
MOST_JUDGES = 3
SCHEDULER_S, QUESTION_S = 10.0, 60.0
"""Time limit in seconds for Slurm's answer, and seconds between two queries."""
LEAST_STEPS = 2
"""Number of steps that a rank must have done before a silence is judged by its steps: the first one
may compile for long."""
IDLE = 0.03
"""Share of one core up to which a rank counts as idle, since the threads that answer the agent use
some processor time too."""
MOVED_BYTES_S = 16 * 1024
"""Bytes a second that an idle rank may read and write, besides its answer: rank 0 moves 9 kB while
its store waits for ranks that do not join."""
TAIL_BYTES = 8192
PRINTS_S = 60.0
"""Seconds for which a printed line counts as a sign of life."""
BACKWARD = "_engine_run_backward"
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd", "debugpy", "pudb", "IPython", "rpdb", "ipdb")
_STEP = re.compile(rb'^\{"step": (\d+)', re.MULTILINE)
_TICKS_S = os.sysconf("SC_CLK_TCK")


class BeatTrack:
    """Heartbeats of the other nodes' agents, read from their files."""

    def __init__(self) -> None:
        self._seen: Dict[int, Tuple[Any, float]] = {}
        self._hosts: Dict[int, str] = {}

    def look(self, attempt: AttemptFolder, nodes: Iterable[int], now: float) -> None:
        for index in nodes:
            value = read_json(attempt.beat(index))
            if not isinstance(value, dict):
                continue
            self._hosts[index] = str(value.get("host", ""))
            mark = now if value.get("state") == "done" else value.get("count")
            if self._seen.get(index, (None, now))[0] != mark or index not in self._seen:
                self._seen[index] = (mark, now)

    def forget(self) -> None:
        self._seen.clear()

    def find_absent(self, now: float) -> Dict[int, str]:
        """Find the nodes whose agents have not written a beat for ABSENT_S: index to host name."""
        return {
            index: self._hosts[index]
            for index, (_, since) in self._seen.items()
            if now - since >= ABSENT_S
        }

    def find_host(self, index: int) -> str:
        return self._hosts.get(index, "")


@dataclass(frozen=True)
class Progress:
    """The steps of one rank, read from its own file."""

    token: Any = None
    """Value that changes with each step; None before the first step."""
    steps: int = 0
    mean_s: float = 0.0
    """Mean seconds between two steps; 0 if not known."""
    last_at: Optional[float] = None
    """Time at which the last step ended, by this node's clock."""


class RankTrack:
    """The last observations of one rank."""

    def __init__(self, now: float) -> None:
        self.token: Any = None
        self.changed_at = now
        self.has_stepped = False
        self.longest_s = 0.0
        self.stepped_at: Optional[float] = None
        """End of the rank's last step, if known; `changed_at` is later by up to the time between
        two ticks."""
        self.gaps: Deque[float] = deque(maxlen=NUM_GAPS)
        """The last few intervals between two changes of the rank's count of steps."""
        self.quiet_s = self.longest_quiet_s = 0.0
        """Seconds for which the rank was idle and outside of collectives without any change: in the
        present silence, and the most in an earlier silence that ended with a step."""
        self.was_held = False
        """True if the rank was stopped, or watched in a debugger, during the present silence, so
        that the length of the silence is not learned from."""
        self.halted_at: Optional[float] = None
        """Time at which the rank's own process was first seen stopped or dead."""
        self.below_at: Optional[float] = None
        """Time at which a process started by the rank was first seen stopped during the present
        silence."""
        self.still_at = now
        self.cpu: Optional[Tuple[float, float, float]] = None
        """Seconds of processor time of all the rank's processes, those of its main thread, and the
        time at which they were read."""
        self.spins = 0
        """Line of the loop that the rank's main thread cannot leave, according to the last answer;
        0 if there is none."""
        self.own_s = 0.0
        """Seconds of processor time that the rank has spent on answers to the agent."""
        self.sight: Any = None
        self.moved, self.moved_at = 0, now
        self.received: Mapping[int, int] = {}
        """Bytes that the rank has received so far, by connection."""
        self.received_at = now
        self.heard_at = now
        """Time of the rank's last answer, or of the last look at which no thread of the rank
        listened."""

    def note(self, progress: Progress, now: float) -> None:
        """Record the rank's progress if its count of steps has changed."""
        if progress.token == self.token:
            return
        if self.token is None and progress.mean_s:
            self.gaps.append(progress.mean_s)
            self.longest_s = progress.mean_s
        elif self.token is not None and not self.was_held:
            self.gaps.append(now - self.changed_at)
            self.longest_s = max(self.longest_s, now - self.changed_at)
            self.longest_quiet_s = max(self.longest_quiet_s, self.quiet_s)
        self.quiet_s, self.was_held, self.spins = 0.0, False, 0
        self.has_stepped |= progress.steps >= LEAST_STEPS
        self.token, self.changed_at, self.still_at = progress.token, now, now
        self.stepped_at = progress.last_at
        self.cpu = self.sight = None
        self.heard_at = now

    def excuse(self, gap_s: float) -> None:
        self.changed_at += gap_s
        self.halted_at, self.below_at, self.sight, self.cpu = None, None, None, None
        self.still_at += gap_s
        self.heard_at += gap_s

    def note_received(self, received: Mapping[int, int], now: float) -> None:
        before, most = self.received, START_BYTES_S * (now - self.received_at)
        if sum(max(size - before.get(one, 0), 0) for one, size in received.items()) > most:
            self.moved_at = now
        self.received, self.received_at = received, now

    def look_s(self) -> float:
        if not self.has_stepped:
            return START_LOOK_S
        usual_s = sorted(self.gaps)[len(self.gaps) // 2] if self.gaps else 0.0
        return max(LOOK_S, LOOK_TIMES * usual_s)


class Guard(threading.Thread):
    """Thread that detects hangs of one node's ranks, and acts on them."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        node: NodePlan,
        attempt: AttemptFolder,
        host: str,
        find_mains: Callable[[], Mapping[int, Optional[int]]],
        say: Callable[[str], None],
        look_now: Callable[[], None],
        gather: Callable[[Mapping[int, int], bool], Mapping[str, Any]],
        last_output_at: Callable[[int], float],
    ) -> None:
        super().__init__(name="guard", daemon=True)
        self._run, self._plan, self._node = run, plan, node
        self._attempt, self._host = attempt, host
        self._find_mains, self._say, self._look_now = find_mains, say, look_now
        self._last_output_at = last_output_at
        """Function that returns the time of the last line of a rank."""
        self._gather = gather
        """Function that saves evidence about the ranks with the given pids; with True it also reads
        native stacks, which stops the ranks for a moment."""
        self._mains: Mapping[int, int] = {}
        self._num_looks = 0
        """Number of looks at the ranks during the present silence."""
        self._ended = threading.Event()
        self._tracks: Dict[int, RankTrack] = {}
        self._ticked: Optional[float] = None
        self._count = 0
        self._has_written = False
        self._found: Optional[Hang] = None
        self._is_done = False
        self._has_told_pause = False
        self._beats = BeatTrack()
        self._suspected: Optional[Tuple[Any, ...]] = None
        self._down: List[int] = []
        self._next_question = float("-inf")
        self._next_look = float("-inf")

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            try:
                self.tick(time.monotonic(), time.time())
            except OSError:  # a full disk, a file server that does not answer: the next tick
                continue

    def end(self) -> None:
        self._ended.set()
        if self._suspected is not None:
            self._suspect(None)
        for rank in self._node.ranks:  # a reader of all files would wait for ever
            with contextlib.suppress(OSError):
                self._attempt.ask(rank).unlink()

    def tick(self, now: float, wall: float) -> None:
        """Observe all ranks once; `now` is the time by a clock that never jumps, `wall` the seconds
        since 1970."""
        if self._is_done:
            return
        gap_s = 0.0 if self._ticked is None else now - self._ticked - TICK_S
        self._ticked = now
        mains = {rank: pid for rank, pid in self._find_mains().items() if pid is not None}
        mains = self._find_inner(mains) if self._node.group.inner_ranks else mains
        self._mains = mains
        stepped = self._read_tokens(mains, now)
        if gap_s > OWN_GAP_S - TICK_S:
            self._beats.forget()
            for track in self._tracks.values():
                track.excuse(gap_s)
        states = {rank: self._note_state(rank, pid, now) for rank, pid in mains.items()}
        silent = [rank for rank in mains if self._is_silent(rank, now)]
        if stepped and self._found is not None:
            self._end_found(wall)
        if not silent and not any(states.values()):
            self._forget()
            return
        is_starting = not any(self._tracks[rank].has_stepped for rank in mains)
        if is_starting and not any(states.values()):
            if now < self._next_look:
                return
            self._next_look = now + START_EVERY_S
        signs = self._look(mains, now)
        self._count += 1
        longest_s = max((track.longest_s for track in self._tracks.values()), default=0.0)
        quiet_s = max((track.longest_quiet_s for track in self._tracks.values()), default=0.0)
        found = NodeSigns(
            self._node.index, self._host, self._count, longest_s, tuple(signs), quiet_s
        )
        write_signs(self._attempt, found)
        self._has_written = True
        self._num_looks += 1
        if self._num_looks == 2 and not is_starting:
            threading.Thread(target=self._gather, args=(mains, False), daemon=True).start()
        finding = find_halted(signs, self._host, wall, self._plan.num_nodes)
        if finding is None and len(silent) == len(mains):
            finding = self._judge(now, wall)
        if finding is not None:
            steps_at = [track.stepped_at for track in self._tracks.values() if track.stepped_at]
            since = min(finding.hang.since, max(steps_at, default=wall))
            self._act(replace(finding, hang=replace(finding.hang, since=since)))
        elif self._suspected is not None:
            self._suspect(None)

    def _judge(self, now: float, wall: float) -> Optional[Finding]:
        """Compare the ranks of all nodes if the agents of all nodes with a lower index are silent;
        return the hang that this shows, or None."""
        index, plan = self._node.index, self._plan
        if index >= MOST_JUDGES:
            return None
        self._beats.look(self._attempt, range(index), now)
        absent = self._beats.find_absent(now)
        if len(absent) < index:
            return None
        others = [one for one in range(plan.num_nodes) if one != index]
        self._beats.look(self._attempt, others, now)
        absent = self._beats.find_absent(now)
        nodes = read_signs(self._attempt, plan.num_nodes)
        nodes = {one: signs for one, signs in nodes.items() if one not in absent}
        lost = absent or self._find_cut(others, nodes)
        world = sum(one.count * (one.inner_ranks or one.ranks) for one in plan.groups)
        finding = judge_hang(world, plan.num_nodes, nodes, wall, plan.hang_after_s, lost)
        if finding is None or finding.hang.witness not in (HangWitness.SILENT, HangWitness.LOST):
            return finding
        if wall - finding.hang.since < FLOOR_S or (lost and finding.hang.rank is not None):
            return finding
        down = self._ask_scheduler(
            {self._name_host(one, nodes): one for one in range(plan.num_nodes)}
        )
        if down:
            lost = {one: self._name_host(one, nodes) for one in down}
            finding = judge_hang(world, plan.num_nodes, nodes, wall, plan.hang_after_s, lost)
        return finding

    def _find_cut(self, others: Sequence[int], nodes: Mapping[int, NodeSigns]) -> Dict[int, str]:
        """Find nodes that are cut off; if all other nodes are, return only this node."""
        cut = read_cut(self._attempt) & set(others)
        if len(cut) > 1 and len(cut) == len(others):
            cut = frozenset((self._node.index,))
        return {index: self._name_host(index, nodes) for index in sorted(cut)}

    def _name_host(self, index: int, nodes: Mapping[int, NodeSigns]) -> str:
        if index == self._node.index:
            return self._host
        return nodes[index].node if index in nodes else self._beats.find_host(index)

    def _ask_scheduler(self, hosts: Mapping[str, int]) -> List[int]:
        """Return nodes that Slurm reports as down, or that do not answer it."""
        if self._plan.scheduler not in UNDER_SLURM or time.monotonic() < self._next_question:
            return self._down
        self._next_question = time.monotonic() + QUESTION_S
        argv = ["scontrol", "--oneliner", "show", "node", ",".join(filter(None, hosts))]
        shown = run_command(argv, timeout_s=SCHEDULER_S)
        self._down = parse_down(shown.out if shown.code == 0 else "", hosts)
        return self._down

    # Looks.

    def _find_inner(self, mains: Mapping[int, int]) -> Dict[int, int]:
        """Return the processes below a launcher that count steps, by rank, or else the launcher."""
        below = list_below(list(mains.values()), list_stats())
        found = {}
        for rank, path in self._attempt.list_steps().items():
            with contextlib.suppress(OSError), open(path, "rb") as handle:
                counts = parse_counts(handle.read(HEAD_BYTES))
                if counts is not None and counts.pid in below:
                    found[rank] = counts.pid
        return found or dict(mains)

    def _read_tokens(self, mains: Mapping[int, int], now: float) -> bool:
        """Read all ranks' step counts; return True if a rank that was silent has made a step."""
        has_stepped = False
        for rank in mains:
            track = self._tracks.setdefault(rank, RankTrack(now))
            before, was_silent = track.token, self._is_silent(rank, now)
            track.note(self._read_progress(rank), now)
            has_stepped |= was_silent and track.token != before
        return has_stepped

    def _read_progress(self, rank: int) -> Progress:
        """Read the rank's count of optimizer steps, or its node's trace for a built-in program."""
        with contextlib.suppress(OSError):
            if not self._plan.count_steps:
                with open(self._attempt.node_trace(self._node.index), "rb") as handle:
                    size = handle.seek(0, os.SEEK_END)
                    handle.seek(max(size - TAIL_BYTES, 0))
                    return Progress(size or None, len(set(_STEP.findall(handle.read()))))
            with open(self._attempt.steps(rank), "rb") as handle:
                counts = parse_counts(handle.read(HEAD_BYTES))
            if counts is not None:
                steps = counts.earlier + counts.count
                between = counts.last_at - counts.first_at
                mean_s = between / max(counts.count - 1, 1)
                return Progress(steps, steps, mean_s, counts.last_at if steps else None)
        return Progress()

    def _note_state(self, rank: int, pid: int, now: float) -> bool:
        """Record whether the rank's process is stopped, such as by SIGSTOP; return True if so."""
        track, stat = self._tracks[rank], read_stat(pid)
        if stat is None or stat.state not in "TZX":
            track.halted_at = None
            return False
        track.halted_at = now if track.halted_at is None else track.halted_at
        track.was_held = True
        return True

    def _is_silent(self, rank: int, now: float) -> bool:
        track = self._tracks[rank]
        return now - track.changed_at >= track.look_s()

    def _look(self, mains: Mapping[int, int], now: float) -> List[RankSigns]:
        for rank in mains:
            # One that came after the last look is old by now, but shows that Python runs.
            is_late, listens = self._drop_answer(rank), self._ask(rank)
            if is_late or not listens:
                self._tracks[rank].heard_at = now
        self._ended.wait(ANSWER_S)
        stats = list_stats()
        return [self._look_at(rank, pid, stats, now) for rank, pid in mains.items()]

    def _look_at(self, rank: int, pid: int, stats: Mapping[int, Stat], now: float) -> RankSigns:
        track = self._tracks[rank]
        held = [one for one in {pid} | list_below([pid], stats) if one in stats]
        answer, size = self._read_answer(rank)
        cpu_s = sum(stats[one].ticks for one in held) / _TICKS_S
        own_s = answer.get("own_cpu_s", track.own_s)
        track.own_s = own_s if isinstance(own_s, float) else track.own_s
        cpu_s -= track.own_s
        frames, main_s = _find_main_frames(answer), _read_main_thread(pid)
        if answer:
            track.heard_at = now
            track.spins = frames[0].get("spins", 0) if frames else 0
        share, most_moved = 0.0, 0.0
        if track.cpu is not None and now > track.cpu[2]:
            used_s = cpu_s - track.cpu[0]
            if track.spins:  # it waits for one of the other threads
                used_s -= main_s - track.cpu[1]
            share = used_s / (now - track.cpu[2])
            most_moved = MOVED_BYTES_S * (now - track.cpu[2])
        track.cpu = (cpu_s, main_s, now)
        calls = read_flight(answer.get("flight")) or {}
        is_idle = share <= IDLE
        in_collective = any(
            "/torch/distributed/" in str(one.get("filename")) for one in frames[:12]
        )
        # Where DDP waits for its sums; on a GPU that is not idle.
        in_collective |= is_idle and bool(frames) and frames[0].get("name") == BACKWARD
        waits = in_collective or is_idle
        place = _name_place(frames)
        num_moved = sum(_read_bytes(one) + FAULT_BYTES * stats[one].faults for one in held)
        if num_moved - track.moved > 2 * size + most_moved:
            track.moved_at = now
        if not track.has_stepped:
            track.note_received(self._read_received(pid, held), now)
        track.moved = num_moved
        # A library's loop that asks again and again, as a data loader's, is no movement.
        stack = tuple(
            (one.get("filename"), one.get("spins") or one.get("line"))
            for one in _list_own(frames) or frames
        )
        last = tuple(sorted((key, each.last) for key, each in calls.items()))
        sight = (stack, last, track.moved_at, waits)
        if not answer and track.sight is not None:  # on a busy node it may come too late
            sight = (*track.sight[:2], track.moved_at, track.sight[3])
        if sight != track.sight:
            track.sight, track.still_at = sight, now
        # Who waits in a collective may have a thread that prints.
        prints = not in_collective and now - self._last_output_at(rank) < PRINTS_S
        is_watched = any(map(_is_held_by_a_person, held)) or _is_debugged(answer)
        track.was_held |= is_watched
        if is_idle and not in_collective:
            track.quiet_s = max(track.quiet_s, now - track.still_at)
        state = stats[pid].state if pid in stats else "X"
        stopped = [one for one in held if stats[one].state == "T"]
        below = min(stopped) if stopped and state != "T" else 0
        if not below:
            track.below_at = None
        elif track.below_at is None and self._is_silent(rank, now):
            track.below_at = now
        state = "T" if below else state
        halted_at = track.below_at if track.halted_at is None else track.halted_at
        return RankSigns(
            rank=rank,
            pid=pid,
            state=state,
            channel=_read_channel(pid),
            silence_s=round(now - track.changed_at, 1) if self._is_silent(rank, now) else 0.0,
            has_stepped=track.has_stepped,
            halted_s=0.0 if halted_at is None else max(now - halted_at, 0.1),
            still_s=round(now - track.still_at, 1),
            is_watched=is_watched,
            waits=waits,
            in_collective=in_collective,
            is_mute=now - track.heard_at >= MUTE_S,
            prints=prints,
            spins=bool(track.spins) and is_idle,
            below=below,
            has_joined=not track.has_stepped and has_socket(pid, self._find_port()),
            place=place,
            calls=calls,
        )

    def _find_port(self) -> int:
        master = read_json(self._attempt.master)
        port = master.get("port") if isinstance(master, dict) else None
        return port if isinstance(port, int) else 0

    def _read_received(self, pid: int, held: Iterable[int]) -> Mapping[int, int]:
        """Return the bytes received by each TCP connection of a rank's processes, except
        connections to the master; if these are not known, the bytes that the processes' network
        namespace received, under the key 0."""
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
                received = read_received(self._find_port())
                inodes = {inode for one in held for inode in list_inodes(one)}
                return {one: size for one, size in received.items() if one in inodes}
        return {0: measure_received(pid)}

    def _ask(self, rank: int) -> bool:
        """Ask the rank for its present place in the program; return False if no thread of the rank
        listens."""
        with contextlib.suppress(OSError):
            fd = os.open(self._attempt.ask(rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"?")
            finally:
                os.close(fd)
            return True
        return False

    def _drop_answer(self, rank: int) -> bool:
        """Delete the rank's answer; return False if there is none."""
        with contextlib.suppress(OSError):
            self._attempt.where(rank).unlink()
            return True
        return False

    def _read_answer(self, rank: int) -> Tuple[Mapping[str, Any], int]:
        """Return the rank's last answer and its size in bytes, and delete the answer."""
        path, size = self._attempt.where(rank), 0
        with contextlib.suppress(OSError):
            size = path.stat().st_size
        answer = read_json(path) if size else None
        self._drop_answer(rank)
        return (answer, size) if isinstance(answer, dict) else ({}, size)

    # Acts.

    def _suspect(self, hang: Optional[Hang]) -> None:
        """Record the suspected hang and what will be done about the hang, if either has changed;
        None deletes the record. Once the attempt is being ended, the record stays, since it says
        what was ended."""
        mark = None if hang is None else (hang.witness, hang.rank, hang.node, hang.action)
        if mark != self._suspected:
            self._suspected = mark
            if read_stop(self._attempt) is None:
                tell_suspicion(self._attempt, hang)

    def _act(self, finding: Finding) -> None:
        if self._is_done or (self._found is not None and not finding.is_due):
            return
        hang, action = finding.hang, choose_action(self._plan)
        if not finding.is_due:
            is_paused = is_guard_paused(self._run)
            self._suspect(
                replace(hang, action=HangAction.REPORT)
                if is_paused
                else replace(hang, action=action, acts_at=finding.due_at)
            )
            return
        if self._suspected is not None:
            self._suspect(None)
        if finding.is_due and is_guard_paused(self._run):
            if not self._has_told_pause:
                self._has_told_pause = True
                self._say(f"{describe_hang(hang)}; the guard is paused, so nothing is done")
            return
        hang = replace(hang, action=action)
        if action is HangAction.REPORT:
            if self._found is None and write_hang(self._attempt, hang):
                self._found = hang
                self._say(describe_hang(hang))
            if read_signal(self._attempt) is None:
                return
            # The time limit is near, or somebody asked for a save: who can, saves on the SIGTERM.
        self._is_done = True
        hang = self._save_evidence(hang)
        if not write_hang(self._attempt, replace(hang, until=hang.seen_at)):
            end_hang(self._attempt, replace(hang, until=hang.seen_at))
        reason = describe_hang(hang)
        # A manager starts again after whatever else stops an attempt.
        kind = "cancel" if self._plan.morph and action is HangAction.STOP else HANG
        # A launcher's own ranks are none of the plan's.
        rank = None if self._node.group.inner_ranks else hang.rank
        at_fault: Dict[str, Any] = {"node": hang.node, "rank": rank, "cause": EndCause.HANG}
        if write_stop(self._attempt, kind, HUNG, reason, **at_fault):
            self._say(f"stopping the attempt: {reason}")
        self._look_now()

    def _save_evidence(self, hang: Hang) -> Hang:
        """Save the evidence that would be lost with the processes; return the hang, with its place
        in the native stack if the rank's Python did not run."""
        evidence = self._gather(self._mains, True)
        stacks = evidence.get("stacks")
        held = stacks.get(hang.rank) if isinstance(stacks, dict) else None
        if not hang.is_mute or not isinstance(held, dict):
            return hang
        frames = _find_main_frames(held)
        place = _name_place([x for x in frames if str(x.get("filename")).endswith(".py")])
        native = str(frames[0].get("name")) if frames else ""
        return replace(hang, place=f"{native} in {place}" if place not in ("", native) else native)

    def _end_found(self, wall: float) -> None:
        assert self._found is not None
        end_hang(self._attempt, replace(self._found, until=wall))
        self._say("the steps continue")
        self._found = None

    def _forget(self) -> None:
        self._num_looks = 0
        self._beats.forget()
        if self._suspected is not None:
            self._suspect(None)
        if self._has_written:
            self._has_written = False
            remove_signs(self._attempt, self._node.index)


def choose_action(plan: Plan) -> HangAction:
    """Return the conf's action: with `auto`, a restart if a failure would get one."""
    if plan.hang_do == "auto":
        return HangAction.RESTART if plan.morph or plan.restarts else HangAction.REPORT
    return HangAction(plan.hang_do)


def parse_down(text: str, hosts: Mapping[str, int]) -> List[int]:
    """Parse `scontrol --oneliner show node`; return nodes that are down or do not answer."""
    found = []
    for line in text.splitlines():
        name = re.search(r"(?:^|\s)NodeName=(\S+)", line)
        state = re.search(r"\sState=(\S+)", line)
        if name and state and name[1] in hosts and re.search(r"DOWN|FAIL|\*", state[1]):
            found.append(hosts[name[1]])
    return sorted(found)


def _find_main_frames(answer: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    for thread in answer.get("threads") or ():
        if isinstance(thread, dict) and thread.get("thread_name") == "MainThread":
            return [one for one in thread.get("frames") or () if isinstance(one, dict)]
    return []


def _is_debugged(answer: Mapping[str, Any]) -> bool:
    """Return True if a thread is in a debugger: at its prompt, or waiting for a client."""
    for thread in answer.get("threads") or ():
        frames = thread.get("frames") or () if isinstance(thread, dict) else ()
        names = [str(one.get("filename")) for one in frames[:12] if isinstance(one, dict)]
        if thread.get("thread_name") == "MainThread" and any(
            word in name for name in names for word in DEBUGGERS
        ):
            return True
    return False


def _list_own(frames: List[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """List frames of the program itself: neither Python's own files nor installed ones."""
    marks = ("/lib/python3", "-packages/", "<frozen ")
    return [one for one in frames if not any(x in str(one.get("filename")) for x in marks)]


def _name_place(frames: List[Mapping[str, Any]]) -> str:
    """Return the innermost frame of the program itself, else the innermost one."""
    for one in _list_own(frames)[:1] or frames[:1]:
        name = os.path.basename(str(one.get("filename")))
        return f"{one.get('name')} ({name}:{one.get('line')})"
    return ""


def _is_held_by_a_person(pid: int) -> bool:
    """Return True if a debugger traces the process or a terminal may have stopped it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if "\nTracerPid:\t0\n" not in text and "\nTracerPid:" in text:
            return True
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] == "T" and words[4] != "0"


def _read_main_thread(pid: int) -> float:
    """Return the main thread's seconds of processor time."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(errors="replace")
        words = text.rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS_S
    return 0.0


def _read_channel(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text(errors="replace").strip("0\n")
    return ""


def _read_bytes(pid: int) -> int:
    """Return the bytes that the process read and wrote, in files and pipes."""
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]) + int(words[3])
    return 0
