"""`auto` at submit: what is planned, what is left to the runtime, what plan.json says of it."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests.jobs.planning.test_plan_command import CONF, NAME, put_profile
from varuna_core.planner.search.space import SCHEDULES
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import make_run_folder
from varuna_core.schedule.costs import Costs
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.conf.schema import Parallel
from vjob.jobs.errors import ConfError, InputError
from vjob.jobs.planning.inputs import read_open_conf
from vjob.jobs.planning.plan_file import PlanFile, describe_partition
from vjob.jobs.planning.question import list_recomputes
from vjob.jobs.planning.resolve_auto import Chosen, choose_layout, resolve_conf
from vjob.jobs.submit.submit import prepare, write_run_folder
from vjob.shelf.commands.submit import choose_output


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(CONF)
    return path


def choose(conf: Path, overrides: Sequence[str]) -> Chosen:
    return choose_layout(read_open_conf(conf, overrides))


GIVEN = ["parallel.pipeline=4"]
OPEN = ["parallel.pipeline=auto"]


def test_an_open_layout_is_searched_for(conf: Path) -> None:
    put_profile(conf.parent)
    overrides = [*OPEN, "train.micro_batch_size=auto"]
    found = resolve_conf(conf, overrides)
    assert "planned at submit by profile" in found.chosen.why and found.chosen.prediction
    parallel = found.conf.parallel
    assert parallel.partition != "auto" and parallel.zero == 0
    assert parallel.tensor == 1, "a submit keeps what is not auto"
    kept = choose(conf, [*OPEN, "train.micro_batch_size=2"])
    assert kept.conf.train.micro_batch_size == 2


def test_the_planners_schedules_are_words_of_a_conf() -> None:
    """What is planned is not parsed again."""
    assert {*SCHEDULES, "zero_bubble"} <= set(get_args(get_type_hints(Parallel)["schedule"]))


def test_what_is_set_counts_over_a_plans_file(conf: Path) -> None:
    put_profile(conf.parent)
    given = PlanFile(settings={"parallel.pipeline": "2"}, prediction=None, why="a file")
    assert resolve_conf(conf, [], plan=given).conf.parallel.pipeline == 2
    found = resolve_conf(conf, ["parallel.pipeline=4"], plan=given)
    assert found.chosen.why == "a file" and found.conf.parallel.pipeline == 4
    found = resolve_conf(conf, OPEN, plan=given)
    assert found.chosen.prediction, "opened again, it is planned again"
    assert found.conf.parallel.pipeline != "auto"


def test_without_a_profile_an_open_layout_is_estimated_and_said_so(conf: Path) -> None:
    chosen = choose(conf, OPEN)
    assert chosen.conf.parallel.pipeline != "auto" and "an estimate" in chosen.why


def test_a_script_without_a_pipeline_is_told_nothing_of_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`planned: the program splits its model itself` means nothing to one who runs DDP."""
    path = tmp_path / "conf.yaml"
    (tmp_path / "train.py").write_text("")
    cluster = "cluster: {nodes: [{group: a, count: 1, ranks: 2}]}\n"
    path.write_text(f"name: a\nprogram: {{script: train.py}}\n{cluster}")
    assert choose(path, []).why == ""
    assert choose(path, ["parallel.pipeline=2"]).why == "the program splits its model itself"
    assert not caplog.records
    choose(path, ["parallel.pipeline=2", "parallel.profile=cost.json", "parallel.partition=auto"])
    assert "parallel.profile has no effect on this submit" in caplog.text


def test_a_partition_that_counts_embedding_and_head_is_explained(conf: Path) -> None:
    """3-5 was accepted for 6 layers, and the run printed 2-4."""
    layers = ["model.layers=6", "parallel.pipeline=2"]
    both = choose(conf, [*layers, "parallel.partition=3-5"]).conf
    assert describe_partition(both) == (
        "partition 3-5 has embedding and head; its layers are 2-4 of 6"
    )
    assert describe_partition(choose(conf, [*layers, "parallel.partition=2-4"]).conf) == ""


def test_what_cannot_be_left_open(conf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfError, match="global_batch_size"):
        read_conf(conf, [*OPEN, "train.global_batch_size=null"], environ={})
    script = tmp_path / "script.yaml"
    (tmp_path / "train.py").touch()
    script.write_text(
        "name: x\nprogram: {script: train.py}\nparallel: {pipeline: auto}\n"
        'train: {global_batch_size: 8}\ncluster: {nodes: [{group: a, gpus: "a10:4"}]}\n'
    )
    with pytest.raises(InputError, match="does not know the script's model"):
        choose(script, [])
    with pytest.raises(ConfError, match="program"):
        read_conf(script, environ={})
    with pytest.raises(InputError, match=r"not supported with parallel\.tensor above 1"):
        choose(conf, [*OPEN, "parallel.zero=3", "parallel.tensor=2"])


