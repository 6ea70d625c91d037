"""Packs the agent into one file that any python3 from 3.8 runs: `agent.pyz`; and the built-in
programs with all of varuna_core into `program.pyz`, so that ranks need torch and nothing of vjob;
and what runs a pickled function, likewise, into `function.pyz`.

The same sources give the same bytes, so a run folder can be compared with another. Stored, not
compressed: a stripped python3 may lack zlib.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import varuna_core

_FOLDERS = ("records", "agent", "morph", "trace")
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


def write_bundle(path: Path) -> None:
    """Write agent.pyz; it lands whole or not at all."""
    _write(path, collect_sources())


def write_program(path: Path) -> None:
    """Write program.pyz, likewise."""
    _write(path, {"__main__.py": _PROGRAM.encode(), **_collect_package()})


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
    _write(path, {**sources, **_collect_package()})


def _collect_package() -> dict[str, bytes]:
    root = Path(varuna_core.__file__).parent
    return {f"varuna_core/{p.relative_to(root)}": p.read_bytes() for p in root.rglob("*.py")}


def _write(path: Path, sources: dict[str, bytes]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as handle:
            handle.write(render_bundle(sources))
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


def render_bundle(sources: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    memory.write(_SHEBANG)
    with zipfile.ZipFile(memory, "a", zipfile.ZIP_STORED) as archive:
        for name in sorted(sources):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, sources[name])
    return memory.getvalue()
