"""Each recipe trains on this machine, as under its usual launcher, and vjob says the truth of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.story import RECIPES, check, run_recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_under_its_usual_launcher(name: str, tmp_path: Path) -> None:
    check(RECIPES[name], run_recipe(RECIPES[name], "local", tmp_path))
