"""Files of a run whose nodes may change: who manages it, its manager's state, and joins.

    morph/epochs/<n>.claim.json     a manager has taken the run over; the last claim counts
    morph/epochs/<n>.manager.json   the state of that manager, which `vjob` reads too

Each start of a manager claims the epoch after the last one, by a file that lands once
(`write_first`), and writes what it repeats under the number of its own: what it writes late, when
another has taken over, lies where nobody looks any more (docs/morph_design.md).

A node is named by its seat, an index in the run's plan, and by the key of its agent: `3/9f2c`.

A join is a job that brings more nodes: a group behind those of the run's plan, whose seats stay its
own when it is gone. Two who ask at once get different ones: a file lands once (`write_first`), and
whoever comes second reads what the first one took and asks again."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, List, Optional, Sequence, Tuple

from varuna_core.records.files import (
    as_whole,
    list_names,
    make,
    read_json,
    write_first,
    write_json,
)
from varuna_core.records.plan import GroupPlan, Plan, parse_group
from varuna_core.records.runfolder import AttemptFolder, MorphFolder

GATHERING, RUNNING, SAVING, STOPPING, JUDGING, ENDED = (
    "gathering", "running", "saving", "stopping", "judging", "ended",
)  # fmt: skip
MORPH, REQUEUE, END = "morph", "requeue", "end"
"""What comes after the attempt, a weightier one after a lighter one."""


@dataclass(frozen=True)
class ManagerState:
    """All that decides what the manager does next."""

    phase: str = GATHERING
    attempt: int = -1
    """The last one that was started."""
    earlier: int = -1
    """The last one of the jobs before."""
    nodes: Tuple[str, ...] = ()
    """Nodes that are here, sorted."""
    members: Tuple[str, ...] = ()
    """Nodes of the attempt."""
    ended: Tuple[str, ...] = ()
    """Members whose ranks have ended."""
    fenced: Tuple[str, ...] = ()
    leaving: Tuple[str, ...] = ()
    """Nodes that the next attempt is not to use."""
    after: str = MORPH
    asked: bool = False
    """Whether we asked the ranks to save and leave."""
    grow_at: Optional[float] = None
    """When the nodes that joined since the attempt started are counted."""
    why: str = ""
    """Why the attempt ends, as far as somebody told."""
    saved: int = -1
    """Iteration of the furthest complete checkpoint that was ever seen: what a new one is held to,
    so that a run whose newest ones are damaged again and again makes no progress."""
    whole: int = -1
    """That of the newest one that is there."""
    base: int = -1
    """`saved` when the attempt started."""
    mark: int = -1
    """Furthest step of a script without checkpoints of Varuna's (morph/furthest.py)."""
    base_mark: int = -1
    """`mark` when the attempt started."""
    fruitless: int = 0
    """Attempts in a row without progress: neither `saved` nor `mark` rose."""
    room: str = ""
    """Folder without room: the next attempt waits for it."""
    suspect: str = ""
    """The node on which the last of them failed."""
    left_out: Tuple[str, ...] = ()
    """Why nodes that were well are out, a sentence each."""
    gather_until: float = 0.0
    deadline: Optional[float] = None
    """When the phase ends at the latest; none while ranks train."""
    code: int = 0
    """Of the attempt that ended last, at the end that of the job."""
    requeue: bool = False
    session: str = ""
    """The start of the batch script that this manager belongs to: job id and restart."""
    cancels: int = 0
    """So many asks to cancel are of before a person started the run again."""

    @property
    def gone(self) -> Tuple[str, ...]:
        """Members that the attempt lost."""
        here = frozenset(self.nodes)
        return tuple(node for node in self.members if node not in here)

    @property
    def free(self) -> Tuple[str, ...]:
        """Nodes that the next attempt may use."""
        if not self.leaving:
            return self.nodes
        return tuple(node for node in self.nodes if node not in self.leaving)

    @property
    def living(self) -> Tuple[str, ...]:
        """Members that owe their end."""
        here, ended = frozenset(self.nodes), frozenset(self.ended)
        return tuple(n for n in self.members if n in here and n not in ended)


def name_node(seat: int, key: str) -> str:
    return f"{seat}/{key}"


def get_seat(node: str) -> int:
    return int(node.partition("/")[0])


@dataclass(frozen=True)
class Claim:
    """epochs/<n>.claim.json."""

    session: str
    host: str
    pid: int
    time: float


class Replaced(Exception):
    """A later manager owns the run."""


CLAIM = ".claim.json"
CLAIM_READS, CLAIM_READ_S = 20, 0.5
"""For a claim that is there and cannot be read: half written, or the file server is in trouble."""


def read_newest_epoch(folder: MorphFolder) -> int:
    """The newest epoch that was claimed; -1 before the first."""
    names = list_names(folder.epochs)
    numbers = [name[: -len(CLAIM)] for name in names if name.endswith(CLAIM)]
    found = map(as_whole, numbers)
    return max((number for number in found if number is not None), default=-1)


def read_claim(folder: MorphFolder, epoch: int) -> Optional[Claim]:
    return make(Claim, read_json(folder.claim(epoch)))


