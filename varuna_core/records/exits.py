"""Exits of ranks, and the outcome of an attempt: the first rank to fail is the culprit.

srun's own exit code hides the culprit (a rank's exit 9 shows as 143 once its peers were killed),
so each agent writes how its ranks ended and the verdict is made from those.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Tuple

from varuna_core.facts import legacy
from varuna_core.facts.cause import OF_RANK, Actor, End, EndCause, parse_cause, parse_end
from varuna_core.facts.deciding import FALLOUT
from varuna_core.facts.known import Evidence, Sure
from varuna_core.facts.sentences import LAST_LINE, NOTES, RAISED, STOP, describe_end, describe_exit
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
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.plan import Plan
from varuna_core.records.requests import HANG, LEFT, REQUEUE, read_stop
from varuna_core.records.runfolder import AttemptFolder

NODE_LOST = 113
"""Exit code of an attempt whose culprit left no exit code: its node was lost."""
HUNG = 114
"""Exit code of an attempt whose ranks made no steps any more."""
NOT_READY = 112
"""Exit code of an attempt that preflight refused or whose nodes never met."""
EXIT_RESERVE = 4096
"""Bytes kept for the exit of a rank; its last_error is bounded by the agent to fit."""
BY_EXCEPTION = 1
"""Exit code of a Python process that an exception ended."""
NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
LAST_LINES = 400
"""The most last lines of a batch script's log that are searched."""
_NAME = re.compile(r"(node-)?\d+\.json")


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: an item of exit/node-<index>.json."""

    rank: int
    node: str
    code: int
    """Exit code, or 128 + signal as a shell would say it."""
    signal: str | None
    """SIGKILL and the like, where a signal ended the rank."""
    stopped: bool
    """True where the agent itself ended the rank: then it is no culprit."""
    started: float
    ended: float
    last_error: str
    """Last line that the rank wrote to stderr."""
    exception: str = ""
    """Name and message of the exception that ended it: from its error file, else from the last
    traceback on its stderr, where it exited 1."""
    is_uncaught: bool | None = None
    """Its Python tells that nobody caught `exception`; False: that no exception ended it. None
    where it tells nothing: then the exception is likely the cause, and no more."""
    unwritten: int = 0
    """Bytes of its node's logs that could not be written until then."""

    @property
    def last_words(self) -> str:
        """The exception, else the last line of stderr, which may be anything."""
        return self.exception or self.last_error

    @property
    def how(self) -> str:
        """`exited 1: ValueError: x`, or `was ended by SIGTERM`."""
        return describe_exit(self.code, self.signal, self.exception, self.last_error)


@dataclass(frozen=True)
class Outcome:
    """outcome.json: how an attempt ended."""

    code: int
    """What the batch script exits with: 0, or the culprit's own code."""
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
    """From `Popen.returncode`, which is negative for a signal."""
    name = (name_signal(-returncode) or f"signal {-returncode}") if returncode < 0 else None
    code = 128 - returncode if returncode < 0 else returncode
    words = (error, exception, is_uncaught, unwritten)
    return RankExit(rank, node, code, name, stopped, started, ended, *words)


def name_signal(number: int) -> str:
    """SIGKILL and the like; empty for a number of none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


MOST_ERROR_BYTES = 1024 * 1024
"""A larger error file says nothing: it would be read for one line."""
EXCEPTION_CHARS = 500


@dataclass(frozen=True)
class RankException:
    """An error file: the exception that ended a rank, as torch's `record` decorator writes it."""

    text: str
    """Name and the first line of the message."""
    stack: tuple[str, ...]
    """Lines of the traceback, where it has one."""


def read_exception(path: Path) -> RankException | None:
    """The exception in an error file; None where there is none. The rank may write anything."""
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
    """The exception that nobody caught, by the Python of a rank as it ended (trace/startup); empty
    if it ended without one. None if nothing tells: it was killed, it left by os._exit, or several
    programs ran one after the other and disagree."""
    try:
        said = read_bytes(path, MOST_ERROR_BYTES, follows=False)
    except OSError:
        return None
    lines = said.decode("utf-8", "replace").splitlines()
    ends = [line[len("ended") :].strip() for line in lines if line.startswith("ended")]
    is_whole = bool(ends) and len(ends) == lines.count("begun") == len(lines) / 2
    return ends[0][:EXCEPTION_CHARS] if is_whole and len(set(ends)) == 1 else None


