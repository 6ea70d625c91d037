"""A thread in a rank that sends, when the agent asks, the stacks of all threads and the last
collectives in torch's Flight Recorder.

    agent ── a byte into ranks/<rank>.ask ──► this thread ── ranks/<rank>.where.json ──► agent

Between requests the thread sleeps in a read, which costs no processor time. It answers even while
the main thread hangs in a collective. The thread starts in the first process of a rank that imports
torch; the process that counts the rank's optimizer steps takes over from that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

MOST_FRAMES = 64
LAST_CALLS = 64
BUFFER = "2000"
"""Number of entries of the Flight Recorder, torch's default since 2.6; an empty value in the
environment would be a fatal error."""
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
READS = re.compile(
    "LOAD_|COMPARE|CONTAINS|IS_OP|UNARY|POP_|JUMP|NOP|RESUME|COPY$|DUP|ROT|SWAP|TO_BOOL|EXTENDED|"
    "NOT_TAKEN|CACHE|BINARY_|PUSH_NULL"
)
"""Pattern for bytecode instructions that change nothing but the frame's own stack."""
COUNTS = re.compile(f"(?!LOAD_ATTR|LOAD_METHOD|BINARY_SUBSCR|BINARY_SLICE)({READS.pattern}|"
                    "STORE_FAST|STORE_NAME|STORE_GLOBAL|INPLACE_)")  # fmt: skip
"""Pattern for bytecode instructions that may also assign numbers to variables, but raise no
exception for an index or an attribute."""


def prepare(torch: Any) -> Callable[[], Any] | None:
    """Make torch record collectives from the first one on; return the function that dumps the last
    ones as JSON, or None if torch has no such function."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name, variable in (("_dump_fr_trace_json", 0), ("_dump_nccl_trace_json", 1)):
        dump: Callable[[], Any] | None = getattr(c10d, name, None)
        if dump is not None:
            if not any(size in os.environ for size in SIZES):
                os.environ[SIZES[variable]] = BUFFER
            return dump
    return None


class Reporter:
    """The reporting thread of a rank."""

    def __init__(self, dump: Callable[[], Any] | None) -> None:
        self._dump = dump
        self._started: tuple[int, str] | None = None
        """Id of the process that started this thread, which its forked children lack, and the
        file."""

    def start(self, path: str, *, takes_over: bool = False) -> None:
        """Answer requests about the rank with this `.steps` file, unless another process does; with
        `takes_over`, replace that process."""
        if self._started == (os.getpid(), path):
            return
        stem = path[: -len(".steps")] if path.endswith(".steps") else path
        ask = f"{stem}.ask"
        if takes_over:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(ask)
        try:
            os.mkfifo(ask, 0o600)
        except FileExistsError:
            return
        self._started = os.getpid(), path
        # Open for writing too: a read then waits for the next question instead of ending.
        fd = os.open(ask, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        main = threading.main_thread().ident
        threading.Thread(
            target=self._serve,
            args=(fd, f"{stem}.where.json", main),
            name="vjob-where",
            daemon=True,
        ).start()

    def _serve(self, fd: int, answer: str, main: int | None) -> None:
        while os.read(fd, 4096):
            with contextlib.suppress(Exception):  # the next question may have an answer
                write(answer, describe(main, self._dump))


def describe(main: int | None, dump: Callable[[], Any] | None) -> dict[str, Any]:
    """Return stacks as py-spy prints them, innermost frame first, and the last collectives. `spins`
    is the line of a loop in the innermost frame that cannot end by itself, else 0."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    threads = []
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        frames: list[dict[str, Any]] = []
        while frame is not None and len(frames) < MOST_FRAMES:
            code = frame.f_code
            frames.append(
                {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
            )
            if len(frames) == 1:
                frames[0]["spins"] = find_spin(code, frame.f_lasti) if ident == main else 0
            frame = frame.f_back  # type: ignore[assignment]
        name = "MainThread" if ident == main else names.get(ident, "a thread")
        threads.append({"thread_name": name, "frames": frames})
    flight = None
    if dump is not None and "torch.distributed" in sys.modules:
        with contextlib.suppress(Exception):
            flight = trim(json.loads(dump()))
    found = {"pid": os.getpid(), "time": time.time(), "threads": threads, "flight": flight}
    # The answers' own cost is none of the program's.
    return {**found, "own_cpu_s": time.thread_time()}


def find_spin(code: types.CodeType, at: int) -> int:
    """Return the first line of the innermost loop around this instruction if the loop cannot end by
    itself: it has no exit and only counts, or only reads what another thread may change.

    Return 0 for a loop that calls a function, takes the next item of an iterator or stores into an
    object.
    """
    import dis  # not at the start of each Python

    steps = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    back = [one for one in steps if one.opcode in jumps and one.argval <= at <= one.offset]
    if not back:
        return 0
    begin = max(one.argval for one in back)
    end = max(one.offset for one in back if one.argval == begin)
    loop = [one for one in steps if begin <= one.offset <= end]
    leaves = any(one.opcode in jumps and not begin <= one.argval <= end for one in loop)
    leaves |= "_IF_" in loop[-1].opname  # it goes on after the loop
    if not all((READS if leaves else COUNTS).match(one.opname) for one in loop):
        return 0
    return next(line for start, line in reversed(list(dis.findlinestarts(code))) if start <= begin)


def trim(flight: Any) -> dict[str, Any]:
    """Return the last entries of each process group in this dump, without sizes and threads."""
    kept: dict[str, list[dict[str, Any]]] = {}
    keys = ("process_group", "collective_seq_id", "profiling_name", "is_p2p", "time_created_ns")
    for entry in flight.get("entries", ()):
        group = kept.setdefault(str(entry.get("process_group")), [])
        group.append({key: entry.get(key) for key in keys})
        del group[:-LAST_CALLS]
    return {"entries": [entry for group in kept.values() for entry in group]}


def write(path: str, value: dict[str, Any]) -> None:
    """Replace the file atomically, so readers find it whole."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(value, handle)
    os.replace(temporary, path)