def test_a_given_layout_is_cut_by_its_profile(conf: Path) -> None:
    put_profile(conf.parent)
    read = read_open_conf(conf, GIVEN).conf
    chosen = choose(conf, GIVEN)
    cut = chosen.conf.parallel
    same = replace(cut, partition="auto", schedule="auto", recompute="auto")
    assert replace(chosen.conf, parallel=same) == read, "nothing else is changed"
    assert chosen.prediction is not None and len(chosen.prediction.stage_s) == 4
    counts = cut.partition.counts
    assert sum(counts) == 8
    assert counts[0] + counts[1] > counts[2] + counts[3], "the first node is the faster one"
    fixed = choose(conf, [*GIVEN, "parallel.schedule=gpipe", "parallel.recompute=full"])
    assert fixed.conf.parallel.schedule == "gpipe" and fixed.conf.parallel.recompute == "full"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (['cluster.nodes=[{group: a, count: 2, gpus: "a10:4"}]'], "no profile"),
        (["parallel.partition=2-2-1-1"], "gives the partition"),
        (["train.global_batch_size=null"], "global_batch_size"),
        (["parallel.order=pipeline"], "order pipeline"),
        (["parallel.schedule=interleaved", "parallel.zero=3"], "cannot be planned with zero 3"),
    ],
)
def test_else_the_runtime_balances(conf: Path, more: list[str], why: str) -> None:
    if why != "no profile":
        put_profile(conf.parent)
    chosen = choose(conf, [*GIVEN, *more])
    assert chosen.conf == read_open_conf(conf, [*GIVEN, *more]).conf and not chosen.prediction
    assert why in chosen.why


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_several_stages_a_rank_are_cut_by_a_profile(conf: Path, schedule: str) -> None:
    put_profile(conf.parent)
    chosen = choose(conf, [*GIVEN, "parallel.pipeline=2", f"parallel.schedule={schedule}"])
    parallel = chosen.conf.parallel
    counts = parallel.partition.counts
    assert parallel.schedule == schedule and parallel.pipeline == 2
    assert sum(counts) == 8 and len(counts) in ((4,) if schedule == "zbv" else (4, 6, 8))
    assert chosen.prediction is not None and len(chosen.prediction.stage_s) == len(counts)


@pytest.mark.parametrize("zero", [2, 3])
def test_shared_gradients_and_weights_are_cut_by_a_profile_too(conf: Path, zero: int) -> None:
    put_profile(conf.parent)
    chosen = choose(conf, [*GIVEN, f"parallel.zero={zero}"])
    assert chosen.prediction is not None and chosen.conf.parallel.zero == zero
    assert sum(chosen.conf.parallel.partition.counts) == 8


def test_unlike_gpus_are_cut_by_data_sheets_and_it_says_how_far_these_are_off(conf: Path) -> None:
    chosen = choose(conf, GIVEN)
    parallel = chosen.conf.parallel
    counts = parallel.partition.counts
    assert sum(counts) == 8 and counts[0] + counts[1] > counts[2] + counts[3]
    assert "data sheets, nothing was measured" in chosen.why
    assert re.search(r"in \d+ published runs its steps were off by -\d+ to \+\d+ %", chosen.why)
    assert chosen.prediction is not None and len(chosen.prediction.stage_s) == 4
    assert parallel.recompute == "auto", "no graph was measured: the runtime does that"
    assert choose(conf, [*GIVEN, "parallel.recompute=full"]).conf.parallel.recompute == "full"


def test_a_way_of_recompute_that_is_given_is_predicted_as_itself(conf: Path) -> None:
    given = [*GIVEN, "parallel.schedule=1f1b", "train={micro_batch_size: 2, global_batch_size: 64}"]
    found = {}
    for way in ("none", "full", "selective", "offload"):
        chosen = choose(conf, [*given, f"parallel.recompute={way}"])
        assert chosen.conf.parallel.recompute == way and chosen.prediction is not None
        found[way] = chosen.prediction
    took = {way: one.step_s or 0.0 for way, one in found.items()}
    assert 0 < took["none"] < took["selective"] < took["full"] and took["none"] < took["offload"]
    copies = Costs(**found["offload"].costs)
    assert max(copies.offload) > 0 and not any(copies.offload[-2:]), "the last two keep theirs"
    assert "offload" not in Costs(**found["none"].costs).as_json()


def test_a_profile_from_before_says_so_and_is_used_for_the_rest(conf: Path) -> None:
    path = put_profile(conf.parent)
    fields = json.loads(path.read_text())
    for gpu in fields["gpus"].values():
        del gpu["copies_beside"]
        for cell in gpu["cells"]:
            for name in ("selective_s", "kept_bytes", "offload_s", "load_s"):
                del cell[name]
    path.write_text(json.dumps(fields))
    assert choose(conf, [*GIVEN, "parallel.recompute=full"]).prediction is not None
    chosen = choose(conf, [*GIVEN, "parallel.recompute=offload"])
    assert chosen.prediction is None and chosen.conf.parallel.recompute == "offload"
    assert "has no times of recompute offload" in chosen.why
    with pytest.raises(InputError, match=r"no times of recompute selective: profile again"):
        choose(conf, [*OPEN, "parallel.recompute=selective"])


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ([], {"none", "full", "auto", "selective", "offload"}),
        (["train.compile=true"], {"none", "full", "auto", "offload"}),
        (["train.cuda_graphs=true"], {"none", "full", "auto", "selective"}),
        (["program={script: train.py}"], {"none", "full"}),
        (["cluster.nodes=[{group: a, gpus: 0, ranks: 4}]"], {"none", "full", "selective"}),
    ],
)
def test_a_plan_has_the_ways_that_the_program_has(
    conf: Path, more: list[str], left: set[str]
) -> None:
    assert set(list_recomputes(read_open_conf(conf, [*GIVEN, *more]).conf)) == left


