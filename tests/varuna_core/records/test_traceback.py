"""The exception that ended a process, among all that it printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from varuna_core.records.logs.traceback import TracebackReader

TRACE = 'Traceback (most recent call last):\n  File "t.py", line 3, in load\n    x()\n'
IMPORT = f"{TRACE}ModuleNotFoundError: No module named 'apex'\n"
VALUE = f"{TRACE}ValueError: no data\n"
LINK = "\nDuring handling of the above exception, another exception occurred:\n\n"


def read(text: str) -> TracebackReader:
    reader = TracebackReader()
    for place, line in enumerate(text.splitlines()):
        reader.feed(line, place)
    return reader


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VALUE, "ValueError: no data"),
        (IMPORT + "step 1\n" + VALUE, "ValueError: no data"),
        (IMPORT + LINK + VALUE, "ValueError: no data"),
        ("Exception in thread Thread-1 (watch):\n" + IMPORT, ""),
        (VALUE + "Exception ignored in: <function X.__del__>\n" + IMPORT, "ValueError: no data"),
        ("Process SpawnProcess-1:\n" + IMPORT + VALUE, "ValueError: no data"),
        ("".join(f"[rank3]: {line}\n" for line in VALUE.splitlines()), "ValueError: no data"),
        ('  File "t.py", line 3\n    x x\n      ^\nSyntaxError: invalid', "SyntaxError: invalid"),
        (f"{VALUE}{TRACE}torch.distributed.elastic.ChildFailedError:\n", "ValueError: no data"),
        (
            f"{VALUE}{TRACE}RuntimeError: Connection closed by peer\n{TRACE}x.ChildFailedError:\n",
            "ValueError: no data",
        ),
        (
            f"{VALUE}{TRACE}RuntimeError: Connection closed by peer\n",
            "RuntimeError: Connection closed by peer",
        ),
        (TRACE + "subprocess.CalledProcessError: x\n", "subprocess.CalledProcessError: x"),
        (TRACE + "NoMoreShards", "NoMoreShards"),
        ("ValueError: printed alone\n", ""),
        (f"{VALUE}second line\n\nthird\nwandb: done", "ValueError: no data"),
    ],
)
def test_the_last_traceback_of_the_main_thread_counts(text: str, said: str) -> None:
    found = read(text).get_end()
    assert (found.text if found is not None else "") == said


def test_a_chain_is_one_exception() -> None:
    found = read(IMPORT + LINK + VALUE).last
    assert found is not None and (found.first, found.place) == (0, 10)


def test_what_python_itself_writes_is_read() -> None:
    program = """
import threading, traceback
try:
    import no_such_module
except ImportError:
    traceback.print_exc()
thread = threading.Thread(target=lambda: {}["x"])
thread.start()
thread.join()
class Odd(BaseException):
    pass
try:
    raise KeyError("first")
except KeyError as error:
    raise Odd("second") from error
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = read(done.stderr).last
    assert done.returncode == 1
    assert found is not None and found.text == "Odd: second"
