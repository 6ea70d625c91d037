"""Blocks whose linear layers compute in float8 train nearly as bf16, and the same in any layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ranks.start import collect, start_ranks
from tests.varuna_core.programs.program_rank import Case, read_results, train, write_cases
from tests.varuna_core.programs.trainings import GPT
from varuna_core.programs.building import build_model, plan_layers
from varuna_core.programs.float8 import use_float8
from varuna_core.programs.place import ProgramError

HALF = replace(GPT, hidden=32, precision="bf16", schedule="zero_bubble")
FLOAT8 = replace(HALF, precision="fp8")


def test_the_linear_layers_of_blocks_are_converted() -> None:
    pytest.importorskip("torchao")
    model = build_model(FLOAT8)
    assert use_float8(model, torch.device("cpu")) == 4 * FLOAT8.layers
    kinds = [type(part).__name__ for part in model.modules()]
    assert kinds.count("Float8Dense") == 4 * FLOAT8.layers
    # Sizes that float8 products do not take.
    assert use_float8(build_model(replace(FLOAT8, hidden=24)), torch.device("cpu")) == 0


def test_losses_are_those_of_bf16_within_a_hundredth_and_no_layout_changes_them(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchao")
    half = train(Case(name="", stage_map="0;", training=HALF), 0, 1).losses
    alone = train(Case(name="", stage_map="0;", training=FLOAT8), 0, 1).losses
    assert alone != half and alone == pytest.approx(half, rel=0.01)
    cases = [
        Case(name="stages", stage_map="0;1;", training=FLOAT8),
        Case(name="slices", stage_map="0,1;", training=replace(FLOAT8, zero=3)),
    ]
    write_cases(tmp_path, cases)
    with start_ranks("tests.varuna_core.programs.program_rank", 2, str(tmp_path)) as ranks:
        assert [code for code, _ in collect(ranks)] == [0, 0]
    for case in cases:
        for result in read_results(tmp_path, case.name, 2):
            assert result.losses == pytest.approx(alone, rel=2e-3)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ProgramError, match=r"pip install 'vjob\[fp8\]', or set bf16"):
        use_float8(build_model(FLOAT8), torch.device("cpu"))
    with pytest.raises(ProgramError, match="fp8 cannot be combined with tensor parallelism"):
        plan_layers(build_model(FLOAT8), replace(FLOAT8, tensor=2))
