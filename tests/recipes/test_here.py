"""Recipes on this machine: as under their usual launcher, with the truth in status and report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.story import RECIPES, check, run_recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_under_its_usual_launcher(name: str, tmp_path: Path) -> None:
    check(RECIPES[name], run_recipe(RECIPES[name], "local", tmp_path))
