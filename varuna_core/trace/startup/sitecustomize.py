"""First module that the ranks' Python imports. The agent puts this folder, which is in agent.pyz,
in front of their PYTHONPATH, unless a conf has `profile.count_steps: false`.

When a rank's process ends, one line in a file records the uncaught exception, if one ended the
process: a log cannot tell it from one that was caught and printed. Nothing else happens until torch
is imported. Then the rank's optimizer steps are counted (counter.py), and with `profile.timeline:
true` varuna_core/trace/hook.py watches for the imports of engines. At its end, this module runs the
sitecustomize that Python would have imported without it. An error in this module is printed as one
line, and the rank trains without a timeline, or without counted steps.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


class _Finder:
    """Import hook that acts at the first import of torch: before the import, it starts the rank's
    timeline, and after the import, the counting of steps, if the environment asks for these."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        if os.environ.get("VJOB_WATCH"):
            _do(_watch, "no timeline of this rank")
        import importlib.util

        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None and os.environ.get("VJOB_STEPS"):
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                _do(_count, "steps of this rank are not counted", module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _do(function: Callable[..., None], failed: str, *given: ModuleType) -> None:
    try:
        function(*given)
    except Exception as error:
        print(f"vjob: {failed}: {error}", file=sys.stderr)


def _watch() -> None:
    if sys.version_info < (3, 9):  # noqa: UP036 # the program's own Python
        raise RuntimeError(f"a timeline needs Python 3.9 or later, not {sys.version.split()[0]}")
    from importlib.util import find_spec

    if find_spec("varuna_core") is None:  # the program finds none: the agent's own
        sys.path.append(_ROOT)
    from varuna_core.trace import hook

    hook.start()


def _count(torch: ModuleType) -> None:
    """Load the counter's files by path, since the program may have another varuna_core."""
    counts = _load("step_counts", f"{_ROOT}/varuna_core/records/logs")
    reporter = _load("reporter", _HERE)
    dump = reporter.prepare(torch)
    counter, path = _load("counter", _HERE), os.environ["VJOB_STEPS"]
    listener = reporter.Reporter(dump)
    own = counter.choose_path(path, os.environ)
    if own is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        listener.start(own)
    counter.start(counts, path, torch, lambda own: listener.start(own, takes_over=True))


def _note_end(path: str) -> None:
    """Write `begun` now and `ended` when this process ends, with any uncaught exception from
    `sys.last_value`. Children write neither."""
    import atexit

    pid = os.getpid()

    def write(line: str) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            file = os.open(path, flags, 0o600)
            try:
                os.write(file, line.encode("utf-8", "replace"))
            finally:
                os.close(file)
        except OSError:  # a full disk, or a folder that is gone: nothing is known then
            pass

    def note() -> None:
        if os.getpid() != pid:
            return
        text, trace = "", getattr(sys, "last_traceback", None)
        raised = getattr(sys, "last_value", None)
        # A callback of C sets both too, and the program goes on: its traceback begins elsewhere.
        # No import here: its module may use `eval`, and then an interrupt exits 1, not by SIGINT.
        if trace is not None and trace.tb_frame.f_code.co_name in _TOPS:
            kind = type(raised)
            name = kind.__qualname__
            if kind.__module__ not in ("builtins", "__main__"):
                name = f"{kind.__module__}.{name}"
            try:
                said = str(raised).strip().split("\n")[0]
            except Exception:  # of the program's own class
                said = ""
            text = (f"{name}: {said}" if said else name)[:500]
        write(f"ended {text}".rstrip() + "\n")

    write("begun\n")
    atexit.register(note)


_TOPS = ("<module>", "_run_module_as_main", "_run_code")
"""Functions in which the traceback of a whole program begins."""


def _load(stem: str, folder: str) -> Any:
    from importlib.util import module_from_spec

    spec = importlib.machinery.PathFinder.find_spec(stem, [folder])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    of_the_user = sys.modules.get(stem)
    sys.modules[stem] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    del sys.modules[stem]
    if of_the_user is not None:
        sys.modules[stem] = of_the_user
    return module


def _read_next() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
sys.path[:] = [each for each in sys.path if each != _HERE]
sys.meta_path.insert(0, _Finder())
if "VJOB_ENDED" in os.environ:  # not for processes that this one starts
    _note_end(os.environ.pop("VJOB_ENDED"))
_read_next()
