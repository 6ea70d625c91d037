"""The page in a browser: what a reader does with it, and that nothing of a log runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page.browser import Tab, start_browser
from tests.reports.traces import MS, write_rank, write_simulated
from varuna_core.records.logs.training_log import Iteration, format_iteration, format_job_info
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job
from vjob.reports.page.figure import MOST_STRIPS
from vjob.reports.page.run_page import render_page

pytestmark = pytest.mark.browser

EVIL = "<script>document.title = 'hacked'</script><img src=x onerror=alert(1)>"
RANKS = 4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from start_browser()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, two replicas, four micro-batches; each step is longer than the one before.

    1f1b with F, B of one and two units; a step's 15 units are 15 to 18 ms.
    """
    folder = tmp_path_factory.mktemp("page")

    def cost(step: int, replica: int) -> Costs:
        unit = 1 + 0.02 * step
        return Costs(forward=(unit,) * 2, input_grad=(unit,) * 2, weight_grad=(unit,) * 2)

    write_simulated(
        folder, build_schedule("1f1b", 2, 4), cost, steps=range(1, 9), replicas=2, hosts=(EVIL, "b")
    )
    lines = [Iteration(step, 8, time_ms=15.0, losses={"lm loss": 9.0 - step}) for step in (4, 8)]
    text = (
        format_job_info({"NODE_RANK": 0, "MODEL": EVIL})
        + "\n"
        + "\n".join(map(format_iteration, lines))
    )
    (folder / "n0.out").write_text(text)
    (folder / f"{EVIL.replace('/', '_')}.gpu.jsonl").write_text("broken\n")
    return write_page(folder)


def write_page(folder: Path, *, is_partial: bool = False) -> Path:
    job = load_job(folder, more_events=1000)
    analysis = analyse(job)
    page = folder / "report.html"
    text = render_page(
        job,
        analysis,
        find_all(job, analysis),
        is_partial=is_partial,
        made_at="2026-11-21 12:00 UTC",
    )
    page.write_text(text)
    return page


