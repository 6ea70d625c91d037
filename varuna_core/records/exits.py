"""Exits of ranks, and the outcome of an attempt: the first rank to fail is the culprit.

srun's own exit code hides the culprit (a rank's exit 9 shows as 143 once its peers were killed),
so each agent writes how its ranks ended and the verdict is made from those.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from dataclasses import asdict, dataclass
from typing import Any, Iterable

from varuna_core.records.files import (
    expect_types,
    list_names,
    read_json,
    reserve,
    write_atomic,
    write_json,
    write_reserved,
)
from varuna_core.records.plan import Plan
from varuna_core.records.requests import read_stop
from varuna_core.records.runfolder import AttemptFolder

NODE_LOST = 113
"""Exit code of an attempt whose culprit left no exit code: its node was lost."""
NOT_READY = 112
"""Exit code of an attempt that preflight refused or whose nodes never met."""
EXIT_RESERVE = 4096
"""Bytes kept for the exit of a rank; its last_error is bounded by the agent to fit."""
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


@dataclass(frozen=True)
class Outcome:
    """outcome.json: how an attempt ended."""

    code: int
    """What the batch script exits with: 0, or the culprit's own code."""
    reason: str
    """One sentence naming the culprit."""
    culprit_rank: int | None
    culprit_node: str | None
    culprit_signal: str | None
    missing_ranks: list[int]
    """Ranks that left no exit file."""
    ended: float


def rank_exit(
    rank: int,
    node: str,
    returncode: int,
    *,
    stopped: bool,
    started: float,
    ended: float,
    error: str,
) -> RankExit:
    """From `Popen.returncode`, which is negative for a signal."""
    name = None
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
    code = 128 - returncode if returncode < 0 else returncode
    return RankExit(rank, node, code, name, stopped, started, ended, error)


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
        content = {"exits": [asdict(one) for one in self._values]}
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
    found = []
    for one in listed if isinstance(listed, list) else []:
        with contextlib.suppress(TypeError):
            found.append(expect_types(RankExit(**one)))
    return found


def judge_exits(
    plan: Plan,
    exits: dict[int, RankExit],
    stop: dict[str, Any] | None,
    node_names: dict[int, str],
    ended: float,
) -> Outcome:
    """The outcome of an attempt from what its ranks and nodes left behind.

    A rank that failed by itself is the culprit, the earliest first; else whoever said stop
    (`stop` is stop.json), unless that may be the mere echo of a lost node; else the node whose
    ranks left nothing. `node_names` maps node index to host name, as far as known.
    """
    missing = [rank for rank in range(plan.world) if rank not in exits]
    failed = [item for item in exits.values() if item.code != 0 and not item.stopped]
    said = stop or {}

    def outcome(
        code: int, reason: str, rank: int | None, node: str | None, sig: str | None
    ) -> Outcome:
        return Outcome(code, reason, rank, node, sig, missing, ended)

    if failed:
        # The first stop names its rank: clocks of different hosts may not agree on who was first.
        named = [item for item in failed if item.rank == said.get("rank")]
        first = min(named or failed, key=lambda item: (item.ended, item.rank))
        how = f"was ended by {first.signal}" if first.signal else f"exited {first.code}"
        tail = f": {first.last_error}" if first.last_error else ""
        return outcome(
            first.code,
            f"rank {first.rank} on {first.node} {how}{tail}",
            first.rank,
            first.node,
            first.signal,
        )
    # srun ends the other nodes with SIGTERM when one is lost, so these two kinds explain nothing
    # as long as some nodes left their exits and one did not.
    echo = said.get("kind") in ("signal", "group") and bool(missing) and bool(exits)
    if said and not echo:
        code = int(said.get("code", NODE_LOST))
        return outcome(code, str(said.get("reason", "stopped")), None, said.get("node"), None)
    if missing:
        node = plan.node_of_rank(missing[0])
        host = node_names.get(node.index, f"node {node.index} of group {node.group.name}")
        more = "" if len(missing) <= node.group.ranks else f" ({len(missing)} ranks in all)"
        what = f"{host} was lost: rank {missing[0]} left no exit code{more}"
        return outcome(NODE_LOST, what, missing[0], host, None)
    stopped = [item for item in exits.values() if item.stopped and item.code != 0]
    if stopped:
        return outcome(143, "stopped from outside before the ranks ended", None, None, None)
    who = "the one rank" if plan.world == 1 else f"all {plan.world} ranks"
    return outcome(0, f"{who} exited 0", None, None, None)


def read_end(attempt: AttemptFolder) -> str | None:
    """Why an attempt that is over ended: its outcome, or the stop, where nobody judged it because
    the batch script died with its host or was ended by Slurm."""
    outcome, stop = read_outcome(attempt), read_stop(attempt)
    if outcome is not None:
        return outcome.reason
    return None if stop is None else str(stop["reason"])


def write_outcome(attempt: AttemptFolder, value: Outcome) -> None:
    write_json(attempt.outcome, asdict(value))


def read_outcome(attempt: AttemptFolder) -> Outcome | None:
    value = read_json(attempt.outcome)
    try:
        return expect_types(Outcome(**value)) if isinstance(value, dict) else None
    except TypeError:
        return None
