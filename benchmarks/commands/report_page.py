"""The page of a million events against `px.timeline` of a hundred thousand bars, in one browser.

Both are measured from navigation to the frame after the last picture was drawn, three times in
turn; the middle one counts. Debian's chromium, headless, without a GPU.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from varuna_core.records.logs.trace import COLUMNS, FORMAT

STEPS = 4
BARS = 100_000
TRIES = 3
ZOOM = """() => new Promise((done) => {
  const canvas = document.querySelector("canvas.marks");
  const begin = performance.now();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "w" }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""
ZOOM_PLOTLY = """() => new Promise((done) => {
  const figure = document.querySelector(".js-plotly-plot");
  const [from, to] = figure.layout.xaxis.range.map((time) => Number(new Date(time)));
  const begin = performance.now();
  Plotly.relayout(figure, { "xaxis.range": [from + (to - from) * 0.15, to - (to - from) * 0.15] });
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""
MARK = "requestAnimationFrame(() => (document.documentElement.dataset.drawn = performance.now()));"


def write_noisy_trace(path: Path, rank: int, num_events: int, stages: int) -> None:
    """Waits and works that no packing can guess."""
    draw = random.Random(rank)
    stage, replica = rank % stages, rank // stages
    header = {"trace": FORMAT, "rank": rank, "stages": [stage], "replica": replica, "host": "n0"}
    lines = [json.dumps({**header, "origin": 1_700_000_000_000_000_000, "columns": COLUMNS})]
    now, half = 0, num_events // 2
    for step in range(1, STEPS + 1):
        begin, work_ns = now, 0
        for at in range(num_events):
            kind = "F" if at % 2 else "B"
            wait, work = draw.randrange(400_000), 900_000 + draw.randrange(200_000)
            lines.append(f'["{kind}",{step},{stage},{at // 2},{now},{wait},{work},65536,""]')
            now += wait + work
            work_ns += work
        sums = {"F": [half, 0, work_ns // 2], "B": [half, 0, work_ns // 2]}
        total = {"step": step, "begin": begin, "took": now - begin, "first": begin, "last": now}
        lines.append(json.dumps({**total, "sums": sums}))
        now = step * num_events * 1_500_000
    path.write_text("\n".join(lines) + "\n")


def write_page(folder: Path, page: Path) -> float:
    """Seconds to read and write it."""
    from vjob.jobs.reporting.report import MORE_EVENTS
    from vjob.reports.analysis.findings import find_all
    from vjob.reports.analysis.measures import analyse
    from vjob.reports.load.tables import load_job
    from vjob.reports.page.run_page import render_page

    begin = time.perf_counter()
    job = load_job(folder, more_events=MORE_EVENTS)
    analysis = analyse(job)
    findings = find_all(job, analysis)
    text = render_page(job, analysis, findings, is_partial=False, made_at="today")
    page.write_text(text)
    return time.perf_counter() - begin


def write_px_timeline(page: Path) -> None:
    """The way of the seed: a row a bar, a colour a task."""
    import pandas as pd
    import plotly.express as px

    draw = random.Random(0)
    ranks = [at % 32 for at in range(BARS)]
    begins = [at // 32 * 1.2 for at in range(BARS)]
    table = pd.DataFrame(
        {
            "rank": [f"rank {rank}" for rank in ranks],
            "task": ["forward" if at // 32 % 2 else "backward" for at in range(BARS)],
            "start": pd.to_datetime(begins, unit="ms"),
            "end": pd.to_datetime([begin + 1 + draw.random() / 5 for begin in begins], unit="ms"),
        }
    )
    figure = px.timeline(table, x_start="start", x_end="end", y="rank", color="task")
    figure.write_html(page, include_plotlyjs=True, post_script=MARK)


def measure_page(folder: Path, num_events: int) -> list[str]:
    """Size, first draw, zoom."""
    from playwright.sync_api import sync_playwright

    (folder / "trace").mkdir(parents=True)
    num_ranks = 256
    for rank in range(num_ranks):
        path = folder / "trace" / f"{rank}.jsonl"
        write_noisy_trace(path, rank, num_events // STEPS // num_ranks, stages=8)
    ours, theirs = folder / "ours.html", folder / "theirs.html"
    made_s = write_page(folder, ours)
    write_px_timeline(theirs)
    found: dict[Path, list[tuple[float, float]]] = {ours: [], theirs: []}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for _ in range(TRIES):
            for page, zoom in ((ours, ZOOM), (theirs, ZOOM_PLOTLY)):
                found[page].append(_measure_one(browser, page, zoom))
        browser.close()
    (draw_ms, zoom_ms), (their_draw_ms, their_zoom_ms) = (
        [sorted(times)[TRIES // 2] for times in zip(*found[page], strict=True)]
        for page in (ours, theirs)
    )
    size_mb, their_mb = (page.stat().st_size / 1e6 for page in (ours, theirs))
    return [
        f"The page of {num_events // STEPS // num_ranks * num_ranks * STEPS} events of {num_ranks} "
        f"ranks, made in {made_s:.1f} s, against `px.timeline` with {BARS} bars.",
        "",
        "| | page | px.timeline | ratio | bound |",
        "|---|---|---|---|---|",
        f"| MB | {size_mb:.1f} | {their_mb:.1f} | | 15 |",
        f"| first complete draw, ms | {draw_ms:.0f} | {their_draw_ms:.0f} "
        f"| {draw_ms / their_draw_ms:.3f} | 0.25 |",
        f"| zoom, ms | {zoom_ms:.0f} | {their_zoom_ms:.0f} "
        f"| {zoom_ms / their_draw_ms:.3f} of the draw | 0.1 |",
        "",
    ]


def _measure_one(browser: Any, page: Path, zoom: str) -> tuple[float, float]:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(page.as_uri(), timeout=600_000)
    tab.wait_for_selector("html[data-drawn]", state="attached", timeout=600_000)
    drawn_ms = float(tab.evaluate("document.documentElement.dataset.drawn"))
    zoom_ms = float(tab.evaluate(zoom))
    tab.close()
    return drawn_ms, zoom_ms
