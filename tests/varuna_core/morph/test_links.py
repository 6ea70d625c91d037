"""The connections of a run that may morph, and the files beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import DEADLINE_S, TIMING, make_group, make_plan
from varuna_core.agent.meeting.link import Member, call_hub, read_place
from varuna_core.morph.links import Calm, DaemonLink, ManagerLink, name_agent
from varuna_core.morph.messages import Lost
from varuna_core.morph.node_observer import NodeObserver, Sight
from varuna_core.morph.orders import ENDED, IDLE, Newest, Orders, Presence
from varuna_core.records.files import write_json
from varuna_core.records.morphing import RUNNING, ManagerState
from varuna_core.records.plan import MorphPlan
from varuna_core.records.runfolder import RunFolder

SESSION = "7.0"
ORDERS = Orders(
    session=SESSION, attempt=1, nodes=("0/a", "1/b"), fenced=(), end=False, beat=5.0, epoch=2
)


def make_presence(seat: int, key: str, count: int = 1, **changes: Any) -> Presence:
    blank = Presence(
        seat=seat, key=key, session=SESSION, host=f"n{seat}", pid=1, count=count, state=IDLE,
        attempt=-1, code=0,
    )  # fmt: skip
    return replace(blank, **changes)


class Linked:
    """A manager's end and those of daemons, driven from one thread."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir(mode=0o700)
        self.run.morph.make()
        self.run.attempt(1).make()
        self.plan = make_plan(
            make_group("all", 2, 1),
            timing=replace(TIMING, lost_s=90.0),
            morph=True,
            morphing=MorphPlan(min_nodes=1, max_nodes=2, requeue=False, save_s=5),
        )
        self.said: list[str] = []
        self.manager = ManagerLink(self.run, self.plan, self.said.append)
        self.manager.open()
        self.daemons: list[DaemonLink] = []
        self.agents: list[Member] = []

    def connect(self, me: Presence) -> DaemonLink:
        daemon = DaemonLink(self.run, self.plan, me, self.said.append)
        self.daemons.append(daemon)
        self.turn_until(lambda: daemon.is_up, "a daemon is up, which tells who it is")
        assert me.seat in self.manager.list_seats()
        return daemon

    def connect_agent(self, index: int) -> Member:
        path = self.run.morph.link
        agent = Member(lambda: read_place(path), name_agent(1, index), 30.0)
        self.agents.append(agent)
        self.turn_until(lambda: agent.is_up, "an agent is up")
        return agent

    def turn(self) -> None:
        self.manager.step()
        for daemon in self.daemons:
            daemon.step()
        for agent in self.agents:
            agent.step(time.monotonic())

    def turn_until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain for: {what}"
            self.turn()
        return found

    def end(self) -> None:
        for end in (*self.daemons, *self.agents, self.manager):
            end.close()


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Linked]:
    found = Linked(tmp_path)
    found.manager.tell_orders(ORDERS)
    yield found
    found.end()


def test_orders_and_signs_of_life_go_over_the_connection(linked: Linked) -> None:
    daemon = linked.connect(make_presence(0, "a"))
    own = replace(ORDERS, nodes=("0/a",))
    assert daemon.orders is not None and replace(daemon.orders, beat=5.0) == own
    daemon.tell(make_presence(0, "a", 7))
    found = linked.turn_until(
        lambda: (told := linked.manager.merge({}, SESSION)) and told[0].count == 7 and told,
        "the last sign",
    )
    assert found == {0: make_presence(0, "a", 7)}
    assert linked.manager.merge({}, "8.0") == {}
    linked.manager.tell_orders(replace(ORDERS, end=True))
    linked.turn_until(lambda: daemon.orders and daemon.orders.end, "the next orders")


def test_the_managers_beat_changes_as_long_as_it_lives_and_orders_are_sent_once(
    linked: Linked,
) -> None:
    daemon = linked.connect(make_presence(0, "a"))
    assert daemon.orders is not None
    before = daemon.orders.beat
    linked.manager.tell_orders(replace(ORDERS, beat=6.0))
    linked.manager.beat()
    linked.turn_until(lambda: daemon.orders and daemon.orders.beat != before, "a beat")


def test_orders_have_no_name_but_that_of_the_node_that_they_go_to(linked: Linked) -> None:
    """Or the manager of ten thousand nodes would send a hundred million names."""
    second = linked.connect(make_presence(1, "b"))
    third = linked.connect(make_presence(2, "c"))
    assert second.orders is not None and third.orders is not None
    assert (second.orders.nodes, second.orders.find_place("1/b")) == (("1/b",), 1)
    assert (third.orders.nodes, third.orders.find_place("2/c")) == ((), None)
    linked.manager.tell_orders(replace(ORDERS, nodes=("0/a", "2/n"), fenced=("1/b",)))
    linked.turn_until(lambda: second.orders and second.orders.fenced == ("1/b",), "the fence")
    third.tell(make_presence(2, "n"))  # a guest takes part under another name
    linked.turn_until(lambda: third.orders and third.orders.find_place("2/n") == 1, "its place")
    third.tell(make_presence(2, "n", 2))
    assert linked.manager.merge({}, SESSION)[2].name == "2/n"


def test_a_hub_that_is_gone_leaves_its_daemons_to_files(linked: Linked) -> None:
    daemon = linked.connect(make_presence(0, "a"))
    linked.manager.close()
    linked.turn_until(lambda: not daemon.is_up, "down")
    assert daemon.orders is None
    assert not linked.run.morph.link.exists()
    assert linked.said == []


def test_orders_of_an_earlier_epoch_count_for_nothing_by_the_connection_too(
    linked: Linked,
) -> None:
    """The manager before ours lives on, cut off from the files."""
    newest = Newest()
    assert newest.take(replace(ORDERS, epoch=3)) is not None
    daemon = linked.connect(make_presence(0, "a"))
    assert newest.take(daemon.orders) is None


