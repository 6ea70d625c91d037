"""A stranger's path has no dead end: the same steps as `python -m tests.stranger`.

Its mixed part, through a profile, a plan and three morphs, takes minutes: that one by hand.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import ROOT
from tests.stranger import paths
from tests.stranger.__main__ import PARTS, render
from tests.stranger.walk import DeadEnd, Step, Walk, find_line


def make_walk(folder: Path, env: dict[str, str]) -> Walk:
    own = {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    vjob = (sys.executable, "-m", "vjob")
    return Walk(folder=folder, env={**os.environ, **env, **own}, vjob=vjob)


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_the_first_submit_to_the_report(clean_lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pandas")
    clean_lab.wait_idle()
    walk = make_walk(tmp_path, clean_lab.env)
    paths.walk_uniform(walk)


@pytest.mark.slurm
@pytest.mark.slow
def test_who_goes_astray_is_told_what_to_do(clean_lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    clean_lab.wait_idle()
    walk = make_walk(tmp_path, clean_lab.env)
    paths.walk_astray(walk)
    paths.walk_queue(walk, clean_lab)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small disk")
@pytest.mark.slow
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with paths.small_disk(tmp_path / "disk") as disk:
        paths.walk_disk(make_walk(tmp_path, {}), disk)


def test_parts_that_were_not_walked_stay_in_the_result() -> None:
    def make(part: str, command: str) -> Step:
        return Step(part=PARTS[part], command=command, took_s=1.0, saw="a | b /x/y/z")

    both = render("c", [make("astray", "`one`"), make("uniform", "`two`")])
    assert both.index("Uniform") < both.index("Astray") and "a \\| b .../z" in both
    again = render("c", [make("astray", "`three`")], both)
    assert "two" in again and "one" not in again
    assert render("c", [make("astray", "`three`"), make("uniform", "`two`")]) == again


def test_a_walk_ends_where_nothing_is_seen(tmp_path: Path) -> None:
    walk = make_walk(tmp_path, {})
    assert walk.type("--version", "vjob") and walk.steps[0].saw.startswith("vjob")
    with pytest.raises(DeadEnd, match=re.escape("no 'x.y'")):
        walk.type("--version", "x.y")
    with pytest.raises(DeadEnd, match="exit code 2, not 0"):
        walk.type("status nope", "no run")
    assert find_line("a\nbc\n", "c$") == "bc" and find_line("", "x") is None
