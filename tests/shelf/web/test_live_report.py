"""`vjob report --live` in a browser: it grows, keeps what was chosen, and says how it stands."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Vjob, wait_for
from tests.reports.page.browser import DRAWN_MS, start_browser
from tests.reports.traces import write_simulated
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.shelf.web import report as live_report
from vjob.shelf.web.report import GROWS_ALONE, OVER, open_report
from vjob.shelf.web.server import Server, Site

pytestmark = pytest.mark.browser

TOKEN = "token-of-a-test"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from start_browser()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page whose errors fail the test; questions to a server that is gone are none."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(DRAWN_MS)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "console",
        lambda message: is_refusal(message.text) or troubles.append(message.text),
    )
    yield page
    context.close()
    assert troubles == []


def is_refusal(text: str) -> bool:
    """The browser's own word on a server that is gone, or another one."""
    return "ERR_CONNECTION" in text or "(Forbidden)" in text


@contextlib.contextmanager
def serve(job: Path, port: int = 0, token: str = TOKEN) -> Iterator[Server]:
    site = Site(open_report(str(job), job.parent), token=token)
    with Server(site, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            site.close()


def open_page(tab: Any, server: Server, token: str = TOKEN) -> None:
    tab.goto(f"http://127.0.0.1:{server.port}/{token}/")
    wait_drawn(tab, 1)


def wait_until(tab: Any, expression: str) -> None:
    """Not by playwright's own wait, which the page's policy forbids: it evaluates text."""
    wait_for(lambda: tab.evaluate(expression), DRAWN_MS / 1000, lambda: str(tab.inner_text("body")))


def wait_drawn(tab: Any, version: int) -> None:
    wait_until(tab, f"Number(document.documentElement.dataset.version) >= {version}")
    wait_until(tab, "document.querySelectorAll('.plot.js-plotly-plot').length > 0")


def write_steps(folder: Path, count: int) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    new = folder.with_name("new")
    write_simulated(new, schedule, build_even_costs(2), steps=range(1, count + 1))
    # As a writer does: what was there stays, lines come after it.
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    for path in sorted((new / "trace").iterdir()):
        target = folder / "trace" / path.name
        size = target.stat().st_size if target.exists() else 0
        with open(target, "ab") as handle:
            handle.write(path.read_bytes()[size:])
    shutil.rmtree(new)


def list_steps(tab: Any) -> list[str]:
    texts: list[str] = tab.locator("#step option").all_inner_texts()
    return [text.split()[0] for text in texts]


def read_chosen(tab: Any) -> str:
    return str(tab.locator("#step option:checked").inner_text()).split()[0]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(live_report, "EVERY_S", 0.2)
    write_steps(tmp_path / "job", 4)
    return tmp_path / "job"


def test_the_page_grows_and_follows_the_last_step(job: Path, tab: Any) -> None:
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    with serve(job) as server:
        open_page(tab, server)
        assert list_steps(tab) == ["1", "2", "3", "4"] and read_chosen(tab) == "4"
        assert tab.locator("#live").inner_text() == GROWS_ALONE
        assert tab.locator("#findings li").count() > 0
        write_steps(job, 6)
        wait_until(tab, "document.querySelectorAll('#step option').length === 6")
        wait_until(tab, "document.getElementById('step').selectedOptions[0].text[0] === '6'")
        assert {url for url in requests if not url.startswith(("blob:", "data:"))} <= {
            url for url in requests if url.startswith(f"http://127.0.0.1:{server.port}/{TOKEN}/")
        }


def test_zoom_and_choices_are_kept(job: Path, tab: Any) -> None:
    with serve(job) as server:
        open_page(tab, server)
        tab.locator("#step").select_option(index=1)
        tab.locator("#messages").check()
        tab.locator("#lanes .marks").press("w")
        view = "JSON.stringify(shown.timeline.view)"
        zoomed = tab.evaluate(view)
        tab.locator("#theme").click()
        theme = tab.evaluate("document.documentElement.dataset.theme")
        tab.evaluate("Plotly.relayout('figure-run', {'xaxis.range': [0.01, 0.03]})")
        version = int(tab.evaluate("document.documentElement.dataset.version"))
        write_steps(job, 7)
        wait_drawn(tab, version + 1)
        wait_until(tab, "document.querySelectorAll('#step option').length === 7")
        assert read_chosen(tab) == "2" and tab.evaluate(view) == zoomed
        assert tab.locator("#messages").is_checked()
        assert tab.evaluate("document.documentElement.dataset.theme") == theme
        found = tab.evaluate("document.getElementById('figure-run').layout.xaxis.range")
        assert [round(value, 4) for value in found] == [0.01, 0.03]
        # The figure has the new steps all the same, and its buttons still work.
        tab.locator("#theme").click()
        assert tab.evaluate("document.documentElement.dataset.theme") != theme
        tab.locator("#after").click()
        wait_until(tab, "document.getElementById('step').selectedOptions[0].text[0] === '3'")


def test_a_page_that_began_without_events_gets_its_timeline(job: Path, tab: Any) -> None:
    shutil.rmtree(job / "trace")
    (job / "n0.out").write_text("step 1/9 loss 2.5 time 0.5 s\n")
    with serve(job) as server:
        tab.goto(f"http://127.0.0.1:{server.port}/{TOKEN}/")
        wait_until(tab, "document.documentElement.dataset.version === '1'")
        assert tab.locator("#lanes").count() == 0
        write_steps(job, 3)
        wait_until(tab, "document.querySelectorAll('#step option').length === 3")
        wait_until(tab, "shown.timeline.step?.facts.step === 3")


def test_a_folder_that_vanishes_is_said_and_comes_back(job: Path, tab: Any) -> None:
    with serve(job) as server:
        open_page(tab, server)
        away = job.rename(job.with_name("away"))
        wait_until(tab, "document.getElementById('live').textContent.includes('not there')")
        assert tab.locator("#live").inner_text().startswith("What is shown is as of ")
        assert list_steps(tab) == ["1", "2", "3", "4"]
        away.rename(job)
        write_steps(job, 5)
        wait_until(tab, "document.querySelectorAll('#step option').length === 5")
        assert tab.locator("#live").inner_text() == GROWS_ALONE


def test_a_broken_connection_is_said_and_comes_back(job: Path, tab: Any) -> None:
    with serve(job) as server:
        port = server.port
        open_page(tab, server)
    wait_until(tab, "document.getElementById('live').textContent.startsWith('No answer')")
    assert list_steps(tab) == ["1", "2", "3", "4"]
    write_steps(job, 5)
    with serve(job, port):
        wait_until(tab, "document.querySelectorAll('#step option').length === 5")
        wait_until(tab, f"document.getElementById('live').textContent === {GROWS_ALONE!r}")
    with serve(job, port, token="another"):
        wait_until(tab, "document.getElementById('live').textContent.includes('run the')")


SCRIPT = """
import pathlib, time
from varuna_core import trace
here = pathlib.Path({here!r})
for step in range(1, 100):
    while not (here / f"step-{{step}}").exists() and not (here / "end").exists():
        time.sleep(0.05)
    if (here / "end").exists():
        break
    with trace.step(step), trace.span("forward"):
        time.sleep(0.01)
    print(f"step {{step}}/5 loss {{3 / step:.3f}}", flush=True)
"""
CONF = """
name: live
program: {{script: {script}}}
profile: {{timeline: true}}
cluster:
  scheduler: local
  walltime_min: 5
  grace_s: 2
  nodes: [{{group: m, count: 1, ranks: 1}}]
"""


def read_url(out: Path) -> str:
    wait_for(lambda: "Ctrl-C ends it" in out.read_text(), 60, out.read_text)
    return next(line for line in out.read_text().splitlines() if line.startswith("http://"))


def list_words() -> list[str]:
    """The arguments and environment of every process that can be seen."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                found.append((path / name).read_bytes().decode(errors="replace"))
    return found


def test_a_run_is_watched_to_its_end(tmp_path: Path, tab: Any) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(here=str(tmp_path)))
    vjob = Vjob(tmp_path)
    run = vjob.submit(CONF.format(script=tmp_path / "train.py"))
    out = tmp_path / "live.out"
    opener = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$@" > {opener}.part; mv {opener}.part {opener}; sleep 60\n'
    )
    browser.chmod(0o755)
    vjob.env["BROWSER"] = f"{browser} %s &"
    with open(out, "w") as handle:
        served = vjob.start_into(handle, "report", str(run.path), "--live", "--open")
    try:
        url = read_url(out)
        wait_for(opener.exists, 30, out.read_text)
        path = Path(opener.read_text().strip().removeprefix("file://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        token = url.split("/")[3]
        assert token in path.read_text() and len(token) >= 32
        assert not any(token in words for words in list_words())
        tab.goto(path.as_uri())
        tab.wait_for_url(url)
        wait_until(tab, "document.documentElement.dataset.version > 0")
        for step in (1, 2, 3):
            (tmp_path / f"step-{step}").touch()
        wait_until(tab, "document.querySelector('main').innerText.includes('1 to 3')")
        (tmp_path / "end").touch()
        vjob.wait_over(run)
        wait_until(tab, f"document.getElementById('live').textContent === {OVER!r}")
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        tab.evaluate("new Promise((resolve) => setTimeout(resolve, 0))")
        assert [url for url in asked if not url.startswith("blob:")] == []  # the page's own
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
        assert "ended; nothing is served any more" in out.read_text()
        assert not path.exists() and not path.parent.exists()
    finally:
        served.kill()
        served.wait()
        (tmp_path / "end").touch()
    assert token not in "".join(
        file.read_text(errors="replace") for file in run.path.rglob("*") if file.is_file()
    )


def test_lines_to_copy_stand_in_the_answer(tmp_path: Path) -> None:
    write_steps(tmp_path / "job", 1)
    command = [sys.executable, "-m", "vjob", "report", str(tmp_path / "job"), "--live"]
    served = subprocess.Popen(command, env=Vjob(tmp_path).env, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        lines = [served.stdout.readline().rstrip("\n") for _ in range(4)]
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w-]{32}/", lines[0])
        assert port is not None, lines
        assert lines[2].startswith(f"ssh -NL {port[1]}:127.0.0.1:{port[1]} ")
        served.terminate()
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.wait()
        served.stdout.close()
