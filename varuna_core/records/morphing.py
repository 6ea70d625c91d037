"""Files of a run whose nodes may change: who manages it, its manager's state, and joins.

    morph/epochs/<n>.claim.json     a manager has taken the run over; the last claim counts
    morph/epochs/<n>.manager.json   the state of that manager, which `vjob` reads too

Each manager that starts claims the next epoch with a file that can be created only once
(`write_first`), and writes its changing state under the number of its own epoch: if it writes late,
after another manager has taken over, nobody reads the file (docs/morph_design.md).

A node is named by its seat, an index in the run's plan, and by the key of its agent: `3/9f2c`.

A join is a job that adds nodes: a group after those of the run's plan, whose seats are not reused
when the nodes are gone. Two joins that are requested at once get different seats: a file can be
created only once (`write_first`), and the later request reads the earlier one and tries again."""

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
"""Actions after the attempt, in order of increasing precedence."""


@dataclass(frozen=True)
class ManagerState:
    """The state that determines what the manager does next."""

    phase: str = GATHERING
    attempt: int = -1
    """Number of the attempt that was started last."""
    earlier: int = -1
    """Number of the last attempt of the previous jobs."""
    nodes: Tuple[str, ...] = ()
    """Nodes that are present, sorted."""
    members: Tuple[str, ...] = ()
    """Nodes of the attempt."""
    ended: Tuple[str, ...] = ()
    """Members whose ranks have ended."""
    fenced: Tuple[str, ...] = ()
    leaving: Tuple[str, ...] = ()
    """Nodes that the next attempt must not use."""
    after: str = MORPH
    asked: bool = False
    """True if the ranks were asked to save and leave."""
    grow_at: Optional[float] = None
    """Time at which the nodes that joined since the attempt started are counted."""
    why: str = ""
    """Reason why the attempt ends, if it is known."""
    saved: int = -1
    """Iteration of the furthest complete checkpoint ever seen. New checkpoints are compared with
    it, so that a run whose newest checkpoints are damaged repeatedly counts as making no progress.
    """
    whole: int = -1
    """Iteration of the newest complete checkpoint that exists."""
    base: int = -1
    """Value of `saved` when the attempt started."""
    mark: int = -1
    """Furthest step of a script that does not use Varuna's checkpoints (morph/furthest.py)."""
    base_mark: int = -1
    """Value of `mark` when the attempt started."""
    fruitless: int = 0
    """Consecutive attempts without progress: neither `saved` nor `mark` increased."""
    room: str = ""
    """Folder that is full: the next attempt waits until it has room."""
    suspect: str = ""
    """The node on which the last attempt without progress failed."""
    left_out: Tuple[str, ...] = ()
    """Reasons why healthy nodes are excluded, one sentence each."""
    gather_until: float = 0.0
    deadline: Optional[float] = None
    """Latest end of the phase; None while ranks train."""
    code: int = 0
    """Exit code of the attempt that ended last; at the end, that of the job."""
    requeue: bool = False
    session: str = ""
    """The start of the batch script to which this manager belongs: job id and restart count."""
    cancels: int = 0
    """Number of cancel requests that were made before a user restarted the run."""

    @property
    def gone(self) -> Tuple[str, ...]:
        """Return the members that the attempt lost."""
        here = frozenset(self.nodes)
        return tuple(node for node in self.members if node not in here)

    @property
    def free(self) -> Tuple[str, ...]:
        """Return the nodes that are present and that the next attempt may use."""
        if not self.leaving:
            return self.nodes
        return tuple(node for node in self.nodes if node not in self.leaving)

    @property
    def living(self) -> Tuple[str, ...]:
        """Return the members that are present and whose ranks have not ended."""
        here, ended = frozenset(self.nodes), frozenset(self.ended)
        return tuple(n for n in self.members if n in here and n not in ended)


def name_node(seat: int, key: str) -> str:
    return f"{seat}/{key}"


def get_seat(node: str) -> int:
    return int(node.partition("/")[0])


@dataclass(frozen=True)
class Claim:
    """Content of epochs/<n>.claim.json."""

    session: str
    host: str
    pid: int
    time: float


class Replaced(Exception):
    """Raised if a later manager owns the run."""


CLAIM = ".claim.json"
CLAIM_READS, CLAIM_READ_S = 20, 0.5
"""Number of reads, and seconds between them, for a claim that exists but cannot be read: it is half
written, or the file server is in trouble."""


