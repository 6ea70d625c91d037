"""What a script leaves out is the conf's; what it says wins, unless both cannot be."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.monitor.builders import healthy
from tests.models.small import Gpt, make_inputs
from tests.reports.traces import write_simulated
from varuna_core import Varuna
from varuna_core.facts.partition import Partition
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import VARIABLES
from varuna_core.runtime.arguments import (
    DEPRECATED,
    FROM_CONF,
    ConfArguments,
    Options,
    take_deprecated,
)
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.jobs.monitor.model.text import render
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job
from vjob.reports.page.sections import build_sections

LAYOUT = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "VJOB_STAGE_MAP": "0,1;2,3;",
    "VJOB_PIPELINE": "2",
    "VJOB_DATA": "2",
    "VJOB_TENSOR": "1",
}
FLAT = {**LAYOUT, "VJOB_STAGE_MAP": "0,1,2,3;", "VJOB_PIPELINE": "1", "VJOB_DATA": "4"}
STAGES = parse_stage_map("0,1;2,3;", 4)
CPU = torch.device("cpu")


def of(**variables: str) -> ConfArguments:
    return ConfArguments({**LAYOUT, **variables})


def refuse(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def test_by_hand_every_default_is_as_it_was() -> None:
    conf = ConfArguments({})
    assert conf.choose_layout("0;1;", FROM_CONF, 2) == ("0;1;", 1)
    assert conf.choose_sizes(8, 3, STAGES) == (8, 3), "sizes of a script need not divide"
    assert conf.choose_precision(FROM_CONF, FROM_CONF).name == "fp32"
    assert conf.choose_precision(True, FROM_CONF).name == "fp16"
    assert conf.choose_recompute(FROM_CONF, CPU, 0) == "none"
    assert conf.choose_partition(FROM_CONF) is None
    assert conf.choose_offload(FROM_CONF) is None
    assert conf.count_stages(FROM_CONF, "interleaved", None, 2) == 1
    assert conf.choose("seed", FROM_CONF, "train.seed", int, 1234) == 1234
    assert "pass it" in refuse(lambda: conf.choose_layout(FROM_CONF, FROM_CONF, 2))
    assert conf.choose_layout(FROM_CONF, FROM_CONF, 1) == ("0;", 1), "the only one"
    alone_of_two = ConfArguments({"WORLD_SIZE": "2"})
    assert "pass it" in refuse(lambda: alone_of_two.choose_layout(FROM_CONF, FROM_CONF, 1))
    said = refuse(lambda: conf.choose_sizes(FROM_CONF, 2, STAGES))
    assert "batch_size" in said and "train.global_batch_size" in said


def test_what_is_left_out_is_the_confs() -> None:
    conf = of(
        VJOB_PARTITION="1-3",
        VJOB_SCHEDULE="interleaved",
        VJOB_MICRO_BATCH_SIZE="2",
        VJOB_GLOBAL_BATCH_SIZE="8",
        VJOB_PRECISION="bf16",
        VJOB_RECOMPUTE="full",
        VJOB_OFFLOAD="1",
    )
    assert conf.choose_layout(FROM_CONF, FROM_CONF, 4) == ("0,1;2,3;", 1)
    assert conf.choose_sizes(FROM_CONF, FROM_CONF, STAGES) == (8, 2)
    assert conf.choose_partition(FROM_CONF) == Partition.parse("1-3")
    assert conf.choose_precision(FROM_CONF, FROM_CONF).name == "bf16"
    assert conf.choose_recompute(FROM_CONF, CPU, 0) == "full"
    assert conf.choose_offload(FROM_CONF) == "optimizer"
    assert conf.count_stages(FROM_CONF, "interleaved", None, 2) == 2
    assert conf.count_stages(FROM_CONF, "interleaved", Partition.parse("1-1-1-1-1-1"), 2) == 3
    shared = of(VJOB_TENSOR="2", VJOB_STAGE_MAP="0;1;")
    assert shared.choose_layout(FROM_CONF, FROM_CONF, 4) == ("0;1;", 2)


def test_what_is_said_wins_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    conf = of(VJOB_PRECISION="fp16", VJOB_SEED="3", VJOB_PARTITION="1-3", VJOB_OFFLOAD="0")
    with caplog.at_level(logging.WARNING):
        assert conf.choose_precision(False, FROM_CONF).name == "fp32", "explicit too"
        assert conf.choose_precision(FROM_CONF, "bf16").name == "bf16"
        assert conf.choose("seed", 4, "train.seed", int, 1) == 4
        assert conf.choose_partition("2-2") == Partition.parse("2-2")
        assert conf.choose_partition(None) is None
        assert conf.choose_offload("optimizer") == "optimizer"
    assert [record.getMessage() for record in caplog.records] == [
        "Varuna(fp16=False) overrides train.precision: fp16 of the conf",
        "Varuna(precision='bf16') overrides train.precision: fp16 of the conf",
        "Varuna(seed=4) overrides train.seed: 3 of the conf",
        "Varuna(partition='2-2') overrides parallel.partition: 1-3 of the conf",
        "Varuna(partition=None) overrides parallel.partition: 1-3 of the conf",
        "Varuna(offload='optimizer') overrides train.optimizer.offload: 0 of the conf",
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert conf.choose_precision(True, FROM_CONF).name == "fp16"
        assert conf.choose_partition([1, 3]) == Partition((1, 3))
        assert conf.choose_offload(None) is None
        assert of(VJOB_SEED="3", RANK="1").choose("seed", 4, "train.seed", int, 1) == 4
    assert not caplog.records, "the same, or said by the first rank"


def test_a_layout_that_is_not_the_confs_is_refused_with_both_names() -> None:
    conf = of()
    assert conf.choose_layout("0,1;2,3", FROM_CONF, 4) == ("0,1;2,3", 1)
    assert conf.choose_layout([[0, 1], [2, 3]], 1, 4) == ([[0, 1], [2, 3]], 1)
    said = refuse(lambda: conf.choose_layout("0;1;2;3;", FROM_CONF, 4))
    assert "stage_to_rank_map='0;1;2;3;'" in said and "parallel.pipeline: 2" in said
    assert "'0,1;2,3;'" in said and "omit the argument" in said
    for layout in (FROM_CONF, "0,1;2,3;"):
        said = refuse(lambda layout=layout: conf.choose_layout(layout, 2, 4))  # type: ignore[misc]
        assert "Varuna(tensor=2)" in said and "parallel.tensor: 1" in said


def test_a_conf_that_says_nothing_of_the_layout_leaves_it_to_the_script() -> None:
    conf = ConfArguments(FLAT)
    assert conf.choose_layout("0;1;2;3;", FROM_CONF, 4) == ("0;1;2;3;", 1)
    assert conf.choose_layout("0;1;", 2, 4) == ("0;1;", 2)
    assert conf.choose_layout("0;", FROM_CONF, 1) == ("0;", 1), "a process of its own"
    said = refuse(lambda: conf.choose_layout(FROM_CONF, FROM_CONF, 1))
    assert "init_process_group before Varuna" in said


def test_ranks_of_a_run_meet_by_themselves_where_the_layout_is_the_confs() -> None:
    assert of().must_join(FROM_CONF)
    assert not of().must_join("0,1;2,3;"), "whoever gives a map has met the others"
    assert not of(WORLD_SIZE="1").must_join(FROM_CONF)
    assert not ConfArguments({"WORLD_SIZE": "4"}).must_join(FROM_CONF), "under torchrun"


def test_sizes_of_script_and_conf_go_into_each_other() -> None:
    said = refuse(lambda: of(VJOB_MICRO_BATCH_SIZE="3").choose_sizes(8, FROM_CONF, STAGES))
    assert "Varuna(batch_size=8) contradicts train.micro_batch_size: 3 in the conf" in said
    assert "2 replicas x micro-batches of 3" in said
    said = refuse(lambda: of(VJOB_GLOBAL_BATCH_SIZE="10").choose_sizes(FROM_CONF, 4, STAGES))
    assert "Varuna(chunk_size=4) contradicts train.global_batch_size: 10 in the conf" in said
    assert of(VJOB_GLOBAL_BATCH_SIZE="8").choose_sizes(FROM_CONF, 4, STAGES) == (8, 4)


def test_auto_of_a_conf_is_none_where_no_memory_can_be_asked() -> None:
    conf = of(VJOB_RECOMPUTE="auto")
    assert conf.choose_recompute(FROM_CONF, CPU, 0) == "none"
    cuda = torch.device("cuda", 0)
    assert conf.choose_recompute(FROM_CONF, cuda, 1) == "auto"
    assert conf.choose_recompute(FROM_CONF, cuda, 3) == "none"
    assert conf.choose_recompute("auto", CPU, 0) == "auto"


def test_checkpoints_go_where_the_conf_says(caplog: pytest.LogCaptureFixture) -> None:
    conf = of(VJOB_CHECKPOINT="/c", VJOB_CHECKPOINT_KEEP="2", VJOB_CHECKPOINT_LOCAL="/scratch")
    assert conf.choose_folder("checkpoint", FROM_CONF) == Path("/c")
    assert (conf.choose_keep(FROM_CONF), conf.choose_keep(None), conf.choose_keep(5)) == (
        2,
        None,
        5,
    )
    assert conf.choose_tempdir(FROM_CONF) == Path("/scratch") and conf.choose_tempdir(None) is None
    for _ in range(2):
        assert conf.choose_folder("checkpoint", "/other") == Path("/other")
    assert conf.choose_folder("checkpoint", "/c") == Path("/c")
    (said,) = caplog.messages
    assert said == "Varuna(checkpoint: '/other') overrides train.checkpoint.folder: /c of the conf"
    none = of()
    assert none.choose_keep(FROM_CONF) is None and none.choose_tempdir(FROM_CONF) is None
    assert "train.checkpoint.folder" in refuse(lambda: none.choose_folder("checkpoint", FROM_CONF))
    assert of(VJOB_LOSS_SCALE="128").choose_loss_scale(FROM_CONF) == 128.0
    assert none.choose_loss_scale(FROM_CONF) == "dynamic"


def test_a_variable_that_cannot_be_read_names_its_key() -> None:
    said = refuse(lambda: of(VJOB_SEED="x").choose("seed", FROM_CONF, "train.seed", int, 1))
    assert "VJOB_SEED=x, which vjob sets from train.seed of the conf" in said


def test_varuna_itself_takes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"WORLD_SIZE": "1", "VJOB_STAGE_MAP": "0;", "VJOB_PIPELINE": "1", "VJOB_DATA": "1"}
    told = {"VJOB_MICRO_BATCH_SIZE": "2", "VJOB_GLOBAL_BATCH_SIZE": "4", "VJOB_PRECISION": "bf16"}
    for name, value in {**one, **told, "VJOB_SCHEDULE": "gpipe"}.items():
        monkeypatch.setenv(name, value)
    model = Varuna(Gpt(), dummy_inputs=make_inputs(), device="cpu")
    assert (model.batch_size, model.chunk_size, model.precision.name) == (4, 2, "bf16")
    assert model.plans.find(2).schedule.name == "gpipe"
    model.close()
    options = Options(schedule="1f1b")
    explicit = Varuna(Gpt(), "0;", make_inputs(), 8, 4, False, device="cpu", options=options)
    assert (explicit.batch_size, explicit.chunk_size) == (8, 4)
    assert (explicit.precision.name, explicit.plans.find(2).schedule.name) == ("fp32", "1f1b")
    explicit.close()
    with pytest.raises(TypeError, match="needs dummy_inputs"):
        Varuna(Gpt())


def test_a_person_sees_twelve_arguments_and_the_seeds_ten_come_first() -> None:
    seen = [name for name in inspect.signature(Varuna).parameters if name != "deprecated"]
    assert len(seen) <= 12
    assert seen[:10] == [
        *("model", "stage_to_rank_map", "dummy_inputs", "batch_size", "chunk_size", "fp16"),
        *("local_rank", "device", "shared_weights", "from_cache"),
    ]


@pytest.mark.parametrize("word", DEPRECATED)
def test_an_option_among_the_arguments_is_taken_with_a_warning(word: str) -> None:
    value = object()
    with pytest.warns(DeprecationWarning, match=rf"{word}=.*since 20\d\d-\d\d-\d\d: write options"):
        options = take_deprecated(Options(), {word: value})
    assert getattr(options, word) is value


def test_a_word_that_is_no_option_is_refused_with_those_that_are() -> None:
    with pytest.raises(TypeError, match=r"no argument 'schedul'.*schedule, stages_per_rank"):
        Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", schedul="1f1b")


def test_every_variable_is_read_by_the_runtime() -> None:
    from varuna_core import trace, varuna
    from varuna_core.runtime import arguments, rank_module

    text = "".join(map(inspect.getsource, (trace, varuna, arguments, rank_module)))
    for key in VARIABLES:
        assert f'"{key}"' in text, key


def test_costs_are_those_of_the_planned_partition_where_it_is_in_use() -> None:
    costs = Costs(forward=(1.0, 3.0), input_grad=(1.0, 3.0), weight_grad=(1.0, 3.0))
    told = {"VJOB_COSTS": json.dumps(costs.as_json())}
    conf = of(VJOB_PARTITION="3-1", **told)
    assert conf.choose_costs(FROM_CONF, Partition.parse("3-1"), 2) == costs
    assert conf.choose_costs(FROM_CONF, Partition.parse("2-2"), 2) is None, (
        "the script cuts otherwise"
    )
    assert conf.choose_costs(FROM_CONF, None, 2) is None
    assert conf.choose_costs(FROM_CONF, Partition.parse("3-1"), 4) is None, "several stages a rank"
    assert conf.choose_costs(None, Partition.parse("3-1"), 2) is None
    assert of(VJOB_PARTITION="3-1").choose_costs(FROM_CONF, Partition.parse("3-1"), 2) is None
    assert of(**told).choose_costs(FROM_CONF, Partition.parse("3-1"), 2) is None


def test_one_rank_alone_needs_no_map_but_shares_no_layers() -> None:
    assert ConfArguments({}).choose_layout(FROM_CONF, FROM_CONF, 1) == ("0;", 1)
    assert ConfArguments({}).choose_layout(FROM_CONF, 1, 1) == ("0;", 1)
    assert "pass it" in refuse(lambda: ConfArguments({}).choose_layout(FROM_CONF, 2, 1))


def test_the_partition_that_varuna_chose_is_a_fact_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the report, nor status, nor a log had it."""
    for name, value in {"VJOB_RUN": str(tmp_path), "VJOB_ATTEMPT": "0"}.items():
        monkeypatch.setenv(name, value)
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    options = {"device": "cpu", "schedule": "interleaved", "stages_per_rank": 2}
    Varuna(Gpt(), "0;", make_inputs(2), 4, 2, partition="2-2", **options).close()
    assert not attempt.partition.exists(), "it was given"
    model = Varuna(Gpt(), "0;", make_inputs(2), 4, 2, **options)
    model.close()
    chosen = model.split.partition.spell()
    for name in ("plan", "record"):
        (tmp_path / f"{name}.json").write_text("{}")
    write_simulated(attempt.path, build_schedule("1f1b", 2, 4), build_even_costs(2))
    job = load_job(tmp_path)
    tables = {table.title: table for table in build_sections(job, analyse(job))}
    assert ("partition", f"{chosen} segments, chosen by Varuna") in tables["job"].rows
    assert tables["stages"].columns[1] == "segments"
    assert "-".join(row[1] for row in tables["stages"].rows) == chosen
    shown = AttemptReader(attempt, None, 3).read()
    assert shown.partition == chosen
    snapshot = replace(healthy(), partition=shown.partition)
    assert f"partition {chosen} segments" in render(snapshot, None, all_nodes=False)
