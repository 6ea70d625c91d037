"""Stub programs, for those that are not on every machine: they record their calls."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from vjob.jobs.schedulers import broker

_RECORD = """\
#!/usr/bin/env python3
import json, os, sys
with open({calls!r}, "a") as lines:
    env = {{k: v for k, v in os.environ.items() if k.startswith(("ENROOT_", "PATH"))}}
    facts = {{"argv": [{name!r}, *sys.argv[1:]], "env": env, "tty": sys.stdin.isatty()}}
    lines.write(json.dumps(facts) + "\\n")
{body}
"""


def forget_answers(folder: Path) -> None:
    """No answer of a scheduler's tool is known any more, by a state that lies in this folder."""
    broker._memory.clear()
    shutil.rmtree(folder / "state/vjob/scheduler", ignore_errors=True)


class StubPrograms:
    """A folder of stub programs, to be first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._calls = folder / "calls"

    @property
    def path(self) -> str:
        return f"{self.folder}:{os.environ['PATH']}"

    def add(self, name: str, body: str = "") -> None:
        """Add a program that records its call and runs these lines of Python."""
        file = self.folder / name
        file.write_text(_RECORD.format(calls=str(self._calls), name=name, body=body))
        file.chmod(0o755)
        forget_answers(self.folder.parent)

    def calls(self, name: str) -> list[dict[str, object]]:
        text = self._calls.read_text() if self._calls.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [call for call in found if call["argv"][0] == name]
