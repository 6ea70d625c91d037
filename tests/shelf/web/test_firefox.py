"""The report in Firefox: what Chromium does not show of a standard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.page.firefox import Firefox, start_firefox
from tests.shelf.web.test_serve import write_report_job
from vjob.jobs.reporting.report import ReportOutputs, write_report

pytestmark = pytest.mark.browser

FIGURES = "document.querySelectorAll('.plot > svg').length"
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
    return write_report_job(tmp_path / "job")


def test_a_report_is_drawn(job: Path, firefox: Firefox) -> None:
    page = job.with_name("report.html")
    write_report(str(job), job.parent, lambda text: None, ReportOutputs(output=page))
    firefox.open(page.as_uri())
    firefox.wait_until("document.documentElement.dataset.drawn")
    assert firefox.evaluate(QUIET) and firefox.evaluate(FIGURES) >= 2
    assert firefox.evaluate("document.querySelectorAll('#step option').length") == 4
    assert firefox.evaluate(PAINTED) > 4