def test_the_later_word_of_a_node_counts_whichever_way_it_came(linked: Linked) -> None:
    daemon = linked.connect(make_presence(0, "a", 5))
    merge = linked.manager.merge
    assert merge({0: make_presence(0, "a", 4)}, SESSION)[0].count == 5
    assert merge({0: make_presence(0, "a", 6, state=ENDED)}, SESSION)[0].state == ENDED
    other = make_presence(0, "z", 1)
    assert merge({0: other}, SESSION)[0].key == "a", "the one that is connected"
    daemon.close()
    linked.daemons.clear()
    linked.turn_until(lambda: not linked.manager.list_seats(), "it is gone")
    assert merge({0: other}, SESSION)[0] == other, "another agent has the seat"
    assert merge({0: make_presence(0, "a", 4)}, SESSION)[0].count == 5


def test_a_node_is_lost_no_later_by_its_connection_than_by_its_file(linked: Linked) -> None:
    """The file that its last connection left behind is old: it is no sign of life."""
    state = ManagerState(
        phase=RUNNING, attempt=1, nodes=("0/a",), members=("0/a",), session=SESSION
    )
    observer = NodeObserver(lost_s=90, beat_s=1000, poll_s=0.25)

    def observe(file_count: int, now: float) -> bool:
        files = {0: make_presence(0, "a", file_count)}
        present = linked.manager.merge(files, SESSION)
        said = observer.observe(state, Sight(present, None, {}, {}, -1, {}), now)
        return any(isinstance(one, Lost) for one in said)

    daemon = linked.connect(make_presence(0, "a", 40))
    assert not observe(3, 100.0)
    daemon.close()
    linked.daemons.clear()
    linked.turn_until(lambda: not linked.manager.list_seats(), "it is gone")
    assert not observe(3, 189.0)
    assert observe(3, 191.0)
    assert not observe(41, 192.0), "a file that is new is a sign"


def test_a_daemon_that_is_gone_is_noted_until_it_says_something_again(linked: Linked) -> None:
    me = make_presence(0, "a", 40)
    daemon = linked.connect(me)
    linked.connect(make_presence(1, "b"))
    linked.daemons.remove(daemon)
    daemon.close()
    linked.turn_until(lambda: linked.manager.closed, "the end of the connection")
    assert linked.manager.closed == {"0/a": 40}
    linked.connect(replace(me, count=41))
    linked.turn_until(lambda: not linked.manager.closed, "its next word")


def test_all_is_calm_when_nodes_and_agents_are_connected(linked: Linked) -> None:
    state = ManagerState(
        phase=RUNNING, attempt=1, nodes=("0/a", "1/b"), members=("0/a", "1/b"), session=SESSION
    )
    linked.connect(make_presence(0, "a"))
    linked.connect(make_presence(1, "b"))
    linked.connect_agent(0)
    assert not linked.manager.is_complete(state)
    agent = linked.connect_agent(1)
    assert linked.manager.is_complete(state)
    agent.send({"state": "done"})
    agent.close()
    linked.agents.remove(agent)
    linked.turn_until(lambda: name_agent(1, 1) not in linked.manager._hub.names, "it is gone")
    assert linked.manager.is_complete(state), "its ranks have ended"
    assert not linked.manager.has_newcomer(state)
    linked.connect(make_presence(1, "c"))
    linked.turn_until(lambda: linked.manager.has_newcomer(state), "another agent")
    assert linked.manager.is_complete(state), "the node of before is connected still"


def test_who_asks_for_a_look_is_answered_after_it(linked: Linked) -> None:
    answers: list[bool] = []
    caller = threading.Thread(target=lambda: answers.append(call_hub(linked.run.morph.link, 10.0)))
    caller.start()
    linked.turn_until(lambda: linked.manager.is_asked, "the question")
    assert not answers
    linked.manager.answer()
    assert not linked.manager.is_asked
    linked.turn_until(lambda: answers, "the answer")
    caller.join()
    assert answers == [True]


def test_requests_reach_the_agents_of_their_attempt(linked: Linked) -> None:
    agent = linked.connect_agent(0)
    stop = {"code": 1, "kind": "cancel"}
    linked.manager.tell_requests(1, (10, "key"), stop)
    heard: list[dict[str, Any]] = []

    def listen() -> bool:
        linked.manager.step()
        heard.extend(agent.step(time.monotonic()))
        return any(line.get("topic") == "attempt" for line in heard)

    linked.agents.remove(agent)
    linked.turn_until(listen, "the request")
    agent.close()
    value = next(line["value"] for line in heard if line.get("topic") == "attempt")
    assert value == {"attempt": 1, "stop": stop, "signal": [10, "key"]}


def test_while_all_is_calm_the_folder_is_looked_at_seldom_and_where_it_changed(
    linked: Linked,
) -> None:
    attempt = linked.run.attempt(1)
    calm = Calm(linked.run, linked.plan, epoch=3)
    looks = [now for now in range(400) if calm.must_look(attempt, float(now))]
    assert looks[0] == 0 and len(looks) <= 4 + 2, looks
    now = 400.0
    write_json(linked.run.morph.leave(1), {"node": 1})
    while not calm.must_look(attempt, now):
        now += 1.0
    assert now - 400.0 <= 31.0, "two nodes look each 30 s where nobody asks"
    for _ in range(3):
        now += 30.0
        calm.must_look(attempt, now)
    assert not calm.must_look(attempt, now + 29.0)
    write_json(linked.run.morph.claim(4), {})
    assert calm.must_look(attempt, now + 31.0), "a later manager"
    assert calm.must_look(linked.run.attempt(2), now + 200.0)
