"""Counters of ports and memory in trees as the kernel keeps them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hardware.stand_ins import IB, make_ethernet, make_memory, make_ports, write_files
from varuna_core.agent.gpu.networks import EVERY_S, PORT_ERRORS, Networks
from varuna_core.facts.finding import Finding

COUNTER = f"{IB.format(at=1)}/ports/1/counters"


def read(folder: Path, networks: Networks, now: float) -> list[tuple[str, str, object]]:
    found: list[Finding] = networks.read(now)
    return [(one.rule, one.values["part"], one.values.get("count")) for one in found]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    write_files(tmp_path, {**make_ports(), **make_ethernet(), **make_memory()})
    return tmp_path


def test_what_was_counted_before_the_run_is_no_fault(node: Path) -> None:
    networks = Networks(node / "sys")
    for minute in range(1, 5):
        assert networks.read(60.0 * minute) == []


def test_it_looks_once_a_minute(node: Path) -> None:
    networks = Networks(node / "sys")
    networks.read(1000.0)
    write_files(node, {f"{COUNTER}/link_downed": "2"})
    assert read(node, networks, 1000.0 + EVERY_S - 1) == []
    assert read(node, networks, 1000.0 + EVERY_S) == [("port-errors", "mlx5_1/1", 1)]


def test_a_growth_that_is_usual_is_no_fault_and_one_that_was_adds_up(node: Path) -> None:
    networks = Networks(node / "sys")
    networks.read(60.0)
    write_files(node, {f"{COUNTER}/symbol_error": "99"})
    assert read(node, networks, 120.0) == []
    write_files(node, {f"{COUNTER}/symbol_error": "299"})
    assert read(node, networks, 180.0) == [("port-errors", "mlx5_1/1", 200)]
    write_files(node, {f"{COUNTER}/symbol_error": "301"})
    assert read(node, networks, 240.0) == [("port-errors", "mlx5_1/1", 202)]


def test_a_port_that_was_never_up_is_no_fault_and_one_that_comes_back_is_well(
    tmp_path: Path,
) -> None:
    down = {"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}
    write_files(tmp_path, make_ports(changes={0: down}))
    networks = Networks(tmp_path / "sys", every_s=0)
    assert read(tmp_path, networks, 1.0) == []
    write_files(tmp_path, make_ports(changes={0: down, 1: down}))
    assert read(tmp_path, networks, 2.0) == [("port-down", "mlx5_1/1", None)]
    write_files(tmp_path, make_ports(changes={0: down}))
    assert read(tmp_path, networks, 3.0) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({1: {"rate": "200 Gb/sec (4X HDR)"}}, ["mlx5_1/1"]),
        # Two and two: nothing tells which are slow.
        ({at: {"rate": "200 Gb/sec (4X HDR)"} for at in (1, 2)}, []),
        # A card for storage is of another make.
        ({1: {"rate": "100 Gb/sec (4X EDR)", "link_layer": "Ethernet"}}, []),
    ],
)
def test_a_port_is_slow_beside_its_equals(
    changes: dict[int, dict[str, str]], expected: list[str], tmp_path: Path
) -> None:
    write_files(tmp_path, make_ports(changes=changes))
    found = Networks(tmp_path / "sys").read(1.0)
    assert [one.values["part"] for one in found] == expected


def test_a_port_that_became_slower_is_slow_whatever_the_others_are(tmp_path: Path) -> None:
    write_files(tmp_path, {**make_ports(1), **make_ethernet()})
    networks = Networks(tmp_path / "sys", every_s=0)
    networks.read(1.0)
    write_files(
        tmp_path, {**make_ports(1, {0: {"rate": "100 Gb/sec"}}), **make_ethernet(speed="1000")}
    )
    assert [one.values["detail"] for one in networks.read(2.0)] == [
        "100 of 400 Gbit/s", "1 of 25 Gbit/s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (("25000", "25000", "10000"), [("eth2", "10 of 25 Gbit/s")]),
        (("25000", "10000", "10000", "25000"), []),
        (("25000", "10000"), []),
    ],
)
def test_ethernet_ports_have_equals(
    speeds: tuple[str, ...], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    for at, speed in enumerate(speeds):
        files = make_ethernet(speed=speed)
        write_files(tmp_path, {key.replace("ens1", f"eth{at}"): files[key] for key in files})
    found = Networks(tmp_path / "sys").read(1.0)
    assert [(one.values["part"], one.values["detail"]) for one in found] == expected


COUNTS = st.lists(
    st.dictionaries(
        st.sampled_from(sorted(PORT_ERRORS)),
        st.one_of(st.integers(0, 10**6).map(str), st.just("N/A"), st.just("-1"), st.just("")),
    ),
    max_size=5,
)


@given(COUNTS)
def test_no_counters_raise_and_none_grows_by_more_than_it_did(looks: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, make_ports())
        networks = Networks(folder / "sys", every_s=0)
        networks.read(1.0)
        most: dict[str, int] = {}
        last = {counter: 0 for counter in PORT_ERRORS} | {"link_downed": 1, "port_rcv_errors": 12}
        for at, counts in enumerate(looks):
            write_files(folder, {f"{COUNTER}/{key}": text for key, text in counts.items()})
            for counter, text in counts.items():
                if text.isdecimal():
                    most[counter] = most.get(counter, 0) + max(0, int(text) - last[counter])
                    last[counter] = int(text)
            for one in networks.read(2.0 + at):
                assert one.values["part"] == "mlx5_1/1"
                assert 0 < one.values["count"] <= most[one.values["detail"]]


def test_a_node_without_any_of_these_has_no_faults(tmp_path: Path) -> None:
    assert Networks(tmp_path).read(1.0) == []
