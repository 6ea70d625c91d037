"""Actions of `vjob watch` on a job of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.cluster.test_jobs import conf, wait_ready
from tests.command import Vjob
from tests.shelf.watch.test_watch import make_snapshot
from varuna_core.facts.finding import Finding
from varuna_core.records.record import read_record
from vjob.jobs.monitor.model.snapshot import Health, Verdict
from vjob.shelf.watch.desk import act, check_actions, parse_action
from vjob.shelf.watch.watch import Notice

pytestmark = pytest.mark.slurm

PAIR = "    - {group: pair, count: 2, queue: gpu2, ranks: 2}"


@pytest.mark.parametrize("layout", ["single", pytest.param("hetjob", marks=pytest.mark.long)])
def test_a_requeue_starts_the_same_job_anew(
    clean_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    for name, value in clean_lab.env.items():
        monkeypatch.setenv(name, value)
    vjob = Vjob(tmp_path, clean_lab.env)
    nodes = PAIR if layout == "single" else None
    text = conf("fail_as_told.py", ["-1", "hang"], layout=layout, requeue=True, nodes=nodes)
    run = vjob.submit(text)
    world = 4 if layout == "single" else 16
    wait_ready(vjob, run, world)
    record = read_record(run)
    assert record is not None
    action = parse_action("STALLED=requeue")
    check_actions([action], record)
    verdict = Verdict(health=Health.STALLED, reason="no step", main=Finding("stalled"))
    notice = Notice(news="STALLED", snapshot=make_snapshot(run.path), verdict=verdict)
    assert "is requeued" in act(action, notice, run, record, lambda text: None)
    wait_ready(vjob, run, world, attempt=1)
