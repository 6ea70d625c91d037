"""Conf to plan: ranks, stages, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import (
    BASE,
    HETJOB,
    MORPH,
    MORPH_HETJOB,
    MORPH_MACHINES,
    MORPH_SPLIT,
    SINGLE,
    make_conf,
    make_plan,
)
from varuna_core.agent.meeting.link import compute_silence_s
from varuna_core.morph.layout import count_asked
from varuna_core.morph.node_daemon import linked_beat_s, poll_s
from varuna_core.records.plan import parse_plan, render_plan
from varuna_core.records.rank_map import decode_stage_map
from vjob.containers.runtime import ImageKind
from vjob.jobs.conf.schema import Container
from vjob.jobs.conf.world_size import build_groups
from vjob.jobs.schedulers.slurm.settings import judge_het_morph
from vjob.jobs.submit.build_plan import PlanContext, build_plan, build_stages, reserve_spare_nodes


def test_ranks_follow_the_groups_in_the_order_of_the_conf() -> None:
    plan = make_plan(make_conf(HETJOB))
    assert plan.world == 32
    assert list(plan.node(0).ranks) == [0, 1, 2, 3]
    assert plan.node(0).group.name == "master"
    assert list(plan.node(7).ranks) == [28, 29, 30, 31]
    assert plan.node_of_rank(4).index == 1


def test_a_run_on_a_list_of_machines_has_seats_for_all_that_may_come() -> None:
    plan = make_plan(make_conf(MORPH_MACHINES), scheduler="ssh")
    wide = reserve_spare_nodes(plan)
    assert (plan.num_nodes, wide.num_nodes, count_asked(wide)) == (4, 6, 4)
    assert [group.first_rank for group in wide.groups] == [0, 16]
    assert wide.machine_list == "/home/u/exp/machines"
    assert parse_plan(json.loads(render_plan(wide))) == wide
    assert reserve_spare_nodes(wide) == wide
    slurm = make_plan(make_conf(MORPH.replace("min_nodes: 2", "max_nodes: 6")))
    assert reserve_spare_nodes(slurm) == slurm


def test_replicas_of_a_stage_share_a_node_by_default() -> None:
    plan = make_plan(make_conf(HETJOB))
    stages = decode_stage_map(plan.stage_map)
    assert stages[0] == [0, 1, 2, 3]
    assert len(stages) == 8


def test_varunas_own_example_of_a_stage_map_comes_out_of_pipeline_order() -> None:
    assert build_stages(3, 2, "pipeline") == [[0, 3], [1, 4], [2, 5]]


@given(
    pipeline=st.integers(1, 6),
    data=st.integers(1, 6),
    order=st.sampled_from(["pipeline", "data"]),
)
def test_every_entry_holds_one_stage_and_one_replica(pipeline: int, data: int, order: str) -> None:
    stages = build_stages(pipeline, data, order)
    assert sorted(entry for stage in stages for entry in stage) == list(range(pipeline * data))
    assert {len(stage) for stage in stages} == {data}


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4))
def test_every_rank_has_one_node_and_nodes_and_ranks_agree(shape: list[tuple[int, int]]) -> None:
    lines = "".join(
        f"    - {{group: g{i}, count: {count}, ranks: {ranks}}}\n"
        for i, (count, ranks) in enumerate(shape)
    )
    text = f"name: x\nprogram: {{script: a.py}}\ncluster:\n  nodes:\n{lines}"
    plan = make_plan(make_conf(text))
    held = [rank for index in range(plan.num_nodes) for rank in plan.node(index).ranks]
    assert held == list(range(plan.world))
    assert all(rank in plan.node_of_rank(rank).ranks for rank in held)


def test_a_plan_survives_its_own_json() -> None:
    plan = make_plan(make_conf(HETJOB))
    assert parse_plan(json.loads(render_plan(plan))) == plan


def test_a_plan_with_a_container_survives_its_own_json() -> None:
    conf = make_conf(SINGLE)
    conf = replace(conf, container=Container(runtime="enroot", image="/img/a.sqsh"))
    plan = make_plan(conf, image_kind=ImageKind.SQUASHFS)
    assert [container.runtime for container in plan.containers] == ["enroot"]
    assert plan.command[0] == "python3"
    assert parse_plan(json.loads(render_plan(plan))) == plan


def test_arguments_that_look_like_fields_reach_the_ranks_as_they_are() -> None:
    """The agent fills `%{rank}` in; it did so in the user's own words too."""
    program = replace(make_conf(SINGLE).program, args=("%{rank}", "50%"))
    plan = make_plan(replace(make_conf(SINGLE), program=program))
    assert plan.command[-2:] == ("%{percent}{rank}", "50%")


