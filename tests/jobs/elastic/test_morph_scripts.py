"""Scripts of a user's own that lose nodes and get some: DDP by itself, and one of Varuna's."""

from __future__ import annotations

import os
import re
import signal
from itertools import groupby
from pathlib import Path

import pytest

from tests import ROOT
from tests.command import PROGRAMS, Forked, Vjob, read_out, wait_for
from tests.small_training import list_morphs
from tests.varuna_core.agent.track.readers import read_tensorboard
from varuna_core.records.files import read_json
from varuna_core.records.plan import Plan, read_attempt_plan
from varuna_core.records.record import read_events
from varuna_core.records.runfolder import RunFolder

DDP = f"""
name: ddp
program: {{script: {PROGRAMS / "ddp_script.py"}, args: ["STEPS"], snapshot: none}}
cluster:
  scheduler: local
  walltime_min: 10
  grace_s: 5
  join_s: 60
  nodes: [{{group: all, count: 4, ranks: 1}}]
morph: {{enabled: true, mode: world, max_nodes: 4}}
track: {{tensorboard: true}}
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: {ROOT}}}
"""
VARUNA = f"""
name: staged
program: {{script: {PROGRAMS / "varuna_script.py"}, args: ["STEPS"], snapshot: none}}
train: {{global_batch_size: 8, micro_batch_size: 2, checkpoint: {{folder: ckpt}}}}
parallel: {{pipeline: 4, partition: 1-1-1-1, schedule: 1f1b}}
cluster:
  scheduler: local
  walltime_min: 10
  grace_s: 5
  join_s: 60
  nodes: [{{group: all, count: 4, ranks: 1}}]
morph: {{enabled: true}}
track: {{tensorboard: true}}
env: {{OMP_NUM_THREADS: "1", PYTHONPATH: {ROOT}}}
"""
ALONE = {
    "VJOB_STAGE_MAP": "0;",
    "VJOB_GLOBAL_BATCH_SIZE": "8",
    "VJOB_MICRO_BATCH_SIZE": "2",
    "VJOB_CHECKPOINT": "ckpt",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def vjob(tmp_path: Path) -> Vjob:
    pytest.importorskip("torch", reason="torch is not installed")
    return Vjob(tmp_path)


def let_run(folder: Path, step: int) -> None:
    """Let the training go on to this step, and wait there."""
    (folder / "limit.part").write_text(str(step))
    os.replace(folder / "limit.part", folder / "limit")


def read_losses(run: RunFolder) -> dict[int, float]:
    """The loss of each step that led to the final weights: of repeated steps the last."""
    found: dict[int, float] = {}
    for attempt in run.attempts():
        if read_attempt_plan(run, attempt.number) is not None:  # its plan comes after its folder
            found.update(parse_losses(read_out(run, attempt.number)))
    return found


def parse_losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/.* loss (\S+)", text)}


def has_done(run: RunFolder, step: int) -> bool:
    return max(read_losses(run), default=0) >= step


def kill_node(run: RunFolder, seat: int) -> None:
    os.kill(read_json(run.morph.node(seat))["pid"], signal.SIGKILL)


def list_plans(run: RunFolder) -> list[Plan]:
    plans = [read_attempt_plan(run, attempt.number) for attempt in run.attempts()]
    return [plan for plan in plans if plan is not None]


def train_alone(folder: Path, script: str, steps: int, **own: str) -> dict[int, float]:
    """The losses of a run that nothing disturbs, of one process."""
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = Forked("ranks", str(PROGRAMS / script), [str(steps)], folder, env).finish(300)
    assert done.returncode == 0, done.stderr
    return parse_losses(done.stdout)


def assert_tracked_once(run: RunFolder, num_steps: int) -> None:
    """All attempts are one run in TensorBoard: no step is missing, none is there twice."""
    scalars = read_tensorboard(run.tensorboard)
    assert [step for step, _ in scalars["loss"]] == [*range(1, num_steps + 1)]
    plans = [attempt.number for attempt in run.attempts() if read_attempt_plan(run, attempt.number)]
    trained = sum(len(parse_losses(read_out(run, number))) for number in plans)
    assert len(scalars.get("repeated/loss", [])) == trained - num_steps
    said = [event["said"] for event in read_events(run) if event["kind"] == "tracking"]
    assert said == []


@pytest.mark.long
def test_a_ddp_script_goes_from_four_ranks_to_two_to_four(vjob: Vjob, tmp_path: Path) -> None:
    let_run(tmp_path, 25)
    run = vjob.submit(DDP.replace("STEPS", "100"))
    wait_for(lambda: has_done(run, 25), 120, lambda: vjob.explain(run))
    kill_node(run, 3)
    kill_node(run, 2)
    let_run(tmp_path, 50)
    wait_for(lambda: has_done(run, 50), 120, lambda: vjob.explain(run))
    vjob("grow", "last", "--count", "2")
    wait_for(lambda: list_plans(run)[-1].world == 4, 120, lambda: vjob.explain(run))
    let_run(tmp_path, 100)
    record = vjob.wait_over(run, 300)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    plans = list_plans(run)
    # A start at the same size may be repeated: rank 0's port can be taken by then.
    worlds = [world for world, _ in groupby(plan.world for plan in plans)]
    assert worlds in ([4, 2, 4], [4, 3, 2, 4]), (worlds, vjob.explain(run))
    assert all((plan.pipeline, plan.data) == (1, plan.world) for plan in plans)
    assert "2 more nodes are here" in [morph["reason"] for morph in list_morphs(run)]
    alone = train_alone(tmp_path / "alone", "ddp_script.py", 100)
    assert read_losses(run) == pytest.approx(alone, rel=1e-9) and len(alone) == 100
    assert_tracked_once(run, 100)


@pytest.mark.long
def test_a_varuna_script_loses_a_node_and_goes_on_with_another_depth(
    vjob: Vjob, tmp_path: Path
) -> None:
    let_run(tmp_path, 25)
    run = vjob.submit(VARUNA.replace("STEPS", "60"))
    wait_for(lambda: has_done(run, 25), 120, lambda: vjob.explain(run))
    kill_node(run, 3)
    let_run(tmp_path, 60)
    record = vjob.wait_over(run, 300)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    plan = list_plans(run)[-1]
    assert (plan.pipeline, plan.data, plan.partition) == (3, 1, "1-2-1")
    (morph,) = list_morphs(run)
    assert (morph["from"], morph["to"], morph["iteration"]) == ("4 x 1", "3 x 1", 20)
    alone = train_alone(tmp_path / "alone", "varuna_script.py", 60, **ALONE)
    assert read_losses(run) == pytest.approx(alone, rel=2e-5) and len(alone) == 60
    assert_tracked_once(run, 60)


@pytest.mark.long
def test_a_varuna_script_of_unknown_layers_keeps_its_depth(vjob: Vjob, tmp_path: Path) -> None:
    """Two replicas of two stages, then one: asked to save where a node is to leave."""
    let_run(tmp_path, 25)
    text = VARUNA.replace("pipeline: 4, partition: 1-1-1-1", "pipeline: 2")
    run = vjob.submit(text.replace("STEPS", "60"))
    wait_for(lambda: has_done(run, 25), 120, lambda: vjob.explain(run))
    vjob("shrink", "last", "--node", "local1")
    let_run(tmp_path, 60)
    record = vjob.wait_over(run, 300)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    assert [(plan.pipeline, plan.data) for plan in list_plans(run)] == [(2, 2), (2, 1)]
    alone = train_alone(tmp_path / "alone", "varuna_script.py", 60, **ALONE)
    assert read_losses(run) == pytest.approx(alone, rel=2e-5) and len(alone) == 60


def test_a_cancelled_script_saves_and_its_run_is_over(vjob: Vjob, tmp_path: Path) -> None:
    let_run(tmp_path, 25)
    run = vjob.submit(DDP.replace("STEPS", "100").replace("count: 4", "count: 2"))
    wait_for(lambda: has_done(run, 25), 120, lambda: vjob.explain(run))
    said = vjob("cancel", "last").stdout
    assert "left" in said, said
    record = vjob.wait_over(run, 120)
    assert record["outcome"]["code"] == 0, vjob.explain(run)
    assert [attempt.number for attempt in run.attempts()] == [0]
    last = max(read_losses(run))
    let_run(tmp_path, 40)
    run = vjob.submit(DDP.replace("STEPS", "40").replace("count: 4", "count: 1"))
    assert vjob.wait_over(run, 120)["verdict"] == "COMPLETED", vjob.explain(run)
    assert min(read_losses(run)) == last + 1, "from where it was saved"
