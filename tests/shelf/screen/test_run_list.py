"""The live list of all runs, with the keys that a user presses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from textual.pilot import Pilot

from tests import ROOT
from tests.shelf.screen.screen_driver import DEADLINE_S, shown
from varuna_core.facts.finding import Finding
from vjob.jobs.monitor.model.run_row import RunRow, render_rows
from vjob.jobs.monitor.model.snapshot import Health, Verdict
from vjob.shelf.screen import start
from vjob.shelf.screen.pages import Confirmation, TextPage
from vjob.shelf.screen.pane import Pane
from vjob.shelf.screen.run_list import LIST_KEYS, ListPlace, RunListApp
from vjob.shelf.screen.theme import ASCII, UNICODE, Marks

REASON = "rank 5 on b3 exited 9: ValueError: the tokenizer of the first stage has no such word"


def make_row(number: int, health: Health, **facts: Any) -> RunRow:
    is_over = health in (Health.DONE, Health.DEAD, Health.CANCELLED, Health.REFUSED)
    reason = REASON if health is Health.DEAD else f"it is {health.value.lower()}"
    given = {
        "run": f"gpt2-xl-20261123-10000{number}",
        "name": "gpt2-xl",
        "folder": f"/log/{number}",
        "jobs": (str(4710 + number),),
        "state": "COMPLETED" if is_over else "RUNNING",
        "is_over": is_over,
        "submitted": 1000.0 * number,
        "age_s": 9000.0 - 1000 * number,
        "verdict": Verdict(health=health, reason=reason, main=Finding("x"), advice="vjob logs JOB"),
        "message": reason,
        **facts,
    }
    return RunRow(**given)


ROWS = (
    make_row(1, Health.DEAD, step=50, num_steps=1000),
    make_row(2, Health.DONE, step=1000, num_steps=1000),
    make_row(3, Health.HEALTHY, step=600, num_steps=1000, step_s=2.31, left_s=924.0),
    make_row(4, Health.PENDING),
)


@dataclass
class Source:
    rows: Sequence[RunRow] = ROWS
    problem: str = ""
    error: Exception | None = None

    def read(self) -> Sequence[RunRow]:
        if self.error is not None:
            raise self.error
        return self.rows


@dataclass
class Recorded:
    asked: list[str] = field(default_factory=list)
    said: str = "done"

    def cancel(self, folder: str) -> str:
        self.asked.append(f"cancel {folder}")
        return self.said

    def compare(self, folders: Sequence[str], width: int) -> str:
        self.asked.append(f"compare {' '.join(folders)}")
        return "FIGURES\n" + self.said


class Driven:
    def __init__(self, app: RunListApp, pilot: Pilot[str | None]) -> None:
        self.app, self.list, self.pilot = app, app.list_screen, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    def text(self) -> str:
        panes = [pane for pane in self.app.screen.query(Pane) if pane.display]
        return "\n".join(shown(pane) for pane in panes)

    async def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"never came\n{self.text()}"
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def until_shown(self, text: str) -> None:
        await self.until(lambda: text in self.text())

    @property
    def runs(self) -> list[str]:
        return [row.folder for row in self.list.runs.rows]


def drive(
    script: Callable[[Driven], Awaitable[None]],
    *,
    source: Source | None = None,
    actions: Recorded | None = None,
    place: ListPlace | None = None,
    size: tuple[int, int] = (120, 30),
    marks: Marks = UNICODE,
    interval_s: float = 0.2,
) -> str | None:
    """Run the script on the list; returns the folder that it was left with."""
    app = RunListApp(
        source or Source(),
        actions or Recorded(),
        place or ListPlace(),
        interval_s=interval_s,
        marks=marks,
    )

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await script(Driven(app, pilot))

    asyncio.run(run())
    return app.return_value


def test_the_newest_run_stands_first_with_what_is_known_of_it() -> None:
    async def script(screen: Driven) -> None:
        await screen.until_shown("gpt2-xl-20261123-100004")
        text = screen.text()
        assert screen.runs == ["/log/4", "/log/3", "/log/2", "/log/1"]
        for word in ("600/1000", "2.31", "15 min", "HEALTHY", "RUNNING", "4713", "1 DEAD"):
            assert word in text, word

    drive(script)


def test_enter_opens_the_run_under_the_cursor_and_q_opens_none() -> None:
    async def open_it(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("down", "enter")

    async def leave(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("q")

    assert drive(open_it) == "/log/3"
    assert drive(leave) is None


def test_back_from_a_run_the_list_is_as_it_was_left() -> None:
    place = ListPlace()

    async def script(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("f", *"dead", "enter", "space", "greater_than_sign", "enter")

    assert drive(script, place=place) == "/log/1"

    async def again(screen: Driven) -> None:
        await screen.until_shown("100001")
        assert screen.runs == ["/log/1"] and screen.list.runs.marked == ["/log/1"]
        assert screen.list.runs.sorted_by == "verdict"
        await screen.press("escape")
        assert len(screen.runs) == 4

    drive(again, place=place)


def test_a_cancel_asks_first_and_what_is_over_is_not_cancelled() -> None:
    actions = Recorded()

    async def script(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("down", "c")
        assert isinstance(screen.app.screen, Confirmation) and "4713 ends" in screen.text()
        await screen.press("n")
        assert actions.asked == []
        await screen.press("c", "y")
        await screen.until_shown("cancel: done")
        await screen.press("down", "c")
        assert "nothing to cancel" in screen.text()

    drive(script, actions=actions)
    assert actions.asked == ["cancel /log/3"]


def test_two_marked_runs_are_compared() -> None:
    actions = Recorded()

    async def script(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("d")
        assert "mark two runs" in screen.text()
        await screen.press("space", "down", "down", "d")
        await screen.until(lambda: isinstance(screen.app.screen, TextPage))
        assert "FIGURES" in screen.text()
        await screen.press("escape")
        await screen.press("space", "d")
        await screen.until(lambda: isinstance(screen.app.screen, TextPage))

    drive(script, actions=actions)
    assert actions.asked == ["compare /log/4 /log/2"] * 2


def test_keys_typed_into_the_filter_do_nothing_else() -> None:
    actions = Recorded()

    async def script(screen: Driven) -> None:
        await screen.until_shown("100004")
        await screen.press("f", "q", "c", "d", "o")
        assert screen.list.prompt.value == "qcdo" and screen.runs == []
        await screen.press("escape")
        assert len(screen.runs) == 4

    drive(script, actions=actions)
    assert actions.asked == []


def test_a_read_that_fails_is_said_and_the_next_is_tried() -> None:
    source = Source(error=OSError("the file server is away"))

    async def script(screen: Driven) -> None:
        await screen.until_shown("the file server is away")
        source.error = None
        await screen.until_shown("100004")
        source.problem = "squeue has no answer"
        await screen.until_shown("squeue has no answer")

    drive(script, source=source)


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (80, 24), (200, 60)])
@pytest.mark.parametrize("marks", [UNICODE, ASCII])
def test_every_size_has_its_lines_and_no_more(size: tuple[int, int], marks: Marks) -> None:
    async def script(screen: Driven) -> None:
        await screen.until(lambda: screen.runs)
        await screen.press("down", "down", "down")
        for pane in screen.app.screen.query(Pane):
            lines = shown(pane).split("\n")
            assert max(map(len, lines)) <= size[0]
        text = screen.text()
        assert marks.is_unicode or text.isascii()
        if size[0] >= 80:
            words = " ".join(text.split())
            assert "DEAD" in words and "has no such word" in words and "50/1000" in words

    drive(script, size=size, marks=marks)


def test_of_many_runs_it_shows_only_those_that_are_seen() -> None:
    rows = [replace(ROWS[2], folder=f"/log/{n}", run=f"run-{n}", submitted=n) for n in range(1000)]

    async def script(screen: Driven) -> None:
        await screen.until_shown("run-999")
        await screen.press("end")
        await screen.until_shown("run-0")

    drive(script, source=Source(rows=rows), interval_s=60)


def test_an_opened_run_is_shown_and_then_the_list_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(["/log/3", "/log/1", None])
    opened: list[str] = []
    monkeypatch.setattr("vjob.shelf.screen.run_list.run_list", lambda *args, **facts: next(left))
    monkeypatch.setattr(start, "show", lambda job, here, every: opened.append(job) or 0)
    assert start.show_runs(ROOT, 2.0) == 0
    assert opened == ["/log/3", "/log/1"]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_table_fits_its_width_and_keeps_every_reason_whole(width: int) -> None:
    lines = render_rows(ROWS, width).splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    assert "15 min" in words and "no runs yet" in render_rows([], width)
    assert all(word in words for word in REASON.split())
    if width != 200:
        assert REASON in words


def test_a_run_whose_logs_were_not_read_says_so() -> None:
    """Its cells were empty after a budget of a second, as if it had no steps."""
    rows = [replace(ROWS[0], step=None, is_read=False), *ROWS[1:]]
    said = render_rows(rows, 120)
    words = "the logs of the run marked ? were not read in time; `vjob status RUN` reads them"
    assert said.endswith(words)
    assert "?" in said.splitlines()[1]
    assert "marked ?" not in render_rows(ROWS, 120)


def test_the_document_has_every_key_of_the_list() -> None:
    text = (ROOT / "docs/status.md").read_text()
    part = text[text.index("## All runs") : text.index("## Any Slurm job")]
    for keys, _ in LIST_KEYS:
        for key in keys.replace(",", " ").split():
            assert f"`{key}`" in part or key in ("arrows", "mouse"), key
