"""A thread in a rank that says where the rank is, when the agent asks: stacks of all threads, and
the collectives that torch's Flight Recorder has.

    agent ── a byte into ranks/<rank>.ask ──► this thread ── ranks/<rank>.where.json ──► agent

The thread sleeps in a read until then, so it costs nothing; it answers while the main thread hangs
in a collective. It starts once torch has been imported, in the first process of a rank that does
so; one that counts optimizer steps takes over from it.
"""

from __future__ import annotations

import contextlib
import json
import opcode
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MOST_FRAMES = 64
LAST_CALLS = 64
BUFFER = "2000"
"""Entries of the recorder, torch's own default since 2.6. An empty value would end the process."""
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def prepare(torch: Any) -> Callable[[], Any] | None:
    """Let torch keep its last collectives, before the first of them; the function that dumps them
    as JSON, None in a torch without it."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name, variable in (("_dump_fr_trace_json", 0), ("_dump_nccl_trace_json", 1)):
        dump: Callable[[], Any] | None = getattr(c10d, name, None)
        if dump is not None:
            if not any(size in os.environ for size in SIZES):
                os.environ[SIZES[variable]] = BUFFER
            return dump
    return None


class Reporter:
    """The thread of one rank."""

    def __init__(self, dump: Callable[[], Any] | None) -> None:
        self._dump = dump
        self._started: tuple[int, str] | None = None
        """The process that did it, of which others are forked, and its file."""

    def start(self, path: str, *, takes_over: bool = False) -> None:
        """Listen for the rank with this `.steps` file, unless another process does; that one is not
        asked any more if this takes over."""
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
    """Stacks as py-spy prints them, innermost frame first, and the last collectives; `jumps` is
    true where the innermost frame is at the end of a round of a loop, and so in no call."""
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
                frames[0]["jumps"] = "JUMP" in opcode.opname[code.co_code[max(frame.f_lasti, 0)]]
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


def trim(flight: Any) -> dict[str, Any]:
    """The last entries of each group, without sizes and threads."""
    kept: dict[str, list[dict[str, Any]]] = {}
    keys = ("process_group", "collective_seq_id", "profiling_name", "is_p2p", "time_created_ns")
    for entry in flight.get("entries", ()):
        group = kept.setdefault(str(entry.get("process_group")), [])
        group.append({key: entry.get(key) for key in keys})
        del group[:-LAST_CALLS]
    return {"entries": [entry for group in kept.values() for entry in group]}


def write(path: str, value: dict[str, Any]) -> None:
    """Replace the file at once; whoever reads it finds it whole."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(value, handle)
    os.replace(temporary, path)
