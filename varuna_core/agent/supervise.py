"""Supervisor of the ranks of one node, from their start until the last has ended.

    a rank fails      exit file ─► stop.json ─► TERM to the other ranks ─► grace ─► KILL
    another's stop    TERM to all ─► grace ─► KILL; the ranks count as stopped, not as failed; if a
                      rank that saved and left made the stop, this node's exit code is 0
    SIGTERM to us     stop.json ─► the same
    SIGUSR1, SIGUSR2  to each rank's own process, also when signal.json asks for one; a rank without
                      a handler would die of the signal, so it gets the signal once it has a handler

All decisions are made in the main thread; the threads that copy output (pump), watch other nodes
and sample GPUs only read and write files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any, Mapping

from varuna_core.agent.gpu.accelerator import read_gpus
from varuna_core.agent.gpu.sampler import Sampler
from varuna_core.agent.meeting.meeting import explain_ending
from varuna_core.agent.meeting.watch import AttemptWatch
from varuna_core.agent.processes.evidence import Part, gather_evidence
from varuna_core.agent.processes.guard import Guard
from varuna_core.agent.processes.output import Pump
from varuna_core.agent.processes.proc import (
    ContainerProcesses,
    is_halted,
    list_below,
    list_stats,
    measure_ranks,
    read_stat,
)
from varuna_core.agent.processes.process import (
    RankProcess,
    adopt_orphans,
    end_leftovers,
    start_rank,
)
from varuna_core.agent.processes.signals import ENDING, Signals
from varuna_core.agent.setup.container import fill_in
from varuna_core.agent.setup.forked_ranks import Origin, can_fork
from varuna_core.agent.setup.ranks import Meeting, RankStart, build_rank, find_devices
from varuna_core.agent.setup.site import STOPPED, Site
from varuna_core.agent.stacks import dump_ranks
from varuna_core.agent.track.process import END_S, TrackerProcess
from varuna_core.facts.cause import EndCause
from varuna_core.records.exits import (
    BY_EXCEPTION,
    NodeExits,
    RankExit,
    rank_exit,
    read_exception,
    read_uncaught,
)
from varuna_core.records.files import write_json
from varuna_core.records.logs.traceback import SUMMARIES
from varuna_core.records.requests import read_stop, write_stop

TICK_S = 1.0
SETTLE_S = 0.5
"""Seconds for which a rank that SIGTERM ended does not yet count as failed, since a scheduler may
signal the ranks before the agent."""
HUNG_S = 5.0
"""Most seconds of grace for ranks that hang, even if the conf allows more."""
DRAIN_S = 1.0
"""Seconds to wait for the last output of a rank that has ended."""
STUCK_S, FROZEN_S = 30.0, 8.0
"""Seconds after SIGKILL, and seconds after SIGKILL without any use of the processor (a process uses
some to free its memory), until a rank counts as stuck in the kernel and is not waited for."""
TIDY_S = 5.0
"""Seconds for a container runtime's own processes to clean up after a rank that ended."""
START_FAILED = {FileNotFoundError: 127, PermissionError: 126}


