"""The programs train as one plain process does, at any layout, and go on where they stopped."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_lines import parse_evaluation, parse_saved, parse_saving
from tests.ranks.start import collect, start_ranks
from tests.small_training import write_text
from tests.varuna_core.data.tokens import write_tokens
from tests.varuna_core.programs.program_rank import Case, Result, read_results, train, write_cases
from tests.varuna_core.programs.reference_training import train_plainly
from tests.varuna_core.programs.trainings import BERT, GPT, LLAMA, write_vocabulary
from varuna_core.data.errors import DataError
from varuna_core.programs.batches import TRAIN, open_source
from varuna_core.programs.building import build_model, choose_apex, choose_recompute, plan_layers
from varuna_core.programs.place import ProgramError
from varuna_core.records.logs.training_log import parse_validation
from varuna_core.records.training import Training
from varuna_core.runtime import assembly
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.compiled import compile_stages
from varuna_core.runtime.engine.graph_memory import GraphMeter, agree_on_memory
from varuna_core.schedule.recompute import Memory

WORLD = 4
LAYOUTS = {"1-0-3-0": "0;1;2;3;", "3-1": "0,1;2,3;", "4": "0,1,2,3;"}
ZERO = {"3-1": 3, "4": 2}
SHARED = [("gpt-sequences", "0;1;", "1-3"), ("gpt-shared", "1,0;", "4")]
SAVES = (("saving", parse_saving), ("saved", parse_saved))
LLAMAS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deep": ("1;3;0;2;", "0-2-1-1", {"schedule": "zero_bubble"}),
    "interleaved": ("0,1;2,3;", "1-1-2-0", {"schedule": "interleaved", "zero": 2}),
    "shared": ("1,0;", "4", {"tensor": 2, "zero": 1}),
    "sequences": ("0;1;", "1-3", {"tensor": 2, "sequence_parallel": True}),
}
EVALUATED = {"evaluate_every": 3, "evaluate_steps": 2}
CONTEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "four": ("0,1,2,3;", "4", {"context": 4, "zero": 3}),
    "two of four": ("3,1,0,2;", "4", {"context": 2, "zero": 1, "recompute": "full"}),
    "stages": ("0,2;1,3;", "1-3", {"context": 2, "schedule": "zero_bubble"}),
    "selective": ("0,1;2,3;", "3-1", {"context": 2, "recompute": "selective"}),
    "offload": ("0,1;2,3;", "2-2", {"context": 2, "recompute": "offload", "zero": 2}),
    "interleaved": ("0,1;2,3;", "1-1-2-0", {"context": 2, "schedule": "interleaved"}),
    "zbv": ("0,1;2,3;", "1-1-1-1", {"context": 2, "schedule": "zbv"}),
}


def write_data(folder: Path) -> tuple[tuple[float, str], ...]:
    write_text(folder)
    return ((1.0, str(folder / "text")),)


def write_sentences(folder: Path) -> tuple[tuple[float, str], ...]:
    documents = [
        [[5 + (start + k + j) % 59 for k in range(5)] for j in range(8)] for start in range(30)
    ]
    write_tokens(folder / "sentences", documents)
    return ((1.0, str(folder / "sentences")),)


def build_llama(folder: Path, is_tied: bool) -> Training:
    assert LLAMA.llama is not None
    data = ((1.0, str(folder / "text")),)
    return replace(LLAMA, data=data, llama=replace(LLAMA.llama, tied=is_tied), **EVALUATED)


def build_cases(folder: Path) -> list[Case]:
    """All that four ranks are to train, one after the other: to start them is what takes long."""
    data = write_data(folder)
    gpt = replace(GPT, data=data, **EVALUATED)
    vocabulary = write_vocabulary(folder / "vocab.txt", 64)
    bert = replace(BERT, data=write_sentences(folder), vocabulary=vocabulary, dropout=0.1)
    cases = []
    for partition, stage_map in LAYOUTS.items():
        zero = ZERO.get(partition, 0)
        laid = replace(gpt, partition=partition, zero=zero, offload=zero == 2)
        cases.append(Case(name=f"gpt-{partition}", stage_map=stage_map, training=laid))
    for name, stage_map, partition in SHARED:
        sequence_parallel = name == "gpt-sequences"
        laid = replace(gpt, tensor=2, sequence_parallel=sequence_parallel, partition=partition)
        cases.append(Case(name=name, stage_map=stage_map, training=laid))
    for kind, is_tied in itertools.product(LLAMAS, (False, True)):
        stage_map, partition, words = LLAMAS[kind]
        laid = replace(build_llama(folder, is_tied), partition=partition, **words)
        cases.append(Case(name=f"llama-{kind}-{is_tied}", stage_map=stage_map, training=laid))
    for kind, model in itertools.product(CONTEXTS, (gpt, build_llama(folder, is_tied=True))):
        stage_map, partition, words = CONTEXTS[kind]
        name = f"context-{kind}-{'gpt' if model is gpt else 'llama'}"
        laid = replace(model, partition=partition, **words)
        cases.append(Case(name=name, stage_map=stage_map, training=laid))
    kept = replace(gpt, checkpoint_folder=str(folder / "parts"), checkpoint_every=3)
    parts, whole = replace(kept, context=2, partition="1-3"), replace(kept, partition="4")
    cases += [
        Case(name="parts-saved", stage_map="0,1;2,3;", training=parts, stop_after=3),
        Case(name="parts-resumed", stage_map="0,1,2,3;", training=whole),
    ]
    for name, partition, schedule, stage_map in (
        ("wide", "2-2", "zero_bubble", "0,2;1,3;"),
        ("deep", "1-1-1-1", "1f1b", "3;1;2;0;"),
    ):
        laid = replace(gpt, partition=partition, schedule=schedule, dropout=0.2, recompute="full")
        cases.append(Case(name=f"dropout-{name}", stage_map=stage_map, training=laid))
        laid = replace(bert, partition=partition, schedule=schedule)
        cases.append(Case(name=f"bert-{name}", stage_map=stage_map, training=laid))
    for name, partition, schedule, stage_map, size in (
        ("large", "2-2", "1f1b", "0,2;1,3;", 3),
        ("small", "1-1-1-1", "zero_bubble", "3;1;2;0;", 1),
    ):
        laid = replace(bert, partition=partition, schedule=schedule, micro_batch_size=size)
        laid = replace(laid, dropout=0.0, **EVALUATED)
        cases.append(Case(name=f"masks-{name}", stage_map=stage_map, training=laid))
    kept = replace(gpt, checkpoint_folder=str(folder / "ckpt"), checkpoint_every=2, dropout=0.1)
    whole = replace(kept, checkpoint_folder=None, partition="2-2")
    first = replace(kept, partition="1-3", zero=1)
    second = replace(kept, partition="0-2-1-1", checkpoint_local=str(folder / "local"))
    third = replace(
        kept, schedule="interleaved", partition="1-0-2-1", steps=8, decay_steps=6, zero=2
    )
    cases += [
        Case(name="whole", stage_map="0,1;2,3;", training=replace(whole, steps=8)),
        Case(name="first", stage_map="0,1;2,3;", training=first, stop_after=3),
        Case(name="second", stage_map="0;1;2;3;", training=second, stop_after=5),
        Case(name="third", stage_map="2,0;1,3;", training=third),
    ]
    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("programs")
    (made / "local").mkdir()
    write_cases(made, build_cases(made))
    with start_ranks(program_rank_name(), WORLD, str(made)) as ranks:
        done = collect(ranks)
    assert [code for code, _ in done] == [0] * WORLD, "\n".join(out[-3000:] for _, out in done)
    (made / "out.txt").write_text("".join(out for _, out in done))
    yield made


def program_rank_name() -> str:
    return sys.modules[Case.__module__].__name__


def expect_close(found: Mapping[int, float], expected: Mapping[int, float]) -> None:
    assert found.keys() == expected.keys()
    for step, value in expected.items():
        assert found[step] == pytest.approx(value, rel=2e-5), step


def test_a_gpt_has_the_loss_curve_of_one_plain_process_at_any_layout(folder: Path) -> None:
    training = replace(GPT, data=((1.0, str(folder / "text")),), **EVALUATED)
    losses, evaluated = train_plainly(training)
    assert losses[6] < losses[1] - 0.1
    for name in (*(f"gpt-{partition}" for partition in LAYOUTS), *(name for name, *_ in SHARED)):
        for result in read_results(folder, name, WORLD):
            expect_close(result.losses, losses)
            expect_close(result.evaluated, evaluated)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_llama_has_the_loss_curve_of_one_plain_process_at_any_layout(
    folder: Path, is_tied: bool
) -> None:
    losses, evaluated = train_plainly(build_llama(folder, is_tied))
    assert losses[6] < losses[1] - 0.1
    for kind in LLAMAS:
        for result in read_results(folder, f"llama-{kind}-{is_tied}", WORLD):
            expect_close(result.losses, losses)
            expect_close(result.evaluated, evaluated)


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_parts_of_sequences_have_the_loss_curve_of_one_plain_process(
    folder: Path, kind: str, model: str
) -> None:
    gpt = replace(GPT, data=((1.0, str(folder / "text")),), **EVALUATED)
    losses, evaluated = train_plainly(gpt if model == "gpt" else build_llama(folder, True))
    for result in read_results(folder, f"context-{kind}-{model}", WORLD):
        expect_close(result.losses, losses)
        expect_close(result.evaluated, evaluated)


def test_a_training_with_parts_of_sequences_goes_on_with_whole_ones(folder: Path) -> None:
    losses, _ = train_plainly(replace(GPT, data=((1.0, str(folder / "text")),), **EVALUATED))
    for result in read_results(folder, "parts-resumed", WORLD):
        expect_close(result.losses, {step: losses[step] for step in (4, 5, 6)})


def test_alone_it_trains_alike() -> None:
    losses, _ = train_plainly(GPT)
    expect_close(train(Case(name="", stage_map="0;", training=GPT), 0, 1).losses, losses)


ALONE = replace(GPT, dropout=0.2, schedule="gpipe")


def train_alone(training: Training) -> Mapping[int, float]:
    return train(Case(name="", stage_map="0;", training=training), 0, 1).losses


def test_recompute_auto_is_none_on_cpu_from_the_first_step_on_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = train_alone(ALONE)
    assert "recompute" not in capsys.readouterr().out
    assert train_alone(replace(ALONE, recompute="auto")) == expected, "to the bit"
    said = capsys.readouterr().out
    assert said.count("recompute auto: none") == 1 and "are recomputed" not in said


@pytest.mark.parametrize("way", ["selective", "offload"])
def test_a_conf_may_save_memory_by_other_ways_than_recompute(way: str) -> None:
    assert train_alone(replace(ALONE, recompute=way)) == train_alone(ALONE), "to the bit"
    assert choose_recompute(replace(ALONE, recompute=way), torch.device("cpu")) == (way, "")


def test_recompute_auto_is_the_runtimes_where_there_is_a_gpu() -> None:
    auto, gpu, cpu = replace(GPT, recompute="auto"), torch.device("cuda"), torch.device("cpu")
    assert choose_recompute(auto, gpu)[0] == "auto"
    assert choose_recompute(replace(auto, zero=2, offload=True), gpu)[0] == "auto"
    chosen, said = choose_recompute(replace(auto, zero=3), gpu)
    assert chosen == "none" and "zero 3" in said
    for word in ("none", "full"):
        for device in (gpu, cpu):
            assert choose_recompute(replace(GPT, recompute=word), device) == (word, "")


@pytest.mark.parametrize(
    ("limit", "again"), [(1e9, "0 of 4"), (3.2, "1 of 4"), (0.0, "everything")]
)
def test_what_recompute_auto_finds_is_told_and_changes_no_loss(
    limit: float,
    again: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU that has room for so many graphs."""
    expected = train_alone(ALONE)
    monkeypatch.setattr("varuna_core.programs.training.choose_recompute", lambda *_: ("auto", "x"))
    monkeypatch.setattr("varuna_core.runtime.arguments.check_memory_limit", lambda *_: None)
    graph: list[float] = []

    def agree(meter: GraphMeter, _: float, links: Links) -> Memory | None:
        graph[:] = meter.graphs.values()
        return agree_on_memory(meter, limit * graph[0], links)

    monkeypatch.setattr("varuna_core.varuna.compute_limit", lambda *_: 0.0)
    monkeypatch.setattr("varuna_core.varuna.agree_on_memory", agree)
    assert train_alone(replace(ALONE, recompute="auto")) == expected, "to the bit"
    if limit:
        said = capsys.readouterr().out
        assert said.count(f"recompute auto: {again} forwards") == 1, said
    else:
        assert again in caplog.text and "4 of 4 forwards" in capsys.readouterr().out


