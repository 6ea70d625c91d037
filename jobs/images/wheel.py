"""Packs `varuna_core` into a wheel, for images: ranks import it there without the rest of vjob.

Made from the package that runs now, for an installed vjob has no source tree to build from; the
same sources give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import varuna_core

_EPOCH = (1980, 1, 1, 0, 0, 0)
_METADATA = """\
Metadata-Version: 2.1
Name: varuna-core
Version: {version}
Summary: The training runtime of vjob
Requires-Python: >=3.10
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: vjob {version}
Root-Is-Purelib: true
Tag: py3-none-any
"""


def write_wheel(folder: Path) -> Path:
    """The wheel's path in a folder."""
    files = render_wheel(collect_files(), varuna_core.__version__)
    path = folder / f"varuna_core-{varuna_core.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return path


def collect_files() -> dict[str, bytes]:
    """Name in the wheel to content."""
    root = Path(varuna_core.__file__).parent
    return {
        f"varuna_core/{path.relative_to(root)}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def render_wheel(files: dict[str, bytes], version: str) -> dict[str, bytes]:
    """The files with what makes them a wheel (PEP 427)."""
    info = f"varuna_core-{version}.dist-info"
    found = {
        **files,
        f"{info}/METADATA": _METADATA.format(version=version).encode(),
        f"{info}/WHEEL": _WHEEL.format(version=version).encode(),
    }
    record = f"{info}/RECORD"
    rows = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in found.items()]
    return {**found, record: ("\n".join([*rows, f"{record},,"]) + "\n").encode()}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
