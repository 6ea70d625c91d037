"""`vjob status --web`: its pages as text, and in a browser beside a job that goes on."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command import HOST, Vjob, wait_for
from tests.reports.page.browser import DRAWN_MS, start_browser
from tests.shelf.screen.sample_job import HEALTHY, NOW, make_snapshot
from varuna_core.facts.finding import Finding
from vjob.jobs.monitor.model.snapshot import COUNTED, Health, Point, Verdict
from vjob.jobs.monitor.model.text import format_progress
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.monitor.rules.pace import find_pace_s
from vjob.shelf.screen.heading import render_heading
from vjob.shelf.screen.theme import ASCII
from vjob.shelf.web import status as live_status
from vjob.shelf.web.server import LivePage, Server, Site
from vjob.shelf.web.status import (
    LIVE,
    MOST_ROWS,
    OVER,
    build_job_page,
    build_runs_page,
    draw_curve,
    open_job,
    open_place,
    open_runs,
    render,
)

EVIL = "<script>document.title = 'hacked'</script><img src=x onerror=alert(1)>"


def test_a_page_has_verdict_progress_nodes_and_gpus() -> None:
    verdict = Verdict(
        health=Health.SLOW, reason="n062 holds it up", main=Finding("straggler"), node="n062",
        advice="cluster.exclude: [n062]", remarks=("a disk is full",),
    )  # fmt: skip
    page = build_job_page(make_snapshot(4), verdict)
    assert (page.health, page.reason) == ("SLOW", "n062 holds it up")
    assert dict(page.progress)["step"] == "1280 of 10000" and page.share == 12.8
    nodes, gpus = (table for _, _, table in page.tables)
    assert [row.cells[0].text for row in nodes.rows] == ["n062", "n060", "n061", "n063"]
    assert [row.is_marked for row in nodes.rows] == [True, False, False, False]
    assert len(gpus.rows) == 16 and all(len(row.cells) == len(gpus.columns) for row in gpus.rows)
    assert all(len(row.cells) == len(nodes.columns) for row in nodes.rows)
    text = render(page).decode()
    assert "n062 holds it up" in text and "cluster.exclude: [n062]" in text
    assert "<details><summary>1 remark<" in text


def test_one_run_has_one_step_time_everywhere() -> None:
    """Status, list, page and screen had four: medians of 5, 10 and 20 readings, the first too."""
    times = [9.0, *(1.0 + 0.1 * number for number in range(25))]
    points = tuple(Point(step=step, step_s=took) for step, took in enumerate(times, 1))
    snapshot = make_snapshot(4)
    assert snapshot.progress is not None
    snapshot = replace(snapshot, progress=replace(snapshot.progress, points=points, first_step=1))
    verdict = judge(replace(snapshot, now=NOW))
    page = build_job_page(snapshot, HEALTHY)
    heading = "".join(line.plain for line in render_heading(snapshot, HEALTHY, ASCII, 200, 9))
    assert "2.95 s a step" in verdict.reason, verdict
    assert "2.95 s a step (the median of the last 10 readings)" in format_progress(
        snapshot, is_over=False
    )
    assert dict(page.progress)["a step takes"] == "2.95 s (the median of the last 10 readings)"
    counted = replace(snapshot.progress, source=COUNTED)
    assert counted.pace_covers == "(the median of the last 10 means over 1 s or more of steps)"
    assert "2.95 s/step" in heading
    assert find_pace_s(snapshot) == pytest.approx(2.95)  # the list, its page and the API


@pytest.mark.parametrize(
    ("values", "how", "points"),
    [
        ([1.0], {}, None),
        ([None, math.nan, 2.0], {}, None),
        ([None, 1.0, None, 3.0], {}, "0.0,96.0 100.0,4.0"),
        ([2.0, 2.0], {}, "0.0,50.0 100.0,50.0"),
        ([100.0, 101.0], {"flat": 0.05}, "0.0,59.1 100.0,40.9"),
        ([50.0, 150.0], {"full": (0.0, 100.0)}, "0.0,50.0 100.0,4.0"),
    ],
)
def test_a_curve_shows_known_values_and_no_noise(
    values: list[float | None], how: dict[str, Any], points: str | None
) -> None:
    curve = draw_curve(values, **how)
    assert (curve.points if curve is not None else None) == points


def test_of_thousands_of_nodes_the_first_rows_are_shown() -> None:
    page = build_job_page(make_snapshot(1000, gpus=1), HEALTHY)
    assert [len(table.rows) for _, _, table in page.tables] == [MOST_ROWS, MOST_ROWS]
    assert page.tables[0][2].note == f"and {1000 - MOST_ROWS} more nodes"


def test_nothing_of_a_log_is_markup() -> None:
    verdict = Verdict(
        health=Health.DEAD, reason=EVIL, main=Finding("dead"), facts=(f"a\x1b[31m{EVIL}",)
    )
    text = render(build_job_page(make_snapshot(1), verdict)).decode()
    assert "<script>document" not in text and "<img" not in text and "\x1b" not in text


def test_without_runs_the_list_says_how_to_make_one() -> None:
    assert "vjob submit conf.yaml" in render(build_runs_page([])).decode()


@pytest.mark.parametrize("path", ["..", "run/..", "run/.hidden", "run/a/b", "run//report", "other"])
def test_links_lead_to_runs_alone(path: str, tmp_path: Path) -> None:
    assert open_place(path, None, tmp_path) is None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from start_browser()


@contextlib.contextmanager
def show(browser: Any, first: LivePage, job: str | None, here: Path) -> Iterator[Any]:
    """A tab of the page, which must have no errors."""
    site = Site(first, lambda path: open_place(path, job, here), "token")
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    troubles: list[str] = []
    with Server(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            tab = context.new_page()
            tab.set_default_timeout(DRAWN_MS)
            tab.on("pageerror", lambda error: troubles.append(str(error)))
            tab.on("console", lambda message: troubles.append(message.text))
            tab.goto(f"http://127.0.0.1:{server.port}/token/")
            yield tab
        finally:
            context.close()
            server.shutdown()
            thread.join()
            site.close()
    assert troubles == []


PRESS_LATE = """() => {
  const ask = fetch;
  window.fetch = async (...words) => {
    const answer = await ask(...words);
    if (words[0].startsWith("part/")) {
      window.fetch = ask;
      window.pressed = document.querySelector("#runs td a");
      dispatchEvent(new PointerEvent("pointerdown"));
    }
    return answer;
  };
}"""


def wait_until(tab: Any, expression: str) -> None:
    wait_for(lambda: tab.evaluate(expression), DRAWN_MS / 1000, lambda: str(tab.inner_text("body")))


@pytest.mark.browser
def test_lines_come_as_they_are_written_and_the_filter_stays(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "EVERY_S", 0.2)
    folder = tmp_path / "logs"
    folder.mkdir()
    log = folder / "n060.out"
    log.write_text(f"step 1/9 loss 2.5\n{EVIL}\n")
    with show(browser, open_job(str(folder), tmp_path, ()), str(folder), tmp_path) as tab:
        tab.wait_for_selector("#lines div")
        assert tab.locator("#lines div").all_inner_texts() == [
            "n060 | step 1/9 loss 2.5", f"n060 | {EVIL}",
        ]  # fmt: skip
        tab.locator("#filter").fill("LOSS")
        assert tab.locator("#lines div:visible").count() == 1
        with open(log, "a") as handle:
            handle.write("step 2/9 loss 1.5\nother\n")
        wait_until(tab, "document.querySelectorAll('#lines div').length === 4")
        assert tab.locator("#filter").input_value() == "LOSS"
        assert tab.locator("#lines div:visible").count() == 2
        wait_until(tab, "document.getElementById('progress').innerText.includes('2 of 9')")
        assert tab.locator("#live").inner_text() == LIVE and tab.title() == "logs - vjob status"


def choose_runs(tab: Any, name: str) -> None:
    """Search, sort and choose, and see that a table which is replaced keeps all of it."""
    word, rows = tab.locator("#runs-word"), tab.locator("#runs tbody tr:visible")
    word.fill("no such run")
    assert rows.count() == 0
    seen = tab.evaluate("document.documentElement.dataset.version")
    wait_until(tab, f"document.documentElement.dataset.version !== {seen!r}")
    assert rows.count() == 0
    word.fill(name.upper())
    assert rows.count() == 1
    tab.get_by_role("button", name="age").click()
    assert tab.locator("#runs th[aria-sort]").inner_text() == "age"
    tab.locator("#runs tbody input").check()
    assert tab.locator("#compare").is_hidden()
    word.fill("")


CONF = """
name: web
program: {{script: {script}}}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 2
  nodes: [{{group: m, count: 1, ranks: 1}}]
