"""Twenty errors of Python programs: each raised, or caught and printed before another end.

The programs are run here, so that every line is what Python really writes. Errors of torch are
raised by classes of its names: no GPU is needed, and no import of seconds.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Target

Wish = tuple[Action, Target | None]
"""A remedy by its kind."""

RAISED, SIGNAL = EndCause.RANK_EXCEPTION, EndCause.RANK_SIGNAL
_TORCH = "def of_torch(name, base):\n    return type(name, (base,), {'__module__': 'torch'})\n"
CATCH = """\
import sys, traceback
def fail():
{body}
try:
    fail()
except BaseException:
    traceback.print_exc(file=sys.{stream})
{after}"""
STEPS = 'for step in range(1, 4):\n    print(f"step {step}/3 loss {3 / step:.2f}", flush=True)\n'


@dataclass(frozen=True)
class PythonError:
    """One error, as a program raises it."""

    name: str
    body: str
    """Statements that raise it."""
    wants: Wish | None = None
    """The remedy of its message; None where there is none but to read it."""
    cause: EndCause = RAISED
    signal: str = ""
    code: int = 1


ERRORS = (
    PythonError(
        "CUDA OOM",
        _TORCH + "raise of_torch('OutOfMemoryError', RuntimeError)("
        "'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
        "of which 1.02 GiB is free.')",
        (Action.LOWER, Target.BATCH_SIZE),
    ),
    PythonError(
        "NCCL",
        _TORCH + "raise of_torch('distributed.DistBackendError', RuntimeError)("
        "'NCCL error in: ../NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO "
        "for details), NCCL version 2.21.5')",
        (Action.SET, Target.ENVIRONMENT),
    ),
    PythonError("import", "import no_such_module_here", (Action.INSTALL, None)),
    PythonError("key", "{}['hidden_size']"),
    PythonError(
        "shapes",
        "raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)')",
    ),
    PythonError("no file", "open('/no/such/data/train.bin')", (Action.ADD, Target.MOUNTS)),
    PythonError("permission", "raise PermissionError(13, 'Permission denied', '/data/x')"),
    PythonError(
        "no space",
        "raise OSError(28, 'No space left on device')",
        (Action.MAKE_ROOM, None),
    ),
    PythonError("refused", "import socket; socket.create_connection(('127.0.0.1', 1), timeout=5)"),
    PythonError("timeout", "raise TimeoutError('no answer from the data server')"),
    PythonError("assertion", "assert 1 + 1 == 3, 'vocab_size must be even'"),
    PythonError("SystemExit 7", "sys.exit(7)", cause=EndCause.RANK_EXIT, code=7),
    PythonError("interrupt", "raise KeyboardInterrupt", cause=SIGNAL, signal="SIGINT", code=-2),
    PythonError("memory", "raise MemoryError", (Action.RAISE, Target.MEMORY)),
    PythonError("recursion", "sys.setrecursionlimit(60)\nfail()"),
    PythonError("unicode", "b'\\xff\\xfe'.decode()"),
    PythonError("json", "import json; json.loads('{')"),
    PythonError(
        "dist init",
        "raise ValueError('Error initializing torch.distributed using env:// rendezvous: "
        "environment variable RANK expected, but not set')",
        (Action.SET, Target.LAUNCH),
    ),
    PythonError(
        "data worker",
        "raise RuntimeError('DataLoader worker (pid 4711) is killed by signal: Killed. ')",
        (Action.LOWER, Target.WORKERS),
    ),
    PythonError(
        "segfault",
        "import faulthandler, os, signal; faulthandler.enable()\n"
        "os.kill(os.getpid(), signal.SIGSEGV)",
        cause=SIGNAL,
        signal="SIGSEGV",
        code=-11,
    ),
)


@dataclass(frozen=True)
class Printed:
    """A program's two streams and its return code."""

    out: str
    err: str
    code: int


def render_raising(error: PythonError) -> str:
    """A program that trains three steps and then fails."""
    return f"import sys\n{STEPS}def fail():\n{_indent(error.body)}\nfail()\n"


def render_catching(error: PythonError, after: str, stream: str = "stderr") -> str:
    """A program that catches the error, prints it, trains, and then does `after`."""
    more = STEPS + after
    return CATCH.format(body=_indent(error.body), stream=stream, after=more)


def can_be_caught(error: PythonError) -> bool:
    return error.signal != "SIGSEGV"


def _indent(body: str) -> str:
    return "\n".join(f"    {line}" for line in body.splitlines())


@cache
def run_program(text: str) -> Printed:
    """Run a program; return its output and its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    return Printed(done.stdout, done.stderr, done.returncode)
