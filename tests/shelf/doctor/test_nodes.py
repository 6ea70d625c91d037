"""`vjob doctor --nodes`: who is named of equals, and a run of the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob
from vjob.shelf.doctor.nodes import judge

GOOD = {
    "cpu_mb_s": 500.0, "memory_mb_s": 9000.0, "run_disk_mb_s": 800.0, "node_disk_mb_s": 1500.0,
}  # fmt: skip


def make(count: int, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of nodes in a ring; changes by host, such as n2={"cpu_mb_s": 100.0}."""
    found = []
    for node in range(count):
        host, before = f"n{node}", (node - 1) % count
        link = {"a": before, "b": node, "us": 30.0, "link_mb_s": 1100.0}
        own = {"rank": node, "node": node, "host": host, "group": "g", "links": [link], **GOOD}
        found.append({**own, **changes.get(host, {})})
    return found


def name_troubles(results: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (one.name, one.text.partition(":")[0])
        for one in judge(results)
        if one.status in ("warn", "fail")
    ]


def test_equal_nodes_are_all_well() -> None:
    assert name_troubles(make(4)) == []


def slow_link(a: int, b: int) -> dict[str, Any]:
    return {"links": [{"a": a, "b": b, "us": 35.0, "link_mb_s": 90.0}]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n2": {"cpu_mb_s": 200.0}}, [("processor", "n2")]),
        ({"n1": {"node_disk_mb_s": 100.0}}, [("disk of the node", "n1")]),
        ({"n3": slow_link(2, 3)}, [("links", "n2 to n3")]),
        ({"n2": slow_link(1, 2), "n3": slow_link(2, 3)}, [("links", "all 2 links of n2")]),
        ({"n1": {"gpu_error": "CUDA error"}}, [("gpu", "rank 1 of n1")]),
        ({"n1": {"links": [{"a": 0, "b": 1, "error": "timed out"}]}}, [("links", "n0 to n1")]),
    ],
)
def test_the_odd_one_is_named_and_nobody_else(
    changes: dict[str, Any], named: list[tuple[str, str]]
) -> None:
    assert name_troubles(make(5, **changes)) == named


def test_a_slow_gpu_is_named_among_gpus_of_its_name() -> None:
    speeds = {0: 600.0, 1: 610.0, 2: 595.0, 3: 400.0}
    gpus = {
        f"n{node}": {"gpu": "H200", "index": 0, "tflop_s": speed} for node, speed in speeds.items()
    }
    slower_kind = {"n4": {"gpu": "A10", "index": 0, "tflop_s": 100.0}}
    assert name_troubles(make(5, **gpus, **slower_kind)) == [("matrix product", "GPU 0 of n3")]


def test_of_two_that_differ_none_is_blamed() -> None:
    found = judge(make(2, n1={"cpu_mb_s": 200.0}))
    (processor,) = [one for one in found if one.name == "processor"]
    assert processor.status == "note" and "which is slow is unknown" in processor.text


def test_one_alone_is_compared_with_nothing() -> None:
    (processor,) = [one for one in judge(make(1)) if one.name == "processor"]
    assert processor.status == "note" and "the only figure" in processor.text


def test_nodes_of_other_groups_are_no_equals() -> None:
    assert name_troubles(make(4, n3={"group": "other", "cpu_mb_s": 100.0})) == []


def test_the_nodes_of_a_conf_are_measured_by_a_run(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    conf = {
        "name": "x",
        "program": {"script": "train.py"},
        "cluster": {"scheduler": "local", "nodes": [{"group": "a", "count": 2, "ranks": 1}]},
    }
    (tmp_path / "train.py").touch()
    (tmp_path / "conf.yaml").write_text(json.dumps(conf))
    found = json.loads(vjob("doctor", "--nodes", "conf.yaml", "--json").stdout)
    names = {one["name"] for one in found}
    assert {"nodes", "processor", "memory", "disk of the run", "links"} <= names
    (folder,) = (tmp_path / "log").glob("doctor-x-*")
    (probe,) = folder.glob("attempt-*/probe.json")
    assert len(json.loads(probe.read_text())) == 2
