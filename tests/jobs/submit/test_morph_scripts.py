"""Scripts that morph: what their confs say to the manager, and each attempt to them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import BASE, make_conf, make_plan
from varuna_core.facts.partition import Partition
from varuna_core.morph.layout import AttemptPlan, build_attempt
from varuna_core.records.plan import Plan, read_plan, render_plan, write_plan
from varuna_core.records.rank_map import decode_stage_map
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import TrainingFacts
from vjob.jobs.conf.loading.check import check_conf
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.submit.scripts import render_batch

CONF = """
name: own
program: {script: train.py}
parallel: {pipeline: 4}
cluster:
  scheduler: local
  nodes: [{group: all, count: 4, ranks: 2}]
morph: {enabled: true}
"""
BATCH = ("train.global_batch_size", "train.micro_batch_size")
SIZES = "train: {global_batch_size: 16, micro_batch_size: 2}\n"


def find_facts(text: str, written: Collection[str] = ()) -> TrainingFacts:
    plan = make_plan(make_conf(text), written=written)
    assert plan.morphing is not None and plan.morphing.facts is not None
    return plan.morphing.facts


def attempt(plan: Plan, seats: Collection[int]) -> AttemptPlan:
    assert plan.morphing is not None and plan.morphing.facts is not None
    found = build_attempt(plan, plan.morphing.facts, sorted(seats))
    assert found is not None
    return found


def test_layers_are_those_of_the_partition_else_of_the_model() -> None:
    assert find_facts(CONF).layers is None
    cut = CONF.replace("pipeline: 4", "pipeline: 4, partition: 1-4-4-3")
    assert find_facts(cut).layers == 12
    model = "model: {layers: 8, hidden: 4, heads: 1}\n"
    assert find_facts(CONF + model).layers == 8
    assert find_facts(cut + model).layers == 12


def test_micro_batches_are_known_where_the_script_gets_both_sizes() -> None:
    assert find_facts(CONF + SIZES).micro_batches is None
    assert find_facts(CONF + SIZES, BATCH[:1]).micro_batches is None
    assert find_facts(CONF + SIZES, BATCH).micro_batches == 8
    arguments = 'args: ["${train.global_batch_size}", "${train.micro_batch_size}"]'
    referenced = CONF.replace("train.py}", "train.py, " + arguments + "}")
    assert find_facts(referenced + SIZES).micro_batches == 8


def test_the_run_knows_its_steps_and_checkpoints_where_the_script_does() -> None:
    train = "train: {steps: 7, checkpoint: {folder: ckpt}}\n"
    facts = find_facts(CONF + train)
    assert (facts.steps, facts.checkpoint_folder) == (None, str(BASE / "ckpt"))
    facts = find_facts(CONF.replace("train.py}", 'train.py, args: ["${train.steps}"]}') + train)
    assert (facts.steps, facts.is_own, facts.layout) == (7, True, "pipeline")


def test_a_script_may_end_on_one_node_long_before_the_others() -> None:
    """As where rank 0 exports the model."""
    for text, finish_s in (("", 600), ("  finish_s: 0\n", 0)):
        plan = make_plan(make_conf(CONF.replace("  scheduler", f"{text}  scheduler")))
        assert plan.morphing is not None and plan.morphing.finish_s == finish_s


def test_the_limits_of_a_run_that_morphs_are_those_of_its_conf() -> None:
    limits = "morph: {enabled: true, stop_s: 7, return_s: 8, manager_failures: 3}"
    built_in = """