def test_only_named_variables_pass_and_a_dry_run_does_without_a_missing_one() -> None:
    conf = replace(make_conf(SINGLE), pass_env=("HF_HOME",))
    here = PlanContext(
        run="r",
        scheduler="slurm",
        python="python3",
        base=str(BASE),
        user_id=1,
        environ={"HF_HOME": "/hf", "OTHER": "x"},
        folder="/log/r",
    )
    assert build_plan(conf, here).env == {"HF_HOME": "/hf"}
    assert build_plan(conf, replace(here, environ={})).env == {}


def test_ten_thousand_nodes_need_no_more_plan_than_two_groups() -> None:
    conf = make_conf(HETJOB)
    nodes = [replace(group, count=5000) for group in conf.cluster.nodes]
    assert len(build_groups(nodes)) == 2


@pytest.mark.parametrize("count", [1, 100, 1200, 1500, 10240])
def test_no_connection_is_silent_for_too_long_whatever_the_number_of_nodes(count: int) -> None:
    """A daemon that is on time may still wait for its next turn before it gives a sign of life."""
    conf = make_conf(MORPH)
    nodes = tuple(replace(group, count=count) for group in conf.cluster.nodes)
    plan = make_plan(replace(conf, cluster=replace(conf.cluster, nodes=nodes)))
    assert plan.num_nodes >= count
    latest_s = linked_beat_s(plan) + poll_s(plan)
    assert latest_s < compute_silence_s(plan.timing.lost_s) < plan.timing.lost_s


def test_groups_of_a_run_that_may_morph_are_jobs_of_their_own_unless_the_conf_says_otherwise() -> (
    None
):
    auto = MORPH_SPLIT.replace("  hetero: split\n", "")
    layouts = [make_plan(make_conf(text)).layout for text in (auto, MORPH_HETJOB, MORPH_SPLIT)]
    assert layouts == ["split", "hetjob", "split"]
    fixed = auto.replace("enabled: true, min_nodes: 2", "enabled: false")
    assert make_plan(make_conf(fixed)).layout == "hetjob"


def test_a_het_job_that_may_morph_comes_with_a_warning() -> None:
    for text, words in (
        (MORPH_HETJOB, "ends with the first node"),
        (MORPH_SPLIT, ""),
        (HETJOB, ""),
    ):
        said = judge_het_morph(make_plan(make_conf(text)))
        assert words in said and bool(words) == bool(said)


def test_a_tracked_run_has_an_id_of_its_own_and_its_conf_without_secrets() -> None:
    text = HETJOB + "track: {wandb: {project: p}, tensorboard: true}\nworkdir: /tok=hunter2\n"
    conf = make_conf(text.replace("script: train.py", "script: train.py, args: [--token, hunter2]"))
    track = make_plan(conf, "a-1").track
    assert track is not None and make_plan(conf, "a-1").track == track
    other = make_plan(conf, "a-2").track
    assert other is not None and other.id != track.id and track.id.startswith("a-1-")
    assert track.config["parallel.pipeline"] == 8
    assert track.config["cluster.nodes[1].gpus"] == "a10:4"
    assert "hunter2" not in str(track.config.get("program.args")) and "abc" not in str(track)
    assert not any(key.startswith(("env", "setup", "track")) for key in track.config)
    plan = make_plan(conf)
    assert parse_plan(json.loads(render_plan(plan))) == plan
    assert make_plan(make_conf(HETJOB)).track is None


def test_a_folder_that_is_seen_anyway_is_mounted_once() -> None:
    """podman refuses a second mount at the same place."""
    conf = make_conf(SINGLE)
    first = Container(runtime="podman", image="/img/a")
    named = replace(conf, container=first)
    (before,) = make_plan(named, image_kind=ImageKind.FOLDER).containers
    seen = [word.partition("source=")[2] for word in before.start if word.startswith("--mount=")]
    source = seen[0].partition(",")[0]
    again = replace(first, mounts=(f"{source}:{source}",))
    plan = make_plan(replace(conf, container=again), image_kind=ImageKind.FOLDER)
    assert plan.containers[0].start == before.start


def test_a_mount_of_the_conf_at_a_place_of_ours_stands_for_it() -> None:
    """Such as the working directory, only to be read; of two at one place the last counts."""
    conf = make_conf(SINGLE)

    def list_mounts(*mounts: str) -> list[str]:
        container = Container(runtime="podman", image="/img/a", mounts=mounts)
        plan = make_plan(replace(conf, container=container), image_kind=ImageKind.FOLDER)
        return [word for word in plan.containers[0].start if word.startswith("--mount=")]

    ours, *others = list_mounts()
    place = ours.partition("target=")[2]
    found = list_mounts(f"/else:{place}", f"{place}:{place}:ro", "/data:/data")
    assert found[0].startswith(f"{ours},")
    assert found[1:] == [*others, "--mount=type=bind,source=/data,target=/data"]