def test_apex_is_refused_or_given_up_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's preflight has looked; under torchrun nobody has."""
    where = "varuna_core.programs.building.why_no_apex"
    auto, gpu = replace(GPT, apex="auto"), torch.device("cuda")
    monkeypatch.setattr(where, lambda: "NVIDIA's apex is not installed")
    with pytest.raises(ProgramError, match="apex is true, but NVIDIA's apex is not installed; use"):
        train_alone(replace(GPT, apex=True))
    expected = train_alone(GPT)
    assert "apex" not in capsys.readouterr().out
    assert train_alone(auto) == expected
    said = capsys.readouterr().out
    assert "apex auto: torch's own kernels are used: NVIDIA's apex is not installed" in said
    monkeypatch.setattr(where, lambda: "")
    assert choose_apex(auto, gpu) == (
        True,
        "apex auto: NVIDIA's optimizer and layer norms are used",
    )
    assert choose_apex(replace(GPT, apex=True), gpu) == (True, "")
    for given_up, device in ((auto, torch.device("cpu")), (replace(auto, offload=True), gpu)):
        use, said = choose_apex(given_up, device)
        assert not use and "apex's kernels run only on GPUs" in said


@pytest.mark.parametrize("name", ["dropout", "bert"])
def test_dropout_and_masks_do_not_depend_on_the_layout(folder: Path, name: str) -> None:
    wide, deep = (read_results(folder, f"{name}-{kind}", WORLD)[0] for kind in ("wide", "deep"))
    expect_close(wide.losses, deep.losses)
    expect_close(wide.evaluated, deep.evaluated)


