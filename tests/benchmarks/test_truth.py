"""A sample of the table of truth on the lab; `python -m benchmarks.commands.truth` fills it all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.commands.truth import (
    AT_ONCE,
    FAULTS,
    LAYOUTS,
    PHASES,
    Cell,
    More,
    Seen,
    build_batches,
    find_more_problems,
    find_problems,
    list_cells,
    render,
    run_cells,
)
from tests.cluster.lab import Lab
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.schedulers.slurm.commands import parse_sacct_output

SAMPLE = [
    Cell(layout=layout, fault=fault, phase=phase)
    for layout, fault, phase in (
        ("plain", "scancel", "end"),
        ("het", "vjob cancel", "training"),
        ("split", "failed rank", "start"),
        ("morph", "scancel", "training"),
        ("split", "scancel", "training"),
        ("plain", "failed rank", "end"),
    )
]
"""Each hits its own run alone, so that all go beside each other."""


def test_every_cell_is_there_once_and_has_its_place_on_the_page() -> None:
    cells = list_cells()
    assert len(set(cells)) == len(cells)
    at_work = [cell for cell in cells if cell.phase != "queue"]
    num_faults = sum(not facts.waits for facts in FAULTS.values())
    assert len(at_work) == (len(LAYOUTS) * num_faults - 1) * len(PHASES), "but a requeue of split"
    page = render({str(cells[0]): [], str(cells[1]): ["state X, Slurm Y"]}, "slurm 22.05.8")
    assert f"2 of {len(cells)} cells done, 1 agree" in page and f"- {cells[1]}: state X" in page


def test_cells_go_beside_each_other_where_they_may() -> None:
    batches = build_batches(list_cells())
    assert sorted(str(cell) for batch in batches for cell in batch) == sorted(
        map(str, list_cells())
    )
    assert max(map(len, batches)) == AT_ONCE
    for batch in batches:
        faults = {cell.fault for cell in batch}
        assert len(faults) == 1 or all(FAULTS[fault].is_alone for fault in faults)


def test_each_one_who_says_something_else_is_named() -> None:
    cell = Cell(layout="plain", fault="scancel", phase="end")
    jobs = parse_sacct_output("7|CANCELLED by 0|b1|None|0:15|now|now|05:00|x\n")
    verdict = {"health": "CANCELLED", "reason": "cancelled by root", "exit_code": 16}
    status = {"state": "CANCELLED", "verdict": verdict}
    listed = {"state": "CANCELLED", "message": "cancelled by root"}
    row = {"state": "CANCELLED", "message": "cancelled by root"}
    seen = Seen(slurm=tuple(jobs), status=status, code=16, row=row, listed=listed)
    more = More(
        squeue=tuple(jobs),
        sacct=tuple(jobs),
        api={"state": "CANCELLED", "is_done": True, **verdict},
        report="CANCELLED: cancelled by root",
    )
    assert find_problems(cell, seen) == find_more_problems(cell, seen, more) == []
    runs = tuple(replace(job, state=JobState.RUNNING) for job in jobs)
    for changed in (
        replace(more, squeue=runs),
        replace(more, sacct=runs),
        replace(more, squeue=(), sacct=()),
        replace(more, api={**more.api, "is_done": False}),
        replace(more, api={**more.api, "reason": "the job ended well"}),
        replace(more, report="CANCELLED: failed"),
        replace(more, report="failed: cancelled by root"),
    ):
        assert len(find_more_problems(cell, seen, changed)) == 1, changed


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.slow
def test_what_vjob_says_is_what_slurm_says(clean_lab: Lab, tmp_path: Path) -> None:
    found = run_cells(clean_lab, SAMPLE, tmp_path)
    assert {str(cell): problems for cell, problems in found.items() if problems} == {}
    assert len(found) == len(SAMPLE)
