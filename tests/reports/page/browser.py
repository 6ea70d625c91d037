"""Debian's chromium, driven by playwright; tests that need it skip where either is missing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DRAWN_MS = 120_000
"""Behaviour is tested, not speed."""


def start_browser() -> Iterator[Any]:
    """For a fixture of a whole module."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("needs playwright (pip install playwright)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page in a tab of its own, drawn; what went wrong in it is in `troubles`."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        page = self.page
        page.on("console", lambda message: self.troubles.append(message.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html[data-drawn]", state="attached", timeout=DRAWN_MS)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def find_pixel(self, share: float, lane: int, num_lanes: int) -> tuple[float, float]:
        """Where on the screen a part of the step is, in the upper part of a lane."""
        marks = self.page.locator("#lanes .marks")
        marks.scroll_into_view_if_needed()
        box = marks.bounding_box()
        left, top, right = 150, 24, 24  # painter.js: GUTTER_PX, AXIS_PX, RIGHT_PX
        width, height = box["width"] - left - right, box["height"] - top
        within = (share + 0.005) / 1.01  # a margin of half a percent on both sides
        x, y = box["x"] + left + within * width, box["y"] + top + (lane + 0.3) / num_lanes * height
        return x, y

    def read_tip(self, share: float, lane: int, num_lanes: int) -> str:
        """What pointing there shows; empty where nothing is."""
        self.page.mouse.move(*self.find_pixel(share, lane, num_lanes))
        tip = self.page.locator("#lanes .tip")
        return str(tip.inner_text()) if tip.is_visible() else ""

    def count_marks(self) -> int:
        """Pixels drawn over the bars: outlines, arrows, the critical path."""
        return int(
            self.page.evaluate(
                """() => {
                  const canvas = document.querySelector("#lanes .marks");
                  const { width, height } = canvas;
                  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
                  return data.filter((value, at) => at % 4 === 3 && value > 0).length;
                }"""
            )
        )
