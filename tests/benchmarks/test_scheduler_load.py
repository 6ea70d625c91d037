"""How much vjob asks of the controller, counted by Slurm's own `sdiag` on the lab.

The long form is `python -m benchmarks.commands.scheduler_load`, with ten real viewers for a minute;
here the minute of ten viewers goes by a clock that is set on.
"""

from __future__ import annotations

import time
import types
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.commands import scheduler_load as load
from tests import ROOT
from tests.cluster.lab import Lab
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.readers.job_reader import open_reader
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.slurm import scheduler as slurm

pytestmark = pytest.mark.slurm


@pytest.fixture
def bench(clean_lab: Lab, tmp_path: Path) -> load.Bench:
    return load.Bench(clean_lab, ROOT, tmp_path)


def hold(name: str, found: Counter[str]) -> None:
    assert 0 < found.total() <= load.BUDGETS[name], (name, found)


def test_a_submit_and_the_cancel_of_a_job_that_waits(bench: load.Bench) -> None:
    hold("submit", load.measure_submit(bench))
    hold("submit of two jobs", load.measure_two(bench))
    hold("cancel of a job that waits", load.measure_cancel_of_pending(bench))


def test_the_cancel_of_a_job_that_runs(bench: load.Bench) -> None:
    hold("cancel of a job that runs", load.measure_cancel_of_running(bench))


def test_viewers_and_tend(bench: load.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = bench.submit(load.RUNS), Counter[str]()
    bench.wait_running(run)
    for name, value in bench.env.items():
        monkeypatch.setenv(name, value)
    late, stepped = 0.0, types.ModuleType("time")
    vars(stepped).update({**vars(time), "time": lambda: time.time() + late})
    monkeypatch.setattr(broker, "time", stepped)
    monkeypatch.setattr(slurm, "time", stepped)
    with bench.count(found):
        monkeypatch.setenv("XDG_STATE_HOME", bench.env["XDG_STATE_HOME"])
        readers = [open_reader(run, RunFolder(Path(run)).path) for _ in range(10)]
        for _ in range(30):
            for reader in readers:
                broker._memory.clear()  # as processes of their own
                jobs = reader.read().scheduler.jobs
                assert [job.state for job in jobs] == ["RUNNING"]
            late += 2.0
    hold("a minute of ten viewers", found)
    broker._memory.clear()
    for look_s in (60, 10):
        found.clear()
        with bench.count(found):
            load.run_tend(bench, run, look_s)
        hold("an hour of tend", found)
