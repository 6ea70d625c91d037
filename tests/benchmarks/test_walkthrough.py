"""Parts of the new user's walkthrough: the same steps as `python -m benchmarks.walkthrough`.

Its mixed part, through a profile, a plan and three morphs, takes minutes: that one by hand.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.walkthrough import parts
from benchmarks.walkthrough.__main__ import PARTS, render
from benchmarks.walkthrough.session import Session, Step, WalkthroughFailed, find_line
from tests import ROOT
from tests.cluster.lab import Lab


def make_session(folder: Path, env: dict[str, str]) -> Session:
    own = {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    vjob = (sys.executable, "-m", "vjob")
    return Session(folder=folder, env={**os.environ, **env, **own}, vjob=vjob)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_the_first_submit_to_the_report(clean_lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pandas")
    clean_lab.wait_idle()
    session = make_session(tmp_path, clean_lab.env)
    parts.run_uniform(session)


@pytest.mark.slurm
@pytest.mark.slow
def test_mistakes_are_answered_with_advice(clean_lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    clean_lab.wait_idle()
    session = make_session(tmp_path, clean_lab.env)
    parts.run_mistakes(session)
    parts.run_queue(session, clean_lab)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small disk")
@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with parts.small_disk(tmp_path / "disk") as disk:
        parts.run_disk(make_session(tmp_path, {}), disk)


def test_parts_that_were_not_run_stay_in_the_result() -> None:
    def make(part: str, command: str) -> Step:
        return Step(part=PARTS[part], command=command, took_s=1.0, saw="a | b /x/y/z")

    both = render("c", [make("mistakes", "`one`"), make("uniform", "`two`")])
    assert both.index("Uniform") < both.index("Mistakes") and "a \\| b .../z" in both
    again = render("c", [make("mistakes", "`three`")], both)
    assert "two" in again and "one" not in again
    assert render("c", [make("mistakes", "`three`"), make("uniform", "`two`")]) == again


def test_a_session_ends_where_nothing_is_seen(tmp_path: Path) -> None:
    session = make_session(tmp_path, {})
    assert session.run("--version", "vjob") and session.steps[0].saw.startswith("vjob")
    with pytest.raises(WalkthroughFailed, match=re.escape("no 'x.y'")):
        session.run("--version", "x.y")
    with pytest.raises(WalkthroughFailed, match="exit code 2, not 0"):
        session.run("status nope", "no run")
    assert find_line("a\nbc\n", "c$") == "bc" and find_line("", "x") is None
