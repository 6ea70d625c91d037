"""Draws docs/pictures: the screens of `vjob status` by Textual, the pages by Chromium.

    python docs/make/pictures.py docs/pictures [NAME...]

Jobs are made up, by the samples of the tests and the staged runs of benchmarks/commands/
findings.py: the same pictures come out each time, but for times of day. NAME draws only pictures
whose names hold it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from playwright.sync_api import sync_playwright

from benchmarks.commands.findings import BEGIN_S, Run, write_run
from tests.shelf.screen import test_run_list as run_lists
from tests.shelf.screen.sample_job import (
    Player,
    RecordedActions,
    SampleLines,
    make_slow,
)
from tests.shelf.screen.screen_driver import DrivenScreen, drive
from varuna_core.facts.finding import Finding
from varuna_core.records.record import (
    ENDED,
    SUBMITTED,
    JobRecord,
    RunRecord,
    read_record,
    write_record,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.model.snapshot import Health, Line, Snapshot, Verdict
from vjob.jobs.reporting.report import MORE_EVENTS, format_now, read_job
from vjob.shelf.web import status as web_status
from vjob.shelf.web.feed import Feed, JobReading
from vjob.shelf.web.server import LivePage, Server, Site

SIZES = {80: 24, 200: 40}
"""Lines by columns."""
LOOKS = {"dark": {}, "light": {"COLORFGBG": "0;15"}, "plain": {"NO_COLOR": "1"}}
"""Environment that makes each."""
WAIT_MS = 120_000
DRAWN = "html[data-drawn]"


def make_merged_log(snapshot: Snapshot, evidence: Line) -> list[Line]:
    """Lines of all nodes: the last rank tells of steps, slower ones after the evidence."""
    assert snapshot.progress is not None and snapshot.world is not None
    place = snapshot.nodes[-1].name, snapshot.world - 1
    lines = []
    for point in snapshot.progress.points:
        text = (
            f" iteration {point.step:8d}/   10000 | elapsed time per iteration (ms): "
            f"{1000 * (point.step_s or 0):.1f} | lm loss: {point.loss:.4f} | grad norm: 2.93 |"
        )
        lines.append(Line(text=text, node=place[0], rank=place[1], file=f"{place[0]}.out"))
        if point.step == 1275:
            lines.append(evidence)
    return lines


# Screens.


def draw_job(size: tuple[int, int], look: str) -> str:
    """The screen of a job as SVG."""
    snapshot, verdict = make_slow()
    logs = SampleLines({None: make_merged_log(snapshot, verdict.evidence[0])})
    drawn: list[str] = []

    async def script(screen: DrivenScreen) -> None:
        await screen.until(lambda: screen.live.view)
        await screen.press("a")
        await screen.until(lambda: screen.live.log_pane.num_rows)
        drawn.append(_export(screen.app, "vjob status last"))

    with mock.patch.dict(os.environ, LOOKS[look]):
        drive(Player((snapshot, verdict)), script, actions=RecordedActions(lines=logs), size=size)
    return drawn[0]


def draw_runs(size: tuple[int, int], look: str) -> str:
    """The list of runs as SVG."""
    drawn: list[str] = []

    async def script(screen: run_lists.Driven) -> None:
        await screen.until(lambda: screen.runs)
        await screen.press("down", "down")
        drawn.append(_export(screen.app, "vjob status"))

    with mock.patch.dict(os.environ, LOOKS[look]):
        run_lists.drive(script, source=run_lists.Source(rows=make_rows()), size=size)
    return drawn[0]


def _export(app: Any, title: str) -> str:
    # Rich, which writes the SVG, would take NO_COLOR to mean its own colours.
    with mock.patch.dict(os.environ):
        os.environ.pop("NO_COLOR", None)
        return str(app.export_screenshot(title=title))


def make_losses(steps: int) -> tuple[float, ...]:
    """Sixty losses of a run that has done so many steps."""
    marks = range(1, 61)
    return tuple(
        3.1 + 7.4 / (1 + mark * steps / 9000) + 0.02 * (mark * 7919 % 13) for mark in marks
    )


def make_rows() -> list[RunRow]:
    """Runs of a few days, the oldest first."""
    facts: list[tuple[str, Health, str, str, float, dict[str, Any]]] = [
        ("bert-large-1119-090212", Health.DONE, "all ranks exited 0", "", 4.2,
         {"step": 20_000, "num_steps": 20_000, "losses": make_losses(20_000)}),
        ("gpt2-xl-1121-183144", Health.DEAD,
         "rank 5 on n061 exited 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
         "2.00 GiB", "a smaller train.micro_batch_size, or parallel.recompute: full", 1.9,
         {"step": 410, "num_steps": 10_000, "losses": make_losses(410)}),
        ("gpt2-xl-1122-070501", Health.CANCELLED, "cancelled with vjob cancel",
         "vjob submit goes on from the checkpoint of step 3000", 1.4,
         {"step": 3120, "num_steps": 10_000, "losses": make_losses(3120)}),
        ("resnet50-1122-101533", Health.REFUSED,
         "sbatch: error: Invalid account or account/partition combination specified",
         "cluster.account", 1.3, {}),
        ("gpt2-xl-1122-183040", Health.SLOW,
         "rank 17 on n064 works 3.9 s per step, its peers of stage 4 1.8 s (score 0.46)",
         "look at that node (heat, other jobs, its disk); vjob report 4715; leave it out with "
         "cluster.exclude if it stays so", 0.9,
         {"step": 1280, "num_steps": 10_000, "step_s": 4.61, "left_s": 40_140.0,
          "losses": make_losses(1280)}),
        ("moe-8x-1123-080005", Health.HEALTHY, "step 604 was done 2 s ago", "", 0.15,
         {"step": 604, "num_steps": 5000, "step_s": 2.31, "left_s": 10_150.0,
          "losses": make_losses(604)}),
        ("tiny-gpt-1123-091811", Health.STARTING, "5 of 8 nodes are ready", "", 0.004, {}),
        ("gpt3-7b-1123-093000", Health.PENDING, "Resources: it waits for nodes; start expected at "
         "14:20", "", 0.002, {}),
    ]  # fmt: skip
    rows = []
    for number, (run, health, reason, advice, days, more) in enumerate(facts):
        over = health in (Health.DONE, Health.DEAD, Health.CANCELLED, Health.REFUSED)
        states = {Health.DONE: "COMPLETED", Health.DEAD: "FAILED", Health.PENDING: "PENDING"}
        rows.append(
            RunRow(
                run=run,
                name=run.rpartition("-")[0].rpartition("-")[0],
                folder=f"log/{run}",
                jobs=() if health is Health.REFUSED else (str(4711 + number),),
                state=states.get(health, health.value if over else "RUNNING"),
                is_over=over,
                submitted=BEGIN_S - 86_400 * days,
                age_s=86_400 * days,
                verdict=Verdict(health=health, reason=reason, main=Finding(""), advice=advice),
                message=reason,
                **more,
            )
        )
    return rows


# Pages.


def write_sample(folder: Path) -> Path:
    """A run with a heavy stage, its log and its conf."""
    run = Run(
        stages=4, replicas=2, micros=8, layers=24, partition=(6, 6, 7, 5), layer_s=0.012, steps=60,
        save_every=20, slow={5: 1.12}, start_s=18.0, sum_s=0.2,
    )  # fmt: skip
    path = folder / "gpt-medium-1123-093000"
    write_run(path, run, seed=1)
    lines, marks, place = [], [], 0
    trace = (path / "attempt-0/trace/7.jsonl").read_text().splitlines()
    rows = [value for value in map(json.loads, trace) if "took" in value]
    for row in rows:
        step, end = row["step"], row["begin"] + row["took"]
        loss = 3.1 + 7.4 / (1 + step / 9) + 0.05 * ((step * 7919) % 13 - 6) / 6
        lines.append(
            f" iteration {step:8d}/{run.steps:8d} | elapsed time per iteration (ms): "
            f"{row['took'] / 1e6:.1f} | learning rate: {3e-4 * min(1, step / 10):.3E} | "
            f"lm loss: {loss:.6E} | grad norm: {1 + 4 / (1 + step / 6):.3f} |\n"
        )
        marks.append(f"{BEGIN_S + 4 + end / 1e9:.3f} {place} 0\n")
        place += len(lines[-1])
    (path / "attempt-0/n7.out").write_text("".join(lines))
    (path / "attempt-0/n7.times").write_text("".join(marks))
    (path / "resolved.yaml").write_text(
        "name: gpt-medium\nprogram: {kind: pretrain_gpt}\nparallel:\n  pipeline: 4\n  data: 2\n"
        "  partition: 6-6-7-5\n"
    )
    write_record(
        RunFolder(path),
        RunRecord(
            run=path.name, name="gpt-medium", state=ENDED, scheduler="slurm", layout="single",
            num_jobs=1, jobs=(JobRecord(id="4711", group=None),), submitted=BEGIN_S, user="",
            host="", conf="", version="", pid=1, pid_start=None, verdict="COMPLETED",
            message="all 8 ranks exited 0",
        ),
    )  # fmt: skip
    return path


def cut_sample(path: Path, step: int) -> None:
    """The run as it was after a step."""
    for trace in path.glob("attempt-0/trace/*.jsonl"):
        kept = [line for line in trace.read_text().splitlines() if _find_step(line) <= step]
        trace.write_text("\n".join(kept) + "\n")
    ends = json.loads(kept[-1])
    until = BEGIN_S + 4 + (ends["begin"] + ends["took"]) / 1e9
    for samples in path.glob("attempt-0/*.gpu.jsonl"):
        held = [line for line in samples.read_text().splitlines()
                if json.loads(line)["time"] <= until]  # fmt: skip
        samples.write_text("\n".join(held) + "\n")
    log = path / "attempt-0/n7.out"
    log.write_text("".join(log.read_text().splitlines(True)[:step]))
    shutil.rmtree(path / "attempt-0/exit")
    record = read_record(RunFolder(path))
    assert record is not None
    write_record(RunFolder(path), replace(record, state=SUBMITTED, verdict="", message=""))
    events = (path / "events.jsonl").read_text().splitlines()
    (path / "events.jsonl").write_text("\n".join(events[:-1]) + "\n")


def _find_step(line: str) -> int:
    value = json.loads(line)
    if isinstance(value, list):
        return int(value[1])
    return int(value.get("step", 0))


def open_status() -> LivePage:
    """The page of a job with a hot GPU."""
    snapshot, verdict = make_slow(4)
    lines = make_merged_log(snapshot, verdict.evidence[0])
    shown = [{name: getattr(line, name) for name in web_status.SHOWN} for line in lines]
    page = web_status.build_job_page(
        snapshot, verdict, (("../../", "all runs"), ("report/", "report"))
    )
    made = JobReading(parts={"page": web_status.render(page)}, lines=shown, note=web_status.LIVE)
    return web_status._make_page(
        web_status.StatusPage(title=snapshot.run), Feed(lambda: made, every_s=600.0)
    )


def open_runs() -> LivePage:
    made = JobReading(
        parts={"page": web_status.render(web_status.build_runs_page(make_rows()))},
        note=web_status.RUNS,
    )
    return web_status._make_page(
        web_status.StatusPage(title="runs"), Feed(lambda: made, every_s=600.0)
    )


@contextlib.contextmanager
def serve(page: LivePage) -> Iterator[str]:
    """The address of the page."""
    site = Site(page)
    with Server(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.port}/{site.token}/"
        finally:
            server.shutdown()
            thread.join()
            site.close()


def write_page(path: Path) -> Path:
    """The report as a file."""
    from vjob.reports.analysis.findings import find_all
    from vjob.reports.page.run_page import render_page

    job, analysis = read_job(path, more_events=MORE_EVENTS)
    text = render_page(
        job, analysis, find_all(job, analysis), is_partial=False, made_at=format_now()
    )
    target = path / "report.html"
    target.write_text(text)
    return target


class Camera:
    """A browser that takes pictures."""

    def __init__(self, browser: Any, target: Path) -> None:
        self.browser, self.target = browser, target

    def take(
        self, name: str, url: str, size: tuple[int, int], *, wait: str = "", dark: bool = False,
        whole: bool = False, prepare: Callable[[Any], object] = lambda tab: None,
    ) -> None:  # fmt: skip
        """What is seen in a window of this size once `wait`, a selector, is there."""
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
        )
        tab = context.new_page()
        tab.set_default_timeout(WAIT_MS)
        tab.goto(url)
        if wait:
            tab.wait_for_selector(wait, state="attached")
        prepare(tab)
        path = self.target / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(reduce_colours(tab.screenshot(full_page=whole)))
        context.close()
        print(f"{path} {path.stat().st_size / 1000:.0f} KB")

    def take_svg(self, name: str, svg: str, folder: Path) -> None:
        found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        assert found is not None
        width, height = (int(float(text)) for text in found.groups())
        (folder / "page.svg").write_text(svg)
        self.take(name, (folder / "page.svg").as_uri(), (width, height))


def main(target: Path, names: list[str]) -> None:
    """All pictures, or those whose names hold one of these."""

    def is_wanted(name: str) -> bool:
        return not names or any(word in name for word in names)

    screens = list_screens(is_wanted)  # before the driver, which holds an event loop
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-lcd-text"],
        )
        stack.callback(browser.close)
        camera = Camera(browser, target)
        for name, svg in screens.items():
            camera.take_svg(name, svg, folder)
        take_pages(camera, folder, is_wanted)


def list_screens(is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Screens as SVG by the names of their pictures."""
    found = {}
    for what, draw in (("job", draw_job), ("runs", draw_runs)):
        for columns, lines in SIZES.items():
            for look in LOOKS:
                name = f"terminal/{what}-{columns}-{look}"
                if is_wanted(name):
                    found[name] = draw((columns, lines), look)
    if is_wanted("status"):
        found["status"] = draw_job((120, 36), "dark")
    return found


