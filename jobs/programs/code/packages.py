"""List the packages installed for the ranks' interpreter, from file names alone (packages.txt).

This takes a few milliseconds: neither pip nor python is started, and metadata is parsed only for
packages whose folder name lacks the version. Packages that are not beside their interpreter, such
as those of a container, are not found.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from varuna_core.records.files import list_names

_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+?)(-py\d[\d.]*)?\.(dist|egg)-info")
_FIELD = re.compile(r"^(Name|Version):[ \t]*(\S+)", re.MULTILINE)
_VERSIONED = re.compile(r"python3\.\d+")
_HEAD_CHARS = 4096
_MOST_CHARS = 1 << 20


def find_site_folders(python: str) -> list[Path]:
    """Return the folders with an interpreter's packages; empty if they cannot be found."""
    if os.path.abspath(python) == os.path.abspath(sys.executable):
        return [Path(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    prefix = Path(os.path.abspath(python)).parent.parent
    is_conda = (prefix / "conda-meta").is_dir()
    if not is_conda and not (prefix / "pyvenv.cfg").is_file():
        return []
    return sorted(prefix.glob("lib/python3*/site-packages"))


def describe_python(python: str) -> str:
    """Describe an interpreter with its version and its torch's, as far as file names tell."""
    folders = find_site_folders(python)
    names = [
        os.path.basename(os.path.realpath(python)),
        *(folder.parent.name for folder in folders),
    ]
    versions = [name.removeprefix("python") for name in names if _VERSIONED.fullmatch(name)]
    known = dict(package.split("==", 1) for package in list_packages(folders))
    torch = [f"torch {known['torch']}"] if "torch" in known else []
    parts = ", ".join([*versions[:1], *torch])
    return f"{python} ({parts})" if parts else python


def list_packages(folders: Iterable[Path]) -> list[str]:
    """Return sorted `name==version`; of several copies of a package, the one Python imports."""
    found: dict[str, str] = {}
    for folder in folders:
        for name, version in _scan(folder):
            found.setdefault(name.lower().replace("_", "-"), f"{name}=={version}")
    return [found[name] for name in sorted(found)]


def _scan(folder: Path) -> Iterator[tuple[str, str]]:
    for name in sorted(list_names(folder)):
        if not name.endswith((".dist-info", ".egg-info")):
            continue
        match = _INFO.fullmatch(name)
        fields = (match["name"], match["version"]) if match else _read_fields(folder / name)
        if fields is not None:
            yield fields


def _read_fields(info: Path) -> tuple[str, str] | None:
    """Return name and version of a package whose folder name has no version."""
    for path in (info / "PKG-INFO", info / "METADATA", info):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                fields = dict(_FIELD.findall(file.read(_HEAD_CHARS)))
        except OSError:
            continue
        if {"Name", "Version"} <= set(fields):
            return fields["Name"], fields["Version"]
    return None


def find_editable(folders: Iterable[Path]) -> list[Path]:
    """Return the source folders of packages installed with `pip install -e`."""
    found: list[Path] = []
    for folder in folders:
        for name in sorted(list_names(folder)):
            if name.endswith((".pth", ".egg-link")):
                lines = _read(folder / name).splitlines()
                found += [Path(line.strip()) for line in lines if line.startswith("/")]
            elif name.startswith("__editable__") and name.endswith("_finder.py"):
                found += parse_finder(_read(folder / name))
    return list(dict.fromkeys(found))


def parse_finder(text: str) -> list[Path]:
    """Return the source folders to which a setuptools finder maps packages."""
    match = re.search(r"^MAPPING\b[^=]*= *(\{.*\})", text, re.MULTILINE)
    try:
        mapping = ast.literal_eval(match[1]) if match else {}
    except (ValueError, SyntaxError):
        return []
    paths = {name: Path(str(path)) for name, path in mapping.items()}
    return [path.parent for name, path in paths.items() if path.name == name]


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARS)
    except OSError:
        return ""


def render_packages(python: str, packages: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in (f"# {python}", *packages))
