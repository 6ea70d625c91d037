"""Addresses, interfaces and ports; texts in the format of `ip -o` (iproute2 6.1)."""

import contextlib
import os
import socket
from dataclasses import replace
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.agent.meeting import network, opening
from varuna_core.agent.meeting.network import Route, is_port_free, parse_addresses, parse_route
from varuna_core.agent.meeting.opening import choose_address, pick_port
from varuna_core.agent.setup.site import Refusal
from varuna_core.records.exits import NOT_READY
from varuna_core.records.plan import Plan

ADDRESSES = r"""
1: lo    inet 127.0.0.1/8 scope host lo\       valid_lft forever preferred_lft forever
2: eth0@if5    inet 10.77.0.1/24 brd 10.77.0.255 scope global eth0\       valid_lft forever
2: eth0    inet 10.77.9.1/24 scope global secondary eth0:1\       valid_lft forever
4: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\  valid_lft forever
"""
TWO_NODES = make_plan(make_group("a", 2, 1), scheduler="slurm")


def test_addresses_are_read_with_their_interfaces() -> None:
    assert parse_addresses(ADDRESSES) == {
        "127.0.0.1": "lo",
        "10.77.0.1": "eth0",
        "10.77.9.1": "eth0",
        "172.17.0.1": "docker0",
    }


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("8.8.8.8 via 10.0.0.1 dev eth0 src 10.0.0.2 uid 0 \\    cache", Route("eth0", "10.0.0.2")),
        ("10.0.0.9 dev ib0 src 10.0.0.2 uid 0 \\    cache ", Route("ib0", "10.0.0.2")),
        ("", None),
    ],
)
def test_a_route_tells_interface_and_own_address(text: str, route: Route | None) -> None:
    assert parse_route(text) == route


def test_the_way_to_an_own_address_is_its_interface_not_lo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ip route get` says `dev lo` on the master's own node; gloo would publish 127.0.0.1."""
    monkeypatch.setattr(network, "_ask_ip", lambda *words: ADDRESSES)
    assert network.find_route("10.77.0.1") == Route("eth0", "10.77.0.1")


def test_without_ip_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ask_ip", lambda *words: "")
    assert network.list_addresses()["127.0.0.1"] == "lo"
    assert network.find_route("127.0.0.1") == Route("lo", "127.0.0.1")


def test_a_name_on_loopback_gives_the_routed_address_and_the_line_to_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian writes `127.0.1.1 host`; gloo then tells the other nodes 127.0.1.1."""
    monkeypatch.setattr(opening, "resolve", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(opening, "find_outside_address", lambda towards: "10.77.0.1")
    assert choose_address(TWO_NODES, "n60", {}) == "10.77.0.1"
    assert "put the line '10.77.0.1 n60' in its /etc/hosts" in capsys.readouterr().err


def test_a_host_that_nobody_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "resolve", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(opening, "find_outside_address", lambda towards: None)
    with pytest.raises(Refusal, match="'<its address> n60'") as refused:
        choose_address(TWO_NODES, "n60", {})
    assert refused.value.code == NOT_READY


def test_a_list_of_machines_that_are_this_one_needs_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "resolve", lambda name: ["127.0.1.1"])
    monkeypatch.setattr(opening, "find_outside_address", lambda towards: None)
    monkeypatch.setattr(opening, "list_addresses", lambda: {"127.0.0.1": "lo"})
    assert choose_address(replace(TWO_NODES, scheduler="ssh"), "n60", {}) == "127.0.0.1"
    with pytest.raises(Refusal, match="no address that other nodes can reach"):
        choose_address(TWO_NODES, "n60", {})
    monkeypatch.setattr(opening, "list_addresses", lambda: {"10.0.0.1": "a", "10.9.0.1": "b"})
    with pytest.raises(Refusal, match="no address that other nodes can reach"):
        choose_address(replace(TWO_NODES, scheduler="ssh"), "n60", {})


def test_one_node_may_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "resolve", lambda name: [])
    plan = make_plan(make_group("a", 1, 1), scheduler="slurm")
    assert choose_address(plan, "n60", {}) == "127.0.0.1"


def test_the_port_follows_job_and_attempt_and_passes_over_one_in_use() -> None:
    first = pick(1, "4711")
    assert first == 61000 + (4711 * 7 + 1) % 4500
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert pick(1, "4711+0") == first + 1
    assert pick(1, "4711", wanted=first + 7) == first + 7


def pick(*words: Any, wanted: int | None = None, plan: Plan | None = None) -> int:
    """And lets it go again."""
    port, holder = pick_port(plan or make_plan(), *words, wanted=wanted)
    holder.close()
    return port


def test_two_runs_that_start_at_once_get_ports_of_their_own() -> None:
    """Before either listens; and who holds one can be listened beside, as rank 0 does."""
    first, holder = pick_port(make_plan(), 1, "4712")
    with holder:
        assert not is_port_free(first)
        assert pick(1, "4712") == pick(1, "4712", wanted=first) == first + 1
        with pytest.raises(Refusal, match=f"port {first} is in use"):
            pick(1, "4712", plan=make_plan(port=first))
        with socket.socket() as master:
            master.bind(("", first))
            master.listen()
            assert not is_port_free(first)
    assert pick(1, "4712") == first


def test_a_fixed_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Refusal, match=f"port {port} is in use"):
            pick(0, None, plan=make_plan(port=port))


@pytest.mark.parametrize("is_wanted", [False, True])
def test_names_that_another_user_holds_stop_no_run(
    monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    """Any local user can bind all of them."""
    with socket.socket() as any_free:
        any_free.bind(("", 0))
        wanted = any_free.getsockname()[1] if is_wanted else None
    monkeypatch.setattr(network, "PORT_TEST_PAUSE_S", 0.0)
    monkeypatch.setattr(network, "_name_port", lambda port: f"\0test-{os.getpid()}-{port}")
    with contextlib.ExitStack() as held:
        ports = [*network.list_ports(4712, 0)][: opening.MOST_HEEDED + 5]
        for number in [*ports, *([wanted] if wanted else [])]:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            held.callback(name.close)
            name.bind(network._name_port(number))
        port, holder = pick_port(replace(make_plan(), port=wanted), 0, "4712")
        holder.close()
        assert wanted in (None, port)
