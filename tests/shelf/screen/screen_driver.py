"""Drives the screen by Textual's own pilot: real keys, no terminal, waits with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from textual.pilot import Pilot

from tests.shelf.screen.sample_job import RecordedActions
from vjob.shelf.screen.actions import JobActions
from vjob.shelf.screen.app import StatusApp
from vjob.shelf.screen.pane import Pane
from vjob.shelf.screen.theme import UNICODE, Marks

DEADLINE_S = 180.0


class DrivenScreen:
    """A screen under test: presses keys, waits, reads the drawn text."""

    def __init__(self, app: StatusApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.live = app.live
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition; fail at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"never came\n{self.text()}"
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def until_shown(self, text: str) -> None:
        await self.until(lambda: text in self.text())

    def text(self) -> str:
        """All that is drawn, pane by pane."""
        panes = [pane for pane in self.app.screen.query(Pane) if pane.display]
        return "\n".join(shown(pane) for pane in panes)


def shown(pane: Pane) -> str:
    """What is drawn in a pane."""
    lines = [pane.render_line(y).text.rstrip() for y in range(pane.size.height)]
    return "\n".join(lines)


def drive(
    source: Any,
    script: Callable[[DrivenScreen], Awaitable[None]],
    *,
    actions: JobActions | RecordedActions | None = None,
    size: tuple[int, int] = (120, 36),
    marks: Marks = UNICODE,
    interval_s: float = 0.2,
) -> StatusApp:
    """Run the script on a screen; returns the app as it was left."""
    app = StatusApp(source, actions or RecordedActions(), interval_s=interval_s, marks=marks)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await script(DrivenScreen(app, pilot))

    asyncio.run(run())
    return app
