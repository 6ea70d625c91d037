"""Exits of ranks, and the outcome of an attempt: the first rank to fail is the culprit.

srun's own exit code hides the culprit (a rank's exit code 9 appears as 143 once its peers have been
killed), so each agent records how its ranks ended, and the verdict is based on those records.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, Tuple

from varuna_core.facts import legacy
from varuna_core.facts.cause import OF_RANK, Actor, End, EndCause, parse_cause, parse_end
from varuna_core.facts.deciding import FALLOUT
from varuna_core.facts.known import Evidence, Sure
from varuna_core.facts.sentences import (
    CUT_SHORT,
    LAST_LINE,
    NOTES,
    RAISED,
    STOP,
    describe_end,
    describe_exit,
)
from varuna_core.records.files import (
    list_names,
    make,
    parse_json,
    read_bytes,
    read_json,
    reserve,
    write_atomic,
    write_json,
    write_reserved,
)
from varuna_core.records.plan import Plan
from varuna_core.records.requests import HANG, LEFT, REQUEUE, read_stop
from varuna_core.records.runfolder import AttemptFolder

NODE_LOST = 113
"""Exit code of an attempt whose culprit left no exit code because its node was lost."""
HUNG = 114
"""Exit code of an attempt whose ranks stopped making steps."""
NOT_READY = 112
"""Exit code of an attempt that preflight rejected, or whose nodes did not all connect."""
EXIT_RESERVE = 4096
"""Bytes reserved for the exit of a rank; the agent truncates last_error to fit."""
BY_EXCEPTION = 1
"""Exit code of a Python process that an exception ended."""
_NAME = re.compile(r"(node-)?\d+\.json")
_RAISED = re.compile(r"(?:\[rank\d+\]: ?)?((\w+\.)*[A-Z]\w*(Error|Exception)\b.*)")
"""Matches the last line of a traceback, with the prefix of torch's hook."""


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: an item of exit/node-<index>.json."""

    rank: int
    node: str
    code: int
    """Exit code, or 128 + signal as in a shell."""
    signal: str | None
    """Name of the signal that ended the rank, such as SIGKILL; None if no signal did."""
    stopped: bool
    """True if the agent itself ended the rank; such a rank is never the culprit."""
    started: float
    ended: float
    last_error: str
    """Last line that the rank wrote to stderr."""
    exception: str = ""
    """Name and message of the exception that ended the rank: from its error file or, if the rank
    exited 1, from the last traceback on its stderr."""
    is_uncaught: bool | None = None
    """True if the rank's Python reports that nobody caught `exception`, and False if it reports
    that no exception ended it. None if it reports nothing; `exception` is then only the likely
    cause."""
    unwritten: int = 0
    """Bytes of the node's logs that could not be written until then."""

    @property
    def last_words(self) -> str:
        """The exception, or else the last line of stderr, which may be unrelated."""
        return self.exception or self.last_error

    @property
    def raised(self) -> str:
        """The exception, or else the last line of stderr if it looks like one; else empty."""
        found = _RAISED.match(self.last_error)
        return self.exception or (found[1] if found is not None else "")

    @property
    def how(self) -> str:
        """Describe the exit: `exited 1: ValueError: x`, or `was ended by SIGTERM`."""
        return describe_exit(self.code, self.signal, self.exception, self.last_error)


@dataclass(frozen=True)
class Outcome:
    """outcome.json: how an attempt ended."""

    code: int
    """Exit code of the batch script: 0, or the culprit's own code."""
    reason: str
    """One sentence naming the culprit, rendered from the `End` in end.json."""
    culprit_rank: int | None
    culprit_node: str | None
    culprit_signal: str | None
    missing_ranks: list[int]
    """Ranks that left no exit file."""
    ended: float


def count_ends(exits: Iterable[Tuple[int, bool]], world: int = 0) -> str:
    """Return `1 failed, 5 stopped, 2 left no exit` from the exit code and `stopped` of ranks; a
    `world` of 0 means not known."""
    ends = list(exits)
    counts = {
        "ended well": sum(code == 0 for code, _ in ends),
        "failed": sum(code != 0 and not stopped for code, stopped in ends),
        "stopped": sum(code != 0 and stopped for code, stopped in ends),
        "left no exit": world - len(ends),
    }
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count > 0)


def rank_exit(
    rank: int,
    node: str,
    returncode: int,
    *,
    stopped: bool,
    started: float,
    ended: float,
    error: str,
    exception: str = "",
    is_uncaught: bool | None = None,
    unwritten: int = 0,
) -> RankExit:
    """Build a RankExit from `Popen.returncode`, which is negative for a signal."""
    name = (name_signal(-returncode) or f"signal {-returncode}") if returncode < 0 else None
    code = 128 - returncode if returncode < 0 else returncode
    words = (error, exception, is_uncaught, unwritten)
    return RankExit(rank, node, code, name, stopped, started, ended, *words)


