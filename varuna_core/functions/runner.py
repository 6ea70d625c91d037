"""Entry point of one rank of a function: `python function.pyz RUN_FOLDER`, in a rank's environment.

    facts.json ─► same Python? ─► submitted.pkl ─► the function ─► function/<rank>.result.pkl
                                                               └─► its traceback, exit code 1

Errors that occur before the function runs are also written to the result file, with an explanation:
the node's Python has another version, or lacks submitit or a module that the function needs.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_core.functions.facts import FunctionFacts, describe_python, read_facts
from varuna_core.functions.pickles import write_error, write_pickle
from varuna_core.records.files import is_listed
from varuna_core.records.requests import read_stop
from varuna_core.records.runfolder import RunFolder

if TYPE_CHECKING:
    from varuna_core.functions.environment import Signals

LANDING_S = 60.0
"""Seconds to wait for the pickle to appear on this node; submitit waits equally long."""
POLL_S = 0.5
OURS = ("varuna_core.functions", "submitit.core.utils", "pickle")
"""Modules whose frames are removed from the beginning of a traceback."""


class Refusal(Exception):
    """Raised if the function cannot run here; the message is for the user."""


def main(words: list[str] | None = None) -> int:
    """Run the function of a run folder; return the exit code of the rank."""
    folder = Path((sys.argv[1:] if words is None else words)[0])
    # Beside function.pyz: modules in the working directory, as with `python -m`.
    sys.path.insert(1, os.getcwd())
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    os.environ.setdefault("SUBMITIT_EXECUTOR", "vjob")
    rank = FunctionRank(RunFolder(folder), int(os.environ["RANK"]))
    try:
        return rank.run()
    except Refusal as refusal:
        return rank.fail(str(refusal))


class FunctionRank:
    def __init__(self, run: RunFolder, rank: int) -> None:
        self.run_folder = run
        self.rank = rank
        self.result = run.result_pickle(rank)
        self.attempt = run.attempt(int(os.environ.get("VJOB_ATTEMPT", "0")))

    def run(self) -> int:
        """Call the function and write its result; raise Refusal if it cannot be called."""
        self.result.unlink(missing_ok=True)  # of an attempt before this one
        facts = read_facts(self.run_folder)
        if facts is not None and facts.python != describe_python():
            raise Refusal(explain_python(facts, self._name_place()))
        signals, call = self._load(facts)
        try:
            value = call()
        except BaseException as error:
            if signals.exit_code is not None:
                return signals.exit_code
            return self._fail_with(error)
        if signals.exit_code is not None:  # the function went on in spite of it
            return signals.exit_code
        signals.finish()
        try:
            write_pickle(self.result, ("success", value))
        except Exception as error:
            raise Refusal(explain_result(value, error)) from None
        return 0

    def fail(self, text: str) -> int:
        """Write `text` as the error that ended this rank, unless another rank left with a
        checkpoint; print the text on stderr, and return the exit code 1."""
        if not self._is_left():
            try:
                write_error(self.result, text)
            except OSError as error:
                print(f"{self.result} cannot be written: {error.strerror}", file=sys.stderr)
        print(text.rstrip("\n"), file=sys.stderr, flush=True)
        return 1

    def _load(self, facts: FunctionFacts | None) -> tuple[Signals, Callable[[], Any]]:
        """Unpickle the function, install its signal handlers, and return both."""
        name = "the function" if facts is None else facts.name
        place = self._name_place()
        try:
            from submitit import helpers
            from submitit.core import plugins
            from submitit.core.utils import DelayedSubmission

            from varuna_core.functions.environment import (
                Signals,
                VjobJobEnvironment,
                export_torch,
            )
        except Exception as error:
            needs = f"a function needs submitit and cloudpickle in the Python of its ranks, {place}"
            whole = not isinstance(error, ImportError)
            raise Refusal(render_error(error, needs, whole=whole)) from None
        # submitit 1.5.3 looks for no plugins in archives; later ones do, in spawned children too.
        plugins.get_job_environment = VjobJobEnvironment
        helpers.TorchDistributedEnvironment.export = export_torch  # type: ignore[method-assign]
        self._wait_for_pickle()
        try:
            delayed = DelayedSubmission.load(self.run_folder.submitted_pickle)
        except (Exception, SystemExit) as error:  # of the modules that it imports
            why = f"{name} cannot be unpickled by {place}"
            raise Refusal(render_error(error, why + _compare_cloudpickle(facts))) from None
        env = VjobJobEnvironment()
        signals = Signals(env, env.paths, delayed)
        signals.listen()
        return signals, delayed.result

    def _wait_for_pickle(self) -> None:
        deadline = time.monotonic() + LANDING_S
        path = self.run_folder.submitted_pickle
        while not path.exists() and not is_listed(path):
            if time.monotonic() > deadline:
                raise Refusal(
                    f"FileNotFoundError: {path} is not there, seen from {self._name_place()}: "
                    "log_folder must be a folder that every node sees"
                )
            time.sleep(POLL_S)

    def _fail_with(self, error: BaseException) -> int:
        code = self.fail(render_error(error))
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            return error.code or 0
        return code

    def _is_left(self) -> bool:
        """Return True if another rank left with a checkpoint, so a failure here is expected."""
        stop = read_stop(self.attempt)
        return stop is not None and stop["code"] == 0

    def _name_place(self) -> str:
        return f"{sys.executable} on {os.environ.get('VJOB_NODE', os.uname().nodename)}"


def explain_python(facts: FunctionFacts, place: str) -> str:
    """Return the message for a rank whose Python version differs from that of the Python that
    submitted the function."""
    here = describe_python()
    return (
        f"RuntimeError: {facts.name} was pickled by Python {facts.python}, and Python {here} "
        f"({place}) cannot run it: set program.python to a Python {facts.python} of the nodes, "
        f"take an image with one, or submit with Python {here}"
    )


def explain_result(value: Any, error: Exception) -> str:
    """Return the message for a result that cannot be pickled."""
    kind = type(value)
    if isinstance(error, OSError):
        return f"OSError: the result cannot be written: {error.strerror}: {error.filename}"
    return (
        f"{type(error).__name__}: the function returned a {kind.__module__}.{kind.__qualname__}, "
        f"which cannot be pickled: {error}; return plain values, and write large things to files"
    )


def render_error(error: BaseException, more: str = "", *, whole: bool = True) -> str:
    """Render a traceback that begins in the user's code, and append `more`."""
    place = error.__traceback__ if whole else None
    while place is not None and place.tb_frame.f_globals.get("__name__", "").startswith(OURS):
        place = place.tb_next
    text = "".join(traceback.format_exception(type(error), error, place)).rstrip("\n")
    return f"{text}; {more}\n" if more else f"{text}\n"


def _compare_cloudpickle(facts: FunctionFacts | None) -> str:
    """Return both cloudpickle versions if they differ: the pickle may then be incompatible."""
    import cloudpickle

    if facts is None or facts.cloudpickle == cloudpickle.__version__:
        return ""
    return (
        f"; cloudpickle is {cloudpickle.__version__} here and was {facts.cloudpickle} at submit: "
        "install that version"
    )
