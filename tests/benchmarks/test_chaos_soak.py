"""The soak's slopes and page, and a short one: nothing may grow with each attempt."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.faults import ANYWHERE
from benchmarks.chaos.soak import (
    ENDS_DAEMONS,
    classify,
    count_files,
    deal_kinds,
    fit_slope,
    read_samples,
    render_page,
    sample_processes,
)
from benchmarks.chaos.testbed import Testbed
from tests.cluster.processes import send_signal
from tests.command import wait_for
from varuna_core.morph.orders import read_orders
from varuna_core.records.runfolder import RunFolder

SCRIPT = """
import os, time
from pathlib import Path

place = Path("place")
step = int(place.read_text()) if place.exists() else 0
while True:
    step += 1
    if os.environ["RANK"] == "0":
        Path("place.part").write_text(str(step))
        os.replace("place.part", place)
        print(f"step {step}/1000000 loss 1.0", flush=True)
    time.sleep(0.1)
"""
CONF = """
name: soak
program: {script: train.py, snapshot: none}
cluster:
  scheduler: local
  grace_s: 5
  nodes: [{group: all, count: 2, ranks: 1}]
morph: {enabled: true, layout: world, max_nodes: 2}
"""


@given(
    slope=st.floats(-100, 100),
    levels=st.lists(st.floats(-1000, 1000), min_size=2, max_size=4),
)
def test_processes_with_levels_of_their_own_have_one_slope(
    slope: float, levels: list[float]
) -> None:
    series = [[(x / 4, level + slope * x / 4) for x in range(9)] for level in levels]
    found = fit_slope(series)
    assert found is not None
    assert found.value == pytest.approx(slope, abs=1e-6)
    assert found.error == pytest.approx(0, abs=1e-3)


def test_a_constant_has_no_clear_slope_and_two_points_have_none() -> None:
    found = fit_slope([[(x, 6.0) for x in range(10)]])
    assert found is not None and not found.is_clear
    assert fit_slope([[(0.0, 1.0), (1.0, 2.0)]]) is None


@given(seed=st.integers(), count=st.integers(1, 60))
def test_what_lives_long_is_ended_in_the_last_quarter_only(seed: int, count: int) -> None:
    found = deal_kinds(seed, count, ANYWHERE)
    assert len(found) == count and found == deal_kinds(seed, count, ANYWHERE)
    assert not set(found[: count * 3 // 4]) & set(ENDS_DAEMONS)


def test_processes_are_known_by_their_command_lines() -> None:
    run = RunFolder(Path("/somewhere/run"))
    agent = ["python3", str(run.agent)]
    assert classify([*agent, "morph", "manage", "--run", str(run.path)], run) == "manager"
    assert classify([*agent, "morph", "stay", "--run", str(run.path)], run) == "stay"
    assert classify([*agent, "node", "--run", str(run.path)], run) == "agent"
    assert classify([*agent, "morph", "standby", "--run", str(run.path)], run) == "agent"
    assert classify(["python", "/x/vjob", "tend", str(run.path)], run) == "tend"
    assert classify(["tail", "-f", "/elsewhere"], run) is None


def test_a_soak_that_was_cut_off_has_a_page(tmp_path: Path) -> None:
    lines = []
    for s in range(0, 900, 30):
        process = {"kind": "manager", "who": "7.1", "age": s, "rss": 2**20 * 24, "descriptors": 6}
        folder = {"folder": "attempts", "files": s // 10, "bytes": s, "attempts": 1 + s // 100}
        lines += [{"soak": "one", "s": s, **process}, {"soak": "one", "s": s, **folder}]
    lines.append({"soak": "one", "s": 300, "fault": "kill rank", "number": 0, "said": "killed"})
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "samples").write_text(f"{text}\n" + '{"soak": "one", "s": 601, "ki')
    page = render_page(read_samples(tmp_path / "samples"))
    assert "| manager | 1 | 14 | 24.0 | 0.00 ± 0.00 | 0.00 ± 0.00 |" in page
    assert "Faults that hit: kill rank 1." in page


@pytest.mark.slow
def test_attempts_leave_no_descriptors_and_no_files_outside_their_folders(tmp_path: Path) -> None:
    testbed = Testbed(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = testbed.adopt(testbed.vjob.submit(CONF))

    def explain() -> str:
        return testbed.vjob.explain(run)

    def measure(attempt: int) -> tuple[Counter[str], int, int]:
        """Count what is there once the attempt trains."""

        def trains() -> bool:
            orders = read_orders(run.morph)
            return orders is not None and orders.attempt == attempt and orders.trained

        wait_for(trains, 120, explain)
        looks = [sample_processes(run, {}) for _ in range(20)]  # a file is open now and then
        least: dict[tuple[str, str], int] = {}
        for one in (one for look in looks for one in look if one["kind"] in ("manager", "stay")):
            who = (one["kind"], one["who"])
            least[who] = min(least.get(who, 10**6), one["descriptors"])
        descriptors: Counter[str] = Counter()
        for (kind, _), count in least.items():
            descriptors[kind] += count
        outside = count_files(run.path, lambda name: name.startswith(("attempt-", ".")))[0]
        return descriptors, outside, count_files(run.attempt(attempt).path)[0]

    try:
        found = []
        for attempt in range(4):
            found.append(measure(attempt))
            (first, *_) = testbed.find_ranks(testbed.list_nodes()[0])
            send_signal(first, signal.SIGKILL)
        assert found[1:] == [found[1]] * 3
        assert found[0][0] == found[1][0], "descriptors of what lives on"
    finally:
        testbed.vjob("cancel", str(run.path), "--now", code=None)
        testbed.vjob.wait_over(run, 60, may_fail=True)
