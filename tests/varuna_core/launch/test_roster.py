"""Who of a watched list gets an agent: a model of machines, agents and an edited file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.launch.machines import (
    ASK,
    AWAY,
    DROP,
    HERE,
    LIVED_S,
    LOOK,
    LOOKING,
    MOST_RETRY_S,
    RETRY_S,
    TAKE_BACK,
    Host,
    Listing,
    Machine,
    Move,
    decide,
    find_waiting,
    note_end,
    note_failure,
    note_start,
    read_listing,
)

NAME = "machines"
SEATS = 3
A, B, C = (Machine(host=name) for name in ("a", "b", "c.site"))
MANY = [A, B, C, Machine(host="a", user="ann"), Machine(host="c.other"), Machine(host="localhost")]


def look(listing: Listing, *texts: str | None) -> tuple[Listing, list[str]]:
    """One look for each text; None is a file that is not there."""
    told = []
    for text in texts:
        error = "" if text is not None else f"{NAME}: No such file or directory"
        listing, said = read_listing(listing, text, error, NAME)
        told += [said] if said else []
    return listing, told


def test_a_text_counts_once_two_looks_in_a_row_found_it() -> None:
    listing, told = look(Listing(), "a\n")
    assert listing.machines == ()
    listing, told = look(listing, "a\n")
    assert (listing.machines, told) == ((A,), [])
    half, _ = look(listing, "a\nb", "a\nb\nc.si", "a\nb\nc.site\n")
    assert half.machines == (A,)
    assert look(half, "a\nb\nc.site\n")[0].machines == (A, B, C)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; the last list is used until the file can be read"),
        ("", "no machine: write a host per line, 127.0.0.1 for this one; the last list is used"),
        ("# nobody\n", "lists no machine"),
        ("a\nb\na\n", "machines:3: a is on line 1 already"),
        ("a\n-oProxyCommand=x\n", "machines:2: '-oProxyCommand=x': expected HOST"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_once(
    text: str | None, said: str
) -> None:
    before, _ = look(Listing(), "a\nb\n", "a\nb\n")
    after, told = look(before, text, text, text)
    assert after.machines == (A, B)
    assert len(told) == 1 and said in told[0]
    again, told = look(after, "a\nb\n", "a\nb\n")
    assert (again.machines, told) == ((A, B), ["machines can be used again"])


def test_without_a_list_nobody_starts() -> None:
    _, told = look(Listing(), None, None)
    assert told == ["machines: No such file or directory; nobody starts until the file can be read"]


@given(st.lists(st.one_of(st.none(), st.text(alphabet="ab#@: \n-.", max_size=12)), max_size=12))
def test_no_file_raises_and_only_what_stood_still_counts(texts: list[str | None]) -> None:
    listing = Listing()
    for before, text in zip([None, *texts], texts, strict=False):
        was = listing
        listing, _ = look(listing, text)
        if listing.machines != was.machines:
            assert text is not None and text == before and listing.machines


class World:
    """Machines that answer, fail and end as the drawn numbers say; what the roster must hold."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listed: list[Machine] = []
        self.hosts: tuple[Host, ...] = ()

    def decide(self) -> list[Move]:
        before = {host.machine: host for host in self.hosts}
        self.hosts, moves = decide(self.hosts, self.listed, self.now, seats=SEATS, own="here")
        self.check(before, moves)
        return moves

    def check(self, before: dict[Machine, Host], moves: list[Move]) -> None:
        seats = [host.seat for host in self.hosts]
        names = [host.name for host in self.hosts]
        machines = [host.machine for host in self.hosts]
        for items in (seats, names, machines):
            assert len(set(items)) == len(items)
        assert set(seats) <= set(range(SEATS))
        done = [(move.kind, move.host.machine) for move in moves]
        assert len(set(done)) == len(done)
        for host in self.hosts:
            was = before.get(host.machine)
            is_listed = host.machine in self.listed
            assert host.is_asked == (host.phase == HERE and not is_listed)
            assert is_listed or host.phase == HERE
            assert was is None or (was.seat, was.name) == (host.seat, host.name)
            if (LOOK, host.machine) in done:
                assert was is None or (was.phase == AWAY and self.now >= was.again_at)
                assert host.phase == LOOKING and is_listed and not host.is_sent_home
        for machine, host in before.items():  # whose agent runs keeps its seat
            assert host.phase != HERE or machine in machines
            assert (host.phase == LOOKING and machine not in self.listed) == (
                (DROP, machine) in done
            )
        assert len(self.hosts) == SEATS or not find_waiting(self.hosts, self.listed)
        assert decide(self.hosts, self.listed, self.now, seats=SEATS, own="here") == (
            self.hosts,
            [],
        )

    def change(self, host: Host) -> None:
        self.hosts = tuple(host if item.machine == host.machine else item for item in self.hosts)


