"""Steps of a rank's trace, as Varuna's calls begin and end them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.small import Gpt, make_inputs
from tests.varuna_core.trace.streams import build_clock, put_clock
from varuna_core.records.logs import trace as records
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.runtime import step_trace
from varuna_core.runtime.engine import engine
from varuna_core.runtime.step_trace import StepTrace
from varuna_core.varuna import Varuna


def test_a_step_that_failed_is_no_step_of_the_trace(tmp_path: Path) -> None:
    """A rank whose neighbour was killed wrote a step of a tenth of a millisecond."""
    writer = TraceWriter(tmp_path / "0.jsonl", 0, stages=[0], replica=0, log_every=1)
    steps = StepTrace(writer, lambda kind: nullcontext())
    steps.begin(1)
    steps.touch()
    steps.begin(2)
    steps.drop()
    steps.end()
    writer.close()
    lines = map(json.loads, (tmp_path / "0.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if isinstance(line, dict) and "sums" in line] == [1]


def test_an_evaluation_between_two_steps_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 180 ms was said to take 875, as the evaluation after it took the rest."""
    clock = put_clock(monkeypatch, records, step_trace)
    path = tmp_path / "0.jsonl"
    writer = TraceWriter(path, 0, log_every=1)
    varuna = Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", trace=writer)
    varuna._steps = StepTrace(writer, writer.span)
    evaluate = varuna.engine.evaluate

    def evaluate_slowly(*given: Any) -> Any:
        clock.rest(0.7)
        return evaluate(*given)

    monkeypatch.setattr(varuna.engine, "evaluate", evaluate_slowly)
    for _ in range(2):
        varuna.step(make_inputs())
        clock.rest(0.2)
        with varuna._steps.span("optimizer"):
            pass
        clock.rest(0.1)  # the script reads what it evaluates
        varuna.evaluate(make_inputs())
        with torch.no_grad():
            varuna(*make_inputs().values())
    varuna.close()
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if isinstance(line, dict) and "sums" in line]
    assert [round(step["took"] / 1e6) for step in steps[:2]] == [200, 200]
    assert [step["sums"].get("evaluate") for step in steps] == [
        None, [2, 0, 1_400_000_000], [2, 0, 1_400_000_000],
    ]  # fmt: skip
    assert not any("all-reduce" in step["sums"] for step in steps), "one rank has nobody to talk to"


def test_an_action_of_the_engine_lasts_as_long_as_the_device_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward is called in 1 ms and takes 50 on the GPU, a backward 30."""
    stream = put_clock(monkeypatch, records, engine)

    class Slow(Gpt):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().forward(*args, **kwargs)
            stream.call(0.05)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: stream.call(0.03))
            return loss

    path = tmp_path / "0.jsonl"
    writer = records.TraceWriter(path, 0, log_every=1, find_clock=lambda: build_clock(stream))
    varuna = Varuna(Slow(), "0;", make_inputs(), 4, 2, device="cpu", schedule="gpipe", trace=writer)
    stream.wait()
    writer.begin_step(0)
    varuna.step(make_inputs())
    writer.end_step()
    writer.close()
    events = [
        line for line in map(json.loads, path.read_text().splitlines()) if isinstance(line, list)
    ]
    assert [
        (event[0], event[3], round(event[6] / 1e6)) for event in events if event[0] in "FB"
    ] == [
        ("F", 0, 50),
        ("F", 1, 50),
        ("B", 0, 30),
        ("B", 1, 30),
    ]
