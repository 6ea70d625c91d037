"""Recipes on the real Slurm of the lab: two nodes of one queue, and a het job over two queues.

The others, which take minutes together, run in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.recipes.story import RECIPES, check, run_recipe

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
USUAL = {
    ("ddp", "plain"),
    ("lightning", "plain"),
    ("lightning", "het"),
    ("jax", "het"),
    ("torchrun", "het"),
}
"""Those that read most variables of Slurm and of torchrun."""


def list_runs() -> Iterator[Any]:
    for name, recipe in RECIPES.items():
        for place in ("plain", "het")[: recipe.ranks]:
            usual = (name, place) in USUAL
            yield pytest.param(name, place, marks=[pytest.mark.long] * (not usual))


@pytest.mark.parametrize(("name", "place"), [*list_runs()])
def test_a_recipe_trains_on_slurm_as_under_its_usual_launcher(
    clean_lab: Lab, tmp_path: Path, name: str, place: str
) -> None:
    check(RECIPES[name], run_recipe(RECIPES[name], place, tmp_path, clean_lab.env))
