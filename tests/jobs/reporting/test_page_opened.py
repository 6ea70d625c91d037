"""`--open`: with a browser, and where there is none."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.reports.traces import write_simulated
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.shelf.commands.cli import cli


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write_simulated(tmp_path / "job", build_schedule("1f1b", 2, 3), build_even_costs(2))
    return tmp_path / "job"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_page_is_opened_where_it_can_be(
    job: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    opened: list[str] = []

    def show(url: str) -> bool:
        opened.append(url)
        return is_there

    monkeypatch.setattr(webbrowser, "open", show)
    done = CliRunner().invoke(cli, ["report", "job", "--open"])
    assert done.exit_code == 0, done.output
    assert opened == [(job / "report.html").as_uri()]
    assert ("copy the file" in done.output) is not is_there
