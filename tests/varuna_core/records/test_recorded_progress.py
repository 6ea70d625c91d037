"""What real programs print (recorded/README.md), and what is no step in whatever they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from varuna_core.agent.processes.output import LineSplitter
from varuna_core.records.logs.progress import MARKS, parse_progress
from varuna_core.records.logs.steps import BAR, LINE, UNNAMED, StepReader, StepReading

RECORDED = Path(__file__).parent / "recorded"
PROGRAMS: dict[str, tuple[int, int, int, int | None, float | None]] = {
    # file: how sure, first step, last step, number of steps, last loss
    "transformers-5.23.0.err": (UNNAMED, 5, 60, 60, None),
    "lightning-2.6.6.out": (BAR, 5, 120, None, 0.00844),
    "lightning-2.6.6-rich.out": (BAR, 120, 120, 120, 0.001),
    "keras-3.15.1.out": (BAR, 1, 64, 64, 1.1588e-07),
    "tqdm-4.70.1.err": (BAR, 5, 80, 80, None),
    "nanogpt-3adf61e.out": (LINE, 0, 60, None, 10.8192),
    "deepspeed-0.19.8.out": (LINE, 0, 30, None, None),
    "deepspeed-0.19.8-pipeline.out": (LINE, 10, 60, None, 2.4),
    "torchtitan-b5bcd76c6.out": (LINE, 1, 100, None, 3.39483),
    "litgpt-0.5.13.out": (LINE, 2, 40, None, 8.9),
    "megatron-lm-core_r0.16.out": (LINE, 10, 100, 100, 8.8),
    "plain.out": (LINE, 1, 40, 40, 0.0976),
    "jsonlines.out": (LINE, 1, 30, None, 2.0),
}


def read_states(name: str) -> list[StepReading]:
    """By each state of a bar, as a very patient terminal saw it."""
    reader = StepReader()
    text = (RECORDED / name).read_bytes().decode()
    found = [reader.read(state) for state in re.split(r"[\r\n]", text)]
    return [reading for reading in found if reading is not None]


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_of_a_real_program_are_read(name: str) -> None:
    strength, first, last, total, loss = PROGRAMS[name]
    found = read_states(name)
    steps = [reading.line.step for reading in found]
    assert (steps[0], steps[-1]) == (first, last)
    assert (found[-1].strength, found[-1].line.num_steps) == (strength, total)
    assert found[-1].line.loss == (None if loss is None else pytest.approx(loss))
    started_anew = [reading for reading in found if reading.is_anew]
    if name not in ("tqdm-4.70.1.err", "keras-3.15.1.out"):  # several loops in one program
        assert not started_anew
        assert steps == sorted(steps)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_is_read_of_what_the_agent_writes(name: str) -> None:
    """The agent keeps the last state of a bar's line, in whatever pieces its pipe delivers it."""
    data = (RECORDED / name).read_bytes()
    splitter, reader = LineSplitter(), StepReader()
    lines: list[bytes] = []
    for at in range(0, len(data), 777):
        lines += splitter.feed(data[at : at + 777], float(at))
        rest = splitter.due(at + 5.0)  # as if each piece were seconds after the one before
        lines += [] if rest is None else [rest]
    rest = splitter.flush()
    lines += [] if rest is None else [rest]
    for line in lines:
        assert b"\n" not in line
        reader.read("0: " + line.decode("utf-8", "replace"))
    assert reader.last == PROGRAMS[name][2]


def test_losses_of_hugging_face_name_no_step() -> None:
    found = read_states("transformers-5.23.0.out")
    assert len(found) == 12
    assert {reading.line.step for reading in found} == {-1}
    assert found[-1].line.loss == 4.462


def list_misleading() -> list[tuple[str, str, str]]:
    text = (RECORDED / "no_steps.tsv").read_bytes().decode()
    kinds = [row.split("\t", 2) for row in text.split("\n")[:-1]]
    return [(kind, source, line) for kind, source, line in kinds]


def test_no_line_of_the_corpus_is_a_step() -> None:
    corpus = list_misleading()
    assert len(corpus) >= 300
    assert len({kind for kind, _, _ in corpus}) >= 8
    false = [line for _, _, line in corpus if parse_progress(line) is not None]
    assert not false


def test_no_line_of_the_corpus_moves_a_training_that_runs() -> None:
    reader = StepReader()
    reader.read("0: step 50/100 loss 2.31", 100.0)
    for kind, _, line in list_misleading():
        reading = reader.read("0: " + line, 101.0)
        assert reading is None, (kind, line)
    assert (reader.last, reader.num_steps) == (50, 100)


def test_each_line_of_steps_has_a_cheap_mark() -> None:
    for name in PROGRAMS:
        reader = StepReader()
        for state in re.split(rb"[\r\n]", (RECORDED / name).read_bytes()):
            if reader.read(state.decode()) is not None:
                assert any(mark in state for mark in MARKS), state
