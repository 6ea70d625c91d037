"""Packs the agent into one file that any python3 from 3.8 runs: `agent.pyz`; and the built-in
programs with all of varuna_core into `program.pyz`, so that ranks need torch and nothing of vjob;
and what runs a pickled function, likewise, into `function.pyz`.

Beside each source lies what this Python compiles it to, which the same version of Python on a node
takes as it is: compiling is half of an agent's start. Any other one finds by the number in front
that it is not for it, and compiles the source (PEP 552: an unchecked hash-based pyc).

The same sources and the same Python give the same bytes, so a run folder can be compared with
another. They are kept in ~/.cache/vjob, for compiling takes longer than a submit. Stored, not
compressed: a stripped python3 may lack zlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import sys
import zipfile
from pathlib import Path
from types import CodeType
from typing import Mapping, Optional, Sequence

import varuna_core
from varuna_core.plugins.seam import collect_for_nodes

_FOLDERS = ("facts", "records", "hang", "plugins", "agent", "morph", "trace")
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
_MARSHAL = 2
"""The last version whose bytes do not depend on who else holds an object."""
_MOST_KEPT = 9
"""Bundles in the cache: three of each kind."""


def write_bundle(
    path: Path, *, compiled: bool = True, plugins: Optional[Mapping[str, Sequence[str]]] = None
) -> None:
    """Write agent.pyz; it lands whole or not at all. Without `compiled` it is a third as large.

    `plugins` are those that nodes need: names by group.
    """
    sources = {**collect_sources(), **collect_for_nodes(plugins or {})}
    _write(path, _render("agent.pyz", sources) if compiled else render_bundle(sources))


def write_program(path: Path) -> None:
    """Write program.pyz, likewise."""
    sources = {"__main__.py": _PROGRAM.encode(), **_collect_package()}
    _write(path, _render("program.pyz", sources))


def write_function(path: Path) -> None:
    """Write function.pyz, likewise.

    It holds all of varuna_core, for the function may use it and finds this one first; and the
    metadata by which submitit finds its environment where vjob is not installed.
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
    """Name in the archive to content."""
    root = Path(varuna_core.__file__).parent
    paths = [root / "__init__.py"]
    for folder in _FOLDERS:
        paths += (root / folder).rglob("*.py")
    sources = {f"varuna_core/{path.relative_to(root)}": path.read_bytes() for path in paths}
    return {"__main__.py": _MAIN.encode(), **sources}


def _render(name: str, sources: Mapping[str, bytes]) -> bytes:
    """The bundle with what its sources are compiled to, from the cache where it was made before."""
    key = hashlib.sha256(f"{name} {sys.version}".encode())
    for each in sorted(sources):
        key.update(f"{each} {len(sources[each])} ".encode() + sources[each])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(base) / "vjob" / "bundles" / f"{key.hexdigest()}.pyz"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    data = render_bundle({**sources, **compile_sources(name, sources)})
    with contextlib.suppress(OSError):  # a home that is full, or of somebody else
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(kept, data)
        by_age = sorted(kept.parent.glob("*.pyz"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-_MOST_KEPT]:
            old.unlink()
    return data


def compile_sources(archive: str, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """The pyc files of these modules; some have none, which are compiled on the node."""
    found = {}
    for name, source in sources.items():
        if name.endswith(".py") and name != "__main__.py":
            code = compile(source, f"{archive}/{name}", "exec", dont_inherit=True)
            if sys.version_info < (3, 11) and _has_set(code):
                continue  # written in the order of hashes, which differ from process to process
            with contextlib.suppress(ValueError):  # slices, of Python 3.14
                head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source)
                found[f"{name}c"] = head + marshal.dumps(code, _MARSHAL)
    return found


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