def test_a_run_of_unlike_gpus_may_morph_by_data_sheets(conf: Path) -> None:
    morph = "morph={enabled: true}"
    given = [*GIVEN, morph, "cluster.hetero=split", "train.checkpoint={folder: /x, every: 10}"]
    chosen = choose(conf, given)
    assert chosen.layouts and chosen.layout_steps, chosen.why
    one_kind = 'cluster.nodes=[{group: a, count: 2, gpus: "a10:4"}]'
    assert choose(conf, [*given, one_kind]).layouts is None


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (['cluster.nodes=[{group: a, gpus: "a10:4"}, {group: b, gpus: "k80:4"}]'], "k80"),
        (
            ['cluster.nodes=[{group: a, gpus: "a10:4"}, {group: b, gpus: "t4:4"}, '
             '{group: c, ranks: 4}]'],
            "no GPUs",
        ),
        (["model.layers=400", "model.hidden=16384"], "fits"),
    ],
)  # fmt: skip
def test_without_an_estimate_the_runtime_balances_and_a_warning_says_why(
    conf: Path, caplog: pytest.LogCaptureFixture, more: list[str], problem: str
) -> None:
    chosen = choose(conf, [*GIVEN, *more])
    assert chosen.conf.parallel.partition == "auto" and problem in chosen.why
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and problem in record.getMessage()


def test_unlike_gpus_without_numpy_are_left_to_the_runtime(
    conf: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numpy" else find(name)
    )
    chosen = choose(conf, GIVEN)
    assert chosen.conf.parallel.partition == "auto"
    assert "pip install numpy" in chosen.why and "pip install numpy" in caplog.text


def test_replicas_may_straddle_nodes(conf: Path) -> None:
    """Three of a stage on nodes of four."""
    put_profile(conf.parent)
    nodes = 'cluster.nodes=[{group: a, count: 3, gpus: "a10:4"}]'
    chosen = choose(conf, [*GIVEN, nodes, "train.global_batch_size=12"])
    assert chosen.prediction is not None and len(chosen.prediction.stage_s) == 4


def test_a_conf_names_its_profile(conf: Path) -> None:
    """Relative to the conf's folder; `vjob profile` writes there."""
    elsewhere = conf.parent / "figures" / "of mine.json"
    elsewhere.parent.mkdir()
    named = [*GIVEN, "parallel.profile=figures/of mine.json"]
    with pytest.raises(InputError, match=r"of mine.json does not exist: `vjob profile` writes it"):
        choose(conf, named)
    put_profile(conf.parent).rename(elsewhere)
    assert "by an estimate" in choose(conf, GIVEN).why
    assert f"cut at submit by profile {elsewhere}" in choose(conf, named).why
    read = read_conf(conf, named, environ={})
    assert choose_output(read, conf.parent, None) == elsewhere


def test_a_stale_profile_is_not_used_and_said_so(
    conf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_profile(conf.parent, digest="other shapes")
    with caplog.at_level(logging.WARNING):
        chosen = choose(conf, GIVEN)
    assert chosen.conf.parallel.partition == "auto" and "other shapes" in chosen.why
    assert "is not used" in caplog.text
    with pytest.raises(InputError, match="other shapes"):
        choose(conf, OPEN)


def test_the_run_folder_holds_what_was_predicted(conf: Path, tmp_path: Path) -> None:
    put_profile(conf.parent)
    ready = prepare(resolve_conf(conf, GIVEN), for_preview=True)
    run = make_run_folder(tmp_path / "run")
    write_run_folder(ready, run)
    plan = read_plan(run.plan)
    assert plan is not None and plan.planned is not None and NAME in plan.planned
    prediction = plan.prediction
    assert prediction is not None and prediction.step_s and len(prediction.stage_s) == 4
    assert prediction.costs is not None
    costs = Costs(**prediction.costs)
    # A rank does its stage's work once for each micro-batch, and the costs are one micro-batch's.
    shares = {round(s / (f + b), 3) for s, f, b in
              zip(prediction.stage_s, costs.forward, costs.by_kind["B"], strict=True)}  # fmt: skip
    assert len(shares) == 1
    training = json.loads(run.training.read_text())
    assert training["partition"] == plan.partition
    assert training["schedule"] in ("1f1b", "gpipe", "varuna")
    assert training["recompute"] in ("none", "full")
