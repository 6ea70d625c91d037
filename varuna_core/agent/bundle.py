"""Pack the agent into one file that any python3 from 3.8 runs (`agent.pyz`), the built-in
programs with all of varuna_core into `program.pyz`, so that ranks need torch but no vjob, and the
runner of pickled functions into `function.pyz`.

`agent.pyz` holds what nodes can import in this run: its entry points, and what they import in turn.

Each source comes with its bytecode (PEP 552: an unchecked hash-based pyc), since compiling takes
half of an agent's start. A node's Python of another version rejects the bytecode by its magic
number and compiles the source.

The same sources and the same Python give the same bytes, so that run folders can be compared. The
bundles are cached in ~/.cache/vjob, since compiling takes longer than a submit. They are not
compressed, since a minimal python3 may lack zlib.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import re
import sys
import zipfile
from pathlib import Path
from types import CodeType
from typing import Callable, Collection, Iterator, Mapping, Optional, Sequence

import varuna_core
from varuna_core.plugins.seam import collect_for_nodes
from varuna_core.records.files import locate_cache
from varuna_core.records.plan import Plan

_FOLDERS = ("facts", "records", "hang", "plugins", "agent", "morph", "trace")
_ALWAYS = (
    "agent.cli",
    "trace.startup.sitecustomize",
    "trace.startup.counter",
    "trace.startup.reporter",
    "records.logs.step_counts",
)
"""Modules that every run starts, or that its ranks load by their path."""
ENTRIES: Mapping[str, Callable[[Plan], bool]] = {
    "morph.cli": lambda plan: plan.morphing is not None,
    "agent.track.tracker": lambda plan: plan.track is not None,
    "trace.hook": lambda plan: plan.timeline,
}
"""Modules that only some runs start; they are bundled only for such runs, even if imported."""
_NAME = re.compile(r"varuna_core(\.\w+)+(?=:|$)")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHEBANG = b"#!/usr/bin/env python3\n"
_MAIN = """\
import sys

if sys.version_info < (3, 8):
    sys.exit("agent.pyz needs Python 3.8 or later; %s is %s" % (sys.executable, sys.version))
if sys.argv[1:2] == ["morph"]:
    from varuna_core.morph.cli import main
else:
    from varuna_core.agent.cli import main

sys.exit(main())
"""


_PROGRAM = """\
from varuna_core.programs.pretrain import run

run()
"""

_FUNCTION = """\
import sys

if sys.version_info < (3, 8):
    sys.exit("function.pyz needs Python 3.8 or later; %s is %s" % (sys.executable, sys.version))
from varuna_core.functions.runner import main

sys.exit(main())
"""
_ENVIRONMENT = "varuna_core.functions.environment:VjobJobEnvironment"
_UNCHECKED = (1).to_bytes(4, "little")
_MOST_KEPT = 9
"""Bundles in the cache: three of each kind."""


def write_bundle(
    path: Path,
    *,
    plan: Optional[Plan] = None,
    compiled: bool = True,
    plugins: Optional[Mapping[str, Sequence[str]]] = None,
) -> None:
    """Write agent.pyz atomically. Without bytecode (`compiled`) the file is a third as large.

    Without a `plan` the file serves any run. `plugins` has the plug-ins that nodes need, by group.
    """
    sources = {**collect_sources(), **collect_for_nodes(plugins or {})}
    some = [name for name, is_needed in ENTRIES.items() if plan is None or is_needed(plan)]
    entries = [*_ALWAYS, *some]
    if compiled:
        _write(path, _render("agent.pyz", sources, entries))
    else:
        _write(path, render_bundle(select_imported(sources, entries)))


def select_imported(sources: Mapping[str, bytes], entries: Collection[str]) -> dict[str, bytes]:
    """Select the sources that entry points and plug-ins import, at once or later."""
    modules = {re.sub(r"(/__init__)?\.py$", "", each).replace("/", "."): each for each in sources}
    left_out = {f"varuna_core.{name}" for name in ENTRIES if name not in entries}
    found = {"__main__"}
    todo = [f"varuna_core.{name}" for name in entries]
    todo += [name for name in modules if name.startswith("varuna_core.plugins.carried")]
    while todo:
        name = todo.pop()
        if name in found or name in left_out or not name.startswith("varuna_core"):
            continue
        found.add(name)
        todo.append(name.rpartition(".")[0])
        todo += _list_imports(sources[modules[name]]) if name in modules else ()
    return {each: sources[each] for name, each in modules.items() if name in found}


def _list_imports(source: bytes) -> Iterator[str]:
    """List the modules that a source imports; `from x import y` gives `x.y`.

    A string `module:attribute` or `module` counts as an import, since it may be a table's plug-in.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = _NAME.match(node.value)
            yield from [named[0]] if named else []


