"""A launched run on the terminal: its ranks' lines as they come, and the signals that end it.

    Ctrl-C            once: as `vjob cancel`, ranks that can save first; twice: at once      130
    SIGTERM           at once                                                               143
    SIGUSR1, SIGUSR2  to the run: to each rank's own process, or a new start where it morphs
    SIGHUP            the run goes on without us

Ranks' standard output on standard output, all else on standard error. A terminal that is gone is no
reason to end a run: what cannot be shown is in the files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from varuna_core.records.files import read_json
from varuna_core.records.logs.tail import Follower, clean
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import RunView, is_over, view_run
from vjob.jobs.schedulers.local.scheduler import is_alive, state_file

LOOK_S = 1.0
"""Between two looks at the run's state."""
POLL_S = 0.2
FILES_PER_S = 500
"""How many log files are looked at in a second, at most."""
KEPT_LINES = 100
SAVE_S = 60
"""For ranks that save before they leave."""
END_S = 120
"""For ranks that are ended, beyond their grace."""


ENDS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM."""


@contextmanager
def note_sigterm() -> Iterator[list[int]]:
    """SIGTERM is noted in the list, for `follow_run`; its handler and SIGINT's are restored at the
    end."""
    sigterms: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDS}
    signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
    try:
        yield sigterms
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cancel_now(run: RunFolder, screen: Screen) -> None:
    """End the run at once; from here on neither Ctrl-C nor SIGTERM keeps us from that."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    cancel(run, screen, now=True)


class Screen:
    """Where lines go; an output that is gone takes none."""

    def __init__(self) -> None:
        self._deaf: set[TextIO] = set()

    def say(self, text: str) -> None:
        self.show(f"launch: {text}", sys.stderr)

    def show(self, line: str, stream: TextIO) -> None:
        if stream in self._deaf:
            return
        try:
            print(line, file=stream, flush=True)
        except (OSError, ValueError):
            self._deaf.add(stream)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


class _Lines:
    """New lines of a run's files."""

    def __init__(self, run: RunFolder, screen: Screen) -> None:
        self._run, self._screen = run, screen
        self._followers: dict[Path, Follower] = {}
        self.own: deque[str] = deque(maxlen=KEPT_LINES)
        """What the run's own processes said last."""

    @property
    def pause_s(self) -> float:
        return max(POLL_S, len(self._followers) / FILES_PER_S)

    def show(self, *, final: bool = False) -> None:
        self._find()
        for path, follower in self._followers.items():
            node, kind = path.stem, path.suffix
            for line in follower.read(final=final):
                if path.parent == self._run.path:
                    self.own.append(line)
                    self._screen.show(clean(line), sys.stderr)
                else:
                    stream = sys.stdout if kind == ".out" else sys.stderr
                    self._screen.show(f"{node} | {line}", stream)

    def _find(self) -> None:
        paths = [self._run.scheduler_log()]
        for attempt in self._run.attempts():
            paths += sorted([*attempt.path.glob("*.out"), *attempt.path.glob("*.err")])
        for path in paths:
            if path not in self._followers:
                self._followers[path] = Follower(path)


def follow_run(run: RunFolder, screen: Screen, sigterms: list[int]) -> int:
    """Show the run to its end, within `note_sigterm`, whose list is `sigterms`; the exit code."""
    lines = _Lines(run, screen)
    asked: list[int] = []
    code = 0

    def on_end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    def on_call(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    handlers = {number: on_call for number in (signal.SIGUSR1, signal.SIGUSR2)}
    before = {number: signal.signal(number, handlers[number]) for number in handlers}
    try:
        signal.signal(signal.SIGTERM, on_end)
        if sigterms:
            raise Terminated
        return _follow(run, lines, asked, screen)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        try:
            screen.say("ending the run: ranks that can save first; again to end it at once")
            cancel(run, screen, now=False)
        except (KeyboardInterrupt, Terminated):
            cancel_now(run, screen)
    except Terminated:
        code = 128 + signal.SIGTERM
        screen.say("SIGTERM: ending the run")
        cancel_now(run, screen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    lines.show(final=True)
    return code


def _follow(run: RunFolder, lines: _Lines, asked: list[int], screen: Screen) -> int:
    looked = -LOOK_S
    while True:
        while asked:
            _pass_on(run, asked.pop(0), screen)
        if time.monotonic() - looked >= LOOK_S:
            view = view_run(run)
            looked = time.monotonic()
        over = is_over(view)
        lines.show(final=over)
        if over:
            return _finish(view, screen, "\n".join(lines.own))
        time.sleep(lines.pause_s)


def _finish(view: RunView, screen: Screen, said: str) -> int:
    """The exit code of an ended run: that of its last attempt, else of its job. `said` is shown
    already."""
    record = view.record
    if record.verdict == "COMPLETED":
        return 0
    if record.message not in said:
        screen.say(f"{view.state}: {clean(record.message)}")
    screen.say(f"all files: {view.run.path}")
    code = record.outcome.code if record.outcome is not None else 0
    if not code:
        state = read_json(state_file(view.run, None))
        word = str(state.get("exit_code", "")) if isinstance(state, dict) else ""
        code = int(word.partition(":")[0] or 0) if word else 0
    return code or 1


def cancel(run: RunFolder, screen: Screen, *, now: bool) -> None:
    """End a run, which may be over meanwhile."""
    try:
        screen.say(cancel_run(run, now=now, wait_s=END_S if now else SAVE_S, say=screen.say))
    except InputError:
        return
    except VjobError as error:
        screen.say(str(error))


def _pass_on(run: RunFolder, number: int, screen: Screen) -> None:
    """A signal to the run's master, whose batch script knows what it means."""
    name, state = signal.Signals(number).name, read_json(state_file(run, None))
    if not isinstance(state, dict) or not is_alive(state):
        screen.say(f"{name} reached nobody: the run has no process here yet")
        return
    screen.say(f"{name} goes to the run")
    os.kill(int(state["pid"]), number)