class Supervisor:
    """Starts and supervises the ranks of one node."""

    def __init__(
        self, site: Site, signals: Signals, meeting: Meeting, origin: Origin | None = None
    ) -> None:
        self._site, self._signals, self._meeting = site, signals, meeting
        self._origin = origin
        self._attempt, self._grace_s = site.attempt, site.plan.timing.grace_s
        self._alive: dict[int, RankProcess] = {}
        self._started: dict[int, float] = {}
        self._held: list[tuple[int, int, float]] = []
        """Ranks that a signal ended, with return code and time, as long as it is not known if they
        failed or were stopped."""
        self._held_since = 0.0
        self._owed: list[tuple[int, int]] = []
        """Signals and ranks: each signal is kept until the rank has a handler for it."""
        self._heard: bool | None = None
        """True if all ranks at work had a handler for SIGUSR1; None before the ranks start."""
        self._told: list[int] = []
        """Ranks that this agent has asked to end."""
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._killed = (0.0, 0)
        """Time of SIGKILL, and the processor time of the ranks that still ran, as last read."""
        self._is_stopping = False
        self._stopped_at = 0.0
        self._code = 0
        self._wraps = site.container is not None and site.container.wraps
        self._exits = NodeExits(site.attempt, site.node.index, len(site.node.ranks))
        self._pump = Pump(site.attempt, site.host, site.plan.log_limit_mb)
        self._watch = AttemptWatch(
            site.plan,
            site.node,
            site.attempt,
            site.host,
            site.master.opened,
            self._describe,
            self._measure,
            signals.wake,
            signals.forward,
            address=None if site.plan.morph else site.master.address,
            manager=site.run.morph.link if site.plan.morph else None,
        )
        group, accelerator = site.node.group, site.accelerator
        self._sampler = Sampler(
            site.attempt.node_log(site.host, "gpu.jsonl"),
            site.plan.timing.sample_s,
            accelerator if group.gpus > 0 else None,
            find_devices(group, site.env.get(accelerator.visible_variable)),
            self._list_own,
            self._find_mains,
        )
        self._tracker = TrackerProcess(site, self._complain)
        self._guard = Guard(
            site.run,
            site.plan,
            site.node,
            site.attempt,
            site.host,
            self._find_mains,
            self._complain,
            self._watch.look_now,
            self._gather_evidence,
            self._pump.last_output_at,
        )

    def _gather_evidence(self, ranks: Mapping[int, int], deep: bool) -> Mapping[str, Any]:
        """Save evidence of a hang on this node; stacks by py-spy only where `deep`."""
        site = self._site
        more: dict[str, Part] = {}
        if site.node.group.gpus > 0:
            more["gpus"] = lambda: read_gpus(site.accelerator)
        if deep:
            more["stacks"] = lambda: dump_ranks(site.plan, ranks)
        evidence = gather_evidence(ranks, more)
        with contextlib.suppress(OSError):
            write_json(site.attempt.hang_evidence(site.node.index), evidence, lasts=False)
        return evidence

    def run(self) -> int:
        """Start the ranks, wait for their ends, and return the node's exit code."""
        self._start_ranks(adopts=adopt_orphans())
        self._tracker.start(self._meeting)
        # Threads only now: a fork beside running threads may copy a lock that is held.
        self._pump.start()
        self._watch.start()
        self._sampler.start()
        self._guard.start()
        while self._alive or self._held:
            self._signals.wait(self._next_wait())
            self._heed_signals()
            self._heed_stop()
            self._reap()
            self._settle()
            self._kill_when_due()
            self._tracker.poll()
        self._guard.end()
        self._sampler.end()
        self._tracker.end(left_s=self._compute_left_s())
        holder = self._site.facts.holder
        if left := end_leftovers(self._grace_s, TIDY_S if self._wraps else 0, spared=holder):
            self._complain(f"ended processes that the ranks had left behind: {', '.join(left)}")
        self._pump.close(timeout_s=2)
        self._watch.end()
        return self._code

    def _compute_left_s(self) -> float:
        """Return how many seconds the tracker may take after the ranks' end: whoever asked this
        agent to end waits only for the ranks' grace."""
        if self._is_stopping and self._site.plan.morph:
            return 0.0
        if self._is_stopping and self._signals.ending is not None:
            return self._stopped_at + self._grace_s - time.monotonic()
        return END_S

    def _start_ranks(self, *, adopts: bool) -> None:
        site = self._site
        starts = []
        for local_rank, rank in enumerate(site.node.ranks):
            start = build_rank(
                site.plan, site.node, local_rank, self._meeting, site.env, site.container
            )
            starts.append(replace(start, argv=fill_in(start.argv, site, rank)))
        forked: list[RankProcess] = []
        for local_rank, rank in enumerate(site.node.ranks):
            start = starts[local_rank]
            self._started[rank] = time.time()
            try:
                if local_rank == 0:
                    self._exits.reserve()
                    forked = self._fork(starts, adopts=adopts)
                if forked:
                    process = forked[local_rank]
                else:
                    inside = ContainerProcesses(start.marks) if start.marks else None
                    process = start_rank(start.argv, start.env, start.cwd, inside)
            except OSError as error:
                self._refuse_rank(rank, error)
                return
            self._alive[rank] = process
            self._pump.add(rank, process.stdout, process.stderr)

    def _fork(self, starts: list[RankStart], *, adopts: bool) -> list[RankProcess]:
        """Return the ranks forked from one process that has imported what they need; an empty list
        if each rank has to be started by itself."""
        origin, forked = self._origin, []
        may_fork = adopts and can_fork(self._site, starts)
        if may_fork and origin is not None and origin.fits(starts):
            return origin.fork(starts)
        if origin is not None:
            origin.end()
        if may_fork and len(starts) > 1:
            with contextlib.suppress(OSError):  # the first rank will say what is wrong
                forked = Origin(starts[0], len(starts)).fork(starts)
        return forked

    def _refuse_rank(self, rank: int, error: OSError) -> None:
        """Record a rank that could not start as a failed one; the other ranks do not start."""
        code = START_FAILED.get(type(error), 1)
        said = f"could not start: {error.strerror}: {os.fsdecode(error.filename or b'')}"
        self._record(rank, code, time.time(), said, stopped=False)
        self._fail(rank, code, said)
        for other in self._site.node.ranks:
            if other not in self._started:
                self._started[other] = time.time()
                self._record(other, STOPPED, time.time(), "not started", stopped=True)

    def _describe(self) -> dict[str, Any]:
        """Return the ranks' part of a heartbeat; `vjob cancel` asks the ranks that catch USR1 to
        checkpoint, and `vjob stacks` needs the pids."""
        alive, mains = list(self._alive.values()), self._find_mains()
        if alive:
            self._heard = all(process.catches(signal.SIGUSR1) for process in alive)
        return {
            "ranks": {str(rank): {"pid": pid} for rank, pid in mains.items() if pid is not None},
            "ranks_alive": len(alive),
            "catches_usr1": bool(alive and self._heard),
            "heard_usr1": self._heard,
            "ranks_halted": [rank for rank, pid in mains.items() if is_halted(pid)],
        }

    def _measure(self) -> dict[str, Any]:
        return {"ranks": measure_ranks(self._find_mains())}

    def _find_mains(self) -> dict[int, int | None]:
        return {rank: process.find_main() for rank, process in list(self._alive.items())}

    def _list_own(self) -> set[int]:
        """List the pids of all processes of this attempt on this node."""
        strangers = [process.find_strangers() for process in list(self._alive.values())]
        return list_below([os.getpid()], list_stats()).union(*strangers)

    def _next_wait(self) -> float:
        now = time.monotonic()
        ends = [now + TICK_S]
        if self._kill_at is not None:
            ends.append(self._kill_at)
        if self._held:
            ends.append(self._held_since + SETTLE_S)
        if self._leave_at is not None:
            ends.append(self._leave_at)
        return max(min(ends) - now, 0.0)

    def _heed_signals(self) -> None:
        self._deliver(self._signals.take_forwarded())
        name = self._signals.ending
        if name is not None and not self._is_stopping:
            kind, code, reason, cause = explain_ending(name, self._site.host)
            self._say_stop(kind, code, reason, cause=cause)
            self._stop_ranks(STOPPED)

    def _deliver(self, called: list[int]) -> None:
        """Pass signals on to the ranks that have a handler for them; for other ranks, keep each
        signal until they have one."""
        due = [*self._owed, *((number, rank) for number in called for rank in self._alive)]
        self._owed = []
        for number, rank in dict.fromkeys(due):
            process = self._alive.get(rank)
            if process is None:
                continue
            if process.catches(number):
                process.signal(number)
            else:
                self._owed.append((number, rank))
        if called and self._owed:
            ranks = ", ".join(str(rank) for number, rank in self._owed if number in called)
            names = "/".join(sorted({signal.Signals(number).name for number in called}))
            self._complain(f"{names} waits for a handler of rank {ranks}: without one it is lost")

    def _heed_stop(self) -> None:
        if self._watch.stop is not None and not self._is_stopping:
            self._stop_ranks(STOPPED if self._watch.stop["code"] else 0)

    def _stop_ranks(self, code: int) -> None:
        self._is_stopping, self._stopped_at = True, time.monotonic()
        self._code = self._code or code
        # A rank that hangs runs no handler: it saves nothing.
        hangs = (self._watch.stop or {}).get("cause") == EndCause.HANG.value
        self._kill_at = time.monotonic() + (min(self._grace_s, HUNG_S) if hangs else self._grace_s)
        for rank, process in self._alive.items():
            self._told.append(rank)
            process.signal_group(signal.SIGTERM)

    def _kill_when_due(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at, self._leave_at = None, now + STUCK_S
            self._killed = (now, -1)
            for process in self._alive.values():
                process.signal_group(signal.SIGKILL)
        if self._leave_at is not None:
            stats = (read_stat(pid) for pid in self._find_mains().values() if pid is not None)
            used = sum(stat.ticks for stat in stats if stat is not None)
            if used != self._killed[1]:
                self._killed = (self._killed[0], used)
                self._leave_at = min(self._killed[0] + STUCK_S, now + FROZEN_S)
        if self._leave_at is not None and now >= self._leave_at:
            for rank in self._alive:
                error = "did not end on SIGKILL: it may hang in the kernel (driver, dead mount)"
                self._record(rank, -signal.SIGKILL, time.time(), error, stopped=True)
            self._alive = {}

    def _reap(self) -> None:
        for rank, process in list(self._alive.items()):
            returncode = process.poll()
            if returncode is None:
                continue
            del self._alive[rank]
            ended = time.time()
            self._watch.look_now()  # it may have asked for the end of all before
            if returncode != 0 and not self._is_stopping and self._is_left():
                self._told.append(rank)
                self._stop_ranks(0)
            if returncode == 0 or self._is_stopping:
                self._write(rank, returncode, ended, stopped=rank in self._told)
            elif self._held or _is_told(returncode):
                self._held_since = self._held_since if self._held else time.monotonic()
                self._held.append((rank, returncode, ended))
            else:
                self._end_failed(rank, returncode, ended)

    def _is_left(self) -> bool:
        """Return True if a rank has saved and left. It says so before it ends, so that errors that
        its end causes in other ranks do not count as failures, even before the watch has seen the
        stop."""
        stop = read_stop(self._attempt, self._site.master.opened)
        return stop is not None and stop["code"] == 0

    def _settle(self) -> None:
        """Decide on the ranks that a signal ended: they were stopped if this node is being stopped;
        otherwise, after SETTLE_S, they failed."""
        if not self._held:
            return
        if self._is_stopping:
            for rank, returncode, ended in self._held:
                self._write(rank, returncode, ended, stopped=True)
            self._held = []
        elif time.monotonic() >= self._held_since + SETTLE_S:
            held, self._held = self._held, []
            for rank, returncode, ended in held:
                self._end_failed(rank, returncode, ended)

    def _end_failed(self, rank: int, returncode: int, ended: float) -> None:
        value = self._write(rank, returncode, ended, stopped=False)
        self._fail(rank, value.code, value.how)

    def _fail(self, rank: int, code: int, how: str) -> None:
        """Record that a rank failed, and stop the others. Call this after its exit file is written,
        so that whoever reads the stop finds the record of the rank at fault."""
        if self._is_stopping:
            return
        self._code = code
        host = self._site.host
        self._say_stop("rank", code, f"rank {rank} on {host} {how}", node=host, rank=rank)
        self._stop_ranks(code)

    def _write(self, rank: int, returncode: int, ended: float, *, stopped: bool) -> RankExit:
        error = self._pump.last_error(rank, DRAIN_S)
        printed = self._pump.find_exception(rank) if returncode == BY_EXCEPTION else ""
        return self._record(rank, returncode, ended, error, printed, stopped=stopped)

    def _record(
        self,
        rank: int,
        returncode: int,
        ended: float,
        error: str,
        printed: str = "",
        *,
        stopped: bool,
    ) -> RankExit:
        started = self._started[rank]
        raised = read_exception(self._attempt.error_file(rank)) if returncode else None
        uncaught = None
        if returncode == BY_EXCEPTION:
            uncaught = read_uncaught(self._attempt.ended(rank))
        own = printed if uncaught is None else uncaught
        exception = raised.text if raised is not None else own
        if printed and SUMMARIES.match(exception):  # a launcher's; its process printed its own
            exception = printed
        value = rank_exit(
            rank,
            self._site.host,
            returncode,
            stopped=stopped,
            started=started,
            ended=ended,
            error=error,
            exception=exception,
            is_uncaught=None if uncaught is None else bool(uncaught or raised),
            unwritten=self._pump.count_unwritten(),
        )
        try:
            self._exits.write(value)
        except OSError as problem:
            self._complain(f"the end of rank {rank} ({value.code}) is not recorded: {problem}")
        return value

    def _say_stop(
        self,
        kind: str,
        code: int,
        reason: str,
        node: str | None = None,
        rank: int | None = None,
        cause: EndCause | None = None,
    ) -> None:
        try:
            if write_stop(self._attempt, kind, code, reason, node=node, rank=rank, cause=cause):
                self._complain(f"stopping the attempt: {reason}")
            self._watch.look_now()
        except OSError as problem:
            self._complain(f"{reason}; the other nodes cannot be notified: {problem}")

    def _complain(self, text: str) -> None:
        with contextlib.suppress(OSError):  # srun may be gone, and with it our stderr
            print(f"{self._site.host}: {text}", file=sys.stderr, flush=True)


def _is_told(returncode: int) -> bool:
    """Return True if a rank ended by a signal with which a scheduler asks processes to end."""
    return returncode in {-number for number in ENDING} | {128 + number for number in ENDING}
