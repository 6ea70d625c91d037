"""The page of a million events against `px.timeline` of a hundred thousand bars, and that of an
ordinary run against an earlier tree's, in one browser.

All are measured from navigation to the frame after the last picture was drawn, three times in turn;
the middle one counts. Debian's chromium, headless, without a GPU.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_core.records.logs.trace import COLUMNS, FORMAT

STEPS = 4
BARS = 100_000
TRIES = 3
PAGE_KB = 400
ORDINARY = "an ordinary run"
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
DRAWN = "document.documentElement.dataset.drawn"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]"
PAINTED = f"{PAINT}.startTime"
WRITE_ORDINARY = """
import pathlib, sys
from docs.make.pictures import write_page, write_sample

write_page(write_sample(pathlib.Path(sys.argv[1])))
"""
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
    (folder / "trace").mkdir(parents=True)
    num_ranks = 256
    for rank in range(num_ranks):
        path = folder / "trace" / f"{rank}.jsonl"
        write_noisy_trace(path, rank, num_events // STEPS // num_ranks, stages=8)
    ours, theirs = folder / "ours.html", folder / "theirs.html"
    made_s = write_page(folder, ours)
    write_px_timeline(theirs)
    (draw_ms, _, zoom_ms, _), (their_draw_ms, _, their_zoom_ms, _) = _measure_pages(
        {ours: ZOOM, theirs: ZOOM_PLOTLY}
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


def measure_ordinary(folder: Path, before: Path | None) -> list[str]:
    """The page of sixty steps of eight ranks by this tree, and by an earlier one."""
    pages: list[Path] = []
    for tree in (Path.cwd(), *filter(None, [before])):
        own = folder / str(len(pages))
        own.mkdir(parents=True)
        command = [sys.executable, "-c", WRITE_ORDINARY, str(own)]
        subprocess.run(command, cwd=tree, check=True)
        pages += own.glob("*/report.html")
    found = _measure_pages(dict.fromkeys(pages, ZOOM))
    lines = [
        "The page of an ordinary run, 60 steps of 8 ranks with a log and GPUs; load "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| page | KB | bound | first paint, ms | complete, ms | processor time of its thread, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, page, times in zip((ORDINARY, "the same, before"), pages, found, strict=False):
        draw, paint, _, cpu = (f"{one:.0f}" for one in times)
        size, bound = page.stat().st_size / 1000, PAGE_KB if name == ORDINARY else ""
        lines.append(f"| {name} | {size:.0f} | {bound} | {paint} | {draw} | {cpu} |")
    return [*lines, ""]


def _measure_pages(zooms: Mapping[Path, str]) -> list[list[float]]:
    """For each page the complete draw, the first paint, the zoom and processor time, in ms."""
    from playwright.sync_api import sync_playwright

    found: dict[Path, list[tuple[float, ...]]] = {page: [] for page in zooms}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for _ in range(TRIES):
            for page, zoom in zooms.items():
                found[page].append(_measure_one(browser, page, zoom))
        browser.close()
    return [
        [sorted(times)[TRIES // 2] for times in zip(*found[page], strict=True)] for page in zooms
    ]


def _measure_one(browser: Any, page: Path, zoom: str) -> tuple[float, ...]:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    inside = tab.context.new_cdp_session(tab)
    inside.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.goto(page.as_uri(), timeout=600_000)
    tab.wait_for_selector("html[data-drawn]", state="attached", timeout=600_000)
    tab.wait_for_function(PAINT)  # recorded some frames after what was painted
    measured = inside.send("Performance.getMetrics")["metrics"]
    cpu_s = next(one["value"] for one in measured if one["name"] == "ThreadTime")
    times = [float(tab.evaluate(one)) for one in (DRAWN, PAINTED, zoom)]
    tab.close()
    return (*times, cpu_s * 1e3)
