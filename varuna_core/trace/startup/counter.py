"""Count the optimizer steps of a rank with torch's global hooks, which see all optimizers.

`torch.optim.optimizer.register_optimizer_step_pre_hook` and `..._post_hook` are public. Nothing in
torch or the program is replaced, and the arguments, effects and result of a step stay the same.

    optimizer.step() ends ─► is it the mark? ─► count and time in memory ─► once in 0.1 s: the file

The parameter that is updated first is the mark: each of its updates counts as one step. So several
optimizers count as one (as in a GAN, or Muon with Adam), even one for each parameter, and so does
an optimizer that is called for one group of parameters after another (DeepSpeed). A step within a
step (SAM, or a subclass that calls its parent's `step`) is part of the outer step; a step that a
GradScaler skips does not count. If another parameter is updated `OTHERS` times while the mark is
not, the other parameter becomes the mark.

A child of the process that counts writes nothing. The hooks do nothing in code that torch.compile
traces, so a compiled optimizer is not counted; if a CUDA graph records an optimizer, the file has a
flag that says so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

OTHERS = 100
TRY_S = 10.0
"""Seconds between checks that the process that counts for this rank is alive."""
is_compiling: Callable[[], bool] = bool
"""Function that returns True while torch.compile traces code; each Counter sets it to torch's
own."""
_INITIAL = "_init_optim_state"
"""Name of torch's function that fills an optimizer's state by a step that changes nothing."""


class Counter:
    """Counter of a process's optimizer steps."""

    def __init__(
        self, counts: Any, path: str, torch: Any, report: Callable[[str], None] | None = None
    ) -> None:
        """`counts` is the module records/logs/step_counts.py; `report` is called with the file's
        path once this process counts."""
        global is_compiling
        self._counts, self._path, self._report = counts, path, report
        self._tally = counts.Tally(time.perf_counter(), time.time())
        self._file: Any = None
        self._is_off = False
        self._open: dict[int, int] = {}
        """Id of the optimizer whose step is running, keyed by the thread's id."""
        self._mark: int | None = None
        self._others: dict[int, int] = {}
        """Number of updates of other parameters since the mark's last update, keyed by the
        parameter's id."""
        self._due = self._point_due = 0.0
        is_compiling = getattr(torch.compiler, "is_dynamo_compiling", is_compiling)
        self._is_captured: Any = None
        self._uses_cuda: Callable[[], bool] = torch.cuda.is_initialized
        if torch.backends.cuda.is_built():
            self._is_captured = torch.cuda.is_current_stream_capturing

    def start(self, optimizers: Any) -> None:
        """Register the hooks with torch.optim.optimizer."""
        optimizers.register_optimizer_step_pre_hook(self._begin)
        optimizers.register_optimizer_step_post_hook(self._end)
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._leave)

    # Not one word of these is for torch.compile, which would trace them into the program's graph.

    def _begin(self, optimizer: Any, *_: Any) -> None:
        if is_compiling():
            return
        self._open.setdefault(_get_thread(), id(optimizer))

    def _end(self, optimizer: Any, *_: Any) -> None:
        if is_compiling():
            return
        thread = _get_thread()
        if self._open.get(thread) != id(optimizer) or self._is_off:
            return
        del self._open[thread]
        try:
            mark = next(
                id(group["params"][0]) for group in optimizer.param_groups if group["params"]
            )
            num = 1
            if mark != self._mark:
                if self._mark is not None:
                    num = self._others[mark] = self._others.get(mark, 0) + 1
                    if num < OTHERS:
                        return
                elif _is_initial():
                    return
                self._mark = mark
            if self._others:
                self._others = {}
            now = time.perf_counter()
            self._tally.add(now, num)
            if self._is_captured is not None and self._uses_cuda() and self._is_captured():
                self._tally.flags |= self._counts.CAPTURED
            if now >= self._due:
                self._write(now)
        except Exception as error:
            self._stop(error)

    def _write(self, now: float) -> None:
        counts, tally = self._counts, self._tally
        if self._file is None:
            path = choose_path(self._path, os.environ)
            self._file = path and counts.claim_file(path)
            if not self._file:  # another process counts
                self._due = now + TRY_S
                return
            if self._report is not None:
                with contextlib.suppress(OSError, RuntimeError):  # no FIFO there, no more threads
                    self._report(str(path))
        is_whole = now >= self._point_due
        if is_whole:
            tally.note()
            self._point_due = now + counts.POINT_S
        self._file.write(tally, whole=is_whole)
        self._due = now + counts.HEAD_S

    def _close(self) -> None:
        if self._file is not None and not self._is_off:
            try:
                self._file.write(self._tally, whole=True)
            except OSError as error:
                self._stop(error)

    def _leave(self) -> None:
        """Stop counting in a child if its parent has begun to count."""
        self._is_off = self._is_off or self._tally.count > 0

    def _stop(self, error: Exception) -> None:
        """Stop counting after an error: print it as one line and let the training continue."""
        self._is_off = True
        print(f"vjob: steps of this rank are not counted: {error}", file=sys.stderr)


def _is_initial() -> bool:
    """Return True in the step by which torch's checkpoints fill the state of a new optimizer."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == _INITIAL:
            return True
        frame = frame.f_back
    return False


def choose_path(path: str, environ: Mapping[str, str]) -> str | None:
    """Return the file of this process; None for one of several started within a rank.

    `path` is the rank's file, or the node's if vjob starts one process for a node's ranks.
    """
    rank = environ.get("RANK", "")
    name = f"{rank}.steps"
    if "VJOB_NODE_RANKS" in environ:
        return os.path.join(os.path.dirname(path), name) if rank.isdecimal() else path
    return path if not rank.isdecimal() or name == os.path.basename(path) else None


def start(counts: Any, path: str, torch: Any, report: Callable[[str], None] | None = None) -> None:
    """Count the steps of this process, after torch has been imported."""
    Counter(counts, path, torch, report).start(sys.modules["torch.optim.optimizer"])


_get_thread = threading.get_ident
