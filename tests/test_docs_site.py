"""The site of the documents builds without a warning, and a reader's browser asks nobody else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.reports.page.browser import DRAWN_MS, start_browser

TYPE_UNTIL_FOUND = """() => {
  const input = document.querySelector("input.md-search__input");
  input.value = "sbatch";
  input.focus();
  input.dispatchEvent(new Event("keyup"));
  return document.querySelector(".md-search-result__item");
}"""
"""It types again and again, for a key pressed before the page listens is lost."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    beside = Path(sys.executable).with_name("mkdocs")
    mkdocs = str(beside) if beside.exists() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    """mkdocs has warned of links, anchors, and pages that no menu leads to."""
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists(), name


def test_what_is_not_a_page_is_not_in_the_site(site: Path) -> None:
    assert not (site / "make").exists()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Links that a reader may follow are no loading."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        found = re.findall(r'\ssrc="?((?:https?:)?//[^\s">]*)', text)
        found += re.findall(r'<link\s[^>]*href="?((?:https?:)?//[^\s">]*)', text)
        assert not found, page.name
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text())


@pytest.mark.browser
def test_the_site_can_be_searched_without_a_server(site: Path) -> None:
    """Browsers start no worker for a page of file://, which is where the search runs otherwise."""
    with contextlib.contextmanager(start_browser)() as browser:
        page = browser.new_page()
        page.goto((site / "index.html").as_uri())
        page.wait_for_function(TYPE_UNTIL_FOUND, polling=500, timeout=DRAWN_MS)


def test_every_picture_is_small_and_stands_on_a_page() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").glob("**/*.md")]
    pages = "".join([*texts, (ROOT / "README.md").read_text()])
    pictures = [path for path in (ROOT / "docs/pictures").rglob("*") if path.is_file()]
    assert len(pictures) > 20
    for path in pictures:
        assert path.stat().st_size < 200_000, path.name
        assert f"pictures/{path.relative_to(ROOT / 'docs/pictures')})" in pages, path.name


def test_the_pictures_are_what_the_schedules_draw(tmp_path: Path) -> None:
    """`make pictures` makes them anew."""
    subprocess.run(
        [sys.executable, "docs/make/schedules.py", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=True,
    )
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    there = (ROOT / "docs/pictures/schedules").glob("*.svg")
    assert drawn == {path.name: path.read_text() for path in there}