def test_a_berts_losses_do_not_depend_on_its_micro_batches(folder: Path) -> None:
    large, small = (read_results(folder, f"masks-{kind}", WORLD)[0] for kind in ("large", "small"))
    expect_close(large.losses, small.losses)
    expect_close(large.evaluated, small.evaluated)
    assert large.evaluated


def count_read(results: list[Result], steps: range) -> Counter[tuple[int, ...]]:
    """What the first stages of all replicas were fed in these steps."""
    firsts = [result for result in results if result.stage == 0]
    return Counter(tuple(row) for one in firsts for step in steps for row in one.read[step])


def test_a_run_that_is_stopped_and_laid_out_anew_repeats_no_sample_and_skips_none(
    folder: Path,
) -> None:
    """Stopped after steps 3 and 5, with checkpoints at 2 and 4: steps 3 and 5 are done again. All
    of it lies within the first epoch."""
    parts = {name: read_results(folder, name, WORLD) for name in ("first", "second", "third")}
    assert [list(parts[name][0].losses) for name in parts] == [[1, 2, 3], [3, 4, 5], [5, 6, 7, 8]]
    counted = count_read(parts["first"], range(1, 3))
    counted += count_read(parts["second"], range(3, 5))
    counted += count_read(parts["third"], range(5, 9))
    source = open_source(replace(GPT, data=((1.0, str(folder / "text")),), steps=8))
    rows = source.read(TRAIN, range(8 * GPT.global_batch_size))["tokens"].tolist()
    assert counted == Counter(map(tuple, rows))


