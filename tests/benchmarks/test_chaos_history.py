"""Steps that lead to the final weights; the scenarios of eight morphs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.chaos.history import Span, read_spans
from benchmarks.chaos.scenarios import SCENARIOS
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scene_changes_what_is_used(name: str) -> None:
    scenario = SCENARIOS[name]
    members = [scenario.members, *(change.members for change in scenario.changes)]
    assert len(scenario.changes) == 8
    assert max(members) == 6 and min(members) >= 2
    assert all(now != then for then, now in itertools.pairwise(members))
