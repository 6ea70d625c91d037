"""`vjob report --png`: the page as a picture, by the browser that is there.

Not by kaleido: it draws plotly's figures alone, and drives a Chrome for that too; the timeline is a
canvas of the page's own.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from vjob.jobs.errors import VjobError
from vjob.jobs.process import run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH = 1280
TALLEST = 16_000
"""Pixels; Chromium's pictures end a little above."""
TIMEOUT_S = 180.0


def write_png(page: Path, target: Path) -> None:
    """All of the page, 1280 pixels wide."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise VjobError(
            f"a picture needs one of {', '.join(BROWSERS)} on PATH, and none is: install chromium, "
            "or open the page elsewhere and print it"
        )
    with tempfile.TemporaryDirectory(prefix="vjob-") as folder:
        command = [
            browser,
            "--headless",
            f"--user-data-dir={folder}",
            "--hide-scrollbars",
            "--disable-gpu",
            # The page says when it is drawn; until then its time runs as fast as it can.
            "--virtual-time-budget=60000",
            *(["--no-sandbox"] if os.getuid() == 0 else []),
        ]
        asked = [*command, f"--window-size={WIDTH},900", "--dump-dom", page.as_uri()]
        found = re.search(r'<html[^>]*\bdata-height="(\d+)"', run(asked, timeout_s=TIMEOUT_S).out)
        if found is None:
            raise VjobError(f"{browser} did not draw the page")
        height = min(TALLEST, int(found.group(1)))
        shot = Path(folder) / "page.png"
        size = [f"--window-size={WIDTH},{height}", f"--screenshot={shot}"]
        done = run([*command, *size, page.as_uri()], timeout_s=TIMEOUT_S)
        if not shot.exists():
            raise VjobError(f"{browser} wrote no picture: {done.err.strip()[-300:]}")
        shutil.copyfile(shot, target)