def name_signal(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; empty if the number is not a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


MOST_ERROR_BYTES = 1024 * 1024
"""Size limit of an error file: a larger one is ignored."""
EXCEPTION_CHARS = 500


@dataclass(frozen=True)
class RankException:
    """Content of an error file: the exception that ended a rank, as torch's `record` writes it."""

    text: str
    """Name of the exception and the first line of its message."""
    stack: tuple[str, ...]
    """Lines of the traceback; empty if the file has none."""


def read_exception(path: Path) -> RankException | None:
    """Read the exception in an error file, which may have any content; None if there is none."""
    try:
        content = parse_json(read_bytes(path, MOST_ERROR_BYTES, follows=False))["message"]
        is_whole = isinstance(content, dict)
        message = content["message"] if is_whole else content
        stack = content.get("extraInfo", {}).get("py_callstack") if is_whole else None
        text = next(line.strip() for line in message.splitlines() if line.strip())
    # What a program wrote there may be no JSON, or other JSON.
    except (OSError, LookupError, TypeError, AttributeError, StopIteration):
        return None
    lines = stack.splitlines() if isinstance(stack, str) else []
    return RankException(text[:EXCEPTION_CHARS], tuple(lines))


def read_uncaught(path: Path) -> str | None:
    """Read the uncaught exception that the rank's Python recorded as it ended (trace/startup);
    empty if it ended without one. None if that is not known: the rank was killed, it exited by
    os._exit, or several programs ran in sequence and disagree."""
    try:
        said = read_bytes(path, MOST_ERROR_BYTES, follows=False)
    except OSError:
        return None
    lines = said.decode("utf-8", "replace").splitlines()
    ends = [line[len("ended") :].strip() for line in lines if line.startswith("ended")]
    is_whole = bool(ends) and len(ends) == lines.count("begun") == len(lines) / 2
    return ends[0][:EXCEPTION_CHARS] if is_whole and len(set(ends)) == 1 else None


class NodeExits:
    """Exits of a node's ranks, written by its agent to one file that is complete after each rank's
    end.

    Room for all exits is reserved with blanks at the start, because the ranks' own output may fill
    the disk.
    """

    def __init__(self, attempt: AttemptFolder, index: int, num_ranks: int) -> None:
        self._path, self._reserve = attempt.node_exits(index), attempt.exits_reserve(index)
        self._size = EXIT_RESERVE * num_ranks
        self._values: list[RankExit] = []

    def reserve(self) -> None:
        """Reserve disk space for the file."""
        reserve(self._reserve, self._size)

    def write(self, value: RankExit) -> None:
        """Add an exit to the file; raise OSError if the disk has no room despite the reserve."""
        self._values.append(value)
        content = {"exits": [_to_plain(one) for one in self._values]}
        if self._reserve.exists():
            write_reserved(self._reserve, self._path, content)
            return
        try:
            write_atomic(self._path, json.dumps(content, ensure_ascii=True).ljust(self._size))
        except OSError:
            self._overwrite(content)

    def _overwrite(self, content: Any) -> None:
        """Overwrite the file in place, so that a full disk does not matter."""
        os.rename(self._path, self._reserve)
        try:
            write_reserved(self._reserve, self._path, content)
        except OSError:
            os.rename(self._reserve, self._path)
            raise


def _to_plain(value: RankExit) -> dict[str, Any]:
    """Convert to JSON without fields of default value: older readers reject unknown fields."""
    later = {"exception": "", "is_uncaught": None, "unwritten": 0}
    return {name: one for name, one in asdict(value).items() if later.get(name, value) != one}


def read_exits(attempt: AttemptFolder, world: int) -> dict[int, RankExit]:
    """Read the exits of all ranks that have one so far."""
    found = {}
    folder = attempt.exit(0).parent
    for name in list_names(folder):
        if _NAME.fullmatch(name):
            for value in parse_exits(read_json(folder / name)):
                if 0 <= value.rank < world:
                    found[value.rank] = value
    return {rank: found[rank] for rank in sorted(found)}


def read_exit(attempt: AttemptFolder, plan: Plan, rank: int) -> RankExit | None:
    """Read the exit of one rank; None if it has none so far."""
    for path in (attempt.node_exits(plan.node_of_rank(rank).index), attempt.exit(rank)):
        for value in parse_exits(read_json(path)):
            if value.rank == rank:
                return value
    return None


def find_exited(attempt: AttemptFolder, plan: Plan, ranks: Iterable[int]) -> set[int]:
    """Return those of `ranks` that have an exit. The folder is listed, because the lookup of a
    single name may be answered from an NFS cache."""
    names = set(list_names(attempt.exit(0).parent))
    wanted = set(ranks)
    found = {rank for rank in wanted if attempt.exit(rank).name in names}
    for index in {plan.node_of_rank(rank).index for rank in wanted - found}:
        path = attempt.node_exits(index)
        if path.name in names:
            found |= wanted & {value.rank for value in parse_exits(read_json(path))}
    return found


def parse_exits(value: Any) -> list[RankExit]:
    """Parse the exits in a node's file, or in a rank's file of older run folders; those of another
    version are ignored."""
    if not isinstance(value, dict):
        return []
    listed = value.get("exits", [value])
    made = (make(RankExit, one) for one in listed) if isinstance(listed, list) else ()
    return [one for one in made if one is not None]


@dataclass(frozen=True)
class Judgement:
    """How an attempt ended: the `End`, and the outcome that is rendered from it.

    They are stored in two files because older readers reject an outcome.json with an additional
    key.
    """

    end: End
    outcome: Outcome

    def with_note(self, clause: str) -> Judgement:
        """Return the judgement with a note of what vjob did about the end; unchanged if `clause` is
        empty."""
        if not clause:
            return self
        note = Evidence(NOTES, Sure.MEASURED, text=clause)
        end = replace(self.end, evidence=(*self.end.evidence, note))
        return Judgement(end, replace(self.outcome, reason=describe_end(end)))


def conclude(end: End, missing: list[int]) -> Judgement:
    """Build the judgement on an attempt from its end; `missing` are ranks that left no exit."""
    code = end.code if end.code is not None else NODE_LOST
    culprit = (end.rank, end.node or None, end.signal or None)
    return Judgement(end, Outcome(code, describe_end(end), *culprit, missing, end.at or 0.0))


def judge_exits(
    plan: Plan,
    exits: dict[int, RankExit],
    stop: dict[str, Any] | None,
    node_names: dict[int, str],
    ended: float,
) -> Judgement:
    """Judge how an attempt ended, from the files that its ranks and nodes left.

    The culprit is the earliest rank that failed by itself; a rank that only reports a lost peer is
    chosen only if there is no other. If no rank failed, the culprit is the sender of the stop
    (`stop` is stop.json), unless the stop may only be a consequence of a lost node; otherwise it is
    the node whose ranks left no exits. `node_names` maps known node indices to host names.
    """
    missing = [rank for rank in range(plan.world) if rank not in exits]
    said = stop or {}
    first = find_culprit(exits.values(), said.get("rank"))
    # srun ends the other nodes with SIGTERM when one is lost, so these two kinds explain nothing
    # as long as some nodes left their exits and one did not.
    echo = said.get("kind") in ("signal", "group") and bool(missing) and bool(exits)
    if first is not None:
        end = end_of_rank(first)
    elif said and not echo:
        end = end_of_stop(said)
    elif missing:
        node = plan.node_of_rank(missing[0])
        host = node_names.get(node.index, f"node {node.index} of group {node.group.name}")
        seen = Evidence("exit file", Sure.INFERRED, seen=len(exits), expected=plan.world)
        end = End(EndCause.AGENT_DIED, Actor.NODE, code=NODE_LOST, node=host, evidence=(seen,))
        end = replace(end, rank=missing[0])
    elif any(item.stopped and item.code != 0 for item in exits.values()):
        end = End(EndCause.STOPPED, Actor.UNKNOWN, code=143)
    else:
        seen = Evidence("exit file", Sure.MEASURED, seen=plan.world, expected=plan.world)
        end = End(EndCause.COMPLETED, Actor.RANK, code=0, evidence=(seen,))
    return conclude(replace(end, at=ended, started=True if exits else None), missing)


def find_culprit(exits: Collection[RankExit], named: object) -> RankExit | None:
    """Return the exit of the rank that began the end of an attempt; None if no rank failed by
    itself. `named` is the rank that stop.json names.

    A rank that lost a peer may end before it. If no other rank failed, the culprit is the peer that
    its error names, if an exception of its own ended that peer or was printed before the agent
    stopped it.
    """
    failed = [item for item in exits if item.code != 0 and not item.stopped]
    first = [item for item in failed if not is_fallout(item)]
    if failed and not first:
        lost = {int(number) for item in failed for number in _PEER.findall(item.last_words)}
        own = [item for item in exits if item.rank in lost and item.stopped and item.code != 0]
        first = [item for item in own if item.raised and not is_fallout(item)] or failed
    # The first stop names its rank: clocks of different hosts may not agree on who was first.
    chosen = [item for item in first if item.rank == named] or first
    return min(chosen, key=lambda item: (item.ended, item.rank), default=None)


_PEER = re.compile(r"\brank (\d+)\b")


def is_fallout(item: RankExit) -> bool:
    """Return True if the rank's last line reports the end of another rank."""
    return not item.signal and FALLOUT.search(item.last_words) is not None


def end_of_rank(first: RankExit) -> End:
    """Return the end of an attempt from the exit of the rank that ended it."""
    is_cut = first.stopped and bool(first.signal and first.raised)
    text = first.raised if is_cut else first.exception
    cause = EndCause.RANK_EXCEPTION if text else EndCause.RANK_EXIT
    sure = Sure.REPORTED if first.is_uncaught else Sure.INFERRED
    raised = Evidence(RAISED, sure, text=text)
    name = "" if is_cut else first.signal or ""
    return End(
        cause=EndCause.RANK_SIGNAL if name else cause,
        actor=Actor.UNKNOWN if name else Actor.RANK,
        code=BY_EXCEPTION if is_cut else first.code,
        signal=name,
        rank=first.rank,
        node=first.node,
        evidence=(
            Evidence("exit file", Sure.MEASURED),
            Evidence(LAST_LINE, Sure.REPORTED, text=first.last_error),
            *((raised,) if text else ()),
            *((Evidence(CUT_SHORT, Sure.MEASURED, text=str(first.signal)),) if is_cut else ()),
        ),
    )


def end_of_stop(stop: Mapping[str, Any]) -> End:
    """Return the end that stop.json describes. Its writer gives the cause, except in older
    versions."""
    code = int(stop.get("code", NODE_LOST))
    node, rank = stop.get("node"), stop.get("rank")
    cause, actor = STOP_CAUSES.get(str(stop.get("kind")), (EndCause.UNKNOWN, Actor.UNKNOWN))
    if stop.get("cause"):
        cause = parse_cause(stop["cause"])
    else:
        cause = legacy.read_stop_cause(stop) or cause
    return End(
        cause=cause,
        actor=actor,
        by=str(stop.get("by") or ""),
        code=code,
        node=str(node or ""),
        rank=rank if isinstance(rank, int) and cause in OF_RANK else None,
        evidence=(Evidence(STOP, text=str(stop.get("reason", "stopped"))),),
    )


STOP_CAUSES: Mapping[str, tuple[EndCause, Actor]] = {
    "rank": (EndCause.RANK_EXIT, Actor.RANK),
    "not-ready": (EndCause.PREFLIGHT, Actor.AGENT),
    "cancel": (EndCause.CANCELLED, Actor.UNKNOWN),
    "signal": (EndCause.STOPPED, Actor.SCHEDULER),
    "lost": (EndCause.NODE_SILENT, Actor.NODE),
    "group": (EndCause.UNKNOWN, Actor.UNKNOWN),
    HANG: (EndCause.HANG, Actor.AGENT),
    REQUEUE: (EndCause.REQUEUED, Actor.RANK),
    LEFT: (EndCause.COMPLETED, Actor.RANK),
}
"""Cause and actor of each kind of stop, for a stop.json that gives no cause."""


def read_judgement(attempt: AttemptFolder) -> Judgement | None:
    """Read how an attempt ended; None if it has not been judged."""
    outcome = read_outcome(attempt)
    if outcome is None:
        return None
    return Judgement(parse_judged(outcome, read_json(attempt.end), read_stop(attempt)), outcome)


def parse_judged(outcome: Outcome, written: Any, stop: Mapping[str, Any] | None) -> End:
    """Return the end of a judged attempt from end.json, or as an older vjob recorded it."""
    end = parse_end(written)
    said = None if stop is None else end_of_stop(stop)
    return end or legacy.read_attempt_end(asdict(outcome), said)


def read_reason(attempt: AttemptFolder) -> str | None:
    """Return why an attempt ended, from its outcome. If there is none, because the batch script
    died with its host or was killed by Slurm, use the reason of its stop."""
    outcome, stop = read_outcome(attempt), read_stop(attempt)
    if outcome is not None:
        return outcome.reason
    return None if stop is None else str(stop["reason"])


def write_judgement(attempt: AttemptFolder, value: Judgement) -> None:
    """Write end.json, then outcome.json, since other processes wait for the latter."""
    write_json(attempt.end, asdict(value.end))
    write_outcome(attempt, value.outcome)


def write_outcome(attempt: AttemptFolder, value: Outcome) -> None:
    write_json(attempt.outcome, asdict(value))


def read_outcome(attempt: AttemptFolder) -> Outcome | None:
    return make(Outcome, read_json(attempt.outcome))
