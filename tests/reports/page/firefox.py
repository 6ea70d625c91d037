"""Debian's Firefox, driven by Marionette, the protocol that it speaks itself: JSON over a socket.

Playwright drives a Firefox of its own build; its way for others asks ESR 153 for a command that it
does not know.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import wait_for

START_S = 120
ANSWER_S = 120
NAMES = ("firefox-esr", "firefox")
SETTINGS = """
user_pref("marionette.port", 0);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("network.captive-portal-service.enabled", false);
user_pref("network.connectivity-service.enabled", false);
"""


class Firefox:
    """One window; `evaluate` runs a function's body in it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self._answers = self._socket.makefile("rb")
        self._number = 0
        self._read()  # the greeting
        self.call("WebDriver:NewSession", capabilities={"alwaysMatch": {}})

    def call(self, name: str, **values: Any) -> Any:
        self._number += 1
        text = json.dumps([0, self._number, name, values]).encode()
        self._socket.sendall(b"%d:%s" % (len(text), text))
        _, number, error, result = self._read()
        assert number == self._number and error is None, error
        return result

    def open(self, url: str) -> None:
        self.call("WebDriver:Navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        found = self.call("WebDriver:ExecuteScript", script=f"return {expression}", args=[])
        return found["value"]

    def wait_until(self, expression: str) -> None:
        wait_for(
            lambda: self.evaluate(expression),
            ANSWER_S,
            lambda: str(self.evaluate("document.body.innerText")),
        )

    def quit(self) -> None:
        self.call("Marionette:Quit", flags=["eForceQuit"])
        self._answers.close()
        self._socket.close()

    def _read(self) -> Any:
        size = b""
        while (letter := self._answers.read(1)) not in (b":", b""):
            size += letter
        return json.loads(self._answers.read(int(size)))


def start_firefox(profile: Path) -> Iterator[Firefox]:
    """For a fixture of a whole module."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Firefox (apt-get install firefox-esr)")
    (profile / "user.js").write_text(SETTINGS)
    said = profile / "MarionetteActivePort"
    command = [program, "--headless", "--no-remote", "--marionette", "--profile", str(profile)]
    with open(profile / "said", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_for(lambda: said.exists() and said.read_text().strip(), START_S)
        browser = Firefox(int(said.read_text()))
        yield browser
        browser.quit()
        process.wait(START_S)
    finally:
        process.kill()
        process.wait()
