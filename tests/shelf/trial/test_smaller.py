"""The conf of a try: what one node can hold of a run, and what of it is left as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vjob.jobs.conf.schema import (
    Checkpoint,
    Cluster,
    Container,
    Data,
    JobConf,
    Model,
    Morph,
    NodeGroup,
    Notify,
    Parallel,
    Program,
    Train,
)
from vjob.jobs.conf.world_size import get_world
from vjob.shelf.trial.smaller import Trial, keep_launch, shrink

HERE = Cluster(nodes=(NodeGroup(),), scheduler="local")


def conf(nodes: tuple[NodeGroup, ...], *, kind: Any = "pretrain_gpt", **sections: Any) -> JobConf:
    program = Program(kind=kind, path="/x/train.py" if kind == "script" else None)
    return JobConf(
        name="big",
        program=program,
        model=Model(layers=24, hidden=1024, heads=16) if kind != "script" else None,
        data=Data(prefix="/data/text") if kind != "script" else None,
        cluster=Cluster(nodes=nodes, restarts=3, requeue=True, walltime_min=600),
        morph=Morph(enabled=True),
        notify=Notify(mail="me@example.org"),
        **sections,
    )


def gpus(count: int, per_node: int = 4) -> tuple[NodeGroup, ...]:
    return (NodeGroup(group="all", count=count, queue="gpu", gpus=f"a100:{per_node}"),)


def shrink_on(found: JobConf, num_gpus: int, kind: str = "a100") -> Trial:
    node = replace(found.cluster.nodes[0], queue="debug", gpus=f"{kind}:{num_gpus}")
    one = replace(found.cluster, nodes=(node,))
    return shrink(found, one, limit_min=2, checkpoint="/ckpt/.try")


@pytest.mark.parametrize(("kind", "image", "most"), [
    ("script", None, 2 + 8), ("pretrain_gpt", None, 5 * 2 + 8), ("script", "a.sqsh", 2 + 8 + 10),
])  # fmt: skip
def test_the_time_limit_of_a_try_holds_all_that_it_may_take(
    kind: str, image: str | None, most: int
) -> None:
    found = conf(gpus(1), kind=kind, container=Container(image=image))
    assert shrink_on(found, 4).conf.cluster.walltime_min == most


def test_what_one_node_holds_whole_differs_in_nothing() -> None:
    found = conf(gpus(1), parallel=Parallel(pipeline=4), train=Train(global_batch_size=64))
    trial = shrink_on(found, 4)
    assert not trial.notes and not trial.is_small
    assert trial.conf.parallel == found.parallel
    assert trial.conf.train.global_batch_size == 64
    assert trial.conf.cluster.nodes[0].gpus == "a100:4"


def test_a_try_does_not_come_back_morph_or_call_anybody() -> None:
    trial = shrink_on(conf(gpus(1), parallel=Parallel(pipeline=4)), 4)
    cluster = trial.conf.cluster
    assert (cluster.restarts, cluster.requeue, cluster.walltime_min) == (None, False, 18)
    assert not trial.conf.morph.enabled and trial.conf.notify == Notify()
    assert trial.conf.name == "try-big"


def test_one_rank_of_many_is_not_started_as_one_alone() -> None:
    assert keep_launch(conf(gpus(2), kind="script"), "torchrun").program.launch == "torchrun"
    assert keep_launch(conf(gpus(2)), "torchrun").program.launch == "auto"


def test_replicas_go_before_stages() -> None:
    found = conf(gpus(8), parallel=Parallel(pipeline=4, data=8), train=Train(global_batch_size=256))
    trial = shrink_on(found, 8)
    assert (trial.conf.parallel.pipeline, trial.conf.parallel.data) == (4, 2)
    assert get_world(trial.conf) == 8
    assert trial.notes[0] == "2 of 8 replicas" and not trial.is_small
    # Eight micro-batches a replica, so that the schedule is filled, not thirty-two.
    assert trial.conf.train.global_batch_size == 2 * 8


def test_fewer_stages_where_the_node_has_fewer_gpus() -> None:
    found = conf(
        gpus(8),
        parallel=Parallel(pipeline=8, data=4, partition="0-4-4-4-4-4-4-0"),
        train=Train(global_batch_size=64),
    )
    trial = shrink_on(found, 4)
    assert (trial.conf.parallel.pipeline, trial.conf.parallel.data) == (4, 1)
    assert trial.conf.parallel.partition == "auto"
    assert trial.is_small and "4 stages in place of 8" in trial.notes[0]


@pytest.mark.parametrize(("pipeline", "data", "ranks"), [(8, 4, 8), (16, 2, 16), (1, 32, 8)])
def test_on_processors_all_stages_run_small(pipeline: int, data: int, ranks: int) -> None:
    found = conf(
        gpus(8),
        parallel=Parallel(pipeline=pipeline, data=data),
        train=Train(global_batch_size=64, precision="bf16"),
    )
    trial = shrink(found, HERE, limit_min=2, checkpoint=None)
    small = trial.conf
    assert get_world(small) == ranks and small.parallel.pipeline == pipeline
    assert small.cluster.nodes[0].gpus is None
    assert small.model is not None and small.model.layers == 24
    assert small.model.hidden < 1024 and small.model.hidden % small.model.heads == 0
    assert small.model.sequence == 1024  # of real data
    assert small.train.precision == "fp32"
    assert trial.is_small


def test_a_script_keeps_its_sizes_and_its_steps() -> None:
    train = Train(steps=9000, global_batch_size=64, checkpoint=Checkpoint(folder="/ckpt"))
    nodes = (NodeGroup(group="all", count=3, ranks=4),)
    found = conf(nodes, kind="script", train=train)
    trial = shrink(found, HERE, limit_min=2, checkpoint="/ckpt/.try")
    small = trial.conf
    assert get_world(small) == 6  # a divisor of twelve, at most eight
    assert (small.train.steps, small.train.global_batch_size) == (9000, 64)
    assert small.train.checkpoint.folder == "/ckpt/.try"
    assert small.program == found.program


def test_a_built_in_program_does_two_steps_on_its_own_curve() -> None:
    found = conf(gpus(1), parallel=Parallel(pipeline=4), train=Train(steps=9000))
    trial = shrink_on(found, 4)
    train = trial.conf.train
    assert (train.steps, train.schedule.decay_steps, train.log_every) == (2, 9000, 1)
    assert (train.evaluate.every, train.evaluate.steps) == (2, 1)


def test_other_gpus_than_the_confs_are_told() -> None:
    trial = shrink_on(conf(gpus(1), parallel=Parallel(pipeline=4)), 4, "t4")
    assert trial.is_small and any("t4" in note for note in trial.notes)


def test_ranks_of_unlike_groups_share_the_first_ones_node() -> None:
    first = NodeGroup(group="a", queue="gpu1", gpus="a100:4", env={"X": "1"})
    second = replace(first, group="b", count=2, queue="gpu2", gpus="a10:2", env={"X": "2"})
    found = conf((first, second), parallel=Parallel(pipeline=2, data=4))
    one = replace(found.cluster, nodes=(first,))
    trial = shrink(found, one, limit_min=2, checkpoint=None)
    (group,) = trial.conf.cluster.nodes
    assert (group.queue, group.gpus, group.num_ranks, group.count) == ("gpu1", "a100:4", 4, 1)
    assert "ranks have the env of group a" in trial.notes
    assert "ranks of a10 run on a100" in trial.notes and trial.is_small


def test_ranks_that_a_morphing_run_leaves_over_are_not_tried() -> None:
    nodes = (NodeGroup(group="all", count=5, ranks=1),)
    found = conf(nodes, parallel=Parallel(pipeline=2), train=Train(global_batch_size=10))
    small = shrink(found, HERE, limit_min=2, checkpoint=None).conf
    assert (get_world(small), small.parallel.pipeline, small.parallel.data) == (4, 2, 2)
    assert small.train.global_batch_size is not None
    assert small.train.global_batch_size % 2 == 0
