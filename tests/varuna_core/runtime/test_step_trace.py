"""Steps of a rank's trace, as Varuna's calls begin and end them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.models.small import Gpt, make_inputs
from tests.varuna_core.trace.streams import build_clock, put_clock
from varuna_core.records.logs import trace as records
from varuna_core.records.logs.trace import TraceWriter
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