def write_program(path: Path) -> None:
    """Write program.pyz atomically."""
    sources = {"__main__.py": _PROGRAM.encode(), **_collect_package()}
    _write(path, _render("program.pyz", sources))


def write_function(path: Path) -> None:
    """Write function.pyz atomically.

    The file has all of varuna_core, which the function may import, and the metadata by which
    submitit finds its job environment if vjob is not installed.
    """
    name = f"vjob_rank-{varuna_core.__version__}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: vjob-rank\nVersion: {varuna_core.__version__}\n"
    sources = {
        "__main__.py": _FUNCTION.encode(),
        f"{name}/METADATA": metadata.encode(),
        f"{name}/entry_points.txt": f"[submitit]\njob_environment = {_ENVIRONMENT}\n".encode(),
    }
    _write(path, _render("function.pyz", {**sources, **_collect_package()}))


def _collect_package() -> dict[str, bytes]:
    root = Path(varuna_core.__file__).parent
    return {f"varuna_core/{p.relative_to(root)}": p.read_bytes() for p in root.rglob("*.py")}


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(part, 0o700)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def collect_sources() -> dict[str, bytes]:
    """Return the agent's sources, keyed by their name in the archive."""
    root = Path(varuna_core.__file__).parent
    paths = [root / "__init__.py"]
    for folder in _FOLDERS:
        paths += (root / folder).rglob("*.py")
    sources = {f"varuna_core/{path.relative_to(root)}": path.read_bytes() for path in paths}
    return {"__main__.py": _MAIN.encode(), **sources}


def _render(name: str, sources: Mapping[str, bytes], entries: Sequence[str] = ()) -> bytes:
    """Return the bundle with its bytecode, from the cache if it has been built before.

    If `entries` are given, the bundle has only the modules that these entry points import, and
    their bytecode has no docstrings.
    """
    key = hashlib.sha256(f"{name} {sys.version} {' '.join(entries)}".encode())
    for each in sorted(sources):
        key.update(f"{each} {len(sources[each])} ".encode() + sources[each])
    kept = locate_cache("bundles") / f"{key.hexdigest()}.pyz"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    chosen = select_imported(sources, entries) if entries else sources
    compiled = compile_sources(name, chosen, optimize=2 if entries else 0)
    data = render_bundle({**chosen, **compiled})
    with contextlib.suppress(OSError):  # a home that is full, or of somebody else
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(kept, data)
        by_age = sorted(kept.parent.glob("*.pyz"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-_MOST_KEPT]:
            old.unlink()
    return data


def compile_sources(
    archive: str, sources: Mapping[str, bytes], optimize: int = 0
) -> dict[str, bytes]:
    """Compile these modules to pyc files, except modules whose bytecode is not reproducible.

    With `optimize=2` the bytecode has neither docstrings nor assertions.
    """
    found = {}
    for name, source in sources.items():
        if name.endswith(".py") and name != "__main__.py":
            code = compile(
                source, f"{archive}/{name}", "exec", dont_inherit=True, optimize=optimize
            )
            if sys.version_info < (3, 11) and _has_set(code):
                continue  # written in the order of hashes, which differ from process to process
            head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
            held = list(_list_parts(code))
            found[f"{name}c"] = head + marshal.dumps(code)
            held.clear()
    return found


def _list_parts(value: object) -> Iterator[object]:
    """Yield all objects that a code object consists of.

    marshal marks objects with more than one reference, so its output would depend on the rest of
    this process. If the caller keeps a reference to each object, all of them are marked.
    """
    yield value
    if isinstance(value, CodeType):
        value = (
            *(value.co_consts, value.co_names, value.co_varnames, value.co_cellvars),
            *(value.co_freevars, value.co_filename, getattr(value, "co_qualname", value.co_name)),
        )
    if isinstance(value, (tuple, frozenset)):
        for each in value:
            yield from _list_parts(each)


def _has_set(code: CodeType) -> bool:
    return any(
        isinstance(const, frozenset) or (isinstance(const, CodeType) and _has_set(const))
        for const in code.co_consts
    )


def render_bundle(sources: Mapping[str, bytes]) -> bytes:
    memory = io.BytesIO()
    memory.write(_SHEBANG)
    with zipfile.ZipFile(memory, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(sources):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, sources[name])
    return memory.getvalue()
