"""Live page and report in Firefox: what Chromium does not show of a standard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.page.firefox import Firefox, start_firefox
from tests.shelf.web.test_live_report import TOKEN, serve, write_steps
from vjob.jobs.reporting.report import ReportOutputs, write_report
from vjob.shelf.web import report as live_report
from vjob.shelf.web.report import GROWS_ALONE

pytestmark = pytest.mark.browser

FIGURES = "document.querySelectorAll('.plot.js-plotly-plot').length"
QUIET = "document.getElementById('trouble').hidden"
PAINTED = """(() => {
  const canvas = document.querySelector('#lanes canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})()"""
"""How many colours the timeline has."""


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    yield from start_firefox(tmp_path_factory.mktemp("firefox"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(live_report, "EVERY_S", 0.2)
    write_steps(tmp_path / "job", 4)
    return tmp_path / "job"


def test_a_report_is_drawn(job: Path, firefox: Firefox) -> None:
    page = job.with_name("report.html")
    write_report(str(job), job.parent, lambda text: None, ReportOutputs(output=page))
    firefox.open(page.as_uri())
    firefox.wait_until("document.documentElement.dataset.drawn")
    assert firefox.evaluate(QUIET) and firefox.evaluate(FIGURES) >= 2
    assert firefox.evaluate("document.querySelectorAll('#step option').length") == 4
    assert firefox.evaluate(PAINTED) > 4


def test_a_live_page_grows(job: Path, firefox: Firefox) -> None:
    with serve(job) as server:
        firefox.open(f"http://127.0.0.1:{server.port}/{TOKEN}/")
        firefox.wait_until(f"{FIGURES} >= 2")
        firefox.wait_until(f"document.getElementById('live').textContent === {GROWS_ALONE!r}")
        write_steps(job, 6)
        firefox.wait_until("document.getElementById('step').selectedOptions[0]?.text[0] === '6'")
        firefox.wait_until("document.querySelectorAll('#step option').length === 6")
        assert firefox.evaluate(QUIET) and firefox.evaluate(PAINTED) > 4
        firefox.open("about:blank")