def test_a_run_that_was_resumed_has_the_curve_of_one_that_never_stopped(folder: Path) -> None:
    (whole, *_) = read_results(folder, "whole", WORLD)
    for name in ("first", "second", "third"):
        for result in read_results(folder, name, WORLD):
            expect_close(result.losses, {step: whole.losses[step] for step in result.losses})
            assert result.rates == {step: whole.rates[step] for step in result.rates}
    text = (folder / "out.txt").read_text()
    assert "resumed from iteration 2 in" in text and "resumed from iteration 4 in" in text


def test_rank_0_tells_when_a_checkpoint_begins_and_when_it_is_complete(folder: Path) -> None:
    """At once in the first run, in the background in the second, and both in the third."""
    lines = (folder / "out.txt").read_text().splitlines()
    lines = [line for line in lines if str(folder / "parts") not in line]
    told = [(kind, parse(line)) for line in lines for kind, parse in SAVES if parse(line)]
    steps = {kind: [found[0] for one, found in told if found and one == kind] for kind, _ in SAVES}
    assert steps["saving"] == [2, 4, 6, 8]
    assert steps["saved"][-2:] == [6, 8]
    assert steps["saved"] == sorted(set(steps["saved"])), "each is told of once"
    assert {found[1] for _, found in told if found} == {str(folder / "ckpt")}
    for step in steps["saved"]:
        marks = [kind for kind, found in told if found and found[0] == step]
        assert marks == ["saving", "saved"]
    evaluations = [parse_evaluation(line) for line in lines if parse_evaluation(line) is not None]
    assert len(evaluations) == sum(parse_validation(line) is not None for line in lines) > 0
    assert set(evaluations) == {EVALUATED["evaluate_steps"] * GPT.global_batch_size}