def read_newest_epoch(folder: MorphFolder) -> int:
    """Return the newest epoch that was claimed; -1 before the first claim."""
    names = list_names(folder.epochs)
    numbers = [name[: -len(CLAIM)] for name in names if name.endswith(CLAIM)]
    found = map(as_whole, numbers)
    return max((number for number in found if number is not None), default=-1)


def read_claim(folder: MorphFolder, epoch: int) -> Optional[Claim]:
    return make(Claim, read_json(folder.claim(epoch)))


def claim_epoch(folder: MorphFolder, session: str) -> int:
    """Take over the run for a manager of this session; raise Replaced if a later session owns it.

    Each manager that starts has its own epoch, because pending writes of a killed manager may
    arrive after its successor has started.
    """
    own = asdict(Claim(session, os.uname().nodename, os.getpid(), round(time.time(), 3)))
    while True:
        newest = read_newest_epoch(folder)
        if is_outdated(folder, session, newest):
            raise Replaced
        if write_first(folder.claim(newest + 1), own):
            return newest + 1


def is_outdated(folder: MorphFolder, session: str, newest: int) -> bool:
    """Return True if a later session has claimed the run. The session of the last claim is later
    than a session with an earlier claim, and than an earlier start of the same job."""
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
    """Return the session of an epoch; empty if its manager died while it wrote the claim.

    A claim that exists but cannot be read now is read again, because treating it as unowned would
    let an earlier session take the run back from a later one.
    """
    for _ in range(CLAIM_READS):
        claim, state = read_claim(folder, epoch), parse_state(read_json(folder.manager(epoch)))
        owner = claim or state
        if owner is not None:
            return owner.session
        time.sleep(CLAIM_READ_S)
    return ""


def claim_attempt(attempt: AttemptFolder, epoch: int, session: str) -> bool:
    """Claim the attempt's number for this session; return False if a late claim of an earlier
    session holds it. Raise Replaced if a later session has it."""
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
    """Read the newest state; None if there is none yet or it is of another version."""
    newest = read_newest_epoch(folder)
    for epoch in range(newest, -1, -1):
        value = read_json(folder.manager(epoch))
        if value is not None:
            return parse_state(value)
    return parse_state(read_json(folder.unclaimed)) if newest < 0 else None


def parse_state(value: Any) -> Optional[ManagerState]:
    """Parse a state from its JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("session"), str):
        return None
    return make(
        ManagerState,
        {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()},
    )


@dataclass(frozen=True)
class Join:
    """Content of joins/<number>.json: what was requested; it never changes."""

    number: int
    group: GroupPlan
    asked: float
    """Time of the request in seconds since the epoch."""
    host: str
    pid: int
    """The process on `host` that made the request, as long as there is no job."""
    pid_start: Optional[str]
    by_itself: bool = False
    """True if the run itself (`vjob tend`), not a user, made the request."""

    @property
    def name(self) -> str:
        """The name of the join's group, batch script and logs."""
        return self.group.name

    @property
    def seats(self) -> range:
        return range(self.group.first_node, self.group.first_node + self.group.count)


@dataclass(frozen=True)
class JoinJob:
    """Content of joins/<number>.job.json: the join's job in the scheduler."""

    job: Optional[str]
    """Id of the job; None if the scheduler rejected it."""
    reason: str = ""


def read_joins(folder: MorphFolder) -> List[Join]:
    """Read all joins, in the order in which seats were assigned."""
    names = set(list_names(folder.joins))
    found: List[Join] = []
    while f"{len(found)}.json" in names:
        join = _parse(read_json(folder.join(len(found))))
        if join is None:
            break  # of another version
        found.append(join)
    return found


def read_join_job(folder: MorphFolder, join: Join) -> Optional[JoinJob]:
    """Read the job of a join; None as long as the scheduler has not answered."""
    return make(JoinJob, read_json(folder.join_job(join.number)))


def write_join_job(folder: MorphFolder, join: Join, value: JoinJob) -> None:
    write_json(folder.join_job(join.number), asdict(value))


def reserve_seats(folder: MorphFolder, build: Callable[[Sequence[Join]], Join]) -> Join:
    """Write the join that `build` returns for the previous joins; `build` may raise to refuse."""
    folder.make()
    while True:
        join = build(read_joins(folder))
        if write_first(folder.join(join.number), asdict(join)):
            return join


def add_joins(plan: Plan, joins: Sequence[Join]) -> Plan:
    """Return the run's plan with the nodes of joins appended."""
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
