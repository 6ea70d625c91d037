"""Drawn models in drawn layouts: equal to the plain model, or refused in words that help."""

from __future__ import annotations

import os

from tests.varuna_core.equality.draws import draw_specs
from tests.varuna_core.equality.spec import Layout, show
from tests.varuna_core.equality.worlds import Verdict, Worlds, read_reports

COUNT = int(os.environ.get("VJOB_EQUALITY_DRAWS", "80"))
SEED = int(os.environ.get("VJOB_EQUALITY_SEED", "0"))
"""The same draws each time; `python -m benchmarks.runtime.equality` runs thousands of others."""


def test_drawn_models_train_as_the_plain_ones_do(worlds: Worlds) -> None:
    failures, trained = [], 0
    for number, spec, verdict in worlds.run(draw_specs(COUNT, SEED)):
        trained += verdict.status == "equal"
        if verdict.is_failure:
            failures.append(f"draw {number}: {verdict.status}: {verdict.message}\n{show(spec)}")
    assert not failures, "\n\n".join(failures)
    assert trained > 0.8 * COUNT


def test_draws_of_a_seed_are_the_same() -> None:
    assert draw_specs(3, 5) == draw_specs(5, 5)[:3] != draw_specs(3, 6)


def test_a_stage_map_names_each_rank_once() -> None:
    layout = Layout(pipeline=2, data=2, tensor=2, reverse=True)
    assert (layout.stage_map, layout.world_size) == ("3,2;1,0;", 8)


def judge(message: str, phase: str = "make") -> Verdict:
    return read_reports(
        {0: {"status": "raised", "phase": phase, "message": message, "trace": ""}}, 1
    )


def test_a_refusal_must_name_something_and_a_remedy() -> None:
    assert judge("SplitError: 'count' is changed twice: keep it in one stage").status == "refused"
    assert judge("SplitError: it does not go").status == "unclear"
    assert judge("KeyError: 'count'; use another").status == "raised"
    late = judge("SplitError: 'count' is changed twice: keep it in one stage", "step 1")
    assert late.status == "raised" and late.is_failure


def test_the_error_of_a_rank_counts_before_its_echo_on_another() -> None:
    echo = {"status": "raised", "phase": "step 0", "message": "RankFailed: x", "trace": ""}
    own = {"status": "raised", "phase": "step 0", "message": "KeyError: 'y'", "trace": ""}
    assert "KeyError" in read_reports({0: echo, 1: own}, 2).message
