"""Two real ranks of gloo, one of which misses a collective."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.jobs.programs.free_port import find_free_port
from varuna_core.hang.flight import find_gap, read_flight

STARTUP = ROOT / "varuna_core/trace/startup"
RANK = Path(__file__).with_name("gloo_rank.py")


def test_the_missing_rank_and_collective_are_named_and_no_other(tmp_path):
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks, port = [], str(find_free_port())
    for rank in ("0", "1"):
        env = {**os.environ, **world, "MASTER_PORT": port, "RANK": rank}
        words = [sys.executable, str(RANK), str(STARTUP), str(tmp_path)]
        ranks.append(subprocess.Popen(words, env=env))
    assert [process.wait(120) for process in ranks] == [0, 0]
    found = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)}
    flights = {rank: read_flight(one["flight"]) for rank, one in found.items()}
    if None in flights.values():
        pytest.skip("this torch has no Flight Recorder for gloo")
    gap = find_gap(flights, 2)
    assert (gap.name, gap.number, gap.called_by, gap.missing) == ("all_reduce", 4, (0,), (1,))
    assert gap.group == "default_pg" and gap.other == ""
    main = next(one for one in found[0]["threads"] if one["thread_name"] == "MainThread")
    assert "distributed_c10d.py" in " ".join(one["filename"] for one in main["frames"])