class NodeExits:
    """Exits of a node's ranks, written by its agent: one file, whole at each rank's end.

    It has room for all of them from the start, in blanks: the ranks' own output may fill the disk.
    """

    def __init__(self, attempt: AttemptFolder, index: int, num_ranks: int) -> None:
        self._path, self._reserve = attempt.node_exits(index), attempt.exits_reserve(index)
        self._size = EXIT_RESERVE * num_ranks
        self._values: list[RankExit] = []

    def reserve(self) -> None:
        """Keep room for the file."""
        reserve(self._reserve, self._size)

    def write(self, value: RankExit) -> None:
        """Add an exit to the file; OSError where there is no room after all."""
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
        """On a full disk, in the blocks that the file has."""
        os.rename(self._path, self._reserve)
        try:
            write_reserved(self._reserve, self._path, content)
        except OSError:
            os.rename(self._reserve, self._path)
            raise


def _to_plain(value: RankExit) -> dict[str, Any]:
    """Without what nothing tells: older readers refuse fields that they do not know."""
    later = {"exception": "", "is_uncaught": None, "unwritten": 0}
    return {name: one for name, one in asdict(value).items() if later.get(name, value) != one}


def read_exits(attempt: AttemptFolder, world: int) -> dict[int, RankExit]:
    """Every rank's exit that landed."""
    found = {}
    folder = attempt.exit(0).parent
    for name in list_names(folder):
        if _NAME.fullmatch(name):
            for value in parse_exits(read_json(folder / name)):
                if 0 <= value.rank < world:
                    found[value.rank] = value
    return {rank: found[rank] for rank in sorted(found)}


def read_exit(attempt: AttemptFolder, plan: Plan, rank: int) -> RankExit | None:
    """How one rank ended; None as long as nothing says so."""
    for path in (attempt.node_exits(plan.node_of_rank(rank).index), attempt.exit(rank)):
        for value in parse_exits(read_json(path)):
            if value.rank == rank:
                return value
    return None


def find_exited(attempt: AttemptFolder, plan: Plan, ranks: Iterable[int]) -> set[int]:
    """Those of these ranks whose exits have landed, by a listing of the folder: a look-up of a name
    may be answered by a cache."""
    names = set(list_names(attempt.exit(0).parent))
    wanted = set(ranks)
    found = {rank for rank in wanted if attempt.exit(rank).name in names}
    for index in {plan.node_of_rank(rank).index for rank in wanted - found}:
        path = attempt.node_exits(index)
        if path.name in names:
            found |= wanted & {value.rank for value in parse_exits(read_json(path))}
    return found


def parse_exits(value: Any) -> list[RankExit]:
    """Exits in the file of a node, or of a rank as before; another version's are as good as
    missing."""
    if not isinstance(value, dict):
        return []
    listed = value.get("exits", [value])
    made = (make(RankExit, one) for one in listed) if isinstance(listed, list) else ()
    return [one for one in made if one is not None]


@dataclass(frozen=True)
class Judgement:
    """How an attempt ended: the fact, and the outcome in words and numbers made of it.

    Two files, for older readers refuse an outcome.json with one key more.
    """

    end: End
    outcome: Outcome

    def with_note(self, clause: str) -> Judgement:
        """The same end with a note of what vjob did about it; the same where there is none."""
        if not clause:
            return self
        note = Evidence(NOTES, Sure.MEASURED, text=clause)
        end = replace(self.end, evidence=(*self.end.evidence, note))
        return Judgement(end, replace(self.outcome, reason=describe_end(end)))


