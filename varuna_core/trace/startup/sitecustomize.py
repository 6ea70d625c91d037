"""What the ranks' Python reads first where a conf has `profile.timeline: true`: the agent puts this
folder, which lies in agent.pyz, in front of their PYTHONPATH.

Nothing happens until torch is imported; then varuna_core/trace/hook.py watches for the engines. The
sitecustomize that Python would have read without this one is read after it. Whatever goes wrong
here is one line, and the rank trains without a timeline.
"""

import importlib.machinery
import os
import sys


class _Finder:
    """Sees that torch is about to be imported, once."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        _start()
        import importlib.util

        return importlib.util.find_spec(fullname)


def _start() -> None:
    try:
        if sys.version_info < (3, 9):  # noqa: UP036 # the program's own Python
            raise RuntimeError(f"it needs Python 3.9 or later, not {sys.version.split()[0]}")
        from importlib.util import find_spec

        if find_spec("varuna_core") is None:  # the program finds none: the agent's own
            sys.path.append(_ROOT)
        from varuna_core.trace import hook

        hook.start()
    except Exception as error:
        print(f"vjob: no timeline of this rank: {error}", file=sys.stderr)


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
_read_next()
