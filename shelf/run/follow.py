"""Follow a run on the terminal that started it: print its ranks' lines, and pass signals to it.

    Ctrl-C            once: as `vjob cancel`, ranks that can save first; twice: at once      130
    SIGTERM           at once                                                               143
    SIGUSR1, SIGUSR2  to the run: to each rank's own process, or a new start where it morphs
    SIGHUP            the run continues without this command

Ranks' standard output goes to standard output, all else to standard error. A closed terminal does
not end a run: lines that cannot be shown are in the files.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from varuna_core.records.files import read_json
from varuna_core.records.plan import read_plan
from varuna_core.records.record import RunRecord, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.api.executor import VjobExecutor
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.log_lines.print_logs import LineFilter, RunLines, follow_lines
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.find import RunView, view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.local.scheduler import is_alive, state_file
from vjob.jobs.submit import submit as submitting

SAVE_S = 60
"""Seconds for ranks to save before they leave."""
END_S = 120
"""Seconds for ranks to end, beyond their grace."""
ENDS = (signal.SIGINT, signal.SIGTERM)
Announce = Callable[[RunFolder, RunRecord], object]


class Terminated(BaseException):
    """Raised on SIGTERM."""


@contextmanager
def note_sigterm() -> Iterator[list[int]]:
    """Record SIGTERM in the list, for `follow_run`; restore its handler and SIGINT's at the end."""
    sigterms: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDS}
    signal.signal(signal.SIGTERM, lambda number, frame: sigterms.append(number))
    try:
        yield sigterms
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Screen:
    """Output for lines; a closed stream is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the command, printed before each of its own lines."""
        self._deaf: set[TextIO] = set()

    def say(self, text: str) -> None:
        self.show(f"{self.name}: {text}", sys.stderr)

    def show(self, line: str, stream: TextIO) -> None:
        if stream in self._deaf:
            return
        try:
            print(line, file=stream, flush=True)
        except (OSError, ValueError):
            self._deaf.add(stream)
        except UnicodeEncodeError:
            print(line.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


def start_run(
    resolved: Resolved,
    screen: Screen,
    announce: Announce,
    *,
    wanted: LineFilter | None = None,
) -> int:
    """Submit a run and follow it; return its exit code. Ctrl-C and SIGTERM end it at any time.

    Without `wanted`, a single rank's lines are shown unchanged.
    """
    made: list[RunFolder] = []
    executor = VjobExecutor(resolved.conf.log_folder)
    with note_sigterm() as sigterms:
        try:
            run, record = submitting.submit(resolved, executor=executor, fill=made.append)
            announce(run, record)
            plan = read_plan(run.plan)
            wanted = wanted or LineFilter(bare=plan is not None and plan.world == 1)
            return follow_run(run, screen, sigterms, wanted)
        except (KeyboardInterrupt, Terminated) as end:  # from submit it comes once the job is there
            is_sigterm = isinstance(end, Terminated)
            for run in made:
                if read_record(run) is not None:
                    cancel_now(run, screen, "SIGTERM" if is_sigterm else "Ctrl-C")
            return 128 + (signal.SIGTERM if is_sigterm else signal.SIGINT)


def follow_run(run: RunFolder, screen: Screen, sigterms: list[int], wanted: LineFilter) -> int:
    """Show a run to its end, and return the exit code; call it within `note_sigterm`."""

    def say(text: str) -> None:
        screen.show(text, sys.stderr)

    def show(line: str, is_err: bool) -> None:
        screen.show(line, sys.stderr if is_err and not wanted.as_json else sys.stdout)

    def on_end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    def on_call(number: int, frame: FrameType | None) -> None:
        _pass_on(run, number, screen)

    lines = RunLines(run, say, wanted, show=show)
    before = {number: signal.signal(number, on_call) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGTERM, on_end)
        if sigterms:
            raise Terminated
        return _follow(lines)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        try:
            screen.say("ending the run: ranks that can save do so; Ctrl-C again ends it at once")
            cancel(run, screen, now=False, by="Ctrl-C")
        except (KeyboardInterrupt, Terminated):
            cancel_now(run, screen, "Ctrl-C")
    except Terminated:
        code = 128 + signal.SIGTERM
        screen.say("SIGTERM: ending the run")
        cancel_now(run, screen, "SIGTERM")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    lines.print_new(final=True)
    return code


def _follow(lines: RunLines) -> int:
    record = read_record(lines.run)
    is_queued = record is not None and schedulers.has_queue(record.scheduler)
    code = follow_lines(lines, with_states=is_queued)
    return code and compute_exit_code(view_run(lines.run))


def compute_exit_code(view: RunView) -> int:
    """Return the exit code of a failed run: that of its last attempt, else of its job."""
    outcome = view.record.outcome
    code = outcome.code if outcome is not None else 0
    if not code:
        state = read_json(state_file(view.run, None))
        word = str(state.get("exit_code", "")) if isinstance(state, dict) else ""
        code = int(word.partition(":")[0] or 0) if word else 0
    return code or 1


def cancel_now(run: RunFolder, screen: Screen, by: str) -> None:
    """Cancel a run without letting its ranks save, and ignore Ctrl-C and SIGTERM from here on.

    `by` is what requested it, `Ctrl-C` or `SIGTERM`, and is recorded with the end of the run.
    """
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    cancel(run, screen, now=True, by=by)


def cancel(run: RunFolder, screen: Screen, *, now: bool, by: str) -> None:
    """Cancel a run that may be over already, and print what came of it; `by` as in `cancel_now`."""
    try:
        wait_s = END_S if now else SAVE_S
        screen.say(cancel_run(run, now=now, wait_s=wait_s, say=screen.say, by=by))
    except InputError:
        return
    except VjobError as error:
        screen.say(str(error))


def _pass_on(run: RunFolder, number: int, screen: Screen) -> None:
    """Pass a signal to the run's batch script, which handles it."""
    name, state = signal.Signals(number).name, read_json(state_file(run, None))
    if not isinstance(state, dict) or not is_alive(state):
        screen.say(f"{name} had no effect: the run has no process here yet")
        return
    screen.say(f"{name} is passed to the run")
    os.kill(int(state["pid"]), number)