program: pretrain_gpt
model: gpt2-small
data: {synthetic: true}
train: {checkpoint: {folder: ckpt}}
"""
    for program in ("program: {script: train.py}", built_in):
        text = CONF.replace("program: {script: train.py}", program)
        text = text.replace("morph: {enabled: true}", limits)
        conf = make_conf(text.replace("  scheduler", "  finish_s: 9\n  scheduler"))
        plan = make_plan(conf)
        asked = plan.morphing
        assert asked is not None
        assert (asked.stop_s, asked.return_s, asked.finish_s) == (7.0, 8.0, 9.0)
        batch = render_batch(conf, plan, RunFolder(Path("/runs/one")))
        assert 'while [ "$failures" -lt 3 ]; do' in batch


def test_no_ranks_wait_for_a_script() -> None:
    """They would import it, and what it does by then nobody knows."""
    plan = make_plan(make_conf(CONF))
    assert plan.morphing is not None and not plan.morphing.warm


@given(st.sets(st.integers(0, 3), min_size=1))
def test_without_layers_the_depth_stays_and_replicas_follow_the_nodes(seats: set[int]) -> None:
    plan = make_plan(make_conf(CONF))
    assert plan.morphing is not None and plan.morphing.facts is not None
    found = build_attempt(plan, plan.morphing.facts, sorted(seats))
    if len(seats) < 2:
        assert found is None, "two ranks are no pipeline of four"
    else:
        assert found is not None
        assert (found.plan.pipeline, found.plan.data) == (4, len(seats) * 2 // 4)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 20), st.integers(1, 12), st.data())
def test_a_partition_fits_each_attempt(
    count: int, ranks: int, layers: int, micro_batches: int, data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, min(layers, count * ranks)))
    cuts = [layers // depth] * (depth - 1)
    text = CONF.replace("count: 4, ranks: 2", f"count: {count}, ranks: {ranks}")
    partition = "-".join(map(str, [*cuts, layers - sum(cuts)]))
    text = text.replace("pipeline: 4", f'pipeline: {depth}, partition: "{partition}"')
    text += f"train: {{global_batch_size: {2 * micro_batches}, micro_batch_size: 2}}\n"
    plan = make_plan(make_conf(text), written=BATCH)
    seats = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    own = attempt(plan, seats).plan
    assert own.world == own.pipeline * own.data and own.partition is not None
    parts = Partition.parse(own.partition).counts
    assert len(parts) == own.pipeline and sum(parts) == layers and min(parts) >= 1
    if own.pipeline == depth:
        assert own.partition == partition
    else:
        assert max(parts) - min(parts) <= 1
    stages = decode_stage_map(own.stage_map)
    assert [len(stage) for stage in stages] == [own.data] * own.pipeline
    if len(seats) < count:
        assert own.data <= micro_batches


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_world_has_all_ranks_that_are_there(count: int, ranks: int, data: st.DataObject) -> None:
    text = CONF.replace("pipeline: 4", "pipeline: 1").replace("true}", "true, mode: world}")
    text = text.replace("count: 4, ranks: 2", f"count: {count}, ranks: {ranks}")
    seats = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    found = attempt(make_plan(make_conf(text)), seats)
    own = found.plan
    assert (own.world, own.data, own.pipeline) == (len(seats) * ranks, own.world, 1)
    assert found.seats == tuple(sorted(seats)) and found.idle == ()


REFERS = """
name: own
program: {script: train.py, args: ["--pp=${parallel.pipeline}", "%{x}", "$${", "${parallel.data}"]}
parallel: {pipeline: 4, partition: 1-2-3-2}
cluster:
  scheduler: local
  nodes: [{group: all, count: 4, ranks: 1, env: {PIECES: "${parallel.partition}/x"}}]
morph: {enabled: true}
env: {DEPTH: "${parallel.pipeline}", WIDE: "${parallel.tensor}"}
"""


def test_references_to_the_layout_follow_each_attempts_own(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", make_plan(make_conf(REFERS)))
    plan = read_plan(tmp_path / "plan.json")
    assert plan is not None
    for seats, depth, cuts in (((0, 1, 2, 3), 4, "1-2-3-2"), ((0, 1, 3), 3, "3-3-2")):
        own = attempt(plan, seats).plan
        given = (f"--pp={depth}", "%{percent}{x}", "${", "1")
        assert own.command[3:] == given
        assert own.env == {"DEPTH": str(depth), "WIDE": "1"}
        assert {group.env["PIECES"] for group in own.groups} == {f"{cuts}/x"}
    assert '"--pp=${parallel.pipeline}"' in render_plan(plan) and "u0000" not in render_plan(plan)
    fixed = make_plan(make_conf(REFERS.replace("enabled: true", "enabled: false")))
    assert fixed.command[3] == "--pp=4" and fixed.env["DEPTH"] == "4"


def test_a_reference_to_the_number_of_nodes_is_refused() -> None:
    text = CONF.replace("train.py}", 'train.py, args: ["${cluster.nodes[0].count}"]}')
    conf, lines = parse_conf_lines(text, "c", BASE, environ={})
    problems = [str(one) for one in check_conf(conf, lines, base=BASE, require_paths=False)]
    assert any("read VJOB_NUM_NODES in the script" in one for one in problems), problems
    conf, lines = parse_conf_lines(text.replace("true", "false"), "c", BASE, environ={})
    assert not list(check_conf(conf, lines, base=BASE, require_paths=False))


def test_a_plan_keeps_its_facts(tmp_path: Path) -> None:
    plan = make_plan(make_conf(CONF + SIZES), written=BATCH)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_built_in_program_has_its_facts_in_its_training() -> None:
    text = CONF.replace("{script: train.py}", "pretrain_gpt")
    text += "model: gpt2-small\ndata: {synthetic: true}\n"
    plan = make_plan(make_conf(text))
    assert plan.morphing is not None and plan.morphing.facts is None and plan.morphing.warm
