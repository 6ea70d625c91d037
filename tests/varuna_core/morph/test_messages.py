"""What manager and nodes make of each other's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.facts.cause import EndCause
from varuna_core.morph.messages import (
    AskedToLeave,
    CalledToEnd,
    Input,
    Joined,
    Lost,
    RankFailed,
    RanksEnded,
    Saved,
)
from varuna_core.morph.node_observer import NodeObserver, Sight
from varuna_core.morph.orders import (
    ENDED,
    GONE,
    IDLE,
    WAIT,
    Orders,
    Presence,
    Task,
    follow,
    is_for_guest,
    read_orders,
    read_presences,
    write_orders,
    write_presence,
)
from varuna_core.records.morphing import RUNNING, STOPPING, ManagerState, claim_epoch, get_seat
from varuna_core.records.runfolder import MorphFolder

ME = Presence(
    seat=2, key="k", session="7.0", host="h2", pid=1, count=1, state=IDLE, attempt=0, code=0
)
ORDERS = Orders(session="7.0", attempt=1, nodes=("0/a", "2/k"), fenced=("1/b",), end=False)


def test_a_member_runs_the_attempt_once_under_its_index_in_the_plan() -> None:
    assert follow(ORDERS, ME, knows_session=True) == Task(1, 1, "")
    assert follow(ORDERS, replace(ME, attempt=1), knows_session=True) == WAIT
    assert follow(None, ME, knows_session=True) == WAIT


def test_a_guest_takes_part_in_every_session_but_one_that_is_over_and_comes_back() -> None:
    guest = replace(ME, session="")
    assert is_for_guest(ORDERS, guest) and not is_for_guest(ORDERS, ME)
    over = replace(ORDERS, end=True)
    assert is_for_guest(over, guest)  # to read there that it may go home
    assert not is_for_guest(replace(over, back=True), guest)
    told = follow(over, replace(guest, session="7.0"), knows_session=True)
    assert told.leave == "the run has ended"


@given(
    st.builds(
        Orders,
        session=st.sampled_from(["7.0", "7.1"]),
        attempt=st.integers(-1, 3),
        nodes=st.lists(st.sampled_from(["0/a", "2/k", "2/other"]), unique=True).map(tuple),
        fenced=st.lists(st.sampled_from(["1/b", "2/k", "2/other"]), unique=True).map(tuple),
        end=st.booleans(),
    ),
    st.booleans(),
)
def test_nobody_runs_who_is_not_named_or_fenced_or_of_another_session(
    orders: Orders, knows_session: bool
) -> None:
    task = follow(orders, ME, knows_session=knows_session)
    if task.attempt is not None:
        assert orders.session == ME.session and not orders.end and not task.leave
        assert orders.nodes[task.node] == ME.name and ME.name not in orders.fenced
        assert task.attempt > ME.attempt
    if orders.session != ME.session:
        assert bool(task.leave) == knows_session


def test_files_of_another_session_or_version_and_torn_ones_count_for_nothing(
    tmp_path: Path,
) -> None:
    folder = MorphFolder(tmp_path / "morph")
    folder.make()
    assert read_orders(folder) is None and read_presences(folder, "7.0") == {}
    write_presence(folder, ME)
    write_presence(folder, replace(ME, seat=3, session="6.0"))
    folder.node(4).write_text('{"seat": 4')
    folder.node(5).write_text('{"seat": 5, "colour": "red"}')
    assert read_presences(folder, "7.0") == {2: ME}
    epoch = claim_epoch(folder, "7.0")
    orders = replace(ORDERS, epoch=epoch)
    assert read_orders(folder) == Orders("7.0", -1, (), (), end=False, epoch=epoch)
    write_orders(folder, orders)
    assert read_orders(folder) == orders
    assert folder.orders(epoch).stat().st_mode & 0o777 == 0o600


class Observed:
    """NodeObserver, and a node that is heard or not."""

    def __init__(self, state: ManagerState) -> None:
        self.state, self.now = state, 0.0
        self.observer = NodeObserver(lost_s=90, beat_s=1, poll_s=0.25)
        self.sight = Sight({2: ME}, None, {}, {}, -1, {})

    def observe(
        self, seconds: float = 0.5, *, beats: bool = True, **changes: object
    ) -> list[Input]:
        """After so long, in looks half a second apart."""
        found: list[Input] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if beats:
                me = self.sight.presences[2]
                changed = {**self.sight.presences, 2: replace(me, count=me.count + 1)}
                self.sight = self.sight._replace(presences=changed)
            self.sight = self.sight._replace(**changes)
            found = self.observer.observe(self.state, self.sight, self.now)
        return found


TRAINS = ManagerState(phase=RUNNING, attempt=0, nodes=("2/k",), members=("2/k",))


def test_silence_means_a_loss_soon_where_the_attempt_ends_and_late_where_it_trains() -> None:
    trains = Observed(TRAINS)
    assert trains.observe(60) == []
    assert trains.observe(89, beats=False) == []
    (lost,) = trains.observe(2, beats=False)
    assert isinstance(lost, Lost) and "h2 was lost" in lost.reason
    ends = Observed(replace(TRAINS, phase=STOPPING))
    assert ends.observe(3) == []
    (lost,) = ends.observe(5, beats=False)
    assert lost == Lost("2/k", lost.reason) if isinstance(lost, Lost) else False


def test_a_node_whose_connection_was_closed_is_lost_sooner_where_the_attempt_ends() -> None:
    trains = Observed(TRAINS)
    trains.observe(3)
    assert trains.observe(60, beats=False, closed={"2/k": 6}) == []
    ends = Observed(replace(TRAINS, phase=STOPPING))
    ends.observe(3)
    assert ends.observe(0.5, beats=False, closed={"2/k": ME.count + 6}) == []
    assert ends.observe(1, beats=True) == [], "it says something in its file"
    assert ends.observe(1, beats=False) == []
    assert ends.observe(1, beats=False, closed={"2/k": ME.count + 8}) == []
    (lost,) = ends.observe(0.5, beats=False)
    assert isinstance(lost, Lost) and "h2 was lost: no sign of life" in lost.reason


def test_a_connection_that_was_closed_while_the_manager_stood_still_may_come_back() -> None:
    observed = Observed(replace(TRAINS, phase=STOPPING))
    observed.observe(3)
    observed.observe(0.5, beats=False, closed={"2/k": ME.count + 6})
    observed.now += 60
    assert observed.observe(0.5, beats=False) == []


def test_while_the_manager_itself_stood_still_nobody_was_silent() -> None:
    observed = Observed(replace(TRAINS, phase=STOPPING))
    observed.observe(3)
    observed.now += 60
    assert observed.observe(0.5, beats=False) == []


def test_a_new_agent_in_a_seat_is_another_node() -> None:
    observed = Observed(TRAINS)
    observed.observe()
    other = replace(ME, key="new", count=1)
    joined, lost = observed.observe(beats=False, presences={2: other})
    assert joined == Joined(("2/new",))
    assert isinstance(lost, Lost) and lost.node == "2/k" and "replaced" in lost.reason


def test_an_agent_that_left_its_file_behind_does_not_join_again() -> None:
    observed = Observed(ManagerState(nodes=()))
    assert observed.observe() == [Joined(("2/k",))]
    observed.observe(100, beats=False)
    assert observed.observe(beats=False) == []


def test_who_left_does_not_join_again() -> None:
    observed = Observed(ManagerState(nodes=()))
    assert observed.observe(presences={2: replace(ME, state=GONE)}) == []


def test_a_host_takes_part_once_whatever_jobs_are_on_it() -> None:
    observed = Observed(TRAINS)
    twin = replace(ME, seat=5, key="twin")
    (lost,) = observed.observe(presences={2: ME, 5: twin})
    assert lost == Lost("5/twin", "h2 already takes part, by another job of the run")
    other = replace(ME, seat=6, key="o", host="h6")
    both = {6: other, 7: replace(other, seat=7)}
    first, second = observed.observe(presences={2: ME, **both})
    assert first == Joined(("6/o",)) and isinstance(second, Lost)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"saved": 5}, Saved(5)),
        ({"stop": {"kind": "rank", "reason": "r"}}, RankFailed("r", 0)),
        ({"stop": {"kind": "cancel", "reason": "c"}}, CalledToEnd("c")),
        ({"refused": {2: "disk"}}, Lost("2/k", "h2 is not fit: disk", EndCause.PREFLIGHT)),
        ({"leave": {2: ""}}, AskedToLeave("2/k")),
        ({"leave": {2: "it is slow"}}, AskedToLeave("2/k", "it is slow")),
        ({"presences": {2: replace(ME, state=ENDED)}}, RanksEnded(("2/k",), 0)),
        (
            {"presences": {2: replace(ME, state=GONE)}},
            Lost(
                "2/k",
                "h2 has left: its job ends, or somebody ended its agent",
                EndCause.NODE_LEFT,
            ),
        ),
    ],
)
def test_each_file_is_an_input(changes: dict[str, object], said: Input) -> None:
    assert Observed(TRAINS).observe(beats=False, **changes) == [said]


def test_what_happens_to_thousands_of_nodes_at_once_is_one_input() -> None:
    """The machine takes as long for each input as there are nodes."""
    lives = {seat: replace(ME, seat=seat, host=f"h{seat}") for seat in range(9)}
    names = tuple(life.name for life in lives.values())
    assert Observed(ManagerState()).observe(beats=False, presences=lives) == [Joined(names)]
    ended = {seat: replace(life, state=ENDED) for seat, life in lives.items()}
    trains = replace(TRAINS, nodes=names, members=names)
    said = Observed(trains).observe(beats=False, presences=ended)
    assert said == [RanksEnded(names, 0)]
    ended[3] = replace(ended[3], code=7)
    failed = Observed(trains).observe(beats=False, presences=ended)
    assert [type(one) for one in failed] == [RanksEnded, RankFailed, RanksEnded]
    stopping = Observed(replace(trains, phase=STOPPING))
    assert stopping.observe(beats=False, presences=ended) == said, "they were asked to end"


def test_the_seat_is_in_the_name() -> None:
    assert get_seat(ME.name) == 2
