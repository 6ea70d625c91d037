"""`vjob doctor --nodes` on the lab: a slow node, a bad disk and a slow link are named, none else.

The link of b4 is slow by a qdisc. The nodes of the lab share one machine's processors and
disk, so the slow processor and disk are staged in the Python of the probe: what a slow part does to
its figures, and not how it comes about.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob

pytestmark = pytest.mark.slurm

FAULTS = {
    "b1": """
        import hashlib, time
        real = hashlib.sha256
        def slow(data):
            begun = time.perf_counter()
            found = real(data)
            time.sleep(20 * (time.perf_counter() - begun))
            return found
        hashlib.sha256 = slow
    """,
    "b2": """
        import os, time
        real = os.fsync
        def slow(file):
            real(file)
            time.sleep(20)
        os.fsync = slow
    """,
}


def test_slow_parts_are_named_and_no_others(clean_lab: Lab, tmp_path: Path) -> None:
    vjob = Vjob(tmp_path, clean_lab.env)
    for node, code in FAULTS.items():
        (tmp_path / node).mkdir()
        lines = [line.removeprefix(" " * 8) for line in code.splitlines()]
        (tmp_path / node / "sitecustomize.py").write_text("\n".join(lines))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{tmp_path}/$VJOB_NODE:$PYTHONPATH"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    conf = {
        "name": "x",
        "program": {"command": [str(python), "-c", "pass"], "python": str(python)},
        "cluster": {
            "scheduler": "slurm",
            "nodes": [{"group": "all", "count": 4, "queue": "gpu2", "ranks": 1}],
        },
    }
    (tmp_path / "conf.yaml").write_text(json.dumps(conf))
    clean_lab.slow_link("b4", rate_mbit=200, latency_ms=50)
    found = json.loads(vjob("doctor", "--nodes", "conf.yaml", "--json", timeout_s=300).stdout)
    named = {
        (one["name"], one["text"].partition(":")[0])
        for one in found
        if one["status"] in ("warn", "fail")
    }
    expected = {
        ("processor", "b1"),
        ("disk of the run", "b2"),
        ("disk of the node", "b2"),
        ("links", "all 2 links of b4"),
    }
    others = {(name, of) for name, of in named - expected if "b4" not in of}
    assert named >= expected and not others, found  # its answers may take long too
