"""A training whose folder of checkpoints fills up on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Vjob, read_out, wait_for
from tests.small_disk import filled, mount_small
from tests.small_training import write_slow_steps, write_text
from varuna_core.records.checkpoints import list_complete
from varuna_core.records.runfolder import RunFolder

CONF = """
name: full
program: pretrain_gpt
model: {layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}
data: {prefix: text, split: "8,2,0"}
train:
  steps: 60
  global_batch_size: 16
  micro_batch_size: 2
  log_every: 1
  evaluate: {every: 0}
  checkpoint: {folder: ckpt, every: 5, keep: 2}
parallel: {pipeline: 2}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 5
  nodes: [{group: m, count: 1, ranks: 2}]
env: {OMP_NUM_THREADS: "1", PYTHONPATH: slow}
"""


@pytest.fixture
def vjob(tmp_path: Path) -> Iterator[Vjob]:
    pytest.importorskip("torch")
    write_text(tmp_path)
    write_slow_steps(tmp_path / "slow")
    with mount_small(tmp_path / "ckpt"):
        yield Vjob(tmp_path)


def find_step(run: RunFolder) -> int:
    steps = re.findall(r" iteration +(\d+)/", read_out(run, 0))
    return int(steps[-1]) if steps else 0


def test_saves_are_skipped_while_the_disk_is_full_and_the_run_completes(vjob: Vjob) -> None:
    """A full disk was the end of the attempt, and of three attempts within seconds."""
    store = vjob.folder / "ckpt"
    run = vjob.submit(CONF.replace("PYTHONPATH: slow", f"PYTHONPATH: {vjob.folder / 'slow'}"))

    def await_step(step: int) -> None:
        wait_for(lambda: find_step(run) >= step, 120, lambda: vjob.explain(run))

    wait_for(lambda: list_complete(store), 120, lambda: vjob.explain(run))
    with filled(store):
        first = find_step(run)
        await_step(first + 12)
        verdict = vjob.status("last")["verdict"]
        assert verdict["health"] == "FAILING", verdict
        assert f"no room in {store} (0.0 MB free)" in verdict["reason"], verdict
    record = vjob.wait_over(run, may_fail=True)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert len(run.attempts()) == 1
    assert list_complete(store)[-1].iteration == 60
    assert sorted(path.name for path in store.glob("*.partial")) == []