"""


@pytest.mark.browser
def test_from_all_runs_to_one_and_to_its_end(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "EVERY_S", 0.2)
    end = tmp_path / "end"
    (tmp_path / "train.py").write_text(
        "import pathlib, time\nprint('step 1/1 loss 2.0', flush=True)\n"
        f"while not pathlib.Path({str(end)!r}).exists():\n    time.sleep(0.05)\n"
    )
    vjob = Vjob(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", vjob.env["XDG_STATE_HOME"])
    run = vjob.submit(CONF.format(script=tmp_path / "train.py"))
    try:
        with show(browser, open_runs(), None, tmp_path) as tab:
            tab.wait_for_selector("#runs td a")
            assert tab.locator("#runs td a").inner_text() == run.path.name
            choose_runs(tab, run.path.name)
            # The button goes down while a page that has changed is on its way.
            tab.evaluate(PRESS_LATE)
            wait_until(tab, "held.isDown && held.released.length")
            assert tab.evaluate("pressed.isConnected")
            tab.evaluate("dispatchEvent(new PointerEvent('pointerup'))")
            wait_until(tab, "!pressed.isConnected")
            tab.locator("#runs td a").click(delay=700)
            wait_until(tab, "document.body?.innerText.includes('step 1/1 loss 2.0')")
            assert tab.locator("#nodes td").first.inner_text() == HOST
            end.touch()
            wait_until(tab, f"document.getElementById('live').textContent === {OVER!r}")
            assert tab.locator(".badge").inner_text() == "DONE"
            tab.get_by_text("report", exact=True).click()
            tab.wait_for_selector("#section-training")
    finally:
        end.touch()
        vjob.wait_over(run)