def conclude(end: End, missing: list[int]) -> Judgement:
    """The judgement on an attempt that ended so; `missing` are ranks that left no exit file."""
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

    The culprit is the earliest rank that failed by itself; a rank that only reports a lost peer
    counts after all others. Without one it is the sender of the stop (`stop` is stop.json), unless
    that may only follow from a lost node; else the node whose ranks left nothing. `node_names` maps
    known node indices to host names.
    """
    missing = [rank for rank in range(plan.world) if rank not in exits]
    said = stop or {}
    failed = [item for item in exits.values() if item.code != 0 and not item.stopped]
    # srun ends the other nodes with SIGTERM when one is lost, so these two kinds explain nothing
    # as long as some nodes left their exits and one did not.
    echo = said.get("kind") in ("signal", "group") and bool(missing) and bool(exits)
    if failed:
        # Who lost a peer may end before it, and the first stop names its rank: clocks of different
        # hosts may not agree on who was first.
        first = [item for item in failed if not is_fallout(item)] or failed
        named = [item for item in first if item.rank == said.get("rank")]
        end = end_of_rank(min(named or first, key=lambda item: (item.ended, item.rank)))
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


def find_node_failure(logs: Iterable[Path], attempt: int) -> End | None:
    """Find the failure of a node that Slurm reported in the logs of an attempt's batch scripts.

    srun names the node. The line of slurmstepd names the node that it runs on, which may be well.
    """
    names: dict[str, None] = {}
    is_told = False
    for path in logs:
        lines = last_lines(path, LAST_LINES)
        begun = [at for at, line in enumerate(lines) if line.startswith(f"attempt {attempt}: ")]
        for line in lines[begun[0] if begun else 0 :]:
            found = NODE_FAILURE.search(line)
            if found is not None:
                names[found[1]] = None
            is_told = is_told or found is not None or "DUE TO NODE FAIL" in line
    seen = Evidence("scheduler's log", Sure.REPORTED)
    end = End(EndCause.NODE_FAIL, Actor.NODE, code=NODE_LOST, node=",".join(names))
    return replace(end, evidence=(seen,)) if is_told else None


def is_fallout(item: RankExit) -> bool:
    """True for a rank whose last words tell of another one's end."""
    return not item.signal and FALLOUT.search(item.last_words) is not None


def end_of_rank(first: RankExit) -> End:
    """The end of an attempt by the exit of the rank that ended it."""
    cause = EndCause.RANK_EXCEPTION if first.exception else EndCause.RANK_EXIT
    sure = Sure.REPORTED if first.is_uncaught else Sure.INFERRED
    raised = Evidence(RAISED, sure, text=first.exception)
    return End(
        cause=EndCause.RANK_SIGNAL if first.signal else cause,
        actor=Actor.UNKNOWN if first.signal else Actor.RANK,
        code=first.code,
        signal=first.signal or "",
        rank=first.rank,
        node=first.node,
        evidence=(
            Evidence("exit file", Sure.MEASURED),
            Evidence(LAST_LINE, Sure.REPORTED, text=first.last_error),
            *((raised,) if first.exception else ()),
        ),
    )


def end_of_stop(stop: Mapping[str, Any]) -> End:
    """The end that stop.json speaks of. Its writer knows the cause; older ones wrote none."""
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
"""Cause and actor of each kind of stop whose writer names no cause."""


def read_judgement(attempt: AttemptFolder) -> Judgement | None:
    """How an attempt ended; None where nobody judged it."""
    outcome = read_outcome(attempt)
    if outcome is None:
        return None
    return Judgement(parse_judged(outcome, read_json(attempt.end), read_stop(attempt)), outcome)


def parse_judged(outcome: Outcome, written: Any, stop: Mapping[str, Any] | None) -> End:
    """The end of an attempt that was judged: what end.json has, else what an older vjob left."""
    end = parse_end(written)
    said = None if stop is None else end_of_stop(stop)
    return end or legacy.read_attempt_end(asdict(outcome), said)


def read_reason(attempt: AttemptFolder) -> str | None:
    """Why an attempt that is over ended: its outcome, or the stop, where nobody judged it because
    the batch script died with its host or was ended by Slurm."""
    outcome, stop = read_outcome(attempt), read_stop(attempt)
    if outcome is not None:
        return outcome.reason
    return None if stop is None else str(stop["reason"])


def write_judgement(attempt: AttemptFolder, value: Judgement) -> None:
    """Write end.json, then outcome.json, for which others wait."""
    write_json(attempt.end, asdict(value.end))
    write_outcome(attempt, value.outcome)


def write_outcome(attempt: AttemptFolder, value: Outcome) -> None:
    write_json(attempt.outcome, asdict(value))


def read_outcome(attempt: AttemptFolder) -> Outcome | None:
    return make(Outcome, read_json(attempt.outcome))
