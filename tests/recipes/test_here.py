"""Recipes on this machine: as under their usual launcher, with the truth in status and report."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import PATIENCE, ROOT
from tests.command import Vjob, wait_for
from tests.recipes.story import (
    RECIPES,
    check,
    count_steps,
    read_truth,
    require,
    run_recipe,
    train_plainly,
)
from vjob.jobs.conf.starters import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_under_its_usual_launcher(name: str, tmp_path: Path) -> None:
    check(RECIPES[name], run_recipe(RECIPES[name], "local", tmp_path))


@pytest.mark.slow
def test_a_sweep_of_hydra_is_runs_of_vjob(tmp_path: Path) -> None:
    """By the launcher of hydra-submitit-launcher with our executor."""
    recipe = RECIPES["hydra"]
    python = require(recipe)
    vjob = Vjob(tmp_path)
    shutil.copytree(recipe.folder, tmp_path, dirs_exist_ok=True)
    words = ["-m", "lr=0.01,0.02", "pause=0", "hydra/launcher=vjob"]
    done = subprocess.run(
        [python, "train.py", *words, "hydra.launcher.conf=conf.yaml"],
        cwd=tmp_path, env={**vjob.env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=200 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (read_truth(tmp_path / "out" / job) for job in "01")
    assert first.worlds == second.worlds == {0: 2, 1: 2}
    assert first.losses == train_plainly(recipe).losses != second.losses
    listed = vjob("list").stdout
    assert len(re.findall(r"COMPLETED .* my-hydra-", listed)) == 2, listed


@pytest.mark.slow
def test_ddp_saves_when_it_is_cancelled_and_goes_on(tmp_path: Path) -> None:
    recipe, vjob = RECIPES["ddp"], Vjob(tmp_path)
    shutil.copytree(recipe.folder, tmp_path, dirs_exist_ok=True)
    conf = (tmp_path / "conf.yaml").read_text()
    words = ("--set", f"program.python={require(recipe)}", "--set", "env.OMP_NUM_THREADS=1")
    run = vjob.submit(conf, *words, "--set", 'program.args=[--steps,"40",--pause,"0.5"]')
    wait_for(lambda: count_steps(tmp_path / "out") >= 5, 60, lambda: vjob.explain(run))
    vjob("cancel", str(run.path))
    vjob.wait_over(run, may_fail=True)
    kept = read_truth(tmp_path / "out").losses
    assert 5 <= len(kept[0]) == len(kept[1]) < 40
    vjob.wait_over(vjob.submit(conf, *words))
    assert read_truth(tmp_path / "out").losses == train_plainly(recipe).losses


def test_each_kind_has_its_row_in_the_documents() -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert sorted(re.findall(r"^\| `(\S+)` \| `", page, re.MULTILINE)) == sorted(KINDS)
    for recipe in RECIPES.values():
        (key, words) = re.findall(rf"^\| `{recipe.name}` \| `(\w+): ([^`]+)`", page, re.MULTILINE)[
            0
        ]
        conf = (recipe.folder / "conf.yaml").read_text()
        assert f"{key}: {words.split(' ...')[0]}" in " ".join(conf.replace(">-", "").split())


def test_all_recipes_are_tested() -> None:
    assert sorted(RECIPES) == sorted(
        path.parent.name for path in ROOT.glob("examples/recipes/*/conf.yaml")
    )
