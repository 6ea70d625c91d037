"""Steps that lead to the final weights; the scenarios of eight morphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.history import ELSEWHERE, Span, check_history, read_spans
from varuna_core.records.files import append_line
from varuna_core.records.morphing import claim_epoch
from varuna_core.records.runfolder import RunFolder


def write_lines(run: RunFolder, number: int, steps: list[int], more: int = 0) -> None:
    folder = run.attempt(number).path / "ranks"
    folder.mkdir(parents=True)
    text = "".join(
        f" iteration {step:8d}/ 90 | consumed samples: {step * 8 + more:12d} | lm loss: 0.5 | x\n"
        for step in steps
    )
    (folder / "3.out").write_text(text)


def test_of_steps_done_twice_the_later_ones_are_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_lines(run, 0, [1, 2, 3, 4])
    write_lines(run, 1, [3, 4, 5])
    write_lines(run, 2, [])
    write_lines(run, 3, [3, 4])
    write_lines(run, 4, [5, 6])
    spans, problems = read_spans(run, 8)
    assert problems == []
    assert spans == [
        Span(attempt=0, first=1, last=2, done=4),
        Span(attempt=3, first=3, last=4, done=4),
        Span(attempt=4, first=5, last=6, done=6),
    ]


@pytest.mark.parametrize(
    ("steps", "more", "said"),
    [
        ([3, 4, 4], 0, "attempt 1 did [3, 4, 4], not each step once"),
        ([3, 5], 0, "attempt 1 did [3, 5], not each step once"),
        ([4, 5], 0, "from step 2 on to 4"),
        ([3], 1, "after step 3 25 samples of 8 a step were read"),
    ],
)
def test_a_sample_that_came_twice_or_never_is_found(
    tmp_path: Path, steps: list[int], more: int, said: str
) -> None:
    run = RunFolder(tmp_path)
    write_lines(run, 0, [1, 2])
    write_lines(run, 1, steps, more)
    assert read_spans(run, 8)[1] == [said]


def note(run: RunFolder, agent: str, what: str, epoch: int, **facts: Any) -> None:
    line = {"what": what, "epoch": epoch, "session": f"7.{epoch}", **facts}
    append_line(run.morph.history(int(agent[0]), agent[1:]), line)


def trace(run: RunFolder, number: int, steps: list[tuple[float, float]], *, shared: bool) -> None:
    """Steps of two ranks, in a file of the node or in one for each rank."""
    folder = run.attempt(number).path / "trace"
    folder.mkdir(parents=True)
    for rank in range(2):
        lines: list[dict[str, Any]] = [{"rank": rank}] if shared else []
        lines.append({"trace": 1, "rank": rank, "origin": 10**18})
        for step, (begin, took) in enumerate(steps):
            lines.append({"step": step, "begin": int(begin * 1e9), "took": int(took * 1e9)})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        name = "node-0.jsonl" if shared else f"{rank}.jsonl"
        with (folder / name).open("a") as file:
            file.write(text)


@pytest.fixture
def told(tmp_path: Path) -> RunFolder:
    """Two sessions: agents a and b, requeued as c and d; g is a guest."""
    run = RunFolder(tmp_path)
    run.morph.make()
    for epoch in range(2):
        claim_epoch(run.morph, f"7.{epoch}")
        note(run, "2g", "join", epoch)
        for agent in (("0a", "1b"), ("0c", "1d"))[epoch] + ("2g",):
            note(run, agent, "start", epoch, attempt=epoch)
            note(run, agent, "end", epoch, attempt=epoch, code=0)
    note(run, "0a", "leave", 1, session="7.0", reason=ELSEWHERE)
    note(run, "0c", "leave", 1, reason="the run has ended")
    trace(run, 0, [(0.0, 1.0), (1.0, 1.0)], shared=True)
    trace(run, 1, [(3.0, 1.0)], shared=False)
    return run


def test_a_run_that_was_requeued_is_well(told: RunFolder) -> None:
    assert check_history(told) == []


@pytest.mark.parametrize(
    ("agent", "what", "epoch", "facts", "said"),
    [
        ("2g", "start", 0, {"attempt": 5}, "agent 2-g obeys epoch 0 after 1"),
        ("0c", "start", 1, {"attempt": 1}, "agent 0-c starts attempt 1 after 1"),
        ("0a", "start", 1, {"attempt": 0}, "attempt 0 ran in 7.0 and 7.1"),
        ("0c", "leave", 1, {"reason": ELSEWHERE}, "agent 0-c left 7.1, the last session"),
    ],
)
def test_an_agent_that_obeyed_what_it_should_not_is_found(
    told: RunFolder, agent: str, what: str, epoch: int, facts: dict[str, Any], said: str
) -> None:
    note(told, agent, what, epoch, **facts)
    assert any(problem.startswith(said) for problem in check_history(told))


def test_two_attempts_on_one_agent_are_found(told: RunFolder) -> None:
    note(told, "0c", "start", 1, attempt=2)
    note(told, "0c", "start", 1, attempt=3)
    assert check_history(told) == ["agent 0-c starts attempt 3 beside 2"]


def test_two_attempts_that_train_at_once_are_found(told: RunFolder) -> None:
    trace(told, 2, [(3.5, 1.0)], shared=True)
    assert check_history(told) == ["attempt 1 trained for 0.5 s beside attempt 2"]