def claim_epoch(folder: MorphFolder, session: str) -> int:
    """Take the run over for a manager of this session; raises Replaced where a later one has it.

    Each start of a manager has an epoch of its own: what a killed one had under way may land after
    its successor has begun.
    """
    own = asdict(Claim(session, os.uname().nodename, os.getpid(), round(time.time(), 3)))
    while True:
        newest = read_newest_epoch(folder)
        if is_outdated(folder, session, newest):
            raise Replaced
        if write_first(folder.claim(newest + 1), own):
            return newest + 1


def is_outdated(folder: MorphFolder, session: str, newest: int) -> bool:
    """True if a later session has claimed the run. The last claim's is later than one that has an
    earlier claim, and than an earlier start of the same job."""
    owners = (_find_session(folder, epoch) for epoch in range(newest, -1, -1))
    readable = (owner for owner in owners if owner)
    last = next(readable, session)
    if last == session:
        return False
    job, _, restart = session.rpartition(".")
    last_job, _, last_restart = last.rpartition(".")
    if job == last_job and restart.isdecimal() and last_restart.isdecimal():
        return int(last_restart) > int(restart)
    return session in readable


def _find_session(folder: MorphFolder, epoch: int) -> str:
    """Whose an epoch is; empty where its manager died over its claim.

    A claim that is there and cannot be read now is not nobody's: an earlier session would take the
    run back from a later one.
    """
    for _ in range(CLAIM_READS):
        claim, state = read_claim(folder, epoch), parse_state(read_json(folder.manager(epoch)))
        owner = claim or state
        if owner is not None:
            return owner.session
        time.sleep(CLAIM_READ_S)
    return ""


def claim_attempt(attempt: AttemptFolder, epoch: int, session: str) -> bool:
    """Take the attempt's number for this session; False where an earlier one has it, which was
    late. Raises Replaced where a later one has it."""
    attempt.make()
    if write_first(attempt.owner, {"epoch": epoch, "session": session}):
        return True
    owner = read_json(attempt.owner)
    if not isinstance(owner, dict):
        return False
    if owner.get("session") != session and owner.get("epoch", -1) > epoch:
        raise Replaced
    return owner.get("session") == session


def write_state(folder: MorphFolder, epoch: int, state: ManagerState) -> None:
    write_json(folder.manager(epoch), asdict(state))


def read_state(folder: MorphFolder) -> Optional[ManagerState]:
    """The newest; None where there is none yet, or of another version."""
    newest = read_newest_epoch(folder)
    for epoch in range(newest, -1, -1):
        value = read_json(folder.manager(epoch))
        if value is not None:
            return parse_state(value)
    return parse_state(read_json(folder.unclaimed)) if newest < 0 else None


def parse_state(value: Any) -> Optional[ManagerState]:
    """From the dict of its file."""
    if not isinstance(value, dict) or not isinstance(value.get("session"), str):
        return None
    return make(
        ManagerState,
        {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()},
    )


@dataclass(frozen=True)
class Join:
    """joins/<number>.json: what was asked for; it never changes."""

    number: int
    group: GroupPlan
    asked: float
    """When, in seconds since the epoch."""
    host: str
    pid: int
    """Who asked, on `host`, as long as there is no job."""
    pid_start: Optional[str]
    by_itself: bool = False
    """Whether the run asked for it (`vjob tend`), and no person."""

    @property
    def name(self) -> str:
        """The name of its group, batch script and logs."""
        return self.group.name

    @property
    def seats(self) -> range:
        return range(self.group.first_node, self.group.first_node + self.group.count)


@dataclass(frozen=True)
class JoinJob:
    """joins/<number>.job.json: what became of it in the scheduler."""

    job: Optional[str]
    """None where it refused."""
    reason: str = ""


def read_joins(folder: MorphFolder) -> List[Join]:
    """All joins, in the order in which seats were given out."""
    names = set(list_names(folder.joins))
    found: List[Join] = []
    while f"{len(found)}.json" in names:
        join = _parse(read_json(folder.join(len(found))))
        if join is None:
            break  # of another version
        found.append(join)
    return found


def read_join_job(folder: MorphFolder, join: Join) -> Optional[JoinJob]:
    """None as long as the scheduler has not answered."""
    return make(JoinJob, read_json(folder.join_job(join.number)))


def write_join_job(folder: MorphFolder, join: Join, value: JoinJob) -> None:
    write_json(folder.join_job(join.number), asdict(value))


def reserve_seats(folder: MorphFolder, build: Callable[[Sequence[Join]], Join]) -> Join:
    """Write the join that `build` makes of those before it; it may refuse by raising."""
    folder.make()
    while True:
        join = build(read_joins(folder))
        if write_first(folder.join(join.number), asdict(join)):
            return join


def add_joins(plan: Plan, joins: Sequence[Join]) -> Plan:
    """The run's plan with the nodes that were asked for later behind its own."""
    if not joins or plan.morphing is None:
        return plan
    joined = sum(join.group.count for join in joins)
    return replace(
        plan,
        groups=(*plan.groups, *(join.group for join in joins)),
        morphing=replace(plan.morphing, joined=joined),
    )


def _parse(value: Any) -> Optional[Join]:
    with contextlib.suppress(TypeError, KeyError):
        return Join(**{**value, "group": parse_group(value["group"])})
    return None
