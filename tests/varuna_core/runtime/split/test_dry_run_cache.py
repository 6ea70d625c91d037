"""A dry run kept from before is taken for the same model alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models import small as models
from tests.models.small import LEGAL, Gpt, chain, make_inputs
from tests.ranks.start import ROOT
from varuna_core.runtime.split.dry_run_cache import (
    decode_record,
    encode_record,
    find_cache_folder,
    find_key,
)
from varuna_core.runtime.split.rehearsal import Rehearsal
from varuna_core.runtime.split.split import split_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vjob" / "dry-runs"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The stops of the dry runs that are made."""
    made: list[Any] = []
    run = Rehearsal.run

    def count(self: Rehearsal, inputs: Any, stop: Any = None, training: Any = None) -> Any:
        made.append(stop)
        return run(self, inputs, stop, training)

    monkeypatch.setattr(Rehearsal, "run", count)
    yield made


@pytest.mark.parametrize("name", LEGAL)
def test_a_split_from_the_cache_is_the_same_split(name: str, runs: list[Any]) -> None:
    build, make = LEGAL[name]
    torch.manual_seed(0)
    model = build()
    first, second = (split_model(model, make(), 2, from_cache=True) for _ in range(2))
    assert (len(runs) == 1) == (not first.record.real)
    assert first.stages == second.stages and first.costs == second.costs
    assert first.segments == second.segments and first.record.changes == second.record.changes
    stages = [second.make_stage(i) for i in range(2)]
    for inputs in (make(), make(3)):
        assert torch.equal(chain(stages, inputs)[0], model(**inputs))


def test_a_record_is_the_same_after_json() -> None:
    record = split_model(models.DictGpt(), make_inputs(), 2).record
    again = decode_record(encode_record(record))
    for call in record.calls:
        if call.end == len(record.cuts):
            call.output, call.opaque = None, True
    assert asdict(again) == asdict(record)


FACTOR = 1


class Global(Gpt):
    def run_block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x) * twice(FACTOR)


def twice(number: int) -> int:
    return number * 2


def other_twice(number: int) -> int:
    return number + number


def change_option(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.blocks[0].drop.p = 0.5


def change_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "FACTOR", 2)


def change_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "twice", other_twice)


def change_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    gelu = nn.functional.gelu
    patch.setattr(nn.functional, "gelu", lambda x: gelu(x) + x.mean())


def change_layer(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 2)


def change_own_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x: forward(x) * 2


def change_hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def change_mode(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.blocks[2].eval()


def change_tie(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.head.weight = model.wte.weight


def change_frozen(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.wte.requires_grad_(False)


def change_type(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.to(torch.bfloat16)


def change_order(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.cuts = nn.ModuleList(list(model.cuts)[::-1])
    model.blocks[0], model.blocks[1] = model.blocks[1], models.SharedBlockGpt()


@pytest.mark.parametrize(
    "change",
    [
        change_option, change_global, change_function, change_torch, change_layer,
        change_own_forward, change_hook, change_mode, change_tie, change_frozen, change_type,
        change_order,
    ],
)  # fmt: skip
def test_a_model_that_differs_has_another_key(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Global()
    before = find_key(model, make_inputs(), CPU)
    assert before is not None and before == find_key(Global(), make_inputs(), CPU)
    change(model, monkeypatch)
    assert find_key(model, make_inputs(), CPU) != before


def test_other_inputs_have_another_key() -> None:
    keys = {
        find_key(Gpt(), inputs, CPU)
        for inputs in (
            make_inputs(),
            make_inputs(3),
            {**make_inputs(), "flag": 1},
            {**make_inputs(), "flag": 2},
            {**make_inputs(), "labels": None},
            {"labels": make_inputs()["labels"], "ids": make_inputs()["ids"].int()},
        )
    }
    assert len(keys) == 6
    assert find_key(Gpt(), make_inputs(), CPU) == find_key(Gpt(), make_inputs(seed=5), CPU)
    assert find_key(Gpt(), make_inputs(), torch.device("meta")) not in keys


def test_another_precision_has_another_key() -> None:
    model = Gpt()
    halved = {id(parameter): torch.bfloat16 for parameter in model.parameters()}
    keys = {find_key(model, make_inputs(), CPU, types) for types in ({}, halved)}
    assert len(keys) == 2


PROGRAM = """
from tests.models import small as models
from tests.varuna_core.runtime.split.test_dry_run_cache import CPU
from varuna_core.runtime.split.dry_run_cache import find_key
from torch import nn
for number in range(int(__import__("sys").argv[1])):
    nn.Linear(1, 1).register_forward_hook(print)  # hooks are counted a process
model = models.Bert()
model.norm.register_forward_pre_hook(models.make_inputs, with_kwargs=True)
print(find_key(model, models.make_bert_inputs(), CPU))
"""


def test_another_process_finds_the_same_key() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(number)],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
        for number in range(2)
    }  # fmt: skip
    assert len(found) == 1 and len(found.pop().strip()) == 64


def test_what_cannot_be_described_is_run_dry_each_time(
    runs: list[Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = Gpt()
    model.iterator = iter([1])
    with caplog.at_level(logging.INFO):
        assert find_key(model, make_inputs(), CPU) is None
    assert "not kept: the model holds an object of type builtins.list_iterator" in caplog.text
    assert not folder.exists()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_damaged_file_is_made_anew(data: st.DataObject) -> None:
    model = Gpt(blocks=1)
    split = split_model(model, make_inputs(), 2, from_cache=True)
    (path,) = find_cache_folder().iterdir()
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    again = split_model(model, make_inputs(), 2, from_cache=True)
    assert again.segments == split.segments and again.costs == split.costs


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    split_model(Gpt(), make_inputs(), 2, from_cache=True)


def test_old_dry_runs_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna_core.runtime.split.dry_run_cache.NUM_KEPT", 2)
    for size in (1, 2, 3):
        split_model(Gpt(blocks=1), make_inputs(size), 1, from_cache=True)
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    assert len(list(folder.iterdir())) == 2
