"""On the real Slurm of the lab: scripts of a user's own go on with other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob, wait_for
from tests.jobs.elastic.test_morph_scripts import (
    ALONE,
    DDP,
    VARUNA,
    assert_tracked_once,
    has_done,
    let_run,
    list_plans,
    read_losses,
    train_alone,
)
from tests.small_training import list_morphs
from varuna_core.records.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

CLUSTER = """  scheduler: slurm
  lost_s: 15
"""
GROUP = "group: all, count: 4, queue: gpu2"
CUT = "pipeline: 3, partition: 1-1-2"
GROUPS = """
    - {group: one, queue: gpu1, gpus: "a100:1"}
    - {group: two, count: 2, queue: gpu2, gpus: "a10:1"}"""


def put_in_lab(text: str, steps: int) -> str:
    text = text.replace("  scheduler: local\n", CLUSTER).replace("group: all, count: 4", GROUP)
    return text.replace("STEPS", str(steps))


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    pytest.importorskip("torch", reason="torch is not installed")
    clean_lab.wait_idle()
    return Vjob(tmp_path, clean_lab.env)


@pytest.mark.long
def test_a_ddp_script_loses_two_nodes_and_gets_two(
    clean_lab: Lab, vjob: Vjob, tmp_path: Path
) -> None:
    let_run(tmp_path, 25)
    run = vjob.submit(put_in_lab(DDP, 100))
    wait_for(lambda: has_done(run, 25), 180, lambda: vjob.explain(run))
    victims = [read_json(run.morph.node(seat))["host"] for seat in (3, 2)]
    for victim in victims:
        clean_lab.crash_node(victim)
    wait_for(lambda: list_plans(run)[-1].world == 2, 180, lambda: vjob.explain(run))
    let_run(tmp_path, 50)
    wait_for(lambda: has_done(run, 50), 180, lambda: vjob.explain(run))
    vjob("grow", run.name, "--count", "2", "--queue", "gpu1")
    wait_for(lambda: list_plans(run)[-1].world == 4, 180, lambda: vjob.explain(run))
    let_run(tmp_path, 100)
    record = vjob.wait_over(run, 300)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert any(victim in morph["reason"] for victim in victims for morph in list_morphs(run))
    # A rank that torch aborts as it ends costs one more attempt, which is not looked at here.
    assert "2 more nodes are here" in [morph["reason"] for morph in list_morphs(run)]
    worlds = [plan.world for plan in list_plans(run)]
    assert worlds[0] == worlds[-1] == 4 and 2 in worlds
    alone = train_alone(tmp_path / "alone", "ddp_script.py", 100)
    assert read_losses(run) == pytest.approx(alone, rel=1e-9) and len(alone) == 100


@pytest.mark.long
def test_a_varuna_script_goes_on_without_a_lost_node(
    clean_lab: Lab, vjob: Vjob, tmp_path: Path
) -> None:
    let_run(tmp_path, 25)
    run = vjob.submit(put_in_lab(VARUNA, 60))
    wait_for(lambda: has_done(run, 25), 180, lambda: vjob.explain(run))
    victim = read_json(run.morph.node(3))["host"]
    clean_lab.crash_node(victim)
    let_run(tmp_path, 60)
    record = vjob.wait_over(run, 300)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    (morph,) = list_morphs(run)
    assert (morph["from"], morph["to"], morph["iteration"]) == ("4 x 1", "3 x 1", 20)
    assert victim in morph["reason"]
    assert list_plans(run)[-1].partition == "1-2-1"
    alone = train_alone(tmp_path / "alone", "varuna_script.py", 60, **ALONE)
    assert read_losses(run) == pytest.approx(alone, rel=2e-5) and len(alone) == 60
    assert_tracked_once(run, 60)


@pytest.mark.long
def test_groups_are_split_jobs_and_the_rest_is_cut_by_its_speed(
    clean_lab: Lab, vjob: Vjob, tmp_path: Path
) -> None:
    """By data sheets: in fp32 an A10 does more than an A100."""
    text = put_in_lab(VARUNA, 60).replace("pipeline: 4, partition: 1-1-1-1", CUT)
    group = text[text.index("[{group: all") : text.index("}]") + 2]
    let_run(tmp_path, 25)
    run = vjob.submit(text.replace(group, GROUPS))
    wait_for(lambda: has_done(run, 25), 180, lambda: vjob.explain(run))
    record = read_json(run.record)
    assert (record["layout"], len(record["jobs"])) == ("split", 2)
    victim = read_json(run.morph.node(2))["host"]
    clean_lab.crash_node(victim)
    let_run(tmp_path, 60)
    assert vjob.wait_over(run, 300)["verdict"] == "COMPLETED", vjob.explain(run)
    plans = list_plans(run)
    assert [plan.partition for plan in plans] == ["1-1-2", "1-3"]
    assert plans[-1].planned == "planned at submit for these nodes"
    alone = train_alone(tmp_path / "alone", "varuna_script.py", 60, **ALONE)
    assert read_losses(run) == pytest.approx(alone, rel=2e-5) and len(alone) == 60