@given(st.data())
def test_whatever_happens_each_machine_has_one_seat_and_nobody_is_forgotten(
    data: st.DataObject,
) -> None:
    world = World()
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["list", "fit", "fail", "end", "time"]))
        if event == "list":
            world.listed = data.draw(st.lists(st.sampled_from(MANY), unique=True))
        elif event == "time":
            world.now += data.draw(st.floats(0, 700))
        else:
            phases = {"fit": (LOOKING,), "fail": (LOOKING,), "end": (HERE,)}[event]
            fitting = [host for host in world.hosts if host.phase in phases]
            if not fitting:
                continue
            host = data.draw(st.sampled_from(fitting))
            if event == "fit":
                world.change(note_start(host, world.now))
            elif event == "fail":
                world.change(note_failure(host, world.now))
            else:
                world.change(
                    note_end(host, data.draw(st.sampled_from([0, 1, 137, 255])), world.now)
                )
        world.decide()
    world.now += MOST_RETRY_S
    world.decide()
    for host in world.hosts:  # who is listed and was not sent home is here, or being looked at
        assert host.phase != AWAY or host.is_sent_home
    world.listed = []
    world.decide()
    assert all(host.phase == HERE and host.is_asked for host in world.hosts)


def here(**more: object) -> Host:
    return replace(note_start(Host(A, "a", 0), 0.0), **more)  # type: ignore[arg-type]


def test_who_is_not_listed_any_more_is_asked_once_and_may_come_back() -> None:
    hosts, moves = decide([here()], [], 1.0, seats=SEATS, own="here")
    assert [move.kind for move in moves] == [ASK]
    hosts, moves = decide(hosts, [A], 2.0, seats=SEATS, own="here")
    assert [move.kind for move in moves] == [TAKE_BACK] and not hosts[0].is_asked
    ended = note_end(hosts[0], 0, 3.0)  # the manager had heard it already
    assert not ended.is_sent_home
    hosts, moves = decide([ended], [A], 3.0, seats=SEATS, own="here")
    assert [move.kind for move in moves] == [LOOK]


def test_who_was_sent_home_by_the_manager_waits_to_be_taken_off_the_list() -> None:
    ended = note_end(here(), 0, 10.0)
    assert ended.is_sent_home
    hosts, moves = decide([ended], [A], 1e6, seats=SEATS, own="here")
    assert (hosts, moves) == ((ended,), [])
    hosts, _ = decide(hosts, [], 1e6, seats=SEATS, own="here")
    assert hosts == ()
    assert [move.kind for move in decide(hosts, [A], 1e6, seats=SEATS, own="here")[1]] == [LOOK]


def test_waits_grow_to_a_bound_and_begin_anew_after_a_long_life() -> None:
    host = here()
    waits = []
    for _ in range(8):
        host = note_failure(host, 0.0)
        waits.append(host.again_at)
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and waits[-1] == MOST_RETRY_S
    host = note_end(note_start(host, 0.0), 255, LIVED_S)
    assert host.again_at == LIVED_S + RETRY_S


def test_the_seat_of_a_machine_is_its_own_until_its_agent_is_gone() -> None:
    hosts, _ = decide([here()], [B], 0.0, seats=1, own="here")
    assert [host.machine for host in hosts] == [A]
    assert find_waiting(hosts, [B]) == [B]
    gone = [note_end(hosts[0], 0, 1.0)]
    hosts, _ = decide(gone, [B], 1.0, seats=1, own="here")
    assert [(host.machine, host.seat) for host in hosts] == [(B, 0)]