def test_a_finished_run_is_checkpointed_and_has_nothing_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, ckpt = ((1.0, str(folder / "text")),), str(folder / "ckpt")
    training = replace(GPT, data=data, checkpoint_folder=ckpt, steps=8, decay_steps=6)
    assert train(Case(name="", stage_map="0;", training=training), 0, 1).losses == {}
    assert "nothing to do: train.steps is 8" in capsys.readouterr().out
    other = replace(training, global_batch_size=16, steps=20)
    with pytest.raises(ProgramError, match="global_batch_size is 16: continue with 8"):
        train(Case(name="", stage_map="0;", training=other), 0, 1)
    with pytest.raises(DataError, match="seed was 11, is 12"):
        train(Case(name="", stage_map="0;", training=replace(training, seed=12)), 0, 1)


def test_a_run_whose_store_is_gone_does_not_begin_anew(tmp_path: Path) -> None:
    store = tmp_path / "ckpt"
    had = replace(GPT, checkpoint_folder=str(store), saved=40, steps=1, decay_steps=1)
    for make in (lambda: None, store.mkdir, (store / "other").mkdir):
        make()
        with pytest.raises(
            ProgramError, match=r"saved iteration 40 in .*ckpt, but it is missing now"
        ):
            train(Case(name="", stage_map="0;", training=had), 0, 1)
    first = replace(had, saved=-1)
    assert train(Case(name="", stage_map="0;", training=first), 0, 1).losses.keys() == {1}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_blocks_are_compiled_with_a_schedule_that_puts_weight_gradients_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_quickly(stages: Any, backend: bool | str, puts_off: bool) -> frozenset[Any]:
        assert backend is True and puts_off
        return compile_stages(stages, "aot_eager", puts_off)

    monkeypatch.setattr(assembly, "compile_stages", compile_quickly)
    caplog.set_level(logging.INFO, "varuna_core")
    plain = replace(GPT, schedule="zero_bubble", steps=3)
    losses = [
        train(Case(name="", stage_map="0;", training=training), 0, 1).losses
        for training in (plain, replace(plain, compile=True))
    ]
    assert "torch.compile (aot_eager) compiles 7 modules" in caplog.text
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (replace(GPT, tensor=3), "2 heads are not divisible by tensor 3"),
        (replace(GPT, tensor=2, optimizer="lamb"), "lamb needs whole weights"),
        (replace(GPT, tensor=2, compile=True), "train.compile cannot be combined with"),
        (replace(GPT, tensor=2, sequence_parallel=True, sequence=7), "sequences of 7 are not"),
        (replace(BERT, tensor=2, sequence_parallel=True), "sequence_parallel is for pretrain_gpt"),
    ],
)
def test_what_ranks_cannot_share_is_refused(training: Training, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        plan_layers(build_model(training), training)
