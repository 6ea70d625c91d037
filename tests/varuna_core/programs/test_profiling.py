"""The profile of a built-in program, in one process; what tells its file from another's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.varuna_core.programs.trainings import BERT, GPT
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile_file import read_profile
from varuna_core.programs import pretrain
from varuna_core.programs.place import Place, ProgramError
from varuna_core.programs.profiling import profile_training
from varuna_core.records.training import (
    Training,
    name_profile_file,
    name_shapes,
    render_training,
)

ALONE = Place(rank=0, world=1, local_rank=0, stage_map="0;", device=torch.device("cpu"))


@pytest.mark.parametrize("training", [GPT, replace(BERT, precision="bf16", optimizer="lamb")])
def test_both_programs_are_measured(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = tmp_path / "profiles" / "a.json", tmp_path / "profile.json"
    profile_training(training, ALONE, path, copy, sizes=[2])
    profile = read_profile(path)
    assert copy.read_text() == path.read_text()
    assert profile.model.digest == name_shapes(training)
    cell = profile.gpus["cpu"].cells[2, 1]
    half = 2 if training.precision == "bf16" else 4
    assert cell.output_bytes[:-1] == (2 * training.sequence * training.hidden * half,) * 5
    (tie,) = profile.model.ties
    assert tie.segments == (0, 5) and tie.parameters == training.vocab * training.hidden
    assert "segments 0, 1," in capsys.readouterr().out
    with pytest.raises(PlanningError, match="profile that model"):
        profile_training(replace(training, hidden=32), ALONE, path, copy, sizes=[1])
    with pytest.raises(ProgramError, match="tensor 2"):
        profile_training(training, ALONE, path, copy, degrees=[2])


def test_the_command_says_in_a_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, path = tmp_path / "training.json", tmp_path / "a.json"
    training.write_text(render_training(GPT))
    path.write_text("{}")
    assert pretrain.main([str(training), "--profile", str(path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("PlanningError: profile ")
    assert pretrain.main([]) == 2 and pretrain.main([str(training), "--sizes", "x"]) == 2


def test_shapes_are_named_by_what_times_depend_on() -> None:
    others = [
        replace(GPT, layers=5),
        replace(GPT, precision="bf16"),
        replace(GPT, dropout=0.1),
        replace(GPT, optimizer="sgd"),
        replace(GPT, compile=True),
        BERT,
    ]
    assert len({name_shapes(training) for training in (GPT, *others)}) == 1 + len(others)
    assert name_shapes(replace(GPT, steps=7, micro_batch_size=1, lr=1.0)) == name_shapes(GPT)


def test_a_file_name_is_one_whatever_the_model_is_called() -> None:
    assert name_profile_file("gpt2-8.3b") == "gpt2-8.3b.profile.json"
    assert name_profile_file("../my model") == ".._my_model.profile.json"