def test_the_page_opens_without_errors_or_a_network(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        assert tab.troubles == []
        assert [url for url in tab.requests if not url.startswith(("file:", "blob:"))] == []
        assert tab.page.locator(".plot > svg").count() >= 4
        assert not tab.page.locator("#trouble").is_visible()
        assert "Ranks are idle" in tab.page.locator("#findings li").first.inner_text()


def test_what_a_log_says_is_text(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        assert tab.page.title() != "hacked"
        cells = tab.page.locator("#section-job td").all_inner_texts()
        assert cells.count(EVIL) >= 2  # the model's name, a host
        assert tab.page.locator("img:not(.paper)").count() == 0
        assert EVIL in tab.read_tip(0.01, 0, RANKS)
        assert tab.troubles == []


def test_pointing_shows_the_event(browser: Any, path: Path) -> None:
    """Rank 0 runs F0 F1, then waits; rank 2 is stage 1's first and starts one unit later."""
    with Tab(browser, path) as tab:
        first = tab.read_tip(0.5 / 15, 0, RANKS)
        assert "forward, micro-batch 0" in first and "rank 0, stage 0, replica 0" in first
        assert "micro-batch 1" in tab.read_tip(1.5 / 15, 0, RANKS)
        other = tab.read_tip(3 / 15, 2, RANKS)
        assert "backward, micro-batch 0" in other and "rank 2, stage 1" in other
        waiting = tab.read_tip(0.5 / 15, 2, RANKS)
        assert "forward, micro-batch 0" in waiting and "waited 1.1 ms before" in waiting
        assert tab.read_tip(14.5 / 15, 2, RANKS) == ""


def test_a_drag_zooms_in_and_a_double_click_out(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        before = tab.read_tip(0.5, 1, RANKS)
        tab.page.mouse.move(*tab.find_pixel(0, 1, RANKS))
        tab.page.mouse.down()
        tab.page.mouse.move(*tab.find_pixel(2 / 15, 1, RANKS), steps=3)
        tab.page.mouse.up()
        tab.page.evaluate("() => new Promise(requestAnimationFrame)")
        assert "micro-batch 0" in tab.read_tip(0.2, 1, RANKS)
        assert "micro-batch 1" in tab.read_tip(0.8, 1, RANKS)
        tab.page.mouse.dblclick(*tab.find_pixel(0.5, 1, RANKS))
        tab.page.evaluate("() => new Promise(requestAnimationFrame)")
        assert tab.read_tip(0.5, 1, RANKS) == before


def test_the_selector_has_all_held_steps_and_those_of_interest(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        options = tab.page.locator("#step option").all_inner_texts()
        assert [text.split()[0] for text in options] == [str(step) for step in range(1, 9)]
        presets = tab.page.locator("#presets button")
        assert presets.all_inner_texts() == ["first", "median", "slowest", "last"]
        assert "1.02 ms" in say_length(tab, "first")
        assert "1.16 ms" in say_length(tab, "slowest")
        assert tab.page.locator("#step").input_value() == "7"
        tab.page.locator("#before").click()
        tab.page.wait_for_selector('#which:has-text("step 7")', state="attached")
        tab.page.locator("#step").select_option("1")
        tab.page.wait_for_selector('#which:has-text("step 2")', state="attached")


def say_length(tab: Tab, preset: str) -> str:
    """The first forward of a step, which takes its unit."""
    tab.page.get_by_role("button", name=preset, exact=True).click()
    tab.page.evaluate("() => new Promise(requestAnimationFrame)")
    return tab.read_tip(0.5 / 15, 0, RANKS)


def test_keys_go_from_event_to_event(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        tab.page.locator("#lanes .marks").focus()
        tab.page.mouse.click(*tab.find_pixel(0.5 / 15, 0, RANKS))
        chosen = tab.page.locator("#chosen")
        assert "forward, micro-batch 0" in chosen.inner_text()
        tab.page.keyboard.press("ArrowRight")
        assert "forward, micro-batch 1" in chosen.inner_text()
        tab.page.keyboard.press("ArrowDown")
        assert "rank 1" in chosen.inner_text()
        for key in ("w", "d", "s", "a", "0", "Escape"):
            tab.page.keyboard.press(key)
        assert chosen.inner_text() == "" and tab.troubles == []
        tab.page.keyboard.press("]")
        tab.page.wait_for_selector('#which:has-text("step 6")', state="attached")


def test_messages_and_the_critical_path_are_drawn_when_asked_for(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        assert tab.count_marks() == 0
        tab.page.locator("#messages").check()
        messages = tab.count_marks()
        tab.page.locator("#messages").uncheck()
        tab.page.locator("#path").check()
        assert messages > 100 and tab.count_marks() > 100
        tab.page.locator("#path").uncheck()
        assert tab.count_marks() == 0


def read_colours(tab: Tab) -> tuple[str, int]:
    """The theme, and how bright the canvas is where nothing runs."""
    brightness = tab.page.evaluate(
        """() => {
          const canvas = document.querySelector("#lanes .bars");
          return canvas.getContext("2d").getImageData(3, canvas.height - 3, 1, 1).data[0];
        }"""
    )
    return str(tab.page.evaluate("document.documentElement.dataset.theme")), int(brightness)


def test_dark_and_light(browser: Any, path: Path) -> None:
    with Tab(browser, path, color_scheme="dark") as tab:
        theme, brightness = read_colours(tab)
        assert theme == "dark" and brightness < 60
        tab.page.locator("#theme").click()
        theme, brightness = read_colours(tab)
        assert theme == "light" and brightness > 200


def test_a_dark_page_prints_light_with_its_timeline(browser: Any, path: Path) -> None:
    with Tab(browser, path, color_scheme="dark") as tab:
        tab.page.wait_for_selector("#lanes img[src]", state="attached")
        printed = tab.page.pdf(prefer_css_page_size=True, print_background=True)
        assert printed.startswith(b"%PDF") and printed.count(b"/Subtype /Image") >= 1
        assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
        tab.page.emulate_media(media="print")
        assert tab.page.locator("#lanes .paper").is_visible()
        assert not tab.page.locator("#lanes .bars").is_visible()
        assert not tab.page.locator(".tools").is_visible()


def test_without_scripts_findings_and_tables_are_whole(browser: Any, path: Path) -> None:
    with Tab(browser, path, java_script_enabled=False) as tab:
        assert tab.page.locator("#findings li").count() > 3
        assert tab.page.locator("noscript p").is_visible()


def test_a_job_with_logs_alone_that_still_runs(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "n0.out").write_text(format_iteration(Iteration(10, 50, time_ms=15.0)) + "\n")
    (tmp_path / "record.json").write_text(json.dumps({}))
    with Tab(browser, write_page(tmp_path, is_partial=True)) as tab:
        assert tab.troubles == []
        assert tab.page.get_by_text("has not ended").is_visible()
        assert "profile.timeline" in tab.page.locator("#timeline").inner_text()


def test_a_click_on_a_step_shows_its_timeline(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        rows = 0
        while not walk(tab, "run", "ArrowDown").startswith("step 1"):
            rows += 1
            assert rows < 20, "step times come after the ranks' work and what happened"
        assert walk(tab, "run", "ArrowRight", "ArrowRight").startswith("step 3")
        walk(tab, "run", "Enter")
        tab.page.wait_for_selector('#which:has-text("step 3")', state="attached")
        assert tab.troubles == []


def walk(tab: Tab, figure: str, *keys: str) -> str:
    """What a chart says after these keys."""
    for key in keys:
        tab.page.locator(f"#figure-{figure} > svg").press(key)
    return str(tab.page.locator(f"#figure-{figure} .tip").text_content())


def read_marks(tab: Tab, figure: str) -> list[str]:
    """The texts of a chart, once it is drawn: titles and the marks of its axes."""
    tab.page.evaluate("() => new Promise(requestAnimationFrame)")
    return [str(text) for text in tab.page.locator(f"#figure-{figure} text").all_text_contents()]


def test_keys_go_from_value_to_value_of_a_chart(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        assert walk(tab, "training", "ArrowRight") == "step 4: 5\nloss"
        assert walk(tab, "training", "ArrowRight") == "step 8: 1\nloss"
        assert walk(tab, "training", "ArrowLeft", "ArrowLeft") == "step 4: 5\nloss"
        assert walk(tab, "training", "Escape") == "" and tab.troubles == []


def test_a_chart_is_pointed_at_zoomed_and_shown_whole(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        chart = tab.page.locator("#figure-training > svg")
        chart.scroll_into_view_if_needed()
        box, whole = chart.bounding_box(), read_marks(tab, "training")
        tab.page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 200)
        assert tab.page.locator("#figure-training .tip").inner_text() == "step 8: 1\nloss"
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100, steps=3)
        tab.page.mouse.up()
        zoomed = read_marks(tab, "training")
        assert "5" in whole and "5" not in zoomed and "7" in zoomed
        chart.dblclick()
        assert read_marks(tab, "training") == whole and tab.troubles == []


def test_a_name_hides_its_series_and_the_loss_has_a_log_scale(browser: Any, path: Path) -> None:
    with Tab(browser, path) as tab:
        bars = tab.page.locator("#figure-shares .frame rect")
        assert bars.count() == 8
        tab.page.get_by_role("button", name="waiting for work of other ranks").click()
        assert bars.count() == 6
        before = read_marks(tab, "training")
        button = tab.page.get_by_role("button", name="loss on a log scale")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert read_marks(tab, "training") != before


def test_plotly_is_on_a_page_only_where_it_draws(browser: Any, path: Path, tmp_path: Path) -> None:
    """An ordinary page is a fifth of plotly's size."""
    assert path.stat().st_size < 400_000
    for rank in range(MOST_STRIPS + 1):
        events = [("F", 1, 0, 0, 0, 0, MS, 0, ""), ("data", 1, 0, -1, 0, 0, 9 * MS, 0, "")]
        write_rank(tmp_path, rank, events, replica=rank)
    with Tab(browser, write_page(tmp_path)) as tab:
        assert tab.page.locator(".plot.js-plotly-plot").count() == 1
        assert tab.page.locator(".plot > svg").count() == 2
        assert tab.page.get_by_text("holds plotly").is_visible() and tab.troubles == []
