"""What is wrapped is called as it would be without, whatever it is given."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.varuna_core.trace.streams import put_clock
from varuna_core import trace
from varuna_core.records.logs import trace as records
from varuna_core.trace import loops
from varuna_core.trace import recorder as recorders
from varuna_core.trace.loops import Loop
from varuna_core.trace.recorder import Recorder, wrap


def test_a_models_own_names_of_arguments_are_no_names_of_ours() -> None:
    class Model:
        def forward(self, **words: int) -> dict[str, int]:
            return words

    recorder = Recorder()
    wrap(
        Model,
        "forward",
        lambda call, /, *args, **words: recorder.act("F", 0, 0, call, *args, **words),
    )
    for around in (partial(recorder.span, "send"), recorder.read, recorder.ask):
        wrap(Model, "forward", around)
    words = {"call": 1, "kind": 2, "stage": 3, "micro_batch": 4, "span": 5, "engine": 6}
    assert Model().forward(**words) == words


def test_an_optimizer_in_an_optimizer_is_a_part_of_it_and_one_may_fail() -> None:
    recorder = Recorder()
    loop = Loop(recorder)

    class Optimizer: ...

    outer, inner = Optimizer(), Optimizer()
    for _ in range(2):
        loop._begin_update(outer)
        loop._begin_update(inner)
        assert recorder.is_busy()
        loop._end_update(inner)
        assert recorder.is_busy()
        loop._end_update(outer)
        assert not recorder.is_busy()
    for _ in range(2):  # a hook that is called after a step is not called after one that raises
        loop._begin_update(outer)
    loop._end_update(outer)
    assert not recorder.is_busy()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a trace that nobody has opened."""
    monkeypatch.setenv("VJOB_TRACE", str(tmp_path / "5.jsonl"))
    monkeypatch.setenv("VJOB_TRACE_PID", str(os.getpid()))
    monkeypatch.setenv("RANK", "5")
    for name in ("VJOB_NODE_TRACE", "VJOB_REPLICA", "VJOB_STAGE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"_writer": None, "_is_off": False, "has_own": False}.items():
        monkeypatch.setattr(trace, name, value)
    yield tmp_path / "5.jsonl"


def read(path: Path, recorder: Recorder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header, and the steps."""
    recorder._end()
    writer = trace.get_writer()
    assert writer is not None
    writer.close()
    header, *found = map(json.loads, path.read_text().splitlines())
    return header, [line for line in found if isinstance(line, dict) and "step" in line]


def test_a_loop_has_the_steps_that_came_to_their_end(path: Path) -> None:
    class Optimizer: ...

    recorder, optimizer = Recorder(), Optimizer()
    loop = Loop(recorder)
    for _ in range(3):
        loop._read(lambda: None)
        loop._backward(lambda: None)
        loop._begin_update(optimizer)
        loop._end_update(optimizer)
    loop._read(lambda: None)  # finds no more
    header, steps = read(path, recorder)
    assert (header["rank"], header["replica"]) == (5, 5)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["sums"]["data"][0] == step["sums"]["B"][0] == 1 for step in steps)


def test_an_engine_says_where_its_rank_stands_after_a_batch_was_read(path: Path) -> None:
    recorder = Recorder()
    Loop(recorder)._read(lambda: None)
    recorder.is_driven = True
    recorder.place([3], 1)
    for _ in range(2):
        recorder.run_step(None, lambda: recorder.act("F", 3, 0, lambda: recorder.ask(int)))
        recorder.ask(int)  # waits for what the step has sent
    with pytest.raises(ZeroDivisionError):
        recorder.run_step(None, lambda: 1 // 0)
    header, steps = read(path, recorder)
    assert (header["stages"], header["replica"]) == ([3], 1)
    assert [step["step"] for step in steps] == [0, 1]
    assert [step["sums"]["F"][1] for step in steps] == [0, 0], "no wait of the step before"


def test_an_evaluation_ends_the_step_before_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = put_clock(monkeypatch, records, recorders)
    recorder = Recorder()
    recorder.is_driven = True
    recorder.place([0], 0)
    for _ in range(2):
        recorder.run_step(None, lambda: None)
        recorder.span("optimizer", lambda: None)
        recorder.span("evaluate", lambda: clock.rest(0.7))
    _, steps = read(path, recorder)
    assert all(step["took"] == 0 for step in steps)
    assert [step["sums"].get("evaluate") for step in steps] == [None, [1, 0, 700_000_000]]


def test_a_loop_that_reads_without_gradients_evaluates(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches and models are no part of the training step before them or after."""
    clock = put_clock(monkeypatch, records, recorders, loops)

    class Optimizer: ...

    recorder, optimizer = Recorder(), Optimizer()
    loop = Loop(recorder)
    for _ in range(3):
        loop._read(lambda: None)
        loop._backward(lambda: None)
        loop._begin_update(optimizer)
        loop._end_update(optimizer)
        with torch.no_grad():
            for _ in range(2):
                loop._read(lambda: clock.rest(0.7))
    _, steps = read(path, recorder)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["took"] == 0 for step in steps)
    whole = [1, 0, 1_400_000_000]
    assert [step["sums"].get("evaluate") for step in steps] == [None, whole, whole]
    assert all(step["sums"]["data"][0] == 1 for step in steps)


def test_torch_compile_sees_nothing_of_what_is_wrapped() -> None:
    class Model:
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given + 1

    class Optimizer: ...

    recorder, model, optimizer = Recorder(), Model(), Optimizer()
    loop = Loop(recorder)
    wrap(Model, "forward", partial(recorder.span, "send"))

    def train(given: torch.Tensor) -> torch.Tensor:
        loop._begin_update(optimizer)
        found = model.forward(given)
        loop._end_update(optimizer)
        return found

    whole = torch.compile(train, backend="eager", fullgraph=True)
    assert whole(torch.ones(1)).item() == 2