def show_run(tab: Any) -> None:
    tab.evaluate("document.getElementById('section-run').scrollIntoView()")


def take_pages(camera: Camera, folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """The report and the pages of `vjob status --web`."""
    path = write_sample(folder)
    page = write_page(path)
    for name, dark in (("report", False), ("report-dark", True)):
        if is_wanted(name):
            camera.take(name, page.as_uri(), (1280, 1500), wait=DRAWN, dark=dark)
    if is_wanted("run"):
        camera.take("run", page.as_uri(), (1280, 1000), wait=DRAWN, prepare=show_run)
    cut_sample(path, 31)
    for name, open_it, wait, height in (
        ("status-web", open_status, "#lines div", 900),
        ("runs-web", open_runs, "#runs td", 420),
    ):
        if is_wanted(name):
            with serve(open_it()) as url:
                camera.take(name, url, (1280, height), wait=wait)


def reduce_colours(png: bytes) -> bytes:
    """The same picture with at most 256 colours: the most frequent, and for others the nearest."""
    pixels = read_png(png)
    height, width, _ = pixels.shape
    coarse = pixels.astype(np.int64) & 0xF8
    codes = coarse[..., 0] << 16 | coarse[..., 1] << 8 | coarse[..., 2]
    found, where, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16 & 255, found >> 8 & 255, found & 255], axis=1)
    kept = colours[np.argsort(-counts)[:256]]
    nearest = ((colours[:, None] - kept[None]) ** 2).sum(axis=2).argmin(axis=1)
    rows = nearest[where].reshape(height, width).astype(np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = (kept + (kept >> 5)).astype(np.uint8).tobytes()
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(raw, 9)),
        (b"IEND", b""),
    ]
    return png[:8] + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def read_png(png: bytes) -> np.ndarray:
    """Rows, columns, red-green-blue; of the one kind that Chromium writes: 8 bits, no interlace."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and kind in (2, 6)
    data, place = b"", 8
    while place < len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += size + 12
    deep = 3 if kind == 2 else 4
    raw = zlib.decompress(data)
    line = width * deep
    before = bytearray(line)
    rows = []
    for number in range(height):
        start = number * (line + 1)
        before = _undo_filter(
            raw[start], bytearray(raw[start + 1 : start + 1 + line]), before, deep
        )
        rows.append(np.frombuffer(bytes(before), np.uint8).reshape(width, deep)[:, :3])
    return np.stack(rows)


def _undo_filter(kind: int, row: bytearray, above: bytearray, deep: int) -> bytearray:
    """RFC 2083, section 6."""
    for i in range(len(row)):
        left = row[i - deep] if i >= deep else 0
        corner = above[i - deep] if i >= deep else 0
        up = above[i]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            far = (abs(up - corner), abs(left - corner), abs(left + up - 2 * corner))
            guess = (left, up, corner)[far.index(min(far))]
        else:
            guess = 0
        row[i] = (row[i] + guess) & 255
    return row


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
