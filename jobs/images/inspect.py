"""`vjob container inspect`: what is known of an unpacked image, a folder or an image file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varuna_core.records.formatting import format_size
from vjob.jobs.conf.redact import REDACTED, is_secret
from vjob.jobs.errors import InputError
from vjob.jobs.images.contents import Contents, FolderContents, SquashfsContents
from vjob.jobs.images.image import explain_damage, find_imported, list_imported, read_squashfs
from vjob.jobs.images.store import NodeStore, base_name, is_named

RELEASES = ("usr/lib/os-release", "etc/os-release")
ENVIRONMENT = "etc/environment"
PYTHONS = ("usr/bin", "usr/local/bin", "opt/conda/bin")


@dataclass(frozen=True, kw_only=True)
class Found:
    """An image of this machine."""

    kind: str
    """unpacked, folder or image."""
    path: Path
    facts: Mapping[str, Any]
    """Its name, and what the store knows of it."""

    def open(self) -> Contents:
        """Its files; InputError for an image file that is damaged or is no squashfs file."""
        if self.kind != "image":
            return FolderContents(self.path)
        if damage := explain_damage(self.path):
            raise InputError(
                f"{self.path} {damage}; the files of another kind of image are read as a folder: "
                "unpack it and name that"
            )
        return SquashfsContents(self.path)


def find_image(name: str, store: NodeStore, cache: Path) -> Found:
    """An unpacked image by its name or image, a folder, or an image file by path or reference."""
    for root in store.find_roots():
        if is_named(root, name) and root.name == base_name(root.name) and not os.path.isfile(name):
            return Found(kind="unpacked", path=Path(root.path), facts=asdict(root))
    if os.path.isdir(name):
        path = Path(name).absolute()
        return Found(kind="folder", path=path, facts={"name": path.name, "path": str(path)})
    file = _find_file(name, cache)
    if file is None:
        names = [root.name for root in store.find_roots()]
        names += [item.name for item in list_imported(cache)]
        raise InputError(
            f"{name} is no unpacked image of this node, no folder, no image file, and no reference "
            f"that `vjob container import` has fetched; there are {', '.join(names) or 'none'}"
        )
    return Found(kind="image", path=file, facts={"name": file.name, "path": str(file)})


def inspect(name: str, store: NodeStore, cache: Path) -> dict[str, Any]:
    """Facts of an unpacked image by its name or image, or of an image file by path or reference."""
    image = find_image(name, store, cache)
    found = {"kind": image.kind, **image.facts}
    if image.kind == "image":
        facts = read_squashfs(image.path)
        damage = explain_damage(image.path)
        found.update(bytes=image.path.stat().st_size, damage=damage)
        if facts is None or damage:
            return found
        found.update(compression=facts.compression, entries=facts.num_entries, made=facts.made)
    return {**found, **describe(image.open())}


def _find_file(name: str, cache: Path) -> Path | None:
    for path in (Path(name), cache / name):
        if path.is_file():
            return path
    try:
        return find_imported(name, os.environ)
    except InputError:
        return None


def describe(contents: Contents) -> dict[str, Any]:
    """System, interpreters, and the variables that the image sets."""
    return {
        "system": find_system(contents),
        "pythons": sorted(
            f"/{folder}/{name}"
            for folder in PYTHONS
            for name in contents.list_names(folder)
            if is_python(name)
        ),
        "environment": parse_environment(contents.read(ENVIRONMENT)),
    }


def find_system(contents: Contents) -> str:
    """Name and version of the distribution; empty where it does not say."""
    releases = [match[1] for name in RELEASES if (match := _PRETTY.search(contents.read(name)))]
    return releases[0] if releases else ""


_PRETTY = re.compile(r'^PRETTY_NAME="?([^"\n]*)', re.MULTILINE)


def is_python(name: str) -> bool:
    return re.fullmatch(r"python3(\.\d+)?", name) is not None


def parse_environment(text: str) -> dict[str, str]:
    """`NAME=value` lines; what looks like a secret is hidden."""
    pairs = (line.partition("=") for line in text.splitlines() if re.match(r"[A-Za-z_]\w*=", line))
    return {
        name: REDACTED if is_secret(name) else value.strip().strip("\"'")
        for name, _, value in pairs
    }


def render(found: Mapping[str, Any]) -> str:
    """One line a fact."""
    lines = []
    for key, value in found.items():
        if key == "bytes":
            value = format_size(value)
        elif key in ("used", "made"):
            value = time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
        elif key == "environment":
            lines += [
                f"{key if not i else '':<12} {n}={v}" for i, (n, v) in enumerate(value.items())
            ]
            continue
        elif isinstance(value, list):
            value = " ".join(value)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        if value != "":
            lines.append(f"{key.replace('is_', '').replace('_', ' '):<12} {value}")
    return "\n".join(lines)
