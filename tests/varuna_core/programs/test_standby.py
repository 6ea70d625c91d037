"""A built-in program that waits: what it becomes once it is told, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT

pytest.importorskip("torch", reason="torch is not installed")

CODE = """
import os, sys, threading
from varuna_core.programs import pretrain, standby

parse = pretrain._parse

def spy(words):
    wanted = parse(words)
    if not wanted.standby:
        loaded = [name for name in ("torch", "torch._dynamo") if name in sys.modules]
        own = {name: os.environ.get(name) for name in ("NEW", "OLD", "PATH", "SET_AT_IMPORT")}
        print(sys.argv[1:], own, os.getpriority(os.PRIO_PROCESS, 0))
        print(loaded, repr(sys.stdin.read()), threading.active_count())
        sys.exit(3)
    return wanted

pretrain._parse = spy
class Modules(tuple):
    def __iter__(self):
        os.environ["SET_AT_IMPORT"] = "yes"
        return super().__iter__()

standby.MODULES = Modules(standby.MODULES)
sys.argv[1:] = ["old.json", "--standby"]
pretrain.run()
"""


def start() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OLD": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def test_it_has_all_imported_and_only_what_it_was_told() -> None:
    told = {"env": {"NEW": "\udcff\n'"}, "arguments": ["new.json"]}
    with start() as process:
        out, _ = process.communicate(json.dumps(told) + "\nmore", timeout=120)
    first, second = out.splitlines()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    own = {"NEW": "\udcff\n'", "OLD": None, "PATH": None, "SET_AT_IMPORT": "yes"}
    assert first == f"['new.json'] {own} {nice}"
    assert second == "['torch', 'torch._dynamo'] '' 1"
    assert process.returncode == 3


@pytest.mark.parametrize("words", ["", "half a line"])
def test_nobody_wants_it(words: str, tmp_path: Path) -> None:
    with start() as process:
        out, _ = process.communicate(words, timeout=120)
    assert (process.returncode, out) == (0, "")
