"""The table fault x phase: phases by records, which cells are drawn, and what counts as a hit."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.faults import ANYWHERE, ON_SLURM
from benchmarks.chaos.phases import (
    JOIN,
    MORPH,
    OVER,
    PHASES,
    QUEUE,
    REQUEUED,
    SAVE,
    START,
    TRAINING,
    Facts,
    explain_impossible,
    list_cells,
    name_phase,
)
from benchmarks.chaos.staging import GATES, SCRIPT
from benchmarks.chaos.statistics import (
    AIMED,
    BREAKING,
    FAULTS_A_RUN,
    LASTING,
    VISIT,
    Aim,
    add_run,
    count_hits,
    draw_aims,
    judge_hit,
    read_runs,
    render_page,
)

KINDS = (*ANYWHERE, *ON_SLURM)


def name(*, is_off: bool = False, **state: Any) -> str:
    facts = {word: state.pop(word, False) for word in ("trained", "is_saving", "is_growing")}
    return name_phase(Facts(state=state, is_called_off=is_off, **facts))


def test_phases_are_read_from_the_managers_state() -> None:
    on = {"phase": "running", "attempt": 0, "earlier": -1}
    assert name() == QUEUE
    assert name(phase="gathering", attempt=-1, earlier=-1) == JOIN
    assert name(**on) == START
    assert name(**on, trained=True) == TRAINING
    assert name(**on, trained=True, is_growing=True) == JOIN
    assert name(**on, trained=True, is_saving=True) == SAVE
    assert name(phase="saving", after="morph") == MORPH
    assert name(phase="stopping", after="requeue") == REQUEUED
    assert name(phase="gathering", attempt=1, earlier=-1) == MORPH
    assert name(phase="ended", requeue=True) == REQUEUED
    assert name(phase="gathering", attempt=1, earlier=1) == REQUEUED
    assert name(**on, trained=True, is_off=True) == OVER
    assert name(phase="ended", requeue=False) == OVER


def test_every_cell_can_be_hit_or_says_why_not() -> None:
    cells = list_cells(KINDS)
    assert len(cells) == len(set(cells))
    for kind in KINDS:
        for phase in PHASES:
            assert ((kind, phase) in cells) == (explain_impossible(kind, phase) is None)
        assert (kind, TRAINING) in cells
    assert set(LASTING) | set(BREAKING) <= set(KINDS)


def test_each_phase_after_the_queue_has_gates_and_the_script_waits_at_them() -> None:
    assert set(GATES) == set(PHASES) - {QUEUE}
    for gate in {gate for gates in GATES.values() for gate in gates} - {"join"}:
        assert f'is_closed("{gate}")' in SCRIPT


@given(seed=st.integers())
def test_cells_with_the_fewest_hits_are_drawn(seed: int) -> None:
    cells = list_cells(ANYWHERE)
    few = cells[: FAULTS_A_RUN // VISIT]
    hits = {cell: 3 * (cell not in few) for cell in cells}
    aims = draw_aims(seed, hits, {}, ANYWHERE)
    assert aims == draw_aims(seed, hits, {}, ANYWHERE)
    assert len(aims) == FAULTS_A_RUN
    phases = [aim.phase for aim in aims]
    visits = [list(visit) for _, visit in groupby(aims, key=lambda aim: aim.phase)]
    assert sum(visit[0].phase in (QUEUE, OVER) for visit in visits) <= 2
    assert QUEUE not in phases[len(visits[0]) :] and OVER not in phases[: -len(visits[-1])]
    wanted = {cell for cell in few if cell[1] not in (QUEUE, OVER)}
    assert wanted <= {(aim.kind, aim.phase) for aim in aims}


def test_cells_with_enough_hits_are_drawn_where_all_have_them_alone() -> None:
    cells = list_cells(ANYWHERE)
    hits = dict.fromkeys(cells, AIMED)
    assert len(draw_aims(1, hits, {}, ANYWHERE)) == FAULTS_A_RUN
    hits["leave", MORPH] = AIMED - 1
    (aim,) = draw_aims(1, hits, {}, ANYWHERE)
    assert (aim.kind, aim.phase) == ("leave", MORPH)


@given(seed=st.integers())
def test_a_visit_ends_with_the_fault_that_ends_an_attempt(seed: int) -> None:
    aims = draw_aims(seed, {}, {}, KINDS, PHASES, 3 * VISIT)
    for number, aim in enumerate(aims):
        visit = aims[number - number % VISIT :][:VISIT]
        if len({one.phase for one in visit}) == 1 and aim is not visit[-1]:
            assert aim.kind not in BREAKING


def test_a_hit_counts_where_it_took_effect() -> None:
    kill = Aim(kind="kill rank", phase=MORPH, pick=0.5, lasts_s=1.0)
    assert judge_hit(kill, MORPH, [], MORPH) == MORPH
    assert judge_hit(kill, MORPH, [], START) == ""
    assert judge_hit(kill, TRAINING, [], MORPH) == TRAINING  # what it brings itself
    assert judge_hit(kill, TRAINING, [], SAVE) == ""
    grow = Aim(kind="grow", phase=TRAINING, pick=0.5, lasts_s=1.0)
    assert judge_hit(grow, TRAINING, [], JOIN) == TRAINING
    assert judge_hit(grow, TRAINING, [], MORPH) == ""
    fill = Aim(kind="fill store", phase=SAVE, pick=0.5, lasts_s=1.0)
    assert judge_hit(fill, TRAINING, [TRAINING, SAVE, TRAINING], TRAINING) == SAVE
    assert judge_hit(fill, TRAINING, [TRAINING, TRAINING], TRAINING) == TRAINING
    freeze = Aim(kind="freeze node", phase=JOIN, pick=0.5, lasts_s=1.0)
    assert judge_hit(freeze, JOIN, [MORPH, START], MORPH) == MORPH


def make_run(hit: str, problems: list[str]) -> dict[str, Any]:
    fault = {"kind": "kill rank", "phase": MORPH, "pick": 0.5, "lasts_s": 1.0, "said": "killed"}
    return {
        "testbed": "local",
        "seed": 1,
        "verdict": "COMPLETED",
        "attempts": 2,
        "seconds": 9,
        "problems": problems,
        "faults": [{**fault, "seen": [MORPH, hit], "hit": hit}],
    }


def test_runs_add_up(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert read_runs(table) == []
    assert add_run(table, make_run(MORPH, [])) == "local-1"
    assert add_run(table, make_run("", ["it hangs"])) == "local-2"
    runs = read_runs(table)
    assert count_hits(runs) == {("kill rank", MORPH): 1}
    page = render_page(runs)
    assert "1 of 2 runs were well." in page
    assert "- `--replay local-2` (kill rank @ morph), COMPLETED: it hangs" in page
    assert "| kill rank | - | 0 | 0 | 0 | 0 | 1 | 0 | 0 |" in page


@pytest.mark.parametrize("phase", PHASES)
def test_an_open_cell_is_listed(phase: str) -> None:
    page = render_page([])
    few = [kind for kind, other in list_cells(KINDS) if other == phase]
    assert f"- {phase}: {few[0]} 0" in page
