"""Serve a live page until Ctrl-C, and tell how to open it.

The address has a token, so it must not be in a process's arguments: a local browser is given a
file, readable by the user only, that leads to the address.
"""

from __future__ import annotations

import contextlib
import getpass
import html
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vjob.shelf.web.server import HOST, Server, Site

Say = Callable[[str], object]
LOGIN = "VJOB_LOGIN"
"""Variable with the login node's name as given to `vjob --host`."""


def serve_status(job: str | None, here: Path, say: Say, *, port: int) -> None:
    """Serve `vjob status --web [JOB]`, with the reports of runs opened there."""
    from vjob.shelf.web.status import open_job, open_place, open_runs

    first = open_runs() if job is None else open_job(job, here, (("report/", "report"),))
    site = Site(first, lambda path: open_place(path, job, here))
    serve(site, say, port=port)


def serve(site: Site, say: Say, *, port: int) -> None:
    """Serve until Ctrl-C, or until a signal asks to end."""
    with contextlib.suppress(KeyboardInterrupt), _end_on_signals(), contextlib.ExitStack() as stack:
        stack.callback(site.close)
        server = stack.enter_context(Server(site, port))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        url = f"http://{HOST}:{server.port}/{site.token}/"
        for line in describe_address(url, server.port, name_login(os.environ)):
            say(line)
        sys.stdout.flush()
        if has_display(os.environ):
            _open_browser(stack.enter_context(_write_opener(url)))
        threading.Event().wait()  # the main thread takes the signals
    say("ended; the page is no longer served")


def describe_address(url: str, port: int, login: str) -> list[str]:
    """Return the address, and a line to copy for a user on another machine."""
    return [
        url,
        "Run the next line in a second terminal on your laptop, then open the address there:",
        f"ssh -NL {port}:{HOST}:{port} {login}",
        "The address is secret: anyone with it and an account here sees the page. Ctrl-C ends it.",
    ]


def name_login(environ: Mapping[str, str]) -> str:
    """Return this machine's name for ssh: the word after `vjob --host`, else user and host."""
    login = environ.get(LOGIN)
    if login:
        return shlex.quote(login)
    host = platform.node()
    return f"{getpass.getuser()}@{host}" if environ.get("SSH_CONNECTION") else host


def has_display(environ: Mapping[str, str]) -> bool:
    """Return True if a browser would open where the user is, not on a remote machine."""
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY") or not sys.stdout.isatty():
        return False
    return sys.platform == "darwin" or bool(
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    )


@contextlib.contextmanager
def _write_opener(url: str) -> Iterator[Path]:
    """Write a file for the user only that leads to the address, while it is served."""
    with tempfile.TemporaryDirectory(prefix="vjob-") as folder:  # made with mode 0700
        path = Path(folder) / "open.html"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
            handle.write(
                '<!DOCTYPE html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">'
            )
        yield path


def _open_browser(path: Path) -> None:
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(path.as_uri())


@contextlib.contextmanager
def _end_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the server as Ctrl-C does."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    # What is ignored stays so, such as SIGHUP under nohup.
    before = [
        (name, signal.signal(name, end))
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(name) is not signal.SIG_IGN
    ]
    try:
        yield
    finally:
        for name, handler in before:
            signal.signal(name, handler)
