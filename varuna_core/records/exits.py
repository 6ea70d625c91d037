"""Exits of ranks, and the outcome of an attempt: the first rank to fail is the culprit.

srun's own exit code hides the culprit (a rank's exit 9 shows as 143 once its peers were killed),
so each agent writes one file a rank and the verdict is made from those.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from typing import Any

from varuna_core.records.files import list_names, read_json, reserve, write_json, write_reserved
from varuna_core.records.plan import Plan
from varuna_core.records.requests import read_stop
from varuna_core.records.runfolder import AttemptFolder

NODE_LOST = 113
"""Exit code of an attempt whose culprit left no exit code: its node was lost."""
NOT_READY = 112
"""Exit code of an attempt that preflight refused or whose nodes never met."""
EXIT_RESERVE = 4096
"""Bytes kept for an exit file; its last_error is bounded by the agent to fit."""


@dataclass(frozen=True)
class RankExit:
    """exit/<rank>.json."""

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


def reserve_exit(attempt: AttemptFolder, rank: int) -> None:
    """Keep room for the rank's exit file, should its own logs fill the disk."""
    reserve(attempt.exit_reserve(rank), EXIT_RESERVE)


def write_exit(attempt: AttemptFolder, value: RankExit) -> None:
    """The exit file, into its reserve where the disk is full."""
    reserved = attempt.exit_reserve(value.rank)
    try:
        write_json(attempt.exit(value.rank), asdict(value))
    except OSError:
        if not reserved.exists():
            raise
        write_reserved(reserved, attempt.exit(value.rank), asdict(value))
        return
    with contextlib.suppress(OSError):
        os.unlink(reserved)


def read_exits(attempt: AttemptFolder, world: int) -> dict[int, RankExit]:
    """Every rank's exit that landed."""
    found = {}
    landed = set(list_names(attempt.exit(0).parent))
    for rank in range(world):
        if attempt.exit(rank).name not in landed:
            continue
        value = read_json(attempt.exit(rank))
        if isinstance(value, dict):
            try:
                found[rank] = RankExit(**value)
            except TypeError:
                continue  # written by another version: as good as missing
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
    return outcome(0, f"all {plan.world} ranks exited 0", None, None, None)


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
        return Outcome(**value) if isinstance(value, dict) else None
    except TypeError:
        return None
