"""Pages of `vjob status --web` and `vjob report` in windows of four widths, light and dark.

    python -m benchmarks.commands.screens --axe axe.min.js [--pictures FOLDER] [--write]

It counts the rules of axe-core that a page breaks (`npm pack axe-core` has the file, which is no
part of this repository), errors of scripts, and pages that are wider than their window. The pages
are those of docs/pictures.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks import RESULTS
from docs.make.pictures import DRAWN, open_runs, open_status, serve, write_page, write_sample

RESULT = RESULTS / "screens.md"
WIDTHS = (390, 768, 1280, 1920)
SERIOUS = ("critical", "serious")
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LOOKS = ("light", "dark")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One page in one window."""

    page: str
    width: int
    look: str
    passes: int
    violations: Sequence[tuple[str, str]]
    """The impact and the name of each rule that it breaks."""
    too_wide: int
    """Pixels beyond the window's right edge."""
    troubles: Sequence[str]
    """Errors of its scripts."""


class Inspector:
    """A browser that opens pages and asks axe."""

    def __init__(self, browser: Any, axe: str, pictures: Path | None) -> None:
        self._browser, self._axe, self._pictures = browser, axe, pictures

    def look_at(self, page: str, url: str, wait: str) -> list[Row]:
        """The page in each window."""
        return [self._look(page, url, wait, width, look) for width in WIDTHS for look in LOOKS]

    def _look(self, page: str, url: str, wait: str, width: int, look: str) -> Row:
        context = self._browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=look,
            bypass_csp=True,  # or the page's policy keeps axe out
        )
        tab = context.new_page()
        troubles: list[str] = []
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.goto(url)
        tab.wait_for_selector(wait, state="attached")
        if self._pictures is not None:
            tab.screenshot(path=self._pictures / f"{page}-{width}-{look}.png", full_page=True)
        too_wide = int(tab.evaluate(WIDER))
        tab.evaluate(self._axe)
        found = tab.evaluate("axe.run()")
        context.close()
        return Row(
            page=page,
            width=width,
            look=look,
            passes=len(found["passes"]),
            violations=[(one["impact"], one["id"]) for one in found["violations"]],
            too_wide=too_wide,
            troubles=troubles,
        )


def inspect_pages(axe: str, pictures: Path | None) -> list[Row]:
    """All pages in all windows."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        inspector = Inspector(browser, axe, pictures)
        report = write_page(write_sample(Path(folder)))
        rows = inspector.look_at("report", report.as_uri(), DRAWN)
        for page, open_it, wait in (
            ("job", open_status, "#lines div"),
            ("runs", open_runs, "#runs td"),
        ):
            with serve(open_it()) as url:
                rows += inspector.look_at(page, url, wait)
        browser.close()
    return rows


def render(rows: Sequence[Row]) -> str:
    """The result page."""
    serious = sum(impact in SERIOUS for row in rows for impact, _ in row.violations)
    lines = [
        "# Pages in a browser",
        "",
        "Made by `python -m benchmarks.commands.screens --axe axe.min.js --write`, with Chromium",
        "and axe-core. The report is that of a run of eight ranks, the job has a hot GPU, the list",
        "has eight runs: those of docs/pictures.",
        "",
        f"Serious or critical violations: {serious}. Pages wider than their window: "
        f"{sum(row.too_wide > 0 for row in rows)} of {len(rows)}. Errors of scripts: "
        f"{sum(len(row.troubles) for row in rows)}.",
        "",
        "| page | width | look | rules that hold | violations | too wide, pixels |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        violations = ", ".join(map(": ".join, row.violations)) or "none"
        cells = (row.page, row.width, row.look, row.passes, violations, row.too_wide)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it as the result page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axe", type=Path, required=True, help="axe-core's axe.min.js")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each window")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    text = render(inspect_pages(args.axe.read_text("utf-8"), args.pictures))
    if args.write:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
