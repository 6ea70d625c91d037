"""Steps of a rank's trace, as Varuna's calls begin and end them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from varuna_core.records.logs.trace import TraceWriter
from varuna_core.runtime.step_trace import StepTrace


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
