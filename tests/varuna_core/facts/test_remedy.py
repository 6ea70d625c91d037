"""Remedies are rendered in the words of the job at hand, or not at all."""

from __future__ import annotations

import pytest

from varuna_core.facts.remedy import (
    SPELLINGS,
    Action,
    Context,
    Remedy,
    Target,
    render,
    render_all,
)


def test_a_remedy_names_the_key_of_a_conf_and_the_option_of_sbatch() -> None:
    remedy = Remedy(Action.RAISE, Target.WALLTIME)
    assert render(remedy, Context.CONF) == "raise cluster.walltime_min"
    assert render(remedy, Context.SBATCH) == "raise --time"


def test_a_remedy_that_a_context_lacks_is_left_out() -> None:
    remedies = (Remedy(Action.SET, Target.QOS, "normal"), Remedy(Action.RESUBMIT))
    assert render_all(remedies, Context.LOCAL) == "submit again"
    assert render_all(remedies, Context.SBATCH) == "set --qos to normal; submit again"


@pytest.mark.parametrize("action", Action)
def test_every_action_makes_a_clause(action: Action) -> None:
    assert render(Remedy(action, Target.JOB, "x", "for it"), Context.CONF)


def test_every_target_is_spelled_somewhere() -> None:
    assert set(SPELLINGS) == set(Target)
    assert all(SPELLINGS[target] for target in Target)
