"""A page that `vjob status --web` serves: its address stays secret, and its tabs find it again."""

from __future__ import annotations

import contextlib
import re
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
from vjob.shelf.web import status as live_status
from vjob.shelf.web.serve import _write_opener
from vjob.shelf.web.server import Server, Site
from vjob.shelf.web.status import LIVE, open_job, open_report

TOKEN = "token-of-a-test"


def write_report_job(folder: Path) -> Path:
    write_simulated(folder, build_schedule("1f1b", 2, 4), build_even_costs(2), steps=(1, 2, 3, 4))
    return folder


def test_a_report_is_a_whole_document_with_its_own_policy(tmp_path: Path) -> None:
    job = write_report_job(tmp_path / "job")
    site = Site(open_report(str(job), tmp_path), token=TOKEN)
    reply = site.answer("GET", f"/{TOKEN}/", "localhost:1")
    assert reply.status == 200 and reply.has_own_policy
    assert b"Content-Security-Policy" in reply.body and b"Timeline" in reply.body
    for name in ("state", "part/page", "page.js"):
        assert site.answer("GET", f"/{TOKEN}/{name}", "localhost:1").status == 404
    job.rename(tmp_path / "away")
    assert site.answer("GET", f"/{TOKEN}/", "localhost:1").status == 404
    site.close()


def test_the_file_that_leads_a_browser_to_the_address_is_the_users_alone() -> None:
    with _write_opener("http://127.0.0.1:1/secret/") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert "/secret/" in path.read_text()
    assert not path.exists() and not path.parent.exists()


def list_words() -> list[str]:
    """The arguments and environment of every process that can be seen."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                found.append((path / name).read_bytes().decode(errors="replace"))
    return found


def test_lines_to_copy_stand_in_the_answer_and_the_token_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/n1.out").write_text("step 1/9 loss 2.5\n")
    command = [sys.executable, "-m", "vjob", "status", str(tmp_path / "job"), "--web"]
    served = subprocess.Popen(command, env=Vjob(tmp_path).env, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        lines = [served.stdout.readline().rstrip("\n") for _ in range(4)]
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", lines[0])
        assert found is not None, lines
        assert lines[2].startswith(f"ssh -NL {found[1]}:127.0.0.1:{found[1]} ")
        assert not any(found[2] in words for words in list_words())
        served.terminate()
        assert "ended; the page is no longer served" in served.stdout.read()
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.wait()
        served.stdout.close()


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
    page.on("console", lambda message: is_refusal(message.text) or troubles.append(message.text))
    yield page
    context.close()
    assert troubles == []


def is_refusal(text: str) -> bool:
    """The browser's own word on a server that is gone, or another one."""
    return "ERR_CONNECTION" in text or "(Forbidden)" in text


@contextlib.contextmanager
def serve(site: Site, port: int = 0) -> Iterator[Server]:
    with Server(site, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            site.close()


def wait_until(tab: Any, expression: str) -> None:
    """Not by playwright's own wait, which the page's policy forbids: it evaluates text."""
    wait_for(lambda: tab.evaluate(expression), DRAWN_MS / 1000, lambda: str(tab.inner_text("body")))


@pytest.mark.browser
def test_a_report_is_drawn_from_a_server_as_from_its_file(tmp_path: Path, tab: Any) -> None:
    job = write_report_job(tmp_path / "job")
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    with serve(Site(open_report(str(job), tmp_path), token=TOKEN)) as server:
        url = f"http://127.0.0.1:{server.port}/{TOKEN}/"
        tab.goto(url)
        wait_until(tab, "document.documentElement.dataset.drawn")
        assert tab.locator("#step option").count() == 4
        assert tab.locator(".plot > svg").count() >= 2
        assert {one for one in asked if not one.startswith(("blob:", "data:"))} == {url}


@pytest.mark.browser
def test_a_folder_and_a_connection_that_vanish_are_said_and_come_back(
    tmp_path: Path, tab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "EVERY_S", 0.2)
    folder = tmp_path / "logs"
    folder.mkdir()
    log = folder / "n060.out"
    log.write_text("step 1/9 loss 2.5\n")

    def open_site(token: str = TOKEN) -> Site:
        return Site(open_job(str(folder), tmp_path, ()), token=token)

    def wait_lines(count: int) -> None:
        wait_until(tab, f"document.querySelectorAll('#lines div').length === {count}")
        wait_until(tab, f"document.getElementById('live').textContent === {LIVE!r}")

    with serve(open_site()) as server:
        port = server.port
        tab.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
        wait_lines(1)
        away = folder.rename(tmp_path / "away")
        wait_until(tab, "document.getElementById('live').textContent.includes('not exist')")
        assert tab.locator("#live").inner_text().startswith("What is shown is as of ")
        assert tab.locator("#lines div").count() == 1
        away.rename(folder)
        with open(log, "a") as handle:
            handle.write("step 2/9 loss 1.5\n")
        wait_lines(2)
    wait_until(tab, "document.getElementById('live').textContent.startsWith('No answer')")
    assert tab.locator("#lines div").count() == 2
    with serve(open_site(), port):
        wait_until(tab, f"document.getElementById('live').textContent === {LIVE!r}")
    with serve(open_site("another"), port):
        wait_until(tab, "document.getElementById('live').textContent.includes('run the')")
