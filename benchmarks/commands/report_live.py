"""What a poll of the live report costs while a long run grows: reading, sending, drawing.

A run of four ranks with one log; details of every fiftieth step. The first reading takes all; then
a few steps are added, as many as come between two polls, and the page follows. Run alone:

    python -m benchmarks.commands.report_live [STEPS]
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.records.logs.trace import COLUMNS, FORMAT
from vjob.shelf.web.feed import Feed, Shown
from vjob.shelf.web.report import ReportSource, open_report
from vjob.shelf.web.server import LivePage, Server, Site

RANKS = 4
DETAIL_EVERY = 50
ADDED = 12
"""Steps of 0.4 s in five seconds."""
POLLS = 3
WAIT_S = 300.0


class ManualFeed(Feed):
    """Reads when it is asked to, not when a tab asks."""

    def look(self) -> Shown:
        return self._shown


@dataclass(frozen=True, kw_only=True)
class Poll:
    """One reading, and what a tab did with it."""

    cpu_s: float
    read_mb: float
    sent_kb: float
    drawn_s: float
    """Of the browser's main thread."""


def grow(folder: Path, first: int, last: int) -> None:
    """Steps of all ranks and of the log, `last` excluded."""
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        with open(folder / "trace" / f"{rank}.jsonl", "a") as handle:
            if first == 1:
                header = {"trace": FORMAT, "rank": rank, "stages": [rank], "replica": 0}
                header |= {"host": "n0", "device": "A10", "columns": COLUMNS}
                handle.write(json.dumps({**header, "origin": 1_700_000_000_000_000_000}) + "\n")
            for step in range(first, last):
                handle.write(_write_step(rank, step))
    with open(folder / "n0.out", "a") as handle:
        for step in range(first, last):
            handle.write(
                f" iteration {step:8d}/  200000 | elapsed time per iteration (ms): "
                f"{400 + step % 7:.1f} | lm loss: {10 / (1 + step / 1000):.6E} |\n"
            )


def _write_step(rank: int, step: int) -> str:
    begin, work = step * 400_000_000, 18_000_000
    events = [
        f'["{kind}",{step},{rank},{micro},{begin + micro * 40_000_000 + after},1000,{work},0,""]\n'
        for micro in range(8 if step % DETAIL_EVERY == 0 else 0)
        for kind, after in (("F", 0), ("B", 20_000_000))
    ]
    sums = {kind: [8, 8000, 8 * work] for kind in "FB"}
    line: dict[str, Any] = {
        "step": step,
        "begin": begin,
        "took": 380_000_000 + step * 7919 % 1_000_000,
    }
    line |= {"sums": sums, "first": begin, "last": begin + 360_000_000}
    return "".join(events) + json.dumps(line, separators=(",", ":")) + "\n"


def measure_live(folder: Path, num_steps: int) -> list[str]:
    """The polls after the first, which reads all."""
    grow(folder, 1, num_steps + 1)
    polls = _poll(folder, num_steps)
    rows = [("first reading, of all", polls[0])]
    rows += [(f"{ADDED} steps more", sorted(polls[1:], key=lambda poll: poll.cpu_s)[POLLS // 2])]
    size_mb = sum(path.stat().st_size for path in folder.rglob("*.*")) / 1e6
    return [
        f"The live page of {num_steps} steps of {RANKS} ranks, {size_mb:.0f} MB of files. Of "
        "traces what was added is read, of the log all.",
        "",
        "| poll | server, CPU s | MB read | KB sent | browser's main thread, s |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {poll.cpu_s:.2f} | {poll.read_mb:.1f} | {poll.sent_kb:.0f} "
            f"| {poll.drawn_s:.2f} |"
            for name, poll in rows
        ),
        "",
    ]


def _poll(folder: Path, num_steps: int) -> list[Poll]:
    from playwright.sync_api import sync_playwright

    page = open_report(str(folder), folder.parent)
    feed = ManualFeed(ReportSource(folder, None).make, every_s=0.2)
    site = Site(LivePage(document=page.document, files=page.files, feed=feed))
    found: list[Poll] = []
    with Server(site) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        names: dict[str, str] = {}
        for number in range(1 + POLLS):
            if number:
                grow(folder, num_steps + 1 + ADDED * (number - 1), num_steps + 1 + ADDED * number)
            busy_s = _read_busy(session)
            cpu_s, read = time.process_time(), _count_read()
            shown = feed.renew()
            cpu_s, read = time.process_time() - cpu_s, _count_read() - read
            if not number:
                tab.goto(f"http://127.0.0.1:{server.port}/{site.token}/")
            _wait_version(tab, shown.version)
            new = [key for name, key in shown.names.items() if names.get(name) != key]
            names = dict(shown.names)
            parts = [feed.find_part(key) or b"" for key in new]
            found.append(
                Poll(
                    cpu_s=cpu_s,
                    read_mb=read / 1e6,
                    sent_kb=sum(len(gzip.compress(part, 5)) for part in parts) / 1e3,
                    drawn_s=_read_busy(session) - busy_s,
                )
            )
        browser.close()
        server.shutdown()
    return found


def _wait_version(tab: Any, version: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while tab.evaluate("Number(document.documentElement.dataset.version ?? 0)") < version:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page has no version {version}")
        time.sleep(0.2)


def _read_busy(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def _count_read() -> int:
    """Bytes that this process has read."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(measure_live(Path(name), int((*sys.argv[1:], "100000")[0]))))
