"""How a built-in program's process ends: at once, and with the code that it would have had."""

from __future__ import annotations

import subprocess
import sys

import pytest

STORY = """
import atexit, sys
from varuna_core.programs import pretrain

def main(arguments=None):
    atexit.register(print, "registered")
    {ending}

pretrain.main = main
pretrain.run()
"""


def tell(ending: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", STORY.format(ending=ending)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("return 0", 0, ""),
        ("return 1", 1, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("sys.stdout.write('half a line, '); return 0", 0, ""),
    ],
)
def test_the_code_is_the_one_that_python_would_give(ending: str, code: int, said: str) -> None:
    found, out, error = tell(ending)
    assert (found, error) == (code, said)
    assert out.endswith("registered\n")


def test_an_error_that_nobody_caught_is_shown_and_is_a_one() -> None:
    code, out, error = tell("raise RuntimeError('the end')")
    assert code == 1
    assert error.endswith("RuntimeError: the end\n")
    assert out == "registered\n"


def test_nothing_is_taken_apart() -> None:
    """A module that would do something when it is torn down does not."""
    ending = (
        "class Loud:\n"
        "        def __del__(self): print('taken apart', flush=True)\n"
        "    sys.modules['loud'] = Loud()\n"
        "    return 0"
    )
    assert tell(ending) == (0, "registered\n", "")
